//! Steps of the guest's CPUs beside the steps that a run chooses.

use super::{Attention, Guest};

impl Guest {
    /// Runs a CPU of the guest that only keeps the first queue full.
    pub(crate) fn rush(&self) {
        let Ok(mut state) = self.state.try_borrow_mut() else { return };
        let state = &mut *state;
        if state.rush_left == 0 || state.queues.is_empty() || self.is_paused.get() {
            return;
        }
        while state.queues[0].driver.has_used() && state.failure.is_none() {
            self.take_answer(state, 0);
        }
        if state.queues[0].published_from.is_none() {
            let left = std::mem::replace(&mut state.requests_left, state.rush_left);
            self.submit(state, 0);
            state.rush_left = std::mem::replace(&mut state.requests_left, left);
        }
        self.decide_kick(state, 0);
        state.queues[0].attention = Attention::Awake;
    }

    /// Ends the extra requests of the first queue.
    pub(crate) fn end_rush(&self) {
        self.state.borrow_mut().rush_left = 0;
    }

    /// Takes a step of the guest's CPU between two stores of the device.
    pub(crate) fn may_act(&self) {
        let acts = self.store_rng.borrow_mut().chance(self.plan.preempt);
        if acts {
            self.act();
        }
    }
}
