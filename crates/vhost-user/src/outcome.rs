//! The result of a message: an answer, a refusal, or work that must be waited for. The session ends
//! the connection on a refusal that nothing else shows to the front-end.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use device::oneshot;

use super::inflight::Inflight;
use super::message::{InflightArea, RingAddresses};
use super::shared_memory::SharedMemory;
use super::undo::Undo;

/// The result of a message.
pub(super) enum Outcome {
    /// An answer with this body.
    Answer(Vec<u8>),
    /// An answer with this body and a descriptor.
    AnswerWith(Vec<u8>, OwnedFd),
    /// The message was carried out.
    Done,
    /// The message was refused, and the connection continues.
    Refuse(Refusal),
    /// The message waits for this work.
    Later(Work),
    /// The message was carried out, but a queue that should run cannot, for this reason: the
    /// connection ends.
    End(String),
}

impl Outcome {
    pub(super) fn not_offered(code: u32) -> Self {
        Self::Refuse(Refusal::harmless(format!("message {code} was not offered")))
    }
}

/// The reason that a message is not carried out.
pub(super) struct Refusal {
    pub(super) text: String,
    /// True if front-end and device would disagree unless the front-end learns of the refusal.
    pub(super) needs_ack: bool,
}

impl Refusal {
    pub(super) fn needing_ack(error: impl std::fmt::Display) -> Self {
        Self { text: error.to_string(), needs_ack: true }
    }

    /// A refusal that a guest can cause, or of a message that was never offered: nothing depends on
    /// it.
    pub(super) fn harmless(text: impl std::fmt::Display) -> Self {
        Self { text: text.to_string(), needs_ack: false }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::needing_ack(error)
    }
}

/// The work that a message waits for.
pub(super) enum Work {
    /// A thread examines and maps memory.
    Map(oneshot::Receiver<io::Result<SharedMemory>>, Purpose),
    /// Rings stop; then the change is made.
    Stop(Change),
    /// Rings start, as far as they can; then the message is answered.
    Start(Start),
    /// The previous memory is unmapped, and counts as mapped until then. Then the message is
    /// answered.
    Unmap(oneshot::Receiver<()>),
}

/// The use of mapped memory.
#[derive(Clone, Copy)]
pub(super) enum Purpose {
    Guest,
    Inflight(InflightArea),
}

/// A change that can be made only while its rings do not run.
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
    /// Keeps or resets the `writeback` that the driver chose.
    Reset {
        keep_writeback: bool,
    },
    /// Undoes a change after which a ring did not start, and refuses its message.
    Restore(Undo, Refusal),
}

impl Change {
    /// The rings of the change; the device has `count` rings.
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
    /// The settings before the message, which is refused if a ring does not start. `None` if a
    /// failed start is not the fault of this message.
    pub(super) undo: Option<Undo>,
    /// Pending until the previous memory is unmapped.
    pub(super) unmapped: Option<oneshot::Receiver<()>>,
}

impl Start {
    pub(super) fn without_answer(undo: Undo) -> Self {
        Self { answer: Ok(None), undo: Some(undo), unmapped: None }
    }
}
