//! A ring that a test fills by hand, and the memory for it.

use std::fs::File;
use std::sync::Arc;

use iomem::Buffers;
use rustix::fs::{MemfdFlags, memfd_create};
use virtqueue::driver::{self, Desc};
use virtqueue::{Chain, GuestMemory, LocalMemory, QueueConfig, QueueError, SplitQueue};

pub(crate) use driver::{INDIRECT as F_INDIRECT, NEXT as F_NEXT, WRITE as F_WRITE};

pub(crate) const DESC_TABLE: u64 = 0x1000;
pub(crate) const AVAIL_RING: u64 = 0x6000;
pub(crate) const USED_RING: u64 = 0x8000;

/// Two regions that touch, and a separate one.
pub(crate) const RANGES: [(u64, u64); 3] =
    [(0, 0x2_0000), (BORDER, 0x1_0000), (ISLAND, ISLAND_BYTES)];
/// The end of the first region, and the start of the second.
pub(crate) const BORDER: u64 = 0x2_0000;
/// The first address that is not mapped.
pub(crate) const HOLE: u64 = 0x3_0000;
pub(crate) const ISLAND: u64 = 0x8_0000;
pub(crate) const ISLAND_BYTES: u64 = 0x1_0000;

/// Makes an anonymous file of this length.
pub(crate) fn memfd(bytes: u64) -> Arc<File> {
    let file = File::from(memfd_create("virtqueue-test", MemfdFlags::CLOEXEC).expect("memfd"));
    file.set_len(bytes).expect("memfd length");
    Arc::new(file)
}

/// A buffer: guest address, bytes, flags.
pub(crate) type Buffer = (u64, u32, u16);

/// A descriptor: guest address, bytes, flags, next.
pub(crate) type Entry = (u64, u32, u16, u16);

/// The driver's view of a ring in memory of `RANGES`.
pub(crate) type Ring = driver::Ring<Arc<GuestMemory>>;

/// Makes a ring of this size, with indirect descriptors, in fresh memory.
pub(crate) fn new_ring(size: u16, event_idx: bool) -> Ring {
    let memory = Arc::new(GuestMemory::anonymous(&RANGES).expect("memory"));
    Ring::new(memory, config(size, event_idx))
}

/// The usual addresses of a ring.
pub(crate) fn config(size: u16, event_idx: bool) -> QueueConfig {
    QueueConfig {
        size,
        desc_table: DESC_TABLE,
        avail_ring: AVAIL_RING,
        used_ring: USED_RING,
        event_idx,
        indirect: true,
        next_avail: 0,
    }
}

/// Shorthands for tests: tuples for descriptors, and the device's side of the ring.
pub(crate) trait Hand {
    /// The device's side.
    fn queue(&self) -> SplitQueue {
        self.try_queue().expect("the ring is good")
    }

    fn try_queue(&self) -> Result<SplitQueue, QueueError>;

    fn desc(&self, index: u16, entry: Entry);

    /// Writes buffers to consecutive descriptors from `first` on, links them, and makes the chain
    /// available.
    fn chain(&mut self, first: u16, buffers: &[Buffer]);

    /// Writes linked buffers into a table.
    fn table(&self, table: u64, first: u16, buffers: &[Buffer]);

    /// Sets avail idx. The driver continues from there.
    fn set_avail_idx(&mut self, avail_idx: u16);
}

impl Hand for Ring {
    fn try_queue(&self) -> Result<SplitQueue, QueueError> {
        SplitQueue::new(LocalMemory::new(Arc::clone(&self.memory)), self.config)
    }

    fn desc(&self, index: u16, entry: Entry) {
        self.put_desc(index, desc_of(entry));
    }

    fn chain(&mut self, first: u16, buffers: &[Buffer]) {
        self.table(self.config.desc_table, first, buffers);
        self.offer(first);
    }

    fn table(&self, table: u64, first: u16, buffers: &[Buffer]) {
        let buffers: Vec<Desc> =
            buffers.iter().map(|&(addr, len, flags)| desc_of((addr, len, flags, 0))).collect();
        self.put_table(table, first, &buffers);
    }

    fn set_avail_idx(&mut self, avail_idx: u16) {
        self.next_avail = avail_idx;
        self.put_avail_idx(avail_idx);
    }
}

/// Writes a descriptor into a table.
pub(crate) fn write_desc(memory: &GuestMemory, table: u64, index: u16, entry: Entry) {
    let addr = table + u64::from(index) * 16;
    memory.write(addr, &desc_of(entry).bytes()).expect("descriptor is mapped");
}

fn desc_of((addr, len, flags, next): Entry) -> Desc {
    Desc { addr, len, flags, next }
}

/// Pops a chain, which must be available.
pub(crate) fn pop(queue: &mut SplitQueue) -> Chain {
    queue.pop().expect("the ring is good").expect("a chain is available")
}

/// Returns all bytes of the segments, and checks the lengths that they report.
pub(crate) fn contents(segments: &Buffers) -> Vec<u8> {
    let sum: usize = segments.iovecs().iter().map(|iovec| iovec.iov_len).sum();
    assert_eq!(segments.bytes(), sum);
    assert_eq!(segments.is_empty(), sum == 0);
    assert!(segments.iovecs().iter().all(|iovec| iovec.iov_len > 0), "an empty range");
    let mut bytes = vec![0; sum];
    assert_eq!(segments.copy_to(0, &mut bytes), sum);
    bytes
}
