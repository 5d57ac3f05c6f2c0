//! `ringhaul bench`: its patterns, its results, and its refusals.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_kit::cli::{
    EXIT_RUN, EXIT_USAGE, Finished, Refusals, Running, TestFolders, bench, ringhaul, run, serve,
};
use ringhaul_kit::daemon::{Daemon, DaemonOptions};
use ringhaul_kit::server::{Cache, Engine};
use ringhaul_kit::system::print_skipped;
use rustix::process::Signal;
use serde_json::Value;

use crate::{DISK_BYTES, test_folders};

const PATTERNS: [&str; 6] = ["read", "write", "randread", "randwrite", "rw", "randrw"];

/// The options for the layouts of rings.
const RINGS: [&str; 4] = ["", "--packed", "--indirect", "--packed --indirect"];

/// The percentiles in the keys of the JSON form.
const PERCENTILES: [&str; 17] = [
    "p1", "p5", "p10", "p20", "p30", "p40", "p50", "p60", "p70", "p80", "p90", "p95", "p99",
    "p99_5", "p99_9", "p99_95", "p99_99",
];

/// The documented keys that do not belong to one direction.
const KEYS: [&str; 53] = [
    "format_version",
    "tool_version",
    "socket_path",
    "filename",
    "device",
    "unit",
    "units",
    "rw",
    "rwmixread_percent",
    "block_size",
    "iodepth",
    "numjobs",
    "queue_size",
    "segment_size_bytes",
    "threads",
    "rate_iops",
    "rate_process",
    "busy_poll",
    "inflight",
    "packed",
    "indirect",
    "wake_delay_us",
    "fsync_every_writes",
    "randseed",
    "region_offset_bytes",
    "region_size_bytes",
    "disk_size_bytes",
    "logical_block_size_bytes",
    "ramp_time_s",
    "runtime_s",
    "interrupted",
    "verify",
    "verify_block_size_bytes",
    "verified_blocks",
    "verify_mismatches",
    "calls",
    "calls_per_s",
    "completions_per_call",
    "kicks",
    "kicks_per_s",
    "kicks_per_io",
    "server_pid",
    "server_threads",
    "server_cpu_us",
    "server_cpu_percent",
    "server_cpu_us_per_io",
    "server_cpu_user_us_per_io",
    "server_cpu_system_us_per_io",
    "server_voluntary_switches_per_io",
    "server_involuntary_switches_per_io",
    "read_ios",
    "write_ios",
    "flush_ios",
];

/// Starts a daemon with room for two jobs.
fn start(engine: Engine, cache: Cache) -> Result<Daemon> {
    let options = DaemonOptions { cache, ..DaemonOptions::new(engine) };
    Daemon::start(Path::new(env!("CARGO_TARGET_TMPDIR")), &options)
}

fn json(finished: &Finished) -> Result<Value> {
    serde_json::from_str(&finished.stdout)
        .with_context(|| format!("on stdout is no JSON:\n{}", finished.stdout))
}

/// The number at `key`.
fn number(report: &Value, key: &str) -> Result<f64> {
    let value = report.get(key).with_context(|| format!("there is no key {key}"))?;
    value.as_f64().with_context(|| format!("{key} is not a number but {value}"))
}

/// Fails unless two figures are equal up to rounding.
fn expect_same(what: &str, one: f64, other: f64) -> Result<()> {
    let difference = (one - other).abs();
    ensure!(difference <= 1e-6 * one.abs().max(other.abs()), "{what}: {one} is not {other}");
    Ok(())
}

/// Every pattern, verified, on both engines, with direct I/O and with the page cache. Each daemon
/// meets all layouts of rings.
#[test]
fn every_pattern_verifies() -> Result<()> {
    let cases = [
        (Engine::Aio, Cache::None),
        (Engine::Aio, Cache::Writeback),
        (Engine::Threads, Cache::Directsync),
        (Engine::Threads, Cache::Writethrough),
    ];
    for (first, (engine, cache)) in cases.into_iter().enumerate() {
        let daemon = start(engine, cache)?;
        for (pattern, rings) in PATTERNS.iter().zip(RINGS.iter().cycle().skip(first)) {
            let options = format!(
                "--rw {pattern} --bssplit 4k/60:512/20:64k/20 --size 4m --numjobs 2 --iodepth 8 \
                 --number_ios 200 --fsync 16 --verify --output-format json {rings}"
            );
            check_pattern(&daemon, pattern, &options)
                .with_context(|| format!("{pattern} on {engine} with cache {cache} {rings}"))?;
        }
        daemon.terminate()?;
    }
    Ok(())
}

fn check_pattern(daemon: &Daemon, pattern: &str, options: &str) -> Result<()> {
    let report = json(&run(&mut bench(daemon.socket(), options)?)?.expect_code(0)?)?;
    let (reads, writes) = (number(&report, "read_ios")?, number(&report, "write_ios")?);
    // Two jobs.
    for key in ["packed", "indirect"] {
        ensure!(report[key] == options.contains(&format!("--{key}")), "{key}: {}", report[key]);
    }
    ensure!(number(&report, "ios")? == 400.0, "{} I/Os", report["ios"]);
    ensure!((reads > 0.0) != matches!(pattern, "write" | "randwrite"), "{reads} reads");
    ensure!((writes > 0.0) != matches!(pattern, "read" | "randread"), "{writes} writes");
    ensure!((number(&report, "flush_ios")? > 0.0) == (writes > 0.0), "{}", report["flush_ios"]);
    for key in ["errors", "flush_errors", "verify_mismatches"] {
        ensure!(number(&report, key)? == 0.0, "{key}: {}", report[key]);
    }
    ensure!(number(&report, "verified_blocks")? > 0.0, "no block was verified");
    Ok(())
}

#[test]
fn json_has_the_documented_keys_and_figures_that_fit() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("disk.sock");
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let daemon = Running::serve(serve(&socket, &file)?.args(["--logical-block-size", "4096"]))?;
    let options = "--rw randrw --rwmixread 70 --bs 8k --iodepth 16 --numjobs 2 --fsync 4 \
                   --runtime 1 --ramp_time 100ms --randseed 7 --output-format json";
    let report = json(&run(&mut bench(&socket, options)?)?.expect_code(0)?)?;
    check_keys(&report)?;
    for (key, expected) in [
        ("rw", Value::from("randrw")),
        ("rwmixread_percent", 70.into()),
        ("block_size", "8k".into()),
        ("iodepth", 16.into()),
        ("numjobs", 2.into()),
        ("fsync_every_writes", 4.into()),
        ("randseed", 7.into()),
        ("disk_size_bytes", DISK_BYTES.into()),
        ("region_size_bytes", DISK_BYTES.into()),
        ("logical_block_size_bytes", 4096.into()),
        ("server_pid", daemon.pid().as_raw_nonzero().get().into()),
        ("interrupted", false.into()),
        ("errors", 0.into()),
    ] {
        ensure!(report[key] == expected, "{key}: {}, not {expected}", report[key]);
    }
    check_figures(&report)?;
    for prefix in ["", "read_", "write_", "flush_"] {
        check_latencies(&report, prefix)?;
    }
    Ok(())
}

/// Serves a null disk and returns its socket.
fn serve_null(folders: &TestFolders) -> Result<(Running, PathBuf)> {
    let socket = folders.socket("null.sock");
    let mut command = ringhaul()?;
    command.args(["serve", "--disk", "null,size=64M", "--socket-path"]).arg(&socket);
    Ok((Running::serve(&mut command)?, socket))
}

#[test]
fn an_open_loop_keeps_its_rate_beside_a_slow_server() -> Result<()> {
    let folders = test_folders()?;
    let (_daemon, socket) = serve_null(&folders)?;
    let measure = |options: &str| -> Result<Value> {
        let options = format!("--rw randread --output-format json {options}");
        json(&run(&mut bench(&socket, &options)?)?.expect_code(0)?)
    };
    let report = measure("--iodepth 4 --number_ios 200 --rate_iops 400")?;
    ensure!(report["rate_iops"] == 400 && report["rate_process"] == "linear", "{report}");
    let seconds = number(&report, "runtime_s")?;
    ensure!(seconds > 199.0 / 400.0, "200 requests were made in {seconds} s");
    // The rate is far above the server's capacity, so the last request waits for all earlier ones.
    let options = "--iodepth 1 --number_ios 3000 --rate_iops 100000000 --rate_process poisson";
    let report = measure(options)?;
    let (seconds, longest) =
        (number(&report, "runtime_s")?, number(&report, "latency_max_us")? / 1e6);
    ensure!(longest > seconds / 2.0, "none waited for more than {longest} s of {seconds}");
    Ok(())
}

#[test]
fn a_delay_follows_each_call() -> Result<()> {
    let folders = test_folders()?;
    let (_daemon, socket) = serve_null(&folders)?;
    // A rate makes the driver sleep between requests even on a busy machine. At this rate the run
    // would end sooner without delays.
    let options = "--rw randread --number_ios 40 --rate_iops 200 --wake-delay 10000 \
                   --output-format json";
    let report = json(&run(&mut bench(&socket, options)?)?.expect_code(0)?)?;
    ensure!(report["wake_delay_us"] == 10_000, "{report}");
    let (calls, seconds) = (number(&report, "calls")?, number(&report, "runtime_s")?);
    // One call may come at the start, and the last may announce nothing.
    ensure!(calls > 2.0 && seconds > (calls - 2.0) * 0.01, "{calls} calls in {seconds} s");
    Ok(())
}

/// On logical blocks of 4096 bytes smaller sizes grow; an explicit option takes precedence.
#[test]
fn a_profile_is_a_pattern_by_name() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let mut sizes = "512/10:1k/5:2k/5:4k/60:8k/2:16k/4:32k/4:64k/10";
    for block in ["512", "4096"] {
        let socket = folders.socket(block);
        let mut command = serve(&socket, &file)?;
        let daemon = Running::serve(command.args(["--logical-block-size", block]))?;
        let options = "--profile file-server --number_ios 2000 --output-format json";
        let report = json(&run(&mut bench(&socket, options)?)?.expect_code(0)?)?;
        ensure!(report["block_size"] == sizes, "{} at {block}", report["block_size"]);
        ensure!(report["rw"] == "randrw" && report["iodepth"] == 64, "{report}");
        let reads = number(&report, "read_ios")? / 2000.0;
        ensure!((0.7..0.9).contains(&reads), "{reads} of the I/Os read");
        drop(daemon);
        sizes = "4k/80:8k/2:16k/4:32k/4:64k/10";
    }
    let mut command = ringhaul()?;
    command.args(["bench", "--profile", "file-server", "--iodepth", "2", "--rw", "randread"]);
    command.args(["--number_ios", "100", "--output-format", "json", "--filename"]).arg(&file);
    let report = json(&run(&mut command)?.expect_code(0)?)?;
    ensure!(report["rw"] == "randread" && report["iodepth"] == 2, "{report}");
    Ok(())
}

fn check_keys(report: &Value) -> Result<()> {
    let directions = ["", "read_", "write_", "flush_"];
    let counts = ["ios", "iops", "bytes", "bandwidth_bytes_per_s", "errors"];
    let latencies = ["min", "max", "mean", "stddev"].into_iter().chain(PERCENTILES);
    let latencies = latencies.map(|name| format!("latency_{name}_us"));
    let of_direction: Vec<String> =
        counts.map(str::to_owned).into_iter().chain(latencies).collect();
    let keys = directions
        .iter()
        .flat_map(|prefix| of_direction.iter().map(move |key| format!("{prefix}{key}")))
        .chain(KEYS.map(str::to_owned));
    let missing: Vec<String> = keys.filter(|key| report.get(key).is_none()).collect();
    ensure!(missing.is_empty(), "keys are missing: {missing:?}");
    ensure!(report["format_version"] == 1, "format {}", report["format_version"]);
    Ok(())
}

fn check_figures(report: &Value) -> Result<()> {
    let of = |key: &str| number(report, key);
    let seconds = of("runtime_s")?;
    ensure!(seconds > 0.0, "{seconds} s");
    ensure!(of("ios")? > 0.0 && of("read_ios")? > of("write_ios")?, "not 70% of {}", of("ios")?);
    expect_same("ios", of("ios")?, of("read_ios")? + of("write_ios")?)?;
    let with_flushes = of("ios")? + of("flush_ios")?;
    for prefix in ["", "read_", "write_"] {
        let ios = of(&format!("{prefix}ios"))?;
        let bytes = of(&format!("{prefix}bytes"))?;
        let bandwidth = of(&format!("{prefix}bandwidth_bytes_per_s"))?;
        expect_same("bytes", bytes, ios * 8192.0)?;
        expect_same("iops", of(&format!("{prefix}iops"))?, ios / seconds)?;
        expect_same("bandwidth", bandwidth, bytes / seconds)?;
    }
    expect_same("calls_per_s", of("calls_per_s")?, of("calls")? / seconds)?;
    expect_same("completions", of("completions_per_call")?, with_flushes / of("calls")?)?;
    expect_same("kicks_per_s", of("kicks_per_s")?, of("kicks")? / seconds)?;
    expect_same("kicks_per_io", of("kicks_per_io")?, of("kicks")? / with_flushes)?;
    expect_same("cpu", of("server_cpu_us_per_io")?, of("server_cpu_us")? / with_flushes)?;
    let percent = of("server_cpu_us")? / seconds / 1e6 * 100.0;
    expect_same("server_cpu_percent", of("server_cpu_percent")?, percent)
}

fn check_latencies(report: &Value, prefix: &str) -> Result<()> {
    let of = |name: &str| number(report, &format!("{prefix}latency_{name}_us"));
    let mut last = of("min")?;
    for name in PERCENTILES.iter().chain(&["max"]) {
        // Histograms keep three digits.
        ensure!(of(name)? >= last * 0.999, "{prefix}{name}: {} after {last}", of(name)?);
        last = of(name)?;
    }
    ensure!((of("min")?..=of("max")?).contains(&of("mean")?), "{prefix}mean: {}", of("mean")?);
    Ok(())
}

#[test]
fn the_text_goes_to_stdout_or_a_file() -> Result<()> {
    let folders = test_folders()?;
    let daemon = start(Engine::Aio, Cache::None)?;
    let options = "--rw randrw --number_ios 100 --eta never";
    let shown = run(&mut bench(daemon.socket(), options)?)?.expect_code(0)?;
    for word in ["IOPS=", "bandwidth=", "99.90th=[", "completions per call", "of CPU per I/O"] {
        ensure!(shown.stdout.contains(word), "no {word:?} in:\n{}", shown.stdout);
    }
    ensure!(shown.stderr.is_empty(), "on stderr:\n{}", shown.stderr);
    let path = folders.path("result");
    let mut command = bench(daemon.socket(), options)?;
    let written = run(command.arg("--output").arg(&path))?.expect_code(0)?;
    ensure!(written.stdout.is_empty(), "on stdout:\n{}", written.stdout);
    ensure!(fs::read_to_string(&path)?.contains("IOPS="), "nothing in the file");
    Ok(())
}

/// The null disk keeps no data, so no block verifies.
#[test]
fn wrong_data_is_shown_and_fails() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("disk.sock");
    let mut command = ringhaul()?;
    command.args(["serve", "--disk", "null,size=1M", "--socket-path"]).arg(&socket);
    let _daemon = Running::serve(&mut command)?;
    for pattern in ["read", "randrw"] {
        let options = format!("--rw {pattern} --number_ios 20 --verify --output-format json");
        let finished = run(&mut bench(&socket, &options)?)?.expect_code(EXIT_RUN)?;
        ensure!(finished.stderr.contains("ringhaul: wrong data at offset"), "{}", finished.stderr);
        ensure!(number(&json(&finished)?, "verify_mismatches")? > 0.0, "none was counted");
    }
    Ok(())
}

#[test]
fn impossible_runs_are_refused() -> Result<()> {
    let daemon = start(Engine::Aio, Cache::None)?;
    let mut refusals = Refusals::default();
    for (options, words) in [
        ("--rw backwards", ["backwards", "randread"]),
        ("--rwmixread 101", ["101", "--rwmixread"]),
        ("--bs 0", ["--bs", "0"]),
        ("--bs 4q", ["--bs", "4q"]),
        ("--bs 1000", ["1000", "512 bytes"]),
        ("--bs 1g", ["region", "1g"]),
        ("--profile web-server", ["--profile", "file-server"]),
        ("--bssplit 4k/60:8k/60", ["--bssplit", "more than 100"]),
        ("--iodepth 0", ["--iodepth", "0"]),
        ("--iodepth 100000", ["--iodepth=100000", "use a lower --iodepth"]),
        ("--numjobs 0", ["--numjobs", "0"]),
        ("--numjobs 3", ["--numjobs=3", "the server has 2"]),
        ("--runtime 0", ["--runtime", "more than 0"]),
        ("--runtime soon", ["--runtime", "soon"]),
        ("--timeout 0", ["--timeout", "more than 0"]),
        ("--rate_iops 0", ["--rate_iops", "0"]),
        ("--rate_process poisson", ["--rate_iops", "required"]),
        ("--poll --wake-delay 1", ["--busy-poll", "--wake-delay"]),
        ("--size 1t", ["--size=1t", "not inside the disk"]),
        ("--size 100", ["--size 100", "512 bytes"]),
        ("--offset 100", ["--offset 100", "512 bytes"]),
        ("--queue-size 3", ["--queue-size=3", "power of two"]),
        ("--cpus_allowed x", ["--cpus_allowed", "list of CPUs"]),
        ("--device nvme", ["nvme", "scsi"]),
        ("--device scsi", ["is it a SCSI device?", "handshake"]),
        ("--device scsi --lun 0:99999", ["0:99999", "TARGET:LUN"]),
        ("--lun 1", ["--lun", "add --device scsi"]),
        ("--output-format xml", ["xml", "json"]),
        ("--output /nonexistent/result", ["/nonexistent/result", "--output"]),
        ("--nonsense", ["--nonsense", "unexpected"]),
    ] {
        refusals.check(options, bench(daemon.socket(), options), &words);
    }
    refusals.finish()
}

#[test]
fn a_read_only_disk_is_read_and_not_written() -> Result<()> {
    let options = DaemonOptions::new(Engine::Aio).with("--read-only", "");
    let daemon = Daemon::start(Path::new(env!("CARGO_TARGET_TMPDIR")), &options)?;
    run(&mut bench(daemon.socket(), "--rw randread --number_ios 100")?)?.expect_code(0)?;
    let mut refusals = Refusals::default();
    refusals.check(
        "write",
        bench(daemon.socket(), "--rw randwrite"),
        &["--rw=randwrite", "the disk is read-only"],
    );
    refusals.check("verify", bench(daemon.socket(), "--verify"), &["--verify", "read-only"]);
    refusals.finish()
}

#[test]
fn a_server_that_is_not_there_is_named() -> Result<()> {
    let folders = test_folders()?;
    let mut refusals = Refusals::default();
    let missing = folders.socket("missing.sock");
    refusals.check(
        "none",
        bench(&missing, ""),
        &["missing.sock", "no such socket", "start the server"],
    );
    let left_over = folders.socket("old.sock");
    drop(UnixListener::bind(&left_over)?);
    refusals.check("left over", bench(&left_over, ""), &["old.sock", "no server listens"]);
    let regular = folders.socket("regular");
    fs::write(&regular, "")?;
    refusals.check("regular file", bench(&regular, ""), &["regular", "no server listens"]);
    refusals.check(
        "no path",
        ringhaul().map(|mut command| {
            command.arg("bench");
            command
        }),
        &["--socket-path"],
    );
    refusals.finish()
}

#[test]
fn errors_have_the_form_of_the_log() -> Result<()> {
    let missing = test_folders()?.socket("missing.sock");
    let mut command = bench(&missing, "--log-format json")?;
    let finished = run(&mut command)?.expect_code(EXIT_USAGE)?;
    let line: Value = serde_json::from_str(finished.stderr.trim())
        .with_context(|| format!("not one JSON object: {}", finished.stderr))?;
    ensure!(line["level"] == "ERROR", "{line}");
    ensure!(line["message"].as_str().is_some_and(|text| text.contains("no such socket")), "{line}");
    Ok(())
}

/// The daemon's own memory: anonymous pages and mapped pages of its program and libraries. Guest
/// memory, which counts as shared once it is touched, is left out: it belongs to the guest.
fn own_memory_kib(daemon: &Running) -> Result<u64> {
    let path = format!("/proc/{}/status", daemon.pid().as_raw_nonzero());
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let field = |name: &str| -> Result<u64> {
        let value = status.lines().find_map(|line| line.strip_prefix(name));
        let value = value.with_context(|| format!("there is no {name} in {path}"))?;
        value.trim().trim_end_matches(" kB").parse().with_context(|| format!("{name}{value}"))
    };
    Ok(field("RssAnon:")? + field("RssFile:")?)
}

#[test]
fn a_daemon_with_four_queues_stays_small() -> Result<()> {
    const LIMIT_KIB: u64 = 18 << 10;
    if cfg!(debug_assertions) && std::env::var_os("RINGHAUL_BIN").is_none() {
        print_skipped("it is about release builds; set RINGHAUL_BIN to one");
        return Ok(());
    }
    for engine in ["io_uring", "aio", "threads"] {
        let folders = test_folders()?;
        let socket = folders.socket("disk.sock");
        let file = folders.disk("disk.img", DISK_BYTES)?;
        let mut command = serve(&socket, &file)?;
        let mut daemon = Running::serve(command.args(["--num-queues", "4", "--engine", engine]))?;
        let options = "--rw randrw --bssplit 4k/90:128k/10 --numjobs 4 --iodepth 64 --runtime 2 \
                       --eta always";
        let mut client = Running::start(&mut bench(&socket, options)?)?;
        client.wait_for("IOPS")?;
        let busy_kib = own_memory_kib(&daemon)?;
        client.finish()?.expect_code(0)?;
        daemon.wait_for("the front-end has disconnected")?;
        let idle_kib = own_memory_kib(&daemon)?;
        if busy_kib.max(idle_kib) >= LIMIT_KIB {
            bail!("{engine}: {busy_kib} KiB under load and {idle_kib} KiB afterwards");
        }
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}
