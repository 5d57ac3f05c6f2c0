//! Encrypted disks on a full file system: a write that is encrypted again for its retry stores the
//! same data.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{LIMIT, Running, TestFolders};
use ringhaul_kit::daemon::pattern;
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use ringhaul_kit::system::{Tmpfs, can_change_system, is_installed, run as run_program};
use ringhaul_tools::process::retry;
use rustix::process::Signal;
use serde_json::Value;

use super::image_space::{begin, fill};
use super::nbd::{serve, test_folders};
use super::nbd_errors::ctl;

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 32 * MIB;
/// The offset of a write while there is space.
const BEFORE: u64 = 3 * MIB;
/// Offsets of writes without space, in clusters that are not allocated.
const HELD: [u64; 3] = [20 * MIB, 21 * MIB + 8192, 29 * MIB + 512];
const BYTES: usize = 64 << 10;
/// The space that is left, enough for part of one write.
const LEFT_BYTES: u64 = 8192;

/// An encrypted disk on a small file system, which a filler file makes full.
struct Full {
    folders: TestFolders,
    tmpfs: Tmpfs,
    path: String,
    key: String,
    is_in_image: bool,
}

impl Full {
    /// Makes a disk while there is space, in a file or in a qcow2 image. `None` if a program is not
    /// installed, or mounts are not allowed.
    fn new(is_in_image: bool) -> Result<Option<Self>> {
        let programs = ["cryptsetup", "qemu-img"].iter().all(|program| is_installed(program));
        if !programs || !can_change_system("mounts") {
            return Ok(None);
        }
        let (folders, tmpfs) = (test_folders()?, Tmpfs::mount(8 * MIB)?);
        let key = folders.path("key").display().to_string();
        fs::write(&key, "it opens tests")?;
        let path = tmpfs.path().join("image").display().to_string();
        let plain = folders.disk("encrypted", DISK_BYTES)?.display().to_string();
        let with_key = ["--batch-mode", "--key-file", &key, "luksFormat", "--type", "luks1"];
        let at_once = ["--pbkdf-force-iterations", "1000", &plain];
        run_program("cryptsetup", &[&with_key[..], &at_once].concat())?;
        let format = if is_in_image { "qcow2" } else { "raw" };
        run_program("qemu-img", &["convert", "-f", "raw", "-O", format, &plain, &path])?;
        Ok(Some(Self { folders, tmpfs, path, key, is_in_image }))
    }

    /// Starts a daemon with this policy, and a front-end with writes that find no space.
    fn serve(&self, policy: &str) -> Result<(Running, Frontend)> {
        let layer = if self.is_in_image { "qcow2,path=" } else { "file,path=" };
        let disk = format!("luks,key-file={},over={layer}{}", self.key, self.path);
        let mut daemon = serve(&self.folders, &disk, &["--werror", policy])?;
        let mut frontend = Frontend::attach(&self.folders.socket("vm.sock"), &Setup::default())?;
        frontend.write(0, BEFORE / 512, &pattern(BEFORE, BYTES))?;
        fill(&self.tmpfs)?;
        let filler = OpenOptions::new().write(true).open(self.filler())?;
        filler.set_len(filler.metadata()?.len() - LEFT_BYTES)?;
        for (slot, byte) in (0..).zip(HELD) {
            begin(&mut frontend, slot, blk::OUT, byte, &pattern(byte, BYTES))?;
        }
        daemon.wait_for("No space left on device")?;
        Ok((daemon, frontend))
    }

    fn vm(&self) -> String {
        self.folders.socket("vm.sock").display().to_string()
    }

    fn shown(&self) -> Result<Value> {
        Ok(serde_json::from_str(&ctl(&self.folders, &["--json", "show", &self.vm()])?)?)
    }

    /// Waits until the disk reports that all held writes wait in this way, and checks that they are
    /// unanswered.
    fn wait_until(&self, waiting: &str, frontend: &mut Frontend) -> Result<()> {
        retry(LIMIT, || {
            let shown = self.shown()?;
            let disk = &shown["disks"][0];
            let is_so = shown["disk-state"] == waiting && disk["waiting"] == waiting;
            ensure!(is_so && disk["waited"] == HELD.len(), "{shown}");
            Ok(())
        })?;
        let text = ctl(&self.folders, &["show", &self.vm()])?;
        ensure!(text.contains(waiting), "{text}");
        ensure!(self.statuses(frontend) == [Some(blk::PENDING); HELD.len()], "they are answered");
        // Other requests pass them.
        let read = frontend.read(1, BEFORE / 512, BYTES)?;
        ensure!(read == pattern(BEFORE, BYTES), "something else was written before");
        Ok(())
    }

    fn statuses(&self, frontend: &Frontend) -> Vec<Option<u8>> {
        (0..).zip(HELD).map(|(slot, _)| frontend.status(0, slot)).collect()
    }

    fn filler(&self) -> PathBuf {
        self.tmpfs.path().join("filler")
    }

    fn make_room(&self) -> Result<()> {
        fs::remove_file(self.filler()).context("making room")
    }

    /// Checks that all waiting writes were written, and that QEMU reads them.
    fn finish(&self, mut daemon: Running, mut frontend: Frontend) -> Result<()> {
        for _ in HELD {
            frontend.rings[0].wait_used()?;
        }
        let statuses = self.statuses(&frontend);
        ensure!(statuses == [Some(blk::OK); HELD.len()], "they ended with {statuses:?}");
        for byte in HELD {
            let read = frontend.read(1, byte / 512, BYTES)?;
            ensure!(read == pattern(byte, BYTES), "something else was written at {byte}");
        }
        let shown = self.shown()?;
        ensure!(
            shown["disk-state"] == "ready" && shown["disks"][0]["waiting"].is_null(),
            "{shown}"
        );
        drop(frontend);
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
        let raw = self.folders.path("raw");
        let source = if self.is_in_image {
            run_program("qemu-img", &["check", "-q", &self.path])?;
            "driver=luks,key-secret=key,file.driver=qcow2,file.file.filename="
        } else {
            "driver=luks,key-secret=key,file.filename="
        };
        let (from, to) = (format!("{source}{}", self.path), raw.display().to_string());
        let secret = format!("secret,id=key,file={}", self.key);
        let convert = ["convert", "--object", &secret, "--image-opts", "-O", "raw"];
        run_program("qemu-img", &[&convert[..], &[&from, &to]].concat())?;
        let raw = File::open(raw)?;
        for byte in HELD.into_iter().chain([BEFORE]) {
            let mut data = vec![0; BYTES];
            raw.read_exact_at(&mut data, byte)?;
            ensure!(data == pattern(byte, BYTES), "QEMU reads something else at {byte}");
        }
        Ok(())
    }
}

#[test]
fn an_encrypted_disk_in_a_file_holds_writes_until_there_is_space() -> Result<()> {
    holds(false)
}

#[test]
fn an_encrypted_disk_in_an_image_holds_writes_until_there_is_space() -> Result<()> {
    holds(true)
}

/// The writes continue by themselves or by `resume`, which may also come too early.
fn holds(is_in_image: bool) -> Result<()> {
    for is_resumed in [false, true] {
        let Some(full) = Full::new(is_in_image)? else { return Ok(()) };
        let (daemon, mut frontend) = full.serve("hold")?;
        full.wait_until("held", &mut frontend)?;
        if is_resumed {
            ctl(&full.folders, &["resume", &full.vm()])?;
            full.wait_until("held", &mut frontend)?;
        }
        full.make_room()?;
        if is_resumed {
            ctl(&full.folders, &["resume", &full.vm()])?;
        }
        full.finish(daemon, frontend)?;
    }
    Ok(())
}

#[test]
fn an_encrypted_disk_tries_writes_again_until_there_is_space() -> Result<()> {
    for is_in_image in [false, true] {
        let Some(full) = Full::new(is_in_image)? else { return Ok(()) };
        let (daemon, mut frontend) = full.serve("retry")?;
        full.wait_until("retried", &mut frontend)?;
        full.make_room()?;
        full.finish(daemon, frontend)?;
    }
    Ok(())
}
