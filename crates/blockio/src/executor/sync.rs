//! The synchronization types of shared state: the standard library's, or a model checker's.
//!
//! With `--cfg loom` or `--cfg shuttle` the locks and atomics are that checker's, and an
//! [`Eventfd`] is one that it understands. A [`Lock`] is always the standard library's, so code of
//! a model uses none. `model_tests.rs` has the models; CONTRIBUTING.md has the command that runs
//! them.

#[cfg(loom)]
use loom as base;
#[cfg(shuttle)]
use shuttle as base;
#[cfg(not(any(loom, shuttle)))]
use std as base;

pub(crate) use base::sync::{Condvar, Mutex, MutexGuard, atomic};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

/// A mutex that stays usable after a panic of its holder: its value is valid between any two steps.
#[derive(Debug, Default)]
pub struct Lock<T>(std::sync::Mutex<T>);

impl<T> Lock<T> {
    /// Makes a lock around `value`.
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// Waits for the value, which is free again when the result is dropped.
    pub fn lock(&self) -> std::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Waits at `changed`, which belongs to this lock, until `condition` of the value is false.
    pub fn wait_while(
        &self,
        changed: &std::sync::Condvar,
        condition: impl FnMut(&mut T) -> bool,
    ) -> std::sync::MutexGuard<'_, T> {
        let value = changed.wait_while(self.lock(), condition);
        value.unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Like [`wait_while`](Self::wait_while), for `time` at most: then `condition` may still be
    /// true.
    pub fn wait_timeout_while(
        &self,
        changed: &std::sync::Condvar,
        time: std::time::Duration,
        condition: impl FnMut(&mut T) -> bool,
    ) -> std::sync::MutexGuard<'_, T> {
        let value = changed.wait_timeout_while(self.lock(), time, condition);
        value.unwrap_or_else(std::sync::PoisonError::into_inner).0
    }
}

/// An eventfd with which other threads wake an IoThread.
pub(crate) struct Eventfd {
    fd: OwnedFd,
    #[cfg(any(loom, shuttle))]
    edge: Edge,
}

impl Eventfd {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            #[cfg(any(loom, shuttle))]
            edge: Edge::default(),
        }
    }

    /// Wakes the waiting IoThread.
    #[cfg(not(any(loom, shuttle)))]
    pub(crate) fn add_one(&self) {
        // The counter cannot overflow, as each write adds one, and no other error is possible on an
        // open eventfd.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    #[cfg(any(loom, shuttle))]
    pub(crate) fn add_one(&self) {
        self.edge.raise();
    }

    /// The number of writes.
    #[cfg(all(test, any(loom, shuttle)))]
    pub(crate) fn writes(&self) -> usize {
        self.edge.written().1
    }

    /// Models the wait in the kernel.
    #[cfg(all(test, any(loom, shuttle)))]
    pub(crate) fn wait(&self) {
        self.edge.wait();
    }
}

impl AsFd for Eventfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An eventfd that is watched edge-triggered and never read: a wait takes all writes before it.
#[cfg(any(loom, shuttle))]
#[derive(Default)]
struct Edge {
    /// True if it was written since the last wait, and the number of all writes.
    written: Mutex<(bool, usize)>,
    changed: Condvar,
}

#[cfg(any(loom, shuttle))]
impl Edge {
    fn written(&self) -> MutexGuard<'_, (bool, usize)> {
        self.written.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn raise(&self) {
        let mut written = self.written();
        *written = (true, written.1 + 1);
        drop(written);
        self.changed.notify_one();
    }

    #[cfg(test)]
    fn wait(&self) {
        let mut written = self.written();
        while !written.0 {
            written = self.changed.wait(written).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        written.0 = false;
    }
}
