//! What comes of a command, whichever it is.

use iomem::Buffers;
use virtqueue::ChainFault;

use super::persist::FileError;
use super::sense::{DiskUse, Sense};
use super::task_set::{Abort, TaskId, Tasks};

/// Data that commands other than those on the medium take or answer with, at most.
const DATA_MAX: usize = 64 << 10;

/// Why a command is not carried out, or not to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    Check(#[from] Sense),
    /// What the disk says, and what the initiator is told. `moved` bytes were transferred, of the
    /// blocks before the one where it failed.
    #[error("{asked}: {source}")]
    Disk { asked: DiskUse, moved: usize, sense: Sense, source: std::io::Error },
    #[error("another command is in progress that has to end before, or there is no thread for it")]
    Busy,
    #[error("another initiator has reserved the disk")]
    Conflict,
    /// The reservations are as they were before.
    #[error("{0}")]
    NotSaved(#[from] FileError),
    #[error("the CDB asks for more data than the request has room for")]
    Overrun,
    #[error("the device has no such target")]
    BadTarget,
    #[error("{0}")]
    Malformed(&'static str),
    #[error("{0}")]
    Chain(#[from] ChainFault),
    #[error("guest memory is gone: its file was truncated")]
    MemoryGone,
    #[error("the task was aborted")]
    Aborted(Abort),
}

/// Why a command is not carried out: a pointer, since results are passed on with each one that is.
pub(crate) type Refused = Box<Failure>;

#[cold]
pub(crate) fn refused(failure: impl Into<Failure>) -> Refused {
    Box::new(failure.into())
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        *refused
    }
}

/// What has come of a command: the bytes of data that were transferred.
pub(crate) type Moved = Result<usize, Failure>;

/// What a command has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Done {
    /// Bytes of data that were transferred.
    pub(crate) moved: usize,
    /// Bytes of the medium that it was about, for the statistics.
    pub(crate) medium_bytes: u64,
}

impl From<usize> for Done {
    /// What was transferred is what it was about.
    fn from(moved: usize) -> Self {
        Self { moved, medium_bytes: moved as u64 }
    }
}

/// A task, which others may abort at any time.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    pub(crate) tasks: &'a Tasks,
    pub(crate) number: u16,
}

impl Task<'_> {
    pub(crate) fn id(self) -> TaskId {
        self.tasks.id(self.number)
    }

    /// Whether it goes on: asked between the steps of what takes long.
    pub(crate) fn check(self) -> Result<(), Failure> {
        self.tasks.check(self.number).map_err(Failure::Aborted)
    }
}

/// The data of a command.
pub(crate) struct Data {
    /// From the initiator.
    pub(crate) out: Buffers,
    /// To the initiator.
    pub(crate) into: Buffers,
}

impl Data {
    /// Whether there is data in both directions, which no command has.
    #[inline]
    pub(crate) fn is_both_ways(&self) -> bool {
        !self.out.is_empty() && !self.into.is_empty()
    }

    /// Answers with `data`, as far as the CDB allows.
    pub(crate) fn answer(&self, data: &[u8], allocation_length: usize) -> Moved {
        let wanted = data.len().min(allocation_length);
        if wanted > self.into.bytes() {
            return Err(Failure::Overrun);
        }
        Ok(self.into.copy_from(0, &data[..wanted]))
    }

    /// The parameter list, which the CDB says is this long.
    pub(crate) fn list(&self, length: usize) -> Result<Vec<u8>, Failure> {
        self.front_of_list(length, DATA_MAX)
    }

    /// As [`list`](Self::list), of which nothing matters beyond `most` bytes.
    pub(crate) fn front_of_list(&self, length: usize, most: usize) -> Result<Vec<u8>, Failure> {
        if length > self.out.bytes() {
            return Err(Failure::Overrun);
        }
        let mut list = vec![0; length.min(most)];
        self.out.copy_to(0, &mut list);
        Ok(list)
    }
}

impl Failure {
    pub(crate) const BOTH_WAYS: Self = Self::Malformed("it has data in both directions");

    /// Bytes of data that were transferred even so.
    pub(crate) fn moved(&self) -> usize {
        if let Self::Disk { moved, .. } = self { *moved } else { 0 }
    }

    /// Whether a driver that works well brings it about, by asking what there is.
    pub(crate) fn is_usual(&self) -> bool {
        matches!(
            self,
            Self::Check(_) | Self::Conflict | Self::Busy | Self::BadTarget | Self::Aborted(_)
        )
    }
}
