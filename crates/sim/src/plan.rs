//! Parameters of a run: numbers drawn from its seed, each of which can be set by hand.

mod random;
mod text;

use blockio::config::ByteLimits;
use iomem::fits;
use virtqueue::RingLayout;

use crate::rng::{Rng, some};

/// The first request queue of virtio-scsi, behind the control queue and the event queue.
pub(crate) const FIRST_REQUEST_QUEUE: usize = 2;

/// The most bytes that a disk converts at once. Requests of a run have a few pieces.
pub(crate) const PIECE_BYTES: usize = 4 << 10;

macro_rules! knobs {
    ($($(#[doc = $doc:literal])+ $name:ident: $least:literal,)+) => {
        /// The numbers of a run. Zero is off; the description names the numbers that are per mille.
        #[derive(Debug, Clone, PartialEq, Eq, Default)]
        pub(crate) struct Plan {
            pub(crate) seed: u64,
            $($(#[doc = $doc])+ pub(crate) $name: u64,)+
        }

        /// Names, each with its least sensible value, which is the aim of shrinking.
        pub(crate) const KNOBS: &[(&str, u64)] = &[$((stringify!($name), $least),)+];

        impl Plan {
            pub(crate) fn knob(&mut self, name: &str) -> Option<&mut u64> {
                match name {
                    $(stringify!($name) => Some(&mut self.$name),)+
                    _ => None,
                }
            }
        }
    };
}

knobs! {
    /// Chooses another order of events for the same plan.
    schedule: 0,
    /// Requests of all guests together.
    requests: 1,
    /// Devices, at most 5, each with a guest, a disk, and IoThreads that all devices may share.
    devices: 1,
    /// Devices are virtio-scsi, and have a unit on each of the disks.
    scsi: 0,
    /// Disks of virtio-scsi devices, at most 3.
    disks: 0,
    /// Devices differ in their disks, their queues, and the requests of their guests.
    mixed: 0,
    /// The number of devices, counted from the last, with disks without faults.
    sound_disks: 0,
    /// The first device's disk hangs until the healthy ones are done, the second's is slow, the
    /// third's is full, and all later ones are healthy.
    troubled: 0,
    /// The disk answers nothing until the healthy ones are done.
    hangs: 0,
    /// The factor by which ops of the disk take longer.
    slow: 0,
    /// Queues of a device, at most 4.
    queues: 1,
    /// The avail and used idx that the rings start with: near 65535 they wrap.
    first_index: 0,
    /// Entries of a queue as a power of two, 1 to 5.
    queue_log2: 1,
    /// Rings are packed.
    packed: 0,
    /// Entries of a packed ring beyond that power of two.
    more_entries: 0,
    /// IoThreads, at most 3.
    io_threads: 1,
    /// The most ops in the kernel, for each IoThread.
    depth: 1,
    /// The engine of the first device: 0 is `aio`, 1 `threads`, 2 `io_uring`.
    engine: 0,
    /// Each device has the next engine; otherwise all have the same.
    mix_engines: 0,
    /// io_uring shows completions only when the kernel is entered.
    defers: 0,
    /// io_uring has a submission thread.
    sqpoll: 0,
    /// Submission entries of a ring with a submission thread; zero is the engine's choice.
    sq_entries: 0,
    /// io_uring cannot discard.
    no_uring_cmd: 0,
    /// Rate at which io_uring ends a multishot poll, per mille.
    poll_ends: 0,
    /// Guest memory is registered with io_uring.
    fixed_buffers: 0,
    /// IoThreads run their own loop; otherwise the loop of an embedding program runs them.
    own_loop: 0,
    /// The most microseconds of busy-polling of an IoThread in its own loop.
    poll_us: 0,
    /// The CPU time in percent that busy-polling may add to an op; zero sets no bound.
    poll_percent: 0,
    /// No harvest right after a submit.
    no_harvest_on_submit: 0,
    /// KiB of memory for misaligned requests, for each IoThread, at least 8.
    bounce_kib: 0,
    /// The most KiB of an op; zero is the product's number.
    op_kib: 0,
    /// The most KiB of ops in a round; zero is the product's number.
    round_kib: 0,
    /// The most KiB of a disk's ops in the kernel; zero is the product's number.
    disk_kib: 0,
    /// Nanoseconds for which each byte of an op holds up the IoThread that submits it.
    byte_ns: 0,
    /// Disks convert all data, as an encrypted disk does, and hold up the loop for that time.
    converts: 0,
    /// Pacing has the numbers of the product; otherwise smaller ones, which short runs reach.
    real_pacing: 0,
    /// The most ops of one submit; zero is no limit.
    submit_max: 0,
    /// Completions are taken by `io_getevents`.
    getevents: 0,
    /// Each answer has its own notify.
    no_notify_batch: 0,
    /// Chains of each run; zero lets them adapt.
    run_max: 0,
    /// Linux AIO's ring has an unknown header.
    ring_unknown: 0,
    /// Places of the ring beyond the depth.
    ring_slack: 0,
    /// Linux AIO has no fdsync.
    no_fdsync: 0,
    /// Size of the disk in logical blocks.
    blocks: 4,
    /// Logical blocks of 4096 bytes, not 512.
    block_4k: 0,
    /// Direct I/O, with its alignment.
    direct: 0,
    /// Direct I/O takes memory at multiples of 4 bytes, not 512.
    small_align: 0,
    /// A block device, not a file.
    block_device: 0,
    /// The disk refuses writes.
    read_only: 0,
    /// Sectors between the end of the file and the end of the disk.
    cut_sectors: 0,
    /// No hole can be punched, no block discarded.
    no_punch: 0,
    /// No range can be zeroed.
    no_zero_range: 0,
    /// The kernel does not know `RWF_DSYNC`.
    no_dsync: 0,
    /// Event idx is negotiated.
    event_idx: 0,
    /// Indirect descriptors are negotiated.
    indirect: 0,
    /// The device is set up without a write cache.
    no_write_cache: 0,
    /// The driver does not negotiate flushes.
    no_flush: 0,
    /// The driver does not negotiate `CONFIG_WCE`.
    no_wce: 0,
    /// Queues have no kick.
    no_kick: 0,
    /// Queues have no call.
    no_call: 0,
    /// Rate at which the guest checks the used ring without a call, per mille.
    polls: 0,
    /// Extra requests with which the first device's guest keeps its first queue busy.
    rush: 0,
    /// The most chains made available at once.
    batch: 1,
    /// Weight of reads.
    reads: 0,
    /// Weight of writes.
    writes: 0,
    /// Weight of flushes.
    flushes: 0,
    /// Weight of discards.
    discards: 0,
    /// Weight of write-zeroes requests.
    zeroes: 0,
    /// Weight of requests for the id, or of TEST UNIT READY.
    ids: 0,
    /// Weight of COMPARE AND WRITE.
    swaps: 0,
    /// Weight of MODE SELECT, which switches the write cache.
    selects: 0,
    /// PERSISTENT RESERVE OUT, of commands per mille.
    reserves: 0,
    /// Task management functions of a guest.
    functions: 0,
    /// Buffers for events that a guest makes available.
    events: 0,
    /// The driver does not negotiate HOTPLUG and CHANGE.
    no_events: 0,
    /// Weight of bad requests.
    bads: 0,
    /// The most logical blocks of a request.
    request_blocks: 1,
    /// The most descriptors of a chain, in each direction.
    pieces: 1,
    /// Rate of requests with aligned data, per mille.
    aligned: 0,
    /// Rate of requests with data in many ranges, all aligned except one or two, per mille.
    odd_ranges: 0,
    /// KiB of each region of guest memory; zero is one region.
    region_kib: 0,
    /// Requests that overlap are never out at the same time.
    no_overlap: 0,
    /// Reads that move less than asked, per mille.
    short_reads: 0,
    /// Writes that move less than asked, per mille.
    short_writes: 0,
    /// Short transfers end anywhere, not at a sector.
    odd_shorts: 0,
    /// Ops that fail with EIO, per mille.
    eio: 0,
    /// Flushes that fail with EIO, per mille; the data that they were to make stable is lost.
    flush_eio: 0,
    /// Writes that fail with ENOSPC, per mille.
    enospc: 0,
    /// Ops that fail with EINTR, per mille.
    eintr: 0,
    /// Ops that fail with EAGAIN, per mille.
    eagain: 0,
    /// Ops after which their disk answers EAGAIN for ever, per mille.
    stuck: 0,
    /// Entries that io_uring takes, and rejects with a completion, per mille.
    entry_reject: 0,
    /// io_uring ends a submit at an entry that it rejects.
    no_submit_all: 0,
    /// Submits that fail with EAGAIN, per mille.
    submit_eagain: 0,
    /// Submits that fail with EAGAIN many times in a row, per mille.
    submit_eagain_burst: 0,
    /// Submits that take a part, per mille.
    submit_partial: 0,
    /// Submits that reject the first op, per mille.
    submit_reject: 0,
    /// Submits that fail with EINTR, per mille.
    submit_eintr: 0,
    /// Ops at which the device hangs for a while, per mille.
    hang: 0,
    /// Ops that are complete before their submit returns, per mille.
    sync: 0,
    /// Eventfds that are written a while after the completion is visible, per mille.
    late_signal: 0,
    /// Ops that are carried out in several pieces, per mille.
    tear: 0,
    /// The most microseconds of an op.
    latency_us: 1,
    /// Rate at which guests, events and control act within a turn, per mille.
    preempt: 0,
    /// vhost-user controls the device: 1 with answers to all messages, 2 without, 3 the plainest.
    session: 0,
    /// Number of times that a queue is stopped and started.
    stops: 0,
    /// Number of times that the memory map is replaced.
    remaps: 0,
    /// Number of times that the front-end goes and comes back.
    resets: 0,
    /// Number of times that a call eventfd is replaced.
    set_calls: 0,
    /// Number of times that the write cache is switched.
    writebacks: 0,
    /// Number of migrations that begin.
    migrations: 0,
    /// Number of times that the log of a migration is replaced.
    log_changes: 0,
    /// Rate at which a migration fails, before its switch or after it, per mille.
    cancels: 0,
    /// Rate at which marks are taken from the log, at each store of the device, per mille.
    log_takes: 0,
    /// Number of times that a unit is removed or added.
    hotplugs: 0,
    /// Number of times that a disk of virtio-scsi devices gets another size.
    resizes: 0,
    /// Number of times that the machine loses power.
    crashes: 0,
    /// Number of times that the IoThreads end with requests out.
    kills: 0,
    /// Queues have an inflight region.
    inflight: 0,
    /// Requests in a second that a disk may serve; 0 is any number.
    limits: 0,
    /// Requests of virtio-blk are answered in order, where there is no region.
    in_order: 0,
    /// Number of times that the daemon is killed, and a new daemon continues with its guests.
    deaths: 0,
}

impl Plan {
    /// The plan of a seed. Each kind of trouble is off in many plans, so that other kinds show.
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed, 1);
        let mut plan = Self { seed, ..Self::default() };
        plan.draw_stack(&mut rng);
        plan.draw_disk(&mut rng);
        plan.draw_guest(&mut rng);
        plan.draw_faults(&mut rng);
        plan.draw_control(&mut rng);
        plan.draw_rush(&mut rng);
        plan.draw_trouble(&mut rng);
        plan.session = some(&mut Rng::new(seed, 6), 250, &[1, 1, 2, 3]);
        plan.draw_scale(&mut Rng::new(seed, 7));
        plan.draw_mix(&mut Rng::new(seed, 8));
        plan.draw_scsi(&mut Rng::new(seed, 9));
        plan.draw_deaths(&mut Rng::new(seed, 10));
        plan.draw_limits(&mut Rng::new(seed, 11));
        plan.draw_bytes(&mut Rng::new(seed, 12));
        plan.draw_layout(&mut Rng::new(seed, 13));
        plan.draw_migrations(&mut Rng::new(seed, 14));
        plan.without_conflicts()
    }

    /// The plan of one device, with its share of all requests.
    pub(crate) fn for_device(&self, device: usize) -> Self {
        let device = device as u64;
        let mut plan = self.clone();
        if self.mixed > 0 && device > 0 {
            let mut rng = Rng::new(self.seed, 100 + device);
            plan.draw_disk(&mut rng);
            plan.draw_guest(&mut rng);
            plan.draw_layout(&mut Rng::new(self.seed, 200 + device));
            if self.in_order > 0 {
                plan.packed = 0;
            }
            plan = plan.without_conflicts();
        }
        plan.requests = (self.requests / self.devices).max(1);
        plan.functions = self.functions.div_ceil(self.devices);
        plan.rush = if device == 0 { self.rush } else { 0 };
        let mut is_sound = device + self.sound_disks >= self.devices;
        if self.troubled > 0 {
            match device {
                0 => plan.hangs = 1,
                // If it were slower, two EAGAINs would be an EAGAIN for seconds.
                1 => (plan.slow, plan.hang) = (50, 0),
                2 => plan.enospc = 1000,
                _ => is_sound = true,
            }
        }
        if is_sound {
            (plan.eio, plan.enospc, plan.eintr, plan.eagain) = (0, 0, 0, 0);
            (plan.hang, plan.stuck, plan.flush_eio) = (0, 0, 0);
            (plan.submit_reject, plan.entry_reject) = (0, 0);
        }
        plan
    }

    /// Removes combinations that do not work.
    fn without_conflicts(mut self) -> Self {
        if self.odd_shorts > 0 {
            // A sector that moves in two halves is not atomic. No overlapping request may see it
            // halfway, and no fault may leave it so.
            if self.direct > 0 {
                self.odd_shorts = 0;
            } else {
                (self.no_overlap, self.crashes, self.kills) = (1, 0, 0);
                self.deaths = 0;
                (self.eio, self.enospc, self.stuck, self.flush_eio) = (0, 0, 0, 0);
                (self.submit_reject, self.entry_reject) = (0, 0);
            }
        }
        if self.engine == 2 && self.mix_engines == 0 {
            // A completion reports a bad entry.
            self.submit_reject = 0;
        }
        if self.scsi > 0 && self.region_kib > 0 {
            // There are two more queues, and a map has 509 regions at most.
            self.region_kib = self.region_kib.max(20);
        }
        if self.session == 3 {
            (self.inflight, self.migrations) = (0, 0);
        }
        if self.scsi > 0 {
            self.in_order = 0;
        }
        if self.packed > 0 {
            // Their driver frees descriptors in the order of the ring.
            self.in_order = 0;
        }
        if self.rush > 0 || self.troubled > 0 || self.requests > 1000 {
            // These runs need disks that are fast enough.
            self.limits = 0;
        }
        if self.inflight == 0 && self.in_order == 0 {
            // Requests in the device would be lost.
            self.deaths = 0;
        }
        if self.block_device > 0 {
            self.cut_sectors = 0;
        }
        self
    }

    /// The time for which the loop may not see a chain, independent of its rounds.
    pub(crate) fn check_delay_ns(&self) -> u64 {
        // A queue without a kick is checked after a time. A kick that io_uring watches needs an
        // entry in the kernel, which may take none for a while.
        let refuses = self.submit_eagain + self.submit_eagain_burst + self.submit_eintr > 0;
        let puts_off = self.sqpoll > 0 || self.poll_ends > 0 || refuses;
        let is_late = self.no_kick > 0 || (self.has_engine(2) && puts_off);
        if is_late { 20_000_000 } else { 0 }
    }

    /// The number of disks.
    pub(crate) fn disks(&self) -> u64 {
        if self.scsi > 0 { self.disks.max(1) } else { self.devices }
    }

    /// Queues of a device, including the ones that are not for requests.
    pub(crate) fn queue_count(&self) -> u64 {
        if self.scsi > 0 { self.queues + FIRST_REQUEST_QUEUE as u64 } else { self.queues }
    }

    /// The engine of a disk.
    pub(crate) fn engine_of(&self, disk: usize) -> u64 {
        let later = if self.mix_engines > 0 { disk as u64 } else { 0 };
        (self.engine + later) % 3
    }

    /// True if a disk has this engine, and therefore each IoThread has it.
    pub(crate) fn has_engine(&self, engine: u64) -> bool {
        (0..self.disks()).any(|disk| self.engine_of(fits(disk, "a disk's number")) == engine)
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        if self.block_4k > 0 { 4096 } else { 512 }
    }

    /// The bounds on bytes of ops.
    pub(crate) fn byte_limits(&self) -> ByteLimits {
        let bytes = |kib: u64, default| match kib {
            0 => default,
            kib => fits(kib << 10, "a number of KiB"),
        };
        ByteLimits {
            op: bytes(self.op_kib, ByteLimits::OP),
            round: bytes(self.round_kib, ByteLimits::ROUND),
            disk: bytes(self.disk_kib, ByteLimits::DISK),
        }
    }

    /// The most bytes of an op.
    pub(crate) fn op_bytes_max(&self) -> usize {
        self.byte_limits().op.max(fits(self.block_bytes(), "the size of a block"))
    }

    /// The nanoseconds for which ops may hold up an IoThread that gives the kernel the bytes of
    /// `rounds` rounds. There is no bound with refused ops, which stay with their engine and come
    /// in one submit with later ones. The same holds for entries that a submission thread has not
    /// yet taken.
    pub(crate) fn held_ns_max(&self, rounds: u64) -> u64 {
        let refuses = self.submit_eagain + self.submit_eagain_burst + self.submit_eintr;
        if refuses + self.submit_partial + self.submit_reject + self.sqpoll > 0 {
            return u64::MAX;
        }
        // A single op is never too large for a round. Devices of a mix differ in their blocks.
        let of_round = self.byte_limits().round.max(self.op_bytes_max()).max(4096) as u64;
        let copied = if self.converts > 0 { self.copied_max() as u64 } else { 0 };
        rounds * (of_round + copied) * self.byte_ns
    }

    /// The most bytes that tasks copy in a round. A piece alone is never too large.
    pub(crate) fn copied_max(&self) -> usize {
        (self.byte_limits().round / 8).max(PIECE_BYTES)
    }

    /// Alignment of memory addresses for direct I/O.
    pub(crate) fn memory_align(&self) -> u32 {
        if self.small_align > 0 { 4 } else { 512 }
    }

    pub(crate) fn sectors(&self) -> u64 {
        self.blocks * self.block_sectors()
    }

    pub(crate) fn block_sectors(&self) -> u64 {
        self.block_bytes() / 512
    }

    pub(crate) fn first_index(&self) -> u16 {
        fits(self.first_index & 0xffff, "a number that was drawn")
    }

    pub(crate) fn queue_size(&self) -> u16 {
        let size = 1 << self.queue_log2.min(5);
        let more = self.more_entries % u64::from(size);
        if self.packed > 0 { size + fits::<_, u16>(more, "it is smaller") } else { size }
    }

    /// The layout of the rings.
    pub(crate) fn layout(&self) -> RingLayout {
        if self.packed > 0 { RingLayout::Packed } else { RingLayout::Split }
    }
}
