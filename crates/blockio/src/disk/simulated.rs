//! Disks of a simulated kernel.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::file::alignment::Alignment;
use super::file::partial_blocks::Blocks;
use super::file::size_probe::FileEnd;
use super::file::source::FileSource;
use super::{DiskInfo, DiskSource, SourceKind};

impl DiskSource {
    /// A disk with the given properties, for a simulated kernel that knows it by the descriptor of
    /// `file`. Memory and requests of direct I/O are aligned to these bytes.
    pub fn simulated(
        file: OwnedFd,
        info: DiskInfo,
        is_block_device: bool,
        memory_align: u32,
        request_align: u32,
    ) -> Self {
        let align = Alignment { memory: memory_align, request: request_align, range: 512 };
        let has_parts = info.logical_block_bytes < request_align;
        let blocks = has_parts.then(|| Arc::new(Blocks::new(request_align)));
        let file = Arc::new(file.into());
        let file = FileSource {
            file,
            is_block_device,
            is_rotational: false,
            discard_bytes: Some(info.logical_block_bytes),
            align,
            identity: "".into(),
            size_probe: None,
            end: Arc::new(FileEnd::unseen(info.logical_block_bytes.max(request_align))),
            blocks,
            is_exclusive: Arc::default(),
        };
        Self::new(info, SourceKind::File(file))
    }

    /// Forgets a loss of data, like opening the disk again. No op may be in the kernel.
    pub fn open_again(&self) {
        if let SourceKind::File(file) = &self.kind {
            file.file.loss().forget();
        }
    }
}
