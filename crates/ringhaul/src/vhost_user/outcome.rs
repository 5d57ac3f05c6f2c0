//! The result of a message: an answer, a refusal, or work that must be waited for. A refusal ends
//! the connection if nothing else shows it to the front-end; the session decides that.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use device::Pending;

use super::inflight::Inflight;
use super::message::{InflightArea, RingAddresses};
use super::shared_memory::SharedMemory;
use super::undo::Undo;

/// The result of a message.
pub(super) enum Outcome {
    /// It has an answer of its own.
    Answer(Vec<u8>),
    /// It has one that brings a descriptor.
    AnswerWith(Vec<u8>, OwnedFd),
    /// It was carried out.
    Done,
    /// It was not, and the connection continues.
    Refuse(Refusal),
    /// It will be.
    Later(Work),
    /// It was, and for this reason a queue that should run cannot: the connection ends.
    End(String),
}

impl Outcome {
    pub(super) fn not_offered(code: u32) -> Self {
        Self::Refuse(Refusal::harmless(format!("message {code}, which was not offered")))
    }
}

/// Why a message is not carried out.
pub(super) struct Refusal {
    pub(super) text: String,
    /// Front-end and device would disagree if the front-end did not learn of it.
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
    Map(Pending<io::Result<SharedMemory>>, Purpose),
    /// Rings stop; then this is done.
    Stop(Change),
    /// Rings start, as far as they can; then it is answered.
    Start(Start),
    /// The memory before it is unmapped; then it is answered. What is mapped counts until then.
    Unmap(Pending<()>),
}

/// What memory is mapped for.
#[derive(Clone, Copy)]
pub(super) enum Purpose {
    Guest,
    Inflight(InflightArea),
}

/// What can be done only while rings do not run.
pub(super) enum Change {
    Features(u64),
    Memory(SharedMemory),
    Inflight(Inflight),
    Size(usize, u16),
    Addresses(usize, RingAddresses),
    Base(usize, u16),
    Kick(usize, Option<Arc<OwnedFd>>),
    GetBase(usize),
    Disable(usize),
    ResetOwner,
    /// With the `writeback` that the driver chose, or without.
    Reset {
        keep_writeback: bool,
    },
    /// A ring did not start after a change, which is refused for this reason.
    Restore(Undo, Refusal),
}

impl Change {
    /// The rings that it concerns, of so many.
    pub(super) fn rings(&self, count: usize) -> Range<usize> {
        match *self {
            Self::Restore(ref undo, _) => undo.rings.clone(),
            Self::Features(_)
            | Self::Memory(_)
            | Self::Inflight(_)
            | Self::ResetOwner
            | Self::Reset { .. } => 0..count,
            Self::Size(index, _)
            | Self::Addresses(index, _)
            | Self::Base(index, _)
            | Self::Kick(index, _)
            | Self::GetBase(index)
            | Self::Disable(index) => index..index + 1,
        }
    }
}

/// The answer when rings have started.
pub(super) struct Start {
    pub(super) answer: Result<Option<Vec<u8>>, Refusal>,
    /// What was before the message, which is refused if a ring does not start. None: that is no
    /// fault of this message.
    pub(super) undo: Option<Undo>,
    /// Memory that goes meanwhile.
    pub(super) unmapped: Option<Pending<()>>,
}

impl Start {
    pub(super) fn without_answer(undo: Undo) -> Self {
        Self { answer: Ok(None), undo: Some(undo), unmapped: None }
    }
}
