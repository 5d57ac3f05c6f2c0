//! The verdict on a cell's rounds: a change or none, and the cause.

use super::plan::{Cell, Through};
use super::run::{Outcome, Side};
use super::sample::Sample;
use crate::rig::spread::{Spread, number};
use crate::rig::targets::Target;

/// The place of the median in the list of latency percentiles.
pub(super) const P50: usize = 6;
/// The place of 99% in the list of latency percentiles.
pub(super) const P99: usize = 12;
/// The place of the median in the list of numbers harvested at once.
pub(super) const HARVESTED_P50: usize = 5;

/// With fewer rounds an effect is unknown.
const ROUNDS_MIN: usize = 5;
/// One round in this many may disagree about the direction of a change.
const DISSENT: usize = 7;
/// Smaller changes do not count.
const SMALLEST: f64 = 0.02;

/// A figure with the step on, divided by that with the step off, round by round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Change {
    pub(super) ratio: Spread,
    rounds: usize,
    /// Rounds in which the figure has grown, and rounds in which it has shrunk.
    grown: usize,
    shrunk: usize,
}

/// The effect of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    More,
    Less,
    /// Within the spread.
    None,
    /// There are too few rounds.
    Unknown,
}

impl Change {
    /// Returns `None` if the figure is missing in all rounds.
    pub(super) fn from_outcome(
        outcome: &Outcome,
        value: impl Fn(&Sample) -> Option<f64>,
    ) -> Option<Self> {
        let pairs = outcome.off.samples.iter().zip(&outcome.on.samples);
        let ratios: Vec<f64> = pairs
            .filter_map(|(off, on)| Some((value(off)?, value(on)?)))
            .filter(|(off, _)| *off > 0.0)
            .map(|(off, on)| on / off)
            .collect();
        Some(Self {
            rounds: ratios.len(),
            grown: ratios.iter().filter(|ratio| **ratio > 1.0).count(),
            shrunk: ratios.iter().filter(|ratio| **ratio < 1.0).count(),
            ratio: Spread::from_values(ratios)?,
        })
    }

    pub(super) fn effect(&self) -> Effect {
        let median = self.ratio.median;
        let agree = |count: usize| (self.rounds - count) * DISSENT <= self.rounds;
        match () {
            () if self.rounds < ROUNDS_MIN => Effect::Unknown,
            () if median > 1.0 + SMALLEST && agree(self.grown) => Effect::More,
            () if median < 1.0 - SMALLEST && agree(self.shrunk) => Effect::Less,
            () => Effect::None,
        }
    }
}

/// IOPS.
pub(super) fn iops(outcome: &Outcome) -> Option<Change> {
    Change::from_outcome(outcome, |sample| Some(sample.iops).filter(|iops| *iops > 0.0))
}

/// Mean latency of reads and writes.
pub(super) fn latency(outcome: &Outcome) -> Option<Change> {
    Change::from_outcome(outcome, |sample| Some(sample.latency.get("all")?.mean_us))
}

/// The kind of a finding, by which cells are grouped, and the figures of the cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) kind: String,
    pub(super) figures: String,
}

/// The text in the kind of each finding that is an effect.
pub(super) const CHANGED: &str = "IOPS, in all rounds but one in seven";

pub(super) fn finding(outcome: &Outcome) -> Finding {
    let cell = &outcome.cell;
    if cell.through == Through::IdleDaemon {
        let cpu = |side: &Side| {
            let spread = side.spread(|sample| sample.idle_cpu_percent);
            spread.map_or_else(|| "not known".to_owned(), |spread| format!("{}%", spread.show()))
        };
        let figures = format!("{} when off, {} when on", cpu(&outcome.off), cpu(&outcome.on));
        return Finding { kind: "CPU that a daemon without load uses".to_owned(), figures };
    }
    let place = cell.short_name();
    let (Some(iops), Some(latency)) = (iops(outcome), latency(outcome)) else {
        return Finding { kind: "Nothing was completed".to_owned(), figures: place };
    };
    let kind = match iops.effect() {
        Effect::More => format!("More {CHANGED}"),
        Effect::Less => format!("Fewer {CHANGED}"),
        Effect::Unknown => "In too few rounds to tell".to_owned(),
        Effect::None => match cause(outcome) {
            Some(cause) => format!("No effect on IOPS here, within the spread; {cause}"),
            None => "No effect on IOPS here, within the spread".to_owned(),
        },
    };
    let mut figures = format!("{place}: {} times", iops.ratio.show());
    let more = [
        match latency.effect() {
            Effect::More | Effect::Less => {
                Some(format!("mean latency {} times", latency.ratio.show()))
            }
            Effect::None | Effect::Unknown => None,
        },
        figures_of_cause(outcome),
    ];
    more.into_iter().flatten().for_each(|text| figures.push_str(&format!(", {text}")));
    Finding { kind, figures }
}

/// Summarizes the findings of all cells in a sentence.
pub(super) fn summary(outcomes: &[&Outcome]) -> String {
    let of = |name: &str, change: fn(&Outcome) -> Option<Change>| {
        let changes: Vec<_> = outcomes.iter().filter_map(|outcome| change(outcome)).collect();
        let range = |effect: Effect, word: &str| {
            let found = changes.iter().filter(|change| change.effect() == effect);
            let spread = Spread::from_values(found.clone().map(|change| change.ratio.median))?;
            let (from, to) = (number(spread.min), number(spread.max));
            let times = if from == to { from } else { format!("{from} to {to}") };
            Some(format!("{word} in {} ({times} times)", found.count()))
        };
        let none = changes.iter().filter(|change| change.effect() == Effect::None).count();
        let parts = [
            range(Effect::More, "more"),
            range(Effect::Less, "less"),
            (none > 0).then(|| format!("no effect in {none}")),
            range(Effect::Unknown, "too few rounds to tell"),
        ];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        format!("{name} in {} rows: {}.", changes.len(), parts.join(", "))
    };
    format!("{} {}", of("IOPS", iops), of("Mean latency", latency))
}

/// The reason why an effect is missing or takes another form, if the figures show one.
fn cause(outcome: &Outcome) -> Option<&'static str> {
    let Outcome { cell, off, on } = outcome;
    match cell.experiment {
        1 => (off.harvested(HARVESTED_P50)? >= 4.0)
            .then_some("one io_getevents brings many completions, so it hardly counts for each"),
        2 => early_harvest(cell, off, on),
        3 if cell.load.depth == 1 => Some("with one request at a time there is nothing to put off"),
        3 => (calls(off)? < 1.25 * calls(on)?)
            .then_some("by its event index the driver asks for few calls as it is"),
        4 if cell.off.contains(&"--poll-max-us") => (off.latency_us("all", P50)? > POLL_MAX_US)
            .then_some("a request takes longer than the loop would look"),
        4 => (on.spread(|sample| sample.ops_per_submit)?.median < 2.0)
            .then_some("there is seldom more than one operation to submit"),
        _ => None,
    }
}

/// The longest time that the loop busy-polls in these experiments.
const POLL_MAX_US: f64 = 64.0;

fn early_harvest(cell: &Cell, off: &Side, on: &Side) -> Option<&'static str> {
    let (before, after) = (off.harvested(HARVESTED_P50)?, on.harvested(HARVESTED_P50)?);
    Some(if after < 0.8 * before {
        "completions are found earlier, not made earlier, which shows as latency and batch size \
         and hardly as throughput"
    } else if cell.target == Target::Zram && cell.engine == "io_uring" {
        "io_uring hands each request of this disk to a worker thread of the kernel, as its driver \
         may block, so there is little to find when the submit returns"
    } else {
        "the disk has not finished when the submit returns"
    })
}

/// The figures that show the reason.
fn figures_of_cause(outcome: &Outcome) -> Option<String> {
    let Outcome { cell, off, on } = outcome;
    let median = |spread: Option<Spread>| spread.map(|spread| spread.median);
    let (name, before, after) = match cell.experiment {
        1 | 2 => {
            let name = "median at once";
            (name, off.harvested(HARVESTED_P50)?, on.harvested(HARVESTED_P50)?)
        }
        3 => ("calls/I/O", calls(off)?, calls(on)?),
        4 if cell.through == Through::Engine => {
            let ops = |side: &Side| median(side.spread(|sample| sample.ops_per_submit));
            ("operations/submit", ops(off)?, ops(on)?)
        }
        _ => ("system calls/I/O", off.system_calls_per_io()?, on.system_calls_per_io()?),
    };
    let (before, after) = (short_number(before), short_number(after));
    let pair = format!("{before} \u{2192} {after}");
    Some(format!("{name} {}", if before == after { before } else { pair }))
}

fn calls(side: &Side) -> Option<f64> {
    side.spread(|sample| sample.calls_per_io).map(|spread| spread.median)
}

/// Like [`number`], but a whole number has no decimals.
pub(super) fn short_number(value: f64) -> String {
    if value.fract() == 0.0 && value < 10_000.0 { format!("{value:.0}") } else { number(value) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::experiments::plan;
    use crate::experiments::sample::Latency;

    pub(in crate::experiments) fn side(figures: &[(f64, f64, f64)]) -> Side {
        let sample = |(iops, mean_us, batch): &(f64, f64, f64)| Sample {
            iops: *iops,
            latency: ["all", "read", "write"]
                .map(|name| {
                    let percentiles_us = (1..=17).map(|step| mean_us * f64::from(step)).collect();
                    (name, Latency { mean_us: *mean_us, percentiles_us })
                })
                .into(),
            harvested_at_once: Some(vec![*batch; 11]),
            system_calls_per_io: Some(0.5),
            cpu_us_per_io: Some(2.0),
            ..Sample::default()
        };
        Side { samples: figures.iter().map(sample).collect(), traced_system_calls_per_io: None }
    }

    pub(in crate::experiments) fn outcome(name: &str, off: Side, on: Side) -> Outcome {
        let cells = plan::wanted(name);
        assert_eq!(cells.len(), 1, "{name}");
        Outcome { cell: cells[0], off, on }
    }

    fn rounds(iops: [f64; 7]) -> Option<Change> {
        let on: Vec<_> = iops.iter().map(|iops| (*iops, 1.0, 1.0)).collect();
        super::iops(&outcome(
            "1/zram/engine-alone/aio/randread-4k-depth-1",
            side(&[(100.0, 1.0, 1.0); 7]),
            side(&on),
        ))
    }

    #[test]
    fn an_effect_needs_all_rounds_but_one() {
        let effect = |iops| rounds(iops).unwrap().effect();
        assert_eq!(effect([120.0; 7]), Effect::More);
        assert_eq!(effect([120.0, 120.0, 120.0, 120.0, 120.0, 120.0, 90.0]), Effect::More);
        assert_eq!(effect([120.0, 120.0, 120.0, 120.0, 120.0, 90.0, 90.0]), Effect::None);
        assert_eq!(effect([80.0; 7]), Effect::Less);
        assert_eq!(effect([101.0; 7]), Effect::None);
        assert_eq!(rounds([120.0; 7]).unwrap().ratio.median, 1.2);
    }

    #[test]
    fn a_missing_effect_is_reported_and_explained() {
        let name = "2/zram/engine-alone/aio";
        let found = finding(&outcome(
            name,
            side(&[(100.0, 180.0, 128.0); 7]),
            side(&[(100.0, 40.0, 16.0); 7]),
        ));
        assert!(found.kind.contains("No effect on IOPS here"), "{found:?}");
        assert!(found.kind.contains("found earlier, not made earlier"), "{found:?}");
        assert!(found.figures.contains("mean latency 0.22 times"), "{found:?}");
        assert!(found.figures.ends_with("median at once 128 \u{2192} 16"), "{found:?}");
        let same = side(&[(100.0, 180.0, 60.0); 7]);
        let name = "2/zram/engine-alone/io_uring";
        let found = finding(&outcome(name, same.clone(), same));
        assert!(found.kind.contains("worker thread of the kernel"), "{found:?}");
        let few = side(&[(100.0, 1.0, 1.0)]);
        let found = finding(&outcome(name, few.clone(), few));
        assert!(found.kind.contains("too few rounds"), "{found:?}");
    }

    #[test]
    fn a_summary_counts_the_effects_of_cells() {
        let name = "2/zram/engine-alone/aio";
        let before = || side(&[(100.0, 100.0, 128.0); 7]);
        let one = outcome(name, before(), side(&[(120.0, 50.0, 16.0); 7]));
        let other = outcome(name, before(), before());
        assert_eq!(
            summary(&[&one, &other]),
            "IOPS in 2 rows: more in 1 (1.20 times), no effect in 1. \
             Mean latency in 2 rows: less in 1 (0.50 times), no effect in 1."
        );
    }
}
