//! The requests of one IoThread to an NBD export, and the connections that carry them.
//!
//! A request has a slot, which owns its memory until the answer, with or without a waiter. It
//! belongs to one connection at a time. When that breaks, the request goes to another connection,
//! or waits for the next. All requests may be sent again, for each has the same effect when it is
//! done twice. A read or a change without an answer may be done now, later, or twice, but never
//! after a request that was issued after its answer. Servers end the requests of a connection
//! before they close it. If the client abandons a connection, the changes that the server may still
//! make are held until it has answered or closed the connection; see `abandoned.rs`.
//!
//! A flush that is sent again, or comes after a connection broke, is a promise about changes that
//! were answered on that connection. See [`NbdOptions::distrust`](super::NbdOptions).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use blockio::disk::Extent;
use blockio::driver::{Owner, TaskRef};
use blockio::{Io, Remote, clock};
use iomem::{Buffers, fits};

use super::answer::{Failure, Progress};
use super::connect::QuestionNumber;
use super::handshake::Facts;
use super::requests::{Deferred, IssuedRequest, Link, Requests, Slot, State, Waiter};
use super::shared::SharedExport;
use super::wire::{Command, Request};

/// The connections of one IoThread to an export, with all requests that they carry.
pub(super) struct Client {
    pub(super) io: Rc<Io>,
    pub(super) shared: Arc<SharedExport>,
    pub(super) number: u64,
    pub(super) requests: RefCell<Requests>,
    /// The number of tasks of its connections that have not ended.
    serving: Cell<usize>,
    /// The tasks of abandoned connections that have not ended.
    pub(super) draining: RefCell<Vec<TaskRef>>,
}

impl Client {
    /// Makes a client without connections yet, which [`run_on`](Self::run_on) finds.
    pub(super) fn new(
        io: &Rc<Io>,
        shared: &Arc<SharedExport>,
        number: u64,
        links: usize,
    ) -> Rc<Self> {
        let client = Rc::new(Self {
            io: Rc::clone(io),
            shared: Arc::clone(shared),
            number,
            requests: RefCell::default(),
            serving: Cell::new(links),
            draining: RefCell::default(),
        });
        client.requests.borrow_mut().links.resize_with(links, Link::default);
        io.share(key(shared), &client);
        client
    }

    /// The client of an IoThread.
    pub(super) fn find(io: &Rc<Io>, shared: &Arc<SharedExport>) -> Option<Rc<Self>> {
        io.shared(key(shared))
    }

    /// Calls `act` on an IoThread, with its client. The call is dropped if it has none.
    pub(super) fn run_on(
        remote: &Remote,
        shared: &Arc<SharedExport>,
        act: impl FnOnce(&Rc<Self>) + Send + 'static,
    ) {
        let key = key(shared);
        remote.post(move |io| {
            if let Some(client) = io.shared(key) {
                act(&client);
            }
        });
    }

    /// Calls `act` on each IoThread that has connections.
    pub(super) fn run_on_each(
        shared: &Arc<SharedExport>,
        act: impl Fn(&Rc<Self>) + Copy + Send + 'static,
    ) {
        shared.remotes().iter().for_each(|remote| Self::run_on(remote, shared, act));
    }

    /// Starts a request at once; the ticket waits for its end.
    pub(super) fn ticket(self: &Rc<Self>, made: IssuedRequest, buffers: Buffers) -> Ticket {
        let slot = self.begin(made, buffers, Waiter::Local(Owner::default()));
        if let Some(errno) = self.refuses(&made) {
            self.requests.borrow_mut().finish(slot, Err(errno), &self.shared);
            self.settle();
        } else {
            self.assign(slot);
        }
        Ticket { client: Rc::clone(self), slot: Some(slot) }
    }

    fn refuses(&self, made: &IssuedRequest) -> Option<i32> {
        if self.is_overdue(made) {
            return Some(libc::ETIMEDOUT);
        }
        let refuses = (made.is_durable() && self.shared.is_lost())
            || (self.shared.is_abandoned() && self.would_wait(&made.request));
        refuses.then_some(libc::EIO)
    }

    /// Returns true if a request is past its deadline: it may have begun elsewhere long ago.
    fn is_overdue(&self, made: &IssuedRequest) -> bool {
        let age = self.io.recently().saturating_duration_since(made.since);
        self.deadline().is_some_and(|deadline| age >= deadline)
    }

    /// Returns true if no connection can take a request now.
    fn would_wait(&self, request: &Request) -> bool {
        let held = &self.shared.held;
        request.changed_range().is_some_and(|range| held.has(&range)) || !self.is_up()
    }

    pub(super) fn begin(&self, made: IssuedRequest, buffers: Buffers, waiter: Waiter) -> u32 {
        let mut requests = self.requests.borrow_mut();
        let slot = Slot {
            serial: requests.next_serial(),
            state: State::Waiting,
            made,
            remote_op: Some(self.io.begin_remote_op()),
            is_flushing: false,
            buffers,
            progress: Progress::default(),
            covers: if made.request.command == Command::Flush { self.shared.changes() } else { 0 },
            waiter,
        };
        if let Some(index) = requests.free.pop() {
            requests.slots[index as usize] = slot;
            return index;
        }
        requests.slots.push(slot);
        fits(requests.slots.len() - 1, "the requests of a disk")
    }

    /// Assigns a waiting request, unless it is overdue, or cannot keep its promise. Returns false
    /// if it has failed.
    pub(super) fn assign_or_refuse(&self, slot: u32) -> bool {
        let made = self.requests.borrow().slots[slot as usize].made;
        let refused = self.refuses(&made);
        match refused {
            Some(errno) => self.requests.borrow_mut().finish(slot, Err(errno), &self.shared),
            None => self.assign(slot),
        }
        refused.is_none()
    }

    /// Assigns a request to the connection with the least to do.
    fn assign(&self, slot: u32) {
        let mut borrowed = self.requests.borrow_mut();
        let requests = &mut *borrowed;
        let request = requests.slots[slot as usize].request();
        let is_held = request.changed_range().is_some_and(|range| self.shared.held.has(&range));
        let (end, size) = (request.end(), self.shared.size_bytes());
        let up = requests.links.iter().enumerate().filter(|(_, link)| link.takes(end, size));
        let least = up.min_by_key(|(_, link)| link.sending.len() + link.sent);
        let Some(index) = least.map(|(index, _)| index).filter(|_| !is_held) else {
            requests.slots[slot as usize].state = State::Waiting;
            requests.waiting.push_back(slot);
            if is_held {
                // The tasks check for requests that have waited for too long.
                let tasks = requests.links.iter().filter_map(|link| link.task);
                tasks.for_each(|task| self.io.wake(task));
            }
            return;
        };
        let link = &mut requests.links[index];
        if request.command == Command::BlockStatus && !link.knows_holes {
            requests.finish(slot, Ok(Extent::data(request.len)), &self.shared);
            drop(borrowed);
            return self.settle();
        }
        requests.slots[slot as usize].state = State::Queued(index);
        link.sending.push_back(slot);
        if let Some(task) = link.task {
            self.io.wake(task);
        }
    }

    /// Called when the task of a connection has ended, perhaps because its loop has. After the last
    /// one, other IoThreads make their requests elsewhere.
    pub(super) fn on_link_ended(&self) {
        self.serving.set(self.serving.get() - 1);
        if self.serving.get() > 0 {
            return;
        }
        if !self.shared.is_abandoned() {
            self.shared.remove_client(self.number);
        }
        let borrowed = self.requests.try_borrow_mut().map(|mut requests| requests.take_borrowed());
        drop(borrowed);
    }

    /// Returns true if there is a connection.
    pub(super) fn is_up(&self) -> bool {
        self.requests.borrow().links.iter().any(|link| link.is_up)
    }

    /// Turns waiting requests away, if another IoThread has a connection.
    pub(super) fn reroute_waiting(&self) {
        if !self.is_up() && self.shared.another_client(self.number).is_some() {
            self.requests.borrow_mut().turn_away();
            self.settle();
        }
    }

    pub(super) fn links(&self) -> usize {
        self.requests.borrow().links.len()
    }

    /// Records the calling task as that of a link.
    pub(super) fn set_task(&self, index: usize) {
        self.requests.borrow_mut().links[index].task = Some(self.io.current_task());
    }

    /// Wakes all tasks, which then check the state of the disk.
    pub(super) fn wake_links(&self) {
        let tasks: Vec<TaskRef> = {
            let requests = self.requests.borrow();
            let links = requests.links.iter().filter_map(|link| link.task);
            links.chain(self.draining.borrow().iter().copied()).collect()
        };
        tasks.into_iter().for_each(|task| self.io.wake(task));
    }

    /// Called when a link has a connection, which takes waiting requests.
    pub(super) fn link_is_up(&self, index: usize, facts: &Facts) {
        {
            let link = &mut self.requests.borrow_mut().links[index];
            (link.is_up, link.is_retiring) = (true, false);
            (link.size_bytes, link.knows_holes) = (facts.size_bytes, facts.context.is_some());
        }
        self.try_waiting();
        self.publish_condition(None);
    }

    /// Returns true if a link takes no further requests, because its connection knows only a
    /// smaller size of the export.
    pub(super) fn is_retiring(&self, index: usize) -> bool {
        let link = &mut self.requests.borrow_mut().links[index];
        link.is_retiring |= link.size_bytes < self.shared.size_bytes();
        link.is_retiring
    }

    /// Makes a link flush its writes.
    pub(super) fn flush_link(&self, index: usize) {
        let slot = self.begin(
            IssuedRequest::new(&self.io, Request::FLUSH),
            Buffers::empty(),
            Waiter::None,
        );
        let requests = &mut *self.requests.borrow_mut();
        requests.slots[slot as usize].state = State::Queued(index);
        requests.links[index].sending.push_back(slot);
    }

    /// Sends waiting requests, as far as possible.
    pub(super) fn try_waiting(&self) {
        let waiting = std::mem::take(&mut self.requests.borrow_mut().waiting);
        for slot in waiting {
            self.assign_or_refuse(slot);
        }
        self.settle();
    }

    /// Called when the connection of a link has broken. Returns the number of its requests to send
    /// again.
    pub(super) fn link_is_down(&self, index: usize) -> usize {
        let mut again: Vec<(u32, u32)> = Vec::new();
        {
            let requests = &mut *self.requests.borrow_mut();
            let link = &mut requests.links[index];
            (link.is_up, link.is_retiring, link.stalled_since) = (false, false, None);
            (link.sent, link.large_reads) = (0, 0);
            link.sending.clear();
            for number in 0..requests.slots.len() {
                let is_of_link = matches!(requests.slots[number].state,
                    State::Queued(of) | State::Sent(of) if of == index);
                if is_of_link {
                    let slot = &mut requests.slots[number];
                    // The serial stays: it also has the order after further breaks.
                    again.push((slot.serial, fits(number, "the requests of a disk")));
                    slot.is_flushing = false;
                    slot.progress = Progress::default();
                    slot.state = State::Waiting;
                }
            }
        }
        // In the order in which they came.
        again.sort_unstable();
        let count = again.into_iter().filter(|(_, slot)| self.assign_or_refuse(*slot)).count();
        self.settle();
        count
    }

    /// Returns true if no further connections are to be made.
    pub(super) fn is_unneeded(&self) -> bool {
        self.shared.is_abandoned() || self.shared.is_over()
    }

    /// Fails requests that have waited for too long without a connection.
    pub(super) fn expire(&self) {
        if let Some(deadline) = self.shared.options.deadline
            && let Some(before) = clock::now().checked_sub(deadline)
        {
            self.fail(libc::ETIMEDOUT, Some(before));
        }
    }

    /// Fails requests without a connection: all, or the ones that began up to `before`.
    pub(super) fn fail(&self, errno: i32, before: Option<Instant>) {
        {
            let requests = &mut *self.requests.borrow_mut();
            for number in 0..requests.slots.len() {
                let slot = &requests.slots[number];
                let is_due = before.is_none_or(|before| slot.made.since <= before);
                if slot.state == State::Waiting && is_due {
                    let number = fits(number, "the requests of a disk");
                    requests.waiting.retain(|other| *other != number);
                    requests.finish(number, Err(errno), &self.shared);
                }
            }
        }
        self.settle();
    }

    /// The start of the oldest request of a link, sent or not.
    pub(super) fn oldest_of(&self, index: usize) -> Option<Instant> {
        let is_of_link =
            |state| matches!(state, State::Queued(of) | State::Sent(of) if of == index);
        self.requests.borrow().oldest(is_of_link)
    }

    /// The start of the oldest request that no link has.
    pub(super) fn oldest_waiting(&self) -> Option<Instant> {
        let requests = self.requests.borrow();
        if requests.waiting.is_empty() {
            return None;
        }
        requests.oldest(|state| state == State::Waiting)
    }

    /// Does the wakes and drops that are due, when nothing is borrowed.
    pub(super) fn settle(&self) {
        let mut all = std::mem::take(&mut self.requests.borrow_mut().deferred);
        for deferred in all.drain(..) {
            match deferred {
                Deferred::Wake(owner) => self.io.wake_owner(owner),
                Deferred::Complete(borrower, result) => borrower.complete(result),
                Deferred::TurnAway(borrower) => drop(borrower),
                Deferred::Drop(buffers) => drop(buffers),
            }
        }
        // The next call uses its storage again.
        let mut requests = self.requests.borrow_mut();
        if requests.deferred.is_empty() {
            requests.deferred = all;
        }
    }
}

/// Takes over the size of the export that the server has reported. Connections with a smaller one
/// are replaced: each has its own size. Returns the size before, or `None` if a newer answer
/// counts.
pub(super) fn record_size(
    shared: &Arc<SharedExport>,
    size_bytes: u64,
    asked: QuestionNumber,
) -> Option<u64> {
    let before = shared.swap_size(size_bytes, asked)?;
    if before < size_bytes {
        Client::run_on_each(shared, |client| client.wake_links());
    }
    Some(before)
}

impl Drop for Client {
    /// Removes the client: its loop may end before the disk is gone.
    fn drop(&mut self) {
        self.shared.remove_client(self.number);
        if !std::thread::panicking() {
            self.requests.get_mut().assert_released();
        }
    }
}

/// The key under which an IoThread keeps its client.
fn key(shared: &Arc<SharedExport>) -> usize {
    Arc::as_ptr(shared).addr()
}

/// Waits for a request to end. Dropping it cancels nothing.
pub(super) struct Ticket {
    client: Rc<Client>,
    slot: Option<u32>,
}

impl Ticket {
    /// Returns the result, with the memory of the request. `None`: it is to be made elsewhere.
    pub(super) async fn wait(mut self) -> (Option<Result<Extent, Failure>>, Buffers) {
        poll_fn(|cx| {
            let Some(number) = self.slot else { return Poll::Pending };
            let owner = self.client.io.owner(cx);
            let (before, result) = {
                let mut requests = self.client.requests.borrow_mut();
                let slot = &mut requests.slots[number as usize];
                let ended = match slot.state {
                    State::Done(result) => Some(Some(result)),
                    State::TurnedAway => Some(None),
                    _ => None,
                };
                if let Some(result) = ended {
                    self.slot = None;
                    (None, Some((result, requests.release(number))))
                } else {
                    (Some(std::mem::replace(&mut slot.waiter, Waiter::Local(owner))), None)
                }
            };
            drop(before);
            result.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(number) = self.slot else { return };
        let left = {
            let mut requests = self.client.requests.borrow_mut();
            let slot = &mut requests.slots[number as usize];
            let waiter = std::mem::replace(&mut slot.waiter, Waiter::None);
            let is_done = matches!(slot.state, State::Done(_) | State::TurnedAway);
            (waiter, is_done.then(|| requests.release(number)))
        };
        drop(left);
    }
}
