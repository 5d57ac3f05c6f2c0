//! `cargo lab instructions`: the instructions that the daemon's side of a request takes, counted by
//! valgrind, in this tree and in an earlier revision.
//!
//! Time varies between runs, which hides a change of a hundredth. Instruction counts do not vary:
//! the example `instructions` of the crate `device` runs driver and device on one thread, and only
//! the turns of the loop are counted. Each case runs with two numbers of requests. Set-up cancels
//! out in the difference.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::{Interrupt, ManagedChild};
use ringhaul_tools::workspace;

/// Options of `cargo lab instructions`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also count this revision, and print the ratio
    #[arg(long, value_name = "REV")]
    base: Option<String>,

    /// Only the cases whose name contains this, such as `null` or `aio-read`
    #[arg(long, default_value = "")]
    only: String,

    /// Fail if an exactly counted case takes more than this many times the instructions of the base
    #[arg(long, value_name = "RATIO", requires = "base")]
    limit: Option<f64>,
}

/// The cases: disk, engine and kind of request. True if the count is the same each time. Kernel
/// threads and the pool add to the other counts, which are the least of [`TRIES`] runs.
const CASES: &[(&str, bool)] = &[
    ("null-threads-read", true),
    ("null-threads-read-inflight", true),
    ("null-threads-read-packed", true),
    ("null-threads-read-packed-inflight", true),
    ("null-threads-read-ordered", true),
    ("null-threads-write", true),
    ("null-threads-read10", true),
    ("null-threads-write10", true),
    ("null-uring-read", false),
    ("file-aio-read", true),
    ("file-aio-read-inflight", true),
    ("file-aio-write", true),
    ("file-uring-read", false),
    ("file-uring-write", false),
    ("file-threads-read", false),
    ("file-threads-write", false),
];

const DEPTHS: [u64; 2] = [1, 64];

/// The numbers of requests of the two runs whose difference counts.
const REQUESTS: (u64, u64) = (1280, 3840);

/// The runs of a case with a varying count.
const TRIES: usize = 3;

pub(crate) fn run(args: &Args) -> Result<()> {
    let Some(valgrind) = workspace::find_program("valgrind") else {
        bail!("valgrind is not installed: apt-get install valgrind");
    };
    let interrupt = Interrupt::install()?;
    let target = workspace::target_dir()?.join("instructions");
    let here = build(workspace::root(), &target.join("here"), &interrupt)?;
    let base = match &args.base {
        Some(revision) => {
            let tree = target.join("tree");
            extract(revision, &tree)?;
            Some(build(&tree, &target.join("base"), &interrupt)?)
        }
        None => None,
    };
    println!("instructions for each request");
    println!("{:<20} {:>5} {:>10} {:>10} {:>7}", "case", "depth", "base", "here", "ratio");
    let mut worst = 0.0_f64;
    for (case, exact) in CASES.iter().filter(|(case, _)| case.contains(&args.only)) {
        for depth in DEPTHS {
            let count = |binary: &Path| count(&valgrind, binary, case, depth, *exact);
            let here = count(&here)?;
            let about = if *exact { "" } else { "  (about)" };
            // An earlier revision may not have the case.
            let Some(base) = base.as_deref().and_then(|base| count(base).ok()) else {
                println!("{case:<20} {depth:>5} {:>10} {here:>10.1} {:>7}{about}", "", "");
                continue;
            };
            let ratio = here / base;
            println!("{case:<20} {depth:>5} {base:>10.1} {here:>10.1} {ratio:>7.4}{about}");
            if *exact {
                worst = worst.max(ratio);
            }
        }
    }
    if let Some(limit) = args.limit {
        ensure!(worst <= limit, "a case takes {worst:.4} times the instructions of the base");
    }
    Ok(())
}

/// Builds the example of a tree and returns the path of the program.
fn build(tree: &Path, target: &Path, interrupt: &Interrupt) -> Result<PathBuf> {
    let manifest = manifest_of_example(tree)?;
    let mut command = workspace::cargo();
    command.current_dir(tree).env("CARGO_TARGET_DIR", target);
    command.args(["build", "--quiet", "--release", "--example", "instructions"]);
    command.arg("--manifest-path").arg(manifest);
    ManagedChild::run("cargo", &mut command, interrupt)
        .with_context(|| format!("the example does not build in {}", tree.display()))?;
    Ok(target.join("release/examples/instructions"))
}

/// Finds the crate with the example: `device`, in older revisions `ringhaul`.
fn manifest_of_example(tree: &Path) -> Result<PathBuf> {
    let mut folders = ["crates/device", "crates/ringhaul"].iter().map(|folder| tree.join(folder));
    let folder = folders.find(|folder| folder.join("examples/instructions.rs").is_file());
    let folder = folder.with_context(|| {
        format!("{} is too old: no crate has examples/instructions.rs", tree.display())
    })?;
    Ok(folder.join("Cargo.toml"))
}

/// Makes `tree` a copy of a revision.
fn extract(revision: &str, tree: &Path) -> Result<()> {
    if tree.exists() {
        std::fs::remove_dir_all(tree).context("removing the last copy of a revision")?;
    }
    std::fs::create_dir_all(tree).with_context(|| format!("making {}", tree.display()))?;
    workspace::extract(revision, tree)
}

/// Returns the instructions for each request.
fn count(valgrind: &Path, binary: &Path, case: &str, depth: u64, exact: bool) -> Result<f64> {
    let tries = if exact { 1 } else { TRIES };
    let least = |requests: u64| -> Result<u64> {
        let mut least = u64::MAX;
        for _ in 0..tries {
            least = least.min(collect(valgrind, binary, case, depth, requests)?);
        }
        Ok(least)
    };
    let (few, many) = (least(REQUESTS.0)?, least(REQUESTS.1)?);
    let difference = many.checked_sub(few).context("more requests took fewer instructions")?;
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    Ok(difference as f64 / (REQUESTS.1 - REQUESTS.0) as f64)
}

/// Returns the count of one run.
fn collect(valgrind: &Path, binary: &Path, case: &str, depth: u64, requests: u64) -> Result<u64> {
    let output = Command::new(valgrind)
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"])
        .arg("--toggle-collect=*device_turn*")
        .arg(binary)
        .args([case, &depth.to_string(), &requests.to_string()])
        .output()
        .context("starting valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{case} at depth {depth} under valgrind:\n{text}");
    collected(&text).with_context(|| format!("valgrind has not counted {case}:\n{text}"))
}

/// Returns the number in callgrind's line `==PID== Collected : NUMBER`. `None` if nothing was
/// counted.
fn collected(text: &str) -> Option<u64> {
    let number = text.lines().find_map(|line| line.split_once("Collected :"))?.1;
    number.trim().parse().ok().filter(|count| *count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_parsed_from_the_output_of_callgrind() {
        assert_eq!(
            collected("==7== Events    : Ir\n==7== Collected : 35951621\n"),
            Some(35_951_621)
        );
        assert_eq!(collected("==7== Collected : 0\n"), None);
        assert_eq!(collected("no such program"), None);
    }

    #[test]
    fn the_example_is_found_in_its_crate_of_today_and_of_old() {
        let tree = tempfile::tempdir().unwrap();
        let add = |folder: &str| {
            let examples = tree.path().join(folder).join("examples");
            std::fs::create_dir_all(&examples).unwrap();
            std::fs::write(examples.join("instructions.rs"), "").unwrap();
        };
        assert!(manifest_of_example(tree.path()).is_err());
        for folder in ["crates/ringhaul", "crates/device"] {
            add(folder);
            let manifest = manifest_of_example(tree.path()).unwrap();
            assert_eq!(manifest, tree.path().join(folder).join("Cargo.toml"));
        }
    }

    #[test]
    fn every_case_names_a_disk_an_engine_and_a_kind() {
        for (case, _) in CASES {
            // The case may name the ring's layout, and end with an inflight region.
            let case = case.strip_suffix("-inflight").unwrap_or(case);
            let case = case.strip_suffix("-packed").unwrap_or(case);
            let case = case.strip_suffix("-ordered").unwrap_or(case);
            assert_eq!(case.split('-').count(), 3, "{case}");
        }
    }
}
