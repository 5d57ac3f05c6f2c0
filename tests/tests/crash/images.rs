//! qcow2 images and encrypted disks under daemons that are killed.
//!
//! A killed daemon may leave leaked clusters behind. `qemu-img` must find no other fault in the
//! image. The first write to the next daemon frees the leaked clusters.

use std::cell::Cell;
use std::fs;
use std::io::Read as _;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::TestFolders;
use ringhaul_kit::daemon::LIMIT;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::blk;
use ringhaul_kit::frontend::message::Channel;
use ringhaul_kit::server::{Engine, Export, Program, Server};
use ringhaul_kit::system::{is_installed, run as run_program};

use super::driver::{BLOCK_BYTES, BLOCKS_MAX, Driver, FEW_BLOCKS, Version, check_file};
use super::{Kills, end, export, rounds};

for_each_engine! {
    an_image_survives_kills_of_daemons_and_successors,
}

/// The number of new images on which the daemon is killed.
const NEW_IMAGES: u64 = 15;
/// The default number of rounds for one image, and the interval of takeovers among them.
const ROUNDS: u32 = 12;
const TAKEOVER_EVERY: u32 = 2;

/// With small clusters each block allocates space of its own, and every 32 blocks a table.
const CLUSTERS: [&str; 2] = ["-o", "cluster_size=1k"];
const DISK_BYTES: u64 = BLOCKS_MAX * BLOCK_BYTES as u64;

/// The bytes before the data of an encrypted disk.
const HEADER_BYTES: u64 = 2 << 20;

/// The layers of a disk, the upper one first. Unwritten blocks of an encrypted disk read as
/// anything.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Format {
    Qcow2,
    Luks,
    /// With discards passed on to the image.
    LuksOnQcow2,
}

/// A disk in a file of one of these formats.
pub(super) struct Image {
    pub(super) folders: TestFolders,
    format: Format,
    pub(super) path: String,
    key: String,
}

impl Image {
    /// Makes a new image. `None` if a program is not installed.
    pub(super) fn new(format: Format) -> Result<Option<Self>> {
        if !is_installed("qemu-img") || format != Format::Qcow2 && !is_installed("cryptsetup") {
            return Ok(None);
        }
        let folders = TestFolders::new(env!("CARGO_TARGET_TMPDIR"))?;
        let [path, key] = ["image", "key"].map(|name| folders.path(name).display().to_string());
        let image = Self { folders, format, path, key };
        let path = &*image.path;
        if format == Format::Qcow2 {
            let bytes = DISK_BYTES.to_string();
            let create = ["create", "-q", "-f", "qcow2"];
            qemu_img(&[&create[..], &CLUSTERS, &[path, &bytes]].concat(), &[0])?;
            return Ok(Some(image));
        }
        fs::write(&image.key, "it opens tests")?;
        let name = if format == Format::Luks { "image" } else { "encrypted" };
        let encrypted = image.folders.disk(name, HEADER_BYTES + DISK_BYTES)?.display().to_string();
        let with_key = ["--batch-mode", "--key-file", &image.key, "luksFormat", "--type", "luks1"];
        let at_once = ["--pbkdf-force-iterations", "1000", &encrypted];
        run_program("cryptsetup", &[&with_key[..], &at_once].concat())?;
        if format == Format::LuksOnQcow2 {
            let convert = ["convert", "-f", "raw", "-O", "qcow2"];
            qemu_img(&[&convert[..], &CLUSTERS, &[&encrypted, path]].concat(), &[0])?;
        }
        Ok(Some(image))
    }

    /// The name of the disk in this image, if the image is on `below`.
    fn disk(&self, below: &str) -> String {
        let key = &self.key;
        match self.format {
            Format::Qcow2 => format!("qcow2,over={below}"),
            Format::Luks => format!("luks,key-file={key},over={below}"),
            Format::LuksOnQcow2 => {
                format!("luks,key-file={key},discard=on,over=qcow2,over={below}")
            }
        }
    }

    /// Starts a daemon that serves the image on `below`, and connects a driver.
    pub(super) fn serve(&self, below: &str, engine: Engine) -> Result<(Server, Driver)> {
        let socket = self.folders.socket("socket");
        let export = export(self.path.as_ref(), &socket, engine, true);
        let export = Export { disk: Some(self.disk(below)), ..export };
        let server = Server::start(Program::Ringhaul, &export)?;
        let mut driver = Driver::new(&socket, BLOCKS_MAX, true)?;
        // The load gradually moves on to blocks without space.
        driver.blocks = FEW_BLOCKS;
        driver.clear_kind = Some(match self.format {
            Format::LuksOnQcow2 => blk::DISCARD,
            Format::Qcow2 | Format::Luks => blk::WRITE_ZEROES,
        });
        if self.format != Format::Qcow2 {
            driver.versions.fill(Version::Any);
        }
        Ok((server, driver))
    }

    /// Checks that QEMU finds no fault, and that the image is not marked as dirty.
    pub(super) fn check_closed(&self) -> Result<()> {
        self.check(&[0])?;
        ensure!(!self.is_marked()?, "the image is marked");
        Ok(())
    }

    fn is_marked(&self) -> Result<bool> {
        if self.format == Format::Luks {
            return Ok(false);
        }
        let mut front = [0; 80];
        fs::File::open(&self.path)?.read_exact(&mut front)?;
        Ok(front[79] & 1 != 0)
    }

    /// Checks that `qemu-img check` ends with one of these codes.
    pub(super) fn check(&self, codes: &[i32]) -> Result<()> {
        if self.format == Format::Luks {
            return Ok(());
        }
        qemu_img(&["check", "-q", "-f", "qcow2", &self.path], codes)
    }

    /// Checks that QEMU reads these versions from the image.
    pub(super) fn check_content(&self, versions: &[Version]) -> Result<()> {
        let raw = self.folders.path("raw");
        let driver = match self.format {
            Format::Qcow2 => "driver=qcow2,file.filename=",
            Format::Luks => "driver=luks,key-secret=key,file.filename=",
            Format::LuksOnQcow2 => {
                "driver=luks,key-secret=key,file.driver=qcow2,file.file.filename="
            }
        };
        let (from, to) = (format!("{driver}{}", self.path), raw.display().to_string());
        let mut convert = vec!["convert", "--image-opts", "-O", "raw", &from, &to];
        let secret = format!("secret,id=key,file={}", self.key);
        if self.format != Format::Qcow2 {
            convert.extend(["--object", &secret]);
        }
        qemu_img(&convert, &[0])?;
        check_file(&raw, versions)
    }
}

/// Runs a `qemu-img` command that must end with one of these codes.
fn qemu_img(arguments: &[&str], codes: &[i32]) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(arguments);
    let deadline = Instant::now() + LIMIT;
    let mut output = command.output().context("running qemu-img")?;
    // The kernel may still have operations of a killed daemon, and with them its locks.
    while String::from_utf8_lossy(&output.stderr).contains("Failed to get")
        && Instant::now() < deadline
    {
        output = command.output()?;
    }
    let is_good = output.status.code().is_some_and(|code| codes.contains(&code));
    let text = [output.stdout, output.stderr].concat();
    ensure!(is_good, "{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&text));
    Ok(())
}

/// In new images most writes allocate the first space in their cluster.
#[test]
fn an_image_keeps_answered_writes_of_a_killed_daemon() -> Result<()> {
    for round in 0..NEW_IMAGES {
        let Some(image) = Image::new(Format::Qcow2)? else { return Ok(()) };
        let (mut server, mut driver) = image.serve(&image.path, Engine::IoUring)?;
        driver.clear_kind = None;
        driver.random += round;
        driver.attach()?;
        let count = driver.below(80);
        driver.run(count, false)?;
        server.kill()?;
        image.check(&[0, 3]).with_context(|| format!("round {round}, after the kill"))?;
        let export = server.export().clone();
        drop(server);
        driver.take()?;
        server = Server::start(Program::Ringhaul, &export)?;
        driver.frontend.channel = Channel::connect(&export.socket)?;
        driver.attach().with_context(|| format!("round {round}; {}", server.messages()))?;
        // The first write frees clusters that the killed daemon has leaked.
        for (count, is_end) in [(20, false), (0, true)] {
            let ran = driver.run(count, is_end);
            ran.with_context(|| format!("round {round}; {}", server.messages()))?;
        }
        let versions = end(server, driver)?;
        image.check_closed().with_context(|| format!("round {round}, at the end"))?;
        image.check_content(&versions).with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

/// Zeroes free space, and each round uses more blocks, so writes keep allocating.
fn an_image_survives_kills_of_daemons_and_successors(engine: Engine) -> Result<()> {
    let Some(image) = Image::new(Format::Qcow2)? else { return Ok(()) };
    let (server, driver) = image.serve(&image.path, engine)?;
    let (leaked, marked) = (Cell::new(0), Cell::new(0));
    let check_disk = || {
        leaked.set(leaked.get() + u32::from(image.check(&[3]).is_ok()));
        marked.set(marked.get() + u32::from(image.is_marked()?));
        image.check(&[0, 3])
    };
    let kills =
        Kills { rounds: rounds(ROUNDS)?, takeover_every: TAKEOVER_EVERY, check_disk: &check_disk };
    let versions = kills.carry_out(server, driver)?;
    let (leaked, marked) = (leaked.get(), marked.get());
    eprintln!("{engine}: {marked} daemons left marks, and {leaked} left clusters behind");
    ensure!(marked >= leaked && marked > 0, "daemons that were killed have not marked the image");
    image.check_closed().context("at the end")?;
    image.check_content(&versions)
}
