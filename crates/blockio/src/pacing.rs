//! How many ops may be in the kernel at once, for disks that answer all of them together.
//!
//! Some disks (virtual ones above all) take whatever is there, work through it, and say so at the
//! end, in one go. Then the disk and whoever asks it take turns: while they look at the answers and
//! think of the next requests, the disk has nothing to do. Keeping a part of the ops back ends
//! that: they go to the disk at once when it has answered the others, and more come meanwhile.
//!
//! On a disk that works on many ops at a time it would only cost, so nothing is assumed: where
//! completions come all together, both ways are tried in turn, and the faster one is kept for a
//! while.

use std::time::Instant;

use crate::config::PacingConfig;
use crate::trial::{Step, Trial};
use iomem::fits;

/// So many harvests after which a limit follows the demand.
const HARVESTS: u32 = 16;

/// Decides how many ops of one disk an IoThread gives to the kernel.
pub(crate) struct Pacing {
    config: PacingConfig,
    /// All ops have completed together so many times in a row. `None`: it is tried whether to keep
    /// some back, or that was found out.
    watched: Option<u32>,
    /// Without a limit, and with one.
    trial: Trial,
    /// The most ops at once that were queued or in the kernel, since the limit was set.
    demand: usize,
    limit: usize,
    /// Ops that have completed of those that were in the kernel together.
    arriving: usize,
    /// Since the limit was set.
    harvests: u32,
}

impl Pacing {
    pub(crate) fn new(config: PacingConfig) -> Self {
        Self {
            config,
            watched: Some(0),
            trial: Trial::new(config.span_ops, config.period_ops),
            demand: 0,
            limit: usize::MAX,
            arriving: 0,
            harvests: 0,
        }
    }

    /// One that has decided to keep ops back.
    #[cfg(test)]
    pub(crate) fn limited() -> Self {
        let pacing = Self::new(PacingConfig::default());
        Self { watched: None, trial: pacing.trial.decided(), ..pacing }
    }

    /// How many ops may be in the kernel, when there are `demand` in all.
    #[inline]
    pub(crate) fn limit(&mut self, demand: usize) -> usize {
        self.demand = self.demand.max(demand);
        if self.is_limited() { self.limit } else { usize::MAX }
    }

    fn is_limited(&self) -> bool {
        self.watched.is_none() && self.trial.is_second()
    }

    /// Takes in a harvest: `found` of `in_kernel` ops had completed. `submitted`: a submit came
    /// right before it.
    #[inline]
    pub(crate) fn harvested(
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

    /// How many convoys there have been in a row. All ops complete together when, from the first
    /// completion on, nothing is submitted until the last one.
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

    /// Follows the demand.
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
            // What has paid is tried again at once, what has not when it could pay.
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

    /// A client with `depth` requests and a disk that answers all that it has together, after
    /// `of_all` and `of_each` op; the client needs `pause` to follow answers with requests. Returns
    /// how many ops it did in `ops` steps of a microsecond, and the pacing as it was then.
    fn drive(depth: usize, of_all: u64, of_each: u64, pause: u64, micros: u64) -> (usize, Pacing) {
        let start = Instant::now();
        let mut pacing = Pacing::new(PacingConfig::default());
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
                pacing.harvested(in_kernel as u64, in_kernel, false, now);
                in_kernel = 0;
            }
            let limit = pacing.limit(queued + in_kernel);
            let count = queued.min(limit.saturating_sub(in_kernel));
            if count > 0 {
                // What comes while the disk works makes its work longer.
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
            pacing.harvested(few as u64, few, false, start + Duration::from_micros(at));
        }
    }

    #[test]
    fn completions_that_come_one_by_one_change_nothing() {
        let mut pacing = Pacing::new(PacingConfig::default());
        let start = Instant::now();
        for at in 0..100_000 {
            assert_eq!(pacing.limit(64), usize::MAX);
            let now = start + Duration::from_micros(at);
            pacing.harvested(10, 64, false, now);
            pacing.harvested(0, 64, true, now);
        }
    }
}
