//! The end of a connection, and the order in which rings stop: the control ring before the request
//! rings.
//!
//! Task management waits for the requests in the request rings, also for chains that are not popped
//! yet. If these rings stopped first, it would fail, and the driver would escalate.

use std::ops::Range;
use std::sync::Arc;

use device::{StopKind, oneshot};
use iomem::fits;

use super::Connection;
use crate::call::CallRelay;
use crate::message::protocol_feature;
use crate::outcome::{AtStop, Change, Outcome, Refusal, Release, Start};
use crate::peer_fds::PeerFd;
use crate::ring::{RingProgress, keep_first};
use crate::shared_memory::SharedMemory;

impl Connection {
    /// The handling of waiting requests when rings stop for a change.
    pub(super) fn stop_kind(&self, change: &Change) -> StopKind {
        let negotiated = self.protocol_features & protocol_feature::GET_VRING_BASE_INFLIGHT != 0;
        match change {
            // QEMU disables a ring before it asks for its base, so a ring that is disabled leaves
            // its waiting requests in either case.
            Change::GetBase(_, AtStop::Leave) | Change::Disable(_)
                if negotiated && self.inflight.is_some() =>
            {
                StopKind::KeepInflight
            }
            // Waiting requests have their buffers in the previous memory. They begin again in the
            // new one.
            Change::Memory(_) if self.inflight.is_some() => StopKind::KeepInflight,
            _ => StopKind::Final,
        }
    }

    /// Begins to stop a ring for GET_VRING_BASE. A front-end that can ask for a ring with waiting
    /// requests by GET_VRING_BASE_SKIP_DRAIN wants all requests answered here. If they were left
    /// when the ring was disabled, it runs once more to answer them.
    pub(super) fn get_base(&mut self, ring: usize) -> Outcome {
        let skips = protocol_feature::GET_VRING_BASE_SKIP_DRAIN;
        if self.protocol_features & skips == 0 {
            return self.begin(Change::GetBase(ring, AtStop::Leave));
        }
        let change = Change::GetBase(ring, AtStop::Finish);
        if !self.rings[ring].begin_finish() {
            return self.begin(change);
        }
        let next = Some(Box::new(change));
        self.start(ring..ring + 1, Start { answer: Ok(None), undo: None, unmapped: None, next })
    }

    /// Stops a ring for good that does not run, and returns the answer to GET_VRING_BASE.
    pub(super) fn take_base(&mut self, index: usize) -> Result<Vec<u8>, Refusal> {
        let ring = &mut self.rings[index];
        if ring.end_finish() {
            return Err(Refusal::needing_ack(format!(
                "queue {index} has left requests in the inflight region, and cannot run to answer \
                 them for GET_VRING_BASE"
            )));
        }
        ring.set_stopped();
        let state = [fits(index, "the number of a queue"), ring.base];
        Ok(state.map(u32::to_ne_bytes).concat())
    }

    /// Begins to stop these rings, the control ring first if it is one of them.
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
        self.stop_remaining();
    }

    /// Stops the remaining rings without waiting for the control ring: the front-end is gone, and
    /// another process may serve its guest.
    pub(crate) fn stop_remaining(&mut self) {
        let waker = &self.setup.waker;
        for ring in std::mem::take(&mut self.to_stop.0) {
            self.rings[ring].begin_stop(self.to_stop.1, waker);
        }
    }

    /// Takes the answers of IoThreads. Returns true while one is missing.
    pub(super) fn progress(&mut self) -> bool {
        loop {
            let is_busy = self.poll_rings();
            if is_busy || self.to_stop.0.is_empty() {
                return is_busy;
            }
            self.continue_stop();
        }
    }

    fn poll_rings(&mut self) -> bool {
        let mut is_busy = self.awaits_logs() | self.awaits_lock();
        for ring in &mut self.rings {
            match ring.progress() {
                RingProgress::Settled => {}
                RingProgress::Busy => is_busy = true,
                RingProgress::Failed(error) => keep_first(&mut self.failure, error),
            }
        }
        is_busy
    }

    /// Stops all rings for good, in any state. If the front-end is gone, all stop at once, because
    /// another process may serve its guest. Returns true when all have stopped.
    pub(crate) fn stop_for_good(&mut self, is_gone: bool) -> bool {
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
        // A ring that was starting is stopped when it has started.
        while {
            ring.begin_end(&self.setup.waker);
            !matches!(ring.progress(), RingProgress::Busy) && ring.is_running()
        } {}
        ring.is_stopped()
    }

    /// Drops everything that the front-end has brought and its driver has negotiated. The result
    /// is pending until its memory is unmapped and its lock is released.
    pub(crate) fn release(&mut self) -> Release {
        // The front-end may give the region to its next session.
        self.forget_stale_accounts();
        let memory = std::mem::replace(&mut self.memory, SharedMemory::empty());
        let lock = std::mem::take(&mut self.run_lock);
        let unlocked = lock.end(&self.setup.examiner, &self.setup.waker);
        self.rings.clear();
        self.relay = CallRelay::default();
        (self.inflight, self.own_region, self.log) = (None, None, None);
        if let Some(channel) = self.backend_channel.take() {
            drop(PeerFd::new(channel, Arc::clone(&self.setup.examiner)));
        }
        self.setup.device.reset();
        Release { unmapped: self.unmap(memory), unlocked }
    }

    pub(super) fn unmap(&self, memory: SharedMemory) -> Option<oneshot::Receiver<()>> {
        let unmapped = self.setup.examiner.unmap(memory.map);
        unmapped.inspect(|unmapped| unmapped.wake(&self.setup.waker))
    }
}
