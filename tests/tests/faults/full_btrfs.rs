//! An image on a full btrfs, where every write of a table needs new space.

use std::fs;
use std::io::{ErrorKind, Write};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, Setup, blk, segment};
use ringhaul_kit::system::{
    FileSystem, Tmpfs, can_change_system, is_installed, run as run_program,
};
use rustix::process::Signal;

use super::nbd::{serve, test_folders};

const MIB: usize = 1 << 20;
const FILE_SYSTEM_BYTES: u64 = 256 << 20;
/// Bytes that the guest writes, and then discards.
const WRITTEN: usize = 64 * MIB;

#[test]
fn a_discard_makes_room_on_a_full_btrfs() -> Result<()> {
    let is_here =
        is_installed("mkfs.btrfs") && is_installed("qemu-img") && can_change_system("mounts");
    if !is_here || !fs::read_to_string("/proc/filesystems")?.contains("btrfs") {
        eprintln!("skipped: there is no btrfs");
        return Ok(());
    }
    let (folders, home) = (test_folders()?, Tmpfs::mount(2 * FILE_SYSTEM_BYTES)?);
    let btrfs = FileSystem::make(home.path(), FILE_SYSTEM_BYTES, &["mkfs.btrfs", "--quiet"])?;
    let image = btrfs.path().join("image").display().to_string();
    run_program("qemu-img", &["create", "-q", "-f", "qcow2", &image, "1G"])?;
    let mut daemon = serve(&folders, &format!("qcow2,path={image}"), &["--werror", "report"])?;
    let mut frontend = Frontend::attach(&folders.socket("vm.sock"), &Setup::default())?;
    for place in (0..WRITTEN).step_by(MIB / 4) {
        frontend.write(0, place as u64 / 512, &pattern(place as u64, MIB / 4))?;
    }
    ensure!(flush(&mut frontend)? == blk::OK, "a flush failed");
    fill(&btrfs)?;
    // No space is left for blocks of tables.
    let status = write(&mut frontend, 900 * MIB, MIB / 4)?;
    ensure!(status == blk::IOERR, "a write to a full file system ended with {status}");
    let range = segment(0, u32::try_from(WRITTEN / 512)?, 0);
    let status = frontend.request(0, blk::DISCARD, 0, &range, 0)?.status;
    ensure!(status == blk::OK, "a discard ended with {status}: {}", daemon.stderr());
    let status = write(&mut frontend, 900 * MIB, MIB / 4)?;
    ensure!(status == blk::OK, "a write after it ended with {status}: {}", daemon.stderr());
    ensure!(flush(&mut frontend)? == blk::OK, "a flush failed: {}", daemon.stderr());
    let read = frontend.read(0, 0, MIB / 4)?;
    ensure!(read.iter().all(|byte| *byte == 0), "what was discarded is there");
    drop(frontend);
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    run_program("qemu-img", &["check", "-q", &image]).map(drop)
}

fn write(frontend: &mut Frontend, place: usize, bytes: usize) -> Result<u8> {
    let data = pattern(7, bytes);
    Ok(frontend.request(0, blk::OUT, place as u64 / 512, &data, 0)?.status)
}

fn flush(frontend: &mut Frontend) -> Result<u8> {
    Ok(frontend.request(0, blk::FLUSH, 0, &[], 0)?.status)
}

/// Makes a file that takes all space.
fn fill(btrfs: &FileSystem) -> Result<()> {
    let mut filler = fs::File::create(btrfs.path().join("filler"))?;
    let data = pattern(1, 64 << 10);
    for bytes in [data.len(), 4096] {
        let filled = (0..16_384)
            .find_map(|_| filler.write_all(&data[..bytes]).and_then(|()| filler.sync_data()).err());
        let filled = filled.context("a file system is larger than it was made")?;
        ensure!(filled.kind() == ErrorKind::StorageFull, "filling it: {filled}");
    }
    Ok(())
}
