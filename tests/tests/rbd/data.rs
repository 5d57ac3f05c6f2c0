//! Data in the cluster: writes, flushes, discards, sizes, snapshots.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::ceph::export;
use ringhaul_kit::cli::{ringhaul, run};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::log::check_marks;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk, segment};
use ringhaul_kit::guest::{Bus, Disk, Vm};
use rustix::process::Signal;

use super::{IMAGE_BYTES, Scene};

/// The limit for one script of the guest. Only a hang takes this long.
const LIMIT: Duration = Duration::from_secs(180);

const FIO_VERIFY: &str = include_str!("../../guest/fio-verify.sh");
const FILES_WRITE: &str = include_str!("../../guest/files-write.sh");
const FILES_CHECK: &str = include_str!("../../guest/files-check.sh");

const MIB: usize = 1 << 20;

/// A load verifies its own writes, and Ceph's own tool reads them.
pub(super) fn data_is_in_the_cluster(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("written")?;
    let served = scene.serve("written", &disk, &[])?;
    let load = served.load("--number_ios 2000 --numjobs 1")?.finish()?.expect_code(0)?;
    ensure!(load.stdout.contains("0 reads with wrong data"), "{}", load.stdout);
    let mut front_end = served.connect()?;
    let data = pattern(7, 128 << 10);
    // Across the border of two objects.
    front_end.write(0, 4 * 2048 * 4 - 128, &data)?;
    ensure!(front_end.read(1, 4 * 2048 * 4 - 128, data.len())? == data, "it reads otherwise");
    ensure!(front_end.request(0, blk::FLUSH, 0, &[], 0)?.status == blk::OK, "no flush");
    let stored = export(&scene.cluster, "written", &scene.cluster.path("export"))?;
    let place = (4 * 2048 * 4 - 128) * 512;
    ensure!(stored[place..place + data.len()] == data, "`rbd export` reads otherwise");
    // The optimal size is that of an object.
    ensure!(front_end.config(28, 4)? == 8192_u32.to_le_bytes(), "opt_io_size");
    drop(front_end);
    served.end()
}

/// A front-end that moves its guest finds a mark for each page that a request has changed.
pub(super) fn marks(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("marked")?;
    let served = scene.serve("marked", &disk, &["--num-queues", "2"])?;
    check_marks(&served.socket)?;
    served.end()
}

pub(super) fn discards_and_zeroes(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("holes")?;
    let served = scene.serve("holes", &disk, &[])?;
    let mut front_end = served.connect()?;
    for sector in (0..32 * 2048).step_by(256) {
        front_end.write(0, sector, &pattern(sector, 128 << 10))?;
    }
    let used = || scene.cluster.tool("rbd", &["diff", "holes"]).map(|text| text.lines().count());
    let before = used()?;
    // Eight objects of 4 MiB, and a headline.
    ensure!(before >= 8, "{before} lines");
    let discard = segment(0, 16 * 2048, 0);
    ensure!(front_end.request(0, blk::DISCARD, 0, &discard, 0)?.status == blk::OK, "no discard");
    let after = used()?;
    ensure!(after < before, "{after} lines after a discard, {before} before");
    for flags in [0, 1] {
        let first = 16 * 2048 + u64::from(flags) * 2048 + 3;
        let zeroes = segment(first, 100, flags);
        let answer = front_end.request(1, blk::WRITE_ZEROES, 0, &zeroes, 0)?;
        ensure!(answer.status == blk::OK, "zeroes: {answer:?}");
        ensure!(front_end.read(0, first, 51_200)? == [0; 51_200], "flags {flags}: not zeroes");
        let beside = front_end.read(0, first - 3, 3 * 512)?;
        ensure!(beside == pattern(first - 3, 3 * 512), "flags {flags}: what lies before is gone");
    }
    drop(front_end);
    served.end()
}

/// While a whole image is discarded, requests to it and to other images are answered.
pub(super) fn requests_during_a_discard(scene: &mut Scene) -> Result<()> {
    // A discard covers thousands of small objects.
    let create = ["create", "--size", "64M", "--object-size", "16K"];
    let plain = ["--image-feature", "layering"];
    scene.cluster.tool("rbd", &[&create[..], &plain, &["large"]].concat())?;
    let other = scene.image("small")?;
    let served = scene.serve("large", "rbd:large", &[])?;
    let socket = scene.sockets.path().join("small.sock");
    served.ctl(&["add", "--disk", &other, "--socket-path", &socket.to_string_lossy()])?;
    let (mut large, mut small) = (served.connect()?, Frontend::attach(&socket, &Setup::default())?);
    for front_end in [&mut large, &mut small] {
        front_end.write(1, 0, &pattern(1, 4096))?;
    }
    let (header, status) = large.put_header(0, 0, blk::DISCARD, 0)?;
    large.memory.write(DATA, &segment(8, 64 * 2048 - 8, 0))?;
    let chain = [Desc::readable(header, 16), Desc::readable(DATA, 16), Desc::writable(status, 1)];
    large.rings[0].put_chain(0, &chain);
    large.rings[0].submit(0)?;
    let mut answered = 0;
    while large.status(0, 0) == Some(blk::PENDING) {
        for front_end in [&mut large, &mut small] {
            ensure!(front_end.read(1, 0, 4096)? == pattern(1, 4096), "it reads otherwise");
        }
        answered += 1;
    }
    ensure!(large.status(0, 0) == Some(blk::OK), "the discard has failed");
    ensure!(answered > 2, "{answered} requests were answered meanwhile");
    large.rings[0].wait_used()?;
    drop((large, small));
    served.end()
}

/// An image that was opened for reading keeps its size, and a resize says how to update it.
pub(super) fn sizes_for_readers(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("read")?;
    let served = scene.serve("read", &disk, &["--read-only"])?;
    let export = served.socket.to_string_lossy().into_owned();
    served.ctl(&["resize", &export])?;
    scene.cluster.tool("rbd", &["resize", "--no-progress", "read", "--size", "96M"])?;
    let mut resize = ringhaul()?;
    resize.arg("ctl").arg("--control").arg(&served.control).args(["resize", &export]);
    let output = run(&mut resize)?;
    let expected = ["its new size of 100663296 bytes", "restart the export"];
    ensure!(expected.iter().all(|words| output.stderr.contains(words)), "{}", output.stderr);
    served.ctl(&["remove", &export])?;
    let add = ["add", "--disk", &disk, "--read-only", "--socket-path", &export];
    served.ctl(&add)?;
    let mut front_end = served.connect()?;
    ensure!(front_end.config(0, 8)? == (96_u64 * 2048).to_le_bytes(), "it has another size");
    ensure!(front_end.read(0, 95 * 2048, 4096)? == [0; 4096], "what was added");
    drop(front_end);
    served.end()
}

/// An answered flush is durable even if the OSD and the daemon are killed right after it. So is a
/// write without a write cache.
pub(super) fn flushed_data_is_durable(scene: &mut Scene) -> Result<()> {
    for cache in ["writeback", "directsync"] {
        // Each mode has a new image, because the lock of a killed daemon is kept for half a minute.
        let disk = scene.image(cache)?;
        let mut served = scene.serve(cache, &disk, &["--cache", cache])?;
        let mut front_end = served.connect()?;
        let data = pattern(100, 64 << 10);
        front_end.write(0, 10_000, &data)?;
        if cache == "writeback" {
            let answer = front_end.request(0, blk::FLUSH, 0, &[], 0)?;
            ensure!(answer.status == blk::OK, "{answer:?}");
        }
        scene.cluster.kill_osd()?;
        served.daemon.signal(Signal::KILL)?;
        scene.cluster.start_osd()?;
        let stored = export(&scene.cluster, cache, &scene.cluster.path("export"))?;
        let place = 10_000 * 512;
        ensure!(stored[place..place + data.len()] == data, "{cache}: it is not in the cluster");
    }
    Ok(())
}

pub(super) fn sizes(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("resized")?;
    // By default each write without space would be held for 20 s.
    let mut served = scene.serve("resized", &disk, &["--werror", "report"])?;
    let mut front_end = served.connect()?;
    scene.cluster.tool("rbd", &["resize", "--no-progress", "resized", "--size", "96M"])?;
    served.daemon.wait_for("the disk has 100663296 bytes, not 67108864")?;
    front_end.write(0, 95 * 2048, &pattern(1, 4096))?;
    let export = served.socket.to_string_lossy().into_owned();
    served.ctl(&["resize", &export, "128M"])?;
    let info = scene.cluster.tool("rbd", &["info", "resized"])?;
    ensure!(info.contains("size 128 MiB"), "{info}");
    front_end.write(0, 127 * 2048, &pattern(2, 4096))?;
    // The guest keeps the larger size. Reads beyond the end fail, and writes have no space.
    scene
        .cluster
        .tool("rbd", &["resize", "--no-progress", "resized", "--size", "32M", "--allow-shrink"])?;
    served
        .daemon
        .wait_for("its disk has shrunk to 33554432 bytes, and the guest sees 134217728")?;
    let end = 32 * 2048;
    for sector in [end - 4, end, 127 * 2048] {
        let answer = front_end.request(0, blk::OUT, sector, &pattern(3, 4096), 0)?;
        ensure!(answer.status == blk::IOERR, "a write at {sector} has ended with {answer:?}");
    }
    // Behind the end there is nothing to discard, and zeroes need no write.
    for kind in [blk::DISCARD, blk::WRITE_ZEROES] {
        let part = segment(end - 8, 2048, 0);
        let answer = front_end.request(0, kind, 0, &part, 0)?;
        ensure!(answer.status == blk::OK, "request {kind} has ended with {answer:?}");
    }
    front_end.write(0, end - 8, &pattern(4, 4096))?;
    ensure!(front_end.read(0, end - 8, 4096)? == pattern(4, 4096), "what lies before the end");
    for sector in [end - 4, end, 127 * 2048] {
        let answer = front_end.request(0, blk::IN, sector, &[], 4096)?;
        ensure!(answer.status == blk::IOERR, "a read at {sector} has ended with {answer:?}");
    }
    drop(front_end);
    served.end()
}

pub(super) fn snapshots(scene: &mut Scene) -> Result<()> {
    let disk = scene.image("snapped")?;
    let [old, new] = [1, 2].map(|seed| pattern(seed, MIB / 8));
    let served = scene.serve("snapped", &disk, &[])?;
    let mut front_end = served.connect()?;
    front_end.write(0, 0, &old)?;
    scene.cluster.tool("rbd", &["snap", "create", "--no-progress", "snapped@one"])?;
    front_end.write(0, 0, &new)?;
    let at_one = scene.serve("at-one", "rbd:snapped@one", &["--read-only"])?;
    ensure!(at_one.connect()?.read(0, 0, old.len())? == old, "the snapshot has changed");
    ensure!(front_end.read(0, 0, new.len())? == new, "the image has not");
    at_one.end()?;
    run(&mut scene.ringhaul(&[
        "serve",
        "--socket-path",
        "x.sock",
        "--disk",
        "rbd:snapped@one",
    ])?)?
    .expect_refusal(&["a snapshot can only be read; open it read-only"])?;
    scene.cluster.tool("rbd", &["snap", "protect", "snapped@one"])?;
    scene.cluster.tool("rbd", &["clone", "snapped@one", "cloned"])?;
    let cloned = scene.serve("cloned", "rbd:cloned", &[])?;
    let mut of_clone = cloned.connect()?;
    ensure!(of_clone.read(0, 0, old.len())? == old, "the clone is not what it was made of");
    of_clone.write(0, 8, &new[..4096])?;
    let expected = [&old[..4096], &new[..4096], &old[8192..]].concat();
    ensure!(of_clone.read(1, 0, old.len())? == expected, "a write to a clone");
    drop((front_end, of_clone));
    cloned.end()?;
    served.end()
}

/// A file system and a verified load in a guest.
pub(super) fn guest(scene: &mut Scene) -> Result<()> {
    scene.cluster.create_image("guest", IMAGE_BYTES * 2)?;
    let served = scene.serve("guest", "rbd:guest", &["--num-queues", "2"])?;
    let disk =
        Disk { bus: Bus::Blk, socket: served.socket.clone(), num_queues: 2, queue_size: 256 };
    let mut vm = Vm::boot_fast(vec![disk])?;
    vm.check(&format!("DISK=vda\nMIN_BYTES=4096\n{FIO_VERIFY}"), LIMIT)?;
    vm.check(&format!("DISK=vda\n{FILES_WRITE}"), LIMIT)?;
    vm.check(&format!("DISK=vda\n{FILES_CHECK}"), LIMIT)?;
    vm.check("e2fsck -f -n /dev/vda", LIMIT)?;
    let optimal = vm.check("cat /sys/block/vda/queue/optimal_io_size", LIMIT)?;
    ensure!(optimal.trim() == "4194304", "the guest sees an optimal size of {optimal}");
    vm.power_off(LIMIT)?;
    served.end()?;
    let path = scene.cluster.path("export");
    export(&scene.cluster, "guest", &path)?;
    let check = std::process::Command::new("/sbin/e2fsck").args(["-f", "-n"]).arg(&path).output();
    let check = check.context("starting e2fsck")?;
    ensure!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    let status = scene.cluster.tool("rbd", &["status", "guest"])?;
    ensure!(status.contains("Watchers: none"), "it is still in use: {status}");
    Ok(())
}
