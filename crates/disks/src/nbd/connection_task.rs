//! A connection to an NBD server, which is made, carries requests until it breaks, and is made
//! again. All requests at hand share a send, and all answers at hand a receive.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockio::driver::{Interest, Line, StallLog};
use blockio::executor::Lock;
use blockio::{Io, Remote, clock};

use super::channel::{Broken, Channel};
use super::client::{Client, record_size};
use super::connect::{Connected, QuestionNumber, connect};
use super::drain::{DrainSignal, TICK, adopt_orphans, drain, hand_to_another};
use super::handshake::{Facts, can};
use super::retry::{Ended, RETRY_MAX, RETRY_MIN, Retry, log_unflushed};
use super::shared::{Condition, Home, SharedExport};
use super::socket_source::Watched;
use super::transport::TcpHealth;
use super::wire::Framing;

/// The longest wait of requests for a connection that replaces a new one.
const REPLACE_MAX: Duration = Duration::from_millis(250);

/// Makes the connections of an IoThread, in tasks.
pub(super) fn start(
    io: &Rc<Io>,
    shared: &Arc<SharedExport>,
    number: u64,
    links: usize,
) -> Rc<Client> {
    let client = Client::new(io, shared, number, links);
    for index in 0..links {
        io.spawn(serve_link(Service { client: Rc::clone(&client) }, index));
    }
    adopt_orphans(&client);
    client
}

/// The task of a connection, which may end with its loop.
struct Service {
    client: Rc<Client>,
}

impl Drop for Service {
    fn drop(&mut self) {
        self.client.on_link_ended();
    }
}

/// Serves requests over one connection after another, until the last user of the disk is gone.
async fn serve_link(service: Service, index: usize) {
    let client = Rc::clone(&service.client);
    client.set_task(index);
    let mut retry = Retry::new();
    while !client.is_unneeded() {
        let connected = match client.next_connection().await {
            Some(Ok(connected)) => connected,
            Some(Err(why)) => {
                retry.record_failure(&client, &why);
                client.pause(&mut retry).await;
                continue;
            }
            None => break,
        };
        retry.record_return(&client);
        let begun = clock::now();
        let channel = Channel::new(index, connected);
        client.link_is_up(index, channel.facts());
        let mut lease = Lease { client: &client, index, channel: Some(channel) };
        let carried = match &mut lease.channel {
            Some(channel) => carry(&client, index, channel).await,
            None => Ok(()),
        };
        let Some(channel) = lease.channel.take() else { break };
        if carried.is_ok() && !client.shared.is_over() {
            // The next connection knows the present size of the export.
            client.link_is_down(index);
            // Otherwise other IoThreads would send their requests here, and get them back.
            client.publish_condition(None);
            // While an export grows, each new connection knows a larger size.
            if clock::now().saturating_duration_since(begun) < RETRY_MAX {
                retry.wait = retry.wait.min(REPLACE_MAX);
                client.pause(&mut retry).await;
            } else {
                retry.wait = RETRY_MIN;
            }
            continue;
        }
        let ended = end_connection(&client, index, channel, carried.err());
        if client.is_unneeded() {
            break;
        }
        if ended.was_useful {
            retry.wait = RETRY_MIN;
        }
        retry.record_break(&client, &ended);
        client.pause(&mut retry).await;
    }
    client.fail(libc::EIO, None);
}

/// A connection in use. If its loop ends before the disk is gone, the next IoThread has it: the
/// server may allow no second one. A connection with requests is abandoned.
struct Lease<'a> {
    client: &'a Client,
    index: usize,
    channel: Option<Channel>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let Some(channel) = self.channel.take() else { return };
        let (client, shared) = (self.client, &self.client.shared);
        let Ok(is_idle) = client.requests.try_borrow().map(|requests| channel.is_idle(&requests))
        else {
            return;
        };
        if !is_idle && !shared.is_over() {
            log_unflushed(shared, shared.on_break(), true);
            if let Some(abandoned) = client.abandon_link(self.index) {
                hand_to_another(client, channel, abandoned, DrainSignal::Close);
            }
        } else if !client.is_unneeded() {
            shared.put_spare(channel.into_connected());
        }
    }
}

/// Takes the requests from a connection that can no longer be used. A task of its own waits for the
/// changes that the server may still make.
fn end_connection(
    client: &Rc<Client>,
    index: usize,
    channel: Channel,
    broken: Option<Broken>,
) -> Ended {
    let was_useful = channel.was_answered();
    // Before requests go to other connections: some are refused now, or have to wait.
    let unflushed = client.shared.on_break();
    let (why, signal) = broken.map_or((String::new(), None), Broken::into_reason_and_signal);
    let left = signal.and_then(|signal| Some((signal, client.abandon_link(index)?)));
    let held = left.as_ref().map_or(0, |(_, abandoned)| abandoned.changes());
    if let Some((signal, abandoned)) = left {
        drain(client, channel, abandoned, signal);
    }
    let again = client.link_is_down(index);
    Ended { why, was_useful, unflushed, again, held }
}

impl Client {
    /// The longest time of a request.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let late = self.is_unneeded().then_some(StallLog::LATE);
        self.shared.options.deadline.into_iter().chain(late).min()
    }

    /// Waits before the server is tried again.
    async fn pause(&self, retry: &mut Retry) {
        let until = clock::now() + retry.next_pause();
        self.io.wake_me_at(until);
        while clock::now() < until && !self.is_unneeded() {
            self.io.suspend().await;
        }
    }

    /// Takes the spare connection, or makes one by a thread. `None`: none is needed.
    async fn next_connection(&self) -> Option<Result<Connected, String>> {
        if let Some(spare) = self.shared.take_spare() {
            return Some(Ok(spare));
        }
        let inbox = Arc::new(Lock::new(None));
        let (sent, shared) = (Arc::clone(&inbox), Arc::clone(&self.shared));
        let (task, remote) = (self.io.current_task(), self.io.remote());
        let work = move || {
            let made = connect(&shared.options);
            let made = made.and_then(|(made, asked)| check(&shared, made, asked));
            let made = match made {
                Ok(unneeded) if shared.is_over() => {
                    Channel::new(0, unneeded).send_disconnect();
                    return;
                }
                made => made,
            };
            *sent.lock() = Some(made);
            remote.post(move |io| io.wake(task));
        };
        if let Err(error) = Io::start_thread("nbd-connect", work) {
            *inbox.lock() = Some(Err(format!("cannot start the thread that connects: {error}")));
        }
        let mut tick: Option<Instant> = None;
        loop {
            self.expire();
            self.reroute_waiting();
            if let Some(made) = inbox.lock().take() {
                return Some(made);
            }
            if self.is_unneeded() {
                return None;
            }
            let now = self.io.recently();
            if tick.is_none_or(|tick| tick <= now) {
                tick = Some(now + TICK);
                self.io.wake_me_at(now + TICK);
            }
            self.io.suspend().await;
        }
    }
}

/// Refuses a connection that offers less than when the disk was opened. Takes its size over.
fn check(
    shared: &Arc<SharedExport>,
    made: Connected,
    asked: QuestionNumber,
) -> Result<Connected, String> {
    let (then, now) = (&shared.facts, &made.facts);
    check_not_less(shared, now)?;
    let known = record_size(shared, now.size_bytes, asked);
    if now.size_bytes < then.size_bytes && known.is_some_and(|known| known != now.size_bytes) {
        let _span = shared.span.enter();
        tracing::warn!(
            "{}: the export has shrunk to {} bytes; the server may fail requests beyond its end",
            shared.options,
            now.size_bytes
        );
    }
    Ok(made)
}

/// Refuses facts that offer less than when the disk was opened. The export may be a different one,
/// so none of its facts count.
pub(super) fn check_not_less(shared: &SharedExport, now: &Facts) -> Result<(), String> {
    let then = &shared.facts;
    // Without MULTI_CONN a flush covers its own connection alone.
    let needed = match shared.read_only {
        true => can::FLUSH | can::MULTI_CONN,
        false => can::NEEDED,
    };
    let needed = then.flags & needed;
    let is_less = now.flags & needed != needed
        || (now.framing != then.framing && then.framing == Framing::Extended)
        || (now.can(can::READ_ONLY) && !shared.read_only)
        || now.block_bytes_min > then.block_bytes_min
        || now.payload_bytes_max < then.payload_bytes_max;
    if is_less {
        return Err(
            "the NBD export offers fewer capabilities than before; restore its settings on the \
             server, or restart the export of this disk"
                .to_owned(),
        );
    }
    Ok(())
}

/// Carries requests until the connection breaks, or is not needed.
async fn carry(client: &Rc<Client>, index: usize, channel: &mut Channel) -> Result<(), Broken> {
    let io = &*client.io;
    let incoming = Watched::new(io, channel, Interest::Readable)?;
    // Only while the socket has no room: otherwise each byte that leaves it would be announced.
    let mut room: Option<Watched<'_>> = None;
    let (begun, mut tick) = (io.recently(), None);
    loop {
        if client.shared.is_abandoned() {
            client.fail(libc::EIO, None);
        }
        if incoming.take() {
            channel.may_receive();
        }
        if room.as_ref().is_some_and(Watched::take) {
            channel.may_send();
            room = None;
        }
        let is_check_due = tick.is_some_and(|tick| tick <= io.recently());
        if is_check_due {
            tick = None;
            // The end of a stream that comes with data is announced only once, with the data.
            channel.may_receive();
            check_silence(client, channel)?;
            client.expire();
        }
        let (progress, is_busy) = {
            let requests = &mut *client.requests.borrow_mut();
            let progress =
                channel.send(requests).and_then(|()| channel.receive(requests, &client.shared));
            // An answer may have queued a flush.
            let progress = progress.and_then(|has_more| channel.send(requests).map(|()| has_more));
            (progress, channel.is_busy(requests))
        };
        client.settle();
        if progress? {
            io.wake_me();
        }
        if is_check_due {
            // An answer that came while this thread did not run is neither late nor overdue.
            check_deadline(client, index)?;
            client.check_stalled(index, begun, channel.take_answered());
        }
        if !is_busy && client.shared.is_over() {
            channel.send_disconnect();
            return Ok(());
        }
        if client.is_retiring(index) && !is_busy {
            if retire(client, index, channel) {
                return Ok(());
            }
            continue;
        }
        if channel.is_full() && room.is_none() {
            room = Some(Watched::new(io, channel, Interest::Writable)?);
        }
        if tick.is_none() && (is_busy || client.oldest_waiting().is_some()) {
            let when = io.recently() + TICK;
            io.wake_me_at(when);
            tick = Some(when);
        }
        io.suspend().await;
    }
}

/// Ends a connection that knows only a smaller size of the export, as if it had never been. Returns
/// false if it has to flush first.
fn retire(client: &Client, index: usize, channel: &mut Channel) -> bool {
    if client.shared.needs_own_flush() {
        client.flush_link(index);
        return false;
    }
    channel.send_disconnect();
    true
}

/// Breaks a connection if its oldest request is overdue.
fn check_deadline(client: &Client, index: usize) -> Result<(), Broken> {
    let Some((since, deadline)) = client.oldest_of(index).zip(client.deadline()) else {
        return Ok(());
    };
    let age = client.io.recently().saturating_duration_since(since);
    if age < deadline {
        return Ok(());
    }
    Err(Broken::Late(format!("the server has not answered for {} s", age.as_secs())))
}

/// Breaks a connection if the server's machine is silent.
fn check_silence(client: &Client, channel: &Channel) -> Result<(), Broken> {
    match TcpHealth::read(channel.socket()).filter(|pulse| pulse.is_silent(client.shared.silence)) {
        Some(pulse) => {
            let seconds = pulse.quiet_for.as_secs();
            Err(Broken::Silent(format!("the server's machine has been silent for {seconds} s")))
        }
        None => Ok(()),
    }
}

/// Ends the connections when the last user of the disk is gone.
pub(super) struct Handle {
    pub(super) shared: Arc<SharedExport>,
}

impl Handle {
    /// Wakes all connections, which then check the state of the disk.
    pub(super) fn wake(&self) {
        Client::run_on_each(&self.shared, |client| client.wake_links());
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(unused) = self.shared.take_spare() {
            Channel::new(0, unused).send_disconnect();
        }
        self.wake();
    }
}

/// The place of the connections that an IoThread uses.
pub(super) enum ConnectionChoice {
    Local(Rc<Client>),
    /// On the IoThread that has the client with this number.
    Remote(u64, Remote),
}

impl ConnectionChoice {
    /// Finds existing connections, or makes new ones, as far as the server allows that.
    pub(super) fn find(io: &Rc<Io>, shared: &Arc<SharedExport>) -> Self {
        if let Some(client) = Client::find(io, shared) {
            return Self::Local(client);
        }
        let (number, links) = if shared.flushes_are_common() {
            (shared.add_client(&io.remote()), shared.options.connections.max(1) as usize)
        } else {
            match shared.home(&io.remote()) {
                Home::Local(number) => (number, 1),
                Home::Remote(number, remote) => return Self::Remote(number, remote),
            }
        };
        Self::Local(start(io, shared, number, links))
    }
}

impl Client {
    /// Publishes the condition of the connections.
    pub(super) fn publish_condition(&self, why: Option<(Instant, &str)>) {
        let now = self.io.recently();
        let waiting = self.oldest_waiting().filter(|since| StallLog::is_late(*since, now));
        let (up, late, since, is_idle) = {
            let requests = self.requests.borrow();
            let late = || requests.links.iter().filter_map(|link| link.stalled_since);
            let up = requests.links.iter().filter(|link| link.is_up).count();
            (up, late().count(), late().chain(waiting).min(), requests.are_idle())
        };
        let condition = match (why, since) {
            (Some((since, why)), _) if up == 0 => Condition::Away(since, why.to_owned()),
            (_, Some(since)) if up > 0 => Condition::Late { since, up, late },
            _ => Condition::Up(up),
        };
        self.shared.set_condition(self.number, condition);
        if up > 0 && is_idle {
            self.shared.forget_stall(self.number);
        }
    }

    /// Checks if the server is late with requests of a link. Its connection exists since `begun`,
    /// and has received all bytes that had come. Publishes the condition; the log has a line for
    /// all connections together. `was_answered`: the link received something since the last check.
    pub(super) fn check_stalled(&self, index: usize, begun: Instant, was_answered: bool) {
        let now = self.io.recently();
        // A request that is sent again has waited for a server that was away, and not for an
        // answer.
        let oldest = self.oldest_of(index).map(|since| since.max(begun));
        let stalled_since = oldest.filter(|since| StallLog::is_late(*since, now));
        self.requests.borrow_mut().links[index].stalled_since = stalled_since;
        self.publish_condition(None);
        let name = &self.shared.options;
        let _span = self.shared.span.enter();
        match self.shared.check_stalled(self.number, now, was_answered) {
            Some(Line::Waits(age)) => tracing::warn!(
                "{name}: the server has not answered an operation for {} s; requests wait for it; \
                 check the server, its storage and the network",
                age.as_secs()
            ),
            Some(Line::Answers(after)) => {
                tracing::info!("{name}: the server answers again, after {} s", after.as_secs());
            }
            None => {}
        }
    }
}
