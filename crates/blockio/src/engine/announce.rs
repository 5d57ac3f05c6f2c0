//! For which ops of Linux AIO the kernel announces the completion through the eventfd.
//!
//! The kernel writes the eventfd once for each op that asks for it. Where a device has completed
//! everything when the submit returns, the harvest right behind it finds all, and nobody needs
//! those writes. So after a row of such submits they are left out. If ops without
//! one are still in the kernel then, a timer makes the loop look, and announcements are back.

use std::time::{Duration, Instant};

/// This many submits in a row must complete at once before announcements are left out.
const ROW_MIN: u32 = 8;
/// Each time that this was wrong, the row must be twice as long, up to this.
const ROW_MAX: u32 = 1 << 20;
/// How soon the loop looks for completions that nobody announces; it doubles while there are none,
/// so an op takes twice its time at most.
const LOOK_MIN: Duration = Duration::from_micros(20);
const LOOK_MAX: Duration = Duration::from_millis(10);

/// The mark, in the token of an op, of one that is not announced.
pub(super) const UNANNOUNCED: u64 = 1 << 32;

pub(super) struct Announcements {
    row: u32,
    row_wanted: u32,
    /// Ops in the kernel that are not announced.
    missing: usize,
    look: Duration,
    look_at: Option<Instant>,
    /// Whether a submit came since the last harvest.
    submitted: bool,
    /// Off where no harvest follows a submit.
    may_be_left_out: bool,
}

impl Announcements {
    pub(super) fn new(harvest_on_submit: bool) -> Self {
        Self {
            row: 0,
            row_wanted: ROW_MIN,
            missing: 0,
            look: LOOK_MIN,
            look_at: None,
            submitted: false,
            may_be_left_out: harvest_on_submit,
        }
    }

    /// Whether the next submit goes without.
    #[inline]
    pub(super) fn are_left_out(&self) -> bool {
        self.may_be_left_out && self.row >= self.row_wanted
    }

    /// The kernel has taken `accepted` ops of a submit.
    #[inline]
    pub(super) fn submitted(&mut self, accepted: usize) {
        self.submitted = true;
        if self.are_left_out() {
            self.missing += accepted;
        }
    }

    /// The token of a completed op, without its mark.
    #[inline]
    pub(super) fn completed(&mut self, token: u64) -> u64 {
        if token & UNANNOUNCED != 0 {
            self.missing = self.missing.saturating_sub(1);
            self.look = LOOK_MIN;
        }
        token & !UNANNOUNCED
    }

    /// A harvest has left `in_kernel` ops in the kernel.
    #[inline]
    pub(super) fn harvested(&mut self, in_kernel: usize, now: Instant) {
        self.look_at = (self.missing > 0).then(|| now + self.look);
        if self.missing > 0 {
            self.look = (self.look * 2).min(LOOK_MAX);
        }
        if !std::mem::take(&mut self.submitted) {
            return;
        }
        if in_kernel == 0 {
            self.row = self.row.saturating_add(1);
            return;
        }
        if self.are_left_out() {
            self.row_wanted = (self.row_wanted * 2).min(ROW_MAX);
        }
        self.row = 0;
    }

    /// When to look for completions that nobody announces.
    #[inline]
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.look_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One submit of `ops` ops, of which `late` are not found by the harvest behind it.
    fn submit(announcements: &mut Announcements, ops: usize, late: usize, now: Instant) {
        let mark = if announcements.are_left_out() { UNANNOUNCED } else { 0 };
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
            assert!(!announcements.are_left_out());
            submit(&mut announcements, 16, 0, now);
        }
        assert!(announcements.are_left_out());
        submit(&mut announcements, 16, 2, now);
        assert!(!announcements.are_left_out());
        assert_eq!(announcements.look_at(), Some(now + LOOK_MIN));
        announcements.harvested(2, now);
        assert_eq!(announcements.look_at(), Some(now + 2 * LOOK_MIN));
        // They are found one by one; only then is there nothing to look for.
        for left in [1, 0] {
            announcements.completed(7 | UNANNOUNCED);
            announcements.harvested(left, now);
            assert_eq!(announcements.look_at().is_some(), left > 0);
        }
        for _ in 0..2 * ROW_MIN {
            assert!(!announcements.are_left_out(), "after half of the row that is wanted now");
            submit(&mut announcements, 16, 0, now);
        }
        assert!(announcements.are_left_out());
    }

    #[test]
    fn they_are_never_left_out_without_a_harvest_behind_the_submit() {
        let (mut announcements, now) = (Announcements::new(false), Instant::now());
        for _ in 0..4 * ROW_MIN {
            submit(&mut announcements, 1, 0, now);
            assert!(!announcements.are_left_out());
        }
    }
}
