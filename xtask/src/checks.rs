//! `cargo xtask check`: every check of the tree, and a summary.

use std::fmt;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ringhaul_tools::process::{Interrupt, describe};
use ringhaul_tools::workspace;

use crate::fuzz;
use crate::limited_run::{self, End, Limits};
use crate::schedule::{Next, Schedule, usual_seconds};
use crate::steps::{self, Step, TEST_MINUTES};

/// Options of `cargo xtask check`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also documentation, dependencies and the tests with real guests
    #[arg(long)]
    all: bool,
}

/// The outcome of a check.
enum Outcome {
    Passed(Duration),
    /// The reason, and the failures that the output reports.
    Failed(String, Vec<String>),
    Skipped(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed(time) => write!(out, "passed after {:.1} s", time.as_secs_f64()),
            Self::Failed(how, _) => write!(out, "FAILED: {how}"),
            Self::Skipped(reason) => write!(out, "skipped: {reason}"),
        }
    }
}

/// Runs all checks, even if one fails, and prints a summary.
pub(crate) fn run(args: &Args) -> Result<()> {
    let interrupt = Interrupt::install()?;
    let binary = if args.all { Some(binary()?) } else { None };
    let (absent, steps): (Vec<_>, Vec<_>) =
        steps::selected(args.all).partition(|step| missing(step).is_some());
    let skipped = |step: &'static Step| {
        missing(step).map(|reason| (step.name, Outcome::Skipped(reason.to_owned())))
    };
    let mut outcomes: Vec<(&str, Outcome)> = absent.into_iter().filter_map(skipped).collect();
    let (start, expected) = (Instant::now(), time_text(usual_seconds(&steps)));
    println!("{} checks: {expected} on two idle cores after `cargo clean`", steps.len());
    let mut schedule = Schedule::new(&steps);
    std::thread::scope(|scope| -> Result<()> {
        let (sender, ends) = mpsc::channel();
        loop {
            while let Some(next) = schedule.next() {
                let index = match next {
                    Next::Begin(index) => index,
                    Next::Skip(index, failed) => {
                        let outcome = Outcome::Skipped(format!("{failed} has failed"));
                        println!("== {}: {outcome}", steps[index].name);
                        outcomes.push((steps[index].name, outcome));
                        continue;
                    }
                };
                let (step, sender) = (steps[index], sender.clone());
                let (usual, so_far) = (time_text(step.usual), time_text(start.elapsed().as_secs()));
                println!("== {}, expected {usual}; elapsed {so_far} of {expected}", step.name);
                let (interrupt, binary) = (&interrupt, binary.as_deref());
                // The receiver is gone after an error of another step.
                scope.spawn(move || {
                    let _ = sender.send((index, execute(step, binary, interrupt)));
                });
            }
            if !schedule.is_running() {
                return Ok(());
            }
            let (index, outcome) = ends.recv().context("a step has ended without an outcome")?;
            let outcome = outcome?;
            schedule.end(index, matches!(outcome, Outcome::Passed(_)));
            println!("== {}: {outcome}", steps[index].name);
            outcomes.push((steps[index].name, outcome));
        }
    })?;
    println!("== summary after {}", time_text(start.elapsed().as_secs()));
    summarize(&outcomes)
}

fn time_text(seconds: u64) -> String {
    if seconds < 120 { format!("{seconds} s") } else { format!("{} min", seconds.div_ceil(60)) }
}

/// The missing tool of a check that needs an optional tool.
fn missing(step: &Step) -> Option<&'static str> {
    match step.name {
        "dependencies" => workspace::find_program("cargo-deny")
            .is_none()
            .then_some("cargo-deny is missing: cargo install --locked cargo-deny"),
        "fuzz" => fuzz::missing(),
        _ => None,
    }
}

fn execute(step: &Step, binary: Option<&Path>, interrupt: &Interrupt) -> Result<Outcome> {
    let mut command = step.command();
    if let Some(binary) = binary.filter(|_| step.needs_binary()) {
        command.env("RINGHAUL_BIN", binary);
    }
    // Its output goes through a pipe.
    if std::io::stdout().is_terminal() && std::env::var_os("CARGO_TERM_COLOR").is_none() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    let start = Instant::now();
    let limits = Limits { whole: minutes(step.minutes), test: minutes(TEST_MINUTES) };
    Ok(match limited_run::run(step.name, &mut command, limits, true, interrupt)? {
        End::Ended(status, _) if status.success() => Outcome::Passed(start.elapsed()),
        End::Ended(status, failures) => {
            let reason = format!("{} of: {}", describe(status), step.command_line());
            Outcome::Failed(reason, failures)
        }
        End::Overdue(reason) => Outcome::Failed(reason, Vec::new()),
    })
}

fn minutes(count: u64) -> Duration {
    Duration::from_secs(60 * count)
}

/// The daemon of the end-to-end tests: the user's, or the release build.
fn binary() -> Result<PathBuf> {
    let binary = match std::env::var_os("RINGHAUL_BIN") {
        Some(binary) => binary.into(),
        None => workspace::target_dir()?.join("release/ringhaul"),
    };
    std::path::absolute(binary).context("finding the release build")
}

fn summarize(outcomes: &[(&str, Outcome)]) -> Result<()> {
    for (name, outcome) in outcomes {
        println!("{name:<25} {outcome}");
    }
    let mut failed = 0;
    for (name, outcome) in outcomes {
        if let Outcome::Failed(_, lines) = outcome {
            failed += 1;
            // The last lines of a run are the ones that a CI service keeps.
            for line in lines {
                println!("{name}: {line}");
            }
        }
    }
    if failed > 0 {
        bail!("{failed} of {} checks failed", outcomes.len());
    }
    println!("no check failed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_fails_all() {
        let passed = || ("a", Outcome::Passed(Duration::ZERO));
        let failed = ("b", Outcome::Failed("exit status 1".to_owned(), Vec::new()));
        summarize(&[passed(), ("c", Outcome::Skipped("why".to_owned()))]).unwrap();
        let error = summarize(&[passed(), failed]).unwrap_err();
        assert_eq!(error.to_string(), "1 of 2 checks failed");
    }
}
