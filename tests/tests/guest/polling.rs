//! Polled completion on a disk that has it: the disk of a guest that polls one of its queues. The
//! daemon under test serves the disk from the host, and runs in the guest as well.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::guest::shared_libraries;
use ringhaul_kit::server::{Cache, Engine, Export, ringhaul_binary};
use serde_json::Value;

use super::{LIMIT, Scene, boot, check_clean_exit, check_same_bytes, scenario, with};

const POLLING_START: &str = include_str!("../../guest/polling-start.sh");
const POLLING: &str = include_str!("../../guest/polling.sh");

/// Reads and writes of all sizes.
const LOAD: &str = "--rw randrw --bssplit 4k/60:512/20:64k/20 --iodepth 16 --number_ios 500 \
                    --size 8m --verify";

/// The result of a run in the guest.
struct Outcome {
    /// Interrupts of all queues of the disk.
    interrupts: u64,
    log: String,
    report: Value,
}

impl Outcome {
    fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines();
        let count = lines.next().and_then(|line| line.strip_prefix("interrupts "));
        let interrupts = count.context("no number of interrupts")?.parse()?;
        let rest: Vec<&str> = lines.collect();
        let (log, report): (Vec<&str>, Vec<&str>) =
            rest.into_iter().partition(|line| line.starts_with("log "));
        let report = serde_json::from_str(&report.join("\n")).context("reading the report")?;
        Ok(Self { interrupts, log: log.join("\n"), report })
    }

    fn check(&self, ios: u64) -> Result<()> {
        let report = &self.report;
        ensure!(report["ios"] == ios, "{report}");
        for key in ["errors", "flush_errors", "verify_mismatches"] {
            ensure!(report[key] == 0, "{key}: {report}");
        }
        ensure!(report["verified_blocks"].as_f64() > Some(0.0), "{report}");
        Ok(())
    }
}

#[test]
fn completions_are_polled_for() -> Result<()> {
    scenario(polling)
}

fn polling() -> Result<()> {
    let scene = Scene::new()?;
    let disk = scene.export("polled", Engine::IoUring, Cache::None)?;
    let tools = Export {
        file: tools_disk(&scene)?,
        read_only: true,
        ..scene.export("tools", Engine::Aio, Cache::None)?
    };
    let mut servers = [scene.serve(&disk)?, scene.serve(&tools)?];
    let mut vm = boot(&[&disk, &tools])?;
    let io_poll = vm.check(POLLING_START, LIMIT)?;
    assert_eq!(io_poll, "1", "the driver has no queue to poll");
    let mut run = |serve: &str, bench: &str| -> Result<Outcome> {
        let text = vm.check(&with(POLLING, &[("SERVE", serve), ("BENCH", bench)]), LIMIT)?;
        Outcome::parse(&text).with_context(|| format!("in the guest's output:\n{text}"))
    };

    let engine = "--engine io_uring --iopoll";
    let outcome = run("", &format!("{LOAD} {engine} --numjobs 2"))?;
    outcome.check(1000)?;
    assert_eq!(outcome.report["polled"], 1000, "{}", outcome.report);
    // The last flush may cause one.
    assert!(outcome.interrupts <= 1, "{} interrupts", outcome.interrupts);

    // The depth exceeds the size of the queue.
    let deep = "--rw randrw --iodepth 700 --number_ios 3000 --verify";
    let outcome = run("", &format!("{deep} {engine}"))?;
    outcome.check(3000)?;
    assert!(outcome.interrupts <= 1, "{} interrupts", outcome.interrupts);

    for more in [
        "--cache none",
        "--cache directsync --poll-max-us 0",
        "--cache none --sqpoll",
        "--cache none --fixed-buffers --harvest-on-submit off --submit-batch off",
    ] {
        let counters = "--log info,ringhaul::threads::engines=debug";
        let outcome = run(&format!("{engine} {more} {counters}"), &format!("{LOAD} --fsync 25"))?;
        outcome.check(500).with_context(|| more.to_owned())?;
        check_server(&outcome).with_context(|| format!("{more}:\n{}", outcome.log))?;
    }
    vm.check("umount /mnt", LIMIT)?;
    check_same_bytes(&mut vm, "vda", &disk.file)?;
    vm.power_off(LIMIT)?;
    servers.iter_mut().try_for_each(check_clean_exit)
}

/// Checks that all reads and writes of the server were polled for, and that only its flushes caused
/// interrupts.
fn check_server(outcome: &Outcome) -> Result<()> {
    let summary = outcome.log.lines().find(|line| line.contains("polled for"));
    let summary = summary.context("no summary")?;
    let count = |what: &str| -> Result<u64> {
        let before = summary.split(what).next().unwrap_or_default();
        let word = before.trim_end().rsplit(' ').next().unwrap_or_default();
        word.parse().with_context(|| format!("no number of{what} in {summary}"))
    };
    let transfers = count(" reads")? + count(" writes")?;
    ensure!(transfers >= 500, "only {transfers} reads and writes");
    ensure!(count(" polled for")? == transfers, "not all {transfers} were polled for");
    let flushes = count(" flushes")?;
    ensure!(flushes > 0, "no flush");
    let interrupts = outcome.interrupts;
    // The start reads the front and the end of the disk, and the last flush may cause one.
    ensure!(interrupts <= flushes + 3, "{interrupts} interrupts, {flushes} flushes");
    Ok(())
}

/// Makes a file system with the daemon, its libraries and their loader.
fn tools_disk(scene: &Scene) -> Result<PathBuf> {
    const TOOLS_BYTES: u64 = 256 * 1024 * 1024;
    let folder = scene.disks.path().join("tools");
    fs::create_dir(&folder).context("making a folder")?;
    let program = ringhaul_binary()?;
    for file in shared_libraries(&program)?.iter().chain([&program]) {
        let name = file.file_name().context("a library without a name")?;
        fs::copy(file, folder.join(name)).with_context(|| format!("copying {}", file.display()))?;
    }
    let disk = scene.disks.path().join("tools-disk.img");
    fs::File::create(&disk)
        .and_then(|file| file.set_len(TOOLS_BYTES))
        .with_context(|| format!("making {}", disk.display()))?;
    let status = Command::new("/sbin/mke2fs")
        .args(["-q", "-t", "ext4", "-d"])
        .args([&folder, &disk])
        .status()
        .context("running mke2fs; apt-get install e2fsprogs")?;
    ensure!(status.success(), "mke2fs on the host ended with {status}");
    Ok(disk)
}
