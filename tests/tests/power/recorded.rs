//! A run of a daemon with a recorded disk, and the loss of power in it.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ringhaul_kit::cli::{Running, TestFolders, ringhaul, run};
use ringhaul_kit::control::take_over;
use ringhaul_kit::frontend::{Frontend, Setup, blk};
use ringhaul_kit::fuse::Fuse;
use ringhaul_kit::journal::{Cut, Journal};
use ringhaul_kit::nbd_recorder::NbdRecorder;
use ringhaul_kit::random::Random;
use ringhaul_kit::system::{is_installed, run as run_program};
use rustix::process::Signal;

use super::guest::{Log, SECTOR, Version, filled};

const DISK_BYTES: usize = 4 << 20;
/// Bytes of a server's disk, including the space behind the image.
const SERVER_BYTES: usize = 16 << 20;
/// The contents of a server's disk behind the image, as a former user may leave them.
const STALE: u8 = 0xa5;
/// A daemon opens the file of one cut in this number.
const OPENED: usize = 14;
/// The version of sectors in the backing file.
const BASE: Version = 1;

#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Format {
    Raw,
    Qcow2,
}

/// A file below the image that it names as its backing file.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Base {
    None,
    Raw,
    Qcow2,
}

/// A place for the disk.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Below {
    /// A file that grows.
    Fuse,
    /// A disk of a server, with old data behind the image.
    Nbd,
}

#[derive(Clone)]
pub(super) struct Kind {
    pub(super) format: Format,
    /// Options of `qemu-img create`.
    pub(super) options: &'static str,
    pub(super) base: Base,
    pub(super) below: Below,
    /// The value of `--cache`.
    pub(super) cache: &'static str,
    /// True if the disk was full once, and then discarded in part.
    pub(super) is_used: bool,
    /// True if the disk is enlarged between requests.
    pub(super) grows: bool,
    /// True if another process takes over between requests.
    pub(super) is_taken_over: bool,
    pub(super) requests: usize,
}

impl Kind {
    /// True if the answer to a write promises stable data.
    fn is_stable(&self) -> bool {
        matches!(self.cache, "directsync" | "writethrough")
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.format {
            Format::Raw => write!(f, "raw, cache={}", self.cache),
            Format::Qcow2 => write!(f, "{}, cache={}", self.options, self.cache),
        }
    }
}

pub(super) struct Recorded {
    kind: Kind,
    folders: TestFolders,
    journal: Arc<Journal>,
    log: Log,
    /// The range of moments of the run.
    clock: std::ops::Range<usize>,
}

impl Recorded {
    /// Makes a disk, and runs a guest on it. `None` if this machine lacks something.
    pub(super) fn run(kind: &Kind) -> Result<Option<Self>> {
        if !is_installed("qemu-img") {
            return Ok(None);
        }
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let log = Log::new(make_disk(kind, &folders)?, kind.is_stable());
        let mut content = fs::read(folders.path("image"))?;
        if kind.below == Below::Nbd {
            content.resize(SERVER_BYTES, STALE);
        }
        let journal = Arc::new(Journal::new(content));
        let mut this = Self { kind: kind.clone(), folders, journal, log, clock: 0..0 };
        let is_done = match kind.below {
            Below::Fuse => match Fuse::mount_recorded(&this.journal)? {
                Some(fuse) => this.use_disk(&format!("file,path={}", fuse.file().display())),
                None => return Ok(None),
            },
            Below::Nbd => {
                let socket = this.folders.socket("server");
                let _server = NbdRecorder::start(&socket, &this.journal)?;
                this.use_disk(&format!("nbd,socket={}", socket.display()))
            }
        };
        is_done.with_context(|| kind.to_string())?;
        Ok(Some(this))
    }

    fn use_disk(&mut self, below: &str) -> Result<()> {
        let mut daemon = self.serve("disk.sock", &self.disk(below))?;
        let socket = self.folders.socket("disk.sock");
        let setup = Setup::default();
        let mut frontend = Frontend::attach(&socket, &setup)?;
        let random = &mut Random::new(7);
        let journal = Arc::clone(&self.journal);
        let begun = journal.now();
        let requests = self.kind.requests;
        self.log.run(&mut frontend, &journal, random, requests / 2)?;
        if self.kind.grows {
            let size = format!("{}M", (2 * DISK_BYTES) >> 20);
            let mut command = ringhaul()?;
            command.args(["ctl", "--control"]).arg(self.folders.socket("control"));
            run(command.arg("resize").arg(&socket).arg(&size))?.expect_code(0)?;
            self.log.grow(2 * DISK_BYTES / SECTOR);
        }
        if self.kind.is_taken_over {
            daemon = take_over(&self.folders, daemon)?;
        }
        self.log.run(&mut frontend, &journal, random, requests - requests / 2)?;
        if !self.kind.is_stable() {
            let flushed = frontend.request(0, blk::FLUSH, 0, &[], 0)?.status;
            ensure!(flushed == blk::OK, "a flush ended with {flushed}");
        }
        drop(frontend);
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
        self.clock = begun..journal.now();
        let (writes, flushes, bytes) = journal.totals();
        eprintln!("{}: {writes} writes of {bytes} bytes, {flushes} flushes", self.kind);
        Ok(())
    }

    fn disk(&self, below: &str) -> String {
        match (self.kind.format, self.kind.base) {
            (Format::Raw, _) => below.to_owned(),
            (Format::Qcow2, Base::None) => format!("qcow2,over={below}"),
            (Format::Qcow2, Base::Raw | Base::Qcow2) => {
                format!("qcow2,backing=anywhere,over={below}")
            }
        }
    }

    fn serve(&self, socket: &str, disk: &str) -> Result<Running> {
        let mut command = ringhaul()?;
        command.arg("serve").arg("--socket-path").arg(self.folders.socket(socket));
        command.args(["--cache", self.kind.cache, "--disk", disk]);
        command.arg("--control").arg(self.folders.socket("control"));
        Running::serve(&mut command)
    }

    /// Cuts the power, and returns the number of files with leaked clusters.
    pub(super) fn check_cuts(&self, cuts: usize) -> Result<usize> {
        let random = &mut Random::new(3);
        let mut leaks = 0;
        for index in 0..cuts {
            let at = self.moment(random);
            let kept_percent = [0, 20, 50, 90][index % 4];
            let cut = Cut { at, kept_percent, heeds_flushes: true };
            let check_cut = |random: &mut Random| -> Result<bool> {
                let path = self.write(cut, random)?;
                let has_leaks = self.check(&path)?;
                self.compare(&path, at)?;
                if index % OPENED == OPENED - 1 {
                    self.open(&path, at)?;
                }
                Ok(has_leaks)
            };
            let what = || format!("{}: {cut:?}", self.kind);
            leaks += usize::from(check_cut(random).with_context(what)?);
        }
        Ok(leaks)
    }

    /// The number of cuts that lose something when flushes do nothing.
    pub(super) fn losses_without_flushes(&self, cuts: usize) -> Result<usize> {
        let random = &mut Random::new(3);
        let mut lost = 0;
        for _ in 0..cuts {
            let at = self.moment(random);
            let path = self.write(Cut { at, kept_percent: 50, heeds_flushes: false }, random)?;
            let seen = self.check(&path).and_then(|_| self.compare(&path, at));
            lost += usize::from(seen.is_err());
        }
        Ok(lost)
    }

    fn moment(&self, random: &mut Random) -> usize {
        let span = (self.clock.end - self.clock.start) as u64;
        self.clock.start + usize::try_from(random.below(span)).expect("it is below a usize")
    }

    /// Writes the file that a cut leaves.
    fn write(&self, cut: Cut, random: &mut Random) -> Result<PathBuf> {
        let path = self.folders.path("cut");
        fs::write(&path, self.journal.cut(cut, random))?;
        Ok(path)
    }

    /// Checks that QEMU finds no damage, and returns true if it finds leaked clusters.
    fn check(&self, path: &Path) -> Result<bool> {
        if self.kind.format == Format::Raw {
            return Ok(false);
        }
        let mut command = Command::new("qemu-img");
        let output = command.args(["check", "-f", "qcow2"]).arg(path).output()?;
        match output.status.code() {
            Some(0) => Ok(false),
            Some(3) => Ok(true),
            code => {
                let text = [output.stdout, output.stderr].concat();
                bail!("a check ended with {code:?}: {}", String::from_utf8_lossy(&text));
            }
        }
    }

    /// The contents of the disk, as its guest sees them.
    fn read(&self, path: &Path) -> Result<Vec<u8>> {
        if self.kind.format == Format::Raw {
            return Ok(fs::read(path)?);
        }
        let raw = self.folders.path("raw").display().to_string();
        let image = path.display().to_string();
        run_program("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", &image, &raw])?;
        Ok(fs::read(&raw)?)
    }

    /// Checks that each sector has one of its allowed versions.
    fn compare(&self, path: &Path, at: usize) -> Result<()> {
        let content = self.read(path)?;
        ensure!(content.len() >= DISK_BYTES, "the disk has only {} bytes", content.len());
        let mut whole = std::collections::HashMap::new();
        let allowed = self.log.allowed(at);
        for (number, sector) in content.chunks(SECTOR).enumerate() {
            let version = u64::from_le_bytes(sector[..8].try_into()?);
            let expected = whole.entry(version).or_insert_with(|| filled(version));
            let allowed = allowed.get(number).context("the disk is too long")?;
            ensure!(
                allowed.contains(&version) && sector == expected,
                "sector {number} has {version}, and not one of {allowed:?}"
            );
        }
        Ok(())
    }

    /// Checks that a daemon opens the file, leaves no leaked cluster after a write, and keeps the
    /// contents.
    fn open(&self, path: &Path, at: usize) -> Result<()> {
        let disk = self.disk(&format!("file,path={}", path.display()));
        let mut daemon = self.serve("cut.sock", &disk)?;
        let mut frontend = Frontend::attach(&self.folders.socket("cut.sock"), &Setup::default())?;
        let first = frontend.read(0, 0, SECTOR)?;
        frontend.write(0, 0, &first)?;
        drop(frontend);
        daemon.signal(Signal::TERM)?;
        daemon.finish()?.expect_code(0)?;
        let is_marked =
            !self.kind.options.contains("compat=0.10") && self.kind.below == Below::Fuse;
        ensure!(!self.check(path)? || !is_marked, "clusters stay leaked");
        self.compare(path, at)
    }
}

/// Makes the disk, and returns the version of each sector.
fn make_disk(kind: &Kind, folders: &TestFolders) -> Result<Vec<Version>> {
    let path = |name: &str| folders.path(name).display().to_string();
    if kind.format == Format::Raw {
        fs::write(path("image"), vec![0; DISK_BYTES])?;
        return Ok(vec![0; DISK_BYTES / SECTOR]);
    }
    let [image, base, raw] = ["image", "base", "raw-base"].map(path);
    let size = DISK_BYTES.to_string();
    let mut create = vec!["create", "-q", "-f", "qcow2", "-o", kind.options];
    fs::write(&raw, filled(BASE).repeat(DISK_BYTES / SECTOR))?;
    match kind.base {
        Base::None => create.extend([&*image, &size]),
        Base::Raw => create.extend(["-b", &raw, "-F", "raw", &image, &size]),
        Base::Qcow2 => {
            run_program("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &raw, &base])?;
            create.extend(["-b", &base, "-F", "qcow2", &image, &size]);
        }
    }
    run_program("qemu-img", &create)?;
    let first = if kind.base == Base::None { 0 } else { BASE };
    let mut versions = vec![first; DISK_BYTES / SECTOR];
    if kind.is_used {
        let (all, half) = (format!("write -P 1 0 {size}"), DISK_BYTES / 2);
        let discard = format!("discard {} {half}", half / 2);
        let zero = format!("write -z 0 {size}");
        let words = ["-f", "qcow2", "-c", &all, "-c", &discard, "-c", &zero, &image];
        run_program("qemu-io", &words)?;
        versions.fill(0);
    }
    Ok(versions)
}
