//! The neighbours, and the requests of another export that get no answer.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{Daemon, DaemonOptions, LIMIT, SECTOR_BYTES, pattern};
use ringhaul_kit::frontend::memory::take_count;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, SCRATCH, Setup, blk};
use ringhaul_kit::server::{Cache, Engine};
use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

/// The number of requests that a neighbour makes while another export misbehaves.
pub(crate) const OPERATIONS: usize = 60;

/// The interval between two checks of a wait.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Entries of each of the misbehaving export's two queues.
pub(crate) const QUEUE_SIZE: u16 = 1024;

/// The model of a neighbour's disk: the number of places, and the bytes of each.
const PLACES: usize = 32;
const PLACE_BYTES: usize = 8192;
const DISK_BYTES: u64 = 4 << 20;

/// A correct guest, on a disk with known contents, or on one that keeps nothing.
pub(crate) struct Neighbour {
    frontend: Frontend,
    places: Option<Vec<Vec<u8>>>,
    done: usize,
}

impl Neighbour {
    fn attach(socket: &Path, keeps: bool) -> Result<Self> {
        let frontend = Frontend::attach(socket, &Setup::default())?;
        let places = keeps.then(|| vec![vec![0; PLACE_BYTES]; PLACES]);
        Ok(Self { frontend, places, done: 0 })
    }

    /// Makes `operations` writes, each read back through the second queue, and some flushes. All
    /// must be answered, and right.
    pub(crate) fn run(&mut self, operations: usize) -> Result<()> {
        for _ in 0..operations {
            self.operate().with_context(|| format!("operation {} of a neighbour", self.done))?;
        }
        Ok(())
    }

    fn operate(&mut self) -> Result<()> {
        self.done += 1;
        let (place, queue) = (self.done * 7 % PLACES, self.done % 2);
        let sector = (place * PLACE_BYTES / SECTOR_BYTES) as u64;
        let data = pattern(self.done as u64, PLACE_BYTES);
        self.frontend.write(queue, sector, &data)?;
        if self.done.is_multiple_of(8) {
            let flush = self.frontend.request(queue, blk::FLUSH, 0, &[], 0)?;
            ensure!(flush.status == blk::OK, "a flush ended with {flush:?}");
        }
        let read = self.frontend.read(1 - queue, sector, PLACE_BYTES)?;
        let Some(places) = &mut self.places else { return Ok(()) };
        ensure!(read == data, "place {place} has what was not written");
        places[place] = data;
        let other = self.done * 13 % PLACES;
        let sector = (other * PLACE_BYTES / SECTOR_BYTES) as u64;
        let read = self.frontend.read(queue, sector, PLACE_BYTES)?;
        ensure!(read == places[other], "place {other} has what was not written");
        Ok(())
    }

    /// Makes one read.
    pub(crate) fn probe(&mut self) -> Result<()> {
        self.frontend.read(0, 0, 4096).map(|_| ())
    }

    /// Writes and reads at an odd address, so that the daemon needs bounce memory.
    pub(crate) fn run_misaligned(&mut self) -> Result<()> {
        let frontend = &mut self.frontend;
        let content = pattern(4711, PLACE_BYTES);
        let sector = DISK_BYTES / SECTOR_BYTES as u64 - 64;
        for (kind, addr) in [(blk::OUT, DATA + 0x1_0001), (blk::IN, DATA + 0x2_0003)] {
            let (header, status) = frontend.put_header(0, 0, kind, sector)?;
            frontend.memory.write(DATA + 0x1_0001, &content)?;
            let len = u32::try_from(PLACE_BYTES)?;
            let data = match kind {
                blk::OUT => Desc::readable(addr, len),
                _ => Desc::writable(addr, len),
            };
            frontend
                .execute(0, &[Desc::readable(header, 16), data, Desc::writable(status, 1)])
                .context("a misaligned request of a neighbour")?;
            ensure!(frontend.memory.read(status, 1)? == [blk::OK], "a misaligned request failed");
        }
        if self.places.is_some() {
            let read = self.frontend.memory.read(DATA + 0x2_0003, PLACE_BYTES)?;
            ensure!(read == content, "a misaligned read has other data");
        }
        Ok(())
    }
}

/// A daemon with three exports on one IoThread: one that will misbehave, on the disk in its
/// options; a healthy file; a null disk.
pub(crate) struct Scene {
    pub(crate) daemon: Daemon,
    pub(crate) file: Neighbour,
    pub(crate) null: Neighbour,
    pub(crate) sockets: [PathBuf; 2],
    pub(crate) _folders: [TempDir; 2],
}

/// The folder of the tests' disks, on a file system with direct I/O.
pub(crate) fn disks() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// Makes a neighbour's disk of written zeroes: later writes go to allocated blocks, and wait for no
/// journal.
pub(crate) fn make_written(path: &Path) -> Result<()> {
    let zeroes = vec![0; usize::try_from(DISK_BYTES)?];
    let mut file = std::fs::File::create(path)?;
    file.write_all(&zeroes)?;
    file.sync_all().with_context(|| format!("making {}", path.display()))
}

impl Scene {
    /// Starts the daemon. The disk of the export that will misbehave is made in `disks`.
    pub(crate) fn start(disks: &Path, options: &DaemonOptions) -> Result<Self> {
        let folder = tempfile::tempdir_in(self::disks())?;
        let file = folder.path().join("good.img");
        make_written(&file)?;
        // Paths of sockets must be short.
        let socket_folder = tempfile::tempdir()?;
        let socket = |name: &str| socket_folder.path().join(name);
        let sockets = [socket("file.sock"), socket("null.sock")];
        // The kernel gives cached writes of regular files to io_uring's workers by a hash of the
        // inode, one file of a hash at a time: one in 64 neighbours would wait (README, limits).
        let cache = match (options.engine, options.cache) {
            (Engine::IoUring, Cache::Writeback) => ",cache=none",
            _ => "",
        };
        let file =
            format!("socket-path={},blk-file={}{cache}", sockets[0].display(), file.display());
        let null = format!("socket-path={},null={DISK_BYTES}", sockets[1].display());
        let options = options.clone().with("--export", &file).with("--export", &null);
        let daemon = Daemon::start(disks, &options)?;
        daemon.wait_for_message("serving on", 3)?;
        let file = Neighbour::attach(&sockets[0], true)?;
        let null = Neighbour::attach(&sockets[1], false)?;
        let mut scene = Self { daemon, file, null, sockets, _folders: [folder, socket_folder] };
        scene.check_neighbours().context("before anybody misbehaves")?;
        Ok(scene)
    }

    /// Starts the daemon with the default options of an engine.
    pub(crate) fn with_engine(engine: Engine) -> Result<Self> {
        Self::start(disks(), &DaemonOptions::new(engine))
    }

    /// Checks that both neighbours are served.
    pub(crate) fn check_neighbours(&mut self) -> Result<()> {
        self.file.run(OPERATIONS).context("a healthy file")?;
        self.null.run(OPERATIONS).context("a null disk")?;
        self.daemon.check_running()
    }

    /// Sends SIGTERM, and waits until all exports have ended: their sockets are gone.
    pub(crate) fn end_exports(&self) -> Result<()> {
        kill_process(self.daemon.pid(), Signal::TERM).context("sending SIGTERM")?;
        let deadline = Instant::now() + LIMIT;
        while self.daemon.socket().exists() || self.sockets.iter().any(|socket| socket.exists()) {
            ensure!(Instant::now() < deadline, "SIGTERM does not end all exports");
            std::thread::sleep(CHECK_INTERVAL);
        }
        Ok(())
    }

    /// Ends the daemon by SIGTERM. The neighbours' front-ends stay attached to the end.
    pub(crate) fn terminate(self) -> Result<()> {
        kill_process(self.daemon.pid(), Signal::TERM).context("sending SIGTERM")?;
        self.finish()
    }

    /// Waits for the end of the daemon.
    pub(crate) fn finish(self) -> Result<()> {
        let Self { daemon, file, null, sockets, .. } = self;
        daemon.wait_end()?;
        drop((file, null));
        for socket in sockets {
            ensure!(!socket.exists(), "{} is left behind", socket.display());
        }
        Ok(())
    }
}

/// Bytes of each write of [`PendingWrites`]; write *i* has the content of `i % CONTENTS`.
pub(crate) const WRITE_BYTES: usize = 4096;
const CONTENTS: u16 = 256;

/// A front-end with unanswered requests on two queues.
pub(crate) struct PendingWrites {
    pub(crate) frontend: Frontend,
    /// The number of requests of each queue.
    counts: [u16; 2],
    /// The addresses of all status bytes.
    statuses: Vec<u64>,
}

impl PendingWrites {
    pub(crate) fn attach(socket: &Path) -> Result<Self> {
        let frontend = Frontend::attach(socket, &Setup::default().queue_size(QUEUE_SIZE))?;
        frontend.rings.iter().for_each(|ring| ring.disable_calls());
        Ok(Self { frontend, counts: [0; 2], statuses: Vec::new() })
    }

    /// The content of write `number`.
    pub(crate) fn content(number: u16) -> Vec<u8> {
        pattern(u64::from(number % CONTENTS) + 1, WRITE_BYTES)
    }

    /// Sends `count` writes to adjacent places of the disk, over both queues, and then `flushes`
    /// flushes.
    pub(crate) fn write(&mut self, count: u16, flushes: u16) -> Result<()> {
        let bytes = WRITE_BYTES as u64;
        for content in 0..CONTENTS {
            let addr = DATA + u64::from(content) * bytes;
            self.frontend.memory.write(addr, &Self::content(content))?;
        }
        for number in 0..count {
            let addr = DATA + u64::from(number % CONTENTS) * bytes;
            let sector = u64::from(number) * bytes / SECTOR_BYTES as u64;
            let data = Desc::readable(addr, u32::try_from(WRITE_BYTES)?);
            self.put(number, blk::OUT, sector, Some(data))?;
        }
        for number in 0..flushes {
            self.put(number, blk::FLUSH, 0, None)?;
        }
        self.kick()
    }

    /// Makes one request available on one of the queues, without a kick.
    pub(crate) fn put(
        &mut self,
        number: u16,
        kind: u32,
        sector: u64,
        data: Option<Desc>,
    ) -> Result<()> {
        let queue = usize::from(number % 2);
        let slot = self.counts[queue];
        ensure!(slot < QUEUE_SIZE, "no room for one more request");
        self.counts[queue] += 1;
        let (header, status) = self.frontend.put_header(queue, slot, kind, sector)?;
        let mut chain = vec![Desc::readable(header, 16)];
        chain.extend(data);
        chain.push(Desc::writable(status, 1));
        let table = SCRATCH + (queue as u64 * u64::from(QUEUE_SIZE) + u64::from(slot)) * 48;
        let ring = &mut self.frontend.rings[queue];
        ring.put_indirect(slot, table, &chain);
        ring.offer(slot);
        self.statuses.push(status);
        Ok(())
    }

    pub(crate) fn kick(&self) -> Result<()> {
        self.frontend.rings.iter().try_for_each(|ring| ring.kick())
    }

    /// The number of requests with an answer.
    pub(crate) fn answered(&self) -> Result<usize> {
        let mut answered = 0;
        for status in &self.statuses {
            answered += usize::from(self.frontend.memory.read(*status, 1)? != [blk::PENDING]);
        }
        Ok(answered)
    }

    /// Waits for all answers. Each request must have one, and have succeeded.
    pub(crate) fn finish(&mut self) -> Result<()> {
        for (queue, count) in self.counts.into_iter().enumerate() {
            let ring = &mut self.frontend.rings[queue];
            ring.poll_used(count).context("after what kept them is gone")?;
            let mut heads = Vec::new();
            while let Some(used) = ring.take_used() {
                heads.push(used.head);
            }
            heads.sort_unstable();
            ensure!(heads.iter().copied().eq(0..u32::from(count)), "other heads: {heads:?}");
            take_count(&ring.call);
            ring.disable_calls();
        }
        for status in std::mem::take(&mut self.statuses) {
            let status = self.frontend.memory.read(status, 1)?;
            ensure!(status == [blk::OK], "a request ended with status {status:?}");
        }
        self.counts = [0; 2];
        Ok(())
    }
}
