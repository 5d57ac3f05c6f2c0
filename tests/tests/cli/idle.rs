//! A daemon without work sleeps, and misses nothing.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{LIMIT, READY, Running, ringhaul, run};
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::rest::wait_for_rest;
use ringhaul_tools::process::retry;
use rustix::process::Signal;

use crate::test_folders;

const MIB: u64 = 1 << 20;

fn set_len(file: &Path, bytes: u64) -> Result<()> {
    Ok(File::options().write(true).open(file)?.set_len(bytes)?)
}

#[test]
fn a_daemon_without_work_does_not_wake() -> Result<()> {
    let folders = test_folders()?;
    let [used, unused] = ["used", "unused"].map(|name| folders.disk(&format!("{name}.img"), MIB));
    let (used, unused) = (used?, unused?);
    let [vm, other] = ["vm", "other"].map(|name| folders.socket(name));
    let mut command = ringhaul()?;
    command.args(["serve", "--iothreads", "2", "--control"]).arg(folders.socket("control"));
    command.arg("--metrics").arg(format!("unix:{}", folders.socket("metrics").display()));
    for (socket, disk) in [(&vm, &used), (&other, &unused)] {
        let (socket, disk) = (socket.display(), disk.display());
        command.args(["--export", &format!("socket-path={socket},blk-file={disk}")]);
    }
    let mut daemon = Running::serve(&mut command)?;
    let mut frontend = Frontend::attach(&vm, &Setup::default())?;
    for round in 1..=2 {
        frontend.write(0, 8, &[round; 4096])?;
        ensure!(frontend.read(1, 8, 4096)? == [round; 4096], "round {round}");
        wait_for_rest(daemon.pid(), "")?;
    }
    set_len(&unused, 2 * MIB)?;
    daemon.wait_for("2097152 bytes")?;
    let shown = || -> Result<()> {
        let mut ctl = ringhaul()?;
        ctl.args(["ctl", "--control"]).arg(folders.socket("control")).arg("show");
        let shown = run(ctl.arg(&other))?.expect_code(0)?.stdout;
        ensure!(shown.contains("\"size-bytes\": 2097152"), "{shown}");
        Ok(())
    };
    retry(LIMIT, shown)?;
    wait_for_rest(daemon.pid(), "")?;
    set_len(&used, MIB / 2)?;
    daemon.wait_for("its disk has shrunk to 524288 bytes")?;
    set_len(&used, MIB)?;
    wait_for_rest(daemon.pid(), "")?;
    daemon.signal(Signal::TERM)?;
    drop(frontend);
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// No thread wakes, so the idle daemon takes no CPU time: with the metrics of as many exports, and
/// after a scrape of them.
#[test]
fn many_exports_with_metrics_do_not_wake() -> Result<()> {
    const EXPORTS: usize = 256;
    let folders = test_folders()?;
    let metrics = folders.socket("metrics");
    let mut command = ringhaul()?;
    command.args(["serve", "--control"]).arg(folders.socket("control"));
    command.arg("--metrics").arg(format!("unix:{}", metrics.display()));
    for number in 0..EXPORTS {
        let socket = folders.socket(&number.to_string());
        let disk = folders.disk(&format!("{number}.img"), MIB)?;
        let export = format!("socket-path={},blk-file={}", socket.display(), disk.display());
        command.args(["--export", &export]);
    }
    let mut daemon = Running::start(&mut command)?;
    for _ in 0..EXPORTS {
        daemon.wait_for(READY)?;
    }
    let mut stream = UnixStream::connect(&metrics)?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    let exports = page.matches("ringhaul_export_connected{").count();
    ensure!(exports == EXPORTS, "{exports} exports in the metrics");
    wait_for_rest(daemon.pid(), "")?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
