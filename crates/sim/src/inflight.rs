//! The inflight region, which a VMM keeps while no daemon serves its guest.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use iomem::fits;
use rustix::fs::{MemfdFlags, SeekFrom};
use vhost_user::message::InflightArea;
use virtqueue::{GuestMemory, InflightRegion, MappingRules, RegionConfig, RingLayout};

use crate::plan::Plan;

/// Bytes of an entry of an account, which begins with the mark. The header before the first entry
/// has the same length.
const SPLIT_ENTRY_BYTES: usize = 16;
const PACKED_ENTRY_BYTES: usize = 32;
/// Offsets in an entry for a packed ring: the number of the last entry of the same request, and the
/// id of a descriptor.
const ENTRY_LAST: usize = 4;
const ENTRY_ID: usize = 16;

#[derive(Debug, Clone)]
pub(crate) struct Region {
    pub(crate) area: InflightArea,
    layout: RingLayout,
    file: Arc<File>,
}

impl Region {
    /// The area that the queues of a device need.
    pub(crate) fn wanted(plan: &Plan) -> InflightArea {
        let queues = fits(plan.queue_count(), "a number of queues");
        InflightArea { size: 0, file_offset: 0, queues, queue_size: plan.queue_size() }
    }

    /// Creates a region.
    pub(crate) fn new(plan: &Plan) -> Self {
        let area = Self::wanted(plan);
        let size = InflightRegion::bytes(plan.layout(), area.queues, area.queue_size);
        let file = rustix::fs::memfd_create("inflight", MemfdFlags::CLOEXEC);
        let file = File::from(file.expect("the simulation needs a memory file"));
        file.set_len(size).expect("the simulation needs memory");
        Self::from_parts(plan, InflightArea { size, ..area }, file.into())
    }

    /// A region that a daemon has made.
    pub(crate) fn from_parts(plan: &Plan, area: InflightArea, file: OwnedFd) -> Self {
        Self { area, layout: plan.layout(), file: Arc::new(File::from(file)) }
    }

    pub(crate) fn descriptor(&self) -> OwnedFd {
        self.file.as_fd().try_clone_to_owned().expect("the simulation has too many files open")
    }

    /// The map of a daemon.
    pub(crate) fn map(&self) -> InflightRegion {
        let InflightArea { size, file_offset, queues, queue_size } = self.area;
        let file = Arc::clone(&self.file);
        let config = RegionConfig { guest_addr: 0, size, user_addr: 0, file, file_offset };
        let memory = GuestMemory::new(&[config], &MappingRules::default());
        let memory = Arc::new(memory.expect("the simulation needs memory"));
        InflightRegion::new(memory, queues, queue_size).expect("it was made for these queues")
    }

    /// The heads of marked requests of a queue.
    pub(crate) fn marked(&self, queue: usize) -> Vec<usize> {
        let InflightArea { queue_size, .. } = self.area;
        let of_one = InflightRegion::bytes(self.layout, 1, queue_size);
        let account: usize = fits(of_one, "bytes of an account");
        let content = self.content();
        let entry_bytes = match self.layout {
            RingLayout::Split => SPLIT_ENTRY_BYTES,
            RingLayout::Packed => PACKED_ENTRY_BYTES,
        };
        let entries = content[queue * account..][..account].chunks_exact(entry_bytes);
        let entries: Vec<_> = entries.skip(1).take(queue_size.into()).collect();
        let marked = (0..entries.len()).filter(|at| entries[*at][0] != 0);
        let number = |entry: usize, at: usize| {
            usize::from(u16::from_ne_bytes([entries[entry][at], entries[entry][at + 1]]))
        };
        let head = |entry| match self.layout {
            RingLayout::Split => entry,
            RingLayout::Packed => number(number(entry, ENTRY_LAST), ENTRY_ID),
        };
        marked.map(head).collect()
    }

    pub(crate) fn content(&self) -> Vec<u8> {
        content(&self.file)
    }

    pub(crate) fn set_content(&self, bytes: &[u8]) {
        set_content(&self.file, bytes);
    }
}

/// The content of a memory file.
pub(crate) fn content(file: &File) -> Vec<u8> {
    let len = file.metadata().expect("a memory file has a size").len();
    let mut bytes = vec![0; fits(len, "the size of a memory file")];
    for range in written(file) {
        let start = range.start as u64;
        file.read_exact_at(&mut bytes[range], start).expect("a memory file can be read");
    }
    bytes
}

/// Restores the content of a memory file.
pub(crate) fn set_content(file: &File, bytes: &[u8]) {
    let now = content(file);
    let pages = (0..bytes.len()).step_by(PAGE);
    for page in pages.map(|start| start..bytes.len().min(start + PAGE)) {
        let was = &bytes[page.clone()];
        if *was != now[page.clone()] {
            file.write_all_at(was, page.start as u64).expect("a memory file can be written");
        }
    }
}

const PAGE: usize = 4096;

/// The written parts of a memory file, in whole pages.
fn written(file: &File) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while let Ok(start) = rustix::fs::seek(file, SeekFrom::Data(at)) {
        at = rustix::fs::seek(file, SeekFrom::Hole(start)).expect("its end is a hole");
        let place = |at| fits(at, "the size of a memory file");
        ranges.push(place(start)..place(at));
    }
    ranges
}
