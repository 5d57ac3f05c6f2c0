//! One connection to an NBD server: it is made, carries requests until it breaks, and is made
//! again. All requests that are there share a send, and all answers that are there a receive.

use std::cell::Cell;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::connect::{Connected, connect};
use super::flow::{Broken, Flow};
use super::handshake::can;
use super::pipe::Pipe;
use super::remains::Remains;
use super::shared::{Condition, Shared, Unflushed};
use super::wire::Framing;
use crate::clock;
use crate::interest::Interest;
use crate::io::Io;
use crate::reactor::{Armed, Source, SourceId};

/// How long to wait before the server is tried again; it doubles from the first to the second.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// How often requests are looked at that have no answer.
const TICK: Duration = Duration::from_secs(1);

/// A server that has not answered for this long is late.
const LATE: Duration = Duration::from_secs(5);

/// Makes the connections of an IoThread, in tasks.
pub(super) fn start(io: &Rc<Io>, shared: &Arc<Shared>, number: u64, links: usize) -> Rc<Pipe> {
    let pipe = Pipe::new(io, shared, number, links);
    for index in 0..links {
        io.spawn(serve_link(Rc::clone(&pipe), index));
    }
    pipe
}

/// Serves requests over one connection after the other, until nobody has the disk any more.
async fn serve_link(pipe: Rc<Pipe>, index: usize) {
    pipe.set_task(index);
    let mut retry = Retry { since: None, told: String::new(), is_told: false, wait: RETRY_MIN };
    while !pipe.is_ending() {
        let connected = match pipe.next_connection().await {
            Some(Ok(connected)) => connected,
            Some(Err(why)) => {
                retry.note(&pipe, &why);
                pipe.pause(&mut retry).await;
                continue;
            }
            None => break,
        };
        retry.is_over(&pipe);
        pipe.link_is_up(index);
        let mut lease = Lease { pipe: &pipe, flow: Some(Flow::new(index, connected)) };
        let broken = match &mut lease.flow {
            Some(flow) => carry(&pipe, index, flow).await.err(),
            None => None,
        };
        let Some(flow) = lease.flow.take() else { break };
        let ended = end_connection(&pipe, index, flow, broken);
        if pipe.is_ending() {
            break;
        }
        if ended.was_useful {
            retry.wait = RETRY_MIN;
        }
        retry.broke(&pipe, &ended);
        pipe.expire();
        pipe.pause(&mut retry).await;
    }
    pipe.fail(libc::EIO, None);
}

/// A connection in use. If its loop ends before the disk has gone, whoever comes next has it: the
/// server may allow no other.
struct Lease<'a> {
    pipe: &'a Pipe,
    flow: Option<Flow>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let Ok(requests) = self.pipe.requests.try_borrow() else { return };
        let idle = self.flow.take().and_then(|flow| flow.into_idle(&requests));
        if let Some(connected) = idle.filter(|_| !self.pipe.is_ending()) {
            self.pipe.shared.put_spare(connected);
        }
    }
}

/// How a connection has ended.
struct Ended {
    why: String,
    /// It has answered something.
    was_useful: bool,
    unflushed: Unflushed,
    /// How many requests are to be sent again.
    again: usize,
    /// How many changes the server may still make because of it.
    held: usize,
}

/// Takes the requests from a connection that cannot be used any more. What the server may still do
/// with them is waited for by a task of its own.
fn end_connection(pipe: &Rc<Pipe>, index: usize, flow: Flow, broken: Option<Broken>) -> Ended {
    let was_useful = flow.has_answered();
    // Before requests go to other connections: some are refused now, or have to wait.
    let unflushed = pipe.shared.has_broken();
    let (why, is_over, is_readable) = match broken {
        None => (String::new(), true, false),
        Some(Broken::Gone(why)) => (why, true, false),
        Some(Broken::Unusable(why)) => (why, false, false),
        Some(Broken::Late(why)) => (why, false, true),
    };
    let remains = if is_over { None } else { pipe.leave_behind(index) };
    let held = remains.as_ref().map_or(0, Remains::changes);
    if let Some(remains) = remains {
        pipe.io.spawn(see_off(Rc::clone(pipe), flow, remains, is_readable));
    }
    let deadline = pipe.shared.options.deadline.filter(|_| is_readable);
    let overdue = deadline.and_then(|deadline| clock::now().checked_sub(deadline));
    let again = pipe.link_is_down(index, overdue);
    Ended { why, was_useful, unflushed, again, held }
}

/// Waits until the server has answered the changes that a connection has, which was given up, or
/// has closed it. If its answers cannot be read, only that says that it has ended them.
async fn see_off(pipe: Rc<Pipe>, mut flow: Flow, mut remains: Remains, mut is_readable: bool) {
    let task = pipe.io.this_task();
    pipe.leaving.borrow_mut().push(task);
    // Without that it is looked at now and then.
    let incoming = Watched::new(&pipe.io, &flow, Interest::Readable).ok();
    if !is_readable {
        flow.half_close();
    }
    let mut tick: Option<Instant> = None;
    while !pipe.is_ending() {
        let now = pipe.io.recently.get();
        if tick.is_none_or(|tick| tick <= now) {
            flow.may_receive();
            flow.may_send();
            pipe.expire();
            tick = Some(now + TICK);
            pipe.io.wake_me_at(now + TICK);
        }
        if incoming.as_ref().is_some_and(Watched::take) {
            flow.may_receive();
        }
        let went_on = match (is_readable, &mut remains.requests) {
            (true, requests) => {
                flow.send(requests).and_then(|()| flow.receive(requests, &pipe.shared))
            }
            (false, _) => flow.discard(),
        };
        match went_on {
            Ok(_) if pipe.release_answered(&mut remains) => break,
            Ok(true) => pipe.io.wake_me(),
            Ok(false) => {}
            Err(Broken::Gone(_)) => break,
            Err(Broken::Unusable(_) | Broken::Late(_)) => {
                is_readable = false;
                flow.half_close();
                pipe.io.wake_me();
            }
        }
        pipe.io.suspend().await;
    }
    pipe.release_all(&mut remains);
    pipe.leaving.borrow_mut().retain(|other| *other != task);
}

/// How a server is tried again.
struct Retry {
    /// Since when it is away.
    since: Option<Instant>,
    /// The reason that the log has.
    told: String,
    /// The log says that it is away.
    is_told: bool,
    wait: Duration,
}

impl Retry {
    fn note(&mut self, pipe: &Pipe, why: &str) {
        let since = *self.since.get_or_insert_with(clock::now);
        pipe.tell_condition(Some((since, why)));
        if self.told != why
            && let Some(left_out) = pipe.shared.permit_line(clock::now())
        {
            why.clone_into(&mut self.told);
            self.is_told = true;
            let name = &pipe.shared.options;
            tracing::warn!(left_out, "{name} is away: {why}; requests wait, and it is tried again");
        }
    }

    /// One that breaks again and again is told now and then, but not that data is lost: that
    /// happens once.
    fn broke(&mut self, pipe: &Pipe, ended: &Ended) {
        let name = &pipe.shared.options;
        let Ended { why, again, held, .. } = ended;
        let since = *self.since.get_or_insert_with(clock::now);
        pipe.tell_condition(Some((since, why)));
        let permit = pipe.shared.permit_break(ended.was_useful, clock::now());
        self.is_told = permit.is_some();
        if let Some(left_out) = permit {
            tracing::warn!(
                left_out,
                "{name}: a connection broke: {why}; requests to be sent again: {again}"
            );
            if *held > 0 {
                tracing::warn!(
                    "{name}: the server may still make changes without an answer, {held} of them; \
                     others to the same places wait until it has answered or closed the connection"
                );
            }
        }
        match ended.unflushed {
            Unflushed::Lost => tracing::error!(
                "{name}: what was written and not flushed may be lost, so all further flushes \
                 fail; check the disk, then restart the export"
            ),
            Unflushed::Trusted if self.is_told => tracing::warn!(
                "{name}: what was written and not flushed is lost if the server's machine has \
                 restarted"
            ),
            Unflushed::Trusted | Unflushed::Nothing => {}
        }
    }

    fn is_over(&mut self, pipe: &Pipe) {
        self.told.clear();
        let is_told = std::mem::take(&mut self.is_told);
        if let Some(since) = self.since.take().filter(|_| is_told) {
            let seconds = since.elapsed().as_secs();
            tracing::info!("{} is back after {seconds} s", pipe.shared.options);
        }
    }
}

impl Pipe {
    /// Whether connections are to end.
    fn is_ending(&self) -> bool {
        self.shared.is_given_up() || self.shared.is_over()
    }

    /// Waits before the server is tried again.
    async fn pause(&self, retry: &mut Retry) {
        let until = clock::now() + retry.wait;
        retry.wait = (retry.wait * 2).min(RETRY_MAX);
        self.io.wake_me_at(until);
        while clock::now() < until && !self.is_ending() {
            self.io.suspend().await;
        }
        self.expire();
    }

    /// Fails what has waited for too long without a connection.
    fn expire(&self) {
        if let Some(deadline) = self.shared.options.deadline
            && let Some(before) = clock::now().checked_sub(deadline)
        {
            self.fail(libc::ETIMEDOUT, Some(before));
        }
    }

    /// A connection, made by a thread. `None`: it is not needed any more.
    async fn next_connection(&self) -> Option<Result<Connected, String>> {
        if let Some(spare) = self.shared.take_spare() {
            return Some(Ok(spare));
        }
        let inbox = Arc::new(Mutex::new(None));
        let (sent, shared) = (Arc::clone(&inbox), Arc::clone(&self.shared));
        let (task, remote) = (self.io.this_task(), self.io.remote());
        let work = move || {
            let made = connect(&shared.options).and_then(|made| check(&shared, made));
            *sent.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
            remote.post(move |io| io.wake(task));
        };
        if let Err(error) = self.io.start_thread("nbd-connect", work) {
            return Some(Err(format!("cannot start a thread that connects: {error}")));
        }
        loop {
            if let Some(made) = inbox.lock().unwrap_or_else(PoisonError::into_inner).take() {
                return Some(made);
            }
            if self.is_ending() {
                return None;
            }
            self.io.wake_me_at(clock::now() + TICK);
            self.io.suspend().await;
            self.expire();
        }
    }
}

/// Refuses a connection that offers less than the disk was opened with.
fn check(shared: &Shared, made: Connected) -> Result<Connected, String> {
    let (then, now) = (&shared.facts, &made.facts);
    let known = shared.size_bytes.swap(now.size_bytes, std::sync::atomic::Ordering::Relaxed);
    if now.size_bytes < then.size_bytes && now.size_bytes != known {
        tracing::warn!(
            "{}: the export has shrunk to {} bytes; what lies beyond cannot be reached",
            shared.options,
            now.size_bytes
        );
    }
    // Without MULTI_CONN a flush covers its own connection alone.
    let unneeded = if then.can(can::READ_ONLY) { can::MULTI_CONN } else { 0 };
    let needed = then.flags & !(can::READ_ONLY | unneeded);
    let is_less = now.flags & needed != needed
        || (now.framing != then.framing && then.framing == Framing::Extended)
        || (now.can(can::READ_ONLY) && !then.can(can::READ_ONLY))
        || now.block_bytes_min > then.block_bytes_min
        || now.payload_bytes_max < then.payload_bytes_max;
    if is_less {
        return Err("the export offers less than before; restart it as it was, or restart the \
                    export of this disk"
            .to_owned());
    }
    Ok(made)
}

/// What the loop says about a socket.
#[derive(Default)]
struct Readiness(Cell<bool>);

impl Source for Readiness {
    fn notify(&self) {}

    fn arm(&self, _: Instant) -> Armed {
        Armed::Yes
    }

    fn disarm(&self) {}

    fn has_work(&self) -> bool {
        false
    }

    fn happened(&self) {
        self.0.set(true);
    }
}

/// A socket that the loop watches, for as long as this exists.
struct Watched<'a> {
    io: &'a Io,
    readiness: Rc<Readiness>,
    source: SourceId,
}

impl<'a> Watched<'a> {
    fn new(io: &'a Io, flow: &Flow, interest: Interest) -> Result<Self, Broken> {
        let cannot = |error: &dyn std::fmt::Display| {
            Broken::Unusable(format!("cannot watch its socket: {error}"))
        };
        let socket = flow.socket().as_fd().try_clone_to_owned().map_err(|e| cannot(&e))?;
        let readiness = Rc::<Readiness>::default();
        let source: Rc<dyn Source> = Rc::<Readiness>::clone(&readiness);
        let added = io.add_socket(source, socket, interest);
        let source = added.map_err(|error| cannot(&error))?;
        Ok(Self { io, readiness, source })
    }

    fn take(&self) -> bool {
        self.readiness.0.take()
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.io.remove_source(self.source);
    }
}

/// Carries requests until the connection breaks, or nobody needs it any more.
async fn carry(pipe: &Rc<Pipe>, index: usize, flow: &mut Flow) -> Result<(), Broken> {
    let io = &*pipe.io;
    let incoming = Watched::new(io, flow, Interest::Readable)?;
    // Only while the socket has no room: else each byte that leaves it would be announced.
    let mut room: Option<Watched<'_>> = None;
    let (mut tick, mut is_late) = (None, false);
    loop {
        if pipe.shared.is_given_up() {
            return Ok(());
        }
        if incoming.take() {
            flow.may_receive();
        }
        if room.as_ref().is_some_and(Watched::take) {
            flow.may_send();
            room = None;
        }
        if tick.is_some_and(|tick| tick <= io.recently.get()) {
            tick = None;
            // The end of a stream that comes with data is announced only once, with the data.
            flow.may_receive();
            is_late = look_for_late(pipe, index, is_late)?;
            pipe.expire();
        }
        let (went_on, is_busy) = {
            let requests = &mut *pipe.requests.borrow_mut();
            let went_on = flow.send(requests).and_then(|()| flow.receive(requests, &pipe.shared));
            (went_on, flow.is_busy(requests))
        };
        pipe.settle();
        if went_on? {
            io.wake_me();
        }
        if !is_busy && pipe.shared.is_over() {
            flow.say_goodbye();
            return Ok(());
        }
        if flow.is_full() && room.is_none() {
            room = Some(Watched::new(io, flow, Interest::Writable)?);
        }
        if tick.is_none() && (is_busy || pipe.oldest_waiting().is_some()) {
            let when = io.recently.get() + TICK;
            io.wake_me_at(when);
            tick = Some(when);
        }
        io.suspend().await;
    }
}

/// Notes that the server is late, or is not any more; breaks the connection at the deadline.
fn look_for_late(pipe: &Pipe, index: usize, was_late: bool) -> Result<bool, Broken> {
    let age = |since: Instant| clock::now().saturating_duration_since(since);
    let oldest = pipe.oldest_of(index);
    if let (Some(since), Some(deadline)) = (oldest, pipe.shared.options.deadline)
        && age(since) >= deadline
    {
        let why = format!("the server has not answered for {} s", age(since).as_secs());
        return Err(Broken::Late(why));
    }
    let oldest = oldest.into_iter().chain(pipe.oldest_waiting()).min();
    let late = oldest.filter(|since| age(*since) >= LATE);
    match late {
        Some(since) => pipe.shared.set_condition(pipe.number, Condition::Late(since)),
        None if was_late => pipe.tell_condition(None),
        None => {}
    }
    Ok(late.is_some())
}
