//! A guest moves between two QEMUs, each with a daemon of its own, while it reads and writes. It
//! verifies its data and its memory; both daemons have the same disk.

mod failures;
mod kinds;
mod libvirt;
mod linux;
mod scene;
mod state;

use anyhow::{Result, ensure};
use ringhaul_kit::guest::SLOW;
use ringhaul_tools::process::retry;

use super::LIMIT;
use scene::{Device, DiskKind, MOVES, Scene, targets};

/// A guest moves there and back, after moves that are cancelled.
fn moves_there_and_back(device: Device, kind: DiskKind, options: &[&str]) -> Result<()> {
    let Some(mut scene) = Scene::new(device, kind, options)? else { return Ok(()) };
    ensure!(!scene.is_locked()?, "no guest runs");
    let mut place = scene.start("a", false)?;
    place.guest.wait_rounds(2)?;
    ensure!(scene.is_locked()? == kind.has_locks(), "a guest runs");
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
    let mut switches = Vec::new();
    for to in targets(MOVES) {
        let switch;
        (place, switch) = scene.move_to(to, place)?;
        switches.push(switch);
        ensure!(scene.is_locked()? == kind.has_locks(), "the guest runs");
    }
    scene::print_row(&format!("{device:?} on {kind:?} {}", options.join(" ")), &switches);
    drop(place);
    retry(LIMIT, || {
        ensure!(!scene.is_locked()?, "the guest is gone");
        Ok(())
    })?;
    scene.check_image()
}
