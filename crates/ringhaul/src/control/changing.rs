//! Changes in progress of an export's disks. The export ends only after they do: until then a disk
//! is open, and its file may still change.

use crate::spec::UnitPlace;
use crate::wanted::Wanted;

/// A disk of an export, or the place for one, that is being changed.
pub(super) struct Changing {
    /// `None`: the disk of virtio-blk.
    pub(super) place: Option<UnitPlace>,
    pub(super) kind: Kind,
    /// True while the change blocks hand-overs: it has begun, and the rest of it does not hang.
    /// Opening or closing a disk may take long, and does not block them, because another process
    /// needs nothing of it.
    pub(super) keeps_here: bool,
}

/// The kind of a change.
pub(super) enum Kind {
    /// A unit is being opened, unless that is cancelled.
    Adding(Wanted),
    /// A unit is being closed.
    Removing,
    /// A disk of this identity changes its size.
    Resizing { identity: String, is_local: bool },
}

impl Changing {
    /// Returns true if the disk of this identity changes its size.
    pub(super) fn resizes(&self, identity: &str) -> bool {
        matches!(&self.kind, Kind::Resizing { identity: other, .. } if other == identity)
    }

    /// Returns true if a disk is being opened for a new unit.
    pub(super) fn adds(&self) -> bool {
        matches!(self.kind, Kind::Adding(_))
    }

    /// Returns false for the addition of a unit that was cancelled.
    pub(super) fn is_wanted(&self) -> bool {
        match &self.kind {
            Kind::Adding(wanted) => wanted.is_wanted(),
            Kind::Removing | Kind::Resizing { .. } => true,
        }
    }

    /// Cancels the addition of a unit.
    pub(super) fn give_up_adding(&self) {
        if let Kind::Adding(wanted) = &self.kind {
            wanted.give_up();
        }
    }

    /// Returns true if the change may still alter a local file. Remote disks do not count, because
    /// a cluster that is away may never answer.
    pub(super) fn changes_file(&self) -> bool {
        matches!(self.kind, Kind::Resizing { is_local: true, .. })
    }
}

impl std::fmt::Display for Changing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.kind, self.place) {
            (Kind::Adding(_), Some(place)) => write!(f, "unit {place} is being added"),
            (Kind::Removing, Some(place)) => write!(f, "unit {place} is being removed"),
            (Kind::Resizing { .. }, Some(place)) => write!(f, "unit {place} is being resized"),
            (_, None) => write!(f, "its disk is being resized"),
        }
    }
}
