//! A guest whose requests take long by themselves, beside one that needs the IoThread alone: a
//! null disk. No request of the neighbour waits for 100 ms, however large those of the guest are.
//!
//! A wait counts without the time in which the IoThread or the test was ready to run and had no
//! processor: the kernel keeps account of that, and other programs of the machine cause it. What
//! the machine does besides, such as a host that stops a virtual processor, strikes one try; the
//! best of some tries counts. Before large requests were cut, each try had waits of a second.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{DaemonOptions, LIMIT};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{BORDER, Frontend, MEMORY_END, SCRATCH, Setup, blk};
use ringhaul_kit::server::{Cache, Engine};

use crate::scene::{Scene, disks};

for_each_engine! {
    one_large_read_of_virtio_blk,
    a_hundred_large_reads_of_virtio_blk,
    one_large_read_of_virtio_scsi,
    a_hundred_large_reads_of_virtio_scsi,
    a_hundred_and_twenty_verifies,
}

/// The longest that a neighbour waits.
const WAIT_MAX: Duration = Duration::from_millis(100);
/// So many tries, of which one is to show that.
const TRIES: usize = 5;
/// A try ends when the IoThread has worked for so long, or has no more to do.
const WORK_NS: u64 = 300_000_000;

const DISK_BYTES: u64 = 4 << 30;
const READ_BYTES: u64 = 2016 << 20;
const HEADER: u64 = SCRATCH;
const STATUS: u64 = SCRATCH + 0x800;
const TABLE: u64 = SCRATCH + 0x1000;
/// Of virtio-scsi, with the response behind it.
const HEADER_BYTES: u32 = 51;
const RESPONSE_BYTES: u32 = 108;

/// What the kernel counts for a thread, in nanoseconds.
struct Account(PathBuf);

impl Account {
    /// The time that it ran, and the time that it was ready to and had no processor.
    fn read(&self) -> Result<[u64; 2]> {
        let text = std::fs::read_to_string(&self.0);
        let text = text.with_context(|| format!("reading {}", self.0.display()))?;
        let mut numbers = text.split_whitespace().map(str::parse);
        let mut next = || numbers.next().context("a short line")?.context("no number");
        Ok([next()?, next()?])
    }
}

/// Measures waits of the neighbour.
struct Watch {
    io_thread: Account,
    own: Account,
}

impl Watch {
    fn new(scene: &Scene) -> Result<Self> {
        let (process, thread) = (scene.daemon.pid(), scene.daemon.thread_id("iothread-0")?);
        let (process, thread) = (process.as_raw_nonzero(), thread.as_raw_nonzero());
        let io_thread = format!("/proc/{process}/task/{thread}/schedstat");
        let own = "/proc/thread-self/schedstat".into();
        Ok(Self { io_thread: Account(io_thread.into()), own: Account(own) })
    }

    fn without_processor(&self) -> Result<Duration> {
        let [_, io_thread] = self.io_thread.read()?;
        let [_, own] = self.own.read()?;
        Ok(Duration::from_nanos(io_thread + own))
    }

    /// The longest wait of the neighbour until the IoThread has worked for a while, or the guest
    /// has all answers.
    fn longest_wait(&self, scene: &mut Scene, guest: &Frontend, requests: u16) -> Result<Duration> {
        let (mut longest, deadline) = (Duration::ZERO, Instant::now() + LIMIT);
        let [before, _] = self.io_thread.read()?;
        while self.io_thread.read()?[0] < before + WORK_NS && guest.rings[0].used_idx() < requests {
            ensure!(Instant::now() < deadline, "the IoThread does not work");
            let (lost, begun) = (self.without_processor()?, Instant::now());
            scene.null.probe()?;
            let wait = begun.elapsed();
            longest = longest.max(wait.saturating_sub(self.without_processor()? - lost));
        }
        Ok(longest)
    }
}

/// What the guest sends, over and over.
#[derive(Clone, Copy)]
enum Sends {
    Reads,
    UnitReads,
    Verifies,
}

impl Sends {
    /// The chain, whose header is written.
    fn chain(self, guest: &mut Frontend) -> Result<Vec<Desc>> {
        let pieces = READ_BYTES / (MEMORY_END - BORDER);
        let data = Desc::writable(BORDER, u32::try_from(MEMORY_END - BORDER)?);
        let data = std::iter::repeat_n(data, usize::try_from(pieces)?);
        if let Self::Reads = self {
            let (header, status) = guest.put_header(0, 0, blk::IN, 0)?;
            let chain = [Desc::readable(header, 16)].into_iter().chain(data);
            return Ok(chain.chain([Desc::writable(status, 1)]).collect());
        }
        let mut header = vec![0; HEADER_BYTES as usize];
        header[0] = 1;
        let (op, bytes) = match self {
            Self::Verifies => (0x8f, DISK_BYTES),
            _ => (0x88, READ_BYTES),
        };
        header[19] = op;
        header[29..33].copy_from_slice(&u32::try_from(bytes / 512)?.to_be_bytes());
        guest.memory.write(HEADER, &header)?;
        let ends = [Desc::readable(HEADER, HEADER_BYTES), Desc::writable(STATUS, RESPONSE_BYTES)];
        let data = data.filter(|_| matches!(self, Self::UnitReads));
        Ok(ends.into_iter().chain(data).collect())
    }

    /// The first queue for requests.
    fn queue(self) -> usize {
        if let Self::Reads = self { 0 } else { 2 }
    }
}

/// Beside so many requests at once: each try has a daemon of its own, since the requests of the one
/// before would go on.
fn check(engine: Engine, cache: Cache, sends: Sends, requests: u16) -> Result<()> {
    let mut waits = Vec::new();
    for _ in 0..TRIES {
        let mut options = DaemonOptions { cache, ..DaemonOptions::new(engine) };
        options.disk_bytes = DISK_BYTES;
        options.is_scsi = !matches!(sends, Sends::Reads);
        let mut scene = Scene::start(disks(), &options)?;
        let watch = Watch::new(&scene)?;
        let queues = u16::try_from(sends.queue())? + 1;
        let setup = Setup { queues, queue_size: 256, ..Setup::default() };
        let mut guest = Frontend::attach(scene.daemon.socket(), &setup)?;
        if options.is_scsi {
            // What has happened to the unit is told first.
            let mut command = Sends::Verifies.chain(&mut guest)?;
            command[0].len = HEADER_BYTES;
            guest.memory.write(HEADER + 19, &[0; 32])?;
            guest.execute(sends.queue(), &command)?;
        }
        let chain = sends.chain(&mut guest)?;
        let ring = &mut guest.rings[sends.queue()];
        let answered = ring.used_idx();
        for head in 0..requests {
            ring.put_indirect(head, TABLE, &chain);
            ring.offer(head);
        }
        ring.kick()?;
        let queue = sends.queue();
        guest.rings.swap(0, queue);
        let longest = watch.longest_wait(&mut scene, &guest, answered + requests);
        guest.rings.swap(0, queue);
        waits.push(longest?);
        drop(guest);
        scene.terminate()?;
        if waits.last().is_some_and(|wait| *wait < WAIT_MAX) {
            return Ok(());
        }
    }
    anyhow::bail!("beside {requests} requests a neighbour waited for {waits:?}")
}

fn check_both(engine: Engine, sends: Sends, requests: u16) -> Result<()> {
    for cache in [Cache::None, Cache::Writeback] {
        check(engine, cache, sends, requests).with_context(|| format!("cache {cache:?}"))?;
    }
    Ok(())
}

fn one_large_read_of_virtio_blk(engine: Engine) -> Result<()> {
    check_both(engine, Sends::Reads, 1)
}

fn a_hundred_large_reads_of_virtio_blk(engine: Engine) -> Result<()> {
    check_both(engine, Sends::Reads, 100)
}

fn one_large_read_of_virtio_scsi(engine: Engine) -> Result<()> {
    check_both(engine, Sends::UnitReads, 1)
}

fn a_hundred_large_reads_of_virtio_scsi(engine: Engine) -> Result<()> {
    check_both(engine, Sends::UnitReads, 100)
}

fn a_hundred_and_twenty_verifies(engine: Engine) -> Result<()> {
    check_both(engine, Sends::Verifies, 120)
}
