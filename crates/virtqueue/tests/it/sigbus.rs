//! Memory that its owner truncates while it is mapped.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

use virtqueue::driver::{Desc, PACKED_START, PackedDriver};
use virtqueue::{
    ChainFault, DeviceQueue, GuestMemory, InflightError, InflightRegion, LocalMemory, MappingRules,
    PackedQueue, QueueError, RegionConfig, RingLayout, RingPart, SplitQueue,
    install_sigbus_handler, lost_regions,
};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::packed;
use crate::ring::{
    AVAIL_RING, BORDER, DESC_TABLE, F_INDIRECT, F_WRITE, HOLE, Hand, ISLAND, Ring, USED_RING,
    memfd, new_ring, pop,
};

const REGION: u64 = 0x1_0000;

/// A region that fills a file of its own.
fn region(guest_addr: u64, size: u64) -> (RegionConfig, Arc<File>) {
    let file = memfd(size);
    let of_region = Arc::clone(&file);
    let user_addr = guest_addr;
    (RegionConfig { guest_addr, size, user_addr, file: of_region, file_offset: 0 }, file)
}

fn map(regions: &[RegionConfig]) -> GuestMemory {
    GuestMemory::new(regions, &MappingRules::default()).expect("regions")
}

/// Makes a ring in a region of its own and two more regions, at `BORDER` and `ISLAND`, with the
/// files of all three.
fn ring() -> (Ring, [Arc<File>; 3]) {
    install_sigbus_handler().expect("a handler");
    let (low, low_file) = region(0, BORDER);
    let (high, high_file) = region(BORDER, REGION);
    let (island, island_file) = region(ISLAND, REGION);
    let mut ring = new_ring(8, true);
    ring.memory = Arc::new(map(&[low, high, island]));
    (ring, [low_file, high_file, island_file])
}

#[test]
fn lost_memory_reads_as_zeroes_and_is_reported() {
    let (Ring { memory, .. }, files) = ring();
    let (Ring { memory: other, .. }, _files) = ring();
    memory.write(ISLAND, b"here").unwrap();
    let before = lost_regions();
    files[2].set_len(0).unwrap();
    assert!(memory.is_intact(), "nobody has looked");

    let mut bytes = *b"full";
    memory.read(ISLAND, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4]);
    assert!(!memory.is_intact() && !memory.is_intact(), "invariant 13: zeroes are believed");
    assert!(lost_regions() > before);
    assert!(other.is_intact() && other.is_intact(), "the loss of another");

    // The whole region is replaced, and can be written like any memory.
    memory.write(ISLAND + REGION - 4, b"last").unwrap();
    memory.read(ISLAND + REGION - 4, &mut bytes).unwrap();
    assert_eq!(&bytes, b"last");
    memory.write(0, b"else").unwrap();
    memory.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"else", "other regions stay");
}

#[test]
fn a_map_that_takes_over_a_lost_region_is_not_intact() {
    let (Ring { memory, .. }, files) = ring();
    files[1].set_len(0).unwrap();
    memory.write(BORDER, b"x").unwrap();
    let less = memory.without_region(ISLAND, ISLAND, REGION).unwrap();
    assert!(!less.is_intact());
    assert!(less.without_region(BORDER, BORDER, REGION).unwrap().is_intact());
}

#[test]
fn a_lost_buffer_is_treated_as_unmapped() {
    let (mut ring, files) = ring();
    let mut queue = ring.queue();
    ring.chain(0, &[(ISLAND, 16, 0), (BORDER, 1, F_WRITE)]);
    let chain = pop(&mut queue);
    assert_eq!(chain.fault, None);

    files[2].set_len(0).unwrap();
    let mut bytes = [1; 16];
    assert_eq!(chain.readable.copy_to(0, &mut bytes), 16);
    assert_eq!(bytes, [0; 16]);
    assert!(!chain.memory.is_intact());
    queue.push(0, 1);

    ring.chain(0, &[(ISLAND, 16, 0), (BORDER, 1, F_WRITE)]);
    let chain = pop(&mut queue);
    assert_eq!(chain.fault, Some(ChainFault::Unmapped { addr: ISLAND, len: 16 }));
    assert_eq!(chain.writable.bytes(), 1);
    queue.push(0, 1);
    // The rest is served as before.
    ring.chain(1, &[(BORDER, 16, F_WRITE)]);
    let chain = pop(&mut queue);
    assert_eq!((chain.head, chain.fault), (1, None));
    assert!(chain.memory.is_intact());
    assert_eq!((queue.in_device(), queue.next_avail()), (1, 3));
    queue.push(1, 16);
    assert!(queue.publish());
    assert_eq!(ring.used_idx(), 3);
}

#[test]
fn a_queue_whose_indirect_table_is_gone_is_bad() {
    let (mut ring, files) = ring();
    let mut queue = ring.queue();
    ring.chain(0, &[(ISLAND, 32, F_INDIRECT)]);
    files[2].set_len(0).unwrap();
    let error = QueueError::IndirectUnmapped { head: 0, addr: ISLAND, len: 32 };
    assert_eq!(queue.pop().unwrap_err(), error);
    assert_eq!((queue.in_device(), queue.next_avail()), (0, 0));
}

#[test]
fn a_queue_whose_ring_is_gone_is_bad() {
    for (part, addr, len) in [
        (RingPart::DescTable, DESC_TABLE, 128),
        (RingPart::AvailRing, AVAIL_RING, 22),
        (RingPart::UsedRing, USED_RING, 70),
    ] {
        let (mut ring, files) = ring();
        match part {
            RingPart::DescTable => ring.config.desc_table = BORDER,
            RingPart::AvailRing => ring.config.avail_ring = BORDER,
            RingPart::UsedRing => ring.config.used_ring = BORDER,
        }
        assert!(addr < BORDER && HOLE == BORDER + REGION);
        let mut queue = ring.queue();
        // Now an avail idx of zero is neither valid nor unchanged.
        for head in 0..4 {
            ring.chain(head, &[(ISLAND, 16, F_WRITE)]);
            assert_eq!(pop(&mut queue).head, head);
        }
        queue.push(0, 16);
        assert!(queue.publish());
        ring.chain(0, &[(ISLAND, 16, F_WRITE)]);
        files[1].set_len(0).unwrap();
        // Any access may be the first to touch the lost memory.
        queue.push(1, 16);
        let _ = (queue.publish(), queue.has_available(), queue.enable_kicks());
        let error = QueueError::MemoryGone { part, addr: BORDER, len };
        assert_eq!(queue.pop().unwrap_err(), error);
        assert_eq!(queue.next_avail(), 4);
    }
}

/// The next process would not find its requests.
#[test]
fn a_queue_whose_inflight_account_is_gone_is_bad() {
    let (mut ring, _files) = ring();
    let (config, file) = region(0, REGION);
    let region = InflightRegion::new(Arc::new(map(&[config])), 1, 8).unwrap();
    let memory = LocalMemory::new(Arc::clone(&ring.memory));
    let account = region.queue(0, RingLayout::Split).unwrap();
    let (mut queue, _) = SplitQueue::with_inflight(memory, ring.config, &account).unwrap();
    ring.chain(0, &[(ISLAND, 16, F_WRITE)]);
    assert_eq!(pop(&mut queue).head, 0);
    file.set_len(0).unwrap();
    ring.chain(1, &[(ISLAND, 16, F_WRITE)]);
    for _ in 0..2 {
        assert_eq!(queue.pop().unwrap_err(), InflightError::Gone.into());
    }
    assert_eq!((queue.in_device(), queue.next_avail()), (1, 1));
    // A request that was popped before is still answered.
    queue.push(0, 16);
    assert!(queue.publish());
    assert_eq!(ring.used_idx(), 1);
}

/// The account reads as a new one, and no request would ever be found in it.
#[test]
fn an_inflight_account_that_is_gone_is_not_opened() {
    let (ring, _files) = ring();
    let (config, file) = region(0, REGION);
    let region = InflightRegion::new(Arc::new(map(&[config])), 1, 8).unwrap();
    let memory = LocalMemory::new(Arc::clone(&ring.memory));
    file.set_len(0).unwrap();
    let opened = SplitQueue::with_inflight(
        memory,
        ring.config,
        &region.queue(0, RingLayout::Split).unwrap(),
    );
    assert_eq!(opened.unwrap_err(), InflightError::Gone.into());
}

/// The pop that notices the loss begins again, and must not skip a request.
#[test]
fn requests_of_an_earlier_process_survive_a_lost_region() {
    let (mut ring, files) = ring();
    let region = GuestMemory::anonymous(&[(0, REGION)]).unwrap();
    let region = InflightRegion::new(Arc::new(region), 1, 8).unwrap();
    let account = region.queue(0, RingLayout::Split).unwrap();
    let memory = LocalMemory::new(Arc::clone(&ring.memory));
    let (mut before, _) = SplitQueue::with_inflight(memory, ring.config, &account).unwrap();
    for head in [2, 1, 0] {
        ring.chain(head, &[(BORDER, 16, F_WRITE)]);
        assert_eq!(pop(&mut before).head, head);
    }
    drop(before);

    let memory = LocalMemory::new(Arc::clone(&ring.memory));
    let (mut queue, _) = SplitQueue::with_inflight(memory, ring.config, &account).unwrap();
    files[2].set_len(0).unwrap();
    ring.memory.write(ISLAND, b"lost").unwrap();
    assert!(!ring.memory.is_intact());
    let heads = [(); 3].map(|()| pop(&mut queue).head);
    assert_eq!((heads, queue.has_recovered(), queue.in_device()), ([2, 1, 0], false, 3));
}

/// The same in a packed ring, with the buffers of each request.
#[test]
fn requests_of_an_earlier_process_in_a_packed_ring_survive_a_lost_region() {
    let (ring, files) = ring();
    let region = GuestMemory::anonymous(&[(0, REGION)]).unwrap();
    let region = InflightRegion::new(Arc::new(region), 1, 8).unwrap();
    let account = region.queue(0, RingLayout::Packed).unwrap();
    let config = packed::config(8, true);
    let open = || {
        let memory = LocalMemory::new(Arc::clone(&ring.memory));
        PackedQueue::with_inflight(memory, config, PACKED_START, &account).unwrap().0
    };
    let mut driver = PackedDriver::new(Arc::clone(&ring.memory), config);
    for len in [16, 17] {
        driver.add(&[Desc::writable(BORDER, len)], None);
    }
    driver.publish();
    let mut before = open();
    let heads = [(); 2].map(|()| before.pop().unwrap().unwrap().head);
    drop(before);

    let mut queue = open();
    files[2].set_len(0).unwrap();
    ring.memory.write(ISLAND, b"lost").unwrap();
    assert!(!ring.memory.is_intact());
    for (head, bytes) in heads.into_iter().zip([16, 17]) {
        let chain = queue.pop().unwrap().unwrap();
        assert_eq!((chain.head, chain.fault, chain.writable.bytes()), (head, None, bytes));
        assert!(chain.memory.is_intact());
    }
    assert_eq!((queue.has_recovered(), queue.in_device()), (false, 2));
}

/// More regions than a chunk of the table holds. They come, are lost, and go.
#[test]
fn every_lost_region_is_found_among_many() {
    install_sigbus_handler().unwrap();
    const COUNT: u64 = 300;
    const SIZE: u64 = 0x1000;
    for _ in 0..3 {
        let (configs, files): (Vec<_>, Vec<_>) =
            (0..COUNT).map(|index| region(index * SIZE, SIZE)).unzip();
        let memory = map(&configs);
        for (index, file) in (0..).zip(files) {
            file.set_len(0).unwrap();
            memory.write(index * SIZE + 8, b"lost").unwrap();
        }
        assert!(!memory.is_intact());
    }
}

/// Set in the environment of the process that is to die.
const DIE: &str = "VIRTQUEUE_TEST_DIES_OF_SIGBUS";

#[test]
fn a_fault_elsewhere_ends_the_process() {
    if std::env::var_os(DIE).is_some() {
        let (Ring { memory, .. }, files) = ring();
        files[0].set_len(0).unwrap();
        // This fault is survived.
        memory.write(0, b"lost").unwrap();
        drop(memory);
        // Memory of the same size, at the former place of the map if the kernel reuses it.
        let file = memfd(BORDER);
        let offset = FileOffset::from_arc(Arc::clone(&file), 0);
        let mapping = MmapRegion::<()>::from_file(offset, 0x2_0000).unwrap();
        file.set_len(0).unwrap();
        mapping.as_volatile_slice().write_obj(1_u8, 0).unwrap();
        return;
    }
    let name = "sigbus::a_fault_elsewhere_ends_the_process";
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name]).env(DIE, "1");
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{}: {text}", output.status);
}

/// Reports a damaged page that was not accessed, as the kernel does.
fn send_notice() {
    const BUS_MCEERR_AO: libc::c_int = 5;
    let thread = rustix::thread::gettid().as_raw_pid();
    // SAFETY: all zeroes are a valid siginfo_t, which the kernel copies. A thread may send itself
    // one with any code.
    let result = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        info.si_signo = libc::SIGBUS;
        info.si_code = BUS_MCEERR_AO;
        let process = libc::getpid();
        let info = &raw const info;
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, info)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_notice_of_a_damaged_page_changes_nothing() {
    let (Ring { memory, .. }, files) = ring();
    send_notice();
    assert!(memory.is_intact());
    files[2].set_len(0).unwrap();
    memory.write(ISLAND, b"lost").unwrap();
    assert!(!memory.is_intact(), "survived, and marked");
}
