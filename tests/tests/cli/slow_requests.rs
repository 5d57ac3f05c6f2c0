//! `--slow-request`: log lines with the operation, the sector, and the phase that took the time.

use std::time::Duration;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::Running;
use ringhaul_kit::cli::serve;
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::fuse::Fuse;
use rustix::process::Signal;

use super::throttling::{begin_writes, end_writes};
use crate::{DISK_BYTES, test_folders};

#[test]
fn a_wait_for_limits_is_named() -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("vm.sock"));
    let mut command = serve(&socket, &disk)?;
    command.args(["--name", "vm", "--limits", "bps-total=256K", "--slow-request", "300ms"]);
    let mut daemon = Running::serve(&mut command)?;
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    frontend.read(0, 0, 4096)?;
    begin_writes(&mut frontend, 8)?;
    end_writes(&mut frontend, 0..8)?;
    let line = daemon.wait_for("slow request")?;
    for words in [" vm: slow request: a write at sector ", "of it for a wait for limits"] {
        ensure!(line.contains(words), "no {words:?}: {line}");
    }
    daemon.signal(Signal::TERM)?;
    let log = daemon.finish()?.expect_code(0)?.stderr;
    ensure!(!log.contains("a read"), "{log}");
    Ok(())
}

#[test]
fn a_slow_disk_is_named() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let socket = folders.socket("vm.sock");
    let mut command = serve(&socket, &fuse.file())?;
    command.args(["--name", "vm", "--read-only", "--lock", "off", "--slow-request", "200ms"]);
    let mut daemon = Running::serve(&mut command)?;
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    fuse.slow_down(Duration::from_millis(400));
    frontend.read(1, 1024, 4096)?;
    let line = daemon.wait_for("slow request")?;
    for words in [" vm: slow request: a read at sector 1024 took ", "an operation of the kernel"] {
        ensure!(line.contains(words), "no {words:?}: {line}");
    }
    Ok(())
}
