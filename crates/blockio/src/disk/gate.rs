//! Where requests wait before they begin, because of limits, and after they have failed.
//!
//! A queue has a disk of its own, and this with it. Of its reads one waits for the limits at a
//! time, and of its writes; others wait behind it. So queues have their turns one after the other,
//! however many requests each has. The same is so for the disks of a group.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
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

/// Whoever makes a request, and is asked about it while it waits here. Nothing of it is in progress
/// then.
pub trait Requester {
    /// It waits from now on.
    fn waits(&self);

    /// Whether it is to be done at all. Asked before it waits, and whenever it is
    /// [looked at](super::Disk::look_at_waiting).
    ///
    /// # Errors
    ///
    /// What it ends with.
    fn check(&self) -> io::Result<()>;

    /// It waits here no more, and does what a request does that begins. What has changed since it
    /// began is looked at again.
    ///
    /// # Errors
    ///
    /// What it ends with.
    fn goes_on(&self, direction: Direction) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>>;

    /// It waits here no more, and ends.
    fn ends(&self);

    /// Its requests wait for no limits, since it has [passed](super::Requests::pass_limits) them.
    fn is_past_limits(&self) -> bool {
        false
    }
}

/// One that has nothing to say.
pub(super) struct Anybody;

impl Requester for Anybody {
    fn waits(&self) {}

    fn check(&self) -> io::Result<()> {
        Ok(())
    }

    fn goes_on(&self, _: Direction) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn ends(&self) {}
}

/// A request at the gate, which waits or does not yet.
struct Place<'a> {
    requester: &'a dyn Requester,
    waits: Cell<bool>,
}

impl<'a> Place<'a> {
    fn of(requester: &'a dyn Requester) -> Self {
        Self { requester, waits: Cell::new(false) }
    }

    fn wait(&self) {
        if !self.waits.replace(true) {
            self.requester.waits();
        }
    }

    async fn go_on(&self, direction: Direction) -> io::Result<()> {
        if self.waits.replace(false) { self.requester.goes_on(direction).await } else { Ok(()) }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.waits.get() {
            self.requester.ends();
        }
    }
}

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

    pub(super) fn is_open(&self) -> bool {
        self.is_open.get()
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

    /// Waits until limits let a request begin. An error: it is not to be done any more.
    pub(super) async fn pass(
        &self,
        requester: &dyn Requester,
        direction: Direction,
        bytes: u64,
    ) -> io::Result<()> {
        let (_, rules) = self.rules();
        if (rules.own.is_none() && rules.shared.is_none()) || self.is_open.get() {
            return Ok(());
        }
        let place = Place::of(requester);
        let turn = self.turns[direction as usize].enter();
        self.wait(&place, |cx| turn.poll(cx).is_ready()).await?;
        let own = self.take(&place, direction, bytes, |rules| rules.own.clone()).await?;
        if self.rules().1.shared.is_some() {
            let turn = self.shared.turns[direction as usize].enter();
            let passed = async {
                self.wait(&place, |cx| turn.poll(cx).is_ready()).await?;
                self.take(&place, direction, bytes, |rules| rules.shared.clone()).await
            };
            if let Err(error) = passed.await {
                if let Some(own) = own {
                    own.give_back(direction, bytes);
                }
                return Err(error);
            }
        }
        drop(turn);
        place.go_on(direction).await
    }

    /// Waits for these limits. Returns those of which it has taken its part; a request that does
    /// not begin has given that back.
    async fn take(
        &self,
        place: &Place<'_>,
        direction: Direction,
        bytes: u64,
        which: impl Fn(&Rules) -> Option<Arc<Buckets>>,
    ) -> io::Result<Option<Arc<Buckets>>> {
        let mut taken: Option<(Arc<Buckets>, Instant)> = None;
        while !self.is_open.get() {
            let (generation, rules) = self.rules();
            let meant = which(&rules);
            let is_meant = |taken: &Arc<Buckets>| {
                meant.as_ref().is_some_and(|meant| Arc::ptr_eq(meant, taken))
            };
            if let Some((left, _)) = taken.take_if(|(taken, _)| !is_meant(taken)) {
                // The other disks of a group do not wait for one that has left it.
                left.give_back(direction, bytes);
            }
            let Some(buckets) = meant else { break };
            let begins = match &taken {
                // Something else has changed.
                Some((_, begins)) => *begins,
                None => buckets.take(direction, bytes, clock::now()),
            };
            let (buckets, _) = taken.insert((buckets, begins));
            let changed = || self.shared.generation() != generation;
            match self.wait_until(place, begins, changed).await {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => {
                    buckets.give_back(direction, bytes);
                    return Err(error);
                }
            }
        }
        Ok(taken.map(|(buckets, _)| buckets))
    }

    /// A request has failed. Waits until it is to be tried again; false: it is to be reported. An
    /// error is reported instead.
    pub(super) async fn tries_again(
        &self,
        requester: &dyn Requester,
        tries: &mut Tries<'_>,
        direction: Direction,
        error: &io::Error,
    ) -> io::Result<bool> {
        let (generation, rules) = self.rules();
        let (action, resumed) = (self.action(&rules, direction), self.shared.resumed());
        let now = clock::now();
        let Some(pause) = tries.failed(action, error, now) else { return Ok(false) };
        let changed = || self.shared.resumed() != resumed || self.shared.generation() != generation;
        let place = Place::of(requester);
        self.wait_until(&place, now + pause, changed).await?;
        if self.is_open.get() {
            return Ok(false);
        }
        place.go_on(direction).await?;
        Ok(true)
    }

    /// Waits until `when`, or until something has changed. Returns whether it is that late.
    async fn wait_until(
        &self,
        place: &Place<'_>,
        when: Instant,
        changed: impl Fn() -> bool,
    ) -> io::Result<bool> {
        if clock::now() >= when {
            return Ok(true);
        }
        let mut sleep = pin!(self.io.sleep_until(when));
        let mut is_late = false;
        let is_over = |cx: &mut Context<'_>| {
            is_late = sleep.as_mut().poll(cx).is_ready();
            is_late || changed()
        };
        self.wait(place, is_over).await?;
        Ok(is_late)
    }

    /// Waits until `is_over`, which is looked at after each ring of the bell, or the gate is open.
    async fn wait(
        &self,
        place: &Place<'_>,
        mut is_over: impl FnMut(&mut Context<'_>) -> bool,
    ) -> io::Result<()> {
        let listener = self.shared.bell.listener();
        poll_fn(|cx| {
            listener.listen(cx);
            place.requester.check()?;
            if self.is_open.get() || is_over(cx) {
                return Poll::Ready(Ok(()));
            }
            place.wait();
            Poll::Pending
        })
        .await
    }
}

fn rules_of(shared: &Shared) -> (u64, Rc<Rules>) {
    let (generation, rules) = shared.rules();
    (generation, Rc::new(rules))
}
