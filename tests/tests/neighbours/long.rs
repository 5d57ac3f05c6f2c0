//! A guest with very long requests, beside one that needs only the IoThread: a null disk. No
//! request of the neighbour waits for 100 ms, however large the guest's requests are.
//!
//! Time in which the IoThread or the test was ready to run and had no processor does not count:
//! other programs cause it, and the kernel keeps account of it. Other disturbances, such as a host
//! that stops a virtual processor, hit single tries; the best try counts. Before large requests
//! were cut, each try had waits of a second.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{DaemonOptions, LIMIT};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{BORDER, Frontend, MEMORY_END, SCRATCH, Setup, blk};
use ringhaul_kit::server::{Cache, Engine};
use ringhaul_kit::system::{is_installed, run as run_program};

use crate::scene::{Scene, disks};

for_each_engine! {
    one_large_read_of_virtio_blk,
    a_hundred_large_reads_of_virtio_blk,
    one_large_read_of_virtio_scsi,
    a_hundred_large_reads_of_virtio_scsi,
    a_hundred_and_twenty_copies_of_clusters,
    large_reads_of_holes,
    large_reads_of_encrypted_holes,
}

/// The limit on a neighbour's longest wait.
const WAIT_MAX: Duration = Duration::from_millis(100);
/// The number of tries, one of which must stay below the limit.
const TRIES: usize = 5;
/// The run time of the IoThread after which a try ends, if it still has work.
const WORK_NS: u64 = 300_000_000;

const DISK_BYTES: u64 = 4 << 30;
const READ_BYTES: u64 = 2016 << 20;
const HEADER: u64 = SCRATCH;
const STATUS: u64 = SCRATCH + 0x800;
const TABLE: u64 = SCRATCH + 0x1000;
/// Bytes of a virtio-scsi header, and of the response behind it.
const HEADER_BYTES: u32 = 51;
const RESPONSE_BYTES: u32 = 108;

/// The kernel's account of a thread, in nanoseconds.
struct Account(PathBuf);

impl Account {
    /// Reads the time that the thread ran, and the time that it was ready and had no processor.
    fn read(&self) -> Result<[u64; 2]> {
        let text = std::fs::read_to_string(&self.0);
        let text = text.with_context(|| format!("reading {}", self.0.display()))?;
        let mut numbers = text.split_whitespace().map(str::parse);
        let mut next = || numbers.next().context("a short line")?.context("no number");
        Ok([next()?, next()?])
    }
}

/// A meter of the neighbour's waits.
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

    /// The longest wait of the neighbour until the IoThread has run for [`WORK_NS`], or the guest
    /// has all answers.
    fn longest_wait(&self, scene: &mut Scene, guest: &Frontend, requests: u16) -> Result<Duration> {
        let (mut longest, deadline) = (Duration::ZERO, Instant::now() + LIMIT);
        let [before, _] = self.io_thread.read()?;
        while self.io_thread.read()?[0] < before + WORK_NS && guest.rings[0].used_idx() < requests {
            ensure!(Instant::now() < deadline, "the IoThread does not work");
            longest = longest.max(self.wait(scene)?);
        }
        Ok(longest)
    }

    /// The wait of one request of the neighbour.
    fn wait(&self, scene: &mut Scene) -> Result<Duration> {
        let (lost, begun) = (self.without_processor()?, Instant::now());
        scene.null.probe()?;
        let wait = begun.elapsed();
        Ok(wait.saturating_sub(self.without_processor()? - lost))
    }
}

/// The kind of request that the guest repeats.
#[derive(Clone, Copy)]
enum Sends {
    Reads,
    UnitReads,
    Verifies,
}

impl Sends {
    /// Writes the header, and returns the chain.
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
            Self::Verifies => (0x8f, VERIFIED_BYTES),
            _ => (0x88, READ_BYTES),
        };
        header[19] = op;
        header[29..33].copy_from_slice(&u32::try_from(bytes / 512)?.to_be_bytes());
        guest.memory.write(HEADER, &header)?;
        let ends = [Desc::readable(HEADER, HEADER_BYTES), Desc::writable(STATUS, RESPONSE_BYTES)];
        let data = data.filter(|_| matches!(self, Self::UnitReads));
        Ok(ends.into_iter().chain(data).collect())
    }

    /// The first request queue.
    fn queue(self) -> usize {
        if let Self::Reads = self { 0 } else { 2 }
    }
}

fn setup(sends: Sends) -> Setup {
    let queues = if let Sends::Reads = sends { 1 } else { 3 };
    Setup { queues, queue_size: 256, ..Setup::default() }
}

/// Attaches a guest to a unit, and clears the unit attention about the power-on.
fn attach_unit(socket: &Path) -> Result<Frontend> {
    let sends = Sends::Verifies;
    let mut guest = Frontend::attach(socket, &setup(sends))?;
    let command = sends.chain(&mut guest)?;
    guest.memory.write(HEADER + 19, &[0; 32])?;
    guest.execute(sends.queue(), &command)?;
    Ok(guest)
}

/// Sends this number of requests at once. Returns the used idx before.
fn put(guest: &mut Frontend, sends: Sends, requests: u16) -> Result<u16> {
    let chain = sends.chain(guest)?;
    let ring = &mut guest.rings[sends.queue()];
    let answered = ring.used_idx();
    for head in 0..requests {
        ring.put_indirect(head, TABLE, &chain);
        ring.offer(head);
    }
    ring.kick()?;
    Ok(answered)
}

/// Measures beside this number of requests at once to the disk at `socket`, or to the first disk of
/// the daemon. Each try has a new daemon, because the requests of an earlier try would continue.
fn check_tries(
    options: &DaemonOptions,
    socket: Option<&Path>,
    sends: Sends,
    requests: u16,
) -> Result<()> {
    let mut waits = Vec::new();
    for _ in 0..TRIES {
        let mut scene = Scene::start(disks(), options)?;
        let watch = Watch::new(&scene)?;
        let socket = socket.unwrap_or_else(|| scene.daemon.socket());
        let mut guest = match sends {
            Sends::Reads => Frontend::attach(socket, &setup(sends))?,
            Sends::UnitReads | Sends::Verifies => attach_unit(socket)?,
        };
        let answered = put(&mut guest, sends, requests)?;
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

fn check(engine: Engine, cache: Cache, sends: Sends, requests: u16) -> Result<()> {
    let mut options = DaemonOptions { cache, ..DaemonOptions::new(engine) };
    options.disk_bytes = DISK_BYTES;
    options.is_scsi = !matches!(sends, Sends::Reads);
    check_tries(&options, None, sends, requests)
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

/// Reads of disks whose data needs no op of an engine: the IoThread itself makes it.
fn check_without_ops(engine: Engine, disk: &str, folder: &Path) -> Result<()> {
    let socket = folder.join("made.sock");
    let export = format!("socket-path={},disk={disk}", socket.display());
    let options = DaemonOptions::new(engine).with("--export", &export);
    for requests in [1, 100] {
        check_tries(&options, Some(&socket), Sends::Reads, requests)
            .with_context(|| format!("disk {disk}"))?;
    }
    Ok(())
}

/// Makes an image without data, and returns its name as a disk. `None` without qemu-img.
fn make_empty_image(folder: &Path) -> Result<Option<String>> {
    let image = folder.join("empty.qcow2").display().to_string();
    if !is_installed("qemu-img") {
        return Ok(None);
    }
    let size = DISK_BYTES.to_string();
    run_program("qemu-img", &["create", "-q", "-f", "qcow2", &image, &size])?;
    Ok(Some(format!("qcow2:{image}")))
}

fn large_reads_of_holes(engine: Engine) -> Result<()> {
    let folder = tempfile::tempdir_in(disks())?;
    let Some(image) = make_empty_image(folder.path())? else { return Ok(()) };
    check_without_ops(engine, &image, folder.path())?;
    check_without_ops(engine, &format!("raw,over={image}"), folder.path())
}

/// Each byte is decrypted.
fn large_reads_of_encrypted_holes(engine: Engine) -> Result<()> {
    let folder = tempfile::tempdir_in(disks())?;
    let Some(image) = make_empty_image(folder.path())? else { return Ok(()) };
    if !is_installed("cryptsetup") {
        return Ok(());
    }
    let [key, header] = ["key", "header"].map(|name| folder.path().join(name));
    std::fs::write(&key, "secret").context("writing the key")?;
    std::fs::File::create(&header)?.set_len(16 << 20)?;
    let [key, header] = [key, header].map(|path| path.display().to_string());
    let data = folder.path().join("data").display().to_string();
    std::fs::File::create(&data)?.set_len(DISK_BYTES)?;
    let derivation = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    let format = ["luksFormat", "--batch-mode", "--key-file", &key, "--header", &header, &data];
    run_program("cryptsetup", &[&format[..], &derivation].concat())?;
    for below in [&image, "null:4G"] {
        let disk = format!("luks,key-file={key},header={header},over={below}");
        check_without_ops(engine, &disk, folder.path())?;
    }
    Ok(())
}

/// The number of writes to clusters of an image that are only in its backing file.
const COPIES: u16 = 120;
const CLUSTER_BYTES: u64 = 2 << 20;

/// Makes an empty image over a full backing file, and returns the name of its disk.
fn make_overlay(folder: &Path) -> Result<String> {
    let base = folder.join("base.img");
    let cluster = vec![0x5a; usize::try_from(CLUSTER_BYTES)?];
    let mut file = std::fs::File::create(&base)?;
    (0..COPIES).try_for_each(|_| file.write_all(&cluster)).context("filling the backing file")?;
    let image = folder.join("top.qcow2").display().to_string();
    let options = format!("cluster_size={CLUSTER_BYTES},backing_file=base.img,backing_fmt=raw");
    run_program("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, &image])?;
    Ok(format!("qcow2,backing=base.img,path={image}"))
}

/// Each write of 4 KiB copies a whole cluster.
fn a_hundred_and_twenty_copies_of_clusters(engine: Engine) -> Result<()> {
    if !is_installed("qemu-img") {
        return Ok(());
    }
    let mut waits = Vec::new();
    for _ in 0..TRIES {
        let folder = tempfile::tempdir_in(disks())?;
        let socket = folder.path().join("image.sock");
        let disk = make_overlay(folder.path())?;
        let export = format!("socket-path={},disk={disk}", socket.display());
        let mut scene =
            Scene::start(disks(), &DaemonOptions::new(engine).with("--export", &export))?;
        let watch = Watch::new(&scene)?;
        let mut guest = Frontend::attach(&socket, &setup(Sends::Reads))?;
        for copy in 0..COPIES {
            // The order is hard to predict.
            let sector = u64::from(copy * 77 % COPIES) * CLUSTER_BYTES / 512 + 8;
            let (header, status) = guest.put_header(0, copy, blk::OUT, sector)?;
            let data = Desc::readable(BORDER, 4096);
            let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
            let ring = &mut guest.rings[0];
            ring.put_indirect(copy, TABLE + 0x40 * u64::from(copy), &chain);
            ring.offer(copy);
        }
        guest.rings[0].kick()?;
        let mut longest = Duration::ZERO;
        while guest.rings[0].used_idx() < COPIES {
            longest = longest.max(watch.wait(&mut scene)?);
        }
        ensure!((0..COPIES).all(|copy| guest.status(0, copy) == Some(blk::OK)), "a write failed");
        waits.push(longest);
        drop(guest);
        scene.terminate()?;
        eprintln!("{engine}: a neighbour of copies waits for at most {longest:?}");
        if longest < WAIT_MAX {
            return Ok(());
        }
    }
    anyhow::bail!("beside {COPIES} copies of clusters a neighbour waited for {waits:?}")
}

/// The number of commands that a guest has at once, and the bytes that each of them verifies.
const VERIFIES: u16 = 120;
const VERIFIED_BYTES: u64 = 64 << 20;
/// The number of single commands that measure a neighbour's answers beside one.
const SINGLE_VERIFIES: u16 = 20;
/// The factor by which answers beside each VERIFY may decrease when there are many at once.
const FEWER_MAX: f64 = 3.0;

/// Runs this number of VERIFYs, and returns the number of answers of the neighbour in that time.
fn answers_beside(scene: &mut Scene, guest: &mut Frontend, verifies: u16) -> Result<u32> {
    let all = put(guest, Sends::Verifies, verifies)? + verifies;
    let (mut answers, deadline) = (0, Instant::now() + LIMIT);
    let ring = Sends::Verifies.queue();
    while guest.rings[ring].used_idx() != all {
        ensure!(Instant::now() < deadline, "the VERIFYs do not end");
        scene.null.probe()?;
        answers += 1;
    }
    while guest.rings[ring].take_used().is_some() {}
    Ok(answers)
}

/// VERIFYs take turns, a piece at a time, so as many answers of the neighbour come beside each
/// VERIFY as beside one alone. With separate turns, each of them would move a piece between two
/// checks of the neighbour's queue. The null disk answers at once, so only the checks count.
#[test]
fn many_verifies_slow_a_neighbour_no_more_than_one() -> Result<()> {
    let mut tries = Vec::new();
    for _ in 0..TRIES {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("verified.sock");
        let export = format!("socket-path={},device=scsi,lun=0,null=8T", socket.display());
        let options = DaemonOptions::new(Engine::Aio).with("--export", &export);
        let mut scene = Scene::start(disks(), &options)?;
        let mut guest = attach_unit(&socket)?;
        let mut beside_one = 0;
        for _ in 0..SINGLE_VERIFIES {
            beside_one += answers_beside(&mut scene, &mut guest, 1)?;
        }
        let beside_many = answers_beside(&mut scene, &mut guest, VERIFIES)?;
        drop(guest);
        scene.terminate()?;
        let each = [(beside_one, SINGLE_VERIFIES), (beside_many, VERIFIES)];
        let [one, many] = each.map(|(answers, verifies)| f64::from(answers) / f64::from(verifies));
        eprintln!(
            "a neighbour has {one:.1} answers beside one VERIFY, {many:.1} beside each of many"
        );
        if many * FEWER_MAX >= one {
            return Ok(());
        }
        tries.push((one, many));
    }
    anyhow::bail!("beside each of {VERIFIES} VERIFYs a neighbour had few answers: {tries:.1?}")
}
