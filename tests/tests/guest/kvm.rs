//! A small guest under KVM, in monitors with different front-ends. It verifies its own data after
//! each kill of the daemon and each takeover.

use anyhow::{Result, ensure};
use ringhaul_kit::guest::{HotPlug, KVM_DISK_BYTES, KvmGuest, RingLayout, Vmm, lacks_kvm};
use ringhaul_kit::server::{Cache, Engine, Export};
use ringhaul_tools::process::retry;

use super::{LIMIT, Scene, check_clean_exit};

/// Runs a guest while other processes take over from the daemon. The daemon is also killed if the
/// VMM reconnects.
fn verify_takeovers(vmm: &Vmm, engine: Engine) -> Result<()> {
    let scene = Scene::new()?;
    let export = export(&scene, engine)?;
    let mut server = scene.serve(&export)?;
    let mut guest = KvmGuest::start(vmm, &export.socket)?;
    guest.wait_rounds(1)?;
    if vmm.connects_again() {
        for _ in 0..2 {
            server.kill()?;
            drop(server);
            server = scene.serve(&export)?;
            guest.wait_rounds(2)?;
        }
    }
    for _ in 0..2 {
        server.upgrade()?;
        guest.wait_rounds(2)?;
    }
    let console = guest.console();
    let resets = console.lines().filter(|line| line.starts_with("reset at round ")).count();
    ensure!(!vmm.resets_devices() || resets >= 3, "{resets} resets:\n{console}");
    drop(guest);
    check_clean_exit(&mut server)
}

fn export(scene: &Scene, engine: Engine) -> Result<Export> {
    let export = scene.export(&format!("kvm-{engine}"), engine, Cache::None)?;
    std::fs::File::options().write(true).open(&export.file)?.set_len(KVM_DISK_BYTES)?;
    Ok(export)
}

fn skip(reason: &str) -> Result<()> {
    ringhaul_kit::system::print_skipped(reason);
    Ok(())
}

fn under_qemu(layout: RingLayout, engine: Engine) -> Result<()> {
    match lacks_kvm() {
        Some(reason) => skip(&reason),
        None => verify_takeovers(&Vmm::Qemu(layout), engine),
    }
}

#[test]
fn qemu_with_io_uring() -> Result<()> {
    under_qemu(RingLayout::Split, Engine::IoUring)
}

#[test]
fn qemu_with_aio() -> Result<()> {
    under_qemu(RingLayout::Split, Engine::Aio)
}

#[test]
fn qemu_with_threads() -> Result<()> {
    under_qemu(RingLayout::Split, Engine::Threads)
}

#[test]
fn qemu_with_packed_rings_and_io_uring() -> Result<()> {
    under_qemu(RingLayout::Packed, Engine::IoUring)
}

#[test]
fn qemu_with_packed_rings_and_aio() -> Result<()> {
    under_qemu(RingLayout::Packed, Engine::Aio)
}

#[test]
fn qemu_with_packed_rings_and_threads() -> Result<()> {
    under_qemu(RingLayout::Packed, Engine::Threads)
}

#[test]
fn a_disk_is_plugged_in_and_out() -> Result<()> {
    plug_in_and_out(RingLayout::Split)
}

#[test]
fn a_disk_with_packed_rings_is_plugged_in_and_out() -> Result<()> {
    plug_in_and_out(RingLayout::Packed)
}

fn plug_in_and_out(layout: RingLayout) -> Result<()> {
    if let Some(reason) = lacks_kvm() {
        return skip(&reason);
    }
    let scene = Scene::new()?;
    let export = export(&scene, Engine::IoUring)?;
    let mut server = scene.serve(&export)?;
    let mut guest = KvmGuest::start(&Vmm::QemuPlugged(layout), &export.socket)?;
    let mut plug = HotPlug::new(&guest, layout)?;
    for left in 1..=3 {
        plug.plug_in(&export.socket)?;
        guest.wait_rounds(2)?;
        plug.pull_out()?;
        retry(LIMIT, || {
            let seen = server.messages().matches("the front-end has disconnected").count();
            ensure!(seen == left, "the daemon has seen {seen} front-ends leave");
            Ok(())
        })?;
    }
    let console = guest.console();
    ensure!(console.matches("ejected before round ").count() == 3, "{console}");
    drop(guest);
    check_clean_exit(&mut server)
}

#[test]
fn alioth() -> Result<()> {
    if let Some(reason) = lacks_kvm() {
        return skip(&reason);
    }
    match Vmm::alioth() {
        Ok(vmm) => verify_takeovers(&vmm, Engine::IoUring),
        Err(error) => skip(&format!("Alioth, which cannot be installed: {error:#}")),
    }
}

#[test]
fn vmms_in_the_path() -> Result<()> {
    if let Some(reason) = lacks_kvm() {
        return skip(&reason);
    }
    let vmms = Vmm::all_in_path();
    if vmms.len() < 2 {
        skip("$PATH lacks cloud-hypervisor, firecracker or both")?;
    }
    vmms.iter().try_for_each(|vmm| verify_takeovers(vmm, Engine::IoUring))
}
