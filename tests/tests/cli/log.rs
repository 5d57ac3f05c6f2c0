//! The log: its forms, its filter, and its limits on lines that a guest causes.

use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{EXIT_USAGE, READY, Running, TestFolders, ringhaul, run, serve};
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use rustix::process::Signal;
use serde_json::Value;

/// The number of failing requests, far more than the log's limit in a minute.
const BAD_REQUESTS: u64 = 50;
/// The number of lines that a guest may cause in a minute.
const LINES: u64 = 5;

fn test_folders() -> Result<TestFolders> {
    TestFolders::new(env!("CARGO_TARGET_TMPDIR"))
}

/// Makes failing requests over two connections.
fn misbehave(socket: &Path) -> Result<()> {
    for _ in 0..2 {
        let mut frontend = Frontend::attach(socket, &Setup::default())?;
        for _ in 0..BAD_REQUESTS / 2 {
            let answer = frontend.request(0, blk::IN, 1 << 40, &[], 512)?;
            ensure!(answer.status == blk::IOERR, "{answer:?}");
        }
    }
    Ok(())
}

fn parse(text: &str) -> Result<Vec<Value>> {
    let parse = |line| serde_json::from_str(line).with_context(|| format!("no JSON: {line}"));
    text.lines().map(parse).collect()
}

#[test]
fn json_lines_with_level_message_and_export() -> Result<()> {
    let folders = test_folders()?;
    let (file, socket) = (folders.disk("a \"b\".img", 16 << 20)?, folders.socket("disk.sock"));
    let export = format!("socket-path={},null=1M", folders.socket("other.sock").display());
    // Options of the log may precede the command, which may be omitted.
    for before in [&["serve"][..], &[]] {
        let mut command = ringhaul()?;
        command.args(["--log-format", "json"]).args(before);
        command.arg("--socket-path").arg(&socket).arg("--blk-file").arg(&file);
        let mut daemon = Running::start(command.args(["--export", &export]))?;
        daemon.wait_for(READY)?;
        daemon.wait_for(READY)?;
        misbehave(&socket)?;
        daemon.signal(Signal::TERM)?;
        let lines = parse(&daemon.finish()?.expect_code(0)?.stderr)?;

        let text = |line: &Value, member: &str| line[member].as_str().map(str::to_owned);
        for line in &lines {
            let level = text(line, "level").with_context(|| format!("no level in {line}"))?;
            ensure!(["INFO", "WARN"].contains(&level.as_str()), "{line}");
            ensure!(text(line, "message").is_some_and(|text| !text.is_empty()), "{line}");
            ensure!(text(line, "timestamp").is_some_and(|text| text.ends_with('Z')), "{line}");
        }
        let of = |name: &str, what: &str| -> Vec<&Value> {
            let says = |line: &&Value| text(line, "message").is_some_and(|m| m.contains(what));
            lines.iter().filter(says).filter(|line| line["export"] == name).collect()
        };
        let (name, other) = (socket.to_string_lossy(), folders.socket("other.sock"));
        let other = other.to_string_lossy();
        ensure!(of(&name, READY).len() == 1 && of(&other, READY).len() == 1);
        ensure!(of(&other, "failed").is_empty());
        ensure!(of(&name, ": engine ").len() == 1 && of(&other, "engine").is_empty());
        ensure!(of(&name, &file.to_string_lossy()).len() == 2, "{lines:#?}");
        // Lines without an export are about the daemon.
        for line in lines.iter().filter(|line| line["export"].is_string()) {
            ensure!([&*name, &*other].contains(&line["export"].as_str().unwrap_or("")), "{line}");
        }
        let failed = of(&name, "a request failed: read at byte").len() as u64;
        ensure!(failed == LINES, "{failed} lines");
        // Each omitted line is counted once, the last ones at the end.
        let left_out: u64 = lines.iter().filter_map(|line| line["left_out"].as_u64()).sum();
        ensure!(left_out == BAD_REQUESTS - LINES, "{left_out} left out: {lines:#?}");
        ensure!(
            of(&name, "errors of requests, queues or front-ends continue").len() == 1,
            "{lines:#?}"
        );
        let total = format!("requests, queues or front-ends had {BAD_REQUESTS} errors");
        ensure!(of(&name, &total).len() == 1, "no {total:?}: {lines:#?}");
    }
    Ok(())
}

/// A null disk makes no operations, but its requests are counted.
#[test]
fn the_last_line_of_an_export_counts_its_requests() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("disk.sock");
    let mut command = ringhaul()?;
    command.arg("--socket-path").arg(&socket).args(["--disk", "null,size=1M"]);
    let mut daemon = Running::serve(&mut command)?;
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    for kind in [blk::IN, blk::IN, blk::OUT, blk::FLUSH] {
        let (sent, room) = match kind {
            blk::IN => (0, 4096),
            blk::OUT => (4096, 0),
            _ => (0, 0),
        };
        let answer = frontend.request(0, kind, 8, &vec![1; sent], room)?;
        ensure!(answer.status == blk::OK, "{answer:?}");
    }
    let answer = frontend.request(0, blk::IN, 1 << 40, &[], 512)?;
    ensure!(answer.status == blk::IOERR, "{answer:?}");
    drop(frontend);
    daemon.signal(Signal::TERM)?;
    let text = daemon.finish()?.expect_code(0)?.stderr;
    let counts = "requests: 3 reads of 8 KiB, 1 writes of 4 KiB, 1 flushes, 0 discards";
    ensure!(text.contains(counts) && text.contains("; 1 failed"), "{text}");
    Ok(())
}

#[test]
fn text_has_the_same_counts() -> Result<()> {
    let folders = test_folders()?;
    let (file, socket) = (folders.disk("disk.img", 16 << 20)?, folders.socket("disk.sock"));
    let mut daemon = Running::serve(&mut serve(&socket, &file)?)?;
    misbehave(&socket)?;
    // Lines about front-ends that connect and disconnect are limited too.
    for _ in 0..20 {
        Frontend::connect(&socket, &Setup::default())?.negotiate()?;
    }
    daemon.signal(Signal::TERM)?;
    let text = daemon.finish()?.expect_code(0)?.stderr;
    let name = socket.to_string_lossy();
    let count = |what: &str| text.matches(&format!("{name}: {what}")).count() as u64;
    ensure!(count("a request failed") == LINES, "{text}");
    ensure!(count("a front-end has connected") == LINES, "{text}");
    let total = format!("requests, queues or front-ends had {BAD_REQUESTS} errors");
    ensure!(count(&total) == 1, "{text}");
    let left_out = BAD_REQUESTS / 2 - LINES;
    ensure!(text.contains(&format!("({left_out} more were not logged)")), "{text}");
    ensure!(text.contains(&format!("({} more were not logged)", BAD_REQUESTS / 2)), "{text}");
    Ok(())
}

#[test]
fn the_option_overrides_the_environment() -> Result<()> {
    let folders = test_folders()?;
    let (file, socket) = (folders.disk("disk.img", 16 << 20)?, folders.socket("disk.sock"));
    let mut loud = serve(&socket, &file)?;
    let mut daemon = Running::serve(loud.args(["--log", "info"]).env("RUST_LOG", "off"))?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;

    for (option, variable) in [("error", "info"), ("ringhaul=error", "trace"), ("", "error")] {
        let mut quiet = serve(&socket, &file)?;
        if !option.is_empty() {
            quiet.args(["--log", option]);
        }
        let mut daemon = Running::start(quiet.env("RUST_LOG", variable))?;
        let deadline = std::time::Instant::now() + ringhaul_kit::cli::LIMIT;
        while UnixStream::connect(&socket).is_err() {
            ensure!(std::time::Instant::now() < deadline, "nobody listens");
            std::thread::yield_now();
        }
        daemon.signal(Signal::TERM)?;
        let finished = daemon.finish()?.expect_code(0)?;
        ensure!(finished.stderr.is_empty(), "{option} {variable}: {}", finished.stderr);
    }

    let mut daemon = Running::start(serve(&socket, &file)?.env("RUST_LOG", "ringhaul=loud"))?;
    daemon.wait_for("RUST_LOG is ignored")?;
    daemon.wait_for(READY)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;

    // An empty variable is none.
    let mut daemon = Running::serve(serve(&socket, &file)?.env("RUST_LOG", ""))?;
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(!log.contains("RUST_LOG"), "{log}");
    Ok(())
}

#[test]
fn failures_are_logged_in_the_requested_format() -> Result<()> {
    let folders = test_folders()?;
    let (file, socket) = (folders.path("nothing.img"), folders.socket("disk.sock"));
    let mut refused = serve(&socket, &file)?;
    let finished = run(refused.args(["--log-format=json", "--log=off"]))?;
    let finished = finished.expect_code(EXIT_USAGE)?;
    let lines = parse(&finished.stderr)?;
    ensure!(lines.len() == 1 && lines[0]["level"] == "ERROR", "{lines:?}");
    ensure!(lines[0]["message"].as_str().is_some_and(|text| text.contains("nothing.img")));

    for (option, value) in [("--log", "ringhaul=loud"), ("--log-format", "xml")] {
        let mut refused = serve(&socket, &file)?;
        run(refused.args([option, value]))?.expect_refusal(&[option, value])?;
    }
    Ok(())
}

/// Queries leave no line.
#[test]
fn each_change_over_the_control_socket_has_its_author() -> Result<()> {
    let folders = test_folders()?;
    let mut command = serve(&folders.socket("vm.sock"), &folders.disk("disk.img", 16 << 20)?)?;
    command.args(["--log-format", "json", "--name", "vm", "--control"]);
    let daemon = Running::serve(command.arg(folders.socket("control")))?;
    let (socket, scsi) = (folders.socket("new.sock"), folders.socket("scsi.sock"));
    let new = format!("name=new,socket-path={},null=1M", socket.display());
    let scsi = format!("name=scsi,socket-path={},device=scsi,lun=0,null=1M", scsi.display());
    for words in [
        &["list"][..],
        &["show", "vm"],
        &["stats"],
        &["metrics"],
        &["call", "process"],
        &["set"],
        &["set-disk", "vm"],
        &["add", "--export", &new],
        &["add", "--export", &scsi],
        &["add-lun", "scsi", "1,null=1M"],
        &["remove-lun", "scsi", "1"],
        &["resize", "new", "2M"],
        &["resume", "new"],
        &["set-disk", "vm", "iops-total=900"],
        &["set", "poll-max-us=5"],
        &["remove", "vm", "--force"],
        &["shutdown"],
    ] {
        run(ringhaul()?.args(["ctl", "--control"]).arg(folders.socket("control")).args(words))?
            .expect_code(0)?;
    }
    let lines = parse(&daemon.finish()?.expect_code(0)?.stderr)?;
    let user = rustix::process::geteuid().as_raw();
    let by = format!(" by user {user}, process ");
    let changes = lines.iter().filter_map(|line| {
        let (method, process) = line["message"].as_str()?.split_once(&by)?;
        Some((method.to_owned(), line["export"].as_str().map(str::to_owned), process.parse()))
    });
    let changes: Vec<(String, Option<String>, Result<u32, _>)> = changes.collect();
    ensure!(changes.iter().all(|(_, _, process)| process.is_ok()), "{changes:?}");
    let found: Vec<_> = changes.iter().map(|(method, of, _)| (&**method, of.as_deref())).collect();
    let (vm, new, scsi) = (Some("vm"), Some("new"), Some("scsi"));
    let expected = [
        ("export.add", new),
        ("export.add", scsi),
        ("lun.add", scsi),
        ("lun.remove", scsi),
        ("disk.resize", new),
        ("disk.resume", new),
        ("disk.set", vm),
        ("set", None),
        ("export.remove", vm),
        ("shutdown", None),
    ];
    ensure!(found == expected, "{found:?}");
    Ok(())
}
