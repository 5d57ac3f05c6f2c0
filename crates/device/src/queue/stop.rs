//! The stop of a queue, and its cancellation.

use blockio::oneshot;
use virtqueue::ChainFault;

use super::queue_setup::{Stop, StopKind};
use super::{Queue, QueueHandle};
use crate::events::QueueFault;
use crate::stats::{ErrorCause, RequestKind};

impl QueueHandle {
    /// Stops the queue: takes no further chains, and returns when all taken chains are answered,
    /// however long the disk needs. Returns the place at which the next start continues, as
    /// [`QueueHandle::base`] states it, or `None` if the IoThread has ended.
    #[must_use]
    pub fn stop(self) -> Option<u32> {
        self.begin_final_stop().wait()
    }

    /// Like [`stop`](Self::stop), for callers that must not block, such as the loop that serves the
    /// queue.
    #[must_use]
    pub fn begin_final_stop(&self) -> oneshot::Receiver<u32> {
        self.begin_stop(StopKind::Final)
    }

    /// Like [`begin_final_stop`](Self::begin_final_stop), with another treatment of waiting
    /// requests.
    #[must_use]
    pub fn begin_stop(&self, kind: StopKind) -> oneshot::Receiver<u32> {
        let (answer, base) = oneshot::channel();
        self.post(move |queue| *queue.control.stop.borrow_mut() = Some(Stop { kind, answer }));
        base
    }

    /// Cancels a stop that is not yet answered: the queue continues as if no stop had been
    /// requested, and the stop is ready with `None`. If the queue has stopped, or the IoThread has
    /// ended, the cancellation is ready with `None`.
    #[must_use]
    pub fn begin_resume(&self) -> oneshot::Receiver<()> {
        let (answer, resumed) = oneshot::channel();
        self.post(|queue| {
            if queue.control.stop.take().is_some() {
                answer.send(());
            }
        });
        resumed
    }
}

impl Queue {
    /// Returns a chain that has no room for a status. It cannot be answered, so the queue stops.
    #[cold]
    pub(crate) fn push_unanswered(&self, head: u16, fault: Option<ChainFault>) {
        self.refuse(RequestKind::Other, self.pop_time(head), ErrorCause::Invalid);
        self.push(head, 0);
        self.set_broken(&match fault {
            None => QueueFault::NoStatus { head },
            Some(fault) => QueueFault::Chain { head, fault },
        });
    }

    /// True if the queue must stop now. It first takes the chains that an earlier process had
    /// taken: the next start would not find them in the avail ring.
    #[inline]
    pub(crate) fn is_to_stop(&self) -> bool {
        self.control.stop.borrow().is_some()
            && (self.flags.broken.get() || !self.ring.borrow().has_recovered())
    }

    /// The kind of the stop, as far as this queue can follow it.
    pub(crate) fn stop_kind(&self) -> StopKind {
        let kind = self.control.stop.borrow().as_ref().map_or(StopKind::Final, |stop| stop.kind);
        let can_keep = self.flags.keeps_waiting && !self.flags.broken.get();
        match kind {
            StopKind::KeepInflight if !can_keep => StopKind::Final,
            StopKind::DriverGone if can_keep => StopKind::KeepInflight,
            other => other,
        }
    }

    /// Takes the means to answer the stop request, now that the queue has stopped.
    pub(crate) fn take_stop(&self) -> Option<oneshot::Sender<u32>> {
        Some(self.control.stop.take()?.answer)
    }

    /// Takes no chains from now on, or takes them again.
    pub(crate) fn set_stopping(&self, stopping: bool) {
        self.flags.stopping.set(stopping);
        if stopping {
            self.budgets.data.cancel_wait();
        }
    }
}
