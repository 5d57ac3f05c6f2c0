//! Makes a failing run shorter while it fails in the same way.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::failure::Failure;
use crate::plan::{KNOBS, Plan};
use crate::run;

/// Shrinking ends after this time.
const LIMIT: Duration = Duration::from_secs(20);

/// Orders of events to try for each smaller plan.
const SCHEDULES: u64 = 12;

/// Finds a smaller plan that fails like `plan` with `failure`.
pub(crate) fn shrink(mut plan: Plan, mut failure: Failure) -> Result<(Plan, Failure)> {
    let start = Instant::now();
    let mut shrunk = true;
    while shrunk {
        shrunk = false;
        for &(name, least) in KNOBS {
            if name == "schedule" {
                continue;
            }
            while start.elapsed() < LIMIT {
                let Some((smaller, how)) = smaller(&plan, name, least, failure.kind)? else {
                    break;
                };
                (plan, failure, shrunk) = (smaller, how, true);
            }
        }
    }
    Ok((plan, failure))
}

/// A plan with a smaller `name` that fails, if there is one.
fn smaller(plan: &Plan, name: &str, least: u64, kind: &str) -> Result<Option<(Plan, Failure)>> {
    let value = plan.clone().knob(name).map_or(0, |value| *value);
    let mut candidates = vec![least, u64::midpoint(least, value), value.saturating_sub(1)];
    candidates.retain(|candidate| *candidate < value && *candidate >= least);
    candidates.dedup();
    for candidate in candidates {
        let mut smaller = plan.clone();
        if let Some(knob) = smaller.knob(name) {
            *knob = candidate;
        }
        for schedule in 0..SCHEDULES {
            smaller.schedule = plan.schedule + schedule;
            if let Err(failure) = run::run(&smaller, false)?
                && failure.kind == kind
            {
                return Ok(Some((smaller, failure)));
            }
        }
    }
    Ok(None)
}
