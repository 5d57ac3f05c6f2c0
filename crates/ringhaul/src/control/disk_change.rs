//! Changes in progress of an export's disks. The export ends only after they do: until then a disk
//! is open, and its file may still change.

use disks::open::CancelToken;

use crate::spec::UnitPlace;

/// A disk of an export, or the place for one, that is being changed.
pub(super) struct DiskChange {
    /// `None`: the disk of virtio-blk.
    pub(super) place: Option<UnitPlace>,
    pub(super) kind: DiskChangeKind,
    /// True while the change blocks hand-overs: it has begun, and the rest of it does not hang.
    /// Opening or closing a disk may take long, and does not block them, because another process
    /// needs nothing of it.
    pub(super) blocks_hand_over: bool,
}

/// The kind of a change.
pub(super) enum DiskChangeKind {
    /// A unit is being opened, unless that is cancelled.
    Adding(CancelToken),
    /// A unit is being closed.
    Removing,
    /// A disk of this identity changes its size.
    Resizing { identity: String, is_local: bool },
}

impl DiskChange {
    /// Returns true if the disk of this identity changes its size.
    pub(super) fn resizes(&self, identity: &str) -> bool {
        matches!(&self.kind, DiskChangeKind::Resizing { identity: other, .. } if other == identity)
    }

    /// Returns true if a disk is being opened for a new unit.
    pub(super) fn adds(&self) -> bool {
        matches!(self.kind, DiskChangeKind::Adding(_))
    }

    /// Returns false for the addition of a unit that was cancelled.
    pub(super) fn is_active(&self) -> bool {
        match &self.kind {
            DiskChangeKind::Adding(token) => token.is_active(),
            DiskChangeKind::Removing | DiskChangeKind::Resizing { .. } => true,
        }
    }

    /// Cancels the addition of a unit.
    pub(super) fn cancel_addition(&self) {
        if let DiskChangeKind::Adding(token) = &self.kind {
            token.cancel();
        }
    }

    /// Returns true if the change may still alter a local file. Remote disks do not count, because
    /// a cluster that is away may never answer.
    pub(super) fn changes_file(&self) -> bool {
        matches!(self.kind, DiskChangeKind::Resizing { is_local: true, .. })
    }
}

impl std::fmt::Display for DiskChange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.kind, self.place) {
            (DiskChangeKind::Adding(_), Some(place)) => write!(f, "unit {place} is being added"),
            (DiskChangeKind::Removing, Some(place)) => write!(f, "unit {place} is being removed"),
            (DiskChangeKind::Resizing { .. }, Some(place)) => {
                write!(f, "unit {place} is being resized")
            }
            (_, None) => write!(f, "its disk is being resized"),
        }
    }
}
