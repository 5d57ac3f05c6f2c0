//! What comes of a message: an answer, a refusal, or work that must be waited for. A refusal ends
//! the connection where nothing else tells the front-end of it; that is for the session to say.

use std::io;
use std::os::fd::OwnedFd;

use virtqueue::GuestMemory;

use super::message::RingAddresses;
use crate::pending::Pending;

/// What comes of a message.
pub(super) enum Outcome {
    /// It has an answer of its own.
    Answer(Vec<u8>),
    /// It was carried out.
    Done,
    /// It was not, and the connection goes on.
    Refuse(Refusal),
    /// It will be.
    Later(Work),
}

/// Why a message is not carried out.
pub(super) struct Refusal {
    pub(super) text: String,
    /// Front-end and device would go apart if the front-end did not hear of it.
    pub(super) must_be_heard: bool,
}

impl Refusal {
    pub(super) fn to_be_heard(error: impl std::fmt::Display) -> Self {
        Self { text: error.to_string(), must_be_heard: true }
    }

    /// What a guest can cause, or what was never offered: nothing depends on it.
    pub(super) fn harmless(text: impl std::fmt::Display) -> Self {
        Self { text: text.to_string(), must_be_heard: false }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::to_be_heard(error)
    }
}

/// What a message waits for.
pub(super) enum Work {
    /// Its memory is examined and mapped.
    Map(Pending<io::Result<GuestMemory>>),
    /// Rings stop; then this is done.
    Stop(Change),
    /// Rings start, as far as they can; then it is answered.
    Start(Start),
}

/// What can be done only while rings do not run.
pub(super) enum Change {
    Features(u64),
    Memory(GuestMemory),
    Size(usize, u16),
    Addresses(usize, RingAddresses),
    Base(usize, u16),
    Kick(usize, Option<OwnedFd>),
    GetBase(usize),
    Disable(usize),
    ResetOwner,
    /// With the `writeback` that the driver chose, or without.
    Reset {
        keep_writeback: bool,
    },
}

/// Which rings start, and the answer that is given afterwards.
pub(super) struct Start {
    pub(super) answer: Option<Vec<u8>>,
    /// A ring that does not start is no fault of this message.
    pub(super) is_tolerant: bool,
}
