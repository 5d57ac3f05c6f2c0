//! Requests that fail on an NBD server: nbdkit's error filter, with each error policy.

use std::fs::{File, remove_file};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, TestFolders, bench, ringhaul, run};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::frontend::{Frontend, Setup, blk, segment};
use ringhaul_kit::nbd_server::NbdServer;
use ringhaul_kit::system::is_installed;
use ringhaul_tools::process::retry;
use rustix::process::Signal;
use serde_json::Value;

use super::nbd::{VERIFIED, serve, test_folders, wait_for_load};

/// Starts a server that fails requests according to `errors`.
fn failing(folders: &TestFolders, errors: &[&str]) -> Result<NbdServer> {
    NbdServer::start_nbdkit(folders, &[&["--filter=error", "memory", "64M"][..], errors].concat())
}

pub(super) fn ctl(folders: &TestFolders, words: &[&str]) -> Result<String> {
    let mut ctl = ringhaul()?;
    ctl.args(["ctl", "--control"]).arg(folders.socket("control")).args(words);
    Ok(run(&mut ctl)?.expect_code(0)?.stdout)
}

/// The state of the disk, and the number of requests that had to wait.
fn state(folders: &TestFolders) -> Result<(String, u64)> {
    let vm = folders.socket("vm.sock").display().to_string();
    let shown: Value = serde_json::from_str(&ctl(folders, &["--json", "show", &vm])?)?;
    let state = shown["disk-state"].as_str().context("it has no state")?;
    let waited = shown["disks"][0]["waited"].as_u64().context("nothing is counted")?;
    Ok((state.to_owned(), waited))
}

fn wait_until_held(folders: &TestFolders) -> Result<()> {
    retry(LIMIT, || {
        let (state, waited) = state(folders)?;
        ensure!(state == "held" && waited > 0, "the disk is {state}, and {waited} waited");
        Ok(())
    })
}

fn end(mut daemon: Running) -> Result<()> {
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// A tenth of all requests except flushes fails, and succeeds in the end.
#[test]
fn requests_that_fail_now_and_then_are_tried_again() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let server = failing(&folders, &["error-rate=10%"])?;
    let policy = ["--rerror", "retry", "--werror", "retry", "--iothreads", "2"];
    let daemon = serve(&folders, &server.uri(""), &policy)?;
    let vm = folders.socket("vm.sock");
    let load = run(&mut bench(&vm, &format!("{VERIFIED} --number_ios 2000"))?)?.expect_code(0)?;
    ensure!(load.stdout.contains("errors: 0; verify: "), "{}", load.stdout);
    ensure!(load.stdout.contains(" 0 reads with wrong data"), "{}", load.stdout);
    let (_, waited) = state(&folders)?;
    ensure!(waited > 100, "only {waited} requests have waited");

    let mut frontend = Frontend::attach(&vm, &Setup::default())?;
    for number in 0..100 {
        let sector = number * 256;
        frontend.write(0, sector, &[7; 8192])?;
        for (kind, first) in [(blk::DISCARD, sector), (blk::WRITE_ZEROES, sector + 8)] {
            let part = segment(first, 8, 0);
            let answer = frontend.request(0, kind, 0, &part, 0)?;
            ensure!(answer.status == blk::OK, "request {number} of kind {kind}: {answer:?}");
        }
        let zeroed = frontend.read(1, sector + 8, 4096)?;
        ensure!(zeroed == [0; 4096], "what was zeroed is something else");
    }
    let (_, waited_then) = state(&folders)?;
    ensure!(waited_then > waited, "no discard and no zeroing had to wait");
    drop(frontend);
    end(daemon)
}

/// Writes wait without limit, reads continue, and no request of the load fails.
#[test]
fn writes_wait_until_a_server_has_space_again() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let full = folders.path("full");
    let when = format!("error-file={}", full.display());
    let rates = ["error-pwrite-rate=100%", "error-zero-rate=100%"];
    let server = failing(&folders, &[&["error=ENOSPC", &when][..], &rates].concat())?;
    let mut daemon = serve(&folders, &server.uri(""), &["--werror", "hold"])?;
    let vm = folders.socket("vm.sock");
    let mut load = Running::start(&mut bench(&vm, &format!("{VERIFIED} --runtime 1h"))?)?;
    daemon.wait_for("a front-end has connected")?;
    for is_resumed in [false, true] {
        wait_for_load(&folders)?;
        File::create(&full)?;
        wait_until_held(&folders)?;
        if is_resumed {
            ctl(&folders, &["resume", &vm.display().to_string()])?;
            wait_until_held(&folders)?;
        }
        remove_file(&full)?;
        if is_resumed {
            ctl(&folders, &["resume", &vm.display().to_string()])?;
        }
    }
    wait_for_load(&folders)?;
    load.signal(Signal::TERM)?;
    let finished = load.finish()?.expect_code(0)?;
    ensure!(finished.stdout.contains("errors: 0; verify: "), "{}", finished.stdout);
    ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
    ensure!(state(&folders)?.0 == "ready", "{:?}", state(&folders)?);
    daemon.wait_for("No space left on device")?;
    end(daemon)
}

/// The errors that the guest of a logical unit gets, and the errors in the log.
#[test]
fn the_error_of_a_server_reaches_the_guest_and_the_log() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    for (error, write, read, logged) in [
        ("EIO", "write error (", "unrecovered read error", "Input/output error"),
        ("ENOSPC", "space allocation failed", "unrecovered read error", "No space left"),
        ("EPERM", "write protected", "unrecovered read error", "Operation not permitted"),
        ("ENOMEM", "ABORTED COMMAND", "ABORTED COMMAND", "Cannot allocate memory"),
    ] {
        let folders = test_folders()?;
        let rates = ["error-pwrite-rate=100%", "error-pread-rate=100%"];
        let server = failing(&folders, &[&[&*format!("error={error}")][..], &rates].concat())?;
        let vm = folders.socket("vm.sock");
        let mut daemon = serve_unit(&vm, &server.uri(""))?;
        for (pattern, sense) in [("randwrite", write), ("randread", read)] {
            let load = format!("--device scsi --rw {pattern} --number_ios 1 --iodepth 1");
            let failed = run(&mut bench(&vm, &load)?)?.expect_code(1)?;
            ensure!(failed.stderr.contains(sense), "{error}, {pattern}: {}", failed.stderr);
            let line = daemon.wait_for("a request failed")?;
            ensure!(line.contains(logged), "{error}, {pattern}: {line}");
        }
        end(daemon)?;
    }
    Ok(())
}

/// Serves a disk as a logical unit that reports errors of writes.
fn serve_unit(vm: &Path, disk: &str) -> Result<Running> {
    let mut command = ringhaul()?;
    command.args(["serve", "--device", "scsi", "--werror", "report", "--socket-path"]).arg(vm);
    Running::serve(command.args(["--lun", &format!("0,disk={disk}")]))
}

/// Without connections that share their flushes, the next process could not flush the writes of
/// this one.
#[test]
fn a_disk_whose_server_does_not_flush_is_not_handed_over() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = test_folders()?;
    let (disk, fails) = (folders.disk("disk.img", 1 << 20)?, folders.path("fails"));
    let (disk, sign) = (disk.display(), fails.display());
    let read =
        format!("pread=dd if={disk} skip=$4 count=$3 iflag=skip_bytes,count_bytes status=none");
    let write = format!("pwrite=dd of={disk} seek=$4 oflag=seek_bytes conv=notrunc status=none");
    let flush = format!("flush=[ ! -e {sign} ] || {{ echo EIO no >&2; exit 1; }}");
    let size = format!("get_size=stat -c %s {disk}");
    let can = ["can_write=exit 0", "can_flush=exit 0"];
    let server = NbdServer::start_nbdkit(
        &folders,
        &[&["eval", &size, &read, &write, &flush][..], &can].concat(),
    )?;
    let mut daemon = serve(&folders, &server.uri(""), &[])?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    frontend.write(0, 8, &[7; 4096])?;
    File::create(&fails)?;
    let refused = run(&mut taking_over(&folders)?)?.expect_code(2)?.stderr;
    let reason = "written data cannot be flushed";
    ensure!(refused.contains(reason), "{refused}");
    daemon.wait_for("does not take over")?;
    // The old process goes on, and knows of the loss.
    ensure!(frontend.read(0, 8, 4096)? == [7; 4096], "the data is gone");
    let flushed = frontend.request(0, blk::FLUSH, 0, &[], 0)?;
    ensure!(flushed.status == blk::IOERR, "{flushed:?}");
    drop(frontend);
    end(daemon)?;
    server.terminate()
}
