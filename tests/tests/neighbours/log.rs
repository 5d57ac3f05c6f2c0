//! A log that nobody reads.

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_tests::cli::{READY, Scene, ringhaul};
use ringhaul_tests::daemon::{LIMIT, pattern};
use ringhaul_tests::for_each_engine;
use ringhaul_tests::frontend::{Frontend, Setup, blk};
use ringhaul_tests::guest::Engine;
use rustix::process::{Pid, Signal, kill_process};
use xtask::guest::wait_child;

for_each_engine! { a_log_that_nobody_reads }

/// Waits for lines of the daemon.
fn wait_ready(lines: &mut BufReader<PipeReader>, count: usize) -> Result<()> {
    let (mut seen, mut line) = (0, String::new());
    while seen < count {
        line.clear();
        ensure!(lines.read_line(&mut line)? > 0, "the daemon has ended");
        seen += usize::from(line.contains(READY));
    }
    Ok(())
}

/// Fills a pipe to its last byte, through an open file of its own that does not wait.
fn fill(pipe: &PipeReader) -> Result<()> {
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits())?;
    let mut writer = File::options().write(true).custom_flags(flags).open(&path)?;
    for bytes in [4096, 1] {
        while writer.write(&vec![b'x'; bytes]).is_ok() {}
    }
    Ok(())
}

/// Guests cause lines, nobody takes them, and nobody waits for that.
fn a_log_that_nobody_reads(engine: Engine) -> Result<()> {
    let scene = Scene::new(env!("CARGO_TARGET_TMPDIR"))?;
    let sockets = [scene.socket("bad"), scene.socket("good")];
    let (reader, writer) = std::io::pipe().context("making a pipe")?;
    let mut command = ringhaul()?;
    command.args(["serve", "--engine", &engine.to_string()]).stderr(writer);
    for (name, socket) in ["bad.img", "good.img"].iter().zip(&sockets) {
        let file = scene.disk(name, 4 << 20)?;
        let (socket, file) = (socket.display(), file.display());
        command.args(["--export", &format!("socket-path={socket},blk-file={file}")]);
    }
    let mut child = command.spawn().context("starting the daemon")?;
    // The end of the pipe that the daemon has is the only one.
    drop(command);
    let mut lines = BufReader::new(reader);
    let result = wait_ready(&mut lines, 2)
        .and_then(|()| fill(lines.get_ref()))
        .and_then(|()| drive(&sockets[0], &sockets[1]))
        .and_then(|()| {
            kill_process(Pid::from_child(&child), Signal::TERM).context("sending SIGTERM")?;
            let status = wait_child(&mut child, Instant::now() + LIMIT)?;
            ensure!(status.success(), "the daemon ended with {status}");
            Ok(())
        });
    // These fail only if it has ended.
    let _ = child.kill();
    let _ = child.wait();
    result
}

/// One guest sends requests that make no sense, the other goes on.
fn drive(bad: &Path, good: &Path) -> Result<()> {
    let mut bad = Frontend::attach(bad, &Setup::default())?;
    let mut good = Frontend::attach(good, &Setup::default())?;
    for number in 0..100 {
        let answer = bad.request(0, 0xdead, 0, &[], 512)?;
        ensure!(answer.status == blk::UNSUPP, "an unknown request ended with {answer:?}");
        let answer = bad.request(1, blk::IN, 1 << 40, &[], 512)?;
        ensure!(answer.status == blk::IOERR, "a read beyond the end ended with {answer:?}");
        let data = pattern(number, 4096);
        good.write(0, 8 * number, &data).context("the other export")?;
        ensure!(good.read(1, 8 * number, 4096)? == data, "other data than was written");
    }
    Ok(())
}
