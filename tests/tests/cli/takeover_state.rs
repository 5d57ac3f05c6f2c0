//! The state of disks, which a process hands over with them.

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, serve};
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use ringhaul_kit::fuse::{Fuse, opcode};
use rustix::process::Signal;
use serde_json::json;

use crate::scene;
use crate::takeover::{Client, TAKEN, taking_over};

fn flush(frontend: &mut Frontend) -> Result<u8> {
    Ok(frontend.request(0, blk::FLUSH, 0, &[], 0)?.status)
}

/// The kernel reports a loss once. A process without that knowledge would confirm flushes of lost
/// data.
#[test]
fn a_disk_that_has_lost_data_has_lost_it_for_each_process_that_follows() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let scene = scene()?;
    let start = || -> Result<Running> {
        let mut command = serve(&scene.socket("vm.sock"), &fuse.file())?;
        command.args(["--engine", "threads", "--lock", "off", "--name", "vm", "--control"]);
        Running::serve(command.arg(scene.socket("control")))
    };
    let mut daemon = start()?;
    let mut frontend = Frontend::attach(&scene.socket("vm.sock"), &Setup::default())?;
    fuse.withhold(daemon.pid(), &[opcode::FSYNC]);
    fuse.fail();
    let failed = flush(&mut frontend);
    // From now on the file system flushes without an error.
    fuse.release();
    ensure!(failed? == blk::IOERR, "a flush that fails is answered with OK");
    for takeover in 0..3 {
        ensure!(flush(&mut frontend)? == blk::IOERR, "after {takeover} takeovers it is forgotten");
        let shown = Client::new(&scene)?.ask("export.show", &json!({ "export": "vm" }))?;
        ensure!(shown["result"]["disk-state"] == "lost", "after {takeover} takeovers: {shown}");
        let mut next = Running::start(&mut taking_over(&scene)?)?;
        next.wait_for(TAKEN)?;
        daemon.finish()?.expect_code(0)?;
        daemon = next;
    }
    drop(frontend);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    // A daemon that starts without a takeover knows of no loss.
    let mut daemon = start()?;
    let mut frontend = Frontend::attach(&scene.socket("vm.sock"), &Setup::default())?;
    ensure!(flush(&mut frontend)? == blk::OK, "the file system does not flush");
    drop(frontend);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}
