//! Rings start: the control ring after the request rings, and each only while the session has the
//! right to write to its disks.

use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use iomem::fits;

use super::Connection;
use crate::connection::SessionSetup;
use crate::outcome::{Outcome, Start, Work};
use crate::ring::{RingState, Surroundings, keep_first};

impl Connection {
    /// Returns true if one of these rings starts next, as far as its settings demand.
    pub(crate) fn is_due(&self, rings: Range<usize>) -> bool {
        self.rings[rings].iter().any(RingState::is_due)
    }

    pub(crate) fn start(&mut self, rings: Range<usize>, start: Start) -> Outcome {
        self.release_when_stopped();
        let control = self.control_ring;
        rings.filter(|ring| Some(*ring) != control).for_each(|ring| self.start_ring(ring));
        self.control_is_due = true;
        Outcome::Later(Work::Start(start))
    }

    pub(super) fn start_ring(&mut self, ring: usize) {
        if self.log_fault(ring).is_some() {
            // The message for the log may still follow.
            return;
        }
        if self.hold_back(ring) {
            return;
        }
        if let Err(error) = self.make_own_region(ring) {
            return keep_first(&mut self.failure, error);
        }
        let log = self.queue_log(ring);
        let SessionSetup { device, threads, waker, .. } = &self.setup;
        let index = fits(ring, "the number of a queue");
        let thread = &threads[ring % threads.len()];
        let inflight = self.inflight.as_ref().map(|inflight| (&inflight.region, false));
        let own = self.own_region.as_ref().map(|inflight| (&inflight.region, true));
        let surroundings =
            Surroundings { memory: &self.memory.map, inflight: inflight.or(own), log };
        let ring = &mut self.rings[ring];
        if let Err(error) = ring.begin_start(index, device, surroundings, thread, waker) {
            keep_first(&mut self.failure, error);
        }
    }

    /// Begins to start the control ring, if there is one, once all other started rings run: task
    /// management concerns the tasks in them. A ring whose start has failed does not run.
    pub(super) fn start_control(&mut self) {
        let Some(control) = self.control_ring else { return };
        let mut others = self.rings.iter().enumerate().filter(|(ring, _)| *ring != control);
        if others.all(|(_, ring)| !ring.settings.started || ring.is_running()) {
            self.start_ring(control);
        }
    }

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
