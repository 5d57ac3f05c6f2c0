//! Rings start: the control ring after the request rings.

use std::ops::Range;

use iomem::fits;

use super::Connection;
use crate::connection::SessionSetup;
use crate::outcome::{Outcome, Start, Work};
use crate::ring::{Surroundings, keep_first};

impl Connection {
    pub(super) fn start(&mut self, rings: Range<usize>, start: Start) -> Outcome {
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
}
