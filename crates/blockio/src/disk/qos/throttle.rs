//! Makes requests wait: for limits before they begin, and for a retry after they have failed.
//!
//! Each queue has a disk of its own, and that disk a gate. At most one read and one write of a
//! queue wait for the limits at a time; further ones wait behind them. So queues take turns,
//! regardless of their numbers of requests. The same holds for the disks of a group.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::error_policy::{ErrorAction, RetryState, WaitCount};
use super::limits::{Buckets, Direction};
use super::{Rules, SharedState};
use crate::clock;
use crate::executor::semaphore::{FairSemaphore, Ticket};
use crate::executor::sync::Lock;
use crate::stats::Stats;
use crate::thread::io::Io;

/// The most bytes of a transfer that a stopping queue finishes if it may leave the rest.
pub(crate) const STEP_BYTES: usize = 4 << 20;

/// The most bytes of a transfer that a stopping queue finishes without a region to leave the rest
/// in.
pub(crate) const REST_BYTES: usize = 64 << 20;

/// The maker of a request, which is consulted while the request waits. Nothing of the request is in
/// progress then.
pub trait Requester {
    /// Called when the request begins to wait.
    fn on_wait(&self) {}

    /// Checks that the request is still to be done. Called before it waits, and for each
    /// [`recheck_waiting`](crate::disk::Disk::recheck_waiting).
    ///
    /// # Errors
    ///
    /// The error that the request ends with.
    fn check(&self) -> io::Result<()>;

    /// Called when the wait ends: repeats the checks made at the start of a request, since things
    /// may have changed.
    ///
    /// # Errors
    ///
    /// The error that the request ends with.
    fn on_resume(&self, direction: Direction)
    -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>>;

    /// Called when the request ends while it waits.
    fn on_cancel(&self) {}

    /// Checks that a command that moves much data is to move another piece. Called at the turn of
    /// that piece.
    ///
    /// # Errors
    ///
    /// The error that the command ends with. It is not retried.
    fn check_piece(&self) -> io::Result<()> {
        self.check()
    }

    /// Refuses the rest of a long transfer when its queue stops. Called between two steps.
    ///
    /// # Errors
    ///
    /// The error that the request ends with.
    fn check_rest(&self) -> io::Result<()> {
        Ok(())
    }

    /// Returns true if requests do not wait for limits, since they
    /// [passed](crate::disk::Requests::pass_limits) them.
    fn is_past_limits(&self) -> bool {
        false
    }
}

/// A requester that refuses nothing.
pub(crate) struct NoRequester;

impl Requester for NoRequester {
    fn check(&self) -> io::Result<()> {
        Ok(())
    }

    fn on_resume(&self, _: Direction) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A request at the gate, which may be waiting.
struct WaitingRequest<'a> {
    requester: &'a dyn Requester,
    stats: &'a Stats,
    /// The start of the wait.
    waits: Cell<Option<Instant>>,
    /// The requests that wait for the same reason, if they are counted here.
    count: Option<&'a Lock<WaitCount>>,
}

impl<'a> WaitingRequest<'a> {
    fn new(
        requester: &'a dyn Requester,
        stats: &'a Stats,
        count: Option<&'a Lock<WaitCount>>,
    ) -> Self {
        Self { requester, stats, waits: Cell::new(None), count }
    }

    fn wait(&self) {
        if self.waits.get().is_none() {
            let now = clock::now();
            self.waits.set(Some(now));
            self.count.iter().for_each(|count| count.lock().begin(now));
            self.requester.on_wait();
        }
    }

    async fn resume(&self, direction: Direction) -> io::Result<()> {
        if self.end() { self.requester.on_resume(direction).await } else { Ok(()) }
    }

    /// Returns true if the request has waited.
    fn end(&self) -> bool {
        let Some(since) = self.waits.take() else { return false };
        let now = clock::now();
        self.count.iter().for_each(|count| count.lock().end(now));
        self.stats.slow.note_wait(now, now.saturating_duration_since(since));
        true
    }
}

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        if self.end() {
            self.requester.on_cancel();
        }
    }
}

/// The treatment of requests of a queue that would wait, for limits or for a retry.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum WaitMode {
    /// By the limits and the error policy.
    #[default]
    All,
    /// No wait for limits. For a queue that stops and will continue.
    RetriesOnly,
    /// No wait: errors are reported, regardless of the policy. For a queue that stops for good.
    Never,
    /// Requests that wait or would wait are kept until this changes. For a queue that stops and
    /// leaves them to its next server.
    Frozen,
}

/// The gate of one queue.
pub(crate) struct Gate {
    io: Rc<Io>,
    shared: Arc<SharedState>,
    /// A recent copy of the rules, with its generation.
    rules: RefCell<(u64, Arc<Rules>)>,
    turns: [FairSemaphore; 2],
    wait_mode: Cell<WaitMode>,
}

/// The share of limits that a request has taken. Dropping it gives the share back, unless the
/// request has begun.
struct Charge {
    buckets: Arc<Buckets>,
    direction: Direction,
    bytes: u64,
    begins: Instant,
    has_begun: bool,
}

impl Charge {
    fn new(buckets: Arc<Buckets>, direction: Direction, bytes: u64) -> Self {
        let begins = buckets.take(direction, bytes, clock::now());
        Self { buckets, direction, bytes, begins, has_begun: false }
    }

    fn begin(mut self) {
        self.has_begun = true;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if !self.has_begun {
            self.buckets.give_back(self.direction, self.bytes);
        }
    }
}

impl Gate {
    pub(crate) fn new(io: &Rc<Io>, shared: &Arc<SharedState>) -> Self {
        Self {
            io: Rc::clone(io),
            shared: Arc::clone(shared),
            rules: RefCell::new(shared.rules()),
            turns: [(); 2].map(|()| FairSemaphore::new(1)),
            wait_mode: Cell::default(),
        }
    }

    pub(crate) fn set_wait_mode(&self, mode: WaitMode) {
        if self.wait_mode.replace(mode) != mode {
            self.shared.changed.notify_all();
        }
    }

    pub(crate) fn wait_mode(&self) -> WaitMode {
        self.wait_mode.get()
    }

    /// Returns true if the queue stops, and leaves no request to the next process.
    pub(crate) fn finishes(&self) -> bool {
        matches!(self.wait_mode.get(), WaitMode::RetriesOnly | WaitMode::Never)
    }

    fn is_shut(&self) -> bool {
        self.wait_mode.get() == WaitMode::Frozen
    }

    fn rules(&self) -> (u64, Arc<Rules>) {
        if self.rules.borrow().0 != self.shared.generation() {
            drop(self.rules.replace(self.shared.rules()));
        }
        self.rules.borrow().clone()
    }

    /// Returns true if a failed request could be retried.
    pub(crate) fn may_retry(&self, direction: Direction) -> bool {
        self.action(&self.rules().1, direction) != ErrorAction::Report
    }

    fn action(&self, rules: &Rules, direction: Direction) -> ErrorAction {
        match direction {
            _ if self.wait_mode.get() == WaitMode::Never => ErrorAction::Report,
            Direction::Read => rules.errors.read,
            Direction::Write => rules.errors.write,
        }
    }

    /// Waits until limits let a request begin, or charges them for one that does not wait. Fails if
    /// the request is not to be done any longer.
    pub(crate) async fn pass(
        &self,
        requester: &dyn Requester,
        direction: Direction,
        bytes: u64,
    ) -> io::Result<()> {
        let (_, rules) = self.rules();
        if rules.own.is_none() && rules.shared.is_none() {
            return Ok(());
        }
        let place = WaitingRequest::new(requester, self.io.stats(), Some(&self.shared.throttled));
        while !self.take_turn(&place, direction, bytes).await? {
            self.wait_until_open(&place).await?;
        }
        place.resume(direction).await
    }

    /// Waits for the turn of a request and its share of the limits. Returns false if the gate was
    /// shut first: then it holds up no other request.
    async fn take_turn(
        &self,
        place: &WaitingRequest<'_>,
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
        [own, shared].into_iter().flatten().for_each(Charge::begin);
        Ok(true)
    }

    /// Takes the share of these limits, and waits for it. A request that does not wait takes it,
    /// too, so later ones wait longer: stopping queues gain nothing.
    async fn take(
        &self,
        place: &WaitingRequest<'_>,
        direction: Direction,
        bytes: u64,
        which: impl Fn(&Rules) -> Option<Arc<Buckets>>,
    ) -> io::Result<Option<Charge>> {
        let mut taken: Option<Charge> = None;
        loop {
            let (generation, rules) = self.rules();
            let meant = which(&rules);
            // The disks that stay in a group do not wait for one that has left it.
            taken
                .take_if(|taken| !meant.as_ref().is_some_and(|it| Arc::ptr_eq(it, &taken.buckets)));
            let Some(buckets) = meant else { break };
            // The share is kept if something else has changed.
            let begins = taken.get_or_insert_with(|| Charge::new(buckets, direction, bytes)).begins;
            let is_waited_for = || self.wait_mode.get() == WaitMode::All;
            let changed = || self.shared.generation() != generation || !is_waited_for();
            if self.wait_until(place, begins, changed).await? || !is_waited_for() {
                break;
            }
        }
        Ok(taken)
    }

    /// Waits until a failed request is to be retried. Returns false if `error` is to be reported.
    /// Fails with an error to report instead.
    pub(crate) async fn await_retry(
        &self,
        requester: &dyn Requester,
        tries: &mut RetryState<'_>,
        direction: Direction,
        error: &io::Error,
    ) -> io::Result<bool> {
        let (generation, rules) = self.rules();
        let (action, resumed) = (self.action(&rules, direction), self.shared.resumed());
        let now = clock::now();
        let Some(pause) = tries.record_failure(action, error, now) else { return Ok(false) };
        let changed = || {
            self.shared.resumed() != resumed
                || self.shared.generation() != generation
                || matches!(self.wait_mode.get(), WaitMode::Never | WaitMode::Frozen)
        };
        let place = WaitingRequest::new(requester, self.io.stats(), None);
        self.wait_until(&place, now + pause, changed).await?;
        self.wait_until_open(&place).await?;
        if self.wait_mode.get() == WaitMode::Never {
            return Ok(false);
        }
        place.resume(direction).await?;
        Ok(true)
    }

    /// Waits until `when`, or until something has `changed`. Returns true if `when` has come.
    async fn wait_until(
        &self,
        place: &WaitingRequest<'_>,
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
    /// The error with which the requester ends the request.
    pub(crate) async fn wait_while_shut(
        &self,
        requester: &dyn Requester,
        direction: Direction,
    ) -> io::Result<()> {
        let place = WaitingRequest::new(requester, self.io.stats(), None);
        self.wait_until_open(&place).await?;
        place.resume(direction).await
    }

    /// Waits while the gate is shut.
    async fn wait_until_open(&self, place: &WaitingRequest<'_>) -> io::Result<()> {
        self.wait(place, |_| !self.is_shut()).await
    }

    /// Waits for a turn, unless requests do not wait for limits.
    async fn wait_for(
        &self,
        place: &WaitingRequest<'_>,
        turn: &Ticket<&FairSemaphore>,
    ) -> io::Result<()> {
        self.wait(place, |cx| self.wait_mode.get() != WaitMode::All || turn.poll(cx).is_ready())
            .await
    }

    /// Waits until `is_over`, which is checked after each change of the rules.
    async fn wait(
        &self,
        place: &WaitingRequest<'_>,
        mut is_over: impl FnMut(&mut Context<'_>) -> bool,
    ) -> io::Result<()> {
        let listener = self.shared.changed.listener();
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
