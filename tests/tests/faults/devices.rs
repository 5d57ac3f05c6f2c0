//! Block devices that change under the daemon or have large blocks, and images that are cloned.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{DaemonOptions, FILLED_BYTES, SECTOR_BYTES, pattern};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::{Frontend, Setup, blk, check_service, segment};
use ringhaul_kit::server::{Cache, Engine};
use ringhaul_kit::system::{FileSystem, LoopDevice, can_change_system, is_installed, run};

use crate::start;

for_each_engine! {
    a_device_that_shrinks,
    ranges_below_the_block_of_a_device,
    discards_beside_writes_to_the_same_page,
    an_image_that_is_cloned,
}

const MIB: u64 = 1 << 20;
/// A flag of write zeroes.
const UNMAP: u32 = 1;

fn sector_of(byte: u64) -> u64 {
    byte / SECTOR_BYTES as u64
}

fn options_on(device: &Path, engine: Engine, cache: Cache) -> DaemonOptions {
    let disk = format!("file,path={}", device.display());
    DaemonOptions { cache, ..DaemonOptions::new(engine).with("--disk", &disk) }
}

/// A read or write beyond the end of a shrunk device is an error, never zeroes. So it is on an
/// empty device, such as a removed disk.
fn a_device_that_shrinks(engine: Engine) -> Result<()> {
    if !can_change_system("loop devices") {
        return Ok(());
    }
    for cache in [Cache::None, Cache::Writeback] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let backing = folder.path().join("backing.img");
        fs::write(&backing, vec![0x5a; 8 << 20]).context("making a backing file")?;
        let device = LoopDevice::attach(&backing)?;
        let path = device.path().to_string_lossy().into_owned();
        // By default each write beyond the end would be held for 20 s.
        let options = options_on(device.path(), engine, cache).with("--werror", "report");
        let mut daemon = start(&options)?;
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        let status = |frontend: &mut Frontend, kind, byte, out: &[u8], room| -> Result<u8> {
            Ok(frontend.request(0, kind, sector_of(byte), out, room)?.status)
        };
        let file = File::options().write(true).open(&backing).context("opening the backing")?;
        file.set_len(4 * MIB).context("cutting the backing file")?;
        run("losetup", &["--set-capacity", &path])?;
        // Beyond the end, at the end, and across it.
        for (byte, bytes) in [(6 * MIB, 4096), (4 * MIB, 512), (4 * MIB - 4096, 8192)] {
            let read = status(&mut frontend, blk::IN, byte, &[], bytes)?;
            ensure!(read == blk::IOERR, "{cache:?}: a read at {byte} ended with status {read}");
            let write = status(&mut frontend, blk::OUT, byte, &vec![1; bytes], 0)?;
            ensure!(write == blk::IOERR, "{cache:?}: a write at {byte} ended with {write}");
        }
        ensure!(frontend.read(1, 0, 8192)? == vec![0x5a; 8192], "what is left has changed");
        // The page cache may still hold earlier reads; this range was never read.
        file.set_len(0).context("cutting the backing file")?;
        run("losetup", &["--set-capacity", &path])?;
        let read = status(&mut frontend, blk::IN, 2 * MIB, &[], 4096)?;
        ensure!(read == blk::IOERR, "{cache:?}: a read of nothing ended with status {read}");
        drop(frontend);
        daemon.wait_for_message("a request failed: read at byte", 1)?;
        daemon.check_running()?;
        daemon.terminate()?;
    }
    Ok(())
}

/// With the page cache, and with an explicit option, disks with blocks of 4096 bytes take requests
/// of 512 bytes. The daemon replaces operations that are too small for the device.
fn ranges_below_the_block_of_a_device(engine: Engine) -> Result<()> {
    if !can_change_system("loop devices") {
        return Ok(());
    }
    let (page, rest) = (4096, 256 << 10);
    for (cache, unit, is_logged) in [
        (Cache::Writeback, 512, false),
        (Cache::Writethrough, 512, false),
        (Cache::None, page, false),
        (Cache::None, 512, true),
    ] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let backing = folder.path().join("backing.img");
        let content = pattern(9, 1 << 20);
        fs::write(&backing, &content).context("making a backing file")?;
        let device = LoopDevice::attach_with(&backing, &["--sector-size", "4096"])?;
        let mut options = options_on(device.path(), engine, cache);
        if is_logged {
            options = options.with("--logical-block-size", "512");
        }
        let mut daemon = start(&options)?;
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        let block = frontend.config(20, 4)?;
        ensure!(block == u32::try_from(unit)?.to_le_bytes(), "{cache:?}: a block of {block:?}");
        let mut expected = content.clone();
        write_parts(&mut frontend, unit, &mut expected)?;
        let ranges = [
            (unit, unit),
            (page, page),
            (3 * page - unit, 2 * unit),
            (8 * page + unit, rest),
            (200 * page, 8 * page - unit),
        ];
        for (round, flags) in [0, UNMAP].into_iter().enumerate() {
            for (start, len) in ranges {
                let start = start + round * (400 << 10);
                let Some(end) = Some(start + len).filter(|end| *end <= expected.len()) else {
                    continue;
                };
                let sectors = u32::try_from(len / SECTOR_BYTES)?;
                let segment = segment(sector_of(start as u64), sectors, flags);
                let zeroes = frontend.request(0, blk::WRITE_ZEROES, 0, &segment, 0)?.status;
                ensure!(zeroes == blk::OK, "{cache:?}: zeroing {len} at {start}: {zeroes}");
                expected[start..end].fill(0);
            }
        }
        ensure!(frontend.request(1, blk::FLUSH, 0, &[], 0)?.status == blk::OK);
        ensure!(frontend.read(1, 0, 512 << 10)? == expected[..512 << 10], "{cache:?}");
        let device_file = File::open(device.path()).context("opening the device")?;
        let mut found = vec![0; expected.len()];
        device_file.read_exact_at(&mut found, 0).context("reading the device")?;
        ensure!(found == expected, "{cache:?}: the device has not what was asked for");
        // A discard is a hint: it may keep data in its range, and never changes data beside it.
        for (start, len) in ranges {
            let segment = segment(sector_of(start as u64), u32::try_from(len / SECTOR_BYTES)?, 0);
            let discard = frontend.request(0, blk::DISCARD, 0, &segment, 0)?.status;
            ensure!(discard == blk::OK, "{cache:?}: discarding {len} at {start}: {discard}");
        }
        let read = frontend.read(1, 0, 512 << 10)?;
        let is_named =
            |at: &usize| ranges.iter().any(|(start, len)| (*start..start + len).contains(at));
        let others = (0..read.len()).filter(|at| !is_named(at));
        ensure!(others.clone().all(|at| read[at] == expected[at]), "{cache:?}: too much is gone");
        drop(frontend);
        daemon.check_running()?;
        daemon.terminate()?;
    }
    Ok(())
}

/// Writes part of a block, one block, and many blocks with parts at both ends.
fn write_parts(frontend: &mut Frontend, unit: usize, expected: &mut [u8]) -> Result<()> {
    let page = 4096;
    for (start, len) in [(unit, unit), (page, page), (90 * page + unit, 65 * page + unit)] {
        let data = pattern(start as u64, len);
        frontend.write(1, sector_of(start as u64), &data)?;
        let read = frontend.read(0, sector_of(start as u64), len)?;
        ensure!(read == data, "{len} bytes at {start} are not what was written");
        expected[start..start + len].copy_from_slice(&data);
    }
    Ok(())
}

/// The ring refuses a discard during a write to the same page of the page cache.
fn discards_beside_writes_to_the_same_page(engine: Engine) -> Result<()> {
    if !can_change_system("loop devices") {
        return Ok(());
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let backing = folder.path().join("backing.img");
    File::create(&backing).and_then(|file| file.set_len(8 * MIB)).context("making a file")?;
    let device = LoopDevice::attach(&backing)?;
    let mut daemon = start(&options_on(device.path(), engine, Cache::Writeback))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    let path = device.path().to_owned();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let writer = scope.spawn(|| -> Result<()> {
            let file = File::options().write(true).open(path).context("opening the device")?;
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                file.write_all_at(&[7; 512], 2048).context("writing beside")?;
            }
            Ok(())
        });
        let mut result = Ok(());
        for _ in 0..2000 {
            let discard = frontend.request(0, blk::DISCARD, 0, &segment(0, 4, 0), 0);
            result = discard.and_then(|answer| {
                ensure!(answer.status == blk::OK, "a discard ended with {}", answer.status);
                Ok(())
            });
            if result.is_err() {
                break;
            }
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        result
    })?;
    drop(frontend);
    check_service(&mut daemon)?;
    daemon.terminate()?;
    Ok(())
}

/// Once an image shares extents with a clone, XFS requires larger direct writes. The guest's
/// logical blocks keep their size, even after a restart.
fn an_image_that_is_cloned(engine: Engine) -> Result<()> {
    if !can_change_system("mounts") || !is_installed("mkfs.xfs") {
        return Ok(());
    }
    let home = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let xfs = FileSystem::make(home, 400 * MIB, &["mkfs.xfs", "-q", "-m", "reflink=1"])?;
    let (image, clone) = (xfs.path().join("guest.img"), xfs.path().join("clone.img"));
    fs::write(&image, pattern(1, FILLED_BYTES)).context("making an image")?;
    let clone_it = || {
        let paths = [&image, &clone].map(|path| path.to_string_lossy().into_owned());
        run("cp", &["--reflink=always", &paths[0], &paths[1]])
    };
    let mut expected = pattern(1, FILLED_BYTES);
    // The second daemon starts on a cloned image, the third with an explicit block size.
    for more in [[].as_slice(), &[], &["--logical-block-size", "512"]] {
        let mut options =
            DaemonOptions::new(engine).with("--disk", &format!("file,path={}", image.display()));
        options.cache = Cache::None;
        options.extra.extend(more.iter().map(|&word| word.to_owned()));
        let mut daemon = start(&options)?;
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        ensure!(frontend.config(20, 4)? == 512_u32.to_le_bytes(), "other logical blocks");
        for round in 0..2_u64 {
            for (seed, sector, sectors) in [(3, 1, 1), (4, 9, 3), (5, 16, 8), (6, 31, 2)] {
                let data = pattern(seed + 10 * round, sectors * SECTOR_BYTES);
                frontend.write(0, sector, &data)?;
                ensure!(frontend.read(1, sector, data.len())? == data, "sector {sector}");
                let start = usize::try_from(sector)? * SECTOR_BYTES;
                expected[start..start + data.len()].copy_from_slice(&data);
            }
            ensure!(frontend.request(0, blk::FLUSH, 0, &[], 0)?.status == blk::OK);
            ensure!(fs::read(&image)? == expected, "the image has other data");
            if round == 0 {
                // A backup of the running guest.
                clone_it()?;
            }
        }
        let cloned = fs::read(&clone).context("reading the clone")?;
        ensure!(cloned != expected, "what was written later is in the clone");
        drop(frontend);
        daemon.check_running()?;
        daemon.terminate()?;
    }
    Ok(())
}
