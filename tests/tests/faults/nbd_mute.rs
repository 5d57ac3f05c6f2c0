//! NBD servers that do not answer while the header of a disk is read.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Finished, Running, Scene, ringhaul, run};
use ringhaul_kit::nbd::Peer;
use ringhaul_kit::system::is_installed;
use rustix::process::Signal;

/// A limit that only ends a hopeless wait.
const HOPELESS: Duration = Duration::from_secs(60);

/// A server that accepts all connections and answers no read. `None` if nbdkit is not installed.
fn mute(scene: &Scene) -> Result<Option<Peer>> {
    if !is_installed("nbdkit") {
        return Ok(None);
    }
    let log = format!("logfile={}", scene.path("reads").display());
    let filters = ["--filter=log", "--filter=delay", "memory", "64M", &log, "delay-read=3600"];
    Peer::nbdkit(scene, &filters).map(Some)
}

/// The number of reads that the server has received.
fn reads(scene: &Scene) -> Result<usize> {
    let log = std::fs::read_to_string(scene.path("reads"))?;
    Ok(log.lines().filter(|line| line.contains(" Read id=")).count())
}

/// Disks that cannot be opened without a read.
fn disks(scene: &Scene, peer: &Peer) -> Result<[String; 3]> {
    let (key, uri) = (scene.path("key"), peer.uri(""));
    std::fs::write(&key, "secret")?;
    let luks = format!("luks,key-file={},over={uri}", key.display());
    Ok([format!("qcow2,over={uri}"), luks, format!("image,format=auto,over={uri}")])
}

fn ctl(scene: &Scene, words: &[&str]) -> Result<Finished> {
    run(ringhaul()?.args(["ctl", "--control"]).arg(scene.socket("control")).args(words))
}

/// Starts a `ctl` command that does not end by itself.
fn begin(scene: &Scene, words: &[&str]) -> Result<Running> {
    let control = scene.socket("control");
    Running::start(ringhaul()?.args(["ctl", "--control"]).arg(control).args(words))
}

/// Repeats a `ctl` command until its result fits.
fn until(scene: &Scene, words: &[&str], has_come: impl Fn(&Finished) -> bool) -> Result<Finished> {
    let start = Instant::now();
    loop {
        let finished = ctl(scene, words)?;
        if has_come(&finished) {
            return Ok(finished);
        }
        ensure!(start.elapsed() < HOPELESS, "{}{}", finished.stdout, finished.stderr);
    }
}

fn serve(scene: &Scene, options: &[&str]) -> Result<Running> {
    let mut command = ringhaul()?;
    command.args(["serve", "--control"]).arg(scene.socket("control"));
    command.arg("--socket-path").arg(scene.socket("vm.sock")).args(options);
    Running::serve(&mut command)
}

fn end(mut daemon: Running) -> Result<()> {
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

#[test]
fn an_export_is_removed_whose_header_never_comes() -> Result<()> {
    let scene = Scene::new(env!("CARGO_TARGET_TMPDIR"))?;
    let Some(peer) = mute(&scene)? else { return Ok(()) };
    let daemon = serve(&scene, &["--disk", "null:1M"])?;
    let name = scene.socket("late.sock").display().to_string();
    for disk in disks(&scene, &peer)? {
        let added = begin(&scene, &["add", "--socket-path", &name, "--disk", &disk])?;
        until(&scene, &["list"], |list| list.stdout.contains(&name))?;
        ctl(&scene, &["remove", &name])?.expect_code(0)?;
        let added = added.finish()?.expect_code(1)?;
        ensure!(added.stderr.contains("was removed before it was served"), "{}", added.stderr);
        ensure!(!Path::new(&name).exists(), "there is a socket without an export");
    }
    end(daemon)
}

#[test]
fn a_unit_is_removed_whose_header_never_comes() -> Result<()> {
    let scene = Scene::new(env!("CARGO_TARGET_TMPDIR"))?;
    let Some(peer) = mute(&scene)? else { return Ok(()) };
    let daemon = serve(&scene, &["--device", "scsi", "--lun", "0,disk=null:1M"])?;
    let name = scene.socket("vm.sock").display().to_string();
    let is_given_up = |removed: &Finished| removed.stderr.contains("is given up");
    for disk in disks(&scene, &peer)? {
        let unit = format!("1,disk={disk}");
        let added = begin(&scene, &["add-lun", &name, &unit])?;
        until(&scene, &["remove-lun", &name, "1"], is_given_up)?.expect_code(1)?;
        let added = added.finish()?.expect_code(1)?;
        ensure!(added.stderr.contains("was not added"), "{}", added.stderr);
    }
    ctl(&scene, &["add-lun", &name, "1,disk=null:2M"])?.expect_code(0)?;
    // The removal of an export also removes a unit that is being opened.
    let unit = format!("2,disk={}", disks(&scene, &peer)?[0]);
    let before = reads(&scene)?;
    let added = begin(&scene, &["add-lun", &name, &unit])?;
    until(&scene, &["ping"], |_| reads(&scene).is_ok_and(|now| now > before))?;
    ctl(&scene, &["remove", &name])?.expect_code(0)?;
    let added = added.finish()?.expect_code(1)?;
    ensure!(added.stderr.contains("was not added"), "{}", added.stderr);
    end(daemon)
}

#[test]
fn a_disk_whose_header_never_comes_is_given_up() -> Result<()> {
    let scene = Scene::new(env!("CARGO_TARGET_TMPDIR"))?;
    let Some(peer) = mute(&scene)? else { return Ok(()) };
    let disks = disks(&scene, &peer)?;
    let programs = disks.iter().zip(["info", "bench", "info"]).map(|(disk, command)| {
        let options = if command == "bench" { &["--rw", "read"][..] } else { &[] };
        Running::start(ringhaul()?.args(["disk", command, disk]).args(options))
    });
    for program in programs.collect::<Result<Vec<_>>>()? {
        let finished = program.finish()?.expect_code(2)?;
        ensure!(finished.stderr.contains("is given up; see whether"), "{}", finished.stderr);
    }
    Ok(())
}
