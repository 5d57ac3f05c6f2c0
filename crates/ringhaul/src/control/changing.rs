//! What somebody is changing of an export. The export has not ended before that has: the disk is
//! open until then, and its file may still change.

use crate::spec::UnitPlace;
use crate::wanted::Wanted;

/// A disk of an export, or the place for one, that somebody is changing.
pub(super) struct Changing {
    /// That of virtio-blk has no address.
    pub(super) place: Option<UnitPlace>,
    pub(super) kind: Kind,
    /// No other process takes over before it ends: it has begun, and what is left does not hang. To
    /// open or close a disk may take long, and another process needs nothing of it.
    pub(super) keeps_here: bool,
}

/// How it changes.
pub(super) enum Kind {
    /// A unit is being opened, as long as it is wanted.
    Adding(Wanted),
    /// A unit is being closed.
    Removing,
    /// A disk of this identity gets another size.
    Resizing { identity: String, is_local: bool },
}

impl Changing {
    /// Whether somebody gives the disk of this identity another size.
    pub(super) fn resizes(&self, identity: &str) -> bool {
        matches!(&self.kind, Kind::Resizing { identity: other, .. } if other == identity)
    }

    /// Whether a disk is being opened for a new unit.
    pub(super) fn adds(&self) -> bool {
        matches!(self.kind, Kind::Adding(_))
    }

    /// False: it is a unit that was given up before it was added.
    pub(super) fn is_wanted(&self) -> bool {
        match &self.kind {
            Kind::Adding(wanted) => wanted.is_wanted(),
            Kind::Removing | Kind::Resizing { .. } => true,
        }
    }

    /// Nobody wants the unit any more that is being added, if one is.
    pub(super) fn give_up_adding(&self) {
        if let Kind::Adding(wanted) = &self.kind {
            wanted.give_up();
        }
    }

    /// Whether the file may change before this ends. A cluster that is away may never answer.
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
