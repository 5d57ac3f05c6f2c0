//! How requests look in shared memory, and what is read from their answers: what a driver has
//! to know of the kind of its device.

#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::blk;
use crate::memory::SharedMemory;
use crate::pattern::Io;
use crate::scsi;
use crate::scsi::lun::Unit;

/// Where the parts of a request are. The header is for the device to read, the response for it to
/// write.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    /// Bytes from the header of a slot to that of the next.
    pub(crate) stride: usize,
    pub(crate) header_bytes: u32,
    /// From the header's start.
    pub(crate) response_at: usize,
    pub(crate) response_bytes: u32,
    /// Whether data that the device writes comes after the response, not before it.
    pub(crate) data_in_last: bool,
}

/// The requests of one kind of device.
#[derive(Clone)]
pub(crate) enum Requests {
    Blk,
    /// To these units.
    Scsi(Arc<[Unit]>),
}

impl Requests {
    pub(crate) fn form(&self) -> Form {
        match self {
            Self::Blk => blk::FORM,
            Self::Scsi(_) => scsi::request::FORM,
        }
    }

    /// How many queues come before those for requests.
    pub(crate) fn first_queue(&self) -> usize {
        match self {
            Self::Blk => 0,
            Self::Scsi(_) => scsi::FIRST_REQUEST_QUEUE,
        }
    }

    /// Writes a request into a slot whose header is at `at`. No other request of the device that is
    /// in flight has the same `tag`.
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

    /// The result of a completed request, 0 if it went well.
    #[inline]
    pub(crate) fn result(&self, memory: &SharedMemory, at: usize) -> i32 {
        match self {
            Self::Blk => blk::result(memory, at),
            Self::Scsi(_) => scsi::request::result(memory, at),
        }
    }

    /// Puts a result other than 0 into words, from a slot that has not been used again.
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
