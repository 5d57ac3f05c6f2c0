//! How rings stop: the one for control before the others.
//!
//! Task management waits for what is in the others, also for chains that nobody has popped yet. If
//! these rings stopped first, it would fail, and the driver would take harsher means.

use std::ops::Range;

use device::StopKind;

use super::Connection;
use crate::vhost_user::message::protocol_feature;
use crate::vhost_user::outcome::Change;
use crate::vhost_user::ring::{Progress, note};

impl Connection {
    /// What becomes of requests that wait when rings stop for a change.
    pub(super) fn stop_kind(&self, change: &Change) -> StopKind {
        let negotiated = self.protocol_features & protocol_feature::GET_VRING_BASE_INFLIGHT != 0;
        match change {
            // QEMU disables a ring before it asks where that is.
            Change::GetBase(_) | Change::Disable(_) if negotiated && self.inflight.is_some() => {
                StopKind::Leave
            }
            // They have their buffers in the memory before, and begin anew in the other.
            Change::Memory(_) if self.inflight.is_some() => StopKind::Leave,
            _ => StopKind::Final,
        }
    }

    /// Begins to stop these rings, the control ring first if it is among them.
    pub(super) fn begin_stop(&mut self, rings: Range<usize>, kind: StopKind) {
        self.to_stop = (rings, kind);
        self.continue_stop();
    }

    fn continue_stop(&mut self) {
        let (waker, (to_stop, kind)) = (&self.setup.waker, &self.to_stop);
        if let Some(control) = self.control_ring
            && to_stop.contains(&control)
            && !self.rings[control].is_stopped()
        {
            self.rings[control].begin_stop(*kind, waker);
            return;
        }
        self.stop_at_once();
    }

    /// Has no ring wait for the control ring that is to stop: the front-end is gone, and its guest
    /// may be served by another process.
    pub(in crate::vhost_user) fn stop_at_once(&mut self) {
        let waker = &self.setup.waker;
        for ring in std::mem::take(&mut self.to_stop.0) {
            self.rings[ring].begin_stop(self.to_stop.1, waker);
        }
    }

    /// Takes what IoThreads have answered. Whether one has yet to.
    pub(super) fn progress(&mut self) -> bool {
        loop {
            let is_busy = self.hear();
            if is_busy || self.to_stop.0.is_empty() {
                return is_busy;
            }
            self.continue_stop();
        }
    }

    fn hear(&mut self) -> bool {
        let mut is_busy = false;
        for ring in &mut self.rings {
            match ring.progress() {
                Progress::Settled => {}
                Progress::Busy => is_busy = true,
                Progress::Failed(error) => note(&mut self.failure, error),
            }
        }
        is_busy
    }

    /// Stops all rings for good, whatever they are at; all at once if the front-end is gone, since
    /// its guest may be served by another process then. True when that is done.
    pub(in crate::vhost_user) fn end(&mut self, is_gone: bool) -> bool {
        self.to_stop.0 = 0..0;
        if let Some(control) = self.control_ring
            && !is_gone
            && !self.end_ring(control)
        {
            return false;
        }
        let ended = (0..self.rings.len()).filter(|&ring| self.end_ring(ring));
        ended.count() == self.rings.len()
    }

    fn end_ring(&mut self, ring: usize) -> bool {
        let ring = &mut self.rings[ring];
        // One that was starting is stopped when it has.
        while {
            ring.begin_end(&self.setup.waker);
            !matches!(ring.progress(), Progress::Busy) && ring.is_running()
        } {}
        ring.is_stopped()
    }
}
