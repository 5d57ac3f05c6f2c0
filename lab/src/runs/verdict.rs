//! The verdict on the samples: the best fixed setting of a cell, ratios to it, and the
//! requirements.

use serde::Serialize;

use super::measure::Sample;
use super::plan::{ADAPTIVE, Cell, OpenCell, SETTINGS};
use crate::rig::spread::{Spread, number, show};

/// Settings with at least this share of the highest IOPS count as equally fast.
const AS_FAST: f64 = 0.97;

/// The IOPS required of the adaptive setting in nine of ten cells, times the best fixed setting's.
pub(super) const USUALLY: f64 = 0.95;
/// The IOPS required in every cell.
pub(super) const NEVER_UNDER: f64 = 0.85;
/// The most CPU time for each I/O, times the best fixed setting's.
pub(super) const CPU_MOST: f64 = 1.1;
/// The highest latency in the open loop, times that of the setting that serves each request on its
/// own.
pub(super) const LATENCY_MOST: f64 = 1.03;

/// All rounds of a cell.
pub(super) struct Outcome {
    pub(super) cell: Cell,
    /// Samples of each setting, in the order of the settings.
    pub(super) series: Vec<Vec<Sample>>,
}

/// All rounds of two settings in the open loop.
pub(super) struct OpenOutcome {
    pub(super) cell: OpenCell,
    /// The requested rate, in requests per second.
    pub(super) rate: f64,
    pub(super) adaptive: Vec<Sample>,
    pub(super) alone: Vec<Sample>,
}

/// One of the figures of a sample.
pub(super) type Figure = fn(&Sample) -> Option<f64>;

pub(super) const IOPS: Figure = |sample| Some(sample.iops);
pub(super) const CPU: Figure = |sample| sample.server_cpu_us_per_io;
pub(super) const PER_CALL: Figure = |sample| sample.completions_per_call;
pub(super) const MEAN: Figure = |sample| sample.latency_mean_us;
pub(super) const P99: Figure = |sample| sample.latency_p99_us;

/// The median of a figure over the rounds.
pub(super) fn median(samples: &[Sample], figure: Figure) -> Option<f64> {
    Spread::of(samples.iter().filter_map(figure)).map(|spread| spread.median)
}

/// Divides the figure of `samples` by that of `others` within each round.
pub(super) fn ratio(samples: &[Sample], others: &[Sample], figure: Figure) -> Option<Spread> {
    let rounds = samples.iter().zip(others);
    Spread::of(rounds.filter_map(|(sample, other)| {
        let other = figure(other).filter(|other| *other > 0.0)?;
        Some(figure(sample)? / other)
    }))
}

impl Outcome {
    /// The index of the best fixed setting: among the settings that are about as fast as the
    /// fastest, the one with the least CPU time. `None` if nothing was completed.
    pub(super) fn best(&self) -> Option<usize> {
        self.best_without(None)
    }

    /// The best fixed setting by all rounds except `round`.
    fn best_without(&self, round: Option<usize>) -> Option<usize> {
        let median = |place: usize, figure: Figure| {
            let samples = self.series[place].iter().enumerate();
            let others = samples.filter(|(index, _)| Some(*index) != round);
            Spread::of(others.filter_map(|(_, sample)| figure(sample))).map(|all| all.median)
        };
        let iops = |place: usize| median(place, IOPS).unwrap_or(0.0);
        let fixed = || (0..self.series.len()).filter(|place| *place != ADAPTIVE);
        let highest = fixed().map(iops).max_by(f64::total_cmp).filter(|iops| *iops > 0.0)?;
        let cpu = |place: &usize| median(*place, CPU).unwrap_or(f64::INFINITY);
        let as_fast = fixed().filter(|place| iops(*place) >= AS_FAST * highest);
        as_fast.min_by(|one, other| cpu(one).total_cmp(&cpu(other)))
    }

    /// Divides a setting's figure by that of the best fixed setting. In each round the best is that
    /// of the remaining rounds, because the best of a round is in part the luckiest.
    pub(super) fn to_best(&self, place: usize, figure: Figure) -> Option<Spread> {
        let rounds = self.series[place].len();
        Spread::of((0..rounds).filter_map(|round| {
            let best = self.best_without((rounds > 1).then_some(round))?;
            let other = self.series[best].get(round).and_then(figure);
            Some(figure(&self.series[place][round])? / other.filter(|other| *other > 0.0)?)
        }))
    }

    /// The median ratio of the adaptive setting's IOPS to the best fixed setting's.
    pub(super) fn iops_ratio(&self) -> Option<f64> {
        self.to_best(ADAPTIVE, IOPS).map(|spread| spread.median)
    }

    /// The median ratio of the adaptive setting's CPU time for each I/O to the best fixed
    /// setting's.
    pub(super) fn cpu_ratio(&self) -> Option<f64> {
        self.to_best(ADAPTIVE, CPU).map(|spread| spread.median)
    }

    /// A line for the terminal.
    pub(super) fn line(&self) -> String {
        let iops = median(&self.series[ADAPTIVE], IOPS).unwrap_or(0.0);
        let Some(best) = self.best() else { return format!("{}: nothing was done", self.cell) };
        format!(
            "{}: {}, {} times {}",
            self.cell,
            number(iops),
            show(self.to_best(ADAPTIVE, IOPS)),
            SETTINGS[best]
        )
    }
}

impl OpenOutcome {
    /// Divides a latency of the adaptive setting by that of `alone`.
    pub(super) fn ratio(&self, figure: Figure) -> Option<Spread> {
        ratio(&self.adaptive, &self.alone, figure)
    }

    /// A line for the terminal.
    pub(super) fn line(&self) -> String {
        let [mean, p99] = [MEAN, P99].map(|figure| show(self.ratio(figure)));
        format!("{}: mean latency {mean} times, p99 {p99} times", self.cell)
    }
}

/// A requirement and its result.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Requirement {
    pub(super) text: String,
    /// `None` if no measurement concerns it.
    pub(super) reached: Option<bool>,
    pub(super) found: String,
}

/// A ratio and its cell. `None` if nothing was completed.
type Named = (String, Option<f64>);

/// Checks all requirements of the adaptive setting.
pub(super) fn requirements(outcomes: &[Outcome], open: &[OpenOutcome]) -> Vec<Requirement> {
    let named = |ratio: fn(&Outcome) -> Option<f64>| -> Vec<Named> {
        outcomes.iter().map(|one| (one.cell.to_string(), ratio(one))).collect()
    };
    let (iops, cpu) = (named(Outcome::iops_ratio), named(Outcome::cpu_ratio));
    let latencies = [("mean", MEAN), ("p99", P99)].map(|(name, figure)| {
        let median = |one: &OpenOutcome| one.ratio(figure).map(|spread| spread.median);
        let named = |one: &OpenOutcome| (format!("{} {name}", one.cell), median(one));
        open.iter().map(named).collect::<Vec<Named>>()
    });
    vec![
        usually(outcomes),
        always(
            format!("IOPS never under {NEVER_UNDER} times the best fixed setting's"),
            &iops,
            |ratio| ratio >= NEVER_UNDER,
            |ratio| -ratio,
        ),
        always(
            format!("CPU time for each I/O at most {CPU_MOST} times the best fixed setting's"),
            &cpu,
            |ratio| ratio <= CPU_MOST,
            |ratio| ratio,
        ),
        always(
            format!("Latency in the open loop at most {LATENCY_MOST} times"),
            &latencies.concat(),
            |ratio| ratio <= LATENCY_MOST,
            |ratio| ratio,
        ),
    ]
}

/// Checks the requirement for nine of ten cells, and counts the misses by chance. At depth 1 no
/// setting decides anything, so its misses are chance. A miss in every round hardly is.
fn usually(outcomes: &[Outcome]) -> Requirement {
    let is_good = |one: &&Outcome| one.iops_ratio().is_some_and(|ratio| ratio >= USUALLY);
    let good = outcomes.iter().filter(is_good).count();
    let alone = || outcomes.iter().filter(|one| one.cell.depth == 1);
    let always_missed =
        |one: &&Outcome| one.to_best(ADAPTIVE, IOPS).is_none_or(|spread| spread.max < USUALLY);
    Requirement {
        text: format!(
            "IOPS at least {USUALLY} times the best fixed setting's in nine of ten cells"
        ),
        reached: (!outcomes.is_empty()).then_some(good * 10 >= outcomes.len() * 9),
        found: format!(
            "in {good} of {}; at depth 1, where nothing is decided, in {} of {}; less in every \
             round in {}",
            outcomes.len(),
            alone().filter(is_good).count(),
            alone().count(),
            outcomes.iter().filter(always_missed).count(),
        ),
    }
}

/// Checks a requirement for every cell, and names the cell with the highest `badness`. A cell where
/// nothing was completed misses the requirement.
fn always(
    text: String,
    all: &[Named],
    holds: impl Fn(f64) -> bool,
    badness: impl Fn(f64) -> f64,
) -> Requirement {
    let good = all.iter().filter(|(_, ratio)| ratio.is_some_and(&holds)).count();
    let known = all.iter().filter_map(|(name, ratio)| Some((name, (*ratio)?)));
    let worst = known.max_by(|(_, one), (_, other)| badness(*one).total_cmp(&badness(*other)));
    let worst = worst.map(|(name, ratio)| format!(", at worst {ratio:.3} in {name}"));
    Requirement {
        text,
        reached: (!all.is_empty()).then_some(good == all.len()),
        found: format!("in {good} of {}{}", all.len(), worst.unwrap_or_default()),
    }
}

/// The cells with the lowest ratios, the lowest first.
pub(super) fn worst(outcomes: &[Outcome], count: usize) -> Vec<&Outcome> {
    // A cell where nothing was completed is the worst.
    let ratio = |one: &Outcome| one.iops_ratio().unwrap_or(0.0);
    let mut sorted: Vec<_> = outcomes.iter().collect();
    sorted.sort_by(|one, other| ratio(one).total_cmp(&ratio(other)));
    sorted.truncate(count);
    sorted
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::rig::targets::Target;
    use crate::runs::plan::{ALONE, Driver, Load};

    pub(in crate::runs) fn sample(iops: f64, cpu: f64) -> Sample {
        Sample {
            iops,
            server_cpu_us_per_io: Some(cpu),
            completions_per_call: Some(4.0),
            latency_mean_us: Some(1e6 / iops),
            latency_p99_us: Some(2e6 / iops),
        }
    }

    /// Makes a cell of three rounds. Fixed settings have 100 IOPS at 2 µs each, except `others`.
    /// `adaptive` and `others` give IOPS and CPU time.
    pub(in crate::runs) fn outcome(
        depth: u32,
        adaptive: (f64, f64),
        others: &[(usize, f64, f64)],
    ) -> Outcome {
        let (load, driver) = (Load::Reads, Driver::Sleeping);
        let cell = Cell { target: Target::Zram, load, driver, depth };
        let mut series = vec![vec![sample(100.0, 2.0); 3]; SETTINGS.len()];
        series[ADAPTIVE] = vec![sample(adaptive.0, adaptive.1); 3];
        for (place, iops, cpu) in others {
            series[*place] = vec![sample(*iops, *cpu); 3];
        }
        Outcome { cell, series }
    }

    pub(in crate::runs) fn open(adaptive: &[f64], alone: &[f64]) -> OpenOutcome {
        let samples = |all: &[f64]| all.iter().map(|us| sample(1e6 / us, 1.0)).collect();
        let cell = OpenCell { target: Target::Zram, share: 30 };
        OpenOutcome { cell, rate: 300.0, adaptive: samples(adaptive), alone: samples(alone) }
    }

    #[test]
    fn the_best_takes_the_least_cpu_of_those_that_are_as_fast() {
        // Setting 5 is the fastest, 3 nearly so and cheaper, 7 is cheaper still and slower.
        let others = [(5, 200.0, 1.5), (3, 195.0, 1.0), (7, 193.0, 0.5)];
        let outcome = outcome(8, (190.0, 1.2), &others);
        assert_eq!(outcome.best(), Some(3));
        assert!((outcome.iops_ratio().unwrap() - 190.0 / 195.0).abs() < 1e-12);
        assert!((outcome.cpu_ratio().unwrap() - 1.2).abs() < 1e-12);
    }

    #[test]
    fn the_adaptive_setting_is_not_its_own_best() {
        let mut outcome = outcome(8, (500.0, 0.1), &[(ALONE, 120.0, 2.0)]);
        assert_eq!(outcome.best(), Some(ALONE));
        assert!(outcome.iops_ratio().unwrap() > 4.0);
        outcome.series.iter_mut().flatten().for_each(|sample| sample.iops = 0.0);
        assert_eq!((outcome.best(), outcome.iops_ratio()), (None, None));
        assert!(outcome.line().ends_with("nothing was done"));
    }

    #[test]
    fn the_best_has_the_highest_median_not_the_highest_round() {
        let mut outcome = outcome(8, (100.0, 1.0), &[(5, 150.0, 1.0)]);
        outcome.series[3][0].iops = 900.0;
        assert_eq!(outcome.best(), Some(5));
    }

    #[test]
    fn luck_makes_no_setting_the_best_of_its_own_round() {
        // Each of three settings is fast in one round, and average in two.
        let mut outcome = outcome(8, (100.0, 1.0), &[]);
        for (round, place) in [1, 3, 5].into_iter().enumerate() {
            outcome.series[place][round].iops = 300.0;
        }
        let expected = Spread { median: 1.0, min: 1.0, max: 1.0 };
        assert_eq!(outcome.to_best(ADAPTIVE, IOPS), Some(expected));
    }

    #[test]
    fn chance_is_told_from_what_is_always_missed() {
        let mut outcomes = with_ratios(&[1.0, 0.9]);
        outcomes.push(outcome(1, (90.0, 2.0), &[]));
        outcomes[2].series[ADAPTIVE][1].iops = 96.0;
        let found = &requirements(&outcomes, &[])[0].found;
        let expected = "in 1 of 3; at depth 1, where nothing is decided, in 0 of 1; less in every \
                        round in 1";
        assert_eq!(found, expected);
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let ours = [100.0, 400.0, 900.0].map(|iops| sample(iops, 1.0));
        let theirs = [100.0, 200.0, 300.0].map(|iops| sample(iops, 2.0));
        let expected = Spread { median: 2.0, min: 1.0, max: 3.0 };
        assert_eq!(ratio(&ours, &theirs, IOPS), Some(expected));
        assert_eq!(ratio(&ours, &theirs, CPU).unwrap().median, 0.5);
        assert_eq!(ratio(&ours, &[sample(0.0, 1.0)], IOPS), None);
    }

    fn reached(outcomes: &[Outcome], open: &[OpenOutcome]) -> [Option<bool>; 4] {
        let all = requirements(outcomes, open);
        let reached: Vec<_> = all.iter().map(|requirement| requirement.reached).collect();
        reached.try_into().unwrap()
    }

    fn with_ratios(ratios: &[f64]) -> Vec<Outcome> {
        ratios.iter().map(|ratio| outcome(8, (100.0 * ratio, 2.0), &[])).collect()
    }

    #[test]
    fn nine_of_ten_cells_must_be_fast_and_none_slow() {
        let mut ratios = [1.0; 10];
        ratios[3] = 0.86;
        assert_eq!(reached(&with_ratios(&ratios), &[])[..2], [Some(true), Some(true)]);
        ratios[4] = 0.94;
        assert_eq!(reached(&with_ratios(&ratios), &[])[..2], [Some(false), Some(true)]);
        ratios[4] = 0.96;
        ratios[3] = 0.84;
        assert_eq!(reached(&with_ratios(&ratios), &[])[..2], [Some(true), Some(false)]);
        let found = &requirements(&with_ratios(&ratios), &[])[1].found;
        assert_eq!(found, "in 9 of 10, at worst 0.840 in zram/randread-depth-8-sleeping");
    }

    #[test]
    fn cpu_time_and_latencies_have_limits() {
        let good = [outcome(8, (100.0, 2.19), &[])];
        let bad = [outcome(8, (100.0, 2.21), &[])];
        let quick = [open(&[102.0, 102.0, 500.0], &[100.0; 3])];
        let slow = [open(&[104.0, 104.0, 1.0], &[100.0; 3])];
        assert_eq!(reached(&good, &quick)[2..], [Some(true), Some(true)]);
        assert_eq!(reached(&bad, &slow)[2..], [Some(false), Some(false)]);
        // Only the mean is within the limit.
        let mut tail = open(&[100.0; 3], &[100.0; 3]);
        tail.adaptive.iter_mut().for_each(|sample| sample.latency_p99_us = Some(300.0));
        let requirement = &requirements(&good, &[tail])[3];
        assert_eq!(requirement.reached, Some(false));
        assert!(requirement.found.ends_with("1.500 in zram/open-loop-30-percent p99"));
    }

    #[test]
    fn what_was_not_measured_is_not_reached_and_what_stood_still_is_missed() {
        assert_eq!(reached(&[], &[]), [None; 4]);
        let mut still = outcome(8, (0.0, 1.0), &[]);
        still.series.iter_mut().for_each(Vec::clear);
        assert_eq!(reached(&[still], &[])[..3], [Some(false); 3]);
    }

    #[test]
    fn the_worst_come_first() {
        let outcomes = with_ratios(&[1.0, 0.9, 1.1, 0.8]);
        let ratios = worst(&outcomes, 2).into_iter().map(|one| one.iops_ratio().unwrap());
        assert_eq!(ratios.collect::<Vec<_>>(), [0.8, 0.9]);
        assert_eq!(worst(&outcomes, 10).len(), 4);
    }
}
