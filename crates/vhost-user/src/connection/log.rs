//! The log of written pages: set, replaced, turned on and off while rings run.
//!
//! While there is no log, nothing is marked. A ring whose writes are to be logged does not run with
//! a log that lacks room for some of them.

use std::sync::Arc;

use virtqueue::{GuestMemory, QueueLog, RingLayout};

use super::Connection;
use crate::outcome::{Outcome, Refusal, Start};
use crate::ring::RingState;
use crate::shared_memory::WriteLog;

impl Connection {
    /// Replaces the log. The previous one is not touched after the answer.
    pub(super) fn set_log(&mut self, log: WriteLog) -> Result<Outcome, Refusal> {
        let end = log.log.end();
        check_end(end, "guest memory", self.memory.map.end())?;
        for (index, ring) in self.rings.iter().enumerate() {
            check_ring(end, index, ring, self.layout())?;
        }
        // The specification leaves the body open. Some front-ends want that of the message.
        let answer = log.area.encode();
        // The queues have the previous one until they have taken this one.
        self.log = Some(log);
        Ok(self.spread_log(Some(answer)))
    }

    /// Turns marks of all written pages on or off.
    pub(super) fn set_log_all(&mut self, on: bool) -> Result<Outcome, Refusal> {
        let before = std::mem::replace(&mut self.log_all, on);
        if let Err(refusal) = self.check_running() {
            self.log_all = before;
            return Err(refusal);
        }
        Ok(self.spread_log(None))
    }

    /// Sets the address of a used ring in the log, or turns marks of that ring off.
    pub(super) fn set_ring_log(
        &mut self,
        ring: usize,
        log: Option<u64>,
    ) -> Result<Outcome, Refusal> {
        let before = std::mem::replace(&mut self.rings[ring].settings.log, log);
        if let Err(refusal) = self.check_running() {
            self.rings[ring].settings.log = before;
            return Err(refusal);
        }
        Ok(self.spread_log(None))
    }

    /// Refuses guest memory for which the log of rings that run has no room.
    pub(super) fn check_log_of(&self, memory: &GuestMemory) -> Result<(), Refusal> {
        let is_whole =
            self.log_all || (0..self.rings.len()).any(|ring| self.marks_descriptors(ring));
        let log = self.log.as_ref().filter(|_| is_whole);
        match log.filter(|_| self.rings.iter().any(RingState::is_running)) {
            Some(log) => check_end(log.log.end(), "guest memory", memory.end()),
            None => Ok(()),
        }
    }

    /// Returns the reason that a ring cannot run because of its log.
    pub(super) fn log_fault(&self, ring: usize) -> Option<Refusal> {
        let end = self.log.as_ref()?.log.end();
        let of_data = match self.log_all || self.marks_descriptors(ring) {
            true => check_end(end, "guest memory", self.memory.map.end()),
            false => Ok(()),
        };
        of_data.and_then(|()| check_ring(end, ring, &self.rings[ring], self.layout())).err()
    }

    /// True if marks of a ring's used elements are those of its descriptors, which may be anywhere
    /// in guest memory.
    fn marks_descriptors(&self, ring: usize) -> bool {
        self.layout() == RingLayout::Packed && self.rings[ring].settings.log.is_some()
    }

    /// The log for the queue of a ring.
    pub(super) fn queue_log(&self, ring: usize) -> Option<QueueLog> {
        let (marks_data, used_ring) = (self.log_all, self.rings[ring].settings.log);
        let log = self.log.as_ref().filter(|_| marks_data || used_ring.is_some())?;
        Some(QueueLog { log: Arc::clone(&log.log), marks_data, used_ring })
    }

    fn check_running(&self) -> Result<(), Refusal> {
        let running = (0..self.rings.len()).filter(|&ring| self.rings[ring].is_running());
        running.filter_map(|ring| self.log_fault(ring)).next().map_or(Ok(()), Err)
    }

    /// Gives the present log to the queues that run, and starts rings that have waited for it.
    fn spread_log(&mut self, answer: Option<Vec<u8>>) -> Outcome {
        let rings = self.rings.iter().enumerate();
        let waker = &self.setup.waker;
        let all = rings.map(|(index, ring)| ring.begin_set_log(self.queue_log(index), waker));
        self.new_logs = all.flatten().collect();
        let start = Start { answer: Ok(answer), undo: None, unmapped: None, next: None };
        self.start(0..self.rings.len(), start)
    }

    /// Returns true while a queue may still use its previous log.
    pub(crate) fn awaits_logs(&mut self) -> bool {
        self.new_logs.retain(|is_set| is_set.check().is_pending());
        !self.new_logs.is_empty()
    }
}

fn check_ring(end: u64, index: usize, ring: &RingState, layout: RingLayout) -> Result<(), Refusal> {
    let Some(start) = ring.settings.log else { return Ok(()) };
    let used_end = start.saturating_add(ring.used_ring_bytes(layout));
    check_end(end, &format!("the used ring of queue {index}"), used_end)
}

fn check_end(end: u64, subject: &str, needed: u64) -> Result<(), Refusal> {
    if needed <= end {
        return Ok(());
    }
    Err(Refusal::needing_ack(format!(
        "the log of writes is too small: it ends at address {end:#x}, and {subject} at \
         {needed:#x}; the front-end must send a longer log first"
    )))
}
