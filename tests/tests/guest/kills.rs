//! The daemon is killed, stopped and replaced again and again under verified load. The guest sees
//! no error.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::guest::{Image, Vm};
use ringhaul_kit::server::{Cache, Engine, Export, Server};
use ringhaul_kit::system::{is_installed, print_skipped, run};
use serde_json::{Value, json};

use super::{
    Boot, DISK_BYTES, LIMIT, Scene, boot, boot_fast, boot_packed, check_clean_exit,
    check_same_bytes, scenario, verified,
};

const KILLS: u64 = 30;
const STOPS: u64 = 10;
const UPGRADES: u64 = 10;
const KILLS_OF_FORMATS: u64 = 10;

/// The number of requests that the server has answered since its start.
fn count_served(server: &Server) -> Result<u64> {
    let shown = server.call("export.show", &json!({ "export": server.export().socket }))?;
    let kinds = shown["served"].as_object().context("the export has served nothing")?;
    let count = |kind: &Value| kind["requests"].as_u64();
    kinds.values().map(count).sum::<Option<u64>>().context("a kind of requests has no count")
}

/// Waits until the server has answered this many requests.
fn wait_served(server: &Server, wanted: u64) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while count_served(server)? < wanted {
        ensure!(Instant::now() < deadline, "the guest does not go on:\n{}", server.messages());
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// The way in which the daemon ends each time.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Kill,
    Stop,
}

/// Kills, stops and upgrades the daemon under one guest: a boot takes long.
fn check_restarts(boot: Boot, engine: Engine, cache: Cache, is_scsi: bool) -> Result<()> {
    let scene = Scene::new()?;
    let export = scene.export(&format!("restarts-{engine}"), engine, cache)?;
    let export = Export { units: is_scsi.then(Vec::new), ..export };
    let (mut vm, server) = start_load(&scene, &export, boot)?;
    let server = restart(&scene, server, End::Kill, KILLS)?;
    let mut server = restart(&scene, server, End::Stop, STOPS)?;
    upgrade(&mut vm, &mut server)?;
    // The last process has marked its requests in the front-end's inflight region, like the first
    // one.
    server.kill()?;
    drop(server);
    let server = scene.serve(&export)?;
    wait_served(&server, 20)?;
    verified::finish(vm, disk_of(&export), server)
}

fn disk_of(export: &Export) -> &'static str {
    if export.units.is_some() { "sda" } else { "vda" }
}

/// Boots a guest under load.
fn start_load(scene: &Scene, export: &Export, boot: Boot) -> Result<(Vm, Server)> {
    let server = scene.serve(export)?;
    let mut vm = boot(&[export])?;
    verified::start(&mut vm, disk_of(export))?;
    Ok((vm, server))
}

/// Ends and restarts the daemon this number of times, and further times until a kill has left a
/// request behind: on a busy machine the guest often has none out. Returns the last server.
fn restart(scene: &Scene, mut server: Server, end: End, times: u64) -> Result<Server> {
    let export = server.export().clone();
    let (mut round, mut done_again) = (0, 0);
    while round < times || (end == End::Kill && done_again == 0) {
        ensure!(round < 20 * times, "no kill has left a request behind");
        // The first end comes at once, and each later one after more requests.
        wait_served(&server, (round % times) * 7)?;
        match end {
            End::Kill => server.kill()?,
            End::Stop => check_clean_exit(&mut server)?,
        }
        drop(server);
        server = scene.serve(&export)?;
        wait_served(&server, 1)?;
        done_again += server.messages().matches("of an earlier process are repeated").count();
        round += 1;
    }
    eprintln!("{done_again} of {round} starts did requests again");
    Ok(server)
}

/// Lets new processes take over from the daemon.
fn upgrade(vm: &mut Vm, server: &mut Server) -> Result<()> {
    // The message about a device that was reset.
    let power_on = "dmesg | grep -c 'Power-on or device reset occurred' || true";
    let before = vm.check(power_on, LIMIT)?;
    let mut still = Vec::new();
    for upgrade in 0..UPGRADES {
        // The first takeover comes at once, and each later one after more requests.
        wait_served(server, upgrade * 20)?;
        still.push(server.upgrade()?);
        let messages = server.messages();
        ensure!(
            !messages.contains("has connected") && !messages.contains("has disconnected"),
            "{messages}"
        );
    }
    eprintln!("queues stood still for {still:?} ms");
    ensure!(vm.check(power_on, LIMIT)? == before, "a device began anew");
    Ok(())
}

/// Formats in which the file differs from the disk's contents; QEMU's tools read them.
#[derive(Clone, Copy)]
enum Format {
    Qcow2,
    Luks,
}

fn kill_daemon_on(format: Format) -> Result<()> {
    if !is_installed("qemu-img") {
        return Ok(());
    }
    let scene = Scene::new()?;
    let export = scene.export("image", Engine::IoUring, Cache::None)?;
    let name = |path: &Path| Some(path.to_str()?.to_owned());
    let (image, size) = (name(&export.file).context("an odd name")?, DISK_BYTES.to_string());
    let plain = export.file.with_extension("plain");
    let raw = name(&plain).context("an odd name")?;
    let key = format!("{image}.key");
    std::fs::write(&key, "no secret").context("writing a key")?;
    let secret = format!("secret,id=key,file={key}");
    let (disk, make, source) = match format {
        Format::Qcow2 => (
            format!("qcow2:{image}"),
            vec!["-f", "qcow2"],
            format!("driver=qcow2,file.filename={image}"),
        ),
        Format::Luks => (
            format!("luks,key-file={key},over={image}"),
            vec!["-f", "luks", "-o", "key-secret=key,iter-time=10"],
            format!("driver=luks,key-secret=key,file.filename={image}"),
        ),
    };
    let with_key = ["--object", &secret];
    run("qemu-img", &[&["create", "-q"], &with_key[..], &make, &[&image, &size]].concat())?;
    let export = Export { disk: Some(disk), ..export };

    let (mut vm, server) = start_load(&scene, &export, boot)?;
    let mut server = restart(&scene, server, End::Kill, KILLS_OF_FORMATS)?;
    verified::stop(&mut vm, "^$")?;
    let convert = ["convert", "-U", "--image-opts", "-O", "raw", &source, &raw];
    run("qemu-img", &[&convert[..1], &with_key, &convert[1..]].concat())?;
    check_same_bytes(&mut vm, disk_of(&export), &plain)?;
    verified::end(vm, &mut server)?;
    match format {
        // The last daemon has freed the leaked clusters of the killed ones.
        Format::Qcow2 => run("qemu-img", &["check", "-q", &image]).map(drop),
        Format::Luks => Ok(()),
    }
}

#[test]
fn the_daemon_of_a_qcow2_image_is_killed_ten_times() -> Result<()> {
    scenario(|| kill_daemon_on(Format::Qcow2))
}

#[test]
fn the_daemon_of_an_encrypted_disk_is_killed_ten_times() -> Result<()> {
    scenario(|| kill_daemon_on(Format::Luks))
}

#[test]
fn daemons_of_blk_with_io_uring_are_replaced() -> Result<()> {
    scenario(|| check_restarts(boot, Engine::IoUring, Cache::None, false))
}

#[test]
fn daemons_of_blk_with_aio_are_replaced() -> Result<()> {
    scenario(|| check_restarts(boot, Engine::Aio, Cache::None, false))
}

#[test]
fn daemons_of_blk_with_threads_are_replaced() -> Result<()> {
    scenario(|| check_restarts(boot, Engine::Threads, Cache::Writeback, false))
}

#[test]
fn daemons_of_scsi_are_replaced() -> Result<()> {
    scenario(|| check_restarts(boot, Engine::IoUring, Cache::None, true))
}

#[test]
fn daemons_of_blk_with_packed_rings_are_replaced() -> Result<()> {
    scenario(|| check_restarts(boot_packed, Engine::IoUring, Cache::None, false))
}

#[test]
fn daemons_of_scsi_with_packed_rings_are_replaced() -> Result<()> {
    scenario(|| check_restarts(boot_packed, Engine::Aio, Cache::None, true))
}

/// User Mode Linux always has packed rings. It never connects again, and has no inflight region.
fn take_over_from_uml(is_scsi: bool) -> Result<()> {
    if let Err(error) = Image::find_uml() {
        print_skipped(&format!("{error:#}"));
        return Ok(());
    }
    let scene = Scene::new()?;
    let export = scene.export("uml", Engine::IoUring, Cache::None)?;
    let export = Export { units: is_scsi.then(Vec::new), ..export };
    let (mut vm, mut server) = start_load(&scene, &export, boot_fast)?;
    let shown = server.call("export.show", &json!({ "export": export.socket }))?;
    ensure!(shown["front-end"].to_string().contains("ring-packed"), "{shown}");
    upgrade(&mut vm, &mut server)?;
    verified::finish(vm, disk_of(&export), server)
}

#[test]
fn daemons_of_blk_in_user_mode_linux_are_taken_over() -> Result<()> {
    take_over_from_uml(false)
}

#[test]
fn daemons_of_scsi_in_user_mode_linux_are_taken_over() -> Result<()> {
    take_over_from_uml(true)
}
