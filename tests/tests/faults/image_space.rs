//! Images on a file system without space.

use std::fs;
use std::io::Write;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul, run};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk, segment};
use ringhaul_kit::system::{Tmpfs, can_change_system, is_installed, run as run_program};
use rustix::process::Signal;

use super::nbd::{serve, test_folders};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 32 * MIB;
/// The offset of the first write, in a cluster of the file that has no space yet.
const HELD: u64 = 20 * MIB;
const BYTES: u32 = 4096;
/// Bytes for the data of a slot.
const PLACE_BYTES: u64 = 64 << 10;

/// An image with mapped clusters that have no space, on a file system that a filler file makes
/// full.
struct Full {
    folders: TestFolders,
    tmpfs: Tmpfs,
    image: String,
}

impl Full {
    /// `None` if a program is not installed, or mounts are not allowed.
    fn new() -> Result<Option<Self>> {
        if !is_installed("qemu-img") || !can_change_system("mounts") {
            return Ok(None);
        }
        let (folders, tmpfs) = (test_folders()?, Tmpfs::mount(8 * MIB)?);
        let image = tmpfs.path().join("image").display().to_string();
        let options = ["-f", "qcow2", "-o", "preallocation=metadata", &image];
        let size = DISK_BYTES.to_string();
        run_program("qemu-img", &[&["create", "-q"], &options[..], &[&size]].concat())?;
        fill(&tmpfs)?;
        Ok(Some(Self { folders, tmpfs, image }))
    }

    /// Starts a daemon, and a front-end with a held write.
    fn serve(&self, disk: &str) -> Result<(Running, Frontend)> {
        let mut daemon = serve(&self.folders, disk, &["--werror", "hold"])?;
        let mut frontend = Frontend::attach(&self.folders.socket("vm.sock"), &Setup::default())?;
        begin(&mut frontend, 0, blk::OUT, HELD, &pattern(1, BYTES as usize))?;
        daemon.wait_for("has no space left, and writes wait for space")?;
        Ok((daemon, frontend))
    }
}

/// Makes a file `filler` that takes all space.
pub(super) fn fill(tmpfs: &Tmpfs) -> Result<()> {
    let mut filler = fs::File::create(tmpfs.path().join("filler"))?;
    let filled = (0..64).find_map(|_| filler.write_all(&vec![1; 256 << 10]).err());
    let filled = filled.context("a file system is larger than it was made")?;
    ensure!(filled.kind() == std::io::ErrorKind::StorageFull, "filling it: {filled}");
    Ok(())
}

/// Begins a request in the chain of this slot.
pub(super) fn begin(
    frontend: &mut Frontend,
    slot: u16,
    kind: u32,
    byte: u64,
    data: &[u8],
) -> Result<()> {
    let place = DATA + u64::from(slot) * PLACE_BYTES;
    frontend.memory.write(place, data)?;
    let (header, status) = frontend.put_header(0, slot, kind, byte / 512)?;
    let data = Desc::readable(place, u32::try_from(data.len())?);
    let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
    frontend.rings[0].put_chain(slot * 3, &chain);
    frontend.rings[0].submit(slot * 3)
}

/// Zeroing removes data from the image, and must wait for transfers to the same places.
#[test]
fn a_held_write_delays_no_other_request() -> Result<()> {
    for layer in ["", "raw,over="] {
        let Some(full) = Full::new()? else { return Ok(()) };
        let disk = format!("{layer}qcow2,path={}", full.image);
        let (mut daemon, mut frontend) = full.serve(&disk)?;
        // The first one zeroes part of the same cluster, and the second one part of another.
        for (slot, byte) in [(1, HELD + 2 * u64::from(BYTES)), (2, HELD + MIB)] {
            let part = segment(byte / 512, BYTES / 512, 0);
            begin(&mut frontend, slot, blk::WRITE_ZEROES, 0, &part)?;
        }
        // The mappings of these places are not loaded yet.
        for byte in [4 * MIB, HELD + 4 * MIB] {
            let read = frontend.read(1, byte / 512, BYTES as usize)?;
            ensure!(read.iter().all(|&byte| byte == 0), "no zeroes at {byte}");
        }
        ensure!(frontend.status(0, 0) == Some(blk::PENDING), "the write was not held");
        fs::remove_file(full.tmpfs.path().join("filler")).context("making room")?;
        for _ in 0..3 {
            frontend.rings[0].wait_used()?;
        }
        let ends = [0, 1, 2].map(|slot| frontend.status(0, slot));
        ensure!(ends == [Some(blk::OK); 3], "they ended with {ends:?}");
        let read = frontend.read(1, HELD / 512, BYTES as usize)?;
        ensure!(read == pattern(1, BYTES as usize), "something else was written");
        drop(frontend);
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
        run_program("qemu-img", &["check", "-q", &full.image])?;
    }
    Ok(())
}

#[test]
fn an_image_whose_writes_are_held_can_be_removed() -> Result<()> {
    let Some(full) = Full::new()? else { return Ok(()) };
    let (mut daemon, mut frontend) = full.serve(&format!("qcow2,path={}", full.image))?;
    let part = segment((HELD + 2 * u64::from(BYTES)) / 512, BYTES / 512, 0);
    begin(&mut frontend, 1, blk::WRITE_ZEROES, 0, &part)?;
    let vm = full.folders.socket("vm.sock").display().to_string();
    let mut ctl = ringhaul()?;
    ctl.args(["ctl", "--control"]).arg(full.folders.socket("control"));
    run(ctl.args(["remove", &vm, "--force"]))?.expect_code(0)?;
    daemon.signal(Signal::TERM)?;
    daemon.finish()?.expect_code(0)?;
    run_program("qemu-img", &["check", "-q", &full.image]).map(drop)
}
