//! Decides which ops of Linux AIO announce their completion through the eventfd.
//!
//! The kernel writes the eventfd once for each op that asks for it. If a device completes all ops
//! within the submit, the harvest right behind it finds them, and the writes are wasted. After a
//! row of such submits they are left out. If a harvest then leaves unannounced ops in the kernel, a
//! timer makes the loop check the ring, and later ops are announced again.

use std::time::{Duration, Instant};

/// The number of submits in a row that must complete at once before announcements are left out.
const ROW_MIN: u32 = 8;
/// The longest row: each wrong guess doubles the row, up to this.
const ROW_MAX: u32 = 1 << 20;
/// The first delay before the loop checks for unannounced completions. It doubles while there are
/// none, so an op takes at most twice its time.
const CHECK_DELAY_MIN: Duration = Duration::from_micros(20);
const CHECK_DELAY_MAX: Duration = Duration::from_millis(10);

/// The mark in the token of an op that is not announced.
pub(super) const UNANNOUNCED: u64 = 1 << 32;

pub(super) struct Announcements {
    row: u32,
    row_wanted: u32,
    /// Ops in the kernel that are not announced.
    missing: usize,
    check_delay: Duration,
    check_at: Option<Instant>,
    /// True if a submit came since the last harvest.
    submitted: bool,
    /// False if no harvest follows a submit.
    may_be_off: bool,
}

impl Announcements {
    pub(super) fn new(harvest_on_submit: bool) -> Self {
        Self {
            row: 0,
            row_wanted: ROW_MIN,
            missing: 0,
            check_delay: CHECK_DELAY_MIN,
            check_at: None,
            submitted: false,
            may_be_off: harvest_on_submit,
        }
    }

    /// Returns true if the next submit leaves announcements out.
    #[inline]
    pub(super) fn are_off(&self) -> bool {
        self.may_be_off && self.row >= self.row_wanted
    }

    /// Records that the kernel has taken `accepted` ops of a submit.
    #[inline]
    pub(super) fn submitted(&mut self, accepted: usize) {
        self.submitted = true;
        if self.are_off() {
            self.missing += accepted;
        }
    }

    /// Counts a completed op. Returns its token without the mark.
    #[inline]
    pub(super) fn completed(&mut self, token: u64) -> u64 {
        if token & UNANNOUNCED != 0 {
            self.missing = self.missing.saturating_sub(1);
            self.check_delay = CHECK_DELAY_MIN;
        }
        token & !UNANNOUNCED
    }

    /// Records that a harvest has left `in_kernel` ops in the kernel.
    #[inline]
    pub(super) fn harvested(&mut self, in_kernel: usize, now: Instant) {
        self.check_at = (self.missing > 0).then(|| now + self.check_delay);
        if self.missing > 0 {
            self.check_delay = (self.check_delay * 2).min(CHECK_DELAY_MAX);
        }
        if !std::mem::take(&mut self.submitted) {
            return;
        }
        if in_kernel == 0 {
            self.row = self.row.saturating_add(1);
            return;
        }
        if self.are_off() {
            self.row_wanted = (self.row_wanted * 2).min(ROW_MAX);
        }
        self.row = 0;
    }

    /// The time to check for unannounced completions.
    #[inline]
    pub(super) fn check_at(&self) -> Option<Instant> {
        self.check_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes one submit of `ops` ops, of which the harvest behind it misses `late`.
    fn submit(announcements: &mut Announcements, ops: usize, late: usize, now: Instant) {
        let mark = if announcements.are_off() { UNANNOUNCED } else { 0 };
        announcements.submitted(ops);
        for slot in 0..ops - late {
            assert_eq!(announcements.completed(slot as u64 | mark), slot as u64);
        }
        announcements.harvested(late, now);
    }

    #[test]
    fn they_are_left_out_after_a_row_and_come_back() {
        let (mut announcements, now) = (Announcements::new(true), Instant::now());
        for _ in 0..ROW_MIN {
            assert!(!announcements.are_off());
            submit(&mut announcements, 16, 0, now);
        }
        assert!(announcements.are_off());
        submit(&mut announcements, 16, 2, now);
        assert!(!announcements.are_off());
        assert_eq!(announcements.check_at(), Some(now + CHECK_DELAY_MIN));
        announcements.harvested(2, now);
        assert_eq!(announcements.check_at(), Some(now + 2 * CHECK_DELAY_MIN));
        // Completions are found one by one. The timer stays until the last one.
        for left in [1, 0] {
            announcements.completed(7 | UNANNOUNCED);
            announcements.harvested(left, now);
            assert_eq!(announcements.check_at().is_some(), left > 0);
        }
        for _ in 0..2 * ROW_MIN {
            assert!(!announcements.are_off(), "after half of the row that is wanted now");
            submit(&mut announcements, 16, 0, now);
        }
        assert!(announcements.are_off());
    }

    #[test]
    fn they_are_never_left_out_without_a_harvest_behind_the_submit() {
        let (mut announcements, now) = (Announcements::new(false), Instant::now());
        for _ in 0..4 * ROW_MIN {
            submit(&mut announcements, 1, 0, now);
            assert!(!announcements.are_off());
        }
    }
}
