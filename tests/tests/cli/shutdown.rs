//! The end of a daemon, and the errors that its clients report.

use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{EXIT_RUN, Running, TestFolders, bench, ringhaul_under, run, serve};
use ringhaul_kit::frontend::{Frontend, Setup};
use rustix::process::Signal;

use crate::{DISK_BYTES, test_folders};

/// A run that only the end of the server ends: a client that relied on a time limit would count as
/// hung. The progress lines show that it runs.
const ENDLESS: &str =
    "--rw randrw --iodepth 16 --numjobs 2 --runtime 1h --timeout 1h --eta always --verify";

fn start(folders: &TestFolders, socket: &Path, engine: &str) -> Result<Running> {
    let file = folders.disk("disk.img", DISK_BYTES)?;
    Running::serve(serve(socket, &file)?.args(["--engine", engine]))
}

/// A load generator in the middle of its run.
fn start_load(socket: &Path) -> Result<Running> {
    let mut client = Running::start(&mut bench(socket, ENDLESS)?)?;
    client.wait_for("IOPS")?;
    Ok(client)
}

/// Fails unless the load generator reports that the server has gone.
fn expect_server_gone(client: Running) -> Result<()> {
    let finished = client.finish()?.expect_code(EXIT_RUN)?;
    let errors: Vec<&str> =
        finished.stderr.lines().filter(|line| line.starts_with("ringhaul: ")).collect();
    ensure!(
        matches!(errors[..], [error] if error.contains("server")),
        "not one error about the server:\n{}",
        finished.stderr
    );
    Ok(())
}

#[test]
fn signals_end_an_idle_daemon() -> Result<()> {
    let signals = [(Signal::TERM, "SIGTERM"), (Signal::INT, "SIGINT"), (Signal::HUP, "SIGHUP")];
    for (signal, name) in signals {
        let folders = test_folders()?;
        let socket = folders.socket("disk.sock");
        let file = folders.disk("disk.img", DISK_BYTES)?;
        // A caller of the tests may ignore SIGHUP, as nohup does.
        let mut command = ringhaul_under(&["env", "--default-signal=HUP"])?;
        command.args(["serve", "--socket-path"]).arg(&socket).arg("--blk-file").arg(&file);
        let mut daemon = Running::serve(&mut command)?;
        ensure!(socket.exists(), "there is no socket");
        daemon.signal(signal)?;
        daemon.wait_for(name)?;
        let finished = daemon.finish()?.expect_code(0).context(name)?;
        ensure!(!socket.exists(), "{name}: the socket is still there");
        ensure!(finished.stdout.is_empty(), "{name}: on stdout:\n{}", finished.stdout);
    }
    Ok(())
}

/// The front-end is idle too, and the second signal finds no unfinished request.
#[test]
fn two_signals_at_once_end_an_idle_daemon() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("disk.sock");
    let mut daemon = start(&folders, &socket, "auto")?;
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    daemon.signal(Signal::TERM)?;
    daemon.signal(Signal::INT)?;
    frontend.channel.wait_closed()?;
    let finished = daemon.finish()?.expect_code(0)?;
    ensure!(!finished.stderr.contains("unfinished"), "{}", finished.stderr);
    Ok(())
}

#[test]
fn a_hang_up_that_was_ignored_at_the_start_stays_ignored() -> Result<()> {
    let folders = test_folders()?;
    let (file, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("disk.sock"));
    let mut command = ringhaul_under(&["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"])?;
    command.args(["serve", "--socket-path"]).arg(&socket).arg("--blk-file").arg(&file);
    let mut daemon = Running::serve(&mut command)?;
    daemon.signal(Signal::HUP)?;
    run(&mut bench(&socket, "--rw randrw --number_ios 100 --size 4m --verify")?)?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    let finished = daemon.finish()?.expect_code(0)?;
    ensure!(!finished.stderr.contains("SIGHUP"), "{}", finished.stderr);
    Ok(())
}

#[test]
fn signals_end_a_daemon_under_load() -> Result<()> {
    for (signal, engine) in [(Signal::TERM, "aio"), (Signal::INT, "threads")] {
        let folders = test_folders()?;
        let socket = folders.socket("disk.sock");
        let mut daemon = start(&folders, &socket, engine)?;
        let client = start_load(&socket)?;
        daemon.signal(signal)?;
        let finished = daemon.finish()?.expect_code(0).context(engine)?;
        ensure!(!socket.exists(), "{engine}: the socket is still there");
        ensure!(!finished.stderr.contains("failed"), "{engine}:\n{}", finished.stderr);
        expect_server_gone(client).context(engine)?;
    }
    Ok(())
}

#[test]
fn a_silent_front_end_does_not_keep_a_daemon_from_ending() -> Result<()> {
    let folders = test_folders()?;
    let socket = folders.socket("disk.sock");
    let mut daemon = start(&folders, &socket, "auto")?;
    let _silent = UnixStream::connect(&socket).context("connecting")?;
    // This connection waits in the backlog.
    let _second = UnixStream::connect(&socket).context("connecting once more")?;
    daemon.wait_for("a front-end has connected")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    ensure!(!socket.exists(), "the socket is still there");
    Ok(())
}

#[test]
fn a_client_reports_that_its_server_was_killed() -> Result<()> {
    for engine in ["io_uring", "aio", "threads"] {
        let folders = test_folders()?;
        let socket = folders.socket("disk.sock");
        let mut daemon = start(&folders, &socket, engine)?;
        let client = start_load(&socket)?;
        daemon.signal(Signal::KILL)?;
        daemon.finish()?;
        expect_server_gone(client).context(engine)?;
    }
    Ok(())
}
