//! Outcomes of commands of all kinds.

use iomem::Buffers;
use virtqueue::ChainFault;

use crate::access::persist::FileError;
use crate::access::sense::{DiskUse, Sense};
use crate::access::task_set::{Abort, TaskId, Tasks};
use crate::stats::ErrorCause;

/// The most bytes that are read of a parameter list.
const DATA_MAX: usize = 64 << 10;

/// A command that is not carried out, or not completely.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    Check(#[from] Sense),
    /// A disk error, and the sense data for the initiator. `moved` bytes were transferred: the
    /// blocks before the failing one.
    #[error("{asked}: {source}")]
    Disk { asked: DiskUse, moved: usize, sense: Sense, source: std::io::Error },
    #[error("another command must end first, or no thread is free")]
    Busy,
    #[error("another initiator has reserved the disk")]
    Conflict,
    /// The reservations are unchanged.
    #[error("{0}")]
    NotSaved(#[from] FileError),
    #[error("the CDB asks for more data than the buffers of the request can hold")]
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

/// The failure of a command. A pointer keeps results small, since every success moves one too.
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

/// The bytes of data that a command transferred.
pub(crate) type Transferred = Result<usize, Failure>;

/// The effect of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Effect {
    /// Bytes of data that were transferred.
    pub(crate) moved: usize,
    /// Bytes of the medium that the command concerned, for the statistics.
    pub(crate) medium_bytes: u64,
}

impl From<usize> for Effect {
    /// Counts the transferred bytes as bytes of the medium.
    fn from(moved: usize) -> Self {
        Self { moved, medium_bytes: moved as u64 }
    }
}

/// A task, which may be aborted at any time.
#[derive(Clone, Copy)]
pub(crate) struct TaskHandle<'a> {
    pub(crate) tasks: &'a Tasks,
    pub(crate) number: u16,
}

impl TaskHandle<'_> {
    pub(crate) fn id(self) -> TaskId {
        self.tasks.id(self.number)
    }

    /// Checks that the task was not aborted. Called between the steps of long commands.
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
    /// True if there is data in both directions, which no command has.
    #[inline]
    pub(crate) fn is_both_ways(&self) -> bool {
        !self.out.is_empty() && !self.into.is_empty()
    }

    /// Answers with `data`, cut to the allocation length of the CDB.
    pub(crate) fn answer(&self, data: &[u8], allocation_length: usize) -> Transferred {
        let wanted = data.len().min(allocation_length);
        if wanted > self.into.bytes() {
            return Err(Failure::Overrun);
        }
        Ok(self.into.copy_from(0, &data[..wanted]))
    }

    /// Reads the parameter list, which is `length` bytes long by the CDB.
    pub(crate) fn list(&self, length: usize) -> Result<Vec<u8>, Failure> {
        self.front_of_list(length, DATA_MAX)
    }

    /// Like [`list`](Self::list), but reads at most `most` bytes: nothing matters beyond them.
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
    pub(crate) const BOTH_WAYS: Self = Self::Malformed("it transfers data in both directions");

    /// Bytes of data that were transferred despite the failure.
    pub(crate) fn moved(&self) -> usize {
        if let Self::Disk { moved, .. } = self { *moved } else { 0 }
    }

    /// The cause in the statistics.
    pub(crate) fn cause(&self) -> ErrorCause {
        match self {
            Self::Check(_)
            | Self::Overrun
            | Self::BadTarget
            | Self::Malformed(_)
            | Self::Chain(_) => ErrorCause::Invalid,
            Self::Disk { source, .. } => ErrorCause::from_disk_error(source),
            Self::Busy | Self::NotSaved(_) | Self::MemoryGone => ErrorCause::Unavailable,
            Self::Conflict => ErrorCause::Reserved,
            Self::Aborted(_) => ErrorCause::Aborted,
        }
    }

    /// True if correct drivers cause the failure, by probing for example.
    pub(crate) fn is_expected(&self) -> bool {
        matches!(
            self,
            Self::Check(_) | Self::Conflict | Self::Busy | Self::BadTarget | Self::Aborted(_)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Drivers may give buffers of any length.
    #[test]
    fn no_more_of_a_list_is_read_than_counts() {
        let data = Data { out: Buffers::aligned(100, 1), into: Buffers::empty() };
        for (length, most, read) in [(100, 10, 10), (10, 100, 10), (100, 100, 100), (0, 10, 0)] {
            assert_eq!(data.front_of_list(length, most).unwrap().len(), read, "{length} {most}");
        }
        assert!(matches!(data.front_of_list(101, 10), Err(Failure::Overrun)));
    }
}
