//! Formats over an image in the cluster: QEMU's programs read what was written through them.

use std::fs::OpenOptions;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::ceph::export;
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::blk;

use super::{IMAGE_BYTES, Scene};

/// Less than the image has, which also keeps tables.
const DISK: &str = "32M";
/// Over the border of two objects, and of clusters.
const SECTOR: u64 = 16 * 2048 - 128;
const DATA_BYTES: usize = 128 << 10;

/// Has a file made by `qemu-img` with these words, and an image in the cluster of it.
fn import(scene: &Scene, name: &str, words: &[&str]) -> Result<()> {
    let path = scene.cluster.path(name);
    let path = path.to_str().context("a path with an odd name")?;
    scene.cluster.tool("qemu-img", &[&["create", "-q"], words, &[path, DISK]].concat())?;
    let file = OpenOptions::new().write(true).open(path).context("opening what was made")?;
    file.set_len(IMAGE_BYTES)?;
    scene.cluster.tool("rbd", &["import", "--no-progress", path, name]).map(drop)
}

/// Runs a load over a disk, which reads what it has written, and writes data that is flushed.
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

/// Whether QEMU finds this in an image that was exported, of which `words` say how to open it.
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

/// What has held its writes goes on by itself: librbd tells that there is more space.
pub(super) fn full(scene: &mut Scene) -> Result<()> {
    import(scene, "full", &["-f", "qcow2"])?;
    let resize = |to: &str| {
        let words = ["resize", "--no-progress", "--allow-shrink", "full", "--size", to];
        scene.cluster.tool("rbd", &words).map(drop)
    };
    resize("8M")?;
    let mut served = scene.serve("full", "qcow2,over=rbd:full", &["--werror", "hold"])?;
    let load = served.load("--bs 64k --number_ios 1024")?;
    served.daemon.wait_for("has no space left, and writes wait for some")?;
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
