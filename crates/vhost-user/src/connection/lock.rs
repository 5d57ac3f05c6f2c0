//! Rings run only while the session has the right to write to its disks.

use std::sync::Arc;
use std::task::Poll;

use super::Connection;
use crate::ring::{RingState, keep_first};

impl Connection {
    /// Holds a ring back that must not start before the lock is taken. Returns false if the ring
    /// may start now.
    pub(super) fn hold_back(&mut self, ring: usize) -> bool {
        let has_memory = self.memory.map.num_regions() > 0;
        if self.setup.run_lock.is_none() || self.run_lock.is_held() {
            return false;
        }
        if !has_memory || !self.rings[ring].is_due() {
            // It does not start anyway.
            return false;
        }
        self.run_lock.hold_back(ring);
        true
    }

    /// Begins to release the lock if the front-end has stopped all rings.
    pub(super) fn release_when_stopped(&mut self) {
        let is_over = |ring: &RingState| !ring.settings.started && ring.is_stopped();
        if self.rings.iter().all(is_over) {
            self.run_lock.begin_release(&self.setup.examiner, &self.setup.waker);
        }
    }

    /// Returns true if another process that continues the session inherits the lock.
    pub(crate) fn passes_lock(&self) -> bool {
        self.run_lock.is_inheritable()
    }

    /// Notes that another process has held the lock for this session.
    pub(crate) fn inherit_lock(&mut self) {
        if let Some(lock) = &self.setup.run_lock {
            self.run_lock.inherit(lock);
        }
    }

    /// Continues to take or release the lock. Returns true while that is not done.
    pub(super) fn awaits_lock(&mut self) -> bool {
        let Some(lock) = self.setup.run_lock.as_ref().map(Arc::clone) else { return false };
        match self.run_lock.poll(&lock, &self.setup.examiner, &self.setup.waker) {
            Poll::Pending => return true,
            Poll::Ready(Ok(rings)) => rings.into_iter().for_each(|ring| self.start_ring(ring)),
            Poll::Ready(Err(error)) => keep_first(&mut self.failure, error),
        }
        false
    }
}
