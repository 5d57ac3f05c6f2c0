//! Events of exports, and their subscribers.
//!
//! Reporting an event never waits: each subscriber has a bounded queue, and loses its subscription
//! when the queue is full.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use blockio::executor::Lock;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::process::peer::Peer;
use crate::spec::UnitPlace;

/// The most events that wait for a subscriber.
pub(crate) const QUEUED_MAX: usize = 256;

/// An event of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ExportEvent {
    /// The name of the export.
    pub(crate) export: String,
    /// The event.
    #[serde(flatten)]
    pub(crate) details: EventDetails,
}

/// The kinds of events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "event", rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub(crate) enum EventDetails {
    /// The export is served.
    Added,
    /// The export has ended, its disks are closed and its name is free.
    Removed,
    /// A front-end has connected.
    Attached {
        /// The process, if the kernel reports it.
        peer: Option<Peer>,
    },
    /// The front-end has disconnected, or was disconnected.
    Gone {
        /// The reason, unless it just disconnected.
        reason: Option<String>,
    },
    /// An error that the guest, the front-end or the disk has caused. That includes a disk that
    /// does not answer, may have lost data, is waited for at the start, or cannot be opened then.
    /// Limited to a few a minute, as in the log.
    Error {
        /// The text of the error.
        message: String,
        /// The number of errors left out before it.
        left_out: u64,
    },
    /// A disk has another size.
    Resized {
        /// The logical unit; none: the disk of a virtio-blk device.
        #[serde(flatten)]
        unit: Option<UnitPlace>,
        /// The size now.
        size_bytes: u64,
    },
    /// A logical unit was added.
    LunAdded {
        /// The place of the unit.
        #[serde(flatten)]
        unit: UnitPlace,
    },
    /// A logical unit was removed, and its disk is closed.
    LunRemoved {
        /// The place of the unit.
        #[serde(flatten)]
        unit: UnitPlace,
    },
}

/// The kinds of events by name, for subscriptions to some of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum EventKind {
    Added,
    Removed,
    Attached,
    Gone,
    Error,
    Resized,
    LunAdded,
    LunRemoved,
}

impl EventDetails {
    /// The kind of the event.
    pub(crate) fn kind(&self) -> EventKind {
        match self {
            Self::Added => EventKind::Added,
            Self::Removed => EventKind::Removed,
            Self::Attached { .. } => EventKind::Attached,
            Self::Gone { .. } => EventKind::Gone,
            Self::Error { .. } => EventKind::Error,
            Self::Resized { .. } => EventKind::Resized,
            Self::LunAdded { .. } => EventKind::LunAdded,
            Self::LunRemoved { .. } => EventKind::LunRemoved,
        }
    }
}

/// All subscribers. Clones share the list.
#[derive(Clone, Default)]
pub(crate) struct Subscribers(Arc<SubscriberState>);

#[derive(Default)]
struct SubscriberState {
    /// The number of subscribers, which IoThreads can read without the lock.
    count: AtomicUsize,
    list: Lock<List>,
}

#[derive(Default)]
struct List {
    next_id: u64,
    queues: Vec<Queue>,
}

/// The sending side of a subscriber's queue.
struct Queue {
    id: u64,
    events: SyncSender<Arc<ExportEvent>>,
    is_full: Arc<AtomicBool>,
}

/// The receiving side of a subscriber's queue.
pub(crate) struct EventReceiver {
    pub(crate) events: Receiver<Arc<ExportEvent>>,
    is_full: Arc<AtomicBool>,
}

/// A subscription. Dropping it ends it.
pub(crate) struct Subscription {
    id: u64,
    subscribers: Subscribers,
}

impl Subscribers {
    /// Returns true if there are no subscribers.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.count.load(Ordering::Acquire) == 0
    }

    /// Reports an event. Never waits; the lock is held only while the event is queued.
    pub(crate) fn report(&self, event: ExportEvent) {
        if self.is_empty() {
            return;
        }
        let event = Arc::new(event);
        self.change(|list| {
            list.queues.retain(|queue| queue.put(&event));
        });
    }

    /// Adds a subscriber, whose queue receives all events from now on. The queue ends when it was
    /// full, or the subscription is dropped.
    pub(crate) fn subscribe(&self) -> (Subscription, EventReceiver) {
        let (sender, receiver) = sync_channel(QUEUED_MAX);
        let is_full = Arc::<AtomicBool>::default();
        let queued = EventReceiver { events: receiver, is_full: Arc::clone(&is_full) };
        let id = self.change(|list| {
            list.next_id += 1;
            list.queues.push(Queue { id: list.next_id, events: sender, is_full });
            list.next_id
        });
        (Subscription { id, subscribers: self.clone() }, queued)
    }

    fn change<T>(&self, change: impl FnOnce(&mut List) -> T) -> T {
        let mut list = self.0.list.lock();
        let result = change(&mut list);
        self.0.count.store(list.queues.len(), Ordering::Release);
        result
    }
}

impl Queue {
    /// Queues an event. Returns false if the subscription is over: the queue is full or its reader
    /// has gone.
    fn put(&self, event: &Arc<ExportEvent>) -> bool {
        let taken = self.events.try_send(Arc::clone(event));
        self.is_full.store(matches!(taken, Err(TrySendError::Full(_))), Ordering::Release);
        taken.is_ok()
    }
}

impl EventReceiver {
    /// The events, until the queue ends.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Arc<ExportEvent>> {
        self.events.iter()
    }

    /// Returns true if the queue ended because the events were not read in time.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.subscribers.change(|list| list.queues.retain(|queue| queue.id != self.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(export: &str, details: EventDetails) -> ExportEvent {
        ExportEvent { export: export.to_owned(), details }
    }

    #[test]
    fn a_subscriber_that_does_not_read_is_dropped_alone() {
        let subscribers = Subscribers::default();
        subscribers.report(event("early", EventDetails::Added));
        let (_slow, queued) = subscribers.subscribe();
        let (fast, read) = subscribers.subscribe();
        for number in 0..2 * QUEUED_MAX {
            subscribers.report(event(&number.to_string(), EventDetails::Added));
            assert_eq!(read.iter().next().unwrap().export, number.to_string());
        }
        // The subscriber reads the queued events, and then the end.
        assert_eq!(queued.iter().count(), QUEUED_MAX);
        drop(fast);
        assert!(read.iter().next().is_none() && subscribers.is_empty());
        assert!(queued.is_full() && !read.is_full());
    }

    #[test]
    fn events_are_flat_objects() {
        let place = UnitPlace { target: 0, lun: 7 };
        for (details, json) in [
            (EventDetails::Added, r#"{"export":"vm","event":"added"}"#),
            (
                EventDetails::Gone { reason: None },
                r#"{"export":"vm","event":"gone","reason":null}"#,
            ),
            (
                EventDetails::Resized { unit: Some(place), size_bytes: 512 },
                r#"{"export":"vm","event":"resized","target":0,"lun":7,"size-bytes":512}"#,
            ),
            (
                EventDetails::Resized { unit: None, size_bytes: 512 },
                r#"{"export":"vm","event":"resized","size-bytes":512}"#,
            ),
            (
                EventDetails::LunAdded { unit: place },
                r#"{"export":"vm","event":"lun-added","target":0,"lun":7}"#,
            ),
        ] {
            let name = serde_json::to_value(details.kind()).unwrap();
            let event = event("vm", details);
            assert_eq!(serde_json::to_string(&event).unwrap(), json);
            let value = serde_json::to_value(&event).unwrap();
            assert_eq!(value["event"], name);
        }
    }
}
