//! Moves during which a daemon is killed, and QEMUs that continue at the wrong place.

use anyhow::{Result, ensure};
use ringhaul_kit::guest::{FAST, SLOW};
use ringhaul_tools::process::retry;

use super::scene::{Device, DiskKind, Scene};
use crate::LIMIT;

/// The daemon of the target is killed before the guest moves, and the daemon of the source after
/// that.
fn survives_kills(device: Device, kind: DiskKind) -> Result<()> {
    let Some(mut scene) = Scene::new(device, kind, &[])? else { return Ok(()) };
    let mut place = scene.start("a", false)?;
    place.guest.wait_rounds(2)?;
    let (target, socket) = scene.target("b")?;
    place.monitor.begin(&socket, SLOW)?;
    place.guest.wait_rounds(1)?;
    scene.kill("b")?;
    place.guest.wait_rounds(2)?;
    place.monitor.cancel()?;
    place.monitor.wait_for("cancelled")?;
    drop(target);
    place.guest.wait_rounds(1)?;

    scene.serve("b")?;
    (place, _) = scene.move_to("b", place)?;
    scene.kill("a")?;
    place.guest.wait_rounds(2)?;
    ensure!(scene.is_locked()? == kind.has_locks(), "the guest runs");
    scene.serve("a")?;
    (place, _) = scene.move_to("a", place)?;
    drop(place);
    scene.check_image()
}

#[test]
fn daemons_are_killed_around_a_move() -> Result<()> {
    survives_kills(Device::Blk, DiskKind::Raw)
}

#[test]
fn daemons_of_an_image_are_killed_around_a_move() -> Result<()> {
    survives_kills(Device::Scsi, DiskKind::Qcow2)
}

/// A source that continues after its guest has moved gets no access to the disk.
fn a_second_guest_is_refused(device: Device, kind: DiskKind) -> Result<()> {
    let Some(mut scene) = Scene::new(device, kind, &[])? else { return Ok(()) };
    let mut source = scene.start("a", false)?;
    source.guest.wait_rounds(2)?;
    let (mut target, socket) = scene.target("b")?;
    let round = scene.move_between(&mut source, &mut target, &socket)?;
    let answered = scene.answered_requests("a")?;
    source.monitor.resume()?;
    let line = scene.wait_for_log("a", "cannot run without the lock of the disk")?;
    let holder = format!("locked by ringhaul (process {})", scene.process("b")?);
    ensure!(line.contains(&holder), "{line} does not name the process of b");
    target.guest.wait_rounds(3)?;
    ensure!(scene.answered_requests("a")? == answered, "two guests use the disk");
    // The stop answers the requests in flight. They can be the last ones of a round, which the
    // source then ends without the disk.
    ensure!(source.guest.round() <= round + 1, "the source ends rounds without its disk");
    drop((source, target));
    scene.check_image()
}

#[test]
fn a_source_that_returns_waits_for_the_lock() -> Result<()> {
    a_second_guest_is_refused(Device::Blk, DiskKind::Raw)
}

#[test]
fn a_source_that_returns_waits_for_the_lock_of_an_image() -> Result<()> {
    a_second_guest_is_refused(Device::Blk, DiskKind::Qcow2)
}

#[test]
fn a_source_that_returns_waits_for_the_lock_of_a_unit() -> Result<()> {
    a_second_guest_is_refused(Device::Scsi, DiskKind::Raw)
}

/// The target's QEMU refuses a guest that uses a feature which the target's daemon lacks.
/// The guest continues at the source: by itself if the target reports its failure there.
#[test]
fn a_target_without_the_features_of_the_guest_is_refused() -> Result<()> {
    let Some(mut scene) = Scene::new(Device::PackedBlk, DiskKind::Raw, &[])? else {
        return Ok(());
    };
    let mut source = scene.start("a", false)?;
    source.guest.wait_rounds(2)?;
    scene.kill("b")?;
    scene.serve_with("b", &["--in-order", "on"])?;
    for is_told in [false, true] {
        source.monitor.set_return_path(is_told)?;
        let mut target = scene.start("b", true)?;
        target.monitor.set_return_path(is_told)?;
        let socket = scene.accept(&mut target)?;
        source.monitor.begin(&socket, FAST)?;
        retry(LIMIT, || {
            let console = target.guest.console();
            ensure!(console.contains("unsupported. Allowed features"), "{console}");
            Ok(())
        })?;
        if is_told {
            source.monitor.wait_for("failed")?;
        } else {
            source.monitor.wait_for("completed")?;
            source.monitor.resume()?;
        }
        source.guest.wait_rounds(2)?;
    }
    drop(source);
    scene.check_image()
}
