//! Images of QEMU's format on NBD servers.

use std::fs::OpenOptions;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, Scene, bench, ringhaul, run};
use ringhaul_kit::system::{is_installed, run as run_program};
use rustix::process::Signal;

use super::nbd::{Peer, scene, serve};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 32 * MIB;

fn has_programs() -> bool {
    ["nbdkit", "qemu-img"].iter().all(|program| is_installed(program))
}

/// Makes an image with the words of `qemu-img create`, and gives it the space that it is to have.
fn make(scene: &Scene, words: &[&str], bytes: u64) -> Result<String> {
    let path = scene.path("image").into_os_string().into_string();
    let path = path.ok().context("a path with an odd name")?;
    let size = DISK_BYTES.to_string();
    let create = [&["create", "-q", "-f", "qcow2"], words, &[&path, &size]].concat();
    run_program("qemu-img", &create)?;
    give_space(&path, bytes)?;
    Ok(path)
}

fn give_space(path: impl AsRef<Path>, bytes: u64) -> Result<()> {
    let file = OpenOptions::new().write(true).open(path).context("opening an image")?;
    file.set_len(bytes).context("giving it space")
}

/// A server of an image. It keeps nobody away from the file, and has what was written to it.
fn start(scene: &Scene, path: &str) -> Result<(Peer, String)> {
    let peer = Peer::nbdkit(scene, &["file", path])?;
    let disk = format!("qcow2,over={}", peer.uri(""));
    Ok((peer, disk))
}

fn ctl(scene: &Scene, words: &[&str]) -> Result<String> {
    let mut ctl = ringhaul()?;
    ctl.args(["ctl", "--control"]).arg(scene.socket("control")).args(words);
    Ok(run(&mut ctl)?.expect_code(0)?.stdout)
}

fn end(mut daemon: Running) -> Result<()> {
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// Its writes wait, and go on when somebody has looked.
#[test]
fn an_image_that_is_full_goes_on_when_its_server_has_more_space() -> Result<()> {
    if !has_programs() {
        return Ok(());
    }
    let scene = scene()?;
    let path = make(&scene, &[], 8 * MIB)?;
    let (_peer, disk) = start(&scene, &path)?;
    let mut daemon = serve(&scene, &disk, &["--werror", "hold"])?;
    let vm = scene.socket("vm.sock");
    let load = format!("--rw randwrite --bs 64k --verify --number_ios {}", DISK_BYTES >> 16);
    let load = Running::start(&mut bench(&vm, &load)?)?;
    daemon.wait_for("it is full; make it larger, then use `ringhaul ctl resize`")?;
    daemon.wait_for("has no space left, and writes wait for some")?;
    give_space(&path, 2 * DISK_BYTES)?;
    let said = ctl(&scene, &["resize", &vm.display().to_string()])?;
    ensure!(said.contains(&DISK_BYTES.to_string()), "{said}");
    let finished = load.finish()?.expect_code(0)?;
    ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
    end(daemon)?;
    run_program("qemu-img", &["check", "-q", &path]).map(drop)
}
