//! The requests of each kind of device in shared memory, and their responses.

#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::blk;
use crate::memory::{RequestLayout, SharedMemory};
use crate::pattern::Io;
use crate::scsi;
use crate::scsi::lun::Unit;

/// The requests of one kind of device.
#[derive(Clone)]
pub(crate) enum RequestKind {
    Blk,
    /// Requests to these units.
    Scsi(Arc<[Unit]>),
}

impl RequestKind {
    pub(crate) fn layout(&self) -> RequestLayout {
        match self {
            Self::Blk => blk::LAYOUT,
            Self::Scsi(_) => scsi::request::LAYOUT,
        }
    }

    /// The number of queues before the request queues.
    pub(crate) fn first_queue(&self) -> usize {
        match self {
            Self::Blk => 0,
            Self::Scsi(_) => scsi::FIRST_REQUEST_QUEUE,
        }
    }

    /// Writes a request into the slot with its header at `at`. No other request in flight to the
    /// device has the same `tag`.
    #[inline]
    pub(crate) fn put(&self, memory: &SharedMemory, at: usize, tag: u64, io: &Io) {
        match self {
            Self::Blk => blk::put(memory, at, io),
            Self::Scsi(units) => {
                let unit = &units[usize::from(io.unit)];
                scsi::request::put(memory, at, tag, unit.address.field(), unit.command(io));
            }
        }
    }

    /// The result of a completed request, 0 for success.
    #[inline]
    pub(crate) fn result(&self, memory: &SharedMemory, at: usize) -> i32 {
        match self {
            Self::Blk => blk::result(memory, at),
            Self::Scsi(_) => scsi::request::result(memory, at),
        }
    }

    /// Describes a result other than 0, before the slot is used again.
    pub(crate) fn describe_error(&self, memory: &SharedMemory, at: usize, result: i32) -> String {
        match self {
            Self::Blk => blk::describe_error(result),
            Self::Scsi(_) => scsi::request::response(memory, at).to_string(),
        }
    }

    /// The name of a unit, if the device can have several.
    pub(crate) fn unit_name(&self, unit: u16) -> Option<String> {
        match self {
            Self::Blk => None,
            Self::Scsi(units) => Some(units[usize::from(unit)].address.to_string()),
        }
    }
}
