//! State of a guest's device that survives the kill of a daemon: memory at that moment, and the
//! VMM's own state.

use std::os::fd::AsFd;

use blockio::engine::kernel::sim::is_readable;

use super::Guest;
use crate::chain_request::ChainRequest;
use crate::inflight::Region;

#[derive(Default)]
pub(super) struct Survivors {
    region: Option<Region>,
    snapshot: Option<Snapshot>,
}

/// Effects of the daemon up to its death.
struct Snapshot {
    memory: Vec<u8>,
    region: Vec<u8>,
    /// True for queues with a call to the guest.
    called: Vec<bool>,
}

impl Guest {
    /// The inflight region, if the VMM has one.
    pub(crate) fn region(&self) -> Option<Region> {
        self.state.borrow().survivors.region.clone()
    }

    /// The heads of requests that a stopped queue has left in the region, for its next start.
    pub(crate) fn marked(&self, queue: usize) -> Vec<usize> {
        self.region().map_or(Vec::new(), |region| region.marked(queue))
    }

    /// Notes that a queue has stopped. The commands that it has left are carried out when it starts
    /// again.
    pub(crate) fn note_marked(&self, queue: usize) {
        let Some(region) = self.region() else { return };
        let now = self.world.tick();
        let state = self.state.borrow();
        let outstanding = &state.queues[queue].outstanding;
        for out in region.marked(queue).into_iter().filter_map(|head| outstanding[head].as_ref()) {
            if let ChainRequest::Command(command) = &out.request {
                self.trace(|| format!("queue {queue} leaves {}", out.request));
                self.disks[command.unit].note_marked(out.begin, now);
            }
        }
    }

    pub(crate) fn set_region(&self, region: Option<Region>) {
        self.state.borrow_mut().survivors.region = region;
    }

    /// The inflight region, created on first use.
    pub(crate) fn keep_region(&self) -> Region {
        let survivors = &mut self.state.borrow_mut().survivors;
        survivors.region.get_or_insert_with(|| Region::new(&self.plan)).clone()
    }

    /// Saves the present state, because the daemon dies now: its later actions must have no effect.
    pub(crate) fn take_snapshot(&self) {
        let state = &mut *self.state.borrow_mut();
        let is_called = |call: &_| is_readable(AsFd::as_fd(call));
        let called = state.queues.iter().map(|queue| queue.call.as_ref().is_some_and(is_called));
        let region = state.survivors.region.as_ref().map(Region::content).unwrap_or_default();
        let memory = self.layout.content();
        state.survivors.snapshot = Some(Snapshot { memory, region, called: called.collect() });
    }

    /// The times at which the unanswered requests began.
    pub(crate) fn unanswered(&self) -> Vec<u64> {
        let state = self.state.borrow();
        let mut begins = Vec::new();
        for queue in &state.queues {
            let out = queue.outstanding.iter().enumerate();
            let out = out.filter_map(|(head, outstanding)| Some((head, outstanding.as_ref()?)));
            let out = out.filter(|(head, _)| !queue.is_answered(*head));
            begins.extend(out.map(|(_, outstanding)| outstanding.begin));
        }
        begins
    }

    /// Undoes the actions of the daemon since its death.
    pub(crate) fn restore_snapshot(&self) {
        let state = &mut *self.state.borrow_mut();
        let Some(Snapshot { memory, region, called }) = state.survivors.snapshot.take() else {
            return;
        };
        self.layout.set_content(&memory);
        if let Some(shared) = &state.survivors.region {
            shared.set_content(&region);
        }
        let queues = state.queues.iter().zip(called).filter(|(_, was_called)| !was_called);
        for call in queues.filter_map(|(queue, _)| queue.call.as_ref()) {
            // The read finds nothing if the daemon has not called since.
            let _ = rustix::io::read(call, &mut [0; 8]);
        }
    }
}
