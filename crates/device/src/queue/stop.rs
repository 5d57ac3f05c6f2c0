//! How a queue stops, or goes on after all.

use blockio::Answer;
use virtqueue::ChainFault;

use super::Queue;
use crate::events::QueueFault;
use crate::stats::RequestKind;

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

    /// No more chains are to be taken, those taken finished, then `answer` told the next avail
    /// entry.
    pub(super) fn stop_with(&self, answer: Answer<u16>) {
        *self.stop.borrow_mut() = Some(answer);
    }

    /// It is not to stop, unless it has.
    pub(super) fn go_on(&self, answer: Answer<()>) {
        if self.stop.take().is_some() {
            answer.send(());
        }
    }

    /// Whether the queue is to stop. It does not before it has taken what an earlier process had:
    /// whoever serves it next finds nothing of that in the avail ring.
    #[inline]
    pub(crate) fn is_to_stop(&self) -> bool {
        self.stop.borrow().is_some() && (self.broken.get() || !self.ring.borrow().has_again())
    }

    /// Whom to answer, now that the queue has stopped.
    pub(crate) fn take_stop(&self) -> Option<Answer<u16>> {
        self.stop.take()
    }

    /// Takes no more chains from now on, or takes them again.
    pub(crate) fn set_stopping(&self, stopping: bool) {
        self.stopping.set(stopping);
    }
}
