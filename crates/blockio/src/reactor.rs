//! What an IoThread waits for: eventfds, timers, and the sources that it serves.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;

use crate::error::Error;
use crate::stats::Stats;
use crate::task::TaskKey;

/// Something that makes work appear in shared memory and announces it with an eventfd: a ring with
/// a kick, say. The IoThread asks it once a run, not for each request.
///
/// No method may wait, or call back into the IoThread except to read.
pub trait Source {
    /// End of a run: makes results visible to the other side, and tells it at most once.
    fn notify(&self);
    /// Before sleep: asks the other side to write the eventfd from now on. True if work is already
    /// there, which the eventfd might not announce.
    fn arm(&self) -> bool;
    /// Says that writes to the eventfd are not needed for now.
    fn disarm(&self);
    /// A cheap look for work, for busy-polling while the source is not armed.
    fn has_work(&self) -> bool;
}

/// Names a source of an IoThread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceId(u32);

struct Entry {
    source: Rc<dyn Source>,
    kick: Option<OwnedFd>,
    task: TaskKey,
    armed: bool,
    to_notify: bool,
}

const TOKEN_ENGINE: u64 = u64::MAX;
const TOKEN_FOREIGN: u64 = u64::MAX - 1;
/// Events taken by one epoll_wait.
const EVENTS_MAX: usize = 64;

pub(crate) struct Reactor {
    epoll: Rc<OwnedFd>,
    events: Vec<Event>,
    sources: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// Sources that are not armed: they are, before the loop sleeps.
    disarmed: Vec<u32>,
    to_notify: Vec<u32>,
    timers: BinaryHeap<Reverse<(Instant, u32, u32)>>,
}

impl Reactor {
    pub(crate) fn new(engine: BorrowedFd<'_>, foreign: BorrowedFd<'_>) -> Result<Self, Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)
            .map_err(Error::system("create an epoll instance"))?;
        for (fd, token) in [(engine, TOKEN_ENGINE), (foreign, TOKEN_FOREIGN)] {
            watch(&epoll, fd, token).map_err(Error::system("watch an eventfd"))?;
        }
        Ok(Self {
            epoll: Rc::new(epoll),
            events: Vec::with_capacity(EVENTS_MAX),
            sources: Vec::new(),
            free: Vec::new(),
            disarmed: Vec::new(),
            to_notify: Vec::new(),
            timers: BinaryHeap::new(),
        })
    }

    pub(crate) fn epoll(&self) -> Rc<OwnedFd> {
        Rc::clone(&self.epoll)
    }

    /// Adds a source that starts disarmed. `kick` is never read: it is watched edge-triggered.
    pub(crate) fn add(
        &mut self,
        source: Rc<dyn Source>,
        kick: Option<OwnedFd>,
        task: TaskKey,
    ) -> Result<SourceId, Error> {
        let id = self.free.pop().unwrap_or_else(|| {
            self.sources.push(None);
            u32::try_from(self.sources.len() - 1).unwrap_or_else(|_| unreachable!("2^32 sources"))
        });
        if let Some(kick) = &kick
            && let Err(errno) = watch(&self.epoll, kick.as_fd(), u64::from(id))
        {
            self.free.push(id);
            return Err(Error::system("watch the kick eventfd of a queue")(errno));
        }
        let entry = Entry { source, kick, task, armed: false, to_notify: false };
        self.sources[id as usize] = Some(entry);
        self.disarmed.push(id);
        Ok(SourceId(id))
    }

    pub(crate) fn remove(&mut self, id: SourceId) {
        let Some(entry) = self.sources.get_mut(id.0 as usize).and_then(Option::take) else {
            return;
        };
        if let Some(kick) = &entry.kick {
            // Explicitly: the peer may hold another descriptor of the same eventfd, and then
            // closing ours would not end the watch.
            let _ = epoll::delete(&*self.epoll, kick);
        }
        self.disarmed.retain(|&other| other != id.0);
        self.to_notify.retain(|&other| other != id.0);
        self.free.push(id.0);
    }

    #[inline]
    pub(crate) fn notify_at_end(&mut self, id: SourceId) {
        if let Some(Some(entry)) = self.sources.get_mut(id.0 as usize)
            && !entry.to_notify
        {
            entry.to_notify = true;
            self.to_notify.push(id.0);
        }
    }

    /// The notify phase.
    pub(crate) fn notify(&mut self) {
        for id in self.to_notify.drain(..) {
            if let Some(Some(entry)) = self.sources.get_mut(id as usize) {
                entry.to_notify = false;
                entry.source.notify();
            }
        }
    }

    /// Whether only a look at the eventfds can tell that a source has work.
    pub(crate) fn has_armed(&self) -> bool {
        self.sources.len() - self.free.len() > self.disarmed.len()
    }

    /// Appends the tasks of sources that have work and are not armed.
    pub(crate) fn look(&self, woken: &mut Vec<TaskKey>) {
        for &id in &self.disarmed {
            if let Some(Some(entry)) = self.sources.get(id as usize)
                && entry.source.has_work()
            {
                woken.push(entry.task);
            }
        }
    }

    /// Arms all sources that are not. Appends the tasks of those that have work already.
    pub(crate) fn arm(&mut self, woken: &mut Vec<TaskKey>) {
        let sources = &mut self.sources;
        self.disarmed.retain(|&id| {
            let Some(Some(entry)) = sources.get_mut(id as usize) else {
                return false;
            };
            if entry.source.arm() {
                entry.source.disarm();
                woken.push(entry.task);
                return true;
            }
            entry.armed = true;
            false
        });
    }

    pub(crate) fn add_timer(&mut self, when: Instant, key: TaskKey) {
        self.timers.push(Reverse((when, key.task, key.child)));
    }

    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((when, ..))| *when)
    }

    /// Waits for events until `deadline` (`None`: for ever). Appends tasks to wake.
    pub(crate) fn wait(
        &mut self,
        deadline: Option<Instant>,
        woken: &mut Vec<TaskKey>,
        stats: &Stats,
    ) -> Result<(), Error> {
        let timeout = deadline.map(|when| {
            let left = when.saturating_duration_since(Instant::now());
            Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
        });
        stats.syscalls.epoll_wait.add(1);
        match epoll::wait(&*self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::system("wait for events")(errno)),
        }
        for event in self.events.drain(..) {
            match event.data.u64() {
                // Taking the event has cleared it. The loop looks for completions and for what
                // was posted in any case.
                TOKEN_ENGINE | TOKEN_FOREIGN => {}
                token => {
                    let index = usize::try_from(token).unwrap_or(usize::MAX);
                    if let Some(Some(entry)) = self.sources.get_mut(index) {
                        woken.push(entry.task);
                        if entry.armed {
                            entry.armed = false;
                            entry.source.disarm();
                            self.disarmed.extend(u32::try_from(token));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Appends the tasks whose timers are due.
    pub(crate) fn expire_timers(&mut self, woken: &mut Vec<TaskKey>) {
        if self.timers.is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some(Reverse((when, task, child))) = self.timers.peek().copied()
            && when <= now
        {
            self.timers.pop();
            woken.push(TaskKey { task, child });
        }
    }
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, token: u64) -> Result<(), Errno> {
    epoll::add(epoll, fd, EventData::new_u64(token), EventFlags::IN | EventFlags::ET)
}
