//! NBD servers that end by themselves under load: no request is lost, and the load continues.
//!
//! The nbdkit of some distributions has neither a filter nor a plugin that disconnects. So one
//! server reports through its error filter that it shuts down, and another is killed by its own
//! plugin.

use std::fs::{File, remove_file};
use std::path::Path;

use anyhow::{Result, ensure};
use ringhaul_kit::cli::{Running, Scene, bench};
use ringhaul_kit::nbd::Peer;
use ringhaul_kit::system::is_installed;
use rustix::process::Signal;

use super::nbd::{DISK_BYTES, VERIFIED, scene, serve, wait_for_load};

/// The number of times that a server ends.
const ENDS: usize = 3;

/// Ends a load, which must have found its own writes, and then the daemon.
fn finish(load: Running, mut daemon: Running) -> Result<()> {
    let finished = load.finish()?.expect_code(0)?;
    ensure!(finished.stdout.contains("errors: 0; verify: "), "{}", finished.stdout);
    ensure!(finished.stdout.contains(" 0 reads with wrong data"), "{}", finished.stdout);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0).map(drop)
}

/// A server that shuts down by the protocol. Once `sign` exists, it answers all requests with
/// ESHUTDOWN and refuses connections. It ends after its last connection.
fn polite(scene: &Scene, disk: &Path, sign: &Path) -> Result<Peer> {
    let name = |key: &str, path: &Path| format!("{key}={}", path.display());
    let (file, told, leaves) =
        (name("file", disk), name("error-file", sign), name("exit-when-file-created", sign));
    let filters = ["--filter=exitwhen", "--filter=error", "file", &file];
    let when = ["error=ESHUTDOWN", "error-rate=100%", &told, &leaves];
    Peer::nbdkit(scene, &[&filters[..], &when].concat())
}

#[test]
fn a_server_that_says_that_it_ends_costs_no_request() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let scene = scene()?;
    let (disk, sign) = (scene.disk("disk.img", DISK_BYTES)?, scene.path("ends"));
    let mut peer = polite(&scene, &disk, &sign)?;
    let mut daemon = serve(&scene, &format!("{},connections=2", peer.uri("")), &[])?;
    let load = format!("{VERIFIED} --runtime 1h");
    let mut load = Running::start(&mut bench(&scene.socket("vm.sock"), &load)?)?;
    daemon.wait_for("a front-end has connected")?;
    for _ in 0..ENDS {
        wait_for_load(&scene)?;
        File::create(&sign)?;
        daemon.wait_for("a connection broke: the server is shutting down")?;
        peer.wait_for_end()?;
        remove_file(&sign)?;
        peer = polite(&scene, &disk, &sign)?;
        daemon.wait_for("is back after")?;
    }
    wait_for_load(&scene)?;
    load.signal(Signal::TERM)?;
    finish(load, daemon)
}

/// A server that is killed when it has carried out a write, and has not answered it.
fn abrupt(scene: &Scene, disk: &Path, ends: bool) -> Result<Peer> {
    let (disk, count) = (disk.display(), scene.path("count"));
    let count = count.display();
    let read =
        format!("pread=dd if={disk} skip=$4 count=$3 iflag=skip_bytes,count_bytes status=none");
    let every = if ends { 50 } else { 1_000_000 };
    // A killed nbdkit cannot remove its folder.
    let write = format!(
        "pwrite=dd of={disk} seek=$4 oflag=seek_bytes conv=notrunc status=none; \
         echo >> {count}; [ $(($(wc -l < {count}) % {every})) != 0 ] || \
         {{ rm -r \"$tmpdir\"; kill -KILL $PPID; }}"
    );
    let size = format!("get_size=stat -c %s {disk}");
    let can = ["can_write=exit 0", "can_flush=exit 0", "flush=exit 0"];
    Peer::nbdkit(scene, &[&["eval", &size, &read, &write][..], &can].concat())
}

/// Each unanswered write is sent again.
#[test]
fn a_server_that_is_gone_after_a_write_costs_no_request() -> Result<()> {
    if !is_installed("nbdkit") {
        return Ok(());
    }
    let scene = scene()?;
    let disk = scene.disk("disk.img", 4 << 20)?;
    let mut peer = abrupt(&scene, &disk, true)?;
    let mut daemon = serve(&scene, &peer.uri(""), &[])?;
    let load = "--rw randrw --verify --iodepth 8 --bs 4k --fsync 64 --number_ios 600";
    let load = Running::start(&mut bench(&scene.socket("vm.sock"), load)?)?;
    for number in 1..=ENDS {
        peer.wait_for_end()?;
        daemon.wait_for("a connection broke")?;
        peer = abrupt(&scene, &disk, number < ENDS)?;
        daemon.wait_for("is back after")?;
    }
    finish(load, daemon)?;
    peer.end()
}
