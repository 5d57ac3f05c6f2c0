//! What is left of a guest's device when the daemon is killed: memory as it was at that moment, and
//! what the VMM keeps.

use std::os::fd::AsFd;

use blockio::engine::kernel::sim::is_readable;
use iomem::fits;

use super::Guest;
use crate::asked::Asked;
use crate::inflight::Region;

#[derive(Default)]
pub(super) struct Kept {
    region: Option<Region>,
    moment: Option<Moment>,
}

/// What the daemon has done by then.
struct Moment {
    memory: Vec<u8>,
    region: Vec<u8>,
    /// Queues whose guest was called.
    called: Vec<bool>,
}

impl Guest {
    /// The inflight region, if the VMM has one.
    pub(crate) fn region(&self) -> Option<Region> {
        self.state.borrow().kept.region.clone()
    }

    /// Requests of a queue that has stopped which it has left for whoever serves it next.
    pub(crate) fn left(&self, queue: usize) -> u16 {
        let marked = self.region().map_or(0, |region| region.marked(queue).len());
        fits(marked, "a number of marks")
    }

    /// A queue has stopped. The commands that it has left are carried out when it starts again.
    pub(crate) fn leave(&self, queue: usize) {
        let Some(region) = self.region() else { return };
        let now = self.world.tick();
        let state = self.state.borrow();
        let outstanding = &state.queues[queue].outstanding;
        for out in region.marked(queue).into_iter().filter_map(|head| outstanding[head].as_ref()) {
            if let Asked::Command(command) = &out.asked {
                self.trace(|| format!("queue {queue} leaves {}", out.asked));
                self.disks[command.unit].left(out.begin, now);
            }
        }
    }

    pub(crate) fn set_region(&self, region: Option<Region>) {
        self.state.borrow_mut().kept.region = region;
    }

    /// The inflight region, which is made if there is none.
    pub(crate) fn keep_region(&self) -> Region {
        let kept = &mut self.state.borrow_mut().kept;
        kept.region.get_or_insert_with(|| Region::new(&self.plan)).clone()
    }

    /// The daemon dies now: whatever it does from now on has not happened.
    pub(crate) fn remember(&self) {
        let state = &mut *self.state.borrow_mut();
        let is_called = |call: &_| is_readable(AsFd::as_fd(call));
        let called = state.queues.iter().map(|queue| queue.call.as_ref().is_some_and(is_called));
        let region = state.kept.region.as_ref().map(Region::content).unwrap_or_default();
        let memory = self.layout.content();
        state.kept.moment = Some(Moment { memory, region, called: called.collect() });
    }

    /// When the requests began that the device has not answered.
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

    /// Takes back what the dead daemon has done since.
    pub(crate) fn recall(&self) {
        let state = &mut *self.state.borrow_mut();
        let Some(Moment { memory, region, called }) = state.kept.moment.take() else { return };
        self.layout.set_content(&memory);
        if let Some(kept) = &state.kept.region {
            kept.set_content(&region);
        }
        let queues = state.queues.iter().zip(called).filter(|(_, was_called)| !was_called);
        for call in queues.filter_map(|(queue, _)| queue.call.as_ref()) {
            // Nothing is there to be read where it has called nobody.
            let _ = rustix::io::read(call, &mut [0; 8]);
        }
    }
}
