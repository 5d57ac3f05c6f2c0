//! Exports on disks that hang while they are opened.

use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Finished, Running, TestFolders, ringhaul, run};
use ringhaul_kit::control::taking_over;
use ringhaul_kit::frontend::{Frontend, Setup};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_kit::system::is_installed;
use rustix::process::Signal;

use crate::nbd::NbdServer;
use crate::shutdown::{serve_beside, serve_limited};

fn ctl(folders: &TestFolders, words: &[&str]) -> Result<Finished> {
    run(ringhaul()?.args(["ctl", "--control"]).arg(folders.socket("control")).args(words))
}

fn serving(socket: &Path) -> String {
    format!("serving on {}", socket.display())
}

#[test]
fn disks_that_are_being_opened_can_be_removed() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let mut daemon = serve_beside(&folders, &fuse, opcode::OPEN)?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    let [hung, healthy] = ["hung", "healthy"].map(|name| folders.socket(name));
    daemon.wait_for(&serving(&healthy))?;
    let name = hung.display().to_string();
    let removal = ctl(&folders, &["remove", &name, "--deadline", "0.1"])?.expect_code(3)?;
    ensure!(removal.stderr.contains("its disk is being opened"), "{}", removal.stderr);
    let listed = ctl(&folders, &["list"])?.expect_code(0)?.stdout;
    ensure!(listed.lines().any(|l| l.contains(&name) && l.contains("stopping")), "{listed}");
    fuse.release();
    daemon.wait_for("removed before it was served")?;
    ensure!(!hung.exists(), "there is a socket without an export");
    let disk = fuse.file().display().to_string();
    let add = ["add", "--socket-path", &name, "--blk-file", &disk, "--read-only", "--lock", "off"];
    ctl(&folders, &add)?.expect_code(0)?;
    Frontend::attach(&hung, &Setup::default())?.read(0, 0, 4096)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}

/// The process that takes over opens these disks itself.
#[test]
fn disks_that_are_being_opened_are_taken_over() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let mut daemon = serve_beside(&folders, &fuse, opcode::OPEN)?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    let [hung, healthy] = ["hung", "healthy"].map(|name| folders.socket(name));
    daemon.wait_for(&serving(&healthy))?;
    let mut frontend = Frontend::attach(&healthy, &Setup::default())?;
    frontend.read(0, 0, 4096)?;
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    // No call of the new process hangs.
    let opened = next.wait_for_each(&["took over 1 export", &serving(&hung)]);
    let served = opened.and_then(|()| {
        Frontend::attach(&hung, &Setup::default())?.read(0, 0, 4096)?;
        frontend.read(0, 8, 4096).map(drop)
    });
    // The kernel keeps the old process itself until the file system answers.
    fuse.release();
    served?;
    daemon.finish()?.expect_code(0)?;
    next.signal(Signal::TERM)?;
    next.finish()?.expect_code(0)?;
    ensure!(!hung.exists() && !healthy.exists(), "a socket is left behind");
    Ok(())
}

/// The new process opens a disk that was requested before the limits of its group changed.
#[test]
fn a_takeover_keeps_changed_limits() -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let limits = [",group=gold,iops-total=5", ",group=gold,iops-total=100"];
    let mut daemon = serve_limited(&folders, &fuse, opcode::OPEN, limits)?;
    // Dropped first: a process with a call that is stuck cannot be killed.
    let fuse = fuse;
    let [hung, healthy] = ["hung", "healthy"].map(|name| folders.socket(name));
    daemon.wait_for(&serving(&healthy))?;
    let healthy = healthy.display().to_string();
    ctl(&folders, &["set-disk", &healthy, "iops-total=9"])?.expect_code(0)?;
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    let served = next.wait_for_each(&["took over 1 export", &serving(&hung)]);
    fuse.release();
    served?;
    daemon.finish()?.expect_code(0)?;
    let limits = ctl(&folders, &["set-disk", &healthy])?.expect_code(0)?.stdout;
    ensure!(limits.contains("\"iops-total\": 9"), "{limits}");
    next.signal(Signal::TERM)?;
    next.finish()?.expect_code(0).map(drop)
}

/// Forwards connections to a server. At each gate, the first connection after `is_gated` waits
/// until each gate has one.
fn gate(
    socket: &Path,
    server: PathBuf,
    gates: Arc<Barrier>,
    is_gated: Arc<AtomicBool>,
) -> Result<()> {
    let listener = UnixListener::bind(socket)?;
    let copy = |mut from: UnixStream, mut to: UnixStream| {
        std::thread::spawn(move || {
            // The end of either side closes both.
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
    };
    std::thread::spawn(move || -> Result<()> {
        let mut was_closed = false;
        for front in listener.incoming() {
            let (front, back) = (front?, UnixStream::connect(&server)?);
            if is_gated.load(Ordering::Relaxed) && !std::mem::replace(&mut was_closed, true) {
                gates.wait();
            }
            copy(front.try_clone()?, back.try_clone()?);
            copy(back, front);
        }
        Ok(())
    });
    Ok(())
}

/// Each disk may take long to open, for example to derive a key.
#[test]
fn a_successor_opens_disks_side_by_side() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
    let _server = NbdServer::start_nbdkit(&folders, &["memory", "16M"])?;
    let (gates, is_gated) = (Arc::new(Barrier::new(2)), Arc::new(AtomicBool::new(false)));
    let mut command = ringhaul()?;
    command.args(["serve", "--control"]).arg(folders.socket("control"));
    for name in ["one", "two"] {
        let (socket, nbd) = (folders.socket(name), folders.socket(&format!("nbd-{name}")));
        gate(&nbd, folders.socket("nbd"), Arc::clone(&gates), Arc::clone(&is_gated))?;
        let (socket, nbd) = (socket.display(), nbd.display());
        command.arg("--export").arg(format!("socket-path={socket},disk=nbd+unix:///?socket={nbd}"));
    }
    let mut daemon = Running::serve(&mut command)?;
    daemon.wait_for("serving on")?;
    is_gated.store(true, Ordering::Relaxed);
    let mut next = Running::start(&mut taking_over(&folders)?)?;
    next.wait_for("took over 2 exports")?;
    daemon.finish()?.expect_code(0)?;
    Ok(())
}
