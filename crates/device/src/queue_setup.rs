//! What a queue starts with, why one does not, and how it stops.

use std::num::NonZeroU16;
use std::sync::Arc;

use blockio::Answer;
use blockio::disk::Waits;
use rustix::fd::OwnedFd;
use virtqueue::{
    AnswerPlace, GuestMemory, InflightQueue, LocalMemory, QueueConfig, QueueError, SplitQueue,
};

use crate::call_watch::CallTrust;
use crate::events::Events;
use crate::load::Load;
use crate::stats::QueueStats;

/// What a queue starts with.
pub struct QueueSetup {
    /// The memory that the ring's addresses and the driver's buffers are in.
    pub memory: Arc<GuestMemory>,
    /// Where the ring is.
    pub ring: Ring,
    /// Where requests are marked while they are in the device, for the process after this one.
    pub inflight: Option<InflightQueue>,
    /// Written by the driver when it has made chains available. `None`: the driver never kicks.
    pub kick: Option<OwnedFd>,
    /// An eventfd, added to when the driver should look at the used ring. `None`: the driver polls.
    pub call: Option<OwnedFd>,
    /// An eventfd, added to when the ring is bad.
    pub err: Option<OwnedFd>,
}

/// What was negotiated for a queue, and how it works.
pub(crate) struct QueueOptions {
    pub(crate) index: u16,
    /// What it takes are requests, and not buffers for events.
    pub(crate) takes_requests: bool,
    pub(crate) event_idx: bool,
    pub(crate) indirect: bool,
    pub(crate) notify_batch: bool,
    pub(crate) prefetch: bool,
    pub(crate) in_order: bool,
    pub(crate) run_max: Option<NonZeroU16>,
    pub(crate) long_lists_bytes: u64,
    pub(crate) load: Arc<Load>,
    pub(crate) answer_place: AnswerPlace,
    pub(crate) events: Arc<dyn Events>,
    pub(crate) trust: Arc<CallTrust>,
    pub(crate) stats: Arc<QueueStats>,
    /// Whoever served the queue before has not stopped it as this process does.
    pub(crate) is_new: bool,
}

impl QueueSetup {
    /// The ring, as it was left: by an earlier process, where there is an inflight region.
    pub(crate) fn open_ring(
        &self,
        memory: LocalMemory,
        options: &QueueOptions,
    ) -> Result<SplitQueue, QueueError> {
        let config = self.ring.config(options.event_idx, options.indirect);
        let Some(inflight) = &self.inflight else {
            let ring = SplitQueue::new(memory, config)?;
            if options.is_new && !options.in_order && self.ring.next_avail != 0 {
                options.events.queue_goes_on(options.index, self.ring.next_avail);
            }
            return Ok(ring);
        };
        let (ring, recovery) = SplitQueue::with_inflight(memory, config, inflight)?;
        // Nothing is done with buffers for events: they only lie there again.
        if options.takes_requests {
            options.events.queue_recovered(options.index, recovery);
        }
        Ok(ring)
    }
}

/// A split virtqueue's place in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// Entries: a power of two, at most 1024.
    pub size: u16,
    /// Guest address of the descriptor table.
    pub desc_table: u64,
    /// Guest address of the avail ring.
    pub avail_ring: u64,
    /// Guest address of the used ring.
    pub used_ring: u64,
    /// The avail entry to begin with, unless the inflight region knows better.
    pub next_avail: u16,
}

impl Ring {
    /// What either side of the ring needs, with or without these two features.
    pub const fn config(self, event_idx: bool, indirect: bool) -> QueueConfig {
        let Self { size, desc_table, avail_ring, used_ring, next_avail } = self;
        QueueConfig { size, desc_table, avail_ring, used_ring, event_idx, indirect, next_avail }
    }
}

/// What becomes of requests that wait when their queue stops: for limits, for a disk that has
/// failed them, or for others that wait so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopKind {
    /// It stops for good. They begin in spite of limits, and fail if their disk does.
    Final,
    /// It stops to go on soon. They begin in spite of limits, and none fails because of this: the
    /// queue does not stop before their disk has carried them out.
    Pause,
    /// They are left in the inflight region, to whoever serves the queue next. Without a region, or
    /// if the ring is bad, this is [`Final`](Self::Final).
    Leave,
    /// The device ends, or its driver has gone. As [`Leave`](Self::Leave), where that is possible.
    /// Otherwise as [`Final`](Self::Final), and a transfer ends with an error of which more than 64
    /// MiB are left.
    End,
}

impl StopKind {
    /// How they wait meanwhile.
    pub(crate) fn waits(self) -> Waits {
        match self {
            Self::Final | Self::End => Waits::Never,
            Self::Pause => Waits::ForTries,
            Self::Leave => Waits::UntilLater,
        }
    }
}

/// Somebody waits for a queue to stop.
pub(crate) struct Stop {
    pub(crate) kind: StopKind,
    /// Told the avail entry that is popped next.
    pub(crate) answer: Answer<u16>,
}

/// Why a queue does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The device has no queue of this number.
    #[error("queue {index} is started, but there are {count}")]
    NoSuchQueue {
        /// The number.
        index: u16,
        /// How many there are.
        count: u16,
    },
    /// The ring is not as the specification demands.
    #[error(transparent)]
    Ring(#[from] QueueError),
    /// The queue's IoThread has ended.
    #[error("the IoThread of the queue has ended")]
    ThreadEnded,
}
