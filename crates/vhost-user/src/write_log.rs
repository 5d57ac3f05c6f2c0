//! The log of written pages that a front-end keeps while it migrates its guest
//! ("Migration").

use std::sync::Arc;

use virtqueue::{DirtyLog, MemoryError};

use super::message::LogArea;
use super::shared_memory::{MemoryFile, SharedMemory};

/// The log that a front-end has sent.
pub(super) struct WriteLog {
    pub(super) log: Arc<DirtyLog>,
    pub(super) area: LogArea,
    /// The file that is mapped there.
    pub(super) files: Vec<MemoryFile>,
}

impl WriteLog {
    /// The log that this memory holds.
    pub(super) fn new(area: LogArea, memory: SharedMemory) -> Result<Self, MemoryError> {
        let SharedMemory { map, files } = memory;
        Ok(Self { log: Arc::new(DirtyLog::new(map, area.size)?), area, files })
    }
}
