//! `cargo xtask sanitize`: unit tests and the simulation under AddressSanitizer with LeakSanitizer,
//! and unit tests under valgrind where it works.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use ringhaul_tools::process::{Interrupt, ManagedChild};
use ringhaul_tools::workspace;

use crate::long_tests;

/// AddressSanitizer supports few targets; this is the project's.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Packages for valgrind with filters for their unit tests. Valgrind does not support the rings of
/// Linux AIO and io_uring: it does not see the kernel fill them, so everything read from them
/// counts as uninitialised. Nor does it support tests that map files: rustix reads the page size
/// from the vDSO, which valgrind hides.
const UNDER_VALGRIND: [(&str, &[&str]); 5] = [
    ("iomem", &[]),
    ("blockio", &["op::", "stats::", "poll_window::", "task::", "engine::threads::"]),
    ("virtqueue", &["--test", "it", "queue::", "chains::"]),
    ("ringhaul-device", &["blk::", "buffer_budget::"]),
    ("ringhaul", &["options::", "rate_limit::"]),
];

/// Tests that are too slow under valgrind, or unsupported since they wait for the kernel.
const SKIPPED: [&str; 4] = [
    "foreign_op::",
    "ops_that_block_have_a_thread_each_up_to_the_limit",
    "with_event_idx_the_event_decides_through_the_whole_wrap",
    "a_chain_of_four_gibibytes_is_too_long",
];

/// Options of `cargo xtask sanitize`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seeds of the simulation to run under AddressSanitizer
    #[arg(long, default_value_t = 15_000, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
}

/// Runs everything, and reports a missing tool.
pub(crate) fn run(args: &Args) -> Result<()> {
    let interrupt = Interrupt::install()?;
    match workspace::nightly() {
        Some(cargo) => {
            tests(cargo, &interrupt)?;
            let cargo = workspace::nightly().context(workspace::NO_NIGHTLY)?;
            simulation(cargo, args.seeds, &interrupt)?;
        }
        None => println!("sanitize: AddressSanitizer skipped: {}", workspace::NO_NIGHTLY),
    }
    match workspace::find_program("valgrind") {
        Some(valgrind) => memcheck(&valgrind, &interrupt)?,
        None => println!("sanitize: valgrind skipped: it is not installed"),
    }
    Ok(())
}

fn tests(mut cargo: Command, interrupt: &Interrupt) -> Result<()> {
    println!("sanitize: tests under AddressSanitizer and LeakSanitizer");
    cargo
        .args(["test", "--no-fail-fast", "--lib", "--test", "it"])
        .args(["--package", "blockio", "--package", "virtqueue"])
        .args(["--package", "ringhaul-device", "--package", "ringhaul", "--package", "disks"])
        .env("PROPTEST_CASES", "64");
    address_sanitizer("the tests", cargo, "", &[], interrupt)
}

fn simulation(mut cargo: Command, seeds: u64, interrupt: &Interrupt) -> Result<()> {
    println!("sanitize: {seeds} seeds of the simulation under AddressSanitizer and LeakSanitizer");
    cargo.arg("run").args(long_tests::SIM_PACKAGE);
    let options = ["--seeds", &seeds.to_string()];
    address_sanitizer("the simulation", cargo, long_tests::SIM_RUSTFLAGS, &options, interrupt)
}

/// Makes `cargo` build with AddressSanitizer and `flags` of rustc, and run the result with `args`.
fn address_sanitizer(
    name: &str,
    mut cargo: Command,
    flags: &str,
    args: &[&str],
    interrupt: &Interrupt,
) -> Result<()> {
    cargo
        .args(["--target", TARGET, "--"])
        .args(args)
        .env("CARGO_TARGET_DIR", workspace::target_dir()?.join("sanitize"))
        .env("RUSTFLAGS", format!("-Zsanitizer=address {flags}"))
        // A test checks that a process ends by SIGBUS.
        .env("ASAN_OPTIONS", "handle_sigbus=0");
    ManagedChild::run(&format!("{name} under AddressSanitizer"), &mut cargo, interrupt)
}

fn memcheck(valgrind: &PathBuf, interrupt: &Interrupt) -> Result<()> {
    for (package, words) in UNDER_VALGRIND {
        println!("sanitize: valgrind memcheck, {package}");
        let (kind, filters) = match words {
            ["--test", name, filters @ ..] => (vec!["--test", name], filters),
            filters => (vec!["--lib"], filters),
        };
        let binary = test_binary(package, &kind)?;
        let mut command = Command::new(valgrind);
        command
            .args(["--quiet", "--error-exitcode=99", "--leak-check=full"])
            .args(["--errors-for-leak-kinds=definite", "--fair-sched=yes"])
            .arg(binary)
            .arg("--test-threads=1")
            .args(SKIPPED.iter().flat_map(|name| ["--skip", name]))
            .args(filters)
            .env("PROPTEST_CASES", "4");
        ManagedChild::run(&format!("{package} under valgrind"), &mut command, interrupt)?;
    }
    Ok(())
}

/// Builds tests and returns their binary.
fn test_binary(package: &str, kind: &[&str]) -> Result<PathBuf> {
    let output = workspace::cargo()
        .args(["test", "--no-run", "--message-format", "json", "--package", package])
        .args(kind)
        .stderr(Stdio::inherit())
        .output()
        .context("running cargo test --no-run")?;
    if !output.status.success() {
        bail!("building the tests of {package} failed; its messages are above");
    }
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["profile"]["test"] == true)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .with_context(|| format!("cargo names no test binary of {package}"))
}
