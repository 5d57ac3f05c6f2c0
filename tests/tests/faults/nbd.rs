//! Disks on NBD servers: every available server, with and without faults.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, TestFolders, bench, ringhaul, run};
use ringhaul_kit::control::{read_counters, take_over, taking_over};
use ringhaul_kit::nbd_server::free_port;
use ringhaul_kit::system::{is_installed, run as run_program};
use ringhaul_tools::process::retry;
use rustix::process::{Pid, Signal, kill_process};

pub(super) use ringhaul_kit::nbd_server::NbdServer;

pub(super) const DISK_BYTES: u64 = 64 << 20;

/// A load that verifies its own writes, with flushes in between.
pub(super) const VERIFIED: &str =
    "--rw randrw --verify --iodepth 16 --bssplit 4k/80:128k/20 --fsync 64";

pub(super) fn test_folders() -> Result<TestFolders> {
    TestFolders::new(env!("CARGO_TARGET_TMPDIR"))
}

pub(super) fn serve(folders: &TestFolders, disk: &str, options: &[&str]) -> Result<Running> {
    let mut command = ringhaul()?;
    command.args(["serve", "--socket-path"]).arg(folders.socket("vm.sock"));
    command.args(["--disk", disk, "--control"]).arg(folders.socket("control")).args(options);
    Running::serve(&mut command)
}

/// Drives a disk with a verified load, and fails if a request fails.
pub(super) fn drive(folders: &TestFolders, disk: &str, options: &str) -> Result<()> {
    let mut daemon = serve(folders, disk, &["--iothreads", "2"])?;
    let load = format!("{VERIFIED} {options}");
    let finished = run(&mut bench(&folders.socket("vm.sock"), &load)?)?.expect_code(0)?;
    ensure!(finished.stdout.contains("errors: 0; verify: "), "{}", finished.stdout);
    ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A server of a disk; `None` if QEMU's is not installed.
fn start_server() -> Result<Option<(TestFolders, NbdServer)>> {
    if !is_installed("qemu-nbd") {
        return Ok(None);
    }
    let folders = test_folders()?;
    let server = NbdServer::start_qemu_nbd(&folders, &folders.disk("disk.img", DISK_BYTES)?)?;
    Ok(Some((folders, server)))
}

#[test]
fn qemu_nbd_serves_a_disk() -> Result<()> {
    let Some((folders, server)) = start_server()? else { return Ok(()) };
    drive(&folders, &server.uri("disk"), "--number_ios 4000")?;
    drive(&folders, &format!("{},connections=3", server.uri("disk")), "--number_ios 4000")?;
    let info = run(ringhaul()?.args(["disk", "info", &server.uri("disk")]))?.expect_code(0)?;
    ensure!(info.stdout.contains("can       flush, discard, write zeroes\n"), "{}", info.stdout);
    let missing = run(ringhaul()?.args(["disk", "info", &server.uri("other")]))?;
    missing.expect_refusal(&["rejected the export 'other'", "it has no such export"])
}

/// An image on a server cannot grow, so it has only the space of the server's export.
#[test]
fn an_image_on_a_server_is_a_disk() -> Result<()> {
    if !is_installed("qemu-nbd") || !is_installed("qemu-img") {
        return Ok(());
    }
    let folders = test_folders()?;
    let file = folders.disk("image", DISK_BYTES)?;
    let path = file.to_str().context("a path with an odd name")?;
    let create = ["create", "-q", "-f", "qcow2", path, &DISK_BYTES.to_string()];
    run_program("qemu-img", &create)?;
    std::fs::OpenOptions::new().write(true).open(&file)?.set_len(2 * DISK_BYTES)?;
    let server = NbdServer::start_qemu_nbd(&folders, &file)?;
    let disk = format!("qcow2,over={}", server.uri("disk"));
    drive(&folders, &disk, "--number_ios 2000")?;
    let info = run(ringhaul()?.args(["disk", "info", &disk]))?.expect_code(0)?;
    ensure!(info.stdout.contains("qcow2") && info.stdout.contains("nbd"), "{}", info.stdout);
    server.kill()?;
    run_program("qemu-img", &["check", "-q", path]).map(drop)
}

/// Servers with missing features, servers that refuse large requests, and a slow server.
#[test]
fn nbdkit_serves_disks_of_all_sorts() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let memory = ["memory", "64M"];
    for options in [
        &[][..],
        &["--no-sr"],
        &["--filter=nozero"],
        &["--filter=fua"],
        &["--filter=multi-conn", "multi-conn-mode=disable"],
        &["--filter=delay", "wdelay=1ms", "rdelay=1ms"],
        &[
            "--filter=blocksize-policy",
            "blocksize-minimum=4096",
            "blocksize-maximum=64K",
            "blocksize-preferred=8192",
            "blocksize-error-policy=error",
        ],
    ] {
        let (switches, parameters): (Vec<&str>, Vec<&str>) =
            options.iter().partition(|option| option.starts_with("--"));
        let all = [switches, memory.to_vec(), parameters].concat();
        let server = NbdServer::start_nbdkit(&folders, &all)?;
        let driven = drive(&folders, &server.uri(""), "--number_ios 1000");
        driven.with_context(|| format!("nbdkit {all:?}"))?;
    }
    Ok(())
}

/// A server in the background, with the path of its pid file.
struct InBackground(PathBuf);

impl Drop for InBackground {
    fn drop(&mut self) {
        let pid = std::fs::read_to_string(&self.0).ok().and_then(|pid| pid.trim().parse().ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

/// Over TCP, several IoThreads share the one connection that this server allows.
#[test]
fn nbd_server_serves_a_disk_by_tcp() -> Result<()> {
    if !is_installed("nbd-server") {
        return Ok(());
    }
    let folders = test_folders()?;
    let port = free_port()?;
    let (disk, config) = (folders.disk("disk.img", DISK_BYTES)?, folders.path("nbd.conf"));
    let text = format!(
        "[generic]\nport = {port}\nlistenaddr = 127.0.0.1\n[disk]\nexportname = {}\n\
         flush = true\ntrim = true\n",
        disk.display()
    );
    std::fs::write(&config, text)?;
    let pid_file = folders.path("nbd.pid");
    let mut command = Command::new("nbd-server");
    run(command.arg("-C").arg(&config).arg("-p").arg(&pid_file))?.expect_code(0)?;
    let _server = InBackground(pid_file);
    let uri = format!("nbd://127.0.0.1:{port}/disk");
    retry(LIMIT, || {
        run(ringhaul()?.args(["disk", "info", &uri]))?.expect_code(0)?;
        Ok(())
    })?;
    drive(&folders, &uri, "--number_ios 2000 --numjobs 2")
}

#[test]
fn errors_of_a_server_reach_the_guest() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let options = ["--filter=error", "memory", "64M", "error-pwrite=EIO"];
    let server =
        NbdServer::start_nbdkit(&folders, &[&options[..], &["error-pwrite-rate=100%"]].concat())?;
    let _daemon = serve(&folders, &server.uri(""), &[])?;
    let load = run(&mut bench(&folders.socket("vm.sock"), "--rw randwrite --number_ios 50")?)?;
    ensure!(load.status.code() == Some(1), "{load:?}");
    let reads = run(&mut bench(&folders.socket("vm.sock"), "--rw randread --number_ios 50")?)?;
    reads.expect_code(0)?;
    Ok(())
}

/// All outstanding requests are sent again after each kill.
#[test]
fn a_server_that_is_killed_under_load_costs_no_request() -> Result<()> {
    if !is_installed("qemu-nbd") {
        return Ok(());
    }
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    let mut server = NbdServer::start_qemu_nbd(&folders, &disk)?;
    let mut daemon = serve(&folders, &format!("{},connections=2", server.uri("disk")), &[])?;
    let socket = folders.socket("vm.sock");
    let load = Running::start(&mut bench(&socket, &format!("{VERIFIED} --runtime 4"))?)?;
    daemon.wait_for("a front-end has connected")?;
    for _ in 0..3 {
        wait_for_load(&folders)?;
        server.kill()?;
        daemon.wait_for("a connection broke")?;
        server = NbdServer::start_qemu_nbd(&folders, &disk)?;
        daemon.wait_for("is back after")?;
    }
    let finished = load.finish()?.expect_code(0)?;
    ensure!(finished.stdout.contains("errors: 0; verify: "), "{}", finished.stdout);
    ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// Waits until the daemon has answered more than 100 further writes.
pub(super) fn wait_for_load(folders: &TestFolders) -> Result<()> {
    let writes = || -> Result<u64> {
        let counters = read_counters(&folders.socket("control"))?;
        let queues = counters["queues"].as_array();
        let queues = queues.with_context(|| format!("no queues in {counters}"))?;
        Ok(queues.iter().filter_map(|queue| queue["served"]["writes"]["requests"].as_u64()).sum())
    };
    let before = writes()?;
    retry(LIMIT, || {
        ensure!(writes()? > before + 100, "the load stands still");
        Ok(())
    })
}

/// Both processes are connected for a moment. A new process without room for its connection changes
/// nothing.
#[test]
fn a_disk_is_taken_over_if_its_server_has_room_for_both() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    for (limit, has_room) in [("limit=1", false), ("limit=2", true)] {
        let folders = test_folders()?;
        let server =
            NbdServer::start_nbdkit(&folders, &["--filter=limit", "memory", "64M", limit])?;
        let mut daemon = serve(&folders, &server.uri(""), &[])?;
        let load = format!("{VERIFIED} --runtime 3");
        let load = Running::start(&mut bench(&folders.socket("vm.sock"), &load)?)?;
        daemon.wait_for("a front-end has connected")?;
        wait_for_load(&folders)?;
        if has_room {
            daemon = take_over(&folders, daemon)?;
        } else {
            let refused = run(&mut taking_over(&folders)?)?.expect_code(2)?.stderr;
            ensure!(refused.contains("allow one more connection"), "{refused}");
        }
        wait_for_load(&folders)?;
        let finished = load.finish()?.expect_code(0)?;
        ensure!(finished.stdout.contains("errors: 0; verify: "), "{}", finished.stdout);
        ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}

/// Requests wait without limit, which is visible, and the export can be removed.
#[test]
fn an_export_whose_server_is_away_can_be_removed() -> Result<()> {
    let Some((folders, server)) = start_server()? else { return Ok(()) };
    let mut daemon = serve(&folders, &server.uri("disk"), &[])?;
    let vm = folders.socket("vm.sock");
    let load = Running::start(&mut bench(&vm, "--rw randwrite --runtime 600")?)?;
    daemon.wait_for("a front-end has connected")?;
    wait_for_load(&folders)?;
    server.kill()?;
    daemon.wait_for("is away: cannot connect to")?;
    let ctl = |words: &[&str]| -> Result<String> {
        let mut ctl = ringhaul()?;
        ctl.args(["ctl", "--control"]).arg(folders.socket("control")).args(words);
        Ok(run(&mut ctl)?.expect_code(0)?.stdout)
    };
    let vm = vm.display().to_string();
    let shown = ctl(&["--json", "show", &vm])?;
    ensure!(shown.contains("\"away\"") && shown.contains("cannot connect to"), "{shown}");
    ctl(&["remove", &vm, "--force"])?;
    let load = load.finish()?;
    ensure!(load.status.code() == Some(1), "{load:?}");
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

#[test]
fn a_daemon_ends_while_its_server_is_away() -> Result<()> {
    let Some((folders, server)) = start_server()? else { return Ok(()) };
    let mut daemon = serve(&folders, &server.uri("disk"), &[])?;
    run(&mut bench(&folders.socket("vm.sock"), "--number_ios 10")?)?.expect_code(0)?;
    server.kill()?;
    daemon.wait_for("a connection broke")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// A server that takes writes and does not answer them.
#[test]
fn requests_fail_at_the_deadline_that_was_set() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let options = ["--filter=delay", "memory", "64M", "wdelay=3600"];
    let server = NbdServer::start_nbdkit(&folders, &options)?;
    let mut daemon = serve(&folders, &format!("{},deadline=1", server.uri("")), &[])?;
    let begun = Instant::now();
    let load = run(&mut bench(&folders.socket("vm.sock"), "--rw write --number_ios 4")?)?;
    ensure!(load.status.code() == Some(1), "{load:?}");
    ensure!(begun.elapsed() >= Duration::from_secs(1), "it did not wait");
    daemon.wait_for("the server has not answered for")?;
    run(&mut bench(&folders.socket("vm.sock"), "--number_ios 50")?)?.expect_code(0)?;
    Ok(())
}

/// The lines come from the thread that opens a disk and from an IoThread.
#[test]
fn lines_about_a_disk_name_its_export() -> Result<()> {
    if !is_installed("qemu-nbd") || !is_installed("qemu-img") {
        return Ok(());
    }
    let folders = test_folders()?;
    let image = folders.path("image.qcow2");
    let path = image.to_str().context("a path with an odd name")?;
    run_program("qemu-img", &["create", "-q", "-f", "qcow2", path, "1M"])?;
    std::fs::OpenOptions::new().write(true).open(&image)?.set_len(1 << 20)?;
    let raw = format!("name=vm2,socket-path={},blk-file={path}", folders.socket("2").display());

    let server = NbdServer::start_qemu_nbd(&folders, &folders.disk("disk.img", DISK_BYTES)?)?;
    let options = ["--log-format", "json", "--name", "vm1", "--export", &raw];
    let mut daemon = serve(&folders, &server.uri("disk"), &options)?;
    run(&mut bench(&folders.socket("vm.sock"), "--number_ios 10")?)?.expect_code(0)?;
    server.kill()?;
    daemon.wait_for("a connection broke")?;
    let _smaller =
        NbdServer::start_qemu_nbd(&folders, &folders.disk("small.img", DISK_BYTES / 2)?)?;
    daemon.wait_for("is back after")?;
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    for (words, export) in [
        ("a connection broke", "vm1"),
        ("the export has shrunk to 33554432 bytes", "vm1"),
        ("is back after", "vm1"),
        ("qcow2 image", "vm2"),
    ] {
        let line = log.lines().find(|line| line.contains(words));
        let line = line.with_context(|| format!("no line about {words}: {log}"))?;
        let line: serde_json::Value = serde_json::from_str(line).context("a line is no JSON")?;
        ensure!(line["export"] == export, "{line}");
    }
    Ok(())
}

/// With `unflushed=lost` unflushed writes count as lost after a break, and a process that takes
/// over knows of them or of their loss.
#[test]
fn flushes_fail_after_a_break_if_the_server_is_not_trusted() -> Result<()> {
    if !is_installed("qemu-nbd") {
        return Ok(());
    }
    let folders = test_folders()?;
    let disk = folders.disk("disk.img", DISK_BYTES)?;
    for (unflushed, fsync, code, is_taken_over) in
        [("kept", 0, 0, true), ("lost", 0, 1, false), ("lost", 0, 1, true), ("lost", 1, 0, true)]
    {
        let server = NbdServer::start_qemu_nbd(&folders, &disk)?;
        let name = format!("{},unflushed={unflushed}", server.uri("disk"));
        let mut daemon = serve(&folders, &name, &[])?;
        let socket = folders.socket("vm.sock");
        let first = format!("--rw write --number_ios 10 --fsync {fsync}");
        run(&mut bench(&socket, &first)?)?.expect_code(0)?;
        if is_taken_over {
            daemon = take_over(&folders, daemon)?;
            run(&mut bench(&socket, "--rw read --number_ios 10")?)?.expect_code(0)?;
        }
        server.kill()?;
        daemon.wait_for("a connection broke")?;
        let _server = NbdServer::start_qemu_nbd(&folders, &disk)?;
        daemon.wait_for("is back after")?;
        let load = run(&mut bench(&socket, "--rw write --number_ios 10 --fsync 1")?)?;
        ensure!(load.status.code() == Some(code), "{unflushed}: {load:?}");
        let _next = take_over(&folders, daemon)?;
        let load = run(&mut bench(&socket, "--rw write --number_ios 10 --fsync 1")?)?;
        ensure!(load.status.code() == Some(code), "{unflushed}, taken over: {load:?}");
    }
    Ok(())
}

/// A new process would not know that its writes must wait for the overdue one.
#[test]
fn a_disk_is_not_taken_over_while_an_overdue_write_may_land() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let server =
        NbdServer::start_nbdkit(&folders, &["--filter=delay", "memory", "64M", "delay-write=600"])?;
    let mut daemon = serve(&folders, &format!("{},deadline=1", server.uri("")), &[])?;
    let socket = folders.socket("vm.sock");
    run(&mut bench(&socket, "--rw write --number_ios 1 --iodepth 1")?)?.expect_code(1)?;
    daemon.wait_for("the server may still execute unanswered writes (1)")?;
    daemon.wait_for("is back after")?;
    let refused = run(&mut taking_over(&folders)?)?.expect_code(2)?.stderr;
    ensure!(refused.contains("may still execute unanswered writes"), "{refused}");
    run(&mut bench(&socket, "--rw read --number_ios 10")?)?.expect_code(0)?;
    drop(daemon);
    server.kill()
}
