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

use std::time::{Duration, Instant};

use crate::config::PacingConfig;
use iomem::fits;

/// Spans of a trial: with and without a limit in turn.
const SPANS: u32 = 6;
/// So many harvests after which a limit follows the demand.
const HARVESTS: u32 = 16;
/// When nothing is asked for, the disk is not slow: a longer time between harvests counts as so
/// much.
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// Keeping ops back must be faster by this much in percent.
const ADVANTAGE_PERCENT: u32 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No limit; all ops have completed together `convoys` times in a row.
    Watching { convoys: u32 },
    /// Span number `span` of a trial; the odd ones have the limit.
    Trying { span: u32 },
    /// The outcome of a trial, for a while.
    Decided { limited: bool },
}

/// Decides how many ops of one disk an IoThread gives to the kernel.
pub(crate) struct Pacing {
    config: PacingConfig,
    phase: Phase,
    /// The most ops at once that were queued or in the kernel, since the limit was set.
    demand: usize,
    limit: usize,
    /// Ops that have completed of those that were in the kernel together.
    arriving: usize,
    /// Since the limit was set.
    harvests: u32,
    /// Ops completed in this span or period, and the time they took.
    ops: usize,
    time: Duration,
    last: Option<Instant>,
    /// The times of the spans of a trial, for each op in units of 2^-16 ns: without, with limit.
    sums: [u128; 2],
}

impl Pacing {
    pub(crate) fn new(config: PacingConfig) -> Self {
        Self {
            config,
            phase: Phase::Watching { convoys: 0 },
            demand: 0,
            limit: usize::MAX,
            arriving: 0,
            harvests: 0,
            ops: 0,
            time: Duration::ZERO,
            last: None,
            sums: [0; 2],
        }
    }

    /// One that has decided to keep ops back.
    #[cfg(test)]
    pub(crate) fn limited() -> Self {
        let pacing = Self::new(PacingConfig::default());
        Self { phase: Phase::Decided { limited: true }, ..pacing }
    }

    /// How many ops may be in the kernel, when there are `demand` in all.
    #[inline]
    pub(crate) fn limit(&mut self, demand: usize) -> usize {
        self.demand = self.demand.max(demand);
        if self.is_limited() { self.limit } else { usize::MAX }
    }

    fn is_limited(&self) -> bool {
        match self.phase {
            Phase::Watching { .. } => false,
            Phase::Trying { span } => span % 2 == 1,
            Phase::Decided { limited } => limited,
        }
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
        if let Phase::Watching { convoys } = self.phase {
            let convoys = self.watch(found, in_kernel, submitted, convoys);
            if convoys < self.config.convoys {
                self.phase = Phase::Watching { convoys };
                return;
            }
            self.begin(Phase::Trying { span: 0 });
            self.sums = [0; 2];
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

    fn begin(&mut self, phase: Phase) {
        self.set_limit();
        self.phase = phase;
        self.ops = 0;
        self.time = Duration::ZERO;
    }

    /// Follows the demand.
    fn set_limit(&mut self) {
        self.limit = (self.demand * 3 / 4).max(self.config.limit_min);
        self.demand = 0;
        self.harvests = 0;
    }

    fn advance(&mut self, found: usize, now: Instant) {
        let since = self.last.replace(now).map_or(Duration::ZERO, |last| now - last);
        self.time += since.min(PAUSE_MAX);
        self.ops += found;
        match self.phase {
            Phase::Trying { span } if self.ops >= self.config.span_ops => {
                self.sums[usize::from(span % 2 == 1)] +=
                    (self.time.as_nanos() << 16) / self.ops as u128;
                let next = if span + 1 < SPANS {
                    Phase::Trying { span: span + 1 }
                } else {
                    let [without, with] = self.sums;
                    let limited = with * u128::from(100 + ADVANTAGE_PERCENT) < without * 100;
                    let percent = with * 100 / without.max(1);
                    tracing::debug!(
                        "with {} of {} ops in the kernel an op takes {percent}% of the time",
                        self.limit,
                        self.demand
                    );
                    Phase::Decided { limited }
                };
                self.begin(next);
            }
            Phase::Decided { limited } if self.ops >= self.config.period_ops => {
                // What has paid is tried again at once, what has not when it could pay.
                self.begin(if limited {
                    Phase::Trying { span: 0 }
                } else {
                    Phase::Watching { convoys: 0 }
                });
                self.sums = [0; 2];
            }
            Phase::Decided { limited: true } => {
                self.harvests += 1;
                if self.harvests >= HARVESTS {
                    self.set_limit();
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert!(pacing.phase == Phase::Decided { limited: true } || pacing.limit < 64);
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
        assert!(!matches!(pacing.phase, Phase::Decided { limited: true }));
    }

    #[test]
    fn a_client_with_few_requests_has_them_all_on_the_disk() {
        let (_, pacing) = drive(64, 5, 8, 90, 600_000);
        let mut pacing = Pacing { phase: Phase::Decided { limited: true }, ..pacing };
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
