//! What was promised, against what was measured.

use super::plan::{self, Cell, Load, Through};
use super::run::Outcome;
use super::verdict::{self, Change, Effect, HARVESTED_MAX, HARVESTED_P50, short_number};
use crate::lab::spread::number;
use crate::lab::targets::Target;

/// One promise.
pub(super) struct Goal {
    pub(super) promise: String,
    /// What was measured; None if that was not.
    pub(super) measured: Option<String>,
    pub(super) met: bool,
}

/// All promises.
pub(super) fn check(outcomes: &[Outcome]) -> Vec<Goal> {
    let mut goals = vec![more_iops(
        find(outcomes, 1, Target::Zram, Through::Engine, "aio", plan::DEPTH_1),
        "step 1, engine alone, zram, depth 1: at least 1.10 times the IOPS",
        1.10,
    )];
    goals.extend(early_harvest(outcomes));
    for target in Target::ALL {
        let at =
            |load| find(outcomes, 3, target, Through::Daemon, plan::plain_engine(target), load);
        goals.push(more_iops(
            at(plan::DEPTH_64_JOBS_8),
            &format!("step 3, {target}, 8 jobs, depth 64: at least 1.09 times the IOPS"),
            1.09,
        ));
        goals.push(not_less(
            at(plan::DEPTH_1),
            &format!("step 3, {target}, depth 1: at most 1% fewer IOPS, within the spread"),
        ));
    }
    for target in [Target::Null, Target::Zram] {
        let engine = plan::plain_engine(target);
        goals.push(more_iops(
            find(outcomes, 5, target, Through::Daemon, engine, plan::DEPTH_64),
            &format!("everything on, {target}, depth 64: at least 1.5 times the IOPS"),
            1.5,
        ));
    }
    for (target, limit) in [(Target::Null, 0.1), (Target::Zram, 0.2), (Target::Loop, 0.2)] {
        let engine = plan::plain_engine(target);
        let outcome = find(outcomes, 5, target, Through::Daemon, engine, plan::DEPTH_64);
        let calls = outcome.and_then(|outcome| outcome.on.system_calls_per_io());
        goals.push(Goal {
            promise: format!("everything on, {target}, depth 64: under {limit} system calls/I/O"),
            measured: calls.map(number),
            met: calls.is_some_and(|calls| calls < limit),
        });
    }
    goals
}

fn find<'a>(
    outcomes: &'a [Outcome],
    experiment: usize,
    target: Target,
    through: Through,
    engine: &str,
    load: Load,
) -> Option<&'a Outcome> {
    let is = |cell: &Cell| {
        cell.experiment == experiment
            && cell.target == target
            && cell.through == through
            && cell.engine == engine
            && cell.load == load
    };
    outcomes.iter().find(|outcome| is(&outcome.cell))
}

fn more_iops(outcome: Option<&Outcome>, promise: &str, least: f64) -> Goal {
    let change = outcome.and_then(verdict::iops);
    Goal {
        promise: promise.to_owned(),
        measured: change.map(|change| change.ratio.show()),
        met: change.is_some_and(|change| change.ratio.median >= least),
    }
}

/// At most a hundredth less, or nothing that stands out of the spread.
fn not_less(outcome: Option<&Outcome>, promise: &str) -> Goal {
    let change = outcome.and_then(verdict::iops);
    let holds = |change: Change| change.ratio.median >= 0.99 || change.effect() != Effect::Less;
    Goal {
        promise: promise.to_owned(),
        measured: change.map(|change| change.ratio.show()),
        met: change.is_some_and(holds),
    }
}

fn early_harvest(outcomes: &[Outcome]) -> Vec<Goal> {
    let at = |target| find(outcomes, 2, target, Through::Engine, "aio", plan::FLIGHT_128_BY_16);
    let batches = |target, index| -> Option<(f64, f64)> {
        let outcome = at(target)?;
        Some((outcome.off.harvested(index)?, outcome.on.harvested(index)?))
    };
    let pair = |pair: Option<(f64, f64)>| {
        pair.map(|(off, on)| format!("{} before, {} after", short_number(off), short_number(on)))
    };
    let full = batches(Target::Zram, HARVESTED_MAX);
    let zram = batches(Target::Zram, HARVESTED_P50);
    let on_loop = batches(Target::Loop, HARVESTED_P50);
    let latency = |target, promise: &str, most: f64| {
        let change = at(target).and_then(verdict::latency);
        Goal {
            promise: promise.to_owned(),
            measured: change.map(|change| format!("{} times", change.ratio.show())),
            met: change.is_some_and(|change| change.ratio.median <= most),
        }
    };
    let depth = f64::from(plan::FLIGHT_128_BY_16.depth);
    vec![
        Goal {
            promise: "step 2, aio on zram, 128 in flight by 16: the ring no longer found full \
                      (99.99th percentile of completions at once)"
                .to_owned(),
            measured: pair(full),
            met: full.is_some_and(|(off, on)| off >= depth && on < depth),
        },
        Goal {
            promise: "the same: median batch at most a quarter of before".to_owned(),
            measured: pair(zram),
            met: zram.is_some_and(|(off, on)| on <= off / 4.0),
        },
        latency(Target::Zram, "the same: mean completion latency at most half of before", 0.5),
        Goal {
            promise: "step 2, aio on loop, 128 in flight by 16: lower median batch".to_owned(),
            measured: pair(on_loop),
            met: on_loop.is_some_and(|(off, on)| on < off),
        },
        latency(Target::Loop, "the same: lower mean completion latency", 0.999),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::verdict::tests::{outcome, side};

    #[test]
    fn promises_are_met_missed_or_not_measured() {
        let outcomes = [
            outcome(
                "2/zram/engine-alone/aio",
                side(&[(100.0, 180.0, 128.0); 7]),
                side(&[(100.0, 100.0, 16.0); 7]),
            ),
            outcome(
                "5/zram/daemon/aio/randread-4k-depth-64",
                side(&[(100.0, 1.0, 1.0); 7]),
                side(&[(160.0, 1.0, 1.0); 7]),
            ),
        ];
        let goals = check(&outcomes);
        let goal = |words: &str| {
            let mut found = goals.iter().filter(|goal| goal.promise.contains(words));
            let goal = found.next().unwrap_or_else(|| panic!("no {words}"));
            (goal.measured.clone(), goal.met)
        };
        assert_eq!(goal("no longer found full").0.unwrap(), "128 before, 16 after");
        assert!(goal("no longer found full").1);
        assert!(goal("median batch at most a quarter").1);
        assert!(!goal("latency at most half").1, "100 of 180 is more than half");
        assert!(goal("everything on, zram, depth 64: at least").1);
        assert!(!goal("zram, depth 64: under 0.2").1, "0.5 are too many");
        assert_eq!(goal("step 1"), (None, false));
    }
}
