//! How requests look in shared memory, and what is read from their answers: what a driver has
//! to know of the kind of its device.

#![forbid(unsafe_code)]

use crate::blk;
use crate::memory::SharedMemory;
use crate::pattern::Io;

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
}

impl Requests {
    pub(crate) fn form(&self) -> Form {
        match self {
            Self::Blk => blk::FORM,
        }
    }

    /// Writes a request into a slot whose header is at `at`.
    #[inline]
    pub(crate) fn put(&self, memory: &SharedMemory, at: usize, io: &Io) {
        match self {
            Self::Blk => blk::put(memory, at, io),
        }
    }

    /// The result of a completed request, 0 if it went well.
    #[inline]
    pub(crate) fn result(&self, memory: &SharedMemory, at: usize) -> i32 {
        match self {
            Self::Blk => blk::result(memory, at),
        }
    }

    /// Puts a result other than 0 into words.
    pub(crate) fn describe_error(&self, result: i32) -> String {
        match self {
            Self::Blk => blk::describe_error(result),
        }
    }
}
