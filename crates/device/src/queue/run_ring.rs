//! The ring in a run: its beginning, and published answers. Each step looks at the layout of
//! the ring once.

use blockio::clock;
use virtqueue::{DeviceQueue, Virtqueue};

use super::Queue;
use crate::queue::batching::{Batching, QueueState, Run};

impl Queue {
    /// Plans the next run. Returns also the number of popped chains at which it ends.
    #[inline]
    pub(crate) fn begin_run(&self) -> (Run, u16) {
        let is_halted = self.is_halted();
        let batching = &mut *self.batching.borrow_mut();
        match &mut *self.ring.borrow_mut() {
            Virtqueue::Split(ring) => self.plan_run(ring, batching, is_halted),
            Virtqueue::Packed(ring) => self.plan_run(ring, batching, is_halted),
        }
    }

    #[inline(always)]
    fn plan_run(
        &self,
        ring: &mut impl DeviceQueue,
        batching: &mut Batching,
        is_halted: bool,
    ) -> (Run, u16) {
        // The first chain after a call must be seen as soon as it comes.
        let fresh = batching.awaits_driver();
        // A bad ring counts as one chain: the pop finds the fault.
        let available = if is_halted { 0 } else { ring.available(fresh).unwrap_or(1) };
        if available > 0 {
            // Completions alone do not end a pause of the driver.
            batching.note_work(clock::now);
        }
        let state =
            QueueState { available, in_device: ring.in_device(), next_chain: ring.next_chain() };
        if available > 0 {
            self.reports.requests.depth_peak.note(state.unanswered().into());
        }
        let run = batching.begin(state, || ring.driver_sleeps());
        (run, state.in_device.saturating_add(run.ops))
    }

    /// Publishes answers of the requests that have just run if the next submit may take long.
    #[inline]
    pub(crate) fn publish_before_run(&self) {
        if self.batching.borrow().completes_inline() {
            self.publish_early();
        }
    }

    /// Publishes answers. Calls the driver if it sleeps and the call is due; otherwise the end of
    /// the turn calls.
    pub(crate) fn publish_early(&self) {
        let batching = &mut *self.batching.borrow_mut();
        match &mut *self.ring.borrow_mut() {
            Virtqueue::Split(ring) => self.publish_run(ring, batching),
            Virtqueue::Packed(ring) => self.publish_run(ring, batching),
        }
    }

    #[inline(always)]
    fn publish_run(&self, ring: &mut impl DeviceQueue, batching: &mut Batching) {
        let count = ring.publish_quietly();
        if count == 0 {
            return;
        }
        self.reports.requests.harvest_batches.record(count.into());
        batching.answered(count);
        // A driver that was called is on its way. Without event idx it seems to sleep until it
        // arrives.
        let sleeps = !batching.awaits_driver() && ring.driver_sleeps();
        if !batching.adapt()
            || (sleeps && batching.is_call_due(ring.available_now() + ring.in_device()))
        {
            self.call_if_wanted(ring, batching);
        }
    }

    /// Publishes the answers of a turn, and calls the driver if it wants a call.
    #[inline]
    pub(super) fn publish_turn(&self) {
        let batching = &mut *self.batching.borrow_mut();
        match &mut *self.ring.borrow_mut() {
            Virtqueue::Split(ring) => self.publish_and_call(ring, batching),
            Virtqueue::Packed(ring) => self.publish_and_call(ring, batching),
        }
    }

    #[inline(always)]
    fn publish_and_call(&self, ring: &mut impl DeviceQueue, batching: &mut Batching) {
        let count = ring.publish_quietly();
        // Usually zero: the run has published its answers.
        if count > 0 {
            self.reports.requests.harvest_batches.record(count.into());
            batching.answered(count);
        }
        self.call_if_wanted(ring, batching);
    }

    /// Calls the driver if it wants a call for answers that were published.
    fn call_if_wanted(&self, ring: &mut impl DeviceQueue, batching: &mut Batching) {
        if !ring.needs_call() {
            self.reports.requests.calls_suppressed.add(1);
        } else if let Some(call) = &*self.eventfds.call.borrow() {
            probe::probe!(ringhaul, call, self.number(), self.reports.index);
            self.count_call(batching.since_call());
            let before = ring.available_now();
            batching.call_begins(before + ring.in_device(), ring.next_chain().wrapping_add(before));
            self.reports.stats.syscalls.eventfd_write.add(1);
            self.eventfds.caller.add_one(call);
            batching.call_ends(ring.next_chain().wrapping_add(ring.available_now()));
        }
    }
}
