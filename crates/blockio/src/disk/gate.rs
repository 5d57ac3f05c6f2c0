//! Where requests wait before they begin, because of limits, and after they have failed.
//!
//! A queue has a disk of its own, and this with it. Of its reads one waits for the limits at a
//! time, and of its writes; others wait behind it. So queues have their turns one after the other,
//! however many requests each has. The same is so for the disks of a group.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::limits::{Buckets, Direction};
use super::shared::{Rules, Shared};
use super::trouble::{ErrorAction, Tries};
use super::waiting::Turns;
use crate::clock;
use crate::io::Io;

/// The gate of one queue.
pub(super) struct Gate {
    io: Rc<Io>,
    shared: Arc<Shared>,
    /// The rules as they were lately.
    rules: RefCell<(u64, Rc<Rules>)>,
    turns: [Turns; 2],
    /// Nobody waits here.
    is_open: Cell<bool>,
}

impl Gate {
    pub(super) fn new(io: &Rc<Io>, shared: &Arc<Shared>) -> Self {
        Self {
            io: Rc::clone(io),
            shared: Arc::clone(shared),
            rules: RefCell::new(rules_of(shared)),
            turns: Default::default(),
            is_open: Cell::new(false),
        }
    }

    /// With `is_open`, whoever waits here goes on: requests begin in spite of limits, and errors
    /// are reported.
    pub(super) fn set_open(&self, is_open: bool) {
        self.is_open.set(is_open);
        if is_open {
            self.shared.bell.ring();
        }
    }

    fn rules(&self) -> (u64, Rc<Rules>) {
        if self.rules.borrow().0 != self.shared.generation() {
            drop(self.rules.replace(rules_of(&self.shared)));
        }
        self.rules.borrow().clone()
    }

    /// Whether a request that fails could be tried again.
    pub(super) fn may_try_again(&self, direction: Direction) -> bool {
        self.action(&self.rules().1, direction) != ErrorAction::Report
    }

    fn action(&self, rules: &Rules, direction: Direction) -> ErrorAction {
        match direction {
            _ if self.is_open.get() => ErrorAction::Report,
            Direction::Read => rules.errors.read,
            Direction::Write => rules.errors.write,
        }
    }

    /// Waits until limits let a request begin.
    pub(super) async fn pass(&self, direction: Direction, bytes: u64) {
        let (_, rules) = self.rules();
        if (rules.own.is_none() && rules.shared.is_none()) || self.is_open.get() {
            return;
        }
        let turn = self.turns[direction as usize].enter();
        poll_fn(|cx| turn.poll(cx)).await;
        self.take(direction, bytes, |rules| rules.own.clone()).await;
        if self.rules().1.shared.is_some() {
            let turn = self.shared.turns[direction as usize].enter();
            self.wait(|cx| turn.poll(cx).is_ready()).await;
            self.take(direction, bytes, |rules| rules.shared.clone()).await;
        }
    }

    /// Waits for these limits.
    async fn take(
        &self,
        direction: Direction,
        bytes: u64,
        which: impl Fn(&Rules) -> Option<Arc<Buckets>>,
    ) {
        let mut taken: Option<(Arc<Buckets>, Instant)> = None;
        while !self.is_open.get() {
            let (generation, rules) = self.rules();
            let Some(buckets) = which(&rules) else { return };
            let begins = match &taken {
                // Something else has changed.
                Some((same, begins)) if Arc::ptr_eq(same, &buckets) => *begins,
                _ => buckets.take(direction, bytes, clock::now()),
            };
            taken = Some((buckets, begins));
            if self.wait_until(begins, || self.shared.generation() != generation).await {
                return;
            }
        }
    }

    /// A request has failed. Waits until it is to be tried again; false: it is to be reported.
    pub(super) async fn tries_again(
        &self,
        tries: &mut Tries<'_>,
        direction: Direction,
        error: &io::Error,
    ) -> bool {
        let (generation, rules) = self.rules();
        let (action, resumed) = (self.action(&rules, direction), self.shared.resumed());
        let now = clock::now();
        let Some(pause) = tries.failed(action, error, now) else { return false };
        let changed = || self.shared.resumed() != resumed || self.shared.generation() != generation;
        self.wait_until(now + pause, changed).await;
        !self.is_open.get()
    }

    /// Waits until `when`, or until something has changed. Returns whether it is that late.
    async fn wait_until(&self, when: Instant, changed: impl Fn() -> bool) -> bool {
        if clock::now() >= when {
            return true;
        }
        let mut sleep = pin!(self.io.sleep_until(when));
        let mut is_late = false;
        self.wait(|cx| {
            is_late = sleep.as_mut().poll(cx).is_ready();
            is_late || changed()
        })
        .await;
        is_late
    }

    /// Waits until `is_over`, which is looked at after each ring of the bell, or the gate is open.
    async fn wait(&self, mut is_over: impl FnMut(&mut Context<'_>) -> bool) {
        let listener = self.shared.bell.listener();
        poll_fn(|cx| {
            listener.listen(cx);
            if self.is_open.get() || is_over(cx) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

fn rules_of(shared: &Shared) -> (u64, Rc<Rules>) {
    let (generation, rules) = shared.rules();
    (generation, Rc::new(rules))
}
