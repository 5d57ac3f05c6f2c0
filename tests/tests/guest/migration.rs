//! A guest moves between two QEMUs, each with a daemon of its own, while it reads and writes. It
//! verifies its data and its memory; both daemons have the same disk.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, serve};
use ringhaul_kit::guest::{KVM_DISK_BYTES, KvmGuest, Mover, RingLayout, Vmm, lacks_kvm};
use ringhaul_tools::process::retry;

use super::LIMIT;

/// A limit that no move of this guest reaches, and one with which a move does not end.
const FAST: u64 = 1 << 30;
const SLOW: u64 = 64 << 10;

/// The two daemons and the disk of both.
struct Scene {
    folders: TestFolders,
    layout: RingLayout,
    _daemons: Vec<Running>,
}

impl Scene {
    fn new(options: &[&str], layout: RingLayout) -> Result<Self> {
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let disk = folders.disk("disk", KVM_DISK_BYTES)?;
        let start = |name| {
            let mut command = serve(&folders.socket(name), &disk)?;
            Running::serve(command.args(options))
        };
        let daemons = ["a", "b"].map(start).into_iter().collect::<Result<_>>()?;
        Ok(Self { folders, layout, _daemons: daemons })
    }

    fn disk(&self) -> PathBuf {
        self.folders.path("disk")
    }

    /// Starts a QEMU with a guest, or one that waits for a guest.
    fn start(&self, name: &str, is_target: bool) -> Result<Place> {
        let vmm = Vmm::QemuMoved { layout: self.layout, is_target };
        let guest = KvmGuest::start(&vmm, &self.folders.socket(name))?;
        let monitor = Mover::new(&guest)?;
        Ok(Place { guest, monitor })
    }

    /// Starts a QEMU that waits for a guest at the second result.
    fn target(&self, name: &str) -> Result<(Place, PathBuf)> {
        let socket = self.folders.socket("move");
        let _ = std::fs::remove_file(&socket);
        let mut target = self.start(name, true)?;
        target.monitor.accept(&socket)?;
        Ok((target, socket))
    }

    /// Moves a guest to a QEMU at the daemon `to`, and waits until it runs there.
    fn move_to(&self, to: &str, mut source: Place) -> Result<Place> {
        let (mut target, socket) = self.target(to)?;
        source.monitor.begin(&socket, FAST)?;
        source.monitor.wait_for("completed")?;
        let round = source.guest.round();
        target.guest.wait_for_round(round + 2)?;
        ensure!(source.guest.round() == round, "the guest runs twice");
        Ok(target)
    }
}

/// A QEMU.
struct Place {
    guest: KvmGuest,
    monitor: Mover,
}

/// Returns true if a program of QEMU finds the disk locked for writing.
fn is_locked(disk: &Path) -> Result<bool> {
    let mut command = Command::new("qemu-io");
    let output = command.args(["-f", "raw", "-c", "read 0 512"]).arg(disk).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() || said.contains("lock"), "{said}");
    Ok(!output.status.success())
}

fn moves_there_and_back(layout: RingLayout, options: &[&str]) -> Result<()> {
    if let Some(reason) = lacks_kvm() {
        ringhaul_kit::system::print_skipped(&reason);
        return Ok(());
    }
    let scene = Scene::new(&[&["--lock", "late", "--num-queues", "2"], options].concat(), layout)?;
    ensure!(!is_locked(&scene.disk())?, "no guest runs");
    let mut place = scene.start("a", false)?;
    place.guest.wait_rounds(2)?;
    ensure!(is_locked(&scene.disk())?, "a guest runs");
    for _ in 0..2 {
        // A move that fails, with the log turned off and on again.
        let (target, socket) = scene.target("b")?;
        place.monitor.begin(&socket, SLOW)?;
        place.guest.wait_rounds(1)?;
        place.monitor.cancel()?;
        place.monitor.wait_for("cancelled")?;
        drop(target);
        place.guest.wait_rounds(1)?;
    }
    for to in ["b", "a", "b"] {
        place = scene.move_to(to, place)?;
        ensure!(is_locked(&scene.disk())?, "the guest runs");
    }
    drop(place);
    retry(LIMIT, || {
        ensure!(!is_locked(&scene.disk())?, "the guest is gone");
        Ok(())
    })
}

#[test]
fn a_guest_moves_with_io_uring() -> Result<()> {
    moves_there_and_back(RingLayout::Split, &["--engine", "io_uring"])
}

#[test]
fn a_guest_moves_with_aio() -> Result<()> {
    moves_there_and_back(RingLayout::Split, &["--engine", "aio"])
}

#[test]
fn a_guest_moves_with_the_page_cache() -> Result<()> {
    moves_there_and_back(RingLayout::Split, &["--engine", "threads", "--cache", "writeback"])
}

#[test]
fn a_guest_moves_with_packed_rings() -> Result<()> {
    moves_there_and_back(RingLayout::Packed, &["--engine", "io_uring"])
}
