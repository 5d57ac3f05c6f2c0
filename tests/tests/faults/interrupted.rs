//! System calls that a signal interrupts before they have an effect.

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul_under};
use ringhaul_kit::frontend::{Frontend, Setup};

use crate::failing_thread::can_inject;

/// The daemon probes flushes of Linux AIO with an op. If it stopped waiting for the event after a
/// signal, the event would be taken for that of the first request.
#[test]
fn an_event_of_the_set_up_completes_no_request() -> Result<()> {
    if !can_inject() {
        return Ok(());
    }
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let (socket, file) = (folders.socket("disk.sock"), folders.disk("disk.img", 1 << 20)?);
    let strace = ["setpriv", "--pdeathsig", "KILL", "strace", "-f", "-q", "-o", "/dev/null"];
    let interrupt = ["-e", "inject=io_getevents:error=EINTR:when=1"];
    let mut command = ringhaul_under(&[&strace[..], &interrupt].concat())?;
    command.arg("serve").arg("--socket-path").arg(&socket).arg("--blk-file").arg(&file);
    let _daemon = Running::serve(command.args(["--engine", "aio"]))?;
    let mut frontend = Frontend::attach(&socket, &Setup::default())?;
    for (sector, byte) in [(0, 1), (8, 2), (16, 3)] {
        let data = [byte; 4096];
        frontend.write(0, sector, &data)?;
        ensure!(frontend.read(0, sector, 4096)? == data, "sector {sector} has something else");
    }
    Ok(())
}
