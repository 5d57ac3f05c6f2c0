//! `ringhaul bench --filename`: a file or a device driven through an engine, without a server.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Refusals, Running, ringhaul, run, serve};
use serde_json::Value;

use crate::{DISK_BYTES, test_folders};

const ENGINES: [&str; 4] = ["auto", "io_uring", "aio", "threads"];

fn bench_file(path: &Path, options: &str) -> Result<Command> {
    let mut command = ringhaul()?;
    command.arg("bench").arg("--filename").arg(path).args(options.split_whitespace());
    Ok(command)
}

fn json(command: &mut Command) -> Result<Value> {
    let finished = run(command.args(["--output-format", "json"]))?.expect_code(0)?;
    serde_json::from_str(&finished.stdout)
        .with_context(|| format!("on stdout is no JSON:\n{}", finished.stdout))
}

fn number(report: &Value, key: &str) -> Result<f64> {
    report[key].as_f64().with_context(|| format!("{key} is {}", report[key]))
}

/// Every engine, with direct I/O and without, reads back its writes.
#[test]
fn every_engine_verifies() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    for engine in ENGINES {
        for (pattern, direct) in [("randrw", "on"), ("write", "off"), ("randread", "1")] {
            let options = format!(
                "--engine {engine} --direct {direct} --rw {pattern} --bssplit 4k/60:512/20:64k/20 \
                 --size 4m --numjobs 2 --iodepth 8 --number_ios 200 --fsync 16 --verify"
            );
            let report = json(&mut bench_file(&file, &options)?)
                .with_context(|| format!("{pattern} on {engine}, direct {direct}"))?;
            ensure!(report["ios"] == 400, "{} I/Os", report["ios"]);
            for key in ["errors", "flush_errors", "verify_mismatches"] {
                ensure!(report[key] == 0, "{engine} {pattern} {key}: {}", report[key]);
            }
            ensure!(number(&report, "verified_blocks")? > 0.0, "no block was verified");
        }
    }
    Ok(())
}

#[test]
fn a_disk_that_cannot_be_polled_is_still_driven() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let options = "--engine io_uring --iopoll --direct off --rw randrw --numjobs 2 --iodepth 8 \
                   --size 4m --number_ios 200 --verify";
    let report = json(&mut bench_file(&file, options)?)?;
    ensure!(report["ios"] == 400 && report["errors"] == 0, "{report}");
    ensure!(report["iopoll"] == true && report["polled"] == 0, "{report}");
    Ok(())
}

#[test]
fn ops_go_through_a_submission_thread() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let options = "--engine io_uring --sqpoll --rw randrw --numjobs 2 --iodepth 8 --size 4m \
                   --number_ios 200 --verify";
    let report = json(&mut bench_file(&file, options)?)?;
    ensure!(report["ios"] == 400 && report["errors"] == 0, "{report}");
    ensure!(report["sqpoll"] == true && report["verify_mismatches"] == 0, "{report}");
    Ok(())
}

#[test]
fn the_report_has_figures_of_the_engine() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let options = "--engine aio --rw randrw --iodepth 32 --iodepth-batch 8 --number_ios 4000";
    let report = json(&mut bench_file(&file, options)?)?;
    ensure!(report["filename"] == file.display().to_string(), "{}", report["filename"]);
    for key in ["socket_path", "queue_size"] {
        ensure!(report[key].is_null(), "{key}: {}", report[key]);
    }
    for (key, value) in [("engine", "aio".into()), ("iodepth_batch", Value::from(8))] {
        ensure!(report[key] == value, "{key}: {}", report[key]);
    }
    // The last submit has fewer than eight ops, and a submit may be taken in part.
    let submit = number(&report, "ops_per_submit")?;
    ensure!((7.0..=8.0).contains(&submit), "{submit} ops for each submit");
    ensure!(number(&report, "submitted_at_once_p99_99")? == 8.0, "not eight at once");
    let harvest = number(&report, "harvested_at_once_p99_99")?;
    ensure!((1.0..=32.0).contains(&harvest), "{harvest} harvested at once, of 32");
    let calls = number(&report, "syscalls_io_submit")?;
    ensure!((500.0..=600.0).contains(&calls), "{calls} io_submit for 4000 I/Os");
    let all = number(&report, "syscalls")?;
    ensure!(number(&report, "syscalls_per_io")? == all / 4000.0, "system calls: {all}");
    for prefix in ["", "read_", "write_"] {
        let of = |name: &str| number(&report, &format!("{prefix}{name}"));
        let mean = of("completion_latency_mean_us")?;
        ensure!(mean > 0.0 && mean <= of("latency_mean_us")? * 1.05, "{prefix}: {mean} us");
    }
    ensure!(number(&report, "server_cpu_us_per_io")? > 0.0, "no CPU time");
    let text = run(&mut bench_file(&file, "--number_ios 10 --engine aio")?)?.expect_code(0)?.stdout;
    for word in ["engine aio", "completions harvested", "completion latency", "this process"] {
        ensure!(text.contains(word), "no {word:?} in:\n{text}");
    }
    Ok(())
}

/// A switch turns off one step alone.
#[test]
fn steps_can_be_switched_off() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let figures = |engine: &str, switch: &str| {
        let options = format!("--engine {engine} {switch} --iodepth 16 --number_ios 2000");
        json(&mut bench_file(&file, &options)?)
    };
    let report = figures("aio", "--completion-ring getevents")?;
    ensure!(number(&report, "syscalls_io_getevents")? > 0.0, "no io_getevents");
    let report = figures("aio", "")?;
    ensure!(number(&report, "syscalls_io_getevents")? == 0.0, "{report}");
    for engine in ["aio", "io_uring"] {
        let report = figures(engine, "--submit-batch off")?;
        ensure!(number(&report, "submitted_at_once_p99_99")? == 1.0, "{engine}: {report}");
        let report = figures(engine, "")?;
        ensure!(number(&report, "submitted_at_once_p99_99")? > 1.0, "{engine}: {report}");
        let report = figures(engine, "--harvest-on-submit off")?;
        ensure!(report["harvest_on_submit"] == false, "{report}");
        ensure!(report["ios"] == 2000, "{engine}: {} I/Os", report["ios"]);
    }
    Ok(())
}

#[test]
fn files_that_cannot_be_used_are_refused() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let small = folders.disk("small.img", 1000)?;
    let missing = folders.path("missing.img");
    let mut refusals = Refusals::default();
    let name = |path: &Path| path.display().to_string();
    let (file_name, small_name, missing_name) = (name(&file), name(&small), name(&missing));
    for (path, options, words) in [
        (&missing, "", [&*missing_name, "check the path"]),
        (&small, "", [&small_name, "truncate -s"]),
        (&file, "--engine io", ["--engine", "aio"]),
        (&file, "--direct maybe", ["--direct", "off"]),
        (&file, "--iodepth 4 --iodepth-batch 5", ["--iodepth-batch=5", "--iodepth=4"]),
        (&file, "--iodepth 70000", ["--iodepth=70000", "65535"]),
        (&file, "--numjobs 300", ["--numjobs=300", "256"]),
        (&file, "--poll-max-us 20000", ["--poll-max-us", "20000"]),
        (&file, "--engine aio --iopoll", ["--iopoll is for engine io_uring", "not aio"]),
        (&file, "--busy-poll", ["--busy-poll", "--filename"]),
        (&file, "--socket-path s", ["--socket-path", "--filename"]),
        (&file, "--bs 1000", ["1000", "512 bytes"]),
    ] {
        refusals.check(options, bench_file(path, options), &words);
    }
    refusals.check("folder", bench_file(Path::new("/"), ""), &["use / as", "directory"]);
    refusals.check("null", bench_file(Path::new("/dev/null"), ""), &["/dev/null", "regular file"]);
    // A file that a daemon serves is not written, and is read only if the daemon only reads.
    let socket = folders.socket("disk.sock");
    let _daemon = Running::serve(&mut serve(&socket, &file)?)?;
    refusals.check("in use", bench_file(&file, "--rw write"), &[&file_name, "locked"]);
    refusals.check("in use", bench_file(&file, "--verify"), &[&file_name, "locked"]);
    refusals.check("in use", bench_file(&file, ""), &[&file_name, "locked", "use --lock off"]);
    json(&mut bench_file(&file, "--lock off --number_ios 10")?)?;
    refusals.finish()
}

/// A pattern that only reads takes no right to write, which the lock of the daemon denies, and
/// changes nothing.
#[test]
fn reads_do_not_change_a_file() -> Result<()> {
    let folders = test_folders()?;
    let path = folders.path("disk.img");
    let content: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_le_bytes).collect();
    fs::write(&path, &content)?;
    let socket = folders.socket("disk.sock");
    let _daemon = Running::serve(serve(&socket, &path)?.arg("--read-only"))?;
    let mut refusals = Refusals::default();
    refusals.check("read by another", bench_file(&path, "--rw write"), &["disk.img", "locked"]);
    refusals.finish()?;
    json(&mut bench_file(&path, "--rw randread --number_ios 500 --iodepth 4")?)?;
    ensure!(fs::read(&path)? == content, "the file has changed");
    Ok(())
}
