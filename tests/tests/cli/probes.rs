//! USDT probes of the program, and the scripts in `contrib/bpftrace` that use them.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, bench, run, serve};
use ringhaul_kit::server::ringhaul_binary;
use ringhaul_kit::system::{is_installed, print_skipped};
use rustix::process::Signal;

use crate::{DISK_BYTES, is_root, test_folders};

/// Tools find the probes by notes in the program.
#[test]
fn the_program_has_all_probes() -> Result<()> {
    if !is_installed("readelf") {
        print_skipped("readelf of the package binutils is not installed");
        return Ok(());
    }
    let notes = run(Command::new("readelf").arg("--notes").arg(ringhaul_binary()?))?;
    let notes = notes.expect_code(0)?.stdout;
    for name in ["kick", "pop", "submit", "harvest", "push", "call"] {
        let note = format!("Provider: ringhaul\n    Name: {name}\n");
        ensure!(notes.contains(&note), "no probe {name}:\n{notes}");
    }
    Ok(())
}

/// The output of a script, traced while a load runs.
fn trace(script: &str, expected: &[&str]) -> Result<()> {
    let folders = test_folders()?;
    let (disk, socket) = (folders.disk("disk.img", DISK_BYTES)?, folders.socket("vm.sock"));
    let daemon = Running::serve(&mut serve(&socket, &disk)?)?;
    let script = format!("{}/../contrib/bpftrace/{script}", env!("CARGO_MANIFEST_DIR"));
    let deadline = Instant::now() + LIMIT;
    loop {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "bpftrace", "-p"]).stdin(Stdio::null());
        let pid = daemon.pid().as_raw_nonzero().to_string();
        let mut tracer = Running::start(command.arg(pid).arg(&script))?;
        // bpftrace does not tell when its probes are attached, so the load takes a while.
        run(&mut bench(&socket, "--rw randread --iodepth 8 --runtime 4")?)?.expect_code(0)?;
        tracer.signal(Signal::INT)?;
        let traced = tracer.finish()?.expect_code(0)?.stdout;
        if expected.iter().all(|name| traced.contains(name)) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "not all of {expected:?} in:\n{traced}");
    }
}

#[test]
fn the_scripts_count_requests_and_batches() -> Result<()> {
    let can_trace = || -> Result<bool> {
        let mut probe = Command::new("bpftrace");
        let ended = run(probe.args(["-e", "BEGIN { exit(); }"])).context("trying bpftrace")?;
        Ok(ended.status.success())
    };
    if !is_root() || !is_installed("bpftrace") || !can_trace()? {
        print_skipped("tracing needs root, bpftrace, and a kernel that permits it");
        return Ok(());
    }
    trace("latency.bt", &["@latency_us:"])?;
    trace("batches.bt", &["@submitted:", "@harvested:", "@requests[", "@kicks[", "@calls["])
}
