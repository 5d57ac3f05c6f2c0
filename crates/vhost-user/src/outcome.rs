//! The result of a message: an answer, a refusal, or work that must be waited for. The session ends
//! the connection on a refusal that nothing else shows to the front-end.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use device::{Device, Negotiated, oneshot};

use super::inflight::Inflight;
use super::message::{InflightArea, LogArea, RingAddresses};
use super::peer_fds::PeerFd;
use super::ring::{RingSettings, RingState};
use super::shared_memory::SharedMemory;

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
    /// The message was carried out, but a queue that should run cannot, or written data may be
    /// lost, for this reason: the connection ends.
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
    /// The change is made and kept; then its rings start.
    Restart(Range<usize>, Start),
    /// Rings start, as far as they can; then the message is answered.
    Start(Start),
    /// The previous memory is unmapped, and counts as mapped until then. Then the message is
    /// answered.
    Unmap(oneshot::Receiver<()>),
    /// The thread of an earlier front-end ends; then the ring gets this call descriptor.
    Call(usize, Option<PeerFd>),
}

/// The work at the end of a connection.
#[derive(Default)]
pub(super) struct Release {
    /// Pending until its memory is unmapped.
    pub(super) unmapped: Option<oneshot::Receiver<()>>,
    /// Pending until its lock is released. A failure is in the log.
    pub(super) unlocked: Option<oneshot::Receiver<io::Result<()>>>,
}

impl Release {
    pub(super) fn is_pending(&self) -> bool {
        self.unmapped.as_ref().is_some_and(|unmapped| unmapped.check().is_pending())
            || self.unlocked.as_ref().is_some_and(|unlocked| unlocked.check().is_pending())
    }
}

/// The use of mapped memory.
#[derive(Clone, Copy)]
pub(super) enum Purpose {
    Guest,
    Inflight(InflightArea),
    Log(LogArea),
}

/// The handling of waiting requests when the front-end asks for the base of their ring.
#[derive(Clone, Copy)]
pub(super) enum AtStop {
    /// All requests are answered.
    Finish,
    /// Waiting requests are left in the inflight region, if there is one.
    Leave,
}

/// A change that can be made only while its rings do not run.
pub(super) enum Change {
    Features(u64),
    Memory(SharedMemory),
    Inflight(Inflight),
    Size(usize, u16),
    /// With the address of the used ring in the log, if its writes are logged.
    Addresses(usize, RingAddresses, Option<u64>),
    Base(usize, u32),
    Kick(usize, Option<Arc<OwnedFd>>),
    GetBase(usize, AtStop),
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
            | Self::Addresses(index, ..)
            | Self::Base(index, _)
            | Self::Kick(index, _)
            | Self::GetBase(index, _)
            | Self::Disable(index) => index..index + 1,
        }
    }
}

/// The answer when rings have started.
pub(super) struct Start {
    pub(super) answer: Result<Option<Vec<u8>>, Refusal>,
    /// The settings before the message, which is refused if a ring does not start. `None` if a
    /// failed start is not the fault of this message.
    pub(super) undo: Option<Box<Undo>>,
    /// Pending until the previous memory is unmapped.
    pub(super) unmapped: Option<oneshot::Receiver<()>>,
    /// A change that follows instead of the answer.
    pub(super) next: Option<Box<Change>>,
}

impl Start {
    pub(super) fn without_answer(undo: Undo) -> Self {
        Self { answer: Ok(None), undo: Some(Box::new(undo)), unmapped: None, next: None }
    }
}

/// The settings of rings and device before a change. A refused message changes nothing.
pub(super) struct Undo {
    pub(super) rings: Range<usize>,
    /// The inflight region of all rings.
    pub(super) inflight: Box<Option<Inflight>>,
    settings: Box<[RingSettings]>,
    /// The base of the one ring. That of other rings follows from the chains that they
    /// popped.
    base: Option<u32>,
    negotiated: Box<Negotiated>,
    rings_need_enable: bool,
    pub(super) log_all: bool,
}

impl Undo {
    /// Records the settings of these rings, which do not run.
    pub(super) fn new(
        all: &[RingState],
        rings: Range<usize>,
        device: &Device,
        inflight: Option<&Inflight>,
        [rings_need_enable, log_all]: [bool; 2],
    ) -> Self {
        let settings = all[rings.clone()].iter().map(|ring| ring.settings.clone()).collect();
        let negotiated = Box::new(device.negotiated());
        let inflight = Box::new(inflight.cloned());
        Self { rings, inflight, settings, base: None, negotiated, rings_need_enable, log_all }
    }

    /// Records also the base of the one ring, which the change replaces.
    pub(super) fn with_base(self, base: u32) -> Self {
        Self { base: Some(base), ..self }
    }

    /// Restores the settings, while none of the rings runs. Returns true if rings need to be
    /// enabled.
    pub(super) fn restore(self, all: &mut [RingState], device: &Device) -> bool {
        for (ring, settings) in all[self.rings].iter_mut().zip(self.settings) {
            ring.settings = settings;
            ring.base = self.base.unwrap_or(ring.base);
        }
        device.restore(&self.negotiated);
        self.rings_need_enable
    }
}
