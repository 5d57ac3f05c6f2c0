//! How a queue stops, or goes on after all.

use blockio::{Answer, Pending};
use virtqueue::ChainFault;

use super::{Queue, QueueHandle};
use crate::events::QueueFault;
use crate::queue_setup::{Stop, StopKind};
use crate::stats::RequestKind;

impl QueueHandle {
    /// Stops the queue: no more chains are taken, and this returns when all that were taken have
    /// been answered, however long the disk needs. Returns the next avail entry, or `None` when
    /// the IoThread has ended.
    #[must_use]
    pub fn stop(self) -> Option<u16> {
        self.begin_stop().wait()
    }

    /// As [`stop`](Self::stop), for callers that must not block, such as the loop that serves the
    /// queue.
    #[must_use]
    pub fn begin_stop(&self) -> Pending<u16> {
        self.begin_stop_as(StopKind::Final)
    }

    /// The same, with another lot for requests that wait.
    #[must_use]
    pub fn begin_stop_as(&self, kind: StopKind) -> Pending<u16> {
        let (answer, next_avail) = Pending::new();
        self.tell(move |queue| *queue.stop.borrow_mut() = Some(Stop { kind, answer }));
        next_avail
    }

    /// Has a queue go on that was told to stop and has not answered, as if nobody had told it. That
    /// stop is not answered then. If it has stopped, or the IoThread has ended, this is not: it is
    /// ready with nothing.
    #[must_use]
    pub fn begin_go_on(&self) -> Pending<()> {
        let (answer, goes_on) = Pending::new();
        self.tell(|queue| {
            if queue.stop.take().is_some() {
                answer.send(());
            }
        });
        goes_on
    }
}

impl Queue {
    /// Gives a chain back that has no room for a status. It cannot be answered, so the queue stops.
    #[cold]
    pub(crate) fn push_unanswered(&self, head: u16, fault: Option<ChainFault>) {
        self.requests.count_error(RequestKind::Other);
        self.push(head, 0);
        self.set_broken(&match fault {
            None => QueueFault::NoStatus { head },
            Some(fault) => QueueFault::Chain { head, fault },
        });
    }

    /// Whether the queue is to stop. It does not before it has taken what an earlier process had:
    /// whoever serves it next finds nothing of that in the avail ring.
    #[inline]
    pub(crate) fn is_to_stop(&self) -> bool {
        self.stop.borrow().is_some() && (self.broken.get() || !self.ring.borrow().has_again())
    }

    /// How it is to stop.
    pub(crate) fn stop_kind(&self) -> StopKind {
        let kind = self.stop.borrow().as_ref().map_or(StopKind::Final, |stop| stop.kind);
        let can_leave = self.is_marked && !self.broken.get();
        match kind {
            StopKind::Leave if !can_leave => StopKind::Final,
            StopKind::End if can_leave => StopKind::Leave,
            other => other,
        }
    }

    /// Whom to answer, now that the queue has stopped.
    pub(crate) fn take_stop(&self) -> Option<Answer<u16>> {
        Some(self.stop.take()?.answer)
    }

    /// Takes no more chains from now on, or takes them again.
    pub(crate) fn set_stopping(&self, stopping: bool) {
        self.stopping.set(stopping);
        if stopping {
            self.load.leave_line();
        }
    }
}
