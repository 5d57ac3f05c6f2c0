//! Jobs for the owner of an image.

use std::ops::Range;

/// A job for the owner. Ranges lie in the disk.
pub(in crate::qcow2) enum Job {
    /// Open the image, if it is not open yet.
    Open,
    /// Look the places of these bytes up.
    LookUp(Range<u64>),
    Read(Range<u64>),
    Write(u64, Vec<u8>),
    /// Find space for these ranges among the clusters that were counted ahead. The result has a
    /// byte for each, 0 if that was not possible.
    Place(Vec<Range<u64>>),
    Discard(Range<u64>),
    Zero {
        range: Range<u64>,
        may_unmap: bool,
    },
    Grow(u64),
    /// Bring the image to rest: another process may take it over.
    Quiesce,
}

impl Job {
    /// True if the job may change tables.
    pub(super) fn may_change_tables(&self) -> bool {
        match self {
            Self::Write(..)
            | Self::Place(_)
            | Self::Discard(_)
            | Self::Zero { .. }
            | Self::Grow(_) => true,
            Self::Open | Self::LookUp(_) | Self::Read(_) | Self::Quiesce => false,
        }
    }

    /// A copy of a job that releases space, with its range.
    pub(super) fn releasing_copy(&self) -> Option<(Range<u64>, Self)> {
        match self {
            Self::Discard(range) => Some((range.clone(), Self::Discard(range.clone()))),
            Self::Zero { range, may_unmap: true } => {
                Some((range.clone(), Self::Zero { range: range.clone(), may_unmap: true }))
            }
            _ => None,
        }
    }
}
