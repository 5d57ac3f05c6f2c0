//! Events that the driver receives unasked (virtio 1.3, section 5.6.6.3).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use blockio::Io;
use blockio::executor::Lock;
use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_EVT_RESET_REMOVED, VIRTIO_SCSI_EVT_RESET_RESCAN, VIRTIO_SCSI_T_EVENTS_MISSED,
    VIRTIO_SCSI_T_NO_EVENT, VIRTIO_SCSI_T_PARAM_CHANGE, VIRTIO_SCSI_T_TRANSPORT_RESET,
};
use virtqueue::Chain;

use crate::queue::Queue;
use crate::queue::per_thread::PerThread;
use crate::queue::queue_setup::StopKind;
use crate::queue::queue_task::Handler;
use crate::unit_address::UnitAddress;

/// Bytes of an event: kind, LUN, reason.
const EVENT_BYTES: usize = 16;
/// The most events that wait for a buffer; later ones are missed.
pub(crate) const EVENTS_MAX: usize = 64;
/// CAPACITY DATA HAS CHANGED, as the reason of an event: the code, then its qualifier.
const CAPACITY_CHANGED: u32 = 0x2a | 0x09 << 8;

pub(crate) type Event = [u8; EVENT_BYTES];

/// Pending events, with or without a queue for them.
#[derive(Default)]
struct PendingEvents {
    events: VecDeque<Event>,
    missed: bool,
    /// The event queue that was started last.
    queue: PerThread<EventQueue>,
}

/// The destination of events, for any thread.
#[derive(Clone, Default)]
pub(crate) struct EventSink(Arc<Lock<PendingEvents>>);

impl EventSink {
    /// Reports a new unit.
    pub(crate) fn rescan(&self, unit: UnitAddress) {
        self.push_event(VIRTIO_SCSI_T_TRANSPORT_RESET, unit, VIRTIO_SCSI_EVT_RESET_RESCAN);
    }

    /// Reports the removal of a unit.
    pub(crate) fn removed(&self, unit: UnitAddress) {
        self.push_event(VIRTIO_SCSI_T_TRANSPORT_RESET, unit, VIRTIO_SCSI_EVT_RESET_REMOVED);
    }

    /// Reports another size of the medium.
    pub(crate) fn capacity_changed(&self, unit: UnitAddress) {
        self.push_event(VIRTIO_SCSI_T_PARAM_CHANGE, unit, CAPACITY_CHANGED);
    }

    fn push_event(&self, kind: u32, unit: UnitAddress, reason: u32) {
        let mut event = [0; EVENT_BYTES];
        event[..4].copy_from_slice(&kind.to_le_bytes());
        event[4..12].copy_from_slice(&unit.event_bytes());
        event[12..].copy_from_slice(&reason.to_le_bytes());
        let mut waiting = self.0.lock();
        if waiting.events.len() == EVENTS_MAX {
            waiting.missed = true;
        } else {
            waiting.events.push_back(event);
        }
        waiting.queue.post_each(|_| {
            Box::new(|queue| {
                if let Some(queue) = queue {
                    queue.fill_buffers();
                }
            })
        });
    }

    /// The events that wait for a buffer, and true if events were missed.
    pub(crate) fn waiting(&self) -> (Vec<Event>, bool) {
        let waiting = self.0.lock();
        (waiting.events.iter().copied().collect(), waiting.missed)
    }

    /// Takes over the pending events of another process.
    pub(crate) fn take_over(&self, (events, missed): (Vec<Event>, bool)) {
        let mut waiting = self.0.lock();
        (waiting.events, waiting.missed) = (events.into(), missed);
    }

    /// Discards all events: they do not concern the next driver.
    pub(crate) fn clear(&self) {
        let mut waiting = self.0.lock();
        waiting.events.clear();
        waiting.missed = false;
    }
}

/// An event that reports nothing.
fn no_event() -> Event {
    let mut none = [0; EVENT_BYTES];
    none[..4].copy_from_slice(&VIRTIO_SCSI_T_NO_EVENT.to_le_bytes());
    none
}

/// The event queue of a device: chains that the driver has made available for events. When the
/// queue stops they are returned, since no later owner answers them.
pub(crate) struct EventQueue {
    sink: EventSink,
    held: RefCell<VecDeque<Chain>>,
    queue: Weak<Queue>,
}

impl EventQueue {
    pub(crate) fn start(sink: &EventSink, index: u16, io: &Io, queue: &Rc<Queue>) -> Rc<Self> {
        let (sink, queue) = (sink.clone(), Rc::downgrade(queue));
        let started = Rc::new(Self { sink, held: RefCell::default(), queue });
        started.sink.0.lock().queue.insert(index, io, &started);
        started
    }

    /// Writes pending events into the held chains.
    fn fill_buffers(&self) {
        let Some(queue) = self.queue.upgrade() else { return };
        let mut waiting = self.sink.0.lock();
        let mut held = self.held.borrow_mut();
        while waiting.missed || !waiting.events.is_empty() {
            let Some(chain) = held.pop_front() else { break };
            let mut event = waiting.events.pop_front().unwrap_or_else(no_event);
            if std::mem::take(&mut waiting.missed) {
                event[3] |= VIRTIO_SCSI_T_EVENTS_MISSED.to_le_bytes()[3];
            }
            let written = chain.writable.copy_from(0, &event);
            queue.push(chain.head, iomem::fits(written, "bytes of an event"));
        }
        drop(waiting);
        queue.wake();
    }
}

impl Handler for EventQueue {
    async fn serve(self: Rc<Self>, queue: Rc<Queue>, chain: Chain) {
        if chain.fault.is_some() || chain.writable.bytes() < EVENT_BYTES {
            // The chain cannot take an event, so none is lost with it.
            queue.push(chain.head, 0);
            return;
        }
        self.held.borrow_mut().push_back(chain);
        self.fill_buffers();
    }

    fn stop(&self, queue: &Queue, _: StopKind) {
        for chain in self.held.take() {
            // Drivers read the buffer, regardless of the length, and it may hold an old event.
            let written = chain.writable.copy_from(0, &no_event());
            queue.push(chain.head, iomem::fits(written, "bytes of an event"));
        }
    }
}
