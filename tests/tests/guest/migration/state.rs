//! The state of logical units, which `ringhaul ctl state` moves with a guest.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::guest::{FAST, QemuHost};

use super::scene::{Device, DiskKind, Scene};

/// Attentions that the guest reports, as decimal numbers: POWER ON and REPORTED LUNS DATA HAS
/// CHANGED.
const POWER_ON: &str = "attention 10496\n";
const UNITS_CHANGED: &str = "attention 16142\n";

/// The report of the guest about its reservation and its write cache.
const RESERVED: &str = "reservation 7 write cache 0\n";

/// The last report of a guest about its unit.
fn last_report(place: &QemuHost) -> Result<String> {
    let lines = place.guest.complete_lines();
    let mut reports = lines.lines().filter(|line| line.starts_with("reservation "));
    Ok(format!("{}\n", reports.next_back().context("the guest reports nothing")?))
}

/// Moves a paused guest, and lets it continue after `before_it_continues`.
fn move_paused(
    scene: &Scene,
    source: &mut QemuHost,
    to: &str,
    before_it_continues: impl FnOnce(&Scene) -> Result<()>,
) -> Result<QemuHost> {
    let (mut target, socket) = scene.target(to)?;
    source.monitor.begin(&socket, FAST)?;
    source.monitor.wait_for("completed")?;
    before_it_continues(scene)?;
    target.monitor.resume()?;
    target.guest.wait_for_round_unless(source.guest.round() + 2, || None)?;
    Ok(target)
}

#[test]
fn the_state_of_a_unit_moves_with_its_guest() -> Result<()> {
    let Some(scene) = Scene::new(Device::Scsi, DiskKind::Raw, &[])? else { return Ok(()) };
    let refused = scene.ctl("a", &["state", "save"], "")?.expect_code(1)?;
    ensure!(refused.stderr.contains("no guest has stopped here"), "{}", refused.stderr);
    let mut source = scene.start("a", false)?;
    source.guest.wait_rounds(2)?;
    ensure!(last_report(&source)? == RESERVED, "{}", source.guest.console());
    let refused = scene.ctl("a", &["state", "save"], "")?.expect_code(1)?;
    ensure!(refused.stderr.contains("its guest runs here"), "{}", refused.stderr);

    source.monitor.pause()?;
    scene.add_second_unit()?;
    let target = move_paused(&scene, &mut source, "b", |scene| {
        let state = scene.ctl("a", &["state", "save"], "")?.expect_code(0)?.stdout;
        scene.ctl("b", &["state", "load"], &state)?.expect_code(0).map(drop)
    })?;
    let console = target.guest.console();
    ensure!(console.contains(UNITS_CHANGED) && !console.contains(POWER_ON), "{console}");
    ensure!(last_report(&target)? == RESERVED, "{console}");
    let refused = scene.ctl("b", &["state", "load"], "{}")?.expect_code(1)?;
    ensure!(refused.stderr.contains("it is no such state"), "{}", refused.stderr);

    // The source has gone, and its daemon still has the state. The target refuses it now.
    drop(source);
    let state = scene.ctl("a", &["state", "save"], "")?.expect_code(0)?.stdout;
    let refused = scene.ctl("b", &["state", "load"], &state)?.expect_code(1)?;
    ensure!(refused.stderr.contains("its guest runs here"), "{}", refused.stderr);

    // Without its state, the guest finds a unit that was switched on.
    let mut source = target;
    source.monitor.pause()?;
    let target = move_paused(&scene, &mut source, "a", |_| Ok(()))?;
    let console = target.guest.console();
    ensure!(console.contains(POWER_ON) && last_report(&target)? != RESERVED, "{console}");
    Ok(())
}
