//! Guest memory: its layout, and maps of it.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use device::Ring;
use rustix::fs::MemfdFlags;
use virtqueue::{GuestMemory, MappingRules, RegionConfig};

use crate::inflight;
use crate::plan::Plan;

/// Bytes for the rings of one queue.
const RINGS_BYTES: u64 = 0x4000;
/// Distance to the second place of all rings.
const RINGS_MOVE: u64 = 0x2_0000;
const RINGS_END: u64 = 2 * RINGS_MOVE;
/// Guest address of the first area.
const AREAS: u64 = 0x10_0000;
/// Bytes for the buffers and the indirect table of one head's chain.
pub(crate) const AREA_BYTES: u64 = 0x8000;
/// The table is at the end of the area.
pub(crate) const TABLE_OFFSET: u64 = AREA_BYTES - 0x400;
/// A guest address that is never mapped.
pub(crate) const UNMAPPED: u64 = 0x7000_0000;

pub(crate) struct Layout {
    /// The memory. A migration replaces it.
    file: RefCell<Arc<File>>,
    areas_bytes: u64,
    region_bytes: u64,
    queue_size: u16,
}

impl Layout {
    pub(crate) fn new(plan: &Plan) -> Self {
        let areas_bytes = plan.queue_count() * u64::from(plan.queue_size()) * AREA_BYTES;
        let region_bytes = if plan.region_kib > 0 { plan.region_kib << 10 } else { areas_bytes };
        let queue_size = plan.queue_size();
        let file = RefCell::new(Arc::new(new_file(RINGS_END + areas_bytes)));
        Self { file, areas_bytes, region_bytes, queue_size }
    }

    /// Guest addresses, sizes and file offsets of all regions. Adjacent regions are apart in the
    /// file, in reverse order. The first region has the rings.
    pub(crate) fn regions(&self) -> Vec<(u64, u64, u64)> {
        let mut regions = vec![(0, RINGS_END, 0)];
        let mut at = 0;
        while at < self.areas_bytes {
            let size = self.region_bytes.min(self.areas_bytes - at);
            let file_offset = RINGS_END + self.areas_bytes - at - size;
            regions.push((AREAS + at, size, file_offset));
            at += size;
        }
        regions
    }

    /// Bytes of all regions.
    pub(crate) fn bytes(&self) -> u64 {
        RINGS_END + self.areas_bytes
    }

    /// The end of the guest addresses.
    pub(crate) fn end(&self) -> u64 {
        AREAS + self.areas_bytes
    }

    /// The place of a guest address in the file, if it is mapped.
    pub(crate) fn file_offset(&self, addr: u64) -> Option<u64> {
        let regions = self.regions().into_iter();
        let mut places =
            regions.filter_map(|(start, size, at)| Some((addr.checked_sub(start)?, size, at)));
        places.find(|(offset, size, _)| offset < size).map(|(offset, _, at)| at + offset)
    }

    /// The guest address of a place in the file.
    pub(crate) fn guest_addr(&self, file_offset: u64) -> u64 {
        let regions = self.regions().into_iter();
        let mut places = regions
            .filter_map(|(start, size, at)| Some((file_offset.checked_sub(at)?, size, start)));
        let place = places.find(|(offset, size, _)| offset < size);
        place.map_or(u64::MAX, |(offset, _, start)| start + offset)
    }

    /// Another file of the same size.
    pub(crate) fn new_file(&self) -> File {
        new_file(self.bytes())
    }

    /// Puts another file in place of the memory. Returns the present one.
    pub(crate) fn replace_file(&self, file: File) -> Arc<File> {
        self.file.replace(Arc::new(file))
    }

    /// Reads from this place in the file on.
    pub(crate) fn read_at(&self, bytes: &mut [u8], file_offset: u64) {
        let file = self.file.borrow();
        file.read_exact_at(bytes, file_offset).expect("a memory file can be read");
    }

    /// The file of the memory.
    pub(crate) fn descriptor(&self) -> OwnedFd {
        self.file
            .borrow()
            .as_fd()
            .try_clone_to_owned()
            .expect("the simulation has too many files open")
    }

    /// The content of the whole memory.
    pub(crate) fn content(&self) -> Vec<u8> {
        inflight::content(&self.file.borrow())
    }

    pub(crate) fn set_content(&self, bytes: &[u8]) {
        inflight::set_content(&self.file.borrow(), bytes);
    }

    /// A new map of the memory.
    pub(crate) fn map(&self) -> GuestMemory {
        let region = |(guest_addr, size, file_offset)| RegionConfig {
            guest_addr,
            size,
            user_addr: guest_addr + 0x5555_0000_0000,
            file: Arc::clone(&self.file.borrow()),
            file_offset,
        };
        let regions: Vec<_> = self.regions().into_iter().map(region).collect();
        GuestMemory::new(&regions, &MappingRules::default()).expect("the simulation needs memory")
    }

    pub(crate) fn ring(&self, queue: usize, next_avail: u16) -> Ring {
        let base = queue as u64 * RINGS_BYTES;
        Ring {
            size: self.queue_size,
            desc_table: base,
            avail_ring: base + 0x1000,
            used_ring: base + 0x2000,
            next_avail,
            next_used: 0,
        }
    }

    /// The second place of a ring.
    pub(crate) fn moved(ring: Ring) -> Ring {
        let moved = |addr| addr ^ RINGS_MOVE;
        Ring {
            desc_table: moved(ring.desc_table),
            avail_ring: moved(ring.avail_ring),
            used_ring: moved(ring.used_ring),
            ..ring
        }
    }

    /// Address of the buffers of the chain with this head.
    pub(crate) fn area(&self, queue: usize, head: u16) -> u64 {
        let index = queue as u64 * u64::from(self.queue_size) + u64::from(head);
        AREAS + index * AREA_BYTES
    }
}

fn new_file(bytes: u64) -> File {
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC);
    let file = File::from(file.expect("the simulation needs a memory file"));
    file.set_len(bytes).expect("the simulation needs memory");
    file
}
