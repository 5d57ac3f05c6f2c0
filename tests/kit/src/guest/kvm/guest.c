/* A guest that drives one virtio block device, or the first disk of a SCSI device, from user mode
 * by polling its rings, and verifies each answer. It reports its progress on the serial port:
 * `round N` after each round of requests, `reset at round N` after a reset of the device,
 * `failed: ...` for the first fault. It reserves a SCSI disk and switches its write cache off, and
 * reports what it finds of that in each round, and unit attentions when they come.
 *
 * Each block of the disk has its number and a generation in all its words, which are 0 on a new
 * disk. A round reads and writes at random, flushes, and reads all blocks. */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

enum {
    BLOCK_BYTES = 4096,
    BLOCKS = 4096,
    RUN_MAX = 16,
    DEPTH = 16,
    QUEUES = 2,
    QUEUE_SIZE = 64,
    /* No power of two: chains of three descriptors straddle the seam in turn. */
    PACKED_SIZE = 61,
    REQUESTS = IS_MOVED ? 300 : 1500,
};

/* Requests of virtio-blk. */
enum { IN = 0, OUT = 1, FLUSH = 4, GET_ID = 8, UNKNOWN = 99 };
/* Further commands of SCSI: PERSISTENT RESERVE OUT with REGISTER and RESERVE, MODE SELECT,
 * PERSISTENT RESERVE IN with READ RESERVATION, and MODE SENSE. */
enum { REGISTER = 100, RESERVE, SELECT, READ_RESERVATION, SENSE, CONTROL_BYTES = 24, KEY = 7 };

/* The serial port. */

static void out8(u16 port, u8 value) { asm volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static void out16(u16 port, u16 value) { asm volatile("outw %0, %1" ::"a"(value), "Nd"(port)); }
static void out32(u16 port, u32 value) { asm volatile("outl %0, %1" ::"a"(value), "Nd"(port)); }

static u8 in8(u16 port) {
    u8 value;
    asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static u32 in32(u16 port) {
    u32 value;
    asm volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static void say(const char *text) {
    for (; *text; text++) {
        while (!(in8(0x3fd) & 0x20))
            ;
        out8(0x3f8, *text);
    }
}

static void say_number(const char *text, u64 number) {
    char digits[21];
    int at = 20;
    digits[at] = 0;
    do {
        digits[--at] = '0' + number % 10;
        number /= 10;
    } while (number);
    say(text);
    say(digits + at);
}

static void fail(const char *what, u64 number) {
    say("failed: ");
    say_number(what, number);
    say("\n");
    for (;;)
        asm volatile("pause");
}

/* The device, behind one of two transports. */

static u8 *mmio;                           /* virtio-mmio, or null */
static u8 *common, *notify, *configuration; /* virtio-pci */
static u32 notify_multiplier;

static u32 get(u8 *at) { return *(volatile u32 *)at; }
static void put(u8 *at, u32 value) { *(volatile u32 *)at = value; }
static void put64(u8 *at, u64 value) {
    put(at, value);
    put(at + 4, value >> 32);
}

static void set_status(u8 status) {
    if (mmio)
        put(mmio + 0x70, status);
    else
        *(volatile u8 *)(common + 20) = status;
}

static u8 get_status(void) {
    return mmio ? get(mmio + 0x70) : *(volatile u8 *)(common + 20);
}

static u32 get_features(u32 half) {
    if (mmio) {
        put(mmio + 0x14, half);
        return get(mmio + 0x10);
    }
    put(common, half);
    return get(common + 4);
}

static void set_features(u32 half, u32 value) {
    u8 *at = mmio ? mmio + 0x24 : common + 8;
    put(at, half);
    put(mmio ? mmio + 0x20 : common + 12, value);
}

/* The virtqueue of the device that a queue of this guest is. A SCSI device has two of its own. */
static int is_scsi;
static u32 place_of(u32 index) { return is_scsi ? index + 2 : index; }

/* The rings. */

struct desc {
    u64 addr;
    u32 len;
    u16 flags, next;
};

struct queue {
    struct desc descs[QUEUE_SIZE];
    struct {
        u16 flags, idx, ring[QUEUE_SIZE], used_event;
    } avail __attribute__((aligned(4096)));
    struct {
        u16 flags, idx;
        struct {
            u32 id, len;
        } ring[QUEUE_SIZE];
        u16 avail_event;
    } used __attribute__((aligned(4096)));
} __attribute__((aligned(4096)));

/* virtio 1.3, 2.8: a packed ring. */
enum { F_NEXT = 1, F_WRITE = 2, F_AVAIL = 1 << 7, F_USED = 1 << 15 };

struct events {
    u16 place, flags;
};

struct packed_queue {
    struct {
        u64 addr;
        u32 len;
        u16 id, flags;
    } descs[PACKED_SIZE] __attribute__((aligned(4096)));
    struct events driver __attribute__((aligned(4096)));
    struct events device __attribute__((aligned(4096)));
} __attribute__((aligned(4096)));

/* A descriptor of a packed ring, and the wrap counter there. */
struct place {
    u16 at, wrap;
};

struct slot {
    union {
        struct {
            u32 type, reserved;
            u64 sector;
        } header;
        struct {
            u8 lun[8], tag[8], attributes[3], command[32];
        } scsi;
    };
    struct {
        u32 sense_bytes, residual;
        u16 qualifier;
        u8 status, response, sense[96];
    } answer;
    u8 status;
    u8 busy;
    u16 descs;
    u32 type, block, blocks, bytes;
    u8 data[RUN_MAX * BLOCK_BYTES] __attribute__((aligned(4096)));
};

static struct queue queues[QUEUES];
static struct packed_queue packed_queues[QUEUES];
static struct place next_avail[QUEUES], next_used[QUEUES];
static struct slot slots[QUEUES][DEPTH];
static u16 seen[QUEUES];
static u8 *kicks[QUEUES];
static u32 queue_count;
static u32 generations[BLOCKS];
static u8 taken[BLOCKS];
static u64 random_state = 88172645463325252;

static u64 random(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void clear(void *at, u64 bytes) {
    for (u64 i = 0; i < bytes / 8; i++)
        ((volatile u64 *)at)[i] = 0;
}

static void set_up_queue(u32 index) {
    struct queue *queue = &queues[index];
    struct packed_queue *packed = &packed_queues[index];
    u64 desc = (u64)queue->descs, avail = (u64)&queue->avail, used = (u64)&queue->used;
    u16 size = QUEUE_SIZE;
    clear(queue, sizeof *queue);
    clear(packed, sizeof *packed);
    seen[index] = 0;
    /* The driver needs no calls. */
    queue->avail.flags = 1;
    if (IS_PACKED) {
        packed->driver.flags = 1;
        next_avail[index] = next_used[index] = (struct place){0, 1};
        desc = (u64)packed->descs;
        avail = (u64)&packed->driver;
        used = (u64)&packed->device;
        size = PACKED_SIZE;
    }
    if (mmio) {
        put(mmio + 0x30, index);
        if (get(mmio + 0x34) < size)
            fail("entries of a queue: ", get(mmio + 0x34));
        put(mmio + 0x38, size);
        put64(mmio + 0x80, desc);
        put64(mmio + 0x90, avail);
        put64(mmio + 0xa0, used);
        put(mmio + 0x44, 1);
        kicks[index] = mmio + 0x50;
        return;
    }
    *(volatile u16 *)(common + 22) = place_of(index);
    *(volatile u16 *)(common + 24) = size;
    put64(common + 32, desc);
    put64(common + 40, avail);
    put64(common + 48, used);
    kicks[index] = notify + *(volatile u16 *)(common + 30) * notify_multiplier;
    *(volatile u16 *)(common + 28) = 1;
}

static void set_up_device(void) {
    set_status(0);
    while (get_status() != 0)
        ;
    set_status(1);
    set_status(3);
    if (!(get_features(1) & 1))
        fail("not a device of version 1", 0);
    u32 features = get_features(0) & (1 << 9 | 1 << 12); /* FLUSH and MQ */
    set_features(0, features);
    if (IS_PACKED && !(get_features(1) & 4))
        fail("the device offers no packed rings", 0);
    set_features(1, IS_PACKED ? 5 : 1); /* VERSION_1 and RING_PACKED */
    set_status(11);
    if (!(get_status() & 8))
        fail("the device refuses the features", features);
    u8 *config = mmio ? mmio + 0x100 : configuration;
    if (is_scsi) {
        queue_count = get(config) < QUEUES ? 1 : QUEUES;
        for (u32 index = 0; index < queue_count; index++)
            set_up_queue(index);
        set_status(15);
        return;
    }
    if (get(config) < BLOCKS * (BLOCK_BYTES / 512) && get(config + 4) == 0)
        fail("sectors of the disk: ", get(config));
    queue_count = 1;
    if (features & 1 << 12 && *(volatile u16 *)(config + 34) >= QUEUES)
        queue_count = QUEUES;
    for (u32 index = 0; index < queue_count; index++)
        set_up_queue(index);
    set_status(15);
}

static void kick(u32 index) {
    if (mmio)
        put(kicks[index], index);
    else
        *(volatile u16 *)kicks[index] = place_of(index);
}

static void step(struct place *place, u16 descs) {
    place->at += descs;
    if (place->at >= PACKED_SIZE) {
        place->at -= PACKED_SIZE;
        place->wrap ^= 1;
    }
}

/* Makes a request of these buffers available in a packed ring: the flags of the first descriptor
 * come last, because they make the whole chain available. */
static void offer_packed(u32 index, u32 place, const struct desc *buffers, u32 count) {
    struct packed_queue *queue = &packed_queues[index];
    struct place *next = &next_avail[index];
    u16 first = next->at, first_flags = 0;
    slots[index][place].descs = count;
    for (u32 part = 0; part < count; part++) {
        u16 at = next->at;
        u16 word = buffers[part].flags | (next->wrap ? F_AVAIL : F_USED);
        queue->descs[at].addr = buffers[part].addr;
        queue->descs[at].len = buffers[part].len;
        queue->descs[at].id = place;
        if (part == 0)
            first_flags = word;
        else
            queue->descs[at].flags = word;
        step(next, 1);
    }
    asm volatile("mfence" ::: "memory");
    *(volatile u16 *)&queue->descs[first].flags = first_flags;
    asm volatile("mfence" ::: "memory");
    if (*(volatile u16 *)&queue->device.flags != 1)
        kick(index);
}

/* The first bytes of the CDB of each of these commands. */
static const u8 control_commands[][10] = {
    {0x5f, 0, 0, 0, 0, 0, 0, 0, CONTROL_BYTES}, {0x5f, 1, 5, 0, 0, 0, 0, 0, CONTROL_BYTES},
    {0x15, 0x10, 0, 0, CONTROL_BYTES},          {0x5e, 1, 0, 0, 0, 0, 0, 0, CONTROL_BYTES},
    {0x1a, 8, 8, 0, CONTROL_BYTES},
};

/* Describes the slot's request as one of virtio-blk. Returns the number of buffers. */
static u32 describe_request(struct slot *slot, struct desc *buffers, u32 data_bytes) {
    u32 count = 0;
    slot->header.type = slot->type;
    slot->header.sector = (u64)slot->block * (BLOCK_BYTES / 512);
    slot->status = 0xff;
    buffers[count++] = (struct desc){(u64)&slot->header, 16, 0, 0};
    if (data_bytes)
        buffers[count++] =
            (struct desc){(u64)slot->data, data_bytes, slot->type == OUT ? 0 : F_WRITE, 0};
    buffers[count++] = (struct desc){(u64)&slot->status, 1, F_WRITE, 0};
    return count;
}

/* Describes the slot's request as a SCSI command. Returns the number of buffers. */
static u32 describe_command(struct slot *slot, struct desc *buffers, u32 data_bytes) {
    int to_device = slot->type == OUT || (slot->type >= REGISTER && slot->type <= SELECT);
    static const u8 lun[8] = {1, 0, 0x40};
    u8 *command = slot->scsi.command;
    clear(&slot->header, sizeof slot->scsi / 8 * 8);
    for (u32 i = 0; i < 8; i++)
        slot->scsi.lun[i] = lun[i];
    for (u32 i = 0; i < sizeof slot->scsi.command; i++)
        command[i] = 0;
    command[0] = slot->type == IN    ? 0x88
                 : slot->type == OUT ? 0x8a
                 : slot->type == FLUSH ? 0x91
                 : slot->type == GET_ID ? 0x12
                                        : 0xff;
    if (slot->type == GET_ID)
        command[4] = data_bytes;
    if (slot->type >= REGISTER)
        for (u32 i = 0; i < sizeof control_commands[0]; i++)
            command[i] = control_commands[slot->type - REGISTER][i];
    if (slot->type == IN || slot->type == OUT) {
        u32 sector = slot->block * (BLOCK_BYTES / 512), sectors = data_bytes / 512;
        for (u32 i = 0; i < 4; i++) {
            command[6 + i] = sector >> (24 - 8 * i);
            command[10 + i] = sectors >> (24 - 8 * i);
        }
    }
    slot->answer.status = slot->answer.response = 0xff;
    u32 count = 0;
    struct desc data = {(u64)slot->data, data_bytes, to_device ? 0 : F_WRITE, 0};
    buffers[count++] = (struct desc){(u64)&slot->scsi, sizeof slot->scsi, 0, 0};
    if (data_bytes && to_device)
        buffers[count++] = data;
    buffers[count++] = (struct desc){(u64)&slot->answer, sizeof slot->answer, F_WRITE, 0};
    if (data_bytes && !to_device)
        buffers[count++] = data;
    return count;
}

/* Makes the slot's request available: in a split ring in the slot's descriptors. */
static void offer(u32 index, u32 place, u32 data_bytes) {
    struct queue *queue = &queues[index];
    struct slot *slot = &slots[index][place];
    struct desc buffers[3];
    slot->busy = 1;
    slot->bytes = data_bytes;
    u32 count = is_scsi ? describe_command(slot, buffers, data_bytes)
                        : describe_request(slot, buffers, data_bytes);
    for (u32 i = 0; i + 1 < count; i++)
        buffers[i].flags |= F_NEXT;
    if (IS_PACKED) {
        offer_packed(index, place, buffers, count);
        return;
    }
    u16 head = 3 * place;
    for (u32 i = 0; i < count; i++) {
        buffers[i].next = head + i + 1;
        queue->descs[head + i] = buffers[i];
    }
    u16 idx = queue->avail.idx;
    queue->avail.ring[idx % QUEUE_SIZE] = head;
    asm volatile("mfence" ::: "memory");
    *(volatile u16 *)&queue->avail.idx = idx + 1;
    asm volatile("mfence" ::: "memory");
    if (!(*(volatile u16 *)&queue->used.flags & 1))
        kick(index);
}

static u64 word_of(u32 block) {
    return generations[block] == 0 ? 0 : (u64)block << 32 | generations[block];
}

/* Takes the place of the next answered slot. Returns 0 if there is none yet. */
static int take_place(u32 index, u32 *place) {
    if (IS_PACKED) {
        struct packed_queue *queue = &packed_queues[index];
        struct place *next = &next_used[index];
        u16 lap = next->wrap ? F_AVAIL | F_USED : 0;
        if ((*(volatile u16 *)&queue->descs[next->at].flags & (F_AVAIL | F_USED)) != lap)
            return 0;
        asm volatile("" ::: "memory");
        *place = queue->descs[next->at].id;
        if (*place < DEPTH)
            step(next, slots[index][*place].descs);
        return 1;
    }
    struct queue *queue = &queues[index];
    if (seen[index] == *(volatile u16 *)&queue->used.idx)
        return 0;
    asm volatile("" ::: "memory");
    u32 id = queue->used.ring[seen[index]++ % QUEUE_SIZE].id;
    *place = id % 3 ? ~0u : id / 3;
    return 1;
}

/* Returns true for a unit attention: the device reports a change, and has not carried out the
 * command. */
static int has_attention(struct slot *slot) {
    return is_scsi && slot->answer.response == 0 && slot->answer.status == 2 &&
           (slot->answer.sense[2] & 15) == 6;
}

/* The status of an answer: 0 for success, 2 for a command that the device does not know. */
static u8 status_of(struct slot *slot) {
    if (!is_scsi)
        return slot->status;
    return slot->answer.response ? 0x10 + slot->answer.response : slot->answer.status;
}

/* Takes and checks all available answers. Returns their number. */
static u32 take_answers(u32 index) {
    u32 count = 0, place;
    while (take_place(index, &place)) {
        if (place >= DEPTH || !slots[index][place].busy)
            fail("an answer to a request that was not made: ", place);
        struct slot *slot = &slots[index][place];
        if (has_attention(slot)) {
            say_number("attention ", slot->answer.sense[12] << 8 | slot->answer.sense[13]);
            say("\n");
            offer(index, place, slot->bytes);
            continue;
        }
        if (status_of(slot) != (slot->type == UNKNOWN ? 2 : 0))
            fail("status: ", status_of(slot));
        if (slot->type == IN || slot->type == OUT) {
            u64 *words = (u64 *)slot->data;
            for (u32 i = 0; i < slot->blocks * (BLOCK_BYTES / 8); i++) {
                u32 block = slot->block + i / (BLOCK_BYTES / 8);
                if (words[i] != word_of(block))
                    fail("block with wrong data: ", block);
            }
            for (u32 i = 0; i < slot->blocks; i++)
                taken[slot->block + i] = 0;
        }
        slot->busy = 0;
        count++;
    }
    return count;
}

/* Waits until a slot of the queue is free. */
static u32 free_slot(u32 index) {
    for (;;) {
        for (u32 place = 0; place < DEPTH; place++)
            if (!slots[index][place].busy)
                return place;
        take_answers(index);
    }
}

static void settle(void) {
    for (u32 index = 0; index < queue_count; index++)
        for (u32 place = 0; place < DEPTH; place++)
            while (slots[index][place].busy)
                take_answers(index);
}

static void begin(u32 index, u32 type, u32 block, u32 blocks) {
    u32 place = free_slot(index);
    struct slot *slot = &slots[index][place];
    slot->type = type;
    slot->block = block;
    slot->blocks = blocks;
    u64 *words = (u64 *)slot->data;
    for (u32 i = 0; i < blocks; i++) {
        taken[block + i] = 1;
        if (type == OUT)
            generations[block + i]++;
        for (u32 word = 0; word < BLOCK_BYTES / 8; word++)
            words[i * (BLOCK_BYTES / 8) + word] = type == OUT ? word_of(block + i) : ~0ul;
    }
    offer(index, place, type == GET_ID ? 20 : blocks * BLOCK_BYTES);
}

/* Carries out one of the further commands of SCSI, with `at` of its data set to `value`. Returns the
 * data. */
static u8 *control(u32 type, u32 at, u8 value) {
    u32 place = free_slot(0);
    struct slot *slot = &slots[0][place];
    slot->type = type;
    clear(slot->data, CONTROL_BYTES);
    slot->data[at] = value;
    if (type == SELECT)
        slot->data[5] = 18;
    offer(0, place, CONTROL_BYTES);
    settle();
    return slot->data;
}

/* Reserves the disk, and switches its write cache off. */
static void set_up_unit(void) {
    control(REGISTER, 15, KEY);
    control(RESERVE, 7, KEY);
    control(SELECT, 4, 8);
}

static void report_unit(void) {
    say_number("reservation ", control(READ_RESERVATION, 0, 0)[15]);
    say_number(" write cache ", control(SENSE, 0, 0)[6] >> 2 & 1);
    say("\n");
}

static int is_free(u32 block, u32 blocks) {
    for (u32 i = 0; i < blocks; i++)
        if (taken[block + i])
            return 0;
    return 1;
}

static void run_round(void) {
    for (u32 i = 0; i < REQUESTS; i++) {
        u32 index = i % queue_count;
        u32 blocks = 1 + random() % RUN_MAX;
        u32 block = random() % (BLOCKS - blocks + 1);
        while (!is_free(block, blocks))
            for (u32 queue = 0; queue < queue_count; queue++)
                take_answers(queue);
        begin(index, random() % 2 ? OUT : IN, block, blocks);
        if (i % 256 == 255) {
            begin(index, FLUSH, 0, 0);
            begin(index, GET_ID, 0, 0);
            begin(index, UNKNOWN, 0, 0);
        }
    }
    settle();
    begin(0, FLUSH, 0, 0);
    settle();
    for (u32 block = 0; block < BLOCKS; block += RUN_MAX)
        begin(block / RUN_MAX % queue_count, IN, block, RUN_MAX);
    settle();
}

/* The search for the device. */

extern u64 page_map[512], directories[512];
static u64 more_directories[4][512] __attribute__((aligned(4096)));
static u64 more_pages[8][512] __attribute__((aligned(4096)));
static u32 directories_used, pages_used;

/* Identity-maps the GiB around an address, unless it is mapped. */
static void map(u64 addr) {
    u64 *top = &page_map[addr >> 39 & 511];
    if (!*top)
        *top = (u64)more_directories[directories_used++] + 7;
    u64 *directory = (u64 *)(*top & ~0xffful) + (addr >> 30 & 511);
    if (*directory)
        return;
    u64 *pages = more_pages[pages_used++];
    for (u64 i = 0; i < 512; i++)
        pages[i] = (addr & ~0x3ffffffful) + (i << 21) + 0x87;
    *(volatile u64 *)directory = (u64)pages + 7;
}

static u32 read_pci(u32 device, u32 at) {
    out32(0xcf8, 0x80000000 | device << 11 | (at & 0xfc));
    return in32(0xcfc);
}

static u8 *bar_of(u32 device, u32 bar) {
    u32 low = read_pci(device, 0x10 + 4 * bar);
    u64 addr = low & ~15u;
    if ((low & 6) == 4)
        addr |= (u64)read_pci(device, 0x14 + 4 * bar) << 32;
    if (addr == 0) {
        /* After hot-plug no firmware has assigned an address. */
        addr = 0xe0000000 + device * 0x1000000 + bar * 0x100000;
        out32(0xcf8, 0x80000000 | device << 11 | (0x10 + 4 * bar));
        out32(0xcfc, addr);
    }
    map(addr);
    return (u8 *)addr;
}

/* virtio 1.3, 4.1.4: vendor-specific capabilities. */
static int find_on_pci(void) {
    for (u32 device = 0; device < 32; device++) {
        u32 id = read_pci(device, 0);
        if (id != 0x10421af4 && id != 0x10481af4)
            continue;
        is_scsi = id == 0x10481af4;
        /* Enable memory accesses and bus mastering. */
        u32 command = read_pci(device, 4);
        out32(0xcf8, 0x80000000 | device << 11 | 4);
        out16(0xcfc, command | 6);
        u32 at = read_pci(device, 0x34) & 0xfc;
        for (; at; at = read_pci(device, at) >> 8 & 0xfc) {
            u32 head = read_pci(device, at);
            if ((head & 0xff) != 9)
                continue;
            u32 type = head >> 24;
            if (type != 1 && type != 2 && type != 4)
                continue;
            u8 *place = bar_of(device, read_pci(device, at + 4) & 0xff);
            place += read_pci(device, at + 8);
            if (type == 1)
                common = place;
            if (type == 2) {
                notify = place;
                notify_multiplier = read_pci(device, at + 16);
            }
            if (type == 4)
                configuration = place;
        }
        return common && notify && configuration;
    }
    return 0;
}

/* The number after "0x". */
static u64 hexadecimal(const char *text) {
    u64 number = 0;
    for (;; text++) {
        if (*text >= '0' && *text <= '9')
            number = number << 4 | (*text - '0');
        else if (*text >= 'a' && *text <= 'f')
            number = number << 4 | (*text - 'a' + 10);
        else
            return number;
    }
}

/* The command line names the devices as in virtio_mmio.device=4K@0xd0000000:5. */
static int find_on_mmio(const char *words) {
    for (; *words; words++) {
        if (words[0] != '@' || words[1] != '0' || words[2] != 'x')
            continue;
        u8 *at = (u8 *)hexadecimal(words + 3);
        if (get(at) == 0x74726976 && get(at + 4) == 2 && get(at + 8) == 2) {
            mmio = at;
            return 1;
        }
    }
    return 0;
}

/* The start of the loader's data (PVH). */
struct start_info {
    u32 magic, version, flags, modules;
    u64 module_list, command_line;
};

/* Ejects the disk if the host asks for it, at the ports of QEMU's `pc` machine: one reads a bit for
 * each device to eject, the second confirms. */
static int is_ejected(void) {
    out32(0xae10, 0);
    u32 devices = in32(0xae04);
    if (!devices)
        return 0;
    set_status(0);
    common = notify = configuration = 0;
    out32(0xae08, devices);
    return 1;
}

/* Uses a disk whenever there is one. */
static void run_plugged(void) {
    for (u64 round = 1;;) {
        while (!find_on_pci())
            ;
        set_up_device();
        say_number("plugged before round ", round);
        say("\n");
        while (!is_ejected()) {
            run_round();
            say_number("round ", round++);
            say("\n");
        }
        say_number("ejected before round ", round);
        say("\n");
    }
}

void run(const struct start_info *info) {
    say("guest\n");
    if (IS_PLUGGED)
        run_plugged();
    if (!find_on_pci() && !find_on_mmio((const char *)info->command_line))
        fail("there is no device", 0);
    say(mmio ? "transport mmio\n" : "transport pci\n");
    for (u64 round = 1;; round++) {
        if (round == 1 || (ROUNDS_OF_RESET && round % ROUNDS_OF_RESET == 1)) {
            set_up_device();
            if (is_scsi)
                set_up_unit();
            say_number("reset at round ", round);
            say_number(" queues ", queue_count);
            say(IS_PACKED ? " packed\n" : "\n");
        }
        run_round();
        if (is_scsi)
            report_unit();
        say_number("round ", round);
        say("\n");
    }
}
