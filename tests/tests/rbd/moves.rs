//! A guest moves between two QEMUs, each with a daemon of its own on the same image.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::guest::{QemuHost, RingLayout, SLOW, Vmm, lacks_kvm};
use ringhaul_kit::system::print_skipped;

use super::{Scene, Served};

/// The moves of the guest.
const MOVES: usize = 4;

/// Starts a QEMU with the guest, or one that waits for it.
fn start(daemon: &Served, is_target: bool) -> Result<QemuHost> {
    let vmm = Vmm::QemuMoved { layout: RingLayout::Split, is_target, is_scsi: false };
    QemuHost::start_nice(&vmm, &daemon.socket)
}

/// The guest verifies its data at each place, and the exclusive lock follows it.
pub(super) fn guest_moves(scene: &mut Scene) -> Result<()> {
    if let Some(reason) = lacks_kvm() {
        print_skipped(&reason);
        return Ok(());
    }
    let disk = scene.image("travelling")? + ",exclusive=on";
    let serve = |name| scene.serve(name, &disk, &["--lock", "late", "--num-queues", "2"]);
    let daemons = [serve("host-a")?, serve("host-b")?];
    let owner = || scene.cluster.tool("rbd", &["lock", "ls", "travelling"]);
    let socket = scene.sockets.path().join("move");
    let target = |daemon| {
        let _ = std::fs::remove_file(&socket);
        let mut target = start(daemon, true)?;
        target.monitor.accept(&socket)?;
        anyhow::Ok(target)
    };
    ensure!(owner()?.is_empty(), "a daemon without a guest has the lock");
    let mut source = start(&daemons[0], false)?;
    source.guest.wait_rounds(2)?;
    let of_source = owner()?;
    let cancelled = target(&daemons[1])?;
    source.monitor.begin(&socket, SLOW)?;
    source.guest.wait_rounds(1)?;
    source.monitor.cancel()?;
    source.monitor.wait_for("cancelled")?;
    drop(cancelled);
    source.guest.wait_rounds(1)?;
    let mut last = owner()?;
    ensure!(last == of_source, "the lock has moved without the guest: {of_source} {last}");
    for place in (1..=MOVES).map(|turn| turn % 2) {
        let mut target = target(&daemons[place])?;
        source.move_to(&mut target, &socket, || None).with_context(|| format!("to {place}"))?;
        let present = owner()?;
        ensure!(present.contains("There is 1 exclusive lock"), "{present}");
        ensure!(present != last, "the lock has not moved: {present}");
        (source, last) = (target, present);
    }
    drop(source);
    daemons.into_iter().try_for_each(Served::end)
}
