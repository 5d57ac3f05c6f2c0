//! The state of disks, which a process hands over with them.

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, serve};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use ringhaul_kit::fuse::{Fuse, opcode};
use rustix::process::Signal;
use serde_json::json;

use crate::takeover::{Client, TAKEN};
use crate::test_folders;

fn flush(frontend: &mut Frontend) -> Result<u8> {
    Ok(frontend.request(0, blk::FLUSH, 0, &[], 0)?.status)
}

/// The kernel reports a loss once. A process without that knowledge would confirm flushes of lost
/// data.
#[test]
fn every_later_process_reports_a_loss_of_data() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = test_folders()?;
    let start = || -> Result<Running> {
        let mut command = serve(&folders.socket("vm.sock"), &fuse.file())?;
        command.args(["--engine", "threads", "--lock", "off", "--name", "vm", "--control"]);
        Running::serve(command.arg(folders.socket("control")))
    };
    let mut daemon = start()?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    fuse.withhold(daemon.pid(), &[opcode::FSYNC]);
    fuse.fail();
    let failed = flush(&mut frontend);
    // From now on the file system flushes without an error.
    fuse.release();
    ensure!(failed? == blk::IOERR, "a flush that fails is answered with OK");
    for takeover in 0..3 {
        ensure!(flush(&mut frontend)? == blk::IOERR, "after {takeover} takeovers it is forgotten");
        let shown = Client::new(&folders)?.call("export.show", &json!({ "export": "vm" }))?;
        ensure!(shown["result"]["disk-state"] == "lost", "after {takeover} takeovers: {shown}");
        let mut next = Running::start(&mut taking_over(&folders)?)?;
        next.wait_for(TAKEN)?;
        daemon.finish()?.expect_code(0)?;
        daemon = next;
    }
    drop(frontend);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    // A daemon that starts without a takeover knows of no loss.
    let mut daemon = start()?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    ensure!(flush(&mut frontend)? == blk::OK, "the file system does not flush");
    drop(frontend);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}
