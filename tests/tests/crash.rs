//! A driver that keeps its inflight region, or has none and is answered in order, and a daemon that
//! is killed under it, again and again.
//!
//! Every block is written with contents of its own each time, so that a write that is lost, comes
//! too late or comes twice is found out by the next read of it, or at the end.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{LIMIT, SECTOR_BYTES, pattern};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::message::{Channel, Message};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, DATA_BYTES, Frontend, Setup, blk, memory, protocol_feature};
use ringhaul_kit::server::{Cache, Engine, Export, Program, Server};
use ringhaul_kit::system::is_installed;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use serde_json::json;
use tempfile::TempDir;

for_each_engine! {
    a_daemon_that_is_killed_loses_nothing_and_does_nothing_twice,
    a_daemon_that_answers_in_order_needs_no_region,
}

/// How often the daemon is killed; `cargo xtask crash --rounds N` sets it.
const ROUNDS: &str = "RINGHAUL_CRASH_ROUNDS";
const ROUNDS_DEFAULT: u32 = 30;
/// Every so many rounds it is killed while another process takes over from it, or that one is.
const TAKEOVER_EVERY: u32 = 5;
/// How many images are killed under their daemon.
const IMAGES: u64 = 15;

const QUEUES: u16 = 2;
const QUEUE_SIZE: u16 = 128;
/// Requests of a queue at a time. Each has four descriptors.
const SLOTS: u16 = 32;
const BLOCK_BYTES: usize = 4096;
/// Few, so that each is written again soon.
const BLOCKS: u64 = 128;
/// Bytes of the account of a queue in the inflight region (vhost-user specification).
const ACCOUNT_BYTES: u64 = (16 + 16 * QUEUE_SIZE as u64).next_multiple_of(64);

/// The contents of a block: of its last write, or those of a new disk.
fn content(block: u64, version: u64) -> Vec<u8> {
    if version == 0 { vec![0; BLOCK_BYTES] } else { pattern(version * BLOCKS + block, BLOCK_BYTES) }
}

/// A request that has no answer yet.
#[derive(Clone, Copy, Debug)]
enum Request {
    /// Its first block, how many, and the version that they get.
    Write(u64, u64, u64),
    Read(u64, u64),
    Flush,
}

impl Request {
    fn blocks(self) -> std::ops::Range<u64> {
        match self {
            Self::Write(first, count, _) | Self::Read(first, count) => first..first + count,
            Self::Flush => 0..0,
        }
    }
}

struct World {
    frontend: Frontend,
    /// `None`: it keeps none.
    region: Option<Arc<OwnedFd>>,
    slots: Vec<Vec<Option<Request>>>,
    /// The version of each block that was answered.
    versions: Vec<u64>,
    last_version: u64,
    answered: u64,
    /// The driver sleeps until it is called.
    sleeps: bool,
    random: u64,
}

impl World {
    fn new(socket: &Path, keeps_region: bool) -> Result<Self> {
        let mut setup = Setup::default().queue_size(QUEUE_SIZE);
        setup.queues = QUEUES;
        let mut region = None;
        if keeps_region {
            let features = &mut setup.protocol_features;
            *features = features.map(|all| all | protocol_feature::INFLIGHT_SHMFD);
            let file = memfd_create("ringhaul-test-inflight", MemfdFlags::CLOEXEC)?;
            ftruncate(&file, ACCOUNT_BYTES * u64::from(QUEUES))?;
            region = Some(Arc::new(file));
        }
        Ok(Self {
            frontend: Frontend::connect(socket, &setup)?,
            region,
            slots: vec![vec![None; SLOTS.into()]; QUEUES.into()],
            versions: vec![0; usize::try_from(BLOCKS)?],
            last_version: 0,
            answered: 0,
            sleeps: false,
            random: 1,
        })
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % end
    }

    /// Attaches as a front-end does that has heard nothing of the last daemon: queues go on where
    /// used idx is, and the region says the rest, if there is one.
    fn attach(&mut self) -> Result<()> {
        self.frontend.negotiate()?;
        self.frontend.share_memory()?;
        if let Some(region) = &self.region {
            let bytes = ACCOUNT_BYTES * u64::from(QUEUES);
            self.frontend.tell(Message::inflight_region(region, bytes, QUEUES, QUEUE_SIZE))?;
        }
        for queue in 0..usize::from(QUEUES) {
            let base = self.frontend.rings[queue].used_idx();
            self.frontend.start_queue(queue, base)?;
        }
        (0..usize::from(QUEUES)).try_for_each(|queue| self.frontend.enable_queue(queue, true))
    }

    /// Fills the free slots of a queue and kicks.
    fn submit(&mut self, queue: usize) -> Result<()> {
        let mut is_new = false;
        for slot in 0..usize::from(SLOTS) {
            if self.slots[queue][slot].is_none()
                && let Some(request) = self.draw()
            {
                self.put(queue, slot, request)?;
                self.slots[queue][slot] = Some(request);
                is_new = true;
            }
        }
        if is_new { self.frontend.rings[queue].kick() } else { Ok(()) }
    }

    /// A request that touches no block that another one touches, if there is one.
    fn draw(&mut self) -> Option<Request> {
        let kind = self.below(10);
        let count = 1 + self.below(2);
        let first = self.below(BLOCKS - 1);
        let wanted = first..first + count;
        let all = self.slots.iter().flatten().flatten();
        let is_free = |other: &Request| {
            other.blocks().end <= wanted.start || wanted.end <= other.blocks().start
        };
        if !all.clone().all(is_free) {
            return None;
        }
        Some(match kind {
            0..5 => {
                self.last_version += 1;
                Request::Write(first, count, self.last_version)
            }
            5..9 => Request::Read(first, count),
            _ => Request::Flush,
        })
    }

    fn put(&mut self, queue: usize, slot: usize, request: Request) -> Result<()> {
        let data = data_of(queue, slot);
        let sector = request.blocks().start * (BLOCK_BYTES / SECTOR_BYTES) as u64;
        let kind = match request {
            Request::Write(..) => blk::OUT,
            Request::Read(..) => blk::IN,
            Request::Flush => blk::FLUSH,
        };
        let slot_number = u16::try_from(slot)?;
        let (header, status) = self.frontend.put_header(queue, slot_number, kind, sector)?;
        let bytes = u32::try_from(request.blocks().count() * BLOCK_BYTES)?;
        let mut chain = vec![Desc::readable(header, 16)];
        match request {
            Request::Write(first, count, version) => {
                let new = (first..first + count).flat_map(|block| content(block, version));
                self.frontend.memory.write(data, &new.collect::<Vec<u8>>())?;
                chain.push(Desc::readable(data, bytes));
            }
            Request::Read(..) => chain.push(Desc::writable(data, bytes)),
            Request::Flush => {}
        }
        chain.push(Desc::writable(status, 1));
        let ring = &mut self.frontend.rings[queue];
        ring.put_chain(slot_number * 4, &chain);
        ring.offer(slot_number * 4);
        Ok(())
    }

    /// Takes the answers that there are. Returns how many.
    fn take(&mut self) -> Result<u64> {
        let before = self.answered;
        for queue in 0..usize::from(QUEUES) {
            while let Some(used) = self.frontend.rings[queue].take_used() {
                let slot = usize::try_from(used.head)? / 4;
                let request = self.slots[queue].get_mut(slot).and_then(Option::take);
                let request = request.with_context(|| format!("{used:?} was answered twice"))?;
                self.check(queue, slot, request)?;
                self.answered += 1;
            }
        }
        Ok(self.answered - before)
    }

    fn check(&mut self, queue: usize, slot: usize, request: Request) -> Result<()> {
        let status = self.frontend.status(queue, u16::try_from(slot)?);
        ensure!(status == Some(blk::OK), "{request:?} ended with {status:?}");
        match request {
            Request::Write(first, count, version) => {
                for block in first..first + count {
                    self.versions[usize::try_from(block)?] = version;
                }
            }
            Request::Read(first, count) => {
                let bytes = usize::try_from(count)? * BLOCK_BYTES;
                let data = self.frontend.memory.read(data_of(queue, slot), bytes)?;
                for (block, data) in (first..).zip(data.chunks_exact(BLOCK_BYTES)) {
                    self.check_block(block, data)?;
                }
            }
            Request::Flush => {}
        }
        Ok(())
    }

    fn check_block(&self, block: u64, data: &[u8]) -> Result<()> {
        let version = self.versions[usize::try_from(block)?];
        if data != content(block, version) {
            let found = (0..=self.last_version).rev().find(|other| data == content(block, *other));
            anyhow::bail!("block {block} has version {found:?} instead of {version}");
        }
        Ok(())
    }

    /// Goes on until this many more requests are answered; no new ones are made at the end.
    fn run(&mut self, count: u64, is_end: bool) -> Result<()> {
        let wanted = self.answered + count;
        let deadline = Instant::now() + LIMIT;
        loop {
            let taken = self.take()?;
            let is_done = if is_end {
                self.slots.iter().flatten().all(Option::is_none)
            } else {
                self.answered >= wanted
            };
            if is_done {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "requests are not answered: {:?}", self.slots);
            if !is_end {
                (0..usize::from(QUEUES)).try_for_each(|queue| self.submit(queue))?;
            }
            if taken == 0 && self.sleeps {
                self.wait()?;
            } else if taken == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Goes on for less than so many microseconds, or looks at nothing.
    fn run_below(&mut self, max_us: u64, is_busy: bool) -> Result<()> {
        let moment = Instant::now() + Duration::from_micros(self.below(max_us));
        while Instant::now() < moment {
            if is_busy {
                self.take()?;
                (0..usize::from(QUEUES)).try_for_each(|queue| self.submit(queue))?;
            }
        }
        Ok(())
    }

    /// Sleeps until a queue calls: one that forgets to is found out.
    fn wait(&self) -> Result<()> {
        let rings = &self.frontend.rings;
        rings.iter().for_each(|ring| ring.want_calls());
        if rings.iter().any(|ring| ring.has_used()) {
            return Ok(());
        }
        let mut fds: Vec<PollFd<'_>> =
            rings.iter().map(|ring| PollFd::new(&*ring.call, PollFlags::IN)).collect();
        let limit = Timespec::try_from(LIMIT)?;
        ensure!(poll(&mut fds, Some(&limit))? > 0, "no call within {LIMIT:?}");
        for ring in rings {
            let _ = memory::take_count(&ring.call);
        }
        Ok(())
    }
}

fn data_of(queue: usize, slot: usize) -> u64 {
    DATA + queue as u64 * DATA_BYTES + (slot * 2 * BLOCK_BYTES) as u64
}

fn a_daemon_that_is_killed_loses_nothing_and_does_nothing_twice(engine: Engine) -> Result<()> {
    kill_many_times(engine, true)
}

fn a_daemon_that_answers_in_order_needs_no_region(engine: Engine) -> Result<()> {
    kill_many_times(engine, false)
}

fn kill_many_times(engine: Engine, keeps_region: bool) -> Result<()> {
    let rounds = match std::env::var(ROUNDS) {
        Ok(text) => text.parse().with_context(|| format!("{ROUNDS} is {text:?}, and no number"))?,
        Err(_) => ROUNDS_DEFAULT,
    };
    let folders: [TempDir; 2] =
        [tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?, tempfile::tempdir()?];
    let disk = folders[0].path().join("disk.img");
    File::create(&disk)?.set_len(BLOCKS * BLOCK_BYTES as u64)?;
    let mut export = export(&disk, folders[1].path(), engine, keeps_region);
    let mut server = Server::start(Program::Ringhaul, &export)?;
    let mut world = World::new(&export.socket, keeps_region)?;
    world.attach()?;
    let (mut left, mut again, mut survived) = (0, 0, 0);
    for round in 0..rounds {
        world.sleeps = round % 2 == 0;
        let count = world.below(400);
        world.run(count, false)?;
        let survives = round % TAKEOVER_EVERY == 0 && survives_takeover(&mut server, &mut world)?;
        survived += u32::from(survives);
        if !survives {
            if round % TAKEOVER_EVERY != 0 {
                // Anywhere in what it does.
                world.run_below(300, false)?;
                server.kill()?;
            }
            again += u32::from(server.messages().contains("done again"));
            drop(server);
            world.take()?;
            left += world.slots.iter().flatten().flatten().count();
            export.io_threads = 1 + u16::from(round % 4 < 2);
            server = Server::start(Program::Ringhaul, &export)?;
            world.frontend.channel = Channel::connect(&export.socket)?;
            world.attach().with_context(|| format!("round {round}; {}", server.messages()))?;
        }
        world.run(1, false).with_context(|| format!("round {round}; {}", server.messages()))?;
    }
    world.run(0, true)?;
    drop(world.frontend);
    let status = server.terminate(LIMIT)?;
    ensure!(status.success(), "{}", server.messages());
    eprintln!(
        "{engine}: {rounds} kills, {} in takeovers of which {survived} were survived, {} requests \
         answered, {left} left by daemons, {again} daemons did some again",
        rounds.div_ceil(TAKEOVER_EVERY),
        world.answered
    );
    check_file(&disk, world.versions)
}

/// Has a new process take over, and kills it or the old one anywhere in that. Returns whether the
/// other one serves: the old one if the new one has not said that it takes over, the new one if the
/// old one has heard that and said so.
fn survives_takeover(server: &mut Server, world: &mut World) -> Result<bool> {
    let heir = server.begin_upgrade()?;
    // Most of the time goes by before queues stop.
    if world.below(4) > 0 {
        let deadline = Instant::now() + LIMIT;
        while !heir.messages().contains("ready to take over") {
            ensure!(Instant::now() < deadline, "nothing takes over:\n{}", heir.messages());
            world.run_below(100, true)?;
        }
        world.run_below(3000, true)?;
    } else {
        world.run_below(10_000, true)?;
    }
    if world.below(2) == 0 {
        return server.kill_before(heir);
    }
    heir.kill()?;
    // This waits until it is decided.
    Ok(server.call("set", &json!({ "poll-max-us": 32 })).is_ok())
}

fn export(disk: &Path, sockets: &Path, engine: Engine, keeps_region: bool) -> Export {
    Export {
        socket: sockets.join("socket"),
        file: disk.to_owned(),
        disk: None,
        engine,
        cache: if engine == Engine::Threads { Cache::Writeback } else { Cache::None },
        num_queues: QUEUES,
        queue_size: QUEUE_SIZE,
        serial: "crash".into(),
        logical_block_bytes: 512,
        read_only: false,
        units: None,
        in_order: !keeps_region,
        io_threads: 1,
    }
}

/// A file has these versions of all blocks.
fn check_file(path: &Path, versions: Vec<u64>) -> Result<()> {
    let file = File::open(path)?;
    let mut data = vec![0; BLOCK_BYTES];
    for (block, version) in (0..).zip(versions) {
        file.read_exact_at(&mut data, block * BLOCK_BYTES as u64)?;
        ensure!(data == content(block, version), "block {block} is not of version {version}");
    }
    Ok(())
}

/// New images, so that most writes find the first space in their cluster. The daemon may leave
/// clusters behind that nothing uses; there is no other fault.
#[test]
fn an_image_has_what_was_answered_before_its_daemon_was_killed() -> Result<()> {
    if !is_installed("qemu-img") {
        return Ok(());
    }
    for round in 0..IMAGES {
        let folders = [tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?, tempfile::tempdir()?];
        let [image, raw] = ["disk.qcow2", "disk.raw"].map(|name| folders[0].path().join(name));
        let bytes = (BLOCKS * BLOCK_BYTES as u64).to_string();
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"];
        qemu_img(Command::new("qemu-img").args(create).arg(&image).arg(bytes), &[0])?;
        let check =
            || qemu_img(Command::new("qemu-img").args(["check", "-q"]).arg(&image), &[0, 3]);
        let disk = Some(format!("qcow2:{}", image.display()));
        let export = export(&image, folders[1].path(), Engine::IoUring, true);
        let export = Export { disk, ..export };
        let mut server = Server::start(Program::Ringhaul, &export)?;
        let mut world = World::new(&export.socket, true)?;
        world.random += round;
        world.attach()?;
        let count = world.below(80);
        world.run(count, false)?;
        server.kill()?;
        check().with_context(|| format!("round {round}, after the kill"))?;
        drop(server);
        world.take()?;
        server = Server::start(Program::Ringhaul, &export)?;
        world.frontend.channel = Channel::connect(&export.socket)?;
        world.attach().with_context(|| format!("round {round}; {}", server.messages()))?;
        world.run(0, true).with_context(|| format!("round {round}; {}", server.messages()))?;
        drop(world.frontend);
        ensure!(server.terminate(LIMIT)?.success(), "{}", server.messages());
        check().with_context(|| format!("round {round}, at the end"))?;
        let convert = ["convert", "-f", "qcow2", "-O", "raw"];
        qemu_img(Command::new("qemu-img").args(convert).args([&image, &raw]), &[0])?;
        check_file(&raw, world.versions).with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

/// Runs a command of `qemu-img` that may end with these codes.
fn qemu_img(command: &mut Command, codes: &[i32]) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    let mut output = command.output().context("running qemu-img")?;
    // The kernel may still have operations of a daemon that was killed, and its locks with them.
    while String::from_utf8_lossy(&output.stderr).contains("lock") && Instant::now() < deadline {
        output = command.output()?;
    }
    let is_good = output.status.code().is_some_and(|code| codes.contains(&code));
    let text = [output.stdout, output.stderr].concat();
    ensure!(is_good, "{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&text));
    Ok(())
}
