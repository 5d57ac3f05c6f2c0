//! Start options of a queue, the errors of a start, and the kinds of stop.

use std::num::NonZeroU16;
use std::sync::Arc;

use blockio::disk::WaitMode;
use blockio::oneshot;
use rustix::fd::OwnedFd;
use virtqueue::{
    AnswerPlace, GuestMemory, InflightAccount, LocalMemory, QueueConfig, QueueError, QueueLog,
    RingLayout, Virtqueue,
};

use crate::events::Events;
use crate::queue::buffer_budget::LONG_LISTS_BYTES;
use crate::queue::call_watch::CallTrust;
use crate::queue::data_budget::DataBudget;
use crate::stats::QueueStats;

/// The base of a new packed ring: its first descriptor twice, with the wrap counters.
const PACKED_START: u32 = 0x8000_8000;

/// Memory, ring and eventfds of a queue that starts.
pub struct QueueSetup {
    /// The memory of the ring's addresses and the driver's buffers.
    pub memory: Arc<GuestMemory>,
    /// The place of the ring.
    pub ring: Ring,
    /// The region that marks requests while they are in the device, for the next process.
    pub inflight: Option<InflightAccount>,
    /// True if the region serves only the case that this process is killed: the driver's side does
    /// not know it. A queue that stops then finishes its requests, as without a region.
    pub region_is_own: bool,
    /// Written by the driver after it has made chains available. `None`: the driver never kicks.
    pub kick: Option<OwnedFd>,
    /// An eventfd to add to when the driver should check the used ring. `None`: the driver polls.
    pub call: Option<OwnedFd>,
    /// An eventfd to add to when the ring is bad.
    pub err: Option<OwnedFd>,
    /// The log of pages that the device writes, for a driver whose guest migrates.
    pub log: Option<QueueLog>,
}

/// Options of the queues of a device, of either kind.
#[derive(Debug, Clone, Copy)]
pub struct QueueTuning {
    /// Lets completed requests share a call. Off is for measurement: then each request checks if
    /// the driver wants a call.
    pub notify_batch: bool,
    /// Lets the processor fetch data of the next requests while one is served (see
    /// [`Virtqueue::set_prefetch`](virtqueue::Virtqueue::set_prefetch)). Off is for measurement.
    pub prefetch: bool,
    /// For measurement: the chains of one run, at most 1024, with a check after each run if the
    /// driver wants a call. `None`: both adapt to measured values.
    pub run_max: Option<NonZeroU16>,
    /// Registers the memory of the driver with engines that can keep its pages at hand. Only for
    /// memory that never loses pages (see `Io::register_memory`).
    pub fixed_buffers: bool,
    /// The limit on the bytes of long buffer lists on one IoThread, at which the device leaves
    /// chains in its rings.
    pub long_lists_bytes: u64,
}

impl Default for QueueTuning {
    fn default() -> Self {
        Self {
            notify_batch: true,
            prefetch: true,
            run_max: None,
            fixed_buffers: false,
            long_lists_bytes: LONG_LISTS_BYTES,
        }
    }
}

/// Negotiated features and options of a queue.
pub(crate) struct QueueOptions {
    pub(crate) index: u16,
    /// True if chains are requests, false if they are buffers for events.
    pub(crate) takes_requests: bool,
    pub(crate) event_idx: bool,
    pub(crate) indirect: bool,
    pub(crate) layout: RingLayout,
    pub(crate) tuning: QueueTuning,
    pub(crate) in_order: bool,
    pub(crate) data_budget: Arc<DataBudget>,
    pub(crate) answer_place: AnswerPlace,
    pub(crate) events: Arc<dyn Events>,
    pub(crate) trust: Arc<CallTrust>,
    pub(crate) stats: Arc<QueueStats>,
    /// True if the queue was neither started here before nor handed over by another process.
    pub(crate) is_new: bool,
}

impl QueueSetup {
    /// Makes the set-up of a queue in `memory` at `ring`, without an inflight region and without
    /// `err`. The driver kicks through the eventfd `kick`, and the device calls through `call`.
    pub fn new(memory: Arc<GuestMemory>, ring: Ring, kick: OwnedFd, call: OwnedFd) -> Self {
        let (kick, call) = (Some(kick), Some(call));
        Self {
            memory,
            ring,
            inflight: None,
            region_is_own: false,
            kick,
            call,
            err: None,
            log: None,
        }
    }

    /// Returns true if requests that wait may be left in the region for the next start.
    pub(crate) fn keeps_waiting(&self) -> bool {
        self.inflight.is_some() && !self.region_is_own
    }

    /// Opens the ring at its last state: the state of an earlier process, if there is an inflight
    /// region.
    pub(crate) fn open_ring(
        &self,
        memory: LocalMemory,
        options: &QueueOptions,
    ) -> Result<Virtqueue, QueueError> {
        let config = self.ring.config(options.event_idx, options.indirect);
        let Some(inflight) = &self.inflight else {
            let start = match options.layout {
                RingLayout::Split => 0,
                RingLayout::Packed => PACKED_START,
            };
            let ring = Virtqueue::new(memory, options.layout, config, self.ring.next_used)?;
            if options.is_new && !options.in_order && ring.base() != start {
                options.events.queue_continued(options.index, self.ring.next_avail);
            }
            return Ok(ring);
        };
        let (ring, recovery) = Virtqueue::with_inflight(
            memory,
            options.layout,
            config,
            self.ring.next_used,
            inflight,
        )?;
        // Buffers for events need no recovery: they merely become available again.
        if options.takes_requests {
            options.events.queue_recovered(options.index, recovery);
        }
        Ok(ring)
    }
}

/// The place of a virtqueue in guest memory. The fields have the names of a split queue's parts;
/// [`virtqueue::PackedQueue::new`] states those of a packed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// Entries, at most 1024: a power of two, if the queue is split.
    pub size: u16,
    /// Guest address of the descriptor table.
    pub desc_table: u64,
    /// Guest address of the avail ring.
    pub avail_ring: u64,
    /// Guest address of the used ring.
    pub used_ring: u64,
    /// The first avail entry to pop, unless the inflight region has a later state.
    pub next_avail: u16,
    /// The place of the next used element in a packed ring, unless the region has a later one. A
    /// split ring has it in memory.
    pub next_used: u16,
}

impl Ring {
    /// The configuration for either side of the ring, with or without these two features.
    pub const fn config(self, event_idx: bool, indirect: bool) -> QueueConfig {
        let Self { size, desc_table, avail_ring, used_ring, next_avail, .. } = self;
        QueueConfig { size, desc_table, avail_ring, used_ring, event_idx, indirect, next_avail }
    }
}

/// The treatment of waiting requests when their queue stops. They wait for limits, for another try
/// at a disk that has failed them, or for requests that wait so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopKind {
    /// The queue stops for good. Waiting requests begin in spite of limits, and fail if their disk
    /// fails them.
    Final,
    /// The queue stops for a moment. Waiting requests begin in spite of limits, and none fails
    /// because of the stop: it ends only after their disk has carried them out.
    Pause,
    /// Waiting requests stay in the inflight region for the next start of the queue, here or in
    /// another process. Without a region, or if the ring is bad, this is [`Final`](Self::Final).
    KeepInflight,
    /// The device ends, or its driver has gone. Like [`KeepInflight`](Self::KeepInflight), where
    /// that is possible. Otherwise like [`Final`](Self::Final), and a transfer with more than 64
    /// MiB left ends with an error.
    DriverGone,
}

impl StopKind {
    /// The way in which requests wait during the stop.
    pub(crate) fn wait_mode(self) -> WaitMode {
        match self {
            Self::Final | Self::DriverGone => WaitMode::Never,
            Self::Pause => WaitMode::RetriesOnly,
            Self::KeepInflight => WaitMode::Frozen,
        }
    }
}

/// A request to stop a queue.
pub(crate) struct Stop {
    pub(crate) kind: StopKind,
    /// Receives the place at which the next start of the ring continues.
    pub(crate) answer: oneshot::Sender<u32>,
}

/// The reasons why a queue does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The device has no queue of this number.
    #[error("queue {index} is started, but there are {count}")]
    NoSuchQueue {
        /// The number.
        index: u16,
        /// The number of queues.
        count: u16,
    },
    /// Answers are to be in order, in a packed ring: without an inflight region, no process finds
    /// the place of its next used element.
    #[error(
        "answers in order need a split ring, and the driver negotiated packed ones; do not offer \
         packed rings to a driver without an inflight region"
    )]
    PackedInOrder,
    /// The ring violates the specification.
    #[error(transparent)]
    Ring(#[from] QueueError),
    /// The queue's IoThread has ended.
    #[error("the IoThread of the queue has ended")]
    ThreadEnded,
}
