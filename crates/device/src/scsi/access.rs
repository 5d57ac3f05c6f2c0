//! What all units on one disk share, in whichever devices they are: its persistent reservations,
//! and commands that exclude all others.

use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use super::persist::{Attached, FileError, Nexus, PortInUse, PortName, Reservations};
use super::sense::Sense;
use super::task_set::Waiting;

/// A unit on the disk, as those in other devices reach it.
pub(crate) trait Peer: Send + Sync {
    /// The unit has been removed.
    fn is_gone(&self) -> bool;

    /// Has its initiator learn of something with its next command.
    fn add_attention(&self, sense: Sense);

    /// Aborts its tasks, except the one with this tag. They have ended when this is ready.
    fn abort(&self, except: Option<u64>) -> Option<Waiting>;

    /// Ready when its tasks have ended that have the medium, except the one with this tag.
    fn drain(&self, except: Option<u64>) -> Option<Waiting>;
}

/// What the units on one disk share. Whoever has several exports of a disk makes one for it.
pub struct DiskAccess {
    reservations: Arc<Reservations>,
    peers: Mutex<Vec<(Nexus, Arc<dyn Peer>)>>,
    /// A PERSISTENT RESERVE OUT is in progress.
    is_changing: AtomicBool,
    /// One command has the medium to itself.
    is_exclusive: AtomicBool,
    /// Those who wait for that to end.
    waiting: Mutex<Vec<Waker>>,
}

/// The file with the persistent reservations of a disk cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ReservationsError(#[from] FileError);

impl DiskAccess {
    /// Persistent reservations are lost when the process ends, and initiators cannot ask for more.
    #[must_use]
    pub fn volatile() -> Arc<Self> {
        Self::new(Reservations::volatile())
    }

    /// Persistent reservations are kept in the file at `path` where initiators ask for that
    /// (APTPL). There is none otherwise.
    ///
    /// # Errors
    ///
    /// When the file is there but cannot be read, or is broken. To go on without it would let hosts
    /// write that were fenced off.
    pub fn load(path: PathBuf) -> Result<Arc<Self>, ReservationsError> {
        Ok(Self::new(Reservations::load(path)?))
    }

    fn new(reservations: Arc<Reservations>) -> Arc<Self> {
        Arc::new(Self {
            reservations,
            peers: Mutex::default(),
            is_changing: AtomicBool::new(false),
            is_exclusive: AtomicBool::new(false),
            waiting: Mutex::default(),
        })
    }

    pub(crate) fn attach(&self, port: PortName) -> Result<Attached, PortInUse> {
        self.reservations.attach(port)
    }

    /// The unit of a nexus can be reached from now on.
    pub(crate) fn introduce(&self, nexus: Nexus, peer: Arc<dyn Peer>) {
        let mut peers = lock(&self.peers);
        peers.retain(|(_, peer)| !peer.is_gone());
        peers.push((nexus, peer));
    }

    /// The unit of a nexus, unless it has gone.
    pub(crate) fn peer(&self, nexus: Nexus) -> Option<Arc<dyn Peer>> {
        let peers = lock(&self.peers);
        peers.iter().find(|(other, _)| *other == nexus).map(|(_, peer)| Arc::clone(peer))
    }

    /// Admits one PERSISTENT RESERVE OUT at a time, until the result is dropped. Two that abort
    /// each other's tasks would wait for each other, and each takes a thread.
    pub(crate) fn begin_change(self: &Arc<Self>) -> Option<Change> {
        let is_first = !self.is_changing.swap(true, Ordering::Acquire);
        is_first.then(|| Change(Arc::clone(self)))
    }

    /// Whether commands on the medium wait.
    #[inline]
    pub(crate) fn is_exclusive(&self) -> bool {
        self.is_exclusive.load(Ordering::Relaxed)
    }

    /// Waits while a command has the medium to itself.
    pub(crate) async fn pass(&self) {
        poll_fn(|cx| {
            let mut waiting = lock(&self.waiting);
            if !self.is_exclusive() {
                return Poll::Ready(());
            }
            waiting.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Gives the command with this tag of a nexus the medium to itself: commands that begin wait,
    /// and those that have begun have ended when this returns.
    ///
    /// A thread that does not see the flag yet has its commands found by the look at its queues: it
    /// sees the flag after that, as it does with all that was written before a call to it.
    pub(crate) async fn exclude(self: &Arc<Self>, nexus: Nexus, tag: u64) -> Exclusive {
        poll_fn(|cx| {
            let mut waiting = lock(&self.waiting);
            if !self.is_exclusive.swap(true, Ordering::Relaxed) {
                return Poll::Ready(());
            }
            waiting.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        let exclusive = Exclusive(Arc::clone(self));
        let drain =
            |(other, peer): &(Nexus, Arc<dyn Peer>)| peer.drain((*other == nexus).then_some(tag));
        let all: Vec<Waiting> = lock(&self.peers).iter().filter_map(drain).collect();
        for peer in all {
            poll_fn(|cx| peer.poll(cx)).await;
        }
        exclusive
    }
}

/// The one PERSISTENT RESERVE OUT in progress.
pub(crate) struct Change(Arc<DiskAccess>);

impl Drop for Change {
    fn drop(&mut self) {
        self.0.is_changing.store(false, Ordering::Release);
    }
}

/// The medium belongs to one command, until this is dropped.
pub(crate) struct Exclusive(Arc<DiskAccess>);

impl Drop for Exclusive {
    fn drop(&mut self) {
        let mut waiting = lock(&self.0.waiting);
        self.0.is_exclusive.store(false, Ordering::Relaxed);
        waiting.drain(..).for_each(Waker::wake);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
