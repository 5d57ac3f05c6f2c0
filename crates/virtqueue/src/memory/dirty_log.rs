//! The log of pages that the device has written, for a front-end that migrates its guest
//! (vhost-user specification, "Migration").

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use iomem::WriteLog;

use super::map::{GuestMemory, to_usize};
use super::shadows::Shadows;
use crate::death::before_store;
use crate::error::MemoryError;

/// The bytes of guest memory that one bit of the log stands for (`VHOST_LOG_PAGE`).
const PAGE_BYTES: u64 = 4096;
/// The bytes of guest memory that one byte of the log stands for.
const BYTES_OF_MARKS: u64 = 8 * PAGE_BYTES;

/// A log of written pages in memory that the front-end shares: a bit for each page of 4 KiB, from
/// guest address 0 on. Several threads and devices mark pages in it at the same time, and the
/// front-end takes marks away.
#[derive(Debug)]
pub struct DirtyLog {
    /// Keeps the log mapped.
    memory: Arc<GuestMemory>,
    marks: *mut u8,
    bytes: u64,
}

// SAFETY: the pointer leads to memory that `memory` keeps mapped, and each access is atomic.
unsafe impl Send for DirtyLog {}
// SAFETY: as above.
unsafe impl Sync for DirtyLog {}

impl DirtyLog {
    /// Makes a log of the first `bytes` bytes of `memory`, a map with one region at address 0.
    ///
    /// # Errors
    ///
    /// If the map is shorter.
    pub fn new(memory: Arc<GuestMemory>, bytes: u64) -> Result<Self, MemoryError> {
        let unmapped = MemoryError::Unmapped { addr: bytes };
        let marks = memory.host_of(0, to_usize(bytes)).ok_or(unmapped)?;
        Ok(Self { memory, marks, bytes })
    }

    /// The end of the guest memory whose pages the log can mark.
    pub fn end(&self) -> u64 {
        self.bytes.saturating_mul(BYTES_OF_MARKS)
    }

    /// Marks the pages of `bytes` bytes from guest address `addr` on, which were written.
    ///
    /// # Panics
    ///
    /// If the range goes beyond the [end](Self::end).
    pub fn mark(&self, addr: u64, bytes: usize) {
        let Some(last) = (bytes as u64).checked_sub(1) else { return };
        let last = addr.checked_add(last).filter(|last| *last < self.end());
        let last = last.unwrap_or_else(|| {
            panic!("{bytes} bytes at guest address {addr:#x} lie beyond the log of writes")
        });
        for page in addr / PAGE_BYTES..=last / PAGE_BYTES {
            // SAFETY: the page is before the end, so its byte is one of `bytes` mapped bytes.
            let marks = unsafe { AtomicU8::from_ptr(self.marks.add(to_usize(page / 8))) };
            before_store();
            // Release: a front-end that takes the mark away sees the bytes that were written.
            marks.fetch_or(1 << (page % 8), Ordering::Release);
        }
        // The front-end may take the marks away before the next store.
        before_store();
    }

    /// Returns true if no access has found memory of the log gone.
    pub fn is_intact(&self) -> bool {
        self.memory.is_intact()
    }
}

/// The log of a queue, and the place of its used ring there.
#[derive(Debug, Clone)]
pub struct QueueLog {
    /// The log.
    pub log: Arc<DirtyLog>,
    /// True if writes through the buffers of chains are marked.
    pub marks_data: bool,
    /// The address under which the log marks the first byte of the used ring, which need not be a
    /// guest address. `None`: writes to the used ring are not marked.
    pub used_ring: Option<u64>,
}

/// Marks writes by their addresses in this process.
pub(super) struct HostWrites {
    pub(super) map: Arc<GuestMemory>,
    pub(super) log: Arc<DirtyLog>,
    pub(super) shadows: Shadows,
}

impl WriteLog for HostWrites {
    fn wrote(&self, start: *const u8, bytes: usize) {
        let addr = self.map.guest_addr_of_host(start);
        let addr = addr.expect("lists have ranges of their map alone");
        self.log.mark(addr, bytes);
        if cfg!(debug_assertions) {
            self.shadows.take_over(&self.map, addr, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_with_a_written_byte_is_marked_and_no_other() {
        for (addr, bytes, expected) in [
            (0, 0, [0, 0]),
            (0, 1, [0b1, 0]),
            (4095, 1, [0b1, 0]),
            (4095, 2, [0b11, 0]),
            (4096, 1, [0b10, 0]),
            (4096, 4096, [0b10, 0]),
            (4096, 4097, [0b110, 0]),
            (7 * 4096, 2 * 4096, [0x80, 1]),
            (15 * 4096, 4096, [0, 0x80]),
        ] {
            let memory = Arc::new(GuestMemory::anonymous(&[(0, 4096)]).unwrap());
            let log = DirtyLog::new(Arc::clone(&memory), 2).unwrap();
            assert_eq!(log.end(), 16 * 4096);
            log.mark(addr, bytes);
            let mut marks = [0; 2];
            memory.read(0, &mut marks).unwrap();
            assert_eq!(marks, expected, "{bytes} bytes at {addr}");
        }
    }
}
