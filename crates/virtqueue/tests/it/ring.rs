//! A ring that a test fills by hand, and memory to put it in.

use std::fs::File;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};
use virtqueue::{Chain, GuestMemory, LocalMemory, QueueConfig, QueueError, Segments, SplitQueue};

pub(crate) const F_NEXT: u16 = 1;
pub(crate) const F_WRITE: u16 = 2;
pub(crate) const F_INDIRECT: u16 = 4;

pub(crate) const DESC_TABLE: u64 = 0x1000;
pub(crate) const AVAIL_RING: u64 = 0x6000;
pub(crate) const USED_RING: u64 = 0x8000;

/// Two regions that touch, and one by itself.
pub(crate) const RANGES: [(u64, u64); 3] =
    [(0, 0x2_0000), (BORDER, 0x1_0000), (ISLAND, ISLAND_BYTES)];
/// Where the first region ends and the second starts.
pub(crate) const BORDER: u64 = 0x2_0000;
/// The first address that is not mapped.
pub(crate) const HOLE: u64 = 0x3_0000;
pub(crate) const ISLAND: u64 = 0x8_0000;
pub(crate) const ISLAND_BYTES: u64 = 0x1_0000;

/// An anonymous file of this length.
pub(crate) fn memfd(bytes: u64) -> Arc<File> {
    let file = File::from(memfd_create("virtqueue-test", MemfdFlags::CLOEXEC).expect("memfd"));
    file.set_len(bytes).expect("memfd length");
    Arc::new(file)
}

/// One descriptor: guest address, bytes, flags, next.
pub(crate) type Desc = (u64, u32, u16, u16);

/// Writes a descriptor into a table.
pub(crate) fn write_desc(memory: &GuestMemory, table: u64, index: u16, desc: Desc) {
    let (addr, len, flags, next) = desc;
    let mut bytes = addr.to_le_bytes().to_vec();
    bytes.extend(len.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(next.to_le_bytes());
    memory.write(table + u64::from(index) * 16, &bytes).expect("descriptor is mapped");
}

/// A ring and the driver's view of it.
pub(crate) struct Ring {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) config: QueueConfig,
    avail_idx: u16,
}

impl Ring {
    /// Of this size, with indirect descriptors, in fresh memory of `RANGES`.
    pub(crate) fn new(size: u16, event_idx: bool) -> Self {
        let memory = Arc::new(GuestMemory::anonymous(&RANGES).expect("memory"));
        let config = QueueConfig {
            size,
            desc_table: DESC_TABLE,
            avail_ring: AVAIL_RING,
            used_ring: USED_RING,
            event_idx,
            indirect: true,
            next_avail: 0,
        };
        Self { memory, config, avail_idx: 0 }
    }

    /// The device's side.
    pub(crate) fn queue(&self) -> SplitQueue {
        self.try_queue().expect("the ring is good")
    }

    pub(crate) fn try_queue(&self) -> Result<SplitQueue, QueueError> {
        SplitQueue::new(LocalMemory::new(Arc::clone(&self.memory)), self.config)
    }

    pub(crate) fn desc(&self, index: u16, desc: Desc) {
        write_desc(&self.memory, self.config.desc_table, index, desc);
    }

    /// Writes buffers to consecutive descriptors from `first` on, links them, and makes them
    /// available.
    pub(crate) fn chain(&mut self, first: u16, buffers: &[(u64, u32, u16)]) {
        self.table(self.config.desc_table, first, buffers);
        self.make_available(first);
    }

    /// Writes linked buffers into a table.
    pub(crate) fn table(&self, table: u64, first: u16, buffers: &[(u64, u32, u16)]) {
        for (index, (left, &(addr, len, flags))) in
            (first..).zip((0..buffers.len()).rev().zip(buffers))
        {
            let flags = if left > 0 { flags | F_NEXT } else { flags };
            write_desc(&self.memory, table, index, (addr, len, flags, index.wrapping_add(1)));
        }
    }

    pub(crate) fn make_available(&mut self, head: u16) {
        let entry = u64::from(self.avail_idx & (self.config.size - 1));
        self.put(self.config.avail_ring + 4 + entry * 2, head);
        self.set_avail_idx(self.avail_idx.wrapping_add(1));
    }

    pub(crate) fn set_avail_idx(&mut self, avail_idx: u16) {
        self.avail_idx = avail_idx;
        self.put(self.config.avail_ring + 2, avail_idx);
    }

    pub(crate) fn set_avail_flags(&self, flags: u16) {
        self.put(self.config.avail_ring, flags);
    }

    pub(crate) fn set_used_event(&self, event: u16) {
        self.put(self.config.avail_ring + 4 + 2 * u64::from(self.config.size), event);
    }

    pub(crate) fn avail_event(&self) -> u16 {
        self.get(self.config.used_ring + 4 + 8 * u64::from(self.config.size))
    }

    pub(crate) fn used_flags(&self) -> u16 {
        self.get(self.config.used_ring)
    }

    pub(crate) fn used_idx(&self) -> u16 {
        self.get(self.config.used_ring + 2)
    }

    pub(crate) fn set_used_idx(&self, used_idx: u16) {
        self.put(self.config.used_ring + 2, used_idx);
    }

    /// A used element: head and length.
    pub(crate) fn used(&self, index: u16) -> (u32, u32) {
        let entry = u64::from(index & (self.config.size - 1));
        let (mut id, mut len) = ([0; 4], [0; 4]);
        let addr = self.config.used_ring + 4 + entry * 8;
        self.memory.read(addr, &mut id).expect("used ring is mapped");
        self.memory.read(addr + 4, &mut len).expect("used ring is mapped");
        (u32::from_le_bytes(id), u32::from_le_bytes(len))
    }

    fn put(&self, addr: u64, value: u16) {
        self.memory.write(addr, &value.to_le_bytes()).expect("ring is mapped");
    }

    fn get(&self, addr: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.read(addr, &mut bytes).expect("ring is mapped");
        u16::from_le_bytes(bytes)
    }
}

/// Pops a chain that must be there.
pub(crate) fn pop(queue: &mut SplitQueue) -> Chain {
    queue.pop().expect("the ring is good").expect("a chain is available")
}

/// All bytes of the segments, which must agree with what they say of themselves.
pub(crate) fn contents(segments: &Segments) -> Vec<u8> {
    let sum: usize = segments.iovecs().iter().map(|iovec| iovec.iov_len).sum();
    assert_eq!(segments.bytes(), sum);
    assert_eq!(segments.is_empty(), sum == 0);
    assert!(segments.iovecs().iter().all(|iovec| iovec.iov_len > 0), "an empty range");
    let mut bytes = vec![0; sum];
    assert_eq!(segments.copy_to(0, &mut bytes), sum);
    bytes
}
