//! The log of pages that the queue writes in a packed ring, and through earlier maps.

use std::sync::Arc;

use virtqueue::driver::Desc;
use virtqueue::{
    DeviceQueue, DirtyLog, GuestMemory, LocalMemory, QueueConfig, QueueLog, Virtqueue,
};

use crate::packed::{config, pair};
use crate::ring::{F_WRITE, Hand, ISLAND, new_ring};

const PAGE: u64 = 4096;
/// Two pages of descriptors.
const SIZE: u16 = 400;
const RING: u64 = 0x4000;
const DEVICE_EVENTS: u64 = 0x8000;
/// The device's events have another address in the log.
const LOGGED_EVENTS: u64 = 0x1_f000;

/// Takes the marked pages out of a log.
fn take_marks(log: &GuestMemory) -> Vec<u64> {
    let mut bytes = [0; 64];
    log.read(0, &mut bytes).expect("mapped");
    log.write(0, &[0; 64]).expect("mapped");
    let pages = (0_u64..).zip(bytes.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1)));
    pages.filter(|(_, mark)| *mark == 1).map(|(page, _)| page * PAGE).collect()
}

#[test]
fn every_page_that_is_written_is_marked() {
    let ring = QueueConfig {
        desc_table: RING,
        avail_ring: 0x7000,
        used_ring: DEVICE_EVENTS,
        ..config(SIZE, true)
    };
    let (mut driver, mut queue) = pair(ring);
    let memory = Arc::new(GuestMemory::anonymous(&[(0, PAGE)]).expect("memory"));
    let log = Arc::new(DirtyLog::new(Arc::clone(&memory), 64).expect("it is long enough"));
    let with =
        |marks_data, used_ring| Some(QueueLog { log: Arc::clone(&log), marks_data, used_ring });
    queue.set_log(with(true, Some(LOGGED_EVENTS)));
    assert_eq!(take_marks(&memory), [RING, RING + PAGE, LOGGED_EVENTS], "all that was written");
    // Three rounds of chains, of which each ends at another place of the ring.
    let mut ids = Vec::new();
    for (count, expected) in [
        (1, &[RING][..]),
        (300, &[RING, RING + PAGE]),
        // From the second page over the end to the first one.
        (150, &[RING, RING + PAGE]),
        (30, &[RING]),
        (230, &[RING, RING + PAGE]),
        (80, &[RING + PAGE]),
    ] {
        for _ in 0..count {
            driver.add(&[Desc::writable(0x9000, 1)], None);
        }
        driver.publish();
        for _ in 0..count {
            let chain = queue.pop().expect("good").expect("available");
            if ids.is_empty() {
                assert_eq!(chain.writable.copy_from(0, &[1]), 1);
                assert_eq!(take_marks(&memory), [0x9000]);
            }
            ids.push(chain.head);
        }
        ids.drain(..).for_each(|id| queue.push(id, 1));
        assert_eq!(queue.publish_quietly(), count);
        assert_eq!(take_marks(&memory), expected, "{count}");
        for _ in 0..count {
            driver.take_used();
        }
    }
    let _ = queue.enable_kicks();
    assert_eq!(take_marks(&memory), [LOGGED_EVENTS]);
    queue.disable_kicks();
    assert_eq!(take_marks(&memory), [LOGGED_EVENTS]);
    // Without marks of the ring, and without a log.
    for log in [with(true, None), None] {
        queue.set_log(log);
        driver.add(&[Desc::writable(0x9000, 1)], None);
        driver.publish();
        let id = queue.pop().expect("good").expect("available").head;
        queue.push(id, 1);
        let _ = queue.publish();
        queue.disable_kicks();
        assert_eq!(take_marks(&memory), [0; 0]);
        driver.take_used();
    }
}

/// A chain that was popped before the map changed is written to in the end.
#[test]
fn writes_through_an_earlier_map_are_marked_in_the_present_log() {
    let mut ring = new_ring(8, false);
    ring.chain(0, &[(ISLAND, 8, F_WRITE)]);
    ring.chain(1, &[(ISLAND, 8, F_WRITE)]);
    let (mut driver, packed) = pair(config(4, false));
    driver.add(&[Desc::writable(ISLAND, 8)], None);
    driver.add(&[Desc::writable(ISLAND, 8)], None);
    driver.publish();
    let queues = [
        (Virtqueue::Split(ring.queue()), Arc::clone(&ring.memory)),
        (Virtqueue::Packed(packed), Arc::clone(&driver.memory)),
    ];
    for (mut queue, memory) in queues {
        let logs = [(); 2].map(|()| Arc::new(GuestMemory::anonymous(&[(0, PAGE)]).expect("a log")));
        let set = |queue: &mut Virtqueue, log: &Arc<GuestMemory>| {
            let log = Arc::new(DirtyLog::new(Arc::clone(log), 64).expect("it is long enough"));
            queue.set_log(Some(QueueLog { log, marks_data: true, used_ring: None }));
        };
        set(&mut queue, &logs[0]);
        let mut chain = queue.pop().expect("good").expect("available");
        let writable = std::mem::replace(&mut chain.writable, iomem::Buffers::empty());
        // Only the list keeps the earlier map.
        drop(chain);
        for _ in 0..2 {
            queue.set_memory(LocalMemory::new(Arc::clone(&memory))).expect("the same map");
        }
        writable.copy_from(0, b"x");
        assert_eq!(logs.each_ref().map(|log| take_marks(log)), [vec![ISLAND], vec![]]);
        let later = queue.pop().expect("good").expect("available").writable;
        later.copy_from(0, b"x");
        assert_eq!(logs.each_ref().map(|log| take_marks(log)), [vec![ISLAND], vec![]]);
        drop(later);
        set(&mut queue, &logs[1]);
        writable.copy_from(0, b"x");
        assert_eq!(logs.each_ref().map(|log| take_marks(log)), [vec![], vec![ISLAND]]);
    }
}
