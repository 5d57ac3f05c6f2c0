//! The queue as a source of the loop: kicks, the end of a turn, and the check before a sleep.

use std::time::Instant;

use blockio::thread::{Armed, Source};

use super::Queue;

impl Source for Queue {
    fn notify(&self) {
        self.flags.to_notify.set(false);
        self.publish_turn();
    }

    fn arm(&self, now: Instant) -> Armed {
        if self.is_halted() || self.flags.stopping.get() {
            Armed::Full
        } else if self.ring.borrow_mut().enable_kicks() {
            Armed::HasWork
        } else {
            self.batching.borrow_mut().note_sleep(now);
            Armed::Yes
        }
    }

    fn disarm(&self) {
        self.ring.borrow_mut().disable_kicks();
    }

    fn on_event(&self) {
        probe::probe!(ringhaul, kick, self.number(), self.reports.index);
        self.reports.requests.kicks.add(1);
    }

    fn has_work(&self) -> bool {
        !self.is_halted() && !self.flags.stopping.get() && self.ring.borrow().has_available()
    }
}
