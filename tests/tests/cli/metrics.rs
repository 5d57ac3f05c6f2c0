//! Metrics: the HTTP server, the text, and the counters over a takeover.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, TestFolders, bench, ringhaul, run, serve};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk};
use ringhaul_kit::page::{Page, Shell, replaced};
use ringhaul_kit::prometheus::get;
use ringhaul_tools::process::retry;
use rustix::process::Signal;
use serde_json::Value;

use crate::takeover::TAKEN;
use crate::{DISK_BYTES, test_folders};

/// The requests of one load.
const REQUESTS: u64 = 400;

/// A daemon with a new disk, a control socket, and metrics on a Unix socket.
fn begin(folders: &TestFolders) -> Result<Command> {
    folders.disk("disk.img", DISK_BYTES)?;
    let mut command = serve(&folders.socket("vm.sock"), &folders.path("disk.img"))?;
    command.args(["--name", "vm"]).arg("--control").arg(folders.socket("control"));
    let socket = folders.socket("metrics");
    command.arg("--metrics").arg(format!("unix:{}", socket.display()));
    Ok(command)
}

fn load(folders: &TestFolders) -> Result<()> {
    let options = format!("--rw randread --number_ios {REQUESTS}");
    run(&mut bench(&folders.socket("vm.sock"), &options)?)?.expect_code(0)?;
    Ok(())
}

fn metrics(folders: &TestFolders) -> Result<String> {
    let (head, body) = get(UnixStream::connect(folders.socket("metrics"))?, "/metrics")?;
    ensure!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    Ok(body)
}

/// The value of the sample with this name and these labels.
fn value(text: &str, sample: &str) -> Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    let value = line.with_context(|| format!("{sample} is not in {text}"))?;
    value.parse().with_context(|| format!("{sample} is {value}"))
}

const READS: &str = "ringhaul_request_duration_seconds_count{export=\"vm\",op=\"read\"}";

#[test]
fn the_metrics_count_requests_and_satisfy_promtool() -> Result<()> {
    let folders = test_folders()?;
    let mut daemon = Running::serve(&mut begin(&folders)?)?;
    load(&folders)?;
    let text = metrics(&folders)?;
    ensure!(value(&text, READS)? == REQUESTS, "{text}");
    let bytes = value(&text, "ringhaul_request_bytes_total{export=\"vm\",op=\"read\"}")?;
    ensure!(bytes == REQUESTS * 4096, "{bytes} bytes");
    ensure!(value(&text, "ringhaul_disk_state{export=\"vm\",state=\"ready\"}")? == 1, "{text}");
    ensure!(value(&text, "ringhaul_export_connected{export=\"vm\"}")? == 0, "{text}");
    let shown =
        run(ringhaul()?.args(["ctl", "--control"]).arg(folders.socket("control")).arg("metrics"))?;
    let shown = shown.expect_code(0)?.stdout;
    ensure!(value(&shown, READS)? == REQUESTS, "{shown}");
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting promtool; `make setup` installs it")?;
    promtool.stdin.take().context("promtool has no stdin")?.write_all(text.as_bytes())?;
    let checked = promtool.wait_with_output()?;
    let complaints = String::from_utf8_lossy(&checked.stderr);
    ensure!(checked.status.success() && complaints.is_empty(), "{complaints}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    ensure!(!folders.socket("metrics").exists(), "the socket is left");
    Ok(())
}

/// The least size in the bucket of this number.
fn least_of(log2: u32) -> u64 {
    log2.checked_sub(1).map_or(1, |below| (1 << below) + 1)
}

/// Each step shares its cost among the requests of a batch.
#[test]
fn the_sizes_of_batches_add_up_to_the_requests() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = Running::serve(&mut begin(&folders)?)?;
    let options = format!("--rw randread --number_ios {REQUESTS} --iodepth 32");
    run(&mut bench(&folders.socket("vm.sock"), &options)?)?.expect_code(0)?;
    let mut ctl = ringhaul()?;
    ctl.args(["ctl", "--json", "--control"]).arg(folders.socket("control")).arg("stats");
    let shown: Value = serde_json::from_str(&run(&mut ctl)?.expect_code(0)?.stdout)?;
    let queue = &shown["exports"][0]["queues"][0];
    let text = metrics(&folders)?;
    for step in ["submit", "harvest", "call"] {
        let batches = &queue[format!("{step}-batches")];
        let buckets = batches["buckets"].as_array().with_context(|| format!("{step}: {queue}"))?;
        let buckets: Vec<u64> = buckets.iter().filter_map(Value::as_u64).collect();
        let sum = batches["sum"].as_u64().context("no sum")?;
        let count: u64 = buckets.iter().sum();
        let least: u64 = buckets.iter().zip(0..).map(|(count, log2)| count * least_of(log2)).sum();
        ensure!(buckets.len() == 9 && least <= sum, "{step}: {sum} in {buckets:?}");
        if step == "call" {
            // Answers after the last call belong to no call, and a forced call has no answer.
            let calls = queue["calls"].as_u64().context("no calls")?;
            ensure!(sum <= REQUESTS && count > 0 && count <= calls, "{queue}");
        } else {
            // No batch exceeds the depth, whose bucket is the sixth.
            let most: u64 = buckets[..6].iter().zip(0..).map(|(count, log2)| count << log2).sum();
            ensure!(sum == REQUESTS && sum <= most, "{step}: {sum} in {buckets:?}");
            // A daemon that is faster than its driver has batches of one.
            ensure!(count <= REQUESTS && buckets[6..] == [0; 3], "{step}: {buckets:?}");
        }
        let name = format!("ringhaul_queue_{step}_batch_size");
        let of = "{export=\"vm\"}";
        ensure!(value(&text, &format!("{name}_sum{of}"))? == sum, "{text}");
        ensure!(value(&text, &format!("{name}_count{of}"))? == count, "{text}");
        let first = format!("{name}_bucket{{export=\"vm\",le=\"1\"}}");
        ensure!(value(&text, &first)? == buckets[0], "{text}");
    }
    Ok(())
}

#[test]
fn the_pages_are_served_over_tcp() -> Result<()> {
    let folders = test_folders()?;
    // A port that was free a moment ago.
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
    folders.disk("disk.img", DISK_BYTES)?;
    let mut command = serve(&folders.socket("vm.sock"), &folders.path("disk.img"))?;
    let mut daemon = Running::serve(command.args(["--metrics", &address.to_string()]))?;
    for (page, status) in [
        ("/metrics", "200 OK"),
        ("/-/healthy", "200 OK"),
        ("/-/ready", "200 OK"),
        ("/", "404 Not Found"),
    ] {
        let (head, _) = get(TcpStream::connect(address)?, page)?;
        ensure!(head.starts_with(&format!("HTTP/1.1 {status}")), "{page}: {head}");
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The commands of docs/guide/monitoring.md, in one shell from the daemon's start on.
#[test]
fn the_commands_of_the_page_find_the_daemon() -> Result<()> {
    let folders = test_folders()?;
    folders.disk("vm1.img", DISK_BYTES)?;
    // The port is free again when the listener is dropped.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port().to_string();
    let (page, shell) = (Page::read("guide/monitoring.md")?, Shell::new(&folders.path(""))?);
    let mut commands = Vec::new();
    for words in ["--metrics", "ctl top", "ctl doctor"] {
        let block = page.block("console", words)?.replace("\\\n", "");
        commands
            .extend(block.lines().filter_map(|line| line.strip_prefix("$ ")).map(str::to_owned));
    }
    let [variable, serve, queries @ ..] = &commands[..] else { anyhow::bail!("{commands:?}") };
    let mut daemon = shell.serve(&replaced(serve, &[("9750", &port)])?)?;
    for query in queries {
        let query = query.replace("9750", &port);
        let seen = shell.try_run(&format!("{variable}; {query}"))?;
        // Status 1 of `doctor` is a finding, such as a kernel without a part of the sandbox.
        let is_doctor = query.contains("ctl doctor");
        let is_done = seen.status.success() || is_doctor && seen.status.code() == Some(1);
        ensure!(is_done && (is_doctor || seen.stdout.contains("vm1")), "{query}: {seen:?}");
    }
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

#[test]
fn an_address_in_use_is_refused() -> Result<()> {
    let folders = test_folders()?;
    let used = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = used.local_addr()?.to_string();
    folders.disk("disk.img", DISK_BYTES)?;
    let mut command = serve(&folders.socket("vm.sock"), &folders.path("disk.img"))?;
    let refused = run(command.args(["--metrics", &address]))?;
    refused.expect_refusal(&["cannot listen on", &address, "choose another --metrics"])
}

#[test]
fn counters_survive_a_takeover_and_not_a_restart() -> Result<()> {
    const START: &str = "ringhaul_start_time_seconds";
    let folders = test_folders()?;
    let begun = now()?;
    let old = Running::serve(&mut begin(&folders)?)?;
    load(&folders)?;
    let before = metrics(&folders)?;
    let start = value(&before, START)?;
    ensure!((begun..=now()?).contains(&start), "it began at {begun}, and says {start}");
    let mut new = Running::start(&mut taking_over(&folders)?)?;
    new.wait_for(TAKEN)?;
    old.finish()?.expect_code(0)?;
    let after = wait_for_metrics(&folders)?;
    for (sample, count) in counters(&before) {
        let now = counters(&after).find(|(name, _)| *name == sample);
        let now = now.with_context(|| format!("{sample} is gone"))?.1;
        ensure!(now >= count, "{sample} was {count} and is {now}");
    }
    load(&folders)?;
    let text = metrics(&folders)?;
    ensure!(value(&text, READS)? == 2 * REQUESTS, "{text}");
    ensure!(value(&text, START)? == start, "the start time has changed");
    new.signal(Signal::TERM)?;
    new.finish()?.expect_code(0)?;
    let begun = now()?;
    let mut again = Running::serve(&mut begin(&folders)?)?;
    let text = metrics(&folders)?;
    ensure!(value(&text, READS)? == 0, "a new daemon has old counters");
    let start = value(&text, START)?;
    ensure!((begun..=now()?).contains(&start), "it began at {begun}, and says {start}");
    again.signal(Signal::TERM)?;
    again.finish()?.expect_code(0)?;
    Ok(())
}

/// The seconds since 1970.
fn now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}

/// All samples of counters and histograms, with their values.
fn counters(text: &str) -> impl Iterator<Item = (&str, f64)> {
    let kinds = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let grows = kinds.filter_map(|kind| {
        let (name, kind) = kind.split_once(' ')?;
        (kind != "gauge").then_some(name)
    });
    let grows: Vec<&str> = grows.collect();
    text.lines().filter_map(move |line| {
        let (sample, value) = line.rsplit_once(' ')?;
        let name = sample.split('{').next()?;
        let is_one = |family: &&str| {
            let suffix = name.strip_prefix(*family);
            suffix.is_some_and(|suffix| ["", "_bucket", "_sum", "_count"].contains(&suffix))
        };
        grows.iter().any(is_one).then_some((sample, value.parse().ok()?))
    })
}

/// The metrics of a process that has just taken over: it listens when the old one has ended.
fn wait_for_metrics(folders: &TestFolders) -> Result<String> {
    retry(LIMIT, || metrics(folders).map(drop))?;
    metrics(folders)
}

/// Errors have a cause, and latencies their longest since the last reading.
#[test]
fn stats_have_the_same_counters() -> Result<()> {
    let folders = test_folders()?;
    let mut daemon = Running::serve(&mut begin(&folders)?)?;
    load(&folders)?;
    let stats = || -> Result<Value> {
        let mut ctl = ringhaul()?;
        ctl.args(["ctl", "--json", "--control"]).arg(folders.socket("control")).arg("stats");
        Ok(serde_json::from_str(&run(&mut ctl)?.expect_code(0)?.stdout)?)
    };
    let first = stats()?;
    let read = &first["exports"][0]["operations"][0];
    ensure!(read["operation"] == "read" && read["requests"] == REQUESTS, "{read}");
    let buckets = read["latency-buckets"].as_array().context("no buckets")?;
    let sum: u64 = buckets.iter().filter_map(Value::as_u64).sum();
    ensure!(sum == REQUESTS && buckets.len() == 24, "{read}");
    let max = read["latency-max-ns"].as_u64().context("no maximum")?;
    ensure!(max > 0 && read["latency-sum-ns"].as_u64() >= Some(max), "{read}");
    ensure!(first["exports"][0]["depth-peak"].as_u64() >= Some(1), "{first}");
    let second = &stats()?["exports"][0];
    ensure!(second["operations"][0]["latency-max-ns"] == 0, "{second}");
    ensure!(second["operations"][0]["requests"] == REQUESTS, "{second}");
    // Another kind of reader has its own peaks.
    let max = "ringhaul_request_duration_max_seconds{export=\"vm\",op=\"read\"} 0";
    let text = metrics(&folders)?;
    ensure!(!text.lines().any(|line| line == max), "{text}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Two queues with one waiting request each: the export has two requests, and no queue has more
/// than one.
#[test]
fn the_most_requests_are_counted_for_one_queue() -> Result<()> {
    let folders = test_folders()?;
    let _daemon = Running::serve(begin(&folders)?.args(["--limits", "bps-total=1"]))?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    // After this request, the next one waits for an hour.
    frontend.read(0, 0, 4096)?;
    for queue in [0, 1] {
        let (header, status) = frontend.put_header(queue, 0, blk::IN, 0)?;
        let data = Desc::writable(DATA, 4096);
        let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
        frontend.rings[queue].put_chain(0, &chain);
        frontend.rings[queue].submit(0)?;
    }
    loop {
        let text = metrics(&folders)?;
        ensure!(value(&text, "ringhaul_requests_in_flight_max{export=\"vm\"}")? <= 1, "{text}");
        if value(&text, "ringhaul_requests_in_flight{export=\"vm\"}")? == 2 {
            return Ok(());
        }
    }
}

/// Two requests that wait for a second count two seconds.
#[test]
fn waits_for_limits_are_counted() -> Result<()> {
    let folders = test_folders()?;
    let mut daemon = Running::serve(begin(&folders)?.args(["--limits", "iops-total=100"]))?;
    run(&mut bench(&folders.socket("vm.sock"), "--rw randread --iodepth 4 --number_ios 60")?)?
        .expect_code(0)?;
    let text = metrics(&folders)?;
    let line = text.lines().find(|line| line.starts_with("ringhaul_throttled_seconds_total{"));
    let value: f64 = line.and_then(|line| line.split(' ').nth(1)).context("no line")?.parse()?;
    ensure!(value > 0.1, "{line:?}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
