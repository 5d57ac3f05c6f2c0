//! The turns of IoThreads, and actions within them.

use std::cell::Cell;
use std::time::Instant;

use super::World;

/// The end of a turn of an IoThread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum TurnEnd {
    /// Without a sleep, or with a sleep that was ended.
    #[default]
    Awake,
    /// The IoThread would still sleep.
    Asleep,
}

/// The turn that an IoThread takes.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// True during a turn.
    pub(super) runs: Cell<bool>,
    pub(super) spins: Cell<u64>,
    pub(super) end: Cell<TurnEnd>,
    /// Nanoseconds for which ops have held up the IoThread that submits them.
    pub(super) held_ns: Cell<u64>,
    /// Bytes that were moved without an op.
    pub(super) copied: Cell<usize>,
    /// A submission thread of io_uring submits.
    pub(super) is_sq_thread: Cell<bool>,
    pub(super) sleeps: Cell<bool>,
}

/// The number of times that busy-polling has found work, and has not.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Polls {
    pub(crate) found: u64,
    pub(crate) missed: u64,
}

/// An action besides the kernel's, at the points where a turn allows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Actor {
    /// Any action.
    Any,
    /// The guest that keeps a queue busy.
    Rush,
    /// No action: the daemon dies at this point, and guests save its effects.
    Death,
}

impl World {
    /// Begins a turn of an IoThread. If the thread sleeps, the turn ends.
    pub(crate) fn begin_turn(&self) {
        self.turn.runs.set(true);
        self.turn.spins.set(0);
        self.turn.sleeps.set(false);
        self.turn.held_ns.set(0);
        self.turn.copied.set(0);
        self.turn.end.set(TurnEnd::Awake);
    }

    /// True within a turn of an IoThread.
    pub(crate) fn is_in_turn(&self) -> bool {
        self.turn.runs.get()
    }

    pub(crate) fn end_turn(&self) -> TurnEnd {
        self.turn.runs.set(false);
        let mut polls = self.polls.get();
        if self.turn.spins.get() > 0 {
            *(if self.turn.sleeps.get() { &mut polls.missed } else { &mut polls.found }) += 1;
        }
        self.polls.set(polls);
        self.turn.end.get()
    }

    /// Nanoseconds for which ops have held up the IoThread in its last turn.
    pub(crate) fn held_in_turn(&self) -> u64 {
        self.turn.held_ns.get()
    }

    /// Performs the kernel's part of a submit: time advances by `time_ns`.
    pub(super) fn hold(&self, time_ns: u64) {
        if self.turn.runs.get() && !self.is_dead() && !self.turn.is_sq_thread.get() {
            self.turn.held_ns.set(self.turn.held_ns.get() + time_ns);
            self.advance_to(self.now.get() + time_ns);
        }
    }

    /// Moves bytes without an op: time advances as for an op that holds the submitter.
    pub(crate) fn copy(&self, bytes: usize) {
        self.turn.copied.set(self.turn.copied.get() + bytes);
        self.hold(bytes as u64 * self.plan.byte_ns);
    }

    /// Bytes that the last turn has moved without an op.
    pub(crate) fn copied_in_turn(&self) -> usize {
        self.turn.copied.get()
    }

    pub(crate) fn polls(&self) -> Polls {
        self.polls.get()
    }

    pub(super) fn interleave(&self, actor: Actor) {
        let interleaver = self.interleaver.borrow().clone();
        // The actions of a dead daemon take no time, so nothing else acts between them.
        if let Some(interleaver) = interleaver.filter(|_| actor == Actor::Death || !self.is_dead())
        {
            interleaver(actor);
        }
    }

    pub(super) fn rush(&self) {
        if self.plan.rush > 0 && !self.is_dead() && self.turn.runs.get() {
            self.interleave(Actor::Rush);
        }
    }

    /// Performs the sleep of a turn. Some events may end it. Otherwise the turn continues as if a
    /// signal had come, and the next turn is taken when this sleep would have ended.
    pub(super) fn sleep_in_turn(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool) {
        self.turn.sleeps.set(true);
        if self.is_dead() {
            return;
        }
        let things = self.inner.borrow_mut().rng.below(4);
        for _ in 0..things {
            let due = deadline.map_or(u64::MAX, |when| self.nanoseconds(when));
            if is_over() || self.next_event().is_none_or(|time| time > due) {
                break;
            }
            self.run_event();
        }
        let end = if is_over() { TurnEnd::Awake } else { TurnEnd::Asleep };
        self.turn.end.set(end);
    }
}
