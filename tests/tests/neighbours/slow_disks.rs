//! Disks that do not answer: a frozen file system, and a loop device on one.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::DaemonOptions;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, blk, segment};
use ringhaul_kit::server::{Cache, Engine};
use ringhaul_kit::system::{FileSystem, LoopDevice, Tmpfs, can_change_system};

use crate::scene::{OPERATIONS, PendingWrites, Scene, WRITE_BYTES, disks};

for_each_engine! {
    a_frozen_file_system,
    a_loop_device_on_a_frozen_file_system,
    misaligned_writes_to_a_frozen_file_system,
    zeroes_that_must_be_written,
}

const MIB: u64 = 1 << 20;

/// Numbers of writes in the device: as many as io_uring has kernel threads, as many as the pool has
/// threads, more than a device takes, and more than an IoThread has in the kernel.
const DEPTHS: [u16; 4] = [8, 64, 300, 2000];

pub(crate) fn ext4(bytes: u64) -> Result<FileSystem> {
    FileSystem::make(disks(), bytes, &["mke2fs", "-q", "-t", "ext4"])
}

/// At each depth the disk stands still, the neighbours are served, and then all requests are
/// answered.
fn check_depths(
    scene: &mut Scene,
    disk: &Path,
    file_system: &FileSystem,
    depths: &[u16],
) -> Result<()> {
    let mut stuck = PendingWrites::attach(scene.daemon.socket())?;
    for &depth in depths {
        let frozen = file_system.freeze()?;
        stuck.write(depth, 2)?;
        scene.check_neighbours().with_context(|| format!("beside {depth} writes that hang"))?;
        let answered = stuck.answered()?;
        ensure!(answered <= 2, "{answered} requests of a frozen disk were answered");
        drop(frozen);
        stuck.finish().with_context(|| format!("{depth} writes to a disk that hung"))?;
        let file = File::open(disk).context("opening the disk")?;
        for number in 0..depth {
            let mut content = vec![0; WRITE_BYTES];
            file.read_exact_at(&mut content, u64::from(number) * WRITE_BYTES as u64)?;
            ensure!(content == PendingWrites::content(number), "write {number} is not on the disk");
        }
        // The next round writes to the range that is zeroed here.
        stuck.put(0, blk::WRITE_ZEROES, 0, Some(put_segments(&stuck, &[(0, 16_384)])?))?;
        stuck.kick()?;
        stuck.finish()?;
    }
    scene.check_neighbours().context("after the disk stood still")
}

/// Puts segments into guest memory, each a sector and a number of sectors.
fn put_segments(stuck: &PendingWrites, ranges: &[(u64, u32)]) -> Result<Desc> {
    let bytes: Vec<u8> =
        ranges.iter().flat_map(|&(sector, sectors)| segment(sector, sectors, 0)).collect();
    let addr = DATA + 2 * MIB;
    stuck.frontend.memory.write(addr, &bytes)?;
    Ok(Desc::readable(addr, u32::try_from(bytes.len())?))
}

/// Linux AIO blocks in the submit to such a disk, and all disks of the IoThread with it. The daemon
/// notices that afterwards, and from then on serves the disk by pool threads.
pub(crate) fn switch_to_pool_threads(
    engine: Engine,
    scene: &Scene,
    file_system: &FileSystem,
) -> Result<()> {
    if engine != Engine::Aio {
        return Ok(());
    }
    let mut stuck = PendingWrites::attach(scene.daemon.socket())?;
    let frozen = file_system.freeze()?;
    stuck.write(8, 0)?;
    // This sleep replaces no condition: a submit counts as blocked after a fifth of a second.
    std::thread::sleep(Duration::from_millis(600));
    drop(frozen);
    stuck.finish()
}

fn a_frozen_file_system(engine: Engine) -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let file_system = ext4(64 * MIB)?;
    for cache in [Cache::None, Cache::Writeback] {
        let options = DaemonOptions { cache, ..DaemonOptions::new(engine) };
        let mut scene = Scene::start(file_system.path(), &options)?;
        let disk = scene.daemon.disk().to_owned();
        switch_to_pool_threads(engine, &scene, &file_system)?;
        check_depths(&mut scene, &disk, &file_system, &DEPTHS)
            .with_context(|| format!("with {cache:?}:\n{}", scene.daemon.messages()))?;
        scene.terminate()?;
    }
    Ok(())
}

fn a_loop_device_on_a_frozen_file_system(engine: Engine) -> Result<()> {
    if !can_change_system("loop devices") {
        return Ok(());
    }
    let file_system = ext4(64 * MIB)?;
    let backing = file_system.path().join("backing.img");
    File::create(&backing).and_then(|file| file.set_len(16 * MIB))?;
    let device = LoopDevice::attach(&backing)?;
    let disk = format!("file,path={}", device.path().display());
    let options = DaemonOptions { cache: Cache::None, ..DaemonOptions::new(engine) };
    let mut scene = Scene::start(disks(), &options.with("--disk", &disk))?;
    check_depths(&mut scene, device.path(), &file_system, &DEPTHS)
        .with_context(|| scene.daemon.messages())?;
    scene.terminate()
}

/// The limit on the daemon's memory beside the memory for misaligned requests.
const OTHER_MEMORY: usize = 64 << 20;
/// The daemon's limit on memory for misaligned requests.
const BOUNCE_MEMORY: usize = 64 << 20;

/// Each request needs a MiB of the daemon's memory, which is too small for all of them.
fn misaligned_writes_to_a_frozen_file_system(engine: Engine) -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let file_system = ext4(64 * MIB)?;
    let options = DaemonOptions {
        cache: Cache::None,
        wrapper: &["prlimit", "--as=734003200"],
        ..DaemonOptions::new(engine)
    };
    let mut scene = Scene::start(file_system.path(), &options)?;
    switch_to_pool_threads(engine, &scene, &file_system)?;
    let mut stuck = PendingWrites::attach(scene.daemon.socket())?;
    let content: Vec<u8> = (0..256).flat_map(PendingWrites::content).collect();
    stuck.frontend.memory.write(DATA + 1, &content)?;
    let frozen = file_system.freeze()?;
    for number in 0..2040 {
        let sector = u64::from(number % 8) * MIB / 512;
        let data = Desc::readable(DATA + 1, u32::try_from(MIB)?);
        stuck.put(number, blk::OUT, sector, Some(data))?;
    }
    stuck.kick()?;
    scene.check_neighbours().context("beside misaligned writes")?;
    scene.file.run_misaligned().context("beside misaligned writes")?;
    ensure!(stuck.answered()? == 0, "requests of a frozen disk were answered");
    let memory = scene.daemon.own_memory()?;
    ensure!(memory < OTHER_MEMORY + BOUNCE_MEMORY, "the daemon takes {memory} bytes of memory");
    drop(frozen);
    stuck.finish()?;
    ensure!(scene.daemon.read_disk(0, 8 << 20)? == content.repeat(8), "other data on the disk");
    scene.file.run_misaligned()?;
    scene.check_neighbours()?;
    scene.terminate()
}

/// A file system in memory has no call for zeroes, so they are written: half a GiB for one request.
fn zeroes_that_must_be_written(engine: Engine) -> Result<()> {
    const SEGMENT_BYTES: u64 = 32 * MIB;
    const SEGMENTS: u64 = 16;
    if !can_change_system("mounts") {
        return Ok(());
    }
    let tmpfs = Tmpfs::mount(SEGMENTS * SEGMENT_BYTES + 8 * MIB)?;
    let mut options = DaemonOptions { cache: Cache::Writeback, ..DaemonOptions::new(engine) };
    options.disk_bytes = SEGMENTS * SEGMENT_BYTES;
    let mut scene = Scene::start(tmpfs.path(), &options)?;
    let mut stuck = PendingWrites::attach(scene.daemon.socket())?;
    let ranges = (0..SEGMENTS).map(|segment| (segment * SEGMENT_BYTES / 512, 65_536));
    let segments = put_segments(&stuck, &ranges.collect::<Vec<_>>())?;
    // Each write of zeroes lets other tasks run, so there is time for many operations. But the
    // request is short, and this process may wait for a CPU in that time, so one of several
    // requests suffices as proof.
    let mut most = 0;
    for answered in 0..10 {
        stuck.put(0, blk::WRITE_ZEROES, 0, Some(segments))?;
        stuck.kick()?;
        let mut meanwhile = 0;
        while stuck.answered()? == answered {
            scene.null.run(1)?;
            scene.file.run(1)?;
            meanwhile += 1;
        }
        most = most.max(meanwhile);
        if most >= OPERATIONS / 4 {
            break;
        }
    }
    ensure!(most >= OPERATIONS / 4, "the neighbours made at most {most} operations meanwhile");
    stuck.finish()?;
    let start = scene.daemon.read_disk(0, 2 << 20)?;
    ensure!(start.iter().all(|&byte| byte == 0), "there are no zeroes");
    scene.terminate()
}
