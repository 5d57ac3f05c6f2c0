//! `ringhaul demo`.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{EXIT_USAGE, READY, Running, ringhaul};
use rustix::process::Signal;

/// A demo whose files are in `folder`.
fn demo(folder: &Path, seconds: &str) -> Result<Command> {
    let mut demo = ringhaul()?;
    demo.args(["demo", "--size", "2", "--runtime", seconds]).env("TMPDIR", folder);
    Ok(demo)
}

/// Fails if the demo has left a file.
fn expect_empty(folder: &Path) -> Result<()> {
    ensure!(folder.read_dir()?.next().is_none(), "files are left in {}", folder.display());
    Ok(())
}

#[test]
fn a_demo_prints_figures_and_leaves_no_file() -> Result<()> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let finished = Running::start(&mut demo(folder.path(), "1")?)?.finish()?.expect_code(0)?;
    for line in ["ringhaul serve --socket-path", "IOPS", "are removed"] {
        ensure!(finished.stdout.contains(line), "no {line:?} in:\n{}", finished.stdout);
    }
    expect_empty(folder.path())
}

#[test]
fn an_interrupted_demo_leaves_no_file_and_no_process() -> Result<()> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let mut running = Running::start(&mut demo(folder.path(), "3600")?)?;
    running.wait_for(READY)?;
    running.signal(Signal::TERM)?;
    // Its standard error ends only when the daemon and the load generator have ended too.
    let finished = running.finish()?.expect_code(EXIT_USAGE)?;
    ensure!(finished.stderr.contains("interrupted"), "{}", finished.stderr);
    expect_empty(folder.path())
}
