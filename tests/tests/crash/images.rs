//! Disks in qcow2 images and encrypted ones, and images whose daemons are killed.
//!
//! A daemon that is killed may leave clusters behind that nothing uses; `qemu-img` finds no other
//! fault with an image. The first write to the next daemon frees them.

use std::cell::Cell;
use std::fs;
use std::io::Read as _;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::Scene;
use ringhaul_kit::daemon::LIMIT;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::blk;
use ringhaul_kit::frontend::message::Channel;
use ringhaul_kit::server::{Engine, Export, Program, Server};
use ringhaul_kit::system::{is_installed, run as run_program};

use super::world::{BLOCK_BYTES, BLOCKS_MAX, FEW_BLOCKS, Version, World, check_file};
use super::{Kills, end, export, rounds};

for_each_engine! {
    an_image_survives_kills_of_its_daemons_and_of_those_that_take_over,
}

/// How many images have their daemon killed while they are new.
const NEW_IMAGES: u64 = 15;
/// How often one image is, if nothing else is asked for, and which part of it in takeovers.
const ROUNDS: u32 = 12;
const TAKEOVER_EVERY: u32 = 2;

/// Small, so that each block finds space of its own, and every 32 blocks a table.
const CLUSTERS: [&str; 2] = ["-o", "cluster_size=1k"];
const DISK_BYTES: u64 = BLOCKS_MAX * BLOCK_BYTES as u64;

/// What is before the data of an encrypted disk.
const HEADER_BYTES: u64 = 2 << 20;

/// What a disk is made of, from above. What was not written to an encrypted one reads as anything.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Format {
    Qcow2,
    Luks,
    /// Discards reach the image.
    LuksOnQcow2,
}

/// A disk in a file of one of these formats.
pub(super) struct Image {
    pub(super) scene: Scene,
    format: Format,
    pub(super) path: String,
    key: String,
}

impl Image {
    /// A new one. `None`: a program is not installed.
    pub(super) fn new(format: Format) -> Result<Option<Self>> {
        if !is_installed("qemu-img") || format != Format::Qcow2 && !is_installed("cryptsetup") {
            return Ok(None);
        }
        let scene = Scene::new(env!("CARGO_TARGET_TMPDIR"))?;
        let [path, key] = ["image", "key"].map(|name| scene.path(name).display().to_string());
        let image = Self { scene, format, path, key };
        let path = &*image.path;
        if format == Format::Qcow2 {
            let bytes = DISK_BYTES.to_string();
            let create = ["create", "-q", "-f", "qcow2"];
            qemu_img(&[&create[..], &CLUSTERS, &[path, &bytes]].concat(), &[0])?;
            return Ok(Some(image));
        }
        fs::write(&image.key, "it opens tests")?;
        let name = if format == Format::Luks { "image" } else { "encrypted" };
        let encrypted = image.scene.disk(name, HEADER_BYTES + DISK_BYTES)?.display().to_string();
        let with_key = ["--batch-mode", "--key-file", &image.key, "luksFormat", "--type", "luks1"];
        let at_once = ["--pbkdf-force-iterations", "1000", &encrypted];
        run_program("cryptsetup", &[&with_key[..], &at_once].concat())?;
        if format == Format::LuksOnQcow2 {
            let convert = ["convert", "-f", "raw", "-O", "qcow2"];
            qemu_img(&[&convert[..], &CLUSTERS, &[&encrypted, path]].concat(), &[0])?;
        }
        Ok(Some(image))
    }

    /// The disk in it, if the image is on this one.
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

    /// A daemon that serves what is below it, and its driver.
    pub(super) fn serve(&self, below: &str, engine: Engine) -> Result<(Server, World)> {
        let socket = self.scene.socket("socket");
        let export = export(self.path.as_ref(), &socket, engine, true);
        let export = Export { disk: Some(self.disk(below)), ..export };
        let server = Server::start(Program::Ringhaul, &export)?;
        let mut world = World::new(&socket, BLOCKS_MAX, true)?;
        // The load moves on to blocks that have no space yet.
        world.blocks = FEW_BLOCKS;
        world.erases = Some(match self.format {
            Format::LuksOnQcow2 => blk::DISCARD,
            Format::Qcow2 | Format::Luks => blk::WRITE_ZEROES,
        });
        if self.format != Format::Qcow2 {
            world.versions.fill(Version::Any);
        }
        Ok((server, world))
    }

    /// That QEMU finds no fault with it, and that it is not marked as one that was not closed.
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

    /// That QEMU finds no fault with it, or none for which its check ends with these codes.
    pub(super) fn check(&self, codes: &[i32]) -> Result<()> {
        if self.format == Format::Luks {
            return Ok(());
        }
        qemu_img(&["check", "-q", "-f", "qcow2", &self.path], codes)
    }

    /// That QEMU reads this in it.
    pub(super) fn check_content(&self, versions: &[Version]) -> Result<()> {
        let raw = self.scene.path("raw");
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

/// Runs a command of `qemu-img` that may end with these codes.
fn qemu_img(arguments: &[&str], codes: &[i32]) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(arguments);
    let deadline = Instant::now() + LIMIT;
    let mut output = command.output().context("running qemu-img")?;
    // The kernel may still have operations of a daemon that was killed, and its locks with them.
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

/// New images, so that most writes find the first space in their cluster.
#[test]
fn an_image_has_what_was_answered_before_its_daemon_was_killed() -> Result<()> {
    for round in 0..NEW_IMAGES {
        let Some(image) = Image::new(Format::Qcow2)? else { return Ok(()) };
        let (mut server, mut world) = image.serve(&image.path, Engine::IoUring)?;
        world.erases = None;
        world.random += round;
        world.attach()?;
        let count = world.below(80);
        world.run(count, false)?;
        server.kill()?;
        image.check(&[0, 3]).with_context(|| format!("round {round}, after the kill"))?;
        let export = server.export().clone();
        drop(server);
        world.take()?;
        server = Server::start(Program::Ringhaul, &export)?;
        world.frontend.channel = Channel::connect(&export.socket)?;
        world.attach().with_context(|| format!("round {round}; {}", server.messages()))?;
        // The first write frees clusters that the killed daemon has leaked.
        for (count, is_end) in [(20, false), (0, true)] {
            let ran = world.run(count, is_end);
            ran.with_context(|| format!("round {round}; {}", server.messages()))?;
        }
        let versions = end(server, world)?;
        image.check_closed().with_context(|| format!("round {round}, at the end"))?;
        image.check_content(&versions).with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

/// Zeroes give space back, and there are more blocks in every round, so writes find some.
fn an_image_survives_kills_of_its_daemons_and_of_those_that_take_over(
    engine: Engine,
) -> Result<()> {
    let Some(image) = Image::new(Format::Qcow2)? else { return Ok(()) };
    let (server, world) = image.serve(&image.path, engine)?;
    let (leaked, marked) = (Cell::new(0), Cell::new(0));
    let look = || {
        leaked.set(leaked.get() + u32::from(image.check(&[3]).is_ok()));
        marked.set(marked.get() + u32::from(image.is_marked()?));
        image.check(&[0, 3])
    };
    let kills = Kills { rounds: rounds(ROUNDS)?, takeover_every: TAKEOVER_EVERY, look: &look };
    let versions = kills.carry_out(server, world)?;
    let (leaked, marked) = (leaked.get(), marked.get());
    eprintln!("{engine}: {marked} daemons left marks, and {leaked} left clusters behind");
    ensure!(marked >= leaked && marked > 0, "daemons that were killed have not marked the image");
    image.check_closed().context("at the end")?;
    image.check_content(&versions)
}
