//! Formats over an image in the cluster: QEMU's programs read the data that was written through
//! them.

use std::fs::OpenOptions;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::ceph::export;
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, blk, segment};
use rustix::process::Signal;

use super::{IMAGE_BYTES, Scene};

/// The size of the disk, which leaves space for tables in the image.
const DISK: &str = "32M";
/// A write from here crosses a border of objects, and of clusters.
const SECTOR: u64 = 16 * 2048 - 128;
const DATA_BYTES: usize = 128 << 10;
const MIB: usize = 1 << 20;

/// Makes a file by `qemu-img` with these words, and imports it into the cluster. The image has no
/// exclusive lock, because the lock of a killed daemon is kept for half a minute.
fn import(scene: &Scene, name: &str, words: &[&str]) -> Result<()> {
    let path = scene.cluster.path(name);
    let path = path.to_str().context("a path with an odd name")?;
    scene.cluster.tool("qemu-img", &[&["create", "-q"], words, &[path, DISK]].concat())?;
    let file = OpenOptions::new().write(true).open(path).context("opening what was made")?;
    file.set_len(IMAGE_BYTES)?;
    let import = ["import", "--no-progress", "--image-feature", "layering", path, name];
    scene.cluster.tool("rbd", &import).map(drop)
}

/// Runs a verified load on a disk, then writes data and flushes it. Returns the data.
fn write(scene: &Scene, name: &str, disk: &str) -> Result<Vec<u8>> {
    let served = scene.serve(name, disk, &[])?;
    let load = served.load("--number_ios 1000 --numjobs 1")?.finish()?.expect_code(0)?;
    ensure!(load.stdout.contains("0 reads with wrong data"), "{}", load.stdout);
    let mut front_end = served.connect()?;
    let data = pattern(SECTOR, DATA_BYTES);
    front_end.write(0, SECTOR, &data)?;
    ensure!(front_end.read(1, SECTOR, data.len())? == data, "it reads otherwise");
    ensure!(front_end.request(0, blk::FLUSH, 0, &[], 0)?.status == blk::OK, "no flush");
    drop(front_end);
    served.end()?;
    Ok(data)
}

/// Checks that QEMU finds this data in an exported image; `words` say how to open it.
fn check(scene: &Scene, words: &[&str], data: &[u8]) -> Result<()> {
    let plain = scene.cluster.path("plain");
    let to = plain.to_str().context("a path with an odd name")?;
    scene.cluster.tool("qemu-img", &[&["convert", "-O", "raw"], words, &[to]].concat())?;
    let stored = std::fs::read(&plain).context("reading what QEMU has read")?;
    let place: usize = (SECTOR * 512).try_into()?;
    ensure!(stored[place..place + data.len()] == *data, "QEMU reads otherwise");
    Ok(())
}

pub(super) fn qcow2(scene: &mut Scene) -> Result<()> {
    import(scene, "clusters", &["-f", "qcow2"])?;
    let data = write(scene, "clusters", "qcow2,over=rbd:clusters")?;
    let path = scene.cluster.path("exported");
    export(&scene.cluster, "clusters", &path)?;
    let path = path.to_str().context("a path with an odd name")?;
    scene.cluster.tool("qemu-img", &["check", "-q", "-f", "qcow2", path])?;
    check(scene, &["-f", "qcow2", path], &data)
}

/// An image with a local backing file: a discard that the cluster carries out, a resize, and a kill
/// of the daemon.
pub(super) fn changed_image(scene: &mut Scene) -> Result<()> {
    let [base, expected, exported] = ["base", "expected", "exported"].map(|name| {
        let path = scene.cluster.path(name);
        path.display().to_string()
    });
    let mut content = pattern(7, 16 * MIB);
    std::fs::write(&base, &content).context("writing a base")?;
    import(scene, "changed", &["-f", "qcow2", "-b", &base, "-F", "raw"])?;
    content.resize(48 * MIB, 0);
    let disk = "qcow2,backing=anywhere,over=rbd:changed";
    let mut served = scene.serve("changed", disk, &[])?;
    let mut front_end = served.connect()?;
    let mut write = |front_end: &mut Frontend, place: usize| {
        let data = pattern(place as u64, DATA_BYTES);
        content[place..place + DATA_BYTES].copy_from_slice(&data);
        front_end.write(0, place as u64 / 512, &data)
    };
    for place in (0..16 * MIB).step_by(DATA_BYTES) {
        write(&mut front_end, place)?;
    }
    let used = || scene.cluster.tool("rbd", &["diff", "changed"]).map(|text| text.lines().count());
    let before = used()?;
    let discard = segment(0, 14 * 2048, 0);
    ensure!(front_end.request(0, blk::DISCARD, 0, &discard, 0)?.status == blk::OK, "no discard");
    let after = used()?;
    ensure!(after < before, "{after} lines after a discard, {before} before");
    served.ctl(&["resize", &served.socket.to_string_lossy(), "48M"])?;
    for place in [15 * MIB + 512, 31 * MIB + 512, 48 * MIB - DATA_BYTES] {
        write(&mut front_end, place)?;
    }
    served.daemon.signal(Signal::KILL)?;
    served.daemon.finish()?;
    content[..14 * MIB].fill(0);

    let served = scene.serve("again", disk, &[])?;
    let mut front_end = served.connect()?;
    for (sector, data) in (0..).step_by(DATA_BYTES / 512).zip(content.chunks(DATA_BYTES)) {
        ensure!(front_end.read(1, sector, DATA_BYTES)? == data, "sector {sector} reads otherwise");
    }
    drop(front_end);
    served.end()?;
    export(&scene.cluster, "changed", exported.as_ref())?;
    let qemu_img = |words: &[&str]| scene.cluster.tool("qemu-img", words).map(drop);
    qemu_img(&["check", "-q", "-r", "leaks", "-f", "qcow2", &exported])?;
    qemu_img(&["check", "-q", "-f", "qcow2", &exported])?;
    std::fs::write(&expected, &content).context("writing what is expected")?;
    qemu_img(&["compare", "-q", "-f", "raw", "-F", "qcow2", &expected, &exported])
}

/// Held writes continue by themselves: librbd reports the new space.
pub(super) fn full_image(scene: &mut Scene) -> Result<()> {
    import(scene, "full", &["-f", "qcow2"])?;
    let resize = |to: &str| {
        let words = ["resize", "--no-progress", "--allow-shrink", "full", "--size", to];
        scene.cluster.tool("rbd", &words).map(drop)
    };
    resize("8M")?;
    let mut served = scene.serve("full", "qcow2,over=rbd:full", &["--werror", "hold"])?;
    let load = served.load("--bs 64k --number_ios 1024")?;
    served.daemon.wait_for("has no space left, and writes wait for space")?;
    resize("64M")?;
    let load = load.finish()?.expect_code(0)?;
    ensure!(load.stdout.contains("0 reads with wrong data"), "{}", load.stdout);
    served.end()?;
    let path = scene.cluster.path("exported");
    export(&scene.cluster, "full", &path)?;
    let path = path.to_str().context("a path with an odd name")?;
    scene.cluster.tool("qemu-img", &["check", "-q", "-f", "qcow2", path]).map(drop)
}

pub(super) fn luks(scene: &mut Scene) -> Result<()> {
    let key = scene.cluster.path("luks-key");
    std::fs::write(&key, "a key of a disk").context("writing a key")?;
    let key = key.to_str().context("a path with an odd name")?;
    let secret = format!("secret,id=key,file={key}");
    let options = "key-secret=key,iter-time=10";
    import(scene, "encrypted", &["--object", &secret, "-f", "luks", "-o", options])?;
    let disk = format!("luks,key-file={key},over=rbd:encrypted");
    let data = write(scene, "encrypted", &disk)?;
    let path = scene.cluster.path("exported");
    let stored = export(&scene.cluster, "encrypted", &path)?;
    let part = &data[..512];
    ensure!(!stored.chunks(512).any(|sector| sector == part), "the data is not encrypted");
    let image = format!("driver=luks,key-secret=key,file.filename={}", path.display());
    check(scene, &["--object", &secret, "--image-opts", &image], &data)
}
