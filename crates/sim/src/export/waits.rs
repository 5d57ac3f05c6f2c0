//! The time for which chains wait until an IoThread takes them.

use blockio::thread::{ROUND_BYTES_UNTIL_SERVED, ROUNDS_UNTIL_SERVED};

use super::{Export, QueueState};
use crate::failure::Failure;

/// An available chain that was not yet popped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WaitingChain {
    /// Its place, and the begin of its request: few places of a packed ring differ.
    chain: (u16, u64),
    /// When the chain was first seen: rounds of the IoThread, its time, and the time for which ops
    /// have held it up.
    since: (u64, u64, u64),
}

/// The progress of an IoThread after a turn.
pub(crate) struct ThreadProgress {
    pub(crate) rounds: u64,
    /// Excludes time that other threads took while this one was ready to run.
    pub(crate) time_ns: u64,
    /// Nanoseconds for which ops have held up the thread.
    pub(crate) held_ns: u64,
    /// The kernel has refused a submit in this turn.
    pub(crate) was_refused: bool,
}

impl Export {
    /// Checks after a turn of IoThread `thread` that no chain of a running queue has waited too
    /// long. Where io_uring watches the kicks, none shows while the kernel refuses its entries, so
    /// each refusal restarts the wait.
    pub(crate) fn check_waits(
        &mut self,
        thread: usize,
        progress: &ThreadProgress,
    ) -> Result<(), Failure> {
        let ThreadProgress { rounds, time_ns: now, held_ns, was_refused } = *progress;
        let held_ns_max = self.plan.held_ns_max(ROUND_BYTES_UNTIL_SERVED);
        let is_deaf = was_refused && self.plan.has_engine(2);
        for (queue, (place, waiting)) in self.places.iter_mut().enumerate() {
            let place = self.front_end.as_ref().map_or(*place, |f| f.place(queue));
            if place != thread {
                continue;
            }
            if let (1, QueueState::Running(Some(handle))) =
                (self.plan.scsi, &self.queue_states[queue])
            {
                self.guest.set_popped(queue, handle.next_avail());
            }
            let next_avail = match (&self.queue_states[queue], &self.front_end) {
                // The queue may have no room for chains.
                (QueueState::Running(Some(handle)), _) if handle.is_full() => None,
                (QueueState::Running(Some(handle)), _) => Some(handle.next_avail()),
                (QueueState::Running(None), Some(front_end)) => front_end.next_avail(queue),
                _ => None,
            };
            let Some(next_avail) = next_avail else {
                *waiting = None;
                continue;
            };
            // The queue may have been faster than the driver with its kick.
            let Some(begin) = self.guest.announced(queue, next_avail) else {
                *waiting = None;
                continue;
            };
            let chain = (next_avail, begin);
            let waits = waiting.filter(|w| w.chain == chain && !is_deaf);
            let since = (rounds, now, held_ns);
            let WaitingChain { since, .. } =
                *waiting.insert(waits.unwrap_or(WaitingChain { chain, since }));
            let (waited, time, held) = (rounds - since.0, now - since.1, held_ns - since.2);
            let is_late = waited > u64::from(ROUNDS_UNTIL_SERVED) || held > held_ns_max;
            if is_late && time >= self.plan.check_delay_ns() {
                let text = format!(
                    "invariant 14: device {}, queue {queue}: place {next_avail:#x} was left for \
                     {waited} rounds of IoThread {thread}, {time} ns, {held} ns of them in submits",
                    self.index
                );
                return Err(Failure::new("starved", text));
            }
        }
        Ok(())
    }
}
