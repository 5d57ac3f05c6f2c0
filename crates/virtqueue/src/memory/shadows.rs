//! Copies of the buffers of requests, by which a debug build checks that each write is marked.
//!
//! A copy follows its buffers like a front-end that migrates the guest: it takes over bytes when
//! they are marked. When the request is done, before its used element is visible, the copy must
//! equal the buffers. A release build makes no copies.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use iomem::Buffers;

use super::map::GuestMemory;

/// Requests with more bytes to write are not copied.
const MOST_BYTES: usize = 4 << 20;

/// The copies of one queue. Clones share them.
#[derive(Debug, Default, Clone)]
pub(crate) struct Shadows(Rc<RefCell<Vec<Shadow>>>);

/// The copy of the buffers of one request.
#[derive(Debug)]
struct Shadow {
    head: u16,
    /// The map of the buffers, which goes away with them.
    map: Weak<GuestMemory>,
    ranges: Vec<Range>,
}

#[derive(Debug)]
struct Range {
    guest_addr: u64,
    copy: Vec<u8>,
}

impl Range {
    fn new(map: &GuestMemory, start: *const u8, bytes: usize) -> Self {
        let guest_addr = map.guest_addr_of_host(start);
        let guest_addr = guest_addr.expect("lists have ranges of their map alone");
        let mut range = Self { guest_addr, copy: vec![0; bytes] };
        range.take_over(map, guest_addr, guest_addr + bytes as u64);
        range
    }

    fn end(&self) -> u64 {
        self.guest_addr + self.copy.len() as u64
    }

    /// Takes over the bytes of the range from `start` to `end`.
    fn take_over(&mut self, map: &GuestMemory, start: u64, end: u64) {
        let (start, end) = (start.max(self.guest_addr), end.min(self.end()));
        if start < end {
            let at = |addr: u64| super::map::to_usize(addr - self.guest_addr);
            let part = at(start)..at(end);
            map.read(start, &mut self.copy[part]).expect("the map has the buffers of its chains");
        }
    }

    /// Returns the first address at which the copy differs from the memory.
    fn difference(&self, map: &GuestMemory) -> Option<u64> {
        let mut present = vec![0; self.copy.len()];
        map.read(self.guest_addr, &mut present).expect("the map has the buffers of its chains");
        let at = present.iter().zip(&self.copy).position(|(present, copy)| present != copy)?;
        Some(self.guest_addr + at as u64)
    }
}

impl Shadows {
    /// Copies the buffers that a request is to write, which has just been popped.
    pub(crate) fn begin(&self, head: u16, writable: &Buffers, map: &Arc<GuestMemory>) {
        self.end(head);
        if writable.bytes() > MOST_BYTES {
            return;
        }
        let ranges = writable.iovecs().iter();
        let ranges = ranges.map(|range| Range::new(map, range.iov_base.cast(), range.iov_len));
        let (map, ranges) = (Arc::downgrade(map), ranges.collect());
        self.0.borrow_mut().push(Shadow { head, map, ranges });
    }

    /// Takes over bytes that were marked.
    pub(super) fn take_over(&self, map: &GuestMemory, guest_addr: u64, bytes: usize) {
        let end = guest_addr + bytes as u64;
        let mut shadows = self.0.borrow_mut();
        let ranges = shadows.iter_mut().flat_map(|shadow| &mut shadow.ranges);
        ranges.for_each(|range| range.take_over(map, guest_addr, end));
    }

    /// Forgets the copy of a request.
    pub(crate) fn end(&self, head: u16) {
        self.0.borrow_mut().retain(|shadow| shadow.head != head);
    }

    /// Forgets all copies, because writes are not marked any longer.
    pub(crate) fn clear(&self) {
        self.0.borrow_mut().clear();
    }

    /// Checks that each byte that changed was marked after its last change, and forgets the copy of
    /// a request. Nothing can be told about memory that is gone.
    ///
    /// # Panics
    ///
    /// If a byte was not.
    pub(crate) fn check(&self, head: u16) {
        let mut shadows = self.0.borrow_mut();
        let Some(at) = shadows.iter().position(|shadow| shadow.head == head) else { return };
        let Shadow { map, ranges, .. } = shadows.swap_remove(at);
        drop(shadows);
        let Some(map) = map.upgrade() else { return };
        let difference = ranges.iter().find_map(|range| range.difference(&map));
        if let Some(addr) = difference.filter(|_| map.is_intact()) {
            panic!("chain {head}: guest address {addr:#x} was written without a mark");
        }
    }
}

#[cfg(test)]
#[cfg(debug_assertions)]
mod tests {
    use super::*;
    use crate::driver::{Desc, Driver, PACKED_START, PackedDriver};
    use crate::inflight::RingLayout;
    use crate::memory::LocalMemory;
    use crate::{Chain, DirtyLog, QueueConfig, QueueLog, Virtqueue};

    /// A buffer that straddles pages, and one beside it.
    const BUFFERS: [(u64, u32); 2] = [(0xe7f0, 32), (0xe810, 1)];
    const UNMARKED: &str = "was written without a mark";

    struct World {
        memory: Arc<GuestMemory>,
        queue: Virtqueue,
    }

    impl World {
        /// A queue with one request, and a log of its writes.
        fn new(layout: RingLayout) -> Self {
            let next_avail = if layout == RingLayout::Packed { PACKED_START } else { 0 };
            let config = QueueConfig {
                size: 8,
                desc_table: 0x1000,
                avail_ring: 0x2000,
                used_ring: 0x3000,
                event_idx: false,
                indirect: false,
                next_avail,
            };
            let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x10000)]).unwrap());
            let shared = Arc::clone(&memory);
            let buffers = BUFFERS.map(|(addr, len)| Desc::writable(addr, len));
            if layout == RingLayout::Packed {
                let mut driver = PackedDriver::new(shared, config);
                driver.add(&buffers, None);
                driver.publish();
            } else {
                let mut driver = Driver::new(shared, config);
                driver.add(&buffers, None);
                driver.publish();
            }
            let local = LocalMemory::new(Arc::clone(&memory));
            let queue = Virtqueue::new(local, layout, config, next_avail).unwrap();
            let mut world = Self { memory, queue };
            world.set_log(true);
            world
        }

        fn set_log(&mut self, is_on: bool) {
            let log = is_on.then(|| {
                let marks = Arc::new(GuestMemory::anonymous(&[(0, 4096)]).unwrap());
                let log = Arc::new(DirtyLog::new(marks, 2).unwrap());
                QueueLog { log, marks_data: true, used_ring: Some(0x3000) }
            });
            self.queue.set_log(log);
        }

        fn pop(&mut self) -> Chain {
            self.queue.pop().unwrap().unwrap()
        }

        fn write_unmarked(&self) {
            self.memory.write(0xe80f, &[7]).unwrap();
        }

        /// Returns the message of the panic, if the push of this chain finds a byte without a mark.
        fn push(&mut self, chain: &Chain) -> Option<String> {
            let push = || self.queue.push(chain.head, 33);
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(push)).err()?;
            Some(*caught.downcast::<String>().unwrap())
        }
    }

    #[test]
    fn a_byte_without_a_mark_after_its_last_change_is_found() {
        for layout in [RingLayout::Split, RingLayout::Packed] {
            let mut marked = World::new(layout);
            let chain = marked.pop();
            assert_eq!(chain.writable.copy_from(0, &[1; 33]), 33);
            assert_eq!(marked.push(&chain), None);

            let mut unmarked = World::new(layout);
            let chain = unmarked.pop();
            unmarked.write_unmarked();
            // Bytes beside it have marks.
            chain.writable.wrote(31);
            let found = unmarked.push(&chain).expect("a byte has no mark");
            assert!(found.contains("0xe80f") && found.contains(UNMARKED), "{found}");

            let mut early = World::new(layout);
            let chain = early.pop();
            chain.writable.wrote(33);
            early.write_unmarked();
            assert!(early.push(&chain).is_some(), "the mark was made before the write");
        }
    }

    #[test]
    fn writes_are_not_compared_if_a_part_of_them_was_not_to_be_marked() {
        for layout in [RingLayout::Split, RingLayout::Packed] {
            let mut world = World::new(layout);
            let chain = world.pop();
            world.set_log(false);
            world.write_unmarked();
            world.set_log(true);
            assert_eq!(world.push(&chain), None);

            let mut world = World::new(layout);
            let chain = world.pop();
            world.queue.put_back(chain.head);
            world.write_unmarked();
            let chain = world.pop();
            assert_eq!(world.push(&chain), None, "the copy is of the last pop");
        }
    }

    #[test]
    fn a_log_that_is_replaced_continues_the_copy() {
        for layout in [RingLayout::Split, RingLayout::Packed] {
            for writes_unmarked in [false, true] {
                let mut world = World::new(layout);
                let chain = world.pop();
                assert_eq!(chain.writable.copy_from(0, &[1; 20]), 20);
                world.set_log(true);
                let map = LocalMemory::new(Arc::new(world.memory.without_lost().unwrap()));
                world.queue.set_memory(map).unwrap();
                assert_eq!(chain.writable.copy_from(20, &[1; 13]), 13);
                if writes_unmarked {
                    world.memory.write(0xe7f0, &[2]).unwrap();
                }
                assert_eq!(world.push(&chain).is_some(), writes_unmarked);
            }
        }
    }
}
