//! The inflight region: made for a front-end, which keeps it and sends it with every start.

use std::io;
use std::os::fd::OwnedFd;

use device::Device;
use device::blk::config::{F_RING_PACKED, WRITEBACK_OFFSET};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use virtqueue::{InflightError, InflightRegion, MAX_QUEUE_SIZE, RingLayout};

use super::message::InflightArea;
use super::ring::invalid;
use super::shared_memory::{MemoryFile, SharedMemory};

/// The region that a front-end has sent.
#[derive(Clone)]
pub(super) struct Inflight {
    pub(super) region: InflightRegion,
    pub(super) area: InflightArea,
    /// The files that are mapped there.
    pub(super) files: Vec<MemoryFile>,
}

impl Inflight {
    /// The region that this memory holds.
    pub(super) fn new(area: InflightArea, memory: SharedMemory) -> Result<Self, InflightError> {
        let SharedMemory { map, files } = memory;
        let region = InflightRegion::new(map, area.queues, area.queue_size)?;
        Ok(Self { region, area, files })
    }

    /// Restores to the device the `writeback` that the previous process noted in the region:
    /// front-ends do not repeat a driver's earlier write to the configuration space.
    pub(super) fn restore_writeback(self, device: &Device) -> Self {
        if let (Device::Blk(_), Some(writeback)) = (device, self.region.note()) {
            // The field exists and takes any value.
            let _ = device.write_config(WRITEBACK_OFFSET, &[writeback]);
        }
        self
    }

    /// Notes the `writeback` that the driver chose, before its write is acknowledged.
    pub(super) fn store_writeback(&self, device: &Device) {
        if let Device::Blk(_) = device
            && let [writeback] = device.read_config(WRITEBACK_OFFSET, 1)[..]
        {
            self.region.set_note(writeback);
        }
    }
}

/// Makes a region for the queues of `area`, and a file that holds only this region. A later driver
/// may choose another layout of its rings, so the region has room for all layouts that are offered.
pub(super) fn make(area: InflightArea, device: &Device) -> io::Result<(InflightArea, OwnedFd)> {
    let InflightArea { queues, queue_size, .. } = area;
    let count = device.num_queues();
    if !(1..=count).contains(&queues) || !(1..=MAX_QUEUE_SIZE).contains(&queue_size) {
        let text = format!(
            "it asks for an inflight region for {queues} queues of {queue_size} entries; the \
             device has {count} queues of up to {MAX_QUEUE_SIZE}"
        );
        return Err(invalid(text));
    }
    let longest = match device.features() & 1 << F_RING_PACKED {
        0 => RingLayout::Split,
        _ => RingLayout::Packed,
    };
    let size = InflightRegion::bytes_with_note(longest, queues, queue_size);
    let file = file_of(size)
        .map_err(|error| io::Error::other(format!("cannot make an inflight region: {error}")))?;
    Ok((InflightArea { size, file_offset: 0, ..area }, file))
}

/// A memory file sealed against changes of its size, so that no process can take memory away from
/// another that maps it.
fn file_of(bytes: u64) -> rustix::io::Result<OwnedFd> {
    let file = memfd_create("ringhaul-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}
