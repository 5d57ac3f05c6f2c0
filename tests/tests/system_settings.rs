//! Engines that the system does not offer. Its settings hold for the whole machine, so this is a
//! separate test program, which cargo and `cargo xtask check` run alone.

use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, READY, Running, TestFolders, bench, ringhaul, run, serve};
use ringhaul_kit::system::{Setting, can_change_system, print_skipped};
use ringhaul_tools::process::retry;
use rustix::process::Signal;

const AIO_MAX: &str = "/proc/sys/fs/aio-max-nr";
const NO_IO_URING: &str = "/proc/sys/kernel/io_uring_disabled";

/// Tests run one at a time, because they change settings of the machine.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The expected behaviour of a daemon while settings are changed.
struct Case<'a> {
    /// The settings and their temporary values. Numbers in use do not serve as values, because they
    /// may fall while the test runs.
    settings: &'a [(&'a str, &'a str)],
    /// Engines that are not available, and words of the refusals.
    refused: &'a [(&'a str, &'a [&'a str])],
    /// The best engine, and words on the reason.
    auto: &'a [&'a str],
}

impl Case<'_> {
    fn check(&self) -> Result<()> {
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let read = || {
            let texts = self.settings.iter().map(|(path, _)| fs::read_to_string(path));
            texts.collect::<std::io::Result<Vec<_>>>().context("reading settings")
        };
        if !self
            .settings
            .iter()
            .all(|(path, _)| PathBuf::from(path).exists() && can_change_system(path))
        {
            print_skipped(&format!(
                "not all of these are there to be changed: {:?}",
                self.settings
            ));
            return Ok(());
        }
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let (file, socket) = (folders.disk("disk.img", 16 << 20)?, folders.socket("disk.sock"));
        let before = read()?;
        let changed: Vec<Setting> = self
            .settings
            .iter()
            .map(|(path, value)| Setting::change(path, value))
            .collect::<Result<_>>()?;
        let mut refusals = Vec::new();
        for (engine, words) in self.refused {
            let mut explicit = serve(&socket, &file)?;
            explicit.args(["--engine", engine]);
            refusals.push((run(&mut explicit), words));
        }
        let daemon = Running::start(&mut serve(&socket, &file)?).and_then(|mut daemon| {
            daemon.wait_for(READY)?;
            Ok(daemon)
        });
        drop(changed);

        for (refused, words) in refusals {
            refused?.expect_refusal(words)?;
        }
        let mut daemon = daemon?;
        for words in self.auto {
            ensure!(daemon.stderr().contains(words), "no {words:?}:\n{}", daemon.stderr());
        }
        let options = "--rw randrw --number_ios 200 --iodepth 8 --verify";
        run(&mut bench(&socket, options)?)?.expect_code(0)?;
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
        ensure!(read()? == before, "settings were {before:?} and are {:?}", read()?);
        Ok(())
    }
}

const AIO_REFUSED: (&str, &[&str]) = ("aio", &["Linux AIO", "fs.aio-max-nr", "sysctl", "threads"]);
const IO_URING_REFUSED: (&str, &[&str]) =
    ("io_uring", &["cannot set up io_uring", "kernel.io_uring_disabled", "sysctl", "`aio`"]);

#[test]
fn without_aio_contexts() -> Result<()> {
    Case {
        settings: &[(AIO_MAX, "0")],
        refused: &[AIO_REFUSED],
        auto: &["engine io_uring: ", "fs.aio-max-nr"],
    }
    .check()
}

/// `ctl doctor` reports contexts of Linux AIO that other programs may lack.
#[test]
fn reserved_aio_contexts_are_a_finding() -> Result<()> {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_change_system(AIO_MAX) {
        return Ok(());
    }
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let (file, socket) = (folders.disk("disk.img", 16 << 20)?, folders.socket("disk.sock"));
    let control = folders.socket("control");
    let mut command = serve(&socket, &file)?;
    let _daemon = Running::serve(command.args(["--engine", "aio", "--control"]).arg(&control))?;
    // Other programs may give back theirs in the meantime.
    retry(LIMIT, || {
        let used: u64 = fs::read_to_string("/proc/sys/fs/aio-nr")?.trim().parse()?;
        let limit = Setting::change(AIO_MAX, &used.to_string())?;
        let mut command = ringhaul()?;
        command.args(["ctl", "--control"]).arg(&control);
        let done = run(command.args(["doctor", "--time", "0.1", "--json"]));
        drop(limit);
        let answer: serde_json::Value = serde_json::from_str(&done?.stdout)?;
        let found = answer["findings"].as_array().context("no list")?;
        let finding = found.iter().find(|finding| finding["finding"] == "aio-operations");
        let finding = finding.with_context(|| format!("not found: {found:#?}"))?;
        ensure!(finding["level"] == "warning", "{finding}");
        Ok(())
    })
}

#[test]
fn without_io_uring() -> Result<()> {
    Case {
        settings: &[(NO_IO_URING, "2")],
        refused: &[IO_URING_REFUSED],
        auto: &["engine aio: ", "kernel.io_uring_disabled"],
    }
    .check()
}

#[test]
fn without_io_uring_and_aio_contexts() -> Result<()> {
    Case {
        settings: &[(AIO_MAX, "0"), (NO_IO_URING, "2")],
        refused: &[AIO_REFUSED, IO_URING_REFUSED],
        auto: &["engine threads: ", "kernel.io_uring_disabled", "fs.aio-max-nr"],
    }
    .check()
}
