//! What all IoThreads know about an NBD export.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connect::{Asked, Connected};
use super::handshake::{Facts, can};
use super::held::Held;
use super::target::NbdOptions;
use crate::disk::info::DiskState;
use crate::io::Io;
use crate::rare::Rare;
use crate::remote::Remote;
use crate::unanswered::{Line, Unanswered};

/// What all IoThreads know.
pub(super) struct Shared {
    pub(super) options: NbdOptions,
    /// Nobody writes.
    pub(super) read_only: bool,
    /// The server's machine counts as gone when it has been silent for this long.
    pub(super) silence: Duration,
    /// As it was when the disk was opened. Later connections must not offer less.
    pub(super) facts: Facts,
    /// The size that the server has told last.
    size_bytes: AtomicU64,
    /// Nobody wants to wait for it any more: only what a server that answers has begun goes on.
    is_unwanted: AtomicBool,
    /// Nobody has the disk any more.
    is_over: AtomicBool,
    /// What was written may be lost, and flushes fail.
    is_lost: AtomicBool,
    /// What requests that were given up may still change.
    pub(super) held: Held,
    /// Changes that were answered; and how many of these an answered flush has covered.
    changes: AtomicU64,
    flushed: AtomicU64,
    state: Mutex<State>,
}

struct State {
    /// When the server was asked that has told the size.
    asked: Asked,
    /// It serves nobody: one was made when the disk was opened, for the first who needs one.
    spare: Option<Connected>,
    /// Connections that nobody sees off since their IoThread has ended.
    orphans: Vec<Orphan>,
    /// What the connections of each IoThread are like.
    pipes: BTreeMap<u64, (Remote, Condition)>,
    /// Whose pipe is that of all IoThreads, where there may be one connection only.
    home: Option<u64>,
    next_pipe: u64,
    /// Lines about a server that cannot be used, and about connections that broke.
    log: Rare,
    breaks: Rare,
    /// And about one that does not answer.
    unanswered: Unanswered,
    /// The pipes that were late since such a line, and were answered nothing since then.
    unheard: BTreeSet<u64>,
}

/// Connections that break are worth a line each, unless they do it again and again.
const BREAKS_TOLD: u32 = 20;

impl State {
    fn add_pipe(&mut self, remote: &Remote) -> u64 {
        let number = self.next_pipe;
        self.next_pipe += 1;
        self.pipes.insert(number, (remote.clone(), Condition::Up(0)));
        number
    }
}

/// What becomes of changes that were answered and not flushed when a connection breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unflushed {
    /// There are none, or they are known to be lost already.
    Nothing,
    /// The server counts as having kept them.
    Trusted,
    /// They count as lost from now on.
    Lost,
}

/// A connection that was given up, for an IoThread that sees it off.
pub(super) struct Orphan {
    pub(super) connected: Connected,
    /// Whether the server can still say that it has ended it.
    pub(super) is_heard: bool,
    /// Who holds what the server may still change.
    pub(super) holder: u64,
}

/// Where the pipe of all IoThreads is.
pub(super) enum Home {
    /// It is to be made here, with this number.
    Here(u64),
    There(u64, Remote),
}

/// What the connections of an IoThread are like.
#[derive(Debug, Clone)]
pub(super) enum Condition {
    /// So many connections are there.
    Up(usize),
    /// The server has not answered since then; so many connections are there, and so many of them
    /// are late.
    Late { since: Instant, up: usize, late: usize },
    /// There is no connection since then, and why.
    Away(Instant, String),
}

impl Condition {
    /// Whether there is a connection whose requests are answered.
    fn serves(&self) -> bool {
        match self {
            Self::Up(up) => *up > 0,
            Self::Late { up, late, .. } => late < up,
            Self::Away(..) => false,
        }
    }
}

impl Shared {
    pub(super) fn new(
        options: NbdOptions,
        read_only: bool,
        silence: Duration,
        connected: Connected,
    ) -> Self {
        let facts = connected.facts;
        let state = State {
            // Whoever asks does that later.
            asked: Asked::default(),
            spare: Some(connected),
            orphans: Vec::new(),
            pipes: BTreeMap::new(),
            home: None,
            next_pipe: 0,
            log: Rare::default(),
            breaks: Rare::few(BREAKS_TOLD),
            unanswered: Unanswered::default(),
            unheard: BTreeSet::new(),
        };
        Self {
            options,
            read_only,
            silence,
            facts,
            size_bytes: AtomicU64::new(facts.size_bytes),
            is_unwanted: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            is_lost: AtomicBool::new(false),
            held: Held::default(),
            changes: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a connection for the next who needs one.
    pub(super) fn put_spare(&self, connected: Connected) {
        self.state().spare = Some(connected);
    }

    pub(super) fn has_spare(&self) -> bool {
        self.state().spare.is_some()
    }

    pub(super) fn take_spare(&self) -> Option<Connected> {
        self.state().spare.take()
    }

    pub(super) fn put_orphan(&self, orphan: Orphan) {
        self.state().orphans.push(orphan);
    }

    pub(super) fn take_orphans(&self) -> Vec<Orphan> {
        std::mem::take(&mut self.state().orphans)
    }

    /// Adds the connections of an IoThread. Returns their number.
    pub(super) fn add_pipe(&self, remote: &Remote) -> u64 {
        self.state().add_pipe(remote)
    }

    /// Where the pipe is that is for all IoThreads; if there is none, this one is to make it.
    pub(super) fn home(&self, here: &Remote) -> Home {
        let mut state = self.state();
        if let Some(number) = state.home
            && let Some((remote, _)) = state.pipes.get(&number)
        {
            return Home::There(number, remote.clone());
        }
        let number = state.add_pipe(here);
        state.home = Some(number);
        Home::Here(number)
    }

    /// Whether a flush on one connection covers what was written on others. Only then are there
    /// several. A server that is distrusted may have died after its last answers and be back
    /// before the end of each connection is known here, and would flush by a new connection what
    /// it does not have.
    pub(super) fn flushes_are_common(&self) -> bool {
        let is_trusted = self.read_only || !self.options.distrust;
        self.facts.can(can::MULTI_CONN) && is_trusted
    }

    /// An IoThread that has connections, and the number of its pipe, for the requests of the one
    /// with this pipe, which has none.
    pub(super) fn other(&self, pipe: u64) -> Option<(u64, Remote)> {
        if !self.flushes_are_common() {
            return None;
        }
        let state = self.state();
        let mut others = state.pipes.iter().filter(|(number, _)| **number != pipe);
        let (number, (remote, _)) = others.find(|(_, (_, condition))| condition.serves())?;
        Some((*number, remote.clone()))
    }

    /// The pipe that is for all, and its IoThread.
    pub(super) fn home_remote(&self) -> Option<(u64, Remote)> {
        let state = self.state();
        let home = state.home?;
        state.pipes.get(&home).map(|(remote, _)| (home, remote.clone()))
    }

    /// The size that the server has told last.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// The server has told a size. Returns the one that it had told before. `None`: it has told
    /// another one since.
    pub(super) fn swap_size(&self, size_bytes: u64, asked: Asked) -> Option<u64> {
        let mut state = self.state();
        if asked < state.asked {
            return None;
        }
        state.asked = asked;
        Some(self.size_bytes.swap(size_bytes, Ordering::Relaxed))
    }

    /// Whether a flush on one connection is needed before it ends: no other would cover what was
    /// written on it. Where something is lost, none succeeds.
    pub(super) fn needs_flush_of_its_own(&self) -> bool {
        let can_flush = self.facts.can(can::FLUSH) && !self.is_lost();
        !self.flushes_are_common() && can_flush && !self.is_flushed()
    }

    pub(super) fn set_condition(&self, pipe: u64, condition: Condition) {
        if let Some((_, known)) = self.state().pipes.get_mut(&pipe) {
            *known = condition;
        }
    }

    pub(super) fn remove_pipe(&self, pipe: u64) {
        let mut state = self.state();
        state.pipes.remove(&pipe);
        state.unheard.remove(&pipe);
        state.home = state.home.filter(|home| *home != pipe);
    }

    /// Calls `wake` on each IoThread that has connections.
    pub(super) fn on_pipes(&self, wake: impl Fn(&Rc<Io>) + Copy + Send + 'static) {
        let pipes: Vec<Remote> = {
            let state = self.state();
            state.pipes.values().map(|(remote, _)| remote.clone()).collect()
        };
        for remote in pipes {
            remote.post(move |io| wake(io));
        }
    }

    pub(super) fn give_up(&self) {
        self.is_unwanted.store(true, Ordering::Release);
    }

    pub(super) fn is_unwanted(&self) -> bool {
        self.is_unwanted.load(Ordering::Acquire)
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// A change was answered whose data may still be in a cache of the server.
    pub(super) fn has_changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// How many changes a flush that begins now covers.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// A flush that has covered so many changes was answered.
    pub(super) fn has_flushed(&self, changes: u64) {
        self.flushed.fetch_max(changes, Ordering::Relaxed);
    }

    /// A connection broke: what becomes of the changes that were answered before.
    pub(super) fn has_broken(&self) -> Unflushed {
        match (self.is_flushed() || self.is_lost(), self.options.distrust) {
            (true, _) => Unflushed::Nothing,
            (false, false) => Unflushed::Trusted,
            (false, true) if self.is_lost.swap(true, Ordering::Relaxed) => Unflushed::Nothing,
            (false, true) => Unflushed::Lost,
        }
    }

    /// The server has failed a flush, and the next one may succeed without what this one was to
    /// keep. Any error counts: servers send `EINVAL` for those that the protocol does not have.
    pub(super) fn lose(&self, errno: i32) {
        if !self.is_lost.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "{}: the server has failed a flush: {}; what was written since the last one that \
                 succeeded may be lost, and all further flushes fail; check the server and the \
                 disk, then restart the export",
                self.options,
                std::io::Error::from_raw_os_error(errno)
            );
        }
    }

    /// Whether an answered flush has covered all changes that were answered.
    pub(super) fn is_flushed(&self) -> bool {
        self.changes() <= self.flushed.load(Ordering::Relaxed)
    }

    /// Another process has had the disk, and has changed it since the last flush, or has not.
    pub(super) fn inherit(&self, is_lost: bool, is_flushed: bool) {
        self.changes.fetch_add(u64::from(!is_flushed), Ordering::Relaxed);
        self.is_lost.fetch_or(is_lost, Ordering::Relaxed);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// How many lines were left out since the last one, if one may be written now.
    pub(super) fn permit_line(&self, now: Instant) -> Option<u64> {
        self.state().log.permit(now)
    }

    /// The same for a connection that broke. One that has served nothing is told now and then.
    pub(super) fn permit_break(&self, was_useful: bool, now: Instant) -> Option<u64> {
        let mut state = self.state();
        if was_useful { state.breaks.permit(now) } else { state.log.permit(now) }
    }

    pub(super) fn disk_state(&self) -> DiskState {
        if self.is_lost() {
            return DiskState::Lost;
        }
        let (mut late, mut away, mut is_up) = (None, None, false);
        for (_, condition) in self.state().pipes.values() {
            is_up |= condition.serves();
            let (known, since) = match condition {
                Condition::Up(_) => continue,
                Condition::Late { since, .. } => (&mut late, *since),
                Condition::Away(since, _) => (&mut away, *since),
            };
            *known = Some(known.map_or(since, |other: Instant| other.min(since)));
        }
        // An IoThread without a connection uses those of others.
        match (late, away.filter(|_| !is_up)) {
            (_, Some(since)) => DiskState::Away(since),
            (Some(since), None) => DiskState::Late(since),
            (None, None) => DiskState::Ready,
        }
    }

    pub(super) fn remark(&self) -> String {
        let (mut connections, mut all_late, mut problem) = (0, 0, None);
        for (_, condition) in self.state().pipes.values() {
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
                format!("connections: {connections}{late}; not all IoThreads have one: {why}")
            }
            Some(why) => why,
            None => format!("connections: {connections}{late}"),
        }
    }

    /// A pipe has a connection, and no request that an answer could come to.
    pub(super) fn expects_nothing(&self, pipe: u64) {
        self.state().unheard.remove(&pipe);
    }

    /// What the log is to say about a server that does not answer, for all connections of all
    /// IoThreads together. It answers again when it has answered something to each pipe that was
    /// late: a connection that breaks leaves nothing that is late, and shows nothing. This pipe
    /// `has_answered` something since it looked last.
    pub(super) fn look_for_late(
        &self,
        pipe: u64,
        now: Instant,
        has_answered: bool,
    ) -> Option<Line> {
        let mut state = self.state();
        if has_answered {
            state.unheard.remove(&pipe);
        }
        let since = |(number, (_, condition)): (&u64, &(Remote, Condition))| match condition {
            Condition::Late { since, .. } => Some((*number, *since)),
            _ => None,
        };
        let late: Vec<(u64, Instant)> = state.pipes.iter().filter_map(since).collect();
        state.unheard.extend(late.iter().map(|(number, _)| *number));
        if late.is_empty() && !state.unheard.is_empty() {
            return None;
        }
        state.unanswered.look(now, late.iter().map(|(_, since)| *since).min())
    }
}
