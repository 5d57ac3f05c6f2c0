//! The events that an IoThread waits for: eventfds, timers, and the sources that it serves.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::Instant;

use iomem::fits;
use rustix::fd::{AsFd, OwnedFd};

use crate::clock::{self, LoopClock};
use crate::engine::Engine;
use crate::engine::kernel::Interest;
use crate::error::Error;
use crate::executor::mailbox::TaskKey;
use crate::executor::task::Owner;

/// A place in shared memory where a peer makes work appear, announced with an eventfd: a ring with
/// a kick, for example. The IoThread checks it once a turn, not for each request.
///
/// No method may wait, or call back into the IoThread except to read.
pub trait Source {
    /// Makes results visible to the peer, and calls it at most once. Called at the end of a turn,
    /// or of a round of several tasks.
    fn notify(&self);
    /// Asks the peer to write the eventfd from now on. Called before a sleep. `now` is not older
    /// than the end of the last turn's work.
    fn arm(&self, now: Instant) -> Armed;
    /// Allows the peer to leave the eventfd unwritten for now.
    fn disarm(&self);
    /// Returns true if there is work. Must be cheap: busy-polling calls it while the source is not
    /// armed.
    fn has_work(&self) -> bool;
    /// Notes that the eventfd was written, or that the socket has become ready.
    fn on_event(&self) {}
}

/// The result of arming a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Armed {
    /// The eventfd announces later work.
    Yes,
    /// Work is there already, which the eventfd might not announce.
    HasWork,
    /// The source takes no work for now, and has requested nothing of the peer. Another event wakes
    /// its task before it takes work again.
    Full,
}

/// The name of a source on its IoThread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceId(u32);

struct Entry {
    source: Rc<dyn Source>,
    kick: Option<(OwnedFd, Interest)>,
    task: TaskKey,
    armed: bool,
    to_notify: bool,
}

struct Timer {
    when: Instant,
    owner: Owner,
}

impl Ord for Timer {
    fn cmp(&self, other: &Self) -> Ordering {
        self.when.cmp(&other.when)
    }
}

impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.when == other.when
    }
}

impl Eq for Timer {}

#[derive(Default)]
pub(crate) struct Reactor {
    sources: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// Sources that are not armed. The loop arms them before it sleeps.
    disarmed: Vec<u32>,
    to_notify: Vec<u32>,
    timers: BinaryHeap<Reverse<Timer>>,
}

impl Reactor {
    /// Adds all watches to an engine that replaces the previous waiter.
    pub(crate) fn watch_all(&self, engine: &mut Engine) -> Result<(), Error> {
        for (token, entry) in (0..).zip(&self.sources) {
            if let Some((kick, interest)) = entry.as_ref().and_then(|entry| entry.kick.as_ref()) {
                let watched = engine.watch(kick.as_fd(), token, *interest);
                watched.map_err(Error::system("watch a kick eventfd"))?;
            }
        }
        Ok(())
    }

    /// Adds a source that starts disarmed. `kick` is never read: it is watched edge-triggered.
    pub(crate) fn add(
        &mut self,
        engine: &mut Engine,
        source: Rc<dyn Source>,
        kick: Option<(OwnedFd, Interest)>,
        task: TaskKey,
    ) -> Result<SourceId, Error> {
        let id = self.free.pop().unwrap_or_else(|| {
            self.sources.push(None);
            u32::try_from(self.sources.len() - 1).unwrap_or_else(|_| unreachable!("2^32 sources"))
        });
        if let Some((kick, interest)) = &kick
            && let Err(errno) = engine.watch(kick.as_fd(), u64::from(id), *interest)
        {
            self.free.push(id);
            return Err(Error::system("watch the kick eventfd of a queue")(errno));
        }
        let entry = Entry { source, kick, task, armed: false, to_notify: false };
        self.sources[id as usize] = Some(entry);
        self.disarmed.push(id);
        Ok(SourceId(id))
    }

    pub(crate) fn remove(&mut self, engine: &mut Engine, id: SourceId) {
        let Some(entry) = self.sources.get_mut(id.0 as usize).and_then(Option::take) else {
            return;
        };
        if let Some((kick, _)) = &entry.kick {
            engine.unwatch(kick.as_fd(), u64::from(id.0));
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

    /// Runs the notify phase. `polls`: the loop is going to poll sources, which covers only unarmed
    /// ones. So a source whose peer is about to react is disarmed.
    #[inline]
    pub(crate) fn notify(&mut self, polls: bool) {
        for id in self.to_notify.drain(..) {
            if let Some(Some(entry)) = self.sources.get_mut(id as usize) {
                entry.to_notify = false;
                entry.source.notify();
                if polls && entry.armed {
                    entry.armed = false;
                    entry.source.disarm();
                    self.disarmed.push(id);
                }
            }
        }
    }

    /// Returns true if only a check of the eventfds can find the work of some source.
    pub(crate) fn has_armed(&self) -> bool {
        self.sources.len() - self.free.len() > self.disarmed.len()
    }

    /// Calls `found` with the tasks of unarmed sources that have work.
    #[inline]
    pub(crate) fn poll_unarmed(&self, mut found: impl FnMut(TaskKey)) {
        for &id in &self.disarmed {
            if let Some(Some(entry)) = self.sources.get(id as usize)
                && entry.source.has_work()
            {
                found(entry.task);
            }
        }
    }

    /// Arms all unarmed sources. Appends the tasks of sources that have work already. `now`: the
    /// time, if it is known.
    pub(crate) fn arm(&mut self, mut now: Option<Instant>, woken: &mut Vec<TaskKey>) {
        let sources = &mut self.sources;
        self.disarmed.retain(|&id| {
            let Some(Some(entry)) = sources.get_mut(id as usize) else {
                return false;
            };
            let armed = entry.source.arm(*now.get_or_insert_with(clock::now));
            entry.armed = armed == Armed::Yes;
            if armed == Armed::HasWork {
                entry.source.disarm();
                woken.push(entry.task);
            }
            !entry.armed
        });
    }

    pub(crate) fn add_timer(&mut self, when: Instant, owner: Owner) {
        self.timers.push(Reverse(Timer { when, owner }));
    }

    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse(timer)| timer.when)
    }

    /// The number of timers.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn timers(&self) -> usize {
        self.timers.len()
    }

    /// Takes in events of the eventfds. Appends tasks to wake.
    pub(crate) fn dispatch(&mut self, events: &mut Vec<u64>, woken: &mut Vec<TaskKey>) {
        for token in events.drain(..) {
            // The loop checks for completions and posts in any case, so its own token needs nothing
            // more.
            let index: usize = fits(token, "a token");
            if let Some(Some(entry)) = self.sources.get_mut(index) {
                woken.push(entry.task);
                entry.source.on_event();
                if entry.armed {
                    entry.armed = false;
                    entry.source.disarm();
                    self.disarmed.extend(u32::try_from(token));
                }
            }
        }
    }

    /// Calls `expired` for the owners of due timers. Updates `loop_clock`, which may be old,
    /// because the woken futures compare their time with it.
    pub(crate) fn expire_timers(&mut self, loop_clock: &LoopClock, mut expired: impl FnMut(Owner)) {
        if self.timers.is_empty() {
            return;
        }
        let now = clock::now();
        while self.next_timer().is_some_and(|when| when <= now) {
            if let Some(Reverse(timer)) = self.timers.pop() {
                loop_clock.set(now);
                expired(timer.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use std::sync::Arc;

    use super::*;
    use crate::config::{EngineKind, IoThreadConfig};
    use crate::executor::mailbox::{Mailbox, NO_TASK};

    /// Counts the calls of its methods.
    #[derive(Default)]
    struct CallCounts {
        notified: Cell<u32>,
        disarmed: Cell<u32>,
        has_work: Cell<bool>,
    }

    impl Source for CallCounts {
        fn notify(&self) {
            self.notified.set(self.notified.get() + 1);
        }

        fn arm(&self, _: Instant) -> Armed {
            Armed::Yes
        }

        fn disarm(&self) {
            self.disarmed.set(self.disarmed.get() + 1);
        }

        fn has_work(&self) -> bool {
            self.has_work.get()
        }
    }

    /// A loop with armed sources looks at their eventfds before it sleeps.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_source_whose_kick_cannot_be_watched_leaves_nothing() {
        let config = IoThreadConfig { engine: EngineKind::Threads.into(), ..Default::default() };
        let flags = rustix::event::EventfdFlags::NONBLOCK;
        let kick = || rustix::event::eventfd(0, flags).unwrap();
        let mut engine = Engine::new(&config, &Arc::new(Mailbox::new(kick()))).unwrap();
        let mut reactor = Reactor::default();
        let mut add = |reactor: &mut Reactor, kick: OwnedFd| {
            let source = Rc::new(CallCounts::default());
            reactor.add(&mut engine, source, Some((kick, Interest::Readable)), NO_TASK)
        };
        // No regular file can be watched.
        let file = || tempfile::tempfile().unwrap().into();
        assert!((0..3).all(|_| add(&mut reactor, file()).is_err()));
        assert!(!reactor.has_armed());
        let ids = [(); 2].map(|()| add(&mut reactor, kick()).unwrap().0);
        assert_eq!((ids, reactor.sources.len()), ([0, 1], 2));
        assert!(!reactor.has_armed(), "a source starts disarmed");
        reactor.arm(None, &mut Vec::new());
        assert!(reactor.has_armed());
        ids.into_iter().for_each(|id| reactor.remove(&mut engine, SourceId(id)));
        assert!(!reactor.has_armed());
    }

    /// The peer of a notified source reacts soon. A loop that polls must see that, or it spins to
    /// the end of its window and then finds the eventfd.
    #[test]
    fn a_notified_source_is_looked_at_by_a_loop_that_polls() {
        for polls in [false, true] {
            let (notified, quiet) =
                (Rc::new(CallCounts::default()), Rc::new(CallCounts::default()));
            let mut reactor = Reactor::default();
            for source in [&notified, &quiet] {
                let source: Rc<dyn Source> = Rc::<CallCounts>::clone(source);
                let entry =
                    Entry { source, kick: None, task: NO_TASK, armed: false, to_notify: false };
                reactor.sources.push(Some(entry));
            }
            reactor.disarmed.extend([0, 1]);
            reactor.arm(None, &mut Vec::new());
            reactor.notify_at_end(SourceId(0));
            reactor.notify(polls);
            assert_eq!((notified.notified.get(), quiet.notified.get()), (1, 0));
            assert_eq!((notified.disarmed.get(), quiet.disarmed.get()), (u32::from(polls), 0));
            notified.has_work.set(true);
            quiet.has_work.set(true);
            let mut found = 0;
            reactor.poll_unarmed(|_| found += 1);
            assert_eq!(found, u32::from(polls));
        }
    }
}
