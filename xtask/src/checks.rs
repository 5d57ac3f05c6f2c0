//! `cargo xtask check`: every check of the tree, and a summary.

use std::fmt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ringhaul_tools::process::{Interrupt, describe};
use ringhaul_tools::workspace;

use crate::limited_run::{self, End, Limits};
use crate::{fuzz, long_tests};

/// Options of `cargo xtask check`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also documentation, dependencies and the tests with real guests
    #[arg(long)]
    all: bool,
}

/// A check: a name and a cargo command line.
struct Step {
    name: &'static str,
    cargo: &'static str,
    /// True if the kernel is a simulated one.
    is_simulated: bool,
    /// An environment variable of its command.
    env: Option<(&'static str, &'static str)>,
    /// True if the later checks need it to pass.
    essential: bool,
    /// True if the quick run skips it.
    slow: bool,
    /// The seconds that it takes on two idle cores after `cargo clean`.
    usual: u64,
    /// The time limit in minutes. It only ends a hopeless wait: on a slow and busy machine a step
    /// takes a fraction of it.
    minutes: u64,
}

const STEP: Step = Step {
    name: "",
    cargo: "",
    is_simulated: false,
    env: None,
    essential: false,
    slow: false,
    usual: 1,
    minutes: 60,
};

const SLOW: Step = Step { slow: true, ..STEP };

/// The time limit of a single test in minutes. A guest without KVM that waits for other tests takes
/// a fraction of it.
const TEST_MINUTES: u64 = 30;

const STEPS: &[Step] = &[
    Step { name: "format", cargo: "fmt --all --check", ..STEP },
    Step { name: "format, lab", cargo: "fmt --manifest-path lab/Cargo.toml --check", ..STEP },
    Step { name: "tidy", cargo: "run --quiet --package xtask tidy", usual: 20, ..STEP },
    Step {
        name: "clippy",
        cargo: "clippy --workspace --all-targets -- --deny warnings",
        usual: 135,
        ..STEP
    },
    Step {
        // Other packages of the workspace switch its features on.
        name: "clippy, blockio alone",
        cargo: "clippy --package blockio --no-default-features --lib -- --deny warnings",
        usual: 15,
        ..STEP
    },
    Step {
        // Code with a simulated kernel is a separate build.
        name: "clippy, simulation",
        cargo: "clippy --package ringhaul-sim --package blockio --package ringhaul-cli \
                -- --deny warnings",
        is_simulated: true,
        usual: 85,
        ..SLOW
    },
    Step {
        name: "clippy, lab",
        cargo: "clippy --manifest-path lab/Cargo.toml --all-targets -- --deny warnings",
        usual: 20,
        ..SLOW
    },
    Step {
        name: "documentation",
        cargo: "doc --workspace --no-deps --document-private-items",
        // Private items are documented too, so links to them are fine.
        env: Some(("RUSTDOCFLAGS", "--deny warnings --allow rustdoc::private-intra-doc-links")),
        usual: 20,
        ..SLOW
    },
    Step {
        name: "dependencies",
        // Not the advisories: they change without the tree, and are fetched from the network.
        cargo: "deny --workspace check bans licenses sources",
        ..SLOW
    },
    Step {
        name: "release build",
        cargo: "build --release --package ringhaul-cli",
        essential: true,
        usual: 240,
        minutes: 120,
        ..SLOW
    },
    Step {
        // A missing fence has an effect in optimised code only.
        name: "fences",
        cargo: "test --release --package virtqueue --test it litmus",
        usual: 40,
        ..SLOW
    },
    Step {
        name: "simulation",
        cargo: "run --quiet --package xtask sim --seeds 20000",
        usual: 240,
        ..SLOW
    },
    Step {
        name: "tests, simulation",
        cargo: "test --package ringhaul-sim",
        is_simulated: true,
        usual: 25,
        ..SLOW
    },
    Step {
        name: "tests, simulated futures",
        cargo: "test --package blockio --lib contract_tests::simulated",
        is_simulated: true,
        usual: 45,
        ..SLOW
    },
    Step {
        name: "tests",
        cargo: "test --workspace --no-fail-fast",
        usual: 1450,
        minutes: 240,
        ..SLOW
    },
    Step { name: "tests, lab", cargo: "test --manifest-path lab/Cargo.toml", usual: 25, ..SLOW },
    Step { name: "models", cargo: "run --quiet --package xtask loom", usual: 185, ..SLOW },
    Step {
        name: "fuzz",
        cargo: "run --quiet --package xtask fuzz --seconds 60",
        usual: 600,
        ..SLOW
    },
];

/// The tests of the quick run, in place of `tests`.
const QUICK_TESTS: &[Step] = &[
    Step { name: "unit tests", cargo: "test --workspace --lib --bins", usual: 240, ..STEP },
    // They take seconds, and detect most faults of a ring.
    Step { name: "rings", cargo: "test --package virtqueue --test it", usual: 20, ..STEP },
    Step { name: "sessions", cargo: "test --package vhost-user --test session", usual: 20, ..STEP },
];

/// The outcome of a check.
enum Outcome {
    Passed(Duration),
    Failed(String),
    Skipped(&'static str),
}

impl fmt::Display for Outcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed(time) => write!(out, "passed after {:.1} s", time.as_secs_f64()),
            Self::Failed(how) => write!(out, "FAILED: {how}"),
            Self::Skipped(reason) => write!(out, "skipped: {reason}"),
        }
    }
}

/// Runs all checks, even if one fails, and prints a summary.
pub(crate) fn run(args: &Args) -> Result<()> {
    let interrupt = Interrupt::install()?;
    let mut outcomes: Vec<(&str, Outcome)> = Vec::new();
    let mut blocked = false;
    let (start, expected) = (Instant::now(), time_text(usual_seconds(args.all)));
    let count = selected(args.all).count();
    println!("{count} checks: {expected} on two idle cores after `cargo clean`");
    for step in selected(args.all) {
        let (usual, so_far) = (time_text(step.usual), time_text(start.elapsed().as_secs()));
        println!("== {}, expected {usual}; elapsed {so_far} of {expected}", step.name);
        let outcome = if blocked {
            Outcome::Skipped("the release build failed")
        } else if let Some(missing) = missing(step) {
            Outcome::Skipped(missing)
        } else {
            execute(step, args.all, &interrupt)?
        };
        blocked |= step.essential && matches!(outcome, Outcome::Failed(_));
        println!("== {}: {outcome}", step.name);
        outcomes.push((step.name, outcome));
    }
    println!("== summary after {}", time_text(start.elapsed().as_secs()));
    summarize(&outcomes)
}

/// The time that all checks take on two idle cores after `cargo clean`.
fn usual_seconds(all: bool) -> u64 {
    selected(all).filter(|step| missing(step).is_none()).map(|step| step.usual).sum()
}

fn time_text(seconds: u64) -> String {
    if seconds < 120 { format!("{seconds} s") } else { format!("{} min", seconds.div_ceil(60)) }
}

fn selected(all: bool) -> impl Iterator<Item = &'static Step> {
    let quick_tests = if all { &[] } else { QUICK_TESTS };
    STEPS.iter().filter(move |step| all || !step.slow).chain(quick_tests)
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

fn execute(step: &Step, with_binary: bool, interrupt: &Interrupt) -> Result<Outcome> {
    let mut command = workspace::cargo();
    let words = words(step);
    command.args(&words).envs(step.env);
    if with_binary && step.name == "tests" {
        set_binary(&mut command)?;
    }
    let start = Instant::now();
    let limits = Limits { whole: minutes(step.minutes), test: minutes(TEST_MINUTES) };
    Ok(match limited_run::run(step.name, &mut command, limits, true, interrupt)? {
        End::Ended(status) if status.success() => Outcome::Passed(start.elapsed()),
        End::Ended(status) => {
            Outcome::Failed(format!("{} of: cargo {}", describe(status), words.join(" ")))
        }
        End::Overdue(what) => Outcome::Failed(what),
    })
}

/// The words of the command line after `cargo`.
fn words(step: &Step) -> Vec<&str> {
    let mut words: Vec<&str> = step.cargo.split_whitespace().collect();
    if step.is_simulated {
        words.splice(1..1, ["--config", long_tests::SIM_CONFIG, "--profile", "sim"]);
    }
    words
}

fn minutes(count: u64) -> Duration {
    Duration::from_secs(60 * count)
}

/// Sets the daemon of the end-to-end tests, unless the user has set it.
fn set_binary(command: &mut Command) -> Result<()> {
    if std::env::var_os("RINGHAUL_BIN").is_none() {
        let binary = workspace::target_dir()?.join(Path::new("release/ringhaul"));
        command.env("RINGHAUL_BIN", std::path::absolute(binary)?);
    }
    Ok(())
}

fn summarize(outcomes: &[(&str, Outcome)]) -> Result<()> {
    for (name, outcome) in outcomes {
        println!("{name:<25} {outcome}");
    }
    let failed =
        outcomes.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Failed(_))).count();
    if failed > 0 {
        bail!("{failed} of {} checks failed", outcomes.len());
    }
    println!("no check failed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: &[&str] = &[
        "format",
        "format, lab",
        "tidy",
        "clippy",
        "clippy, blockio alone",
        "unit tests",
        "rings",
        "sessions",
    ];

    #[test]
    fn the_quick_run_skips_slow_steps() {
        let names = |all| selected(all).map(|step| step.name).collect::<Vec<_>>();
        assert_eq!(names(false), QUICK);
        let slow = ["fences", "simulation", "tests, simulation", "tests, simulated futures"];
        let last = ["tests", "tests, lab", "models", "fuzz"];
        assert!(names(true).ends_with(&[&slow[..], &last[..]].concat()));
    }

    #[test]
    fn every_step_has_time_for_its_tests_and_an_end() {
        for Step { name, minutes, .. } in selected(true).chain(QUICK_TESTS) {
            assert!((TEST_MINUTES + 1..=240).contains(minutes), "{name}");
        }
    }

    #[test]
    fn one_failure_fails_all() {
        let passed = || ("a", Outcome::Passed(Duration::ZERO));
        let failed = ("b", Outcome::Failed("exit status 1".to_owned()));
        summarize(&[passed(), ("c", Outcome::Skipped("why"))]).unwrap();
        let error = summarize(&[passed(), failed]).unwrap_err();
        assert_eq!(error.to_string(), "1 of 2 checks failed");
    }
}
