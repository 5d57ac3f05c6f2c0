//! `cargo xtask mutants`: breaks the code on purpose and demands that a suite notices.
//!
//! Each file in `crates/sim/mutants` is a patch. Its head describes the fault, and names the suite
//! that must fail. A suite is `sim`, the arguments of a `cargo test`, or an end-to-end suite with
//! the names of its tests, such as `hostile memory`, which runs the broken daemon.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::Interrupt;
use ringhaul_tools::workspace;

use crate::limited_run::{self, End, Limits};
use crate::long_tests;

/// Options of `cargo xtask mutants`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,

    /// Run every Nth mutant, beginning with the Kth: parts can run at the same time, each with a
    /// CARGO_TARGET_DIR of its own
    #[arg(long, value_name = "K/N", value_parser = Shard::parse)]
    part: Option<Shard>,

    /// Only check that every patch still applies
    #[arg(long)]
    check: bool,

    /// Seeds of the simulation, of which one must fail
    #[arg(long, default_value_t = 20_000)]
    seeds: u64,
}

/// Every `of`th mutant, beginning with number `first` (from 0).
#[derive(Clone, Copy)]
struct Shard {
    first: usize,
    of: usize,
}

impl Shard {
    fn parse(text: &str) -> Result<Self> {
        let (first, of) = text.split_once('/').context("not of the form K/N")?;
        let (first, of) = (first.parse::<usize>()?, of.parse::<usize>()?);
        ensure!((1..=of).contains(&first), "part {first} of {of} does not exist");
        Ok(Self { first: first - 1, of })
    }
}

/// The time limit of a suite.
const LIMIT: Duration = Duration::from_secs(600);

/// Suites of the package `ringhaul-tests`, which start the daemon.
const END_TO_END: &[&str] = &["cli", "device", "faults", "hostile"];

/// The number of tries of a suite that waits for a race of two threads.
const RACES: u32 = 8;

/// A fault to put into the code.
struct Mutant {
    name: String,
    path: PathBuf,
    fault: String,
    suite: String,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut mutants = list()?;
    if !args.only.is_empty() {
        mutants.retain(|mutant| args.only.contains(&mutant.name));
        ensure!(mutants.len() == args.only.len(), "crates/sim/mutants has no such mutant");
    }
    if let Some(Shard { first, of }) = args.part {
        mutants = mutants.into_iter().skip(first).step_by(of).collect();
    }
    for mutant in &mutants {
        let applied = git_apply(workspace::root(), &mutant.path, &["--check"]);
        applied.with_context(|| format!("mutant {} does not apply any more", mutant.name))?;
    }
    if args.check {
        check_listed_files()?;
        println!("mutants: {} patches apply", mutants.len());
        return Ok(());
    }
    let interrupt = Interrupt::install()?;
    let copy = TreeCopy::new()?;
    copy.check_suites(&mutants, &interrupt)?;
    let mut left = Vec::new();
    for mutant in &mutants {
        let start = Instant::now();
        copy.restore()?;
        git_apply(&copy.tree, &mutant.path, &[])?;
        // An undecided mutant does not stop the rest.
        let verdict = copy.is_caught(mutant, args.seeds, &interrupt);
        interrupt.check()?;
        let Mutant { name, fault, suite, .. } = mutant;
        let seconds = start.elapsed().as_secs_f64();
        let verdict = match verdict {
            Ok(true) => "caught".to_owned(),
            Ok(false) => "SURVIVED".to_owned(),
            Err(error) => format!("UNDECIDED ({error:#})"),
        };
        println!("{verdict:<8} {name:<28} {seconds:>5.1} s  by {suite}: {fault}");
        if verdict != "caught" {
            left.push(name.as_str());
        }
    }
    ensure!(left.is_empty(), "not caught: {}", left.join(", "));
    println!("mutants: {} of {} caught", mutants.len(), mutants.len());
    Ok(())
}

/// Checks that the files that cargo-mutants examines exist.
fn check_listed_files() -> Result<()> {
    let path = workspace::root().join(".cargo/mutants.toml");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    for line in text.lines() {
        let Some((listed, _)) = line.trim().strip_prefix('"').and_then(|it| it.split_once('"'))
        else {
            continue;
        };
        let place = listed.trim_end_matches("/*.rs");
        ensure!(
            workspace::root().join(place).exists(),
            "{} lists {listed}, which is not there",
            path.display()
        );
    }
    Ok(())
}

/// The mutants, by name.
fn list() -> Result<Vec<Mutant>> {
    let folder = workspace::root().join("crates/sim/mutants");
    let mut mutants = Vec::new();
    for entry in folder.read_dir().with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("reading {}", path.display()))?;
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name));
            let value = value.with_context(|| format!("{} has no line `{name}`", path.display()));
            value.map(|value| value.trim().to_owned())
        };
        let (fault, suite) = (field("fault:")?, field("suite:")?);
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        mutants.push(Mutant { name, path, fault, suite });
    }
    mutants.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(mutants)
}

fn git_apply(tree: &Path, patch: &Path, options: &[&str]) -> Result<()> {
    let mut command = Command::new("git");
    // The copy is in a folder that the surrounding repository ignores; git must not find that
    // repository.
    command.env("GIT_CEILING_DIRECTORIES", tree.parent().unwrap_or(tree));
    command.current_dir(tree).arg("apply").args(options).arg(patch);
    let output = command.output().context("running git apply")?;
    if !output.status.success() {
        bail!("git apply: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// A copy of the tree to break, below the target directory, where builds are reused.
struct TreeCopy {
    tree: PathBuf,
    target: PathBuf,
}

impl TreeCopy {
    fn new() -> Result<Self> {
        let folder = workspace::target_dir()?.join("mutants");
        let (tree, target) = (folder.join("tree"), folder.join("target"));
        if tree.exists() {
            std::fs::remove_dir_all(&tree).context("removing the last copy of the tree")?;
        }
        Ok(Self { tree, target })
    }

    /// Makes the copy equal to the tree. Does not touch equal files, which cargo would rebuild.
    fn restore(&self) -> Result<()> {
        for name in ["Cargo.toml", "Cargo.lock", "clippy.toml", "rustfmt.toml"] {
            copy_if_changed(&workspace::root().join(name), &self.tree.join(name))?;
        }
        for name in ["contrib", "crates", "docs", "tests", "tools", "xtask"] {
            copy_folder(&workspace::root().join(name), &self.tree.join(name))?;
        }
        Ok(())
    }

    /// Checks that the suites of these mutants pass on intact code: a suite that lacks something it
    /// needs would fail with every mutant. The simulation needs nothing, and a race may be missed.
    fn check_suites(&self, mutants: &[Mutant], interrupt: &Interrupt) -> Result<()> {
        let suites = mutants.iter().map(|mutant| mutant.suite.as_str());
        let suites: BTreeSet<&str> = suites.filter(|suite| *suite != "sim").collect();
        for suite in suites.into_iter().filter(|suite| !is_race(suite)) {
            self.restore()?;
            let words: Vec<&str> = suite.split_ascii_whitespace().collect();
            let passes = match is_end_to_end(suite) {
                true => {
                    self.cargo(BUILD_DAEMON, interrupt)?
                        && self.cargo(&end_to_end(&words), interrupt)?
                }
                false => self.cargo(&words, interrupt)?,
            };
            let tree = self.tree.display();
            ensure!(
                passes,
                "the suite `{suite}` fails as it is, or does not build; run it in {tree} to see why"
            );
            ensure!(self.has_tests(&words)?, "the suite `{suite}` names no test");
        }
        Ok(())
    }

    /// Returns true if a suite has a test: with a name that has changed, every mutant would
    /// survive.
    fn has_tests(&self, words: &[&str]) -> Result<bool> {
        let suite = words.join(" ");
        let all = match is_end_to_end(&suite) {
            true => [&end_to_end(words)[..], &["--list"]].concat(),
            false => [words, &["--", "--list"]].concat(),
        };
        let output = self.command(&all).stderr(Stdio::null()).output();
        let output = output.with_context(|| format!("listing the tests of `{suite}`"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.lines().any(|line| line.ends_with(": test")))
    }

    /// Returns true if the mutant's suite fails.
    ///
    /// # Errors
    /// If the mutant does not compile.
    fn is_caught(&self, mutant: &Mutant, seeds: u64, interrupt: &Interrupt) -> Result<bool> {
        let seeds = seeds.to_string();
        let words: Vec<&str> = mutant.suite.split_ascii_whitespace().collect();
        let (build, suite) = match words[..] {
            ["sim"] => (
                [&["build"], long_tests::SIM_PACKAGE].concat(),
                [
                    &["run"],
                    long_tests::SIM_PACKAGE,
                    &["--", "--no-shrink", "--seeds", seeds.as_str()],
                ]
                .concat(),
            ),
            ["test", ..] => ([&words[..], &["--no-run"]].concat(), words),
            _ if is_end_to_end(&mutant.suite) => (BUILD_DAEMON.to_vec(), end_to_end(&words)),
            _ => bail!("mutant {}: unknown suite `{}`", mutant.name, mutant.suite),
        };
        ensure!(self.cargo(&build, interrupt)?, "mutant {} does not compile", mutant.name);
        // A race shows only at times, so such a suite gets a few tries.
        let tries = if is_race(&mutant.suite) { RACES } else { 1 };
        for _ in 0..tries {
            if !self.cargo(&suite, interrupt)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes a cargo command in the copy.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = workspace::cargo();
        command.current_dir(&self.tree).args(arguments);
        command.env("CARGO_TARGET_DIR", &self.target).env("RUST_BACKTRACE", "0");
        command.env("RINGHAUL_BIN", self.target.join("debug/ringhaul"));
        command
    }

    /// Returns true if a cargo command in the copy succeeds.
    fn cargo(&self, arguments: &[&str], interrupt: &Interrupt) -> Result<bool> {
        let mut command = self.command(arguments);
        command.stderr(Stdio::null());
        let limits = Limits { whole: LIMIT, test: LIMIT };
        match limited_run::run("cargo", &mut command, limits, false, interrupt)? {
            End::Ended(status, _) => Ok(status.success()),
            End::Overdue(what) => bail!("the suite {what}"),
        }
    }
}

/// The build of the daemon for an end-to-end suite.
const BUILD_DAEMON: &[&str] = &["build", "--package", "ringhaul-cli"];

fn is_end_to_end(suite: &str) -> bool {
    suite.split_ascii_whitespace().next().is_some_and(|name| END_TO_END.contains(&name))
}

/// The command for an end-to-end suite and the names of its tests.
fn end_to_end<'a>(words: &[&'a str]) -> Vec<&'a str> {
    let (suite, tests) = words.split_at(words.len().min(1));
    [&["test", "--package", "ringhaul-tests", "--test"], suite, &["--"], tests].concat()
}

fn is_race(suite: &str) -> bool {
    suite.ends_with("litmus")
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("making {}", to.display()))?;
    for entry in from.read_dir().with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy_folder(&from, &to)?;
        } else {
            copy_if_changed(&from, &to)?;
        }
    }
    Ok(())
}

fn copy_if_changed(from: &Path, to: &Path) -> Result<()> {
    if !from.exists() {
        return Ok(());
    }
    let content = std::fs::read(from).with_context(|| format!("reading {}", from.display()))?;
    if std::fs::read(to).ok().as_ref() != Some(&content) {
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(to, content).with_context(|| format!("writing {}", to.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_numbered_from_one() {
        let Shard { first, of } = Shard::parse("2/3").unwrap();
        assert_eq!((first, of), (1, 3));
        for text in ["0/2", "3/2", "1", "1/0", "a/b"] {
            assert!(Shard::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_mutant_applies_and_names_its_fault() {
        let mutants = list().unwrap();
        assert!(mutants.len() >= 10);
        for Mutant { name, path, suite, .. } in mutants {
            let is_known = suite == "sim" || suite.starts_with("test ") || is_end_to_end(&suite);
            assert!(is_known, "{name}: suite {suite}");
            git_apply(workspace::root(), &path, &["--check"]).unwrap();
        }
    }
}
