//! What the rounds of a cell show: a change, or none that stands out of the spread, and why.

use super::plan::{Cell, Through};
use super::run::{Outcome, Side};
use super::sample::Sample;
use crate::lab::spread::{Spread, number};
use crate::lab::targets::Target;

/// The place of the median in the list of latency percentiles.
pub(super) const P50: usize = 6;
/// The place of 99% in the list of latency percentiles.
pub(super) const P99: usize = 12;
/// The place of the median in the list of numbers harvested at once.
pub(super) const HARVESTED_P50: usize = 5;
/// The place of 99.99% in the list of numbers harvested at once.
pub(super) const HARVESTED_MAX: usize = 10;

/// With fewer rounds nothing is said about an effect.
const ROUNDS_MIN: usize = 5;
/// One round in so many may disagree about the direction of a change.
const DISSENT: usize = 7;
/// Changes below this are not worth the name.
const SMALLEST: f64 = 0.02;

/// A figure with the step on, divided by the same with it off, round by round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Change {
    pub(super) ratio: Spread,
    rounds: usize,
    /// Rounds in which the figure has grown, and in which it has shrunk.
    grown: usize,
    shrunk: usize,
}

/// What a change amounts to.
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
    /// None if a figure is missing in all rounds.
    pub(super) fn of(outcome: &Outcome, value: impl Fn(&Sample) -> Option<f64>) -> Option<Self> {
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
            ratio: Spread::of(ratios)?,
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
    Change::of(outcome, |sample| Some(sample.iops).filter(|iops| *iops > 0.0))
}

/// Mean latency of reads and writes.
pub(super) fn latency(outcome: &Outcome) -> Option<Change> {
    Change::of(outcome, |sample| Some(sample.latency.get("all")?.mean_us))
}

/// What a cell shows, in a sentence or two.
pub(super) fn sentence(outcome: &Outcome) -> String {
    let cell = &outcome.cell;
    if cell.through == Through::IdleDaemon {
        let cpu = |side: &Side| {
            let spread = side.spread(|sample| sample.idle_cpu_percent);
            spread.map_or_else(|| "not known".to_owned(), |spread| format!("{}%", spread.show()))
        };
        let (off, on) = (cpu(&outcome.off), cpu(&outcome.on));
        return format!(
            "A daemon without load uses {off} of a CPU without busy-polling, {on} with it."
        );
    }
    let (Some(iops), Some(latency)) = (iops(outcome), latency(outcome)) else {
        return "Nothing was completed.".to_owned();
    };
    let times = |change: &Change| change.ratio.show();
    let of_iops = match iops.effect() {
        Effect::More | Effect::Less => format!("{} times the IOPS", times(&iops)),
        Effect::None => format!("no effect on IOPS here ({}, within the spread)", times(&iops)),
        Effect::Unknown => format!("{} times the IOPS, in too few rounds to tell", times(&iops)),
    };
    let of_latency = match latency.effect() {
        Effect::More | Effect::Less => format!(", {} times the mean latency", times(&latency)),
        Effect::None => ", none on the mean latency".to_owned(),
        Effect::Unknown => String::new(),
    };
    let place = format!("{}, {}, {}, {}", cell.target, cell.through, cell.engine, cell.load.name);
    let why = cause(outcome, iops.effect()).map_or_else(String::new, |why| format!(" {why}"));
    format!("{place}: {of_iops}{of_latency}.{why}")
}

/// Why an effect is missing, or takes another form, where the figures say so.
fn cause(outcome: &Outcome, effect: Effect) -> Option<String> {
    if effect == Effect::More || effect == Effect::Unknown {
        return None;
    }
    let Outcome { cell, off, on } = outcome;
    match cell.experiment {
        1 => shared_system_call(off),
        2 => early_harvest(cell, off, on),
        3 => calls(cell, off, on),
        4 if cell.off.contains(&"--poll-max-us") => slow_disk(off),
        4 => Some(format!(
            "A submit took {} operations on average when on, {} when off.",
            number(on.spread(|sample| sample.ops_per_submit)?.median),
            number(off.spread(|sample| sample.ops_per_submit)?.median),
        )),
        _ => None,
    }
}

fn shared_system_call(off: &Side) -> Option<String> {
    let batch = off.harvested(HARVESTED_P50).filter(|batch| *batch >= 4.0)?;
    Some(format!(
        "The median io_getevents brings {} completions here, so one call hardly counts for each.",
        number(batch)
    ))
}

fn early_harvest(cell: &Cell, off: &Side, on: &Side) -> Option<String> {
    let (before, after) = (off.harvested(HARVESTED_P50)?, on.harvested(HARVESTED_P50)?);
    let batches =
        format!("the median harvest found {} and finds {}", number(before), number(after));
    if after < 0.8 * before {
        return Some(format!(
            "Completions are found earlier, not made earlier ({batches}), which shows as latency \
             and batch size and hardly as throughput."
        ));
    }
    if cell.target == Target::Zram && cell.engine == "io_uring" {
        return Some(format!(
            "io_uring hands each request of this disk to a worker thread of the kernel, as its \
             driver may block, so there is little to find when the submit returns ({batches})."
        ));
    }
    Some(format!("The disk has not finished when the submit returns ({batches})."))
}

fn calls(cell: &Cell, off: &Side, on: &Side) -> Option<String> {
    let of = |side: &Side| side.spread(|sample| sample.calls_per_io).map(|spread| spread.median);
    let (before, after) = (of(off)?, of(on)?);
    let figures = format!("{} calls for each I/O before, {} after", number(before), number(after));
    if cell.load.depth == 1 {
        return Some(format!(
            "With one request at a time there is nothing to put off ({figures})."
        ));
    }
    (before < 1.25 * after)
        .then(|| format!("The driver asks for few calls by its event index as it is ({figures})."))
}

fn slow_disk(off: &Side) -> Option<String> {
    let us = off.latency_us("all", P50).filter(|us| *us > 64.0)?;
    Some(format!(
        "A request takes {} \u{b5}s here, longer than the 64 \u{b5}s that the loop would look.",
        number(us)
    ))
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
    fn an_effect_is_what_all_rounds_but_one_agree_on() {
        let effect = |iops| rounds(iops).unwrap().effect();
        assert_eq!(effect([120.0; 7]), Effect::More);
        assert_eq!(effect([120.0, 120.0, 120.0, 120.0, 120.0, 120.0, 90.0]), Effect::More);
        assert_eq!(effect([120.0, 120.0, 120.0, 120.0, 120.0, 90.0, 90.0]), Effect::None);
        assert_eq!(effect([80.0; 7]), Effect::Less);
        assert_eq!(effect([101.0; 7]), Effect::None);
        assert_eq!(rounds([120.0; 7]).unwrap().ratio.median, 1.2);
    }

    #[test]
    fn a_missing_effect_is_said_and_explained() {
        let name = "2/zram/engine-alone/aio";
        let text = sentence(&outcome(
            name,
            side(&[(100.0, 180.0, 128.0); 7]),
            side(&[(100.0, 40.0, 16.0); 7]),
        ));
        assert!(text.contains("no effect on IOPS here"), "{text}");
        assert!(text.contains("0.22 times the mean latency"), "{text}");
        assert!(text.contains("found 128 and finds 16"), "{text}");
        let same = side(&[(100.0, 180.0, 60.0); 7]);
        let name = "2/zram/engine-alone/io_uring";
        let text = sentence(&outcome(name, same.clone(), same));
        assert!(text.contains("worker thread of the kernel"), "{text}");
        let few = side(&[(100.0, 1.0, 1.0)]);
        let text = sentence(&outcome(name, few.clone(), few));
        assert!(text.contains("too few rounds"), "{text}");
    }
}
