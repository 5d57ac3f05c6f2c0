//! The memory that a front-end shares: the map, the files behind it, and the log of written pages
//! that a front-end keeps while it migrates its guest ("Migration").
//!
//! The files stay open so that a process that takes over can map them too.

use std::io;
use std::sync::Arc;

use virtqueue::{DirtyLog, GuestMemory, MappingRules, MemoryError, RegionConfig};

use super::message::{LogArea, Region};
use super::peer_fds::{HeldFile, PeerFd};

/// The memory of one front-end.
pub(super) struct SharedMemory {
    pub(super) map: Arc<GuestMemory>,
    /// A file for each region, in the order in which the regions came.
    pub(super) files: Vec<MemoryFile>,
}

/// A region of the map, and the file that is mapped there.
#[derive(Clone)]
pub(super) struct MemoryFile {
    pub(super) region: Region,
    pub(super) file: Arc<HeldFile>,
}

impl SharedMemory {
    /// Returns memory without regions.
    pub(super) fn empty() -> Self {
        Self { map: Arc::new(GuestMemory::empty()), files: Vec::new() }
    }

    /// Maps regions, each with its descriptor: alone, or in addition to `before`. Closes the files
    /// that cannot be mapped. Only the mapping itself may wait; closing files does not.
    ///
    /// # Errors
    ///
    /// If the files are not memory, or violate the rules.
    pub(super) fn map(
        before: Option<(Arc<GuestMemory>, Vec<MemoryFile>)>,
        regions: &[Region],
        fds: Vec<PeerFd>,
        rules: &MappingRules,
    ) -> io::Result<Self> {
        let held = regions.iter().zip(fds).filter_map(|(region, fd)| {
            Some(MemoryFile { region: *region, file: Arc::new(fd.into_held()?) })
        });
        let held: Vec<MemoryFile> = held.collect();
        let configs: Vec<RegionConfig> = held.iter().map(MemoryFile::config).collect();
        let (map, mut files) = match (before, &configs[..]) {
            (Some((map, files)), [config]) => (map.with_region(config, rules), files),
            (_, configs) => (GuestMemory::new(configs, rules), Vec::new()),
        };
        drop(configs);
        let map = Arc::new(map.map_err(io::Error::other)?);
        files.extend(held);
        Ok(Self { map, files })
    }

    /// Returns this memory without the region `gone`.
    ///
    /// # Errors
    ///
    /// If no region has these addresses and this size.
    pub(super) fn without(&self, gone: &Region) -> Result<Self, MemoryError> {
        let Region { guest_addr, user_addr, size, .. } = *gone;
        let map = Arc::new(self.map.without_region(guest_addr, user_addr, size)?);
        let mut files = self.files.clone();
        files.retain(|MemoryFile { region, .. }| {
            (region.guest_addr, region.user_addr, region.size) != (guest_addr, user_addr, size)
        });
        Ok(Self { map, files })
    }
}

impl MemoryFile {
    fn config(&self) -> RegionConfig {
        let Region { guest_addr, size, user_addr, file_offset } = self.region;
        RegionConfig { guest_addr, size, user_addr, file: self.file.file(), file_offset }
    }
}

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
