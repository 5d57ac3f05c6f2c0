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
use super::waiting::{Turn, Turns};
use crate::clock;
use crate::io::Io;

/// The most of a transfer that a queue finishes when it stops and may leave the rest.
pub(super) const STEP_BYTES: usize = 4 << 20;

/// The most of a transfer that a stopping queue finishes without a region to leave the rest in.
pub(super) const REST_BYTES: usize = 64 << 20;

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

    /// Whether another piece of a command that moves much data is to be moved: asked when the turn
    /// of that piece has come.
    ///
    /// # Errors
    ///
    /// The error that the command ends with. No other try follows.
    fn check_piece(&self) -> io::Result<()> {
        self.check()
    }

    /// Refuses the rest of a long transfer when its queue stops. Asked between two steps.
    ///
    /// # Errors
    ///
    /// The error that the request ends with.
    fn check_rest(&self) -> io::Result<()> {
        Ok(())
    }

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

/// How requests of a queue wait at their disk, for limits and for another try.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// As its limits and its error policy say.
    #[default]
    Usual,
    /// Not for limits. For a queue that stops and will go on.
    ForTries,
    /// Not at all: errors are reported, whatever the policy. For a queue that stops for good.
    Never,
    /// Those that wait, or come to that, go on when this has changed. For a queue that stops and
    /// leaves them to whoever serves it next.
    UntilLater,
}

/// The gate of one queue.
pub(super) struct Gate {
    io: Rc<Io>,
    shared: Arc<Shared>,
    /// The rules as they were lately.
    rules: RefCell<(u64, Arc<Rules>)>,
    turns: [Turns; 2],
    waits: Cell<Waits>,
}

/// What a request has taken of limits, and gives back unless it begins.
struct Taken {
    buckets: Arc<Buckets>,
    direction: Direction,
    bytes: u64,
    begins: Instant,
    has_begun: bool,
}

impl Taken {
    fn of(buckets: Arc<Buckets>, direction: Direction, bytes: u64) -> Self {
        let begins = buckets.take(direction, bytes, clock::now());
        Self { buckets, direction, bytes, begins, has_begun: false }
    }

    fn begin(mut self) {
        self.has_begun = true;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if !self.has_begun {
            self.buckets.give_back(self.direction, self.bytes);
        }
    }
}

impl Gate {
    pub(super) fn new(io: &Rc<Io>, shared: &Arc<Shared>) -> Self {
        Self {
            io: Rc::clone(io),
            shared: Arc::clone(shared),
            rules: RefCell::new(shared.rules()),
            turns: Default::default(),
            waits: Cell::default(),
        }
    }

    pub(super) fn set_waits(&self, waits: Waits) {
        if self.waits.replace(waits) != waits {
            self.shared.bell.ring();
        }
    }

    pub(super) fn waits(&self) -> Waits {
        self.waits.get()
    }

    /// Whether the queue stops, and leaves no request to the next process.
    pub(super) fn finishes(&self) -> bool {
        matches!(self.waits.get(), Waits::ForTries | Waits::Never)
    }

    fn is_shut(&self) -> bool {
        self.waits.get() == Waits::UntilLater
    }

    fn rules(&self) -> (u64, Arc<Rules>) {
        if self.rules.borrow().0 != self.shared.generation() {
            drop(self.rules.replace(self.shared.rules()));
        }
        self.rules.borrow().clone()
    }

    /// Whether a request that fails could be tried again.
    pub(super) fn may_try_again(&self, direction: Direction) -> bool {
        self.action(&self.rules().1, direction) != ErrorAction::Report
    }

    fn action(&self, rules: &Rules, direction: Direction) -> ErrorAction {
        match direction {
            _ if self.waits.get() == Waits::Never => ErrorAction::Report,
            Direction::Read => rules.errors.read,
            Direction::Write => rules.errors.write,
        }
    }

    /// Waits until limits let a request begin, or charges them for one that does not wait. An
    /// error: it is not to be done any more.
    pub(super) async fn pass(
        &self,
        requester: &dyn Requester,
        direction: Direction,
        bytes: u64,
    ) -> io::Result<()> {
        let (_, rules) = self.rules();
        if rules.own.is_none() && rules.shared.is_none() {
            return Ok(());
        }
        let place = Place::of(requester);
        while !self.take_turn(&place, direction, bytes).await? {
            self.stay(&place).await?;
        }
        place.go_on(direction).await
    }

    /// Waits for its turn and its part of the limits. False: the gate was shut before, and it holds
    /// up nobody.
    async fn take_turn(
        &self,
        place: &Place<'_>,
        direction: Direction,
        bytes: u64,
    ) -> io::Result<bool> {
        let turn = self.turns[direction as usize].enter();
        self.wait_for(place, &turn).await?;
        let own = self.take(place, direction, bytes, |rules| rules.own.clone()).await?;
        let mut shared = None;
        if self.rules().1.shared.is_some() {
            let turn = self.shared.turns[direction as usize].enter();
            self.wait_for(place, &turn).await?;
            shared = self.take(place, direction, bytes, |rules| rules.shared.clone()).await?;
        }
        if self.is_shut() {
            return Ok(false);
        }
        [own, shared].into_iter().flatten().for_each(Taken::begin);
        Ok(true)
    }

    /// Takes its part of these limits, and waits for it. One that does not wait takes it, too: what
    /// comes after it waits the longer, so that nobody has more for stopping queues.
    async fn take(
        &self,
        place: &Place<'_>,
        direction: Direction,
        bytes: u64,
        which: impl Fn(&Rules) -> Option<Arc<Buckets>>,
    ) -> io::Result<Option<Taken>> {
        let mut taken: Option<Taken> = None;
        loop {
            let (generation, rules) = self.rules();
            let meant = which(&rules);
            // The other disks of a group do not wait for one that has left it.
            taken
                .take_if(|taken| !meant.as_ref().is_some_and(|it| Arc::ptr_eq(it, &taken.buckets)));
            let Some(buckets) = meant else { break };
            // Or something else has changed.
            let begins = taken.get_or_insert_with(|| Taken::of(buckets, direction, bytes)).begins;
            let is_waited_for = || self.waits.get() == Waits::Usual;
            let changed = || self.shared.generation() != generation || !is_waited_for();
            if self.wait_until(place, begins, changed).await? || !is_waited_for() {
                break;
            }
        }
        Ok(taken)
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
        let changed = || {
            self.shared.resumed() != resumed
                || self.shared.generation() != generation
                || matches!(self.waits.get(), Waits::Never | Waits::UntilLater)
        };
        let place = Place::of(requester);
        self.wait_until(&place, now + pause, changed).await?;
        self.stay(&place).await?;
        if self.waits.get() == Waits::Never {
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

    /// Waits while the gate is shut, in the middle of a request of which nothing is in progress.
    ///
    /// # Errors
    ///
    /// What the requester says meanwhile.
    pub(super) async fn rest(
        &self,
        requester: &dyn Requester,
        direction: Direction,
    ) -> io::Result<()> {
        let place = Place::of(requester);
        self.stay(&place).await?;
        place.go_on(direction).await
    }

    /// Waits while the gate is shut.
    async fn stay(&self, place: &Place<'_>) -> io::Result<()> {
        self.wait(place, |_| !self.is_shut()).await
    }

    /// Waits for a turn, unless nobody waits for limits.
    async fn wait_for(&self, place: &Place<'_>, turn: &Turn<&Turns>) -> io::Result<()> {
        self.wait(place, |cx| self.waits.get() != Waits::Usual || turn.poll(cx).is_ready()).await
    }

    /// Waits until `is_over`, which is looked at after each ring of the bell.
    async fn wait(
        &self,
        place: &Place<'_>,
        mut is_over: impl FnMut(&mut Context<'_>) -> bool,
    ) -> io::Result<()> {
        let listener = self.shared.bell.listener();
        poll_fn(|cx| {
            listener.listen(cx);
            place.requester.check()?;
            if is_over(cx) {
                return Poll::Ready(Ok(()));
            }
            place.wait();
            Poll::Pending
        })
        .await
    }
}
