//! Rings that stop only to be started again, here or in another process.

use std::io;
use std::task::Poll;

use device::StopKind;

use super::Connection;
use crate::ring::RingState;

impl Connection {
    /// Begins to stop all rings, to be started again. Waiting requests are left in the inflight
    /// region. Without a region, rings stop only after these requests are done.
    pub(crate) fn begin_pause(&mut self) {
        let kind = if self.keeps_inflight() { StopKind::KeepInflight } else { StopKind::Pause };
        self.rings.iter_mut().for_each(RingState::set_paused);
        self.begin_stop(0..self.rings.len(), kind);
    }

    /// Returns true if waiting requests do not delay a pause.
    pub(crate) fn keeps_inflight(&self) -> bool {
        self.inflight.is_some()
    }

    /// Lets all rings resume that have not stopped, so that a request that hangs does not block the
    /// resume.
    pub(crate) fn begin_resume(&mut self) {
        self.to_stop.0 = 0..0;
        self.rings.iter_mut().for_each(|ring| ring.begin_resume(&self.setup.waker));
    }

    /// Continues to start the paused rings that should run. Returns like [`settle`](Self::settle).
    pub(crate) fn resume(&mut self) -> Poll<io::Result<()>> {
        loop {
            let is_busy = self.progress();
            // A ring that has just settled may be the last that the control ring waits for. So the
            // check is repeated until no ring is due.
            let has_started = self.start_paused();
            if is_busy {
                return Poll::Pending;
            }
            if !has_started {
                return Poll::Ready(self.failure.take().map_or(Ok(()), Err));
            }
        }
    }

    /// Begins to start the rings that are due. Returns true if any was.
    fn start_paused(&mut self) -> bool {
        let mut has_started = false;
        let control = self.control_ring;
        for ring in (0..self.rings.len()).filter(|ring| Some(*ring) != control) {
            if self.rings[ring].take_paused() {
                self.start_ring(ring);
                has_started = true;
            }
        }
        if let Some(control) = control {
            let mut others = self.rings.iter().enumerate().filter(|(ring, _)| *ring != control);
            if !others.any(|(_, ring)| ring.should_resume()) && self.rings[control].take_paused() {
                self.start_ring(control);
                has_started = true;
            }
        }
        has_started
    }
}
