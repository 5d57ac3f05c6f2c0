//! The state of an NBD export that all IoThreads share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blockio::Remote;
use blockio::disk::DiskState;
use blockio::driver::{Line, RateLimit, StallLog};
use blockio::executor::Lock;
use tracing::Span;

use super::connect::{Connected, QuestionNumber};
use super::handshake::{Facts, can};
use super::options::NbdOptions;
use super::write_fence::HeldRanges;

/// The state that all IoThreads share.
pub(super) struct SharedExport {
    pub(super) options: NbdOptions,
    /// The span in which the disk was opened, for its lines in the log.
    pub(super) span: Span,
    /// True if the disk was opened read-only.
    pub(super) read_only: bool,
    /// The server's machine counts as gone after this long a silence.
    pub(super) silence: Duration,
    /// The facts at the opening of the disk. Later connections must not offer less.
    pub(super) facts: Facts,
    /// The size that the server has reported last.
    size_bytes: AtomicU64,
    /// True if requests must not wait for the server: only the ones that an answering server has
    /// begun continue.
    is_abandoned: AtomicBool,
    /// True if the last user of the disk is gone.
    is_over: AtomicBool,
    /// True if written data may be lost, and flushes fail.
    is_lost: AtomicBool,
    /// Changes that abandoned requests may still make.
    pub(super) held: HeldRanges,
    /// The number of answered changes; and the number of these that an answered flush has covered.
    changes: AtomicU64,
    flushed: AtomicU64,
    state: Lock<State>,
}

struct State {
    /// The question to which the size was the answer.
    asked: QuestionNumber,
    /// A connection without an IoThread, for the next one that needs it. The first was made when
    /// the disk was opened.
    spare: Option<Connected>,
    /// Connections that no task drains since their IoThread has ended.
    orphans: Vec<Orphan>,
    /// The connections of each IoThread, and their condition.
    clients: BTreeMap<u64, (Remote, Condition)>,
    /// The client for all IoThreads, if there may be one connection only.
    home: Option<u64>,
    next_client: u64,
    /// Limits for log lines about an unusable server, and about broken connections.
    log: RateLimit,
    breaks: RateLimit,
    /// The log lines about a server that does not answer.
    stall_log: StallLog,
    /// Clients that were late since the last of these lines, and have received no answer since.
    unanswered: BTreeSet<u64>,
}

/// Broken connections get a line each, unless they keep breaking.
const BREAKS_LOGGED: u32 = 20;

impl State {
    fn add_client(&mut self, remote: &Remote) -> u64 {
        let number = self.next_client;
        self.next_client += 1;
        self.clients.insert(number, (remote.clone(), Condition::Up(0)));
        number
    }
}

/// The state of changes that were answered and not flushed when a connection broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnflushedChanges {
    /// There are none, or they are known to be lost already.
    Nothing,
    /// The server is trusted to have kept them.
    Trusted,
    /// The changes count as lost from now on.
    Lost,
}

/// An abandoned connection, for an IoThread that drains it.
pub(super) struct Orphan {
    pub(super) connected: Connected,
    /// True if the server can still report the end of the connection.
    pub(super) close_is_visible: bool,
    /// The holder of the changes that the server may still make.
    pub(super) holder: u64,
}

/// The place of the client for all IoThreads.
pub(super) enum Home {
    /// To be made here, with this number.
    Local(u64),
    Remote(u64, Remote),
}

/// The condition of the connections of an IoThread.
#[derive(Debug, Clone)]
pub(super) enum Condition {
    /// The number of connections.
    Up(usize),
    /// The server has not answered since `since`: `late` of `up` connections are late.
    Late { since: Instant, up: usize, late: usize },
    /// The time since which there is no connection, and the reason.
    Away(Instant, String),
}

impl Condition {
    /// Returns true if there is a connection with requests that are answered.
    fn serves(&self) -> bool {
        match self {
            Self::Up(up) => *up > 0,
            Self::Late { up, late, .. } => late < up,
            Self::Away(..) => false,
        }
    }
}

impl SharedExport {
    pub(super) fn new(
        options: NbdOptions,
        read_only: bool,
        silence: Duration,
        connected: Connected,
    ) -> Self {
        let facts = connected.facts;
        let state = State {
            // Any answer is newer.
            asked: QuestionNumber::default(),
            spare: Some(connected),
            orphans: Vec::new(),
            clients: BTreeMap::new(),
            home: None,
            next_client: 0,
            log: RateLimit::default(),
            breaks: RateLimit::new(BREAKS_LOGGED),
            stall_log: StallLog::default(),
            unanswered: BTreeSet::new(),
        };
        Self {
            options,
            span: Span::current(),
            read_only,
            silence,
            facts,
            size_bytes: AtomicU64::new(facts.size_bytes),
            is_abandoned: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            held: HeldRanges::default(),
            changes: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            state: Lock::new(state),
        }
    }

    /// Keeps a connection for the next IoThread that needs one.
    pub(super) fn put_spare(&self, connected: Connected) {
        self.state.lock().spare = Some(connected);
    }

    pub(super) fn has_spare(&self) -> bool {
        self.state.lock().spare.is_some()
    }

    pub(super) fn take_spare(&self) -> Option<Connected> {
        self.state.lock().spare.take()
    }

    pub(super) fn put_orphan(&self, orphan: Orphan) {
        self.state.lock().orphans.push(orphan);
    }

    pub(super) fn take_orphans(&self) -> Vec<Orphan> {
        std::mem::take(&mut self.state.lock().orphans)
    }

    /// Adds the client of an IoThread. Returns its number.
    pub(super) fn add_client(&self, remote: &Remote) -> u64 {
        self.state.lock().add_client(remote)
    }

    /// Returns the place of the client for all IoThreads. If there is none, the caller makes it.
    pub(super) fn home(&self, here: &Remote) -> Home {
        let mut state = self.state.lock();
        if let Some(number) = state.home
            && let Some((remote, _)) = state.clients.get(&number)
        {
            return Home::Remote(number, remote.clone());
        }
        let number = state.add_client(here);
        state.home = Some(number);
        Home::Local(number)
    }

    /// Returns true if a flush on one connection covers writes on all. Only then are there several.
    /// A distrusted server may die after its last answers, and be back before the end of each
    /// connection is known here. By a new connection it would then flush without the data that it
    /// has lost.
    pub(super) fn flushes_are_common(&self) -> bool {
        let is_trusted = self.read_only || !self.options.distrust;
        self.facts.can(can::MULTI_CONN) && is_trusted
    }

    /// Returns an IoThread that has connections, and the number of its client, for requests of
    /// `client`, which has none.
    pub(super) fn another_client(&self, client: u64) -> Option<(u64, Remote)> {
        if !self.flushes_are_common() {
            return None;
        }
        let state = self.state.lock();
        let mut others = state.clients.iter().filter(|(number, _)| **number != client);
        let (number, (remote, _)) = others.find(|(_, (_, condition))| condition.serves())?;
        Some((*number, remote.clone()))
    }

    /// Returns the client for all IoThreads, and its IoThread.
    pub(super) fn home_remote(&self) -> Option<(u64, Remote)> {
        let state = self.state.lock();
        let home = state.home?;
        state.clients.get(&home).map(|(remote, _)| (home, remote.clone()))
    }

    /// The size that the server has reported last.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Records a reported size. Returns the size before; `None` if a newer answer counts.
    pub(super) fn swap_size(&self, size_bytes: u64, asked: QuestionNumber) -> Option<u64> {
        let mut state = self.state.lock();
        if asked < state.asked {
            return None;
        }
        state.asked = asked;
        Some(self.size_bytes.swap(size_bytes, Ordering::Relaxed))
    }

    /// Returns true if a connection must be flushed before it ends, because no other connection
    /// would cover its writes. After a loss no flush succeeds.
    pub(super) fn needs_own_flush(&self) -> bool {
        let can_flush = self.facts.can(can::FLUSH) && !self.is_lost();
        !self.flushes_are_common() && can_flush && !self.is_flushed()
    }

    pub(super) fn set_condition(&self, client: u64, condition: Condition) {
        if let Some((_, known)) = self.state.lock().clients.get_mut(&client) {
            *known = condition;
        }
    }

    pub(super) fn remove_client(&self, client: u64) {
        let mut state = self.state.lock();
        state.clients.remove(&client);
        state.unanswered.remove(&client);
        state.home = state.home.filter(|home| *home != client);
    }

    /// The IoThreads that have connections.
    pub(super) fn remotes(&self) -> Vec<Remote> {
        self.state.lock().clients.values().map(|(remote, _)| remote.clone()).collect()
    }

    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Release);
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Acquire)
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Counts an answered change with data that may still be in a cache of the server.
    pub(super) fn count_change(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of changes that a flush which begins now covers.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Records the answer to a flush that has covered this many changes.
    pub(super) fn record_flush(&self, changes: u64) {
        self.flushed.fetch_max(changes, Ordering::Relaxed);
    }

    /// Called when a connection broke. Returns the state of the changes that were answered before.
    pub(super) fn on_break(&self) -> UnflushedChanges {
        match (self.is_flushed() || self.is_lost(), self.options.distrust) {
            (true, _) => UnflushedChanges::Nothing,
            (false, false) => UnflushedChanges::Trusted,
            (false, true) if self.is_lost.swap(true, Ordering::Relaxed) => {
                UnflushedChanges::Nothing
            }
            (false, true) => UnflushedChanges::Lost,
        }
    }

    /// Records that the server has failed a flush: the next one may succeed without the data of
    /// this one. Any error counts: servers send `EINVAL` for errors that the protocol does not
    /// have.
    pub(super) fn record_failed_flush(&self, errno: i32) {
        if !self.is_lost.swap(true, Ordering::Relaxed) {
            let _span = self.span.enter();
            tracing::error!(
                "{}: the server has failed a flush: {}; data written since the last successful \
                 flush may be lost, and all further flushes fail; check the server and the disk, \
                 then restart the export",
                self.options,
                std::io::Error::from_raw_os_error(errno)
            );
        }
    }

    /// Returns true if an answered flush has covered all answered changes.
    pub(super) fn is_flushed(&self) -> bool {
        self.changes() <= self.flushed.load(Ordering::Relaxed)
    }

    /// Takes over from another process, which may have lost data, or have left changes without a
    /// flush.
    pub(super) fn inherit(&self, is_lost: bool, is_flushed: bool) {
        self.changes.fetch_add(u64::from(!is_flushed), Ordering::Relaxed);
        self.is_lost.fetch_or(is_lost, Ordering::Relaxed);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Returns the number of lines left out since the last one, if a line may be written now.
    pub(super) fn permit_line(&self, now: Instant) -> Option<u64> {
        self.state.lock().log.permit(now)
    }

    /// Like `permit_line`, for a broken connection. If it has served nothing, it gets a line now
    /// and then.
    pub(super) fn permit_break(&self, was_useful: bool, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        if was_useful { state.breaks.permit(now) } else { state.log.permit(now) }
    }

    pub(super) fn disk_state(&self) -> DiskState {
        if self.is_lost() {
            return DiskState::Lost;
        }
        let (mut late, mut away, mut is_up) = (None, None, false);
        for (_, condition) in self.state.lock().clients.values() {
            is_up |= condition.serves();
            let (known, since) = match condition {
                Condition::Up(_) => continue,
                Condition::Late { since, .. } => (&mut late, *since),
                Condition::Away(since, _) => (&mut away, *since),
            };
            *known = Some(known.map_or(since, |other: Instant| other.min(since)));
        }
        // An IoThread without a connection uses the ones of other IoThreads.
        match (late, away.filter(|_| !is_up)) {
            (_, Some(since)) => DiskState::Away(since),
            (Some(since), None) => DiskState::Late(since),
            (None, None) => DiskState::Ready,
        }
    }

    pub(super) fn remark(&self) -> String {
        let (mut connections, mut all_late, mut problem) = (0, 0, None);
        for (_, condition) in self.state.lock().clients.values() {
            match condition {
                Condition::Up(links) => connections += links,
                Condition::Late { up, late, .. } => {
                    connections += up;
                    all_late += late;
                }
                Condition::Away(_, why) => problem = Some(why.clone()),
            }
        }
        let late = if all_late > 0 { format!(", late: {all_late}") } else { String::new() };
        match problem {
            Some(why) if connections > 0 => {
                format!("connections: {connections}{late}; some IoThreads have none: {why}")
            }
            Some(why) => why,
            None => format!("connections: {connections}{late}"),
        }
    }

    /// Called when a client has a connection, and no request that could be answered.
    pub(super) fn forget_stall(&self, client: u64) {
        self.state.lock().unanswered.remove(&client);
    }

    /// Returns the log line on a server that does not answer, for all connections of all IoThreads
    /// together. It answers again when each late client has received an answer: a connection that
    /// breaks leaves nothing late, and proves nothing. `was_answered`: this client received an
    /// answer since its last check.
    pub(super) fn check_stalled(
        &self,
        client: u64,
        now: Instant,
        was_answered: bool,
    ) -> Option<Line> {
        let mut state = self.state.lock();
        if was_answered {
            state.unanswered.remove(&client);
        }
        let since = |(number, (_, condition)): (&u64, &(Remote, Condition))| match condition {
            Condition::Late { since, .. } => Some((*number, *since)),
            _ => None,
        };
        let late: Vec<(u64, Instant)> = state.clients.iter().filter_map(since).collect();
        state.unanswered.extend(late.iter().map(|(number, _)| *number));
        if late.is_empty() && !state.unanswered.is_empty() {
            return None;
        }
        state.stall_log.next_line(now, late.iter().map(|(_, since)| *since).min())
    }
}
