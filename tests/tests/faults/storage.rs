//! Storage that becomes full, shorter, detached or read-only while it is served.

use std::fs::{self, File};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::LIMIT;
use ringhaul_kit::daemon::{Daemon, DaemonOptions, FILLED_BYTES, SECTOR_BYTES, pattern};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::{Frontend, Setup, blk, check_service};
use ringhaul_kit::server::{Cache, Engine};
use ringhaul_kit::system::{LoopDevice, Tmpfs, can_change_system, run};
use ringhaul_tools::process::retry;

use crate::start;

for_each_engine! {
    a_full_file_system,
    a_file_that_is_cut_short,
    a_loop_device_that_is_detached,
    a_loop_device_on_a_file_that_is_gone,
    a_loop_device_on_a_full_file_system,
    a_device_that_becomes_read_only,
}

const MIB: u64 = 1 << 20;
/// Bytes of a write; the device takes larger ones.
const PIECE: usize = 64 << 10;

fn sector_of(byte: u64) -> u64 {
    byte / SECTOR_BYTES as u64
}

/// The status of a request.
fn status(frontend: &mut Frontend, kind: u32, byte: u64, data: &[u8], room: usize) -> Result<u8> {
    Ok(frontend.request(0, kind, sector_of(byte), data, room)?.status)
}

/// Writes from `byte` on until a write fails, and returns its offset.
fn write_until_full(frontend: &mut Frontend, byte: u64, end: u64) -> Result<u64> {
    let mut byte = byte;
    while byte < end {
        match status(frontend, blk::OUT, byte, &pattern(byte, PIECE), 0)? {
            blk::OK => byte += PIECE as u64,
            blk::IOERR => return Ok(byte),
            other => anyhow::bail!("status {other}"),
        }
    }
    anyhow::bail!("there was room for all that was written")
}

fn a_full_file_system(engine: Engine) -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let tmpfs = Tmpfs::mount(6 * MIB)?;
    let filler = tmpfs.path().join("filler");
    fs::write(&filler, vec![1; 2 << 20]).context("filling a file system")?;
    for cache in [Cache::None, Cache::Writethrough] {
        let mut options = DaemonOptions::new(engine).with("--werror", "report");
        options.cache = cache;
        let mut daemon = Daemon::start(tmpfs.path(), &options)?;
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        let start = FILLED_BYTES as u64;
        let full = write_until_full(&mut frontend, start, 16 * MIB)?;
        ensure!(full > start, "nothing could be written");
        // Allocated blocks can be written and read. Once there is space, unallocated ones can, too.
        frontend.write(1, sector_of(start), &pattern(7, PIECE))?;
        ensure!(frontend.read(0, sector_of(start), PIECE)? == pattern(7, PIECE));
        let another = status(&mut frontend, blk::OUT, full, &pattern(1, PIECE), 0)?;
        ensure!(another == blk::IOERR, "status {another}");
        fs::remove_file(&filler).context("making room")?;
        frontend.write(0, sector_of(full), &pattern(8, PIECE))?;
        ensure!(frontend.read(1, sector_of(full), PIECE)? == pattern(8, PIECE));
        drop(frontend);
        check_service(&mut daemon)?;
        daemon.wait_for_message("a request failed: write at byte", 1)?;
        daemon.wait_for_message("No space left on device", 1)?;
        daemon.terminate()?;
        // The sandbox of a process keeps the space of its disk for a moment after the end.
        let deadline = Instant::now() + LIMIT;
        while let Err(error) = fs::write(&filler, vec![1; 2 << 20]) {
            ensure!(Instant::now() < deadline, "filling a file system: {error}");
        }
    }
    Ok(())
}

/// The new end is in the middle of a sector, and of a page.
fn a_file_that_is_cut_short(engine: Engine) -> Result<()> {
    for cache in [Cache::None, Cache::Writeback] {
        let mut options = DaemonOptions::new(engine);
        options.cache = cache;
        let mut daemon = start(&options)?;
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        let before = frontend.read(0, sector_of(MIB), 8192)?;
        let end = MIB + 700;
        let file = File::options().write(true).open(daemon.disk()).context("opening the disk")?;
        let whole = file.metadata().context("looking at the disk")?.len();
        file.set_len(end).context("cutting the disk short")?;
        // Zeroes complete the last sector; reads behind it fail.
        let last = frontend.read(0, sector_of(MIB), 1024)?;
        ensure!(last[..700] == before[..700], "what is left is not what was there");
        ensure!(last[700..].iter().all(|&byte| byte == 0), "no zeroes behind the end");
        for byte in [MIB, MIB + 1024, 2 * MIB, 8 * MIB] {
            let read = status(&mut frontend, blk::IN, byte, &[], PIECE)?;
            ensure!(read == blk::IOERR, "a read at {byte} ended with status {read}");
        }
        // Once the end was noticed, writes behind it fail, since they would make the file longer
        // again.
        daemon.wait_for_message("has shrunk to", 1)?;
        for byte in [MIB + 4096, 4 * MIB] {
            let written = status(&mut frontend, blk::OUT, byte, &pattern(byte, PIECE), 0)?;
            ensure!(written == blk::IOERR, "a write at {byte} ended with status {written}");
        }
        let data = pattern(1, PIECE);
        frontend.write(0, 0, &data)?;
        ensure!(frontend.read(1, 0, PIECE)? == data, "other data at the start");
        file.set_len(whole).context("giving the disk its size back")?;
        retry(LIMIT, || {
            let written = status(&mut frontend, blk::OUT, 4 * MIB, &data, 0)?;
            ensure!(written == blk::OK, "a write ended with status {written}");
            Ok(())
        })?;
        let flush = status(&mut frontend, blk::FLUSH, 0, &[], 0)?;
        ensure!(flush == blk::OK, "a flush ended with status {flush}");
        drop(frontend);
        check_service(&mut daemon)?;
        daemon.terminate()?;
    }
    Ok(())
}

/// Starts a daemon on a loop device; the daemon's usual disk exists and is not served.
fn start_on(device: &Path, engine: Engine, cache: Cache) -> Result<Daemon> {
    let disk = format!("file,path={}", device.display());
    let mut options = DaemonOptions::new(engine).with("--disk", &disk);
    options.cache = cache;
    start(&options)
}

fn backing_file(folder: &Path, bytes: u64) -> Result<std::path::PathBuf> {
    let path = folder.join("backing.img");
    File::create(&path).and_then(|file| file.set_len(bytes)).context("making a backing file")?;
    Ok(path)
}

/// The kernel keeps the device until its last close, so nothing fails.
fn a_loop_device_that_is_detached(engine: Engine) -> Result<()> {
    if !can_change_system("loop devices") {
        return Ok(());
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let device = LoopDevice::attach(&backing_file(folder.path(), 8 * MIB)?)?;
    let mut daemon = start_on(device.path(), engine, Cache::None)?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    frontend.write(0, 0, &pattern(1, PIECE))?;
    run("losetup", &["--detach", &device.path().to_string_lossy()])?;
    ensure!(frontend.read(1, 0, PIECE)? == pattern(1, PIECE));
    frontend.write(0, 128, &pattern(2, PIECE))?;
    drop(frontend);
    check_service(&mut daemon)?;
    daemon.terminate()?;
    Ok(())
}

/// A read behind the end of the backing file is an error of the kernel, not zeroes.
fn a_loop_device_on_a_file_that_is_gone(engine: Engine) -> Result<()> {
    if !can_change_system("loop devices") {
        return Ok(());
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let backing = backing_file(folder.path(), 8 * MIB)?;
    let device = LoopDevice::attach(&backing)?;
    let mut daemon = start_on(device.path(), engine, Cache::None)?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    frontend.write(0, 0, &pattern(1, PIECE))?;
    let file = File::options().write(true).open(&backing).context("opening the backing file")?;
    file.set_len(4096).context("cutting a backing file short")?;
    for byte in [MIB, 7 * MIB] {
        let read = status(&mut frontend, blk::IN, byte, &[], PIECE)?;
        ensure!(read == blk::IOERR, "a read of nothing ended with status {read}");
    }
    ensure!(frontend.read(1, 0, 4096)? == pattern(1, PIECE)[..4096]);
    file.set_len(8 * MIB).context("making the backing file whole")?;
    ensure!(frontend.read(1, sector_of(MIB), 4096)? == vec![0; 4096]);
    drop(frontend);
    check_service(&mut daemon)?;
    daemon.wait_for_message("Input/output error", 1)?;
    daemon.terminate()?;
    Ok(())
}

/// Without the page cache a write fails, and succeeds once there is space. With the page cache the
/// next flush fails: answered data is lost, and the kernel reports that once. So all later flushes
/// fail, on every IoThread, even with space.
fn a_loop_device_on_a_full_file_system(engine: Engine) -> Result<()> {
    if !can_change_system("loop devices") {
        return Ok(());
    }
    for cache in [Cache::None, Cache::Writeback] {
        let tmpfs = Tmpfs::mount(4 * MIB)?;
        let device = LoopDevice::attach(&backing_file(tmpfs.path(), 16 * MIB)?)?;
        let disk = format!("file,path={}", device.path().display());
        let mut options = DaemonOptions::new(engine).with("--disk", &disk).with("--iothreads", "2");
        options = options.with("--werror", "report");
        options.cache = cache;
        let mut daemon = start(&options)?;
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        let flush = |frontend: &mut Frontend, queue| -> Result<u8> {
            Ok(frontend.request(queue, blk::FLUSH, 0, &[], 0)?.status)
        };
        if cache == Cache::None {
            write_until_full(&mut frontend, 0, 16 * MIB)?;
        } else {
            for byte in (0..8 * MIB).step_by(PIECE) {
                frontend.write(0, sector_of(byte), &pattern(byte, PIECE))?;
            }
            let flush = flush(&mut frontend, 0)?;
            ensure!(flush == blk::IOERR, "a flush that lost data ended with status {flush}");
        }
        let size = format!("remount,size={}", 32 * MIB);
        run("mount", &["-o", &size, &tmpfs.path().to_string_lossy()])?;
        frontend.write(1, sector_of(8 * MIB), &pattern(5, PIECE))?;
        let expected = if cache == Cache::None { blk::OK } else { blk::IOERR };
        for queue in [1, 0, 1] {
            let flush = flush(&mut frontend, queue)?;
            ensure!(flush == expected, "a flush on queue {queue} ended with status {flush}");
        }
        ensure!(frontend.read(0, sector_of(8 * MIB), PIECE)? == pattern(5, PIECE));
        drop(frontend);
        check_service(&mut daemon)?;
        let (line, expected) = ("all further flushes and", usize::from(cache != Cache::None));
        daemon.wait_for_exactly(line, expected)?;
        daemon.terminate()?;
    }
    Ok(())
}

fn a_device_that_becomes_read_only(engine: Engine) -> Result<()> {
    if !can_change_system("loop devices") {
        return Ok(());
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let device = LoopDevice::attach(&backing_file(folder.path(), 8 * MIB)?)?;
    let path = device.path().to_string_lossy().into_owned();
    let mut daemon = start_on(device.path(), engine, Cache::None)?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    frontend.write(0, 0, &pattern(1, PIECE))?;
    run("blockdev", &["--setro", &path])?;
    let write = status(&mut frontend, blk::OUT, 0, &pattern(2, PIECE), 0)?;
    ensure!(write == blk::IOERR, "a write that is not allowed ended with status {write}");
    ensure!(frontend.read(1, 0, PIECE)? == pattern(1, PIECE), "data has changed");
    run("blockdev", &["--setrw", &path])?;
    frontend.write(0, 0, &pattern(3, PIECE))?;
    ensure!(frontend.read(1, 0, PIECE)? == pattern(3, PIECE));
    drop(frontend);
    check_service(&mut daemon)?;
    daemon.wait_for_message("a request failed: write at byte 0", 1)?;
    daemon.terminate()?;
    Ok(())
}
