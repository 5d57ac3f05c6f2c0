//! What somebody is changing of an export. The export has not ended before that has: the disk is
//! open until then, and its file may still change.

use crate::spec::UnitPlace;

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
#[derive(PartialEq, Eq)]
pub(super) enum Kind {
    /// A unit is being opened.
    Adding,
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

    /// Whether the file may change before this ends. A cluster that is away may never answer.
    pub(super) fn changes_file(&self) -> bool {
        matches!(self.kind, Kind::Resizing { is_local: true, .. })
    }
}

impl std::fmt::Display for Changing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.kind, self.place) {
            (Kind::Adding, Some(place)) => write!(f, "unit {place} is being added"),
            (Kind::Removing, Some(place)) => write!(f, "unit {place} is being removed"),
            (Kind::Resizing { .. }, Some(place)) => write!(f, "unit {place} is being resized"),
            (_, None) => write!(f, "its disk is being resized"),
        }
    }
}
