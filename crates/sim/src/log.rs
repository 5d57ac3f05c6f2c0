//! A log of written pages, as the VMM shares it with a device.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use iomem::fits;
use rustix::fs::MemfdFlags;
use vhost_user::message::LogArea;
use virtqueue::{DirtyLog, GuestMemory, MappingRules, RegionConfig};

use crate::ram::PAGE_BYTES;

/// Bytes of the file, more than the memory of any guest needs.
pub(crate) const LOG_BYTES: u64 = 4096;

pub(crate) struct Log {
    file: Arc<File>,
    /// The bytes that the device may use.
    bytes: u64,
}

impl Log {
    /// A log for guest memory up to this address.
    pub(crate) fn new(end: u64) -> Self {
        let file = rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC);
        let file = File::from(file.expect("the simulation needs a memory file"));
        file.set_len(LOG_BYTES).expect("the simulation needs memory");
        let bytes = end.div_ceil(8 * PAGE_BYTES);
        assert!(bytes <= LOG_BYTES, "a guest has too much memory for a log");
        Self { file: Arc::new(file), bytes }
    }

    pub(crate) fn area(&self) -> LogArea {
        LogArea { size: self.bytes, file_offset: 0 }
    }

    pub(crate) fn descriptor(&self) -> OwnedFd {
        self.file.as_fd().try_clone_to_owned().expect("the simulation has too many files open")
    }

    /// The map of a daemon without a session.
    pub(crate) fn map(&self) -> Arc<DirtyLog> {
        let file = Arc::clone(&self.file);
        let config =
            RegionConfig { guest_addr: 0, size: LOG_BYTES, user_addr: 0, file, file_offset: 0 };
        let memory = GuestMemory::new(&[config], &MappingRules::default());
        let memory = Arc::new(memory.expect("the simulation needs memory"));
        Arc::new(DirtyLog::new(memory, self.bytes).expect("it has room for all marks"))
    }

    /// Returns the marked pages, and removes their marks. All threads of a simulation are one, so
    /// nothing comes between.
    pub(crate) fn take(&self) -> Vec<u64> {
        let mut marks = vec![0; fits(LOG_BYTES, "the bytes of a log")];
        self.file.read_exact_at(&mut marks, 0).expect("a memory file can be read");
        if marks.iter().all(|byte| *byte == 0) {
            return Vec::new();
        }
        self.file.write_all_at(&vec![0; marks.len()], 0).expect("a memory file can be written");
        let bits = |(at, byte): (usize, u8)| {
            (0..8).filter(move |bit| byte & 1 << bit != 0).map(move |bit| 8 * at as u64 + bit)
        };
        marks.into_iter().enumerate().flat_map(bits).collect()
    }
}
