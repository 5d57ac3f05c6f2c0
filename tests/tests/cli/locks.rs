//! Locks of disks against other daemons, QEMU's programs, and other exports.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{READY, Refusals, Running, TestFolders, ringhaul_under, serve};
use ringhaul_kit::system::is_installed;
use rustix::process::Signal;

use crate::{DISK_BYTES, test_folders};

/// `qemu-storage-daemon` with the file open, until this value is dropped.
struct StorageDaemon(Child);

impl StorageDaemon {
    fn start(folders: &TestFolders, file: &Path, writable: bool) -> Result<Self> {
        let socket = folders.socket("qsd.sock");
        let (read_only, writable) = if writable { ("off", "on") } else { ("on", "off") };
        let disk =
            format!("driver=file,filename={},node-name=d,read-only={read_only}", file.display());
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=d,writable={writable},addr.type=unix,addr.path={}",
            socket.display()
        );
        let child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &disk, "--export", &export])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("starting qemu-storage-daemon")?;
        let daemon = Self(child);
        let hopeless = Instant::now() + Duration::from_secs(20);
        while !socket.exists() {
            ensure!(Instant::now() < hopeless, "qemu-storage-daemon does not listen");
            std::thread::yield_now();
        }
        Ok(daemon)
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<Output> {
    Command::new(program).args(arguments).output().with_context(|| format!("starting {program}"))
}

fn expect_locked(what: &str, output: &Output) -> Result<()> {
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "{what} was let in");
    ensure!(error.contains("lock"), "{what} says: {error}");
    Ok(())
}

#[test]
fn programs_of_qemu_and_the_daemon_respect_locks() -> Result<()> {
    if !is_installed("qemu-storage-daemon") || !is_installed("qemu-io") {
        return Ok(());
    }
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let name = file.to_string_lossy().into_owned();
    let socket = folders.socket("disk.sock");
    let write = ["-f", "raw", "-c", "write 0 4096", &name];
    let read = ["-f", "raw", "-r", "-c", "read 0 4096", &name];
    let resize = ["resize", "-f", "raw", &name, "+1M"];

    // A writer excludes every program that checks locks; qemu-io checks none for reading.
    let writer = Running::serve(&mut serve(&socket, &file)?)?;
    expect_locked("qemu-io for writing", &run("qemu-io", &write)?)?;
    expect_locked("qemu-img resize", &run("qemu-img", &resize)?)?;
    drop(writer);
    // A reader admits other readers.
    let reader = Running::serve(serve(&socket, &file)?.arg("--read-only"))?;
    expect_locked("qemu-io for writing", &run("qemu-io", &write)?)?;
    expect_locked("qemu-img resize", &run("qemu-img", &resize)?)?;
    ensure!(run("qemu-io", &read)?.status.success(), "a second reader is kept out");
    drop(reader);
    // `--lock off` takes no locks.
    let unlocked = Running::serve(serve(&socket, &file)?.args(["--lock", "off"]))?;
    ensure!(run("qemu-io", &write)?.status.success(), "there is a lock in spite of --lock off");
    drop(unlocked);

    let mut refusals = Refusals::default();
    let words = ["disk.img", "locked by", "qemu-storage-daemon (process", "end that use first"];
    let refused = |options: &[&str]| -> Result<Command> {
        let mut command = serve(&folders.socket("refused.sock"), &file)?;
        command.args(options);
        Ok(command)
    };
    let storage_daemon = StorageDaemon::start(&folders, &file, true)?;
    refusals.check("beside a writer", refused(&[]), &words);
    refusals.check("reading beside a writer", refused(&["--read-only"]), &words);
    Running::serve(&mut refused(&["--lock", "off"])?)?;
    drop(storage_daemon);
    std::fs::remove_file(folders.socket("qsd.sock")).context("removing a socket")?;
    // A read-only storage daemon admits other readers.
    let _storage_daemon = StorageDaemon::start(&folders, &file, false)?;
    Running::serve(&mut refused(&["--read-only"])?)?;
    refusals.finish()
}

#[test]
fn two_exports_of_one_daemon_do_not_share_a_disk() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    let export = |name: &str, more: &str| {
        format!("socket-path={},blk-file={}{more}", folders.socket(name).display(), file.display())
    };
    let serve_both = |first: &str, second: &str| -> Result<Command> {
        let mut command = ringhaul_under::<&str>(&[])?;
        let (first, second) = (export("one.sock", first), export("two.sock", second));
        command.args(["serve", "--export", &first, "--export", &second]);
        Ok(command)
    };
    let mut refusals = Refusals::default();
    let words = ["disk.img", "locked by this daemon, for another export"];
    refusals.check("two writers", serve_both("", ""), &words);
    refusals.check("a reader", serve_both("", ",read-only=on"), &words);
    refusals.finish()?;
    for (first, second) in [(",read-only=on", ",read-only=on"), (",lock=off", "")] {
        let mut daemon = Running::start(&mut serve_both(first, second)?)?;
        daemon.wait_for(READY)?;
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
    }
    Ok(())
}

/// io_uring keeps a file open for a while after its process was killed.
#[test]
fn a_daemon_that_was_killed_is_started_again_at_once() -> Result<()> {
    let folders = test_folders()?;
    let file = folders.disk("disk.img", DISK_BYTES)?;
    for round in 0..5 {
        let socket = folders.socket(&format!("disk-{round}.sock"));
        let mut daemon = Running::serve(serve(&socket, &file)?.args(["--engine", "io_uring"]))?;
        daemon.signal(Signal::KILL)?;
        let _ = daemon.finish()?;
    }
    Ok(())
}
