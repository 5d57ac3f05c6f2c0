//! The limit on ops in the kernel, for disks that complete all of their ops together.
//!
//! Some disks (virtual ones above all) take all ops that are there, work through them, and report
//! them at the end, in one go. Then disk and client alternate: while the client handles the answers
//! and makes its next requests, the disk is idle. Keeping a part of the ops back ends that. They go
//! to the disk as soon as it has completed the rest, and more requests come while it works.
//!
//! This is a loss on a disk that works on many ops at a time, so nothing is assumed. If all
//! completions come together, both ways are tried in turn, and the faster one is kept for a while.

use std::time::Instant;

use crate::config::PacingConfig;
use crate::file::ab_test::{AbTest, Step};
use iomem::fits;

/// The number of harvests after which a limit follows the demand.
const HARVESTS: u32 = 16;

/// Limits the ops of one disk that an IoThread gives to the kernel.
pub(crate) struct Pacing {
    config: PacingConfig,
    /// The number of convoys in a row: times when all ops completed together. `None` while a trial
    /// runs or its outcome holds.
    watched: Option<u32>,
    /// The comparison of no limit (first) with a limit (second).
    trial: AbTest,
    /// The most ops at once that were queued or in the kernel, since the limit was set.
    demand: usize,
    limit: usize,
    /// The completed ones of the ops that were in the kernel together.
    arriving: usize,
    /// Harvests since the limit was set.
    harvests: u32,
}

impl Pacing {
    pub(crate) fn new(config: PacingConfig) -> Self {
        Self {
            config,
            watched: Some(0),
            trial: AbTest::new(config.span_ops, config.period_ops),
            demand: 0,
            limit: usize::MAX,
            arriving: 0,
            harvests: 0,
        }
    }

    /// Makes a pacing that has decided to keep ops back.
    #[cfg(test)]
    pub(crate) fn limited() -> Self {
        let pacing = Self::new(PacingConfig::default());
        Self { watched: None, trial: pacing.trial.decided(), ..pacing }
    }

    /// The most ops in the kernel, if `demand` ops are queued or in the kernel.
    #[inline]
    pub(crate) fn limit(&mut self, demand: usize) -> usize {
        self.demand = self.demand.max(demand);
        if self.is_limited() { self.limit } else { usize::MAX }
    }

    fn is_limited(&self) -> bool {
        self.watched.is_none() && self.trial.is_second()
    }

    /// Takes in a harvest that has found `found` completions of `in_kernel` ops. `submitted`: a
    /// submit came right before it.
    #[inline]
    pub(crate) fn after_harvest(
        &mut self,
        found: u64,
        in_kernel: usize,
        submitted: bool,
        now: Instant,
    ) {
        let found = fits(found, "a count of ops");
        if let Some(convoys) = self.watched {
            let convoys = self.watch(found, in_kernel, submitted, convoys);
            if convoys < self.config.convoys {
                self.watched = Some(convoys);
                return;
            }
            self.watched = None;
            self.set_limit();
            self.trial.begin();
        }
        if found > 0 {
            self.advance(found, now);
        }
    }

    /// Returns the number of convoys in a row. All ops complete together if nothing is submitted
    /// from the first completion until the last one.
    fn watch(&mut self, found: usize, in_kernel: usize, submitted: bool, convoys: u32) -> u32 {
        let arriving = std::mem::replace(&mut self.arriving, 0);
        if submitted {
            return if arriving > 0 || found > 0 { 0 } else { convoys };
        }
        let arrived = arriving + found;
        if found < in_kernel {
            self.arriving = arrived;
            return convoys;
        }
        if arrived >= self.config.convoy_min { convoys + 1 } else { 0 }
    }

    /// Adapts the limit to the demand.
    fn set_limit(&mut self) {
        self.limit = (self.demand * 3 / 4).max(self.config.limit_min);
        self.demand = 0;
        self.harvests = 0;
    }

    fn advance(&mut self, found: usize, now: Instant) {
        let step = self.trial.advance(found, now);
        match step {
            None if self.trial.has_chosen_second() => {
                self.harvests += 1;
                if self.harvests >= HARVESTS {
                    self.set_limit();
                }
                return;
            }
            None => return,
            Some(Step::Span) => {}
            Some(Step::Decided { percent }) => tracing::debug!(
                "with {} of {} ops in the kernel an op takes {percent}% of the time",
                self.limit,
                self.demand
            ),
            // A limit that has paid is tried again at once; one that has not, only when it could
            // pay.
            Some(Step::Over) if self.trial.is_second() => self.trial.begin(),
            Some(Step::Over) => self.watched = Some(0),
        }
        self.set_limit();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Simulates a client with `depth` requests and a disk that answers all of its ops together,
    /// after `of_all` plus `of_each` for each op; the client needs `pause` to follow answers with
    /// requests. Returns the number of ops done in `micros` steps of a microsecond, and the pacing
    /// at the end.
    fn drive(depth: usize, of_all: u64, of_each: u64, pause: u64, micros: u64) -> (usize, Pacing) {
        let pacing = Pacing::new(PacingConfig::default());
        drive_with(pacing, depth, of_all, of_each, pause, micros)
    }

    fn drive_with(
        mut pacing: Pacing,
        depth: usize,
        of_all: u64,
        of_each: u64,
        pause: u64,
        micros: u64,
    ) -> (usize, Pacing) {
        let start = Instant::now();
        let (mut queued, mut in_kernel, mut done) = (depth, 0, 0);
        let (mut disk_ends, mut client_comes) = (0, Vec::new());
        for at in 0..micros {
            client_comes.retain(|&(when, count)| {
                queued += if when <= at { count } else { 0 };
                when > at
            });
            if in_kernel > 0 && disk_ends <= at {
                done += in_kernel;
                client_comes.push((at + pause, in_kernel));
                let now = start + Duration::from_micros(at);
                pacing.after_harvest(in_kernel as u64, in_kernel, false, now);
                in_kernel = 0;
            }
            let limit = pacing.limit(queued + in_kernel);
            let count = queued.min(limit.saturating_sub(in_kernel));
            if count > 0 {
                // Ops that come while the disk works make its work longer.
                let begins = if in_kernel > 0 { disk_ends } else { at + of_all };
                disk_ends = begins + count as u64 * of_each;
                queued -= count;
                in_kernel += count;
            }
        }
        (done, pacing)
    }

    #[test]
    fn ops_are_kept_back_from_a_disk_that_works_on_one_at_a_time() {
        let (_, pacing) = drive(64, 5, 8, 90, 600_000);
        assert!(pacing.trial.has_chosen_second() || pacing.limit < 64);
        assert!((32..=48).contains(&pacing.limit), "the limit is {}", pacing.limit);
        // 1 / 8 us is the disk's own speed; taking turns costs 90 us for each 512.
        let (done, _) = drive(64, 5, 8, 90, 3_000_000);
        let (taking_turns, of_disk) = (3_000_000 * 64 / (512 + 95), 3_000_000 / 8);
        assert!(done > taking_turns * 110 / 100, "{done} of {of_disk}, {taking_turns} in turns");
    }

    #[test]
    fn nothing_is_kept_back_without_pacing() {
        let (_, pacing) = drive_with(Pacing::new(PacingConfig::OFF), 64, 5, 8, 90, 600_000);
        assert!(pacing.watched.is_some() && !pacing.is_limited(), "a trial has begun");
    }

    #[test]
    fn nothing_is_kept_back_from_a_disk_that_works_on_all_at_a_time() {
        let (done, pacing) = drive(64, 1000, 0, 90, 10_000_000);
        let unlimited = 10_000_000 * 64 / 1091;
        assert!(done > unlimited * 96 / 100, "{done} of {unlimited}");
        assert!(pacing.watched.is_some() || !pacing.trial.has_chosen_second());
    }

    #[test]
    fn a_client_with_few_requests_has_them_all_on_the_disk() {
        let (_, pacing) = drive(64, 5, 8, 90, 600_000);
        let mut pacing = Pacing { watched: None, trial: pacing.trial.decided(), ..pacing };
        let start = Instant::now();
        for at in 0..10_000 {
            let few = 1 + usize::try_from(at / 2500).unwrap();
            assert!(pacing.limit(few) >= few, "after {at} harvests");
            pacing.after_harvest(few as u64, few, false, start + Duration::from_micros(at));
        }
    }

    #[test]
    fn completions_that_come_one_by_one_change_nothing() {
        let mut pacing = Pacing::new(PacingConfig::default());
        let start = Instant::now();
        for at in 0..100_000 {
            assert_eq!(pacing.limit(64), usize::MAX);
            let now = start + Duration::from_micros(at);
            pacing.after_harvest(10, 64, false, now);
            pacing.after_harvest(0, 64, true, now);
        }
    }
}
