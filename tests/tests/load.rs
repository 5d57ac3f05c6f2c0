//! Many exports under load: front-ends that disconnect at any time, and guests that flood the
//! daemon.
//!
//! Each test uses both processors, so these tests are a separate program.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_kit::daemon::{Daemon, DaemonOptions, SECTOR_BYTES, pattern};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{
    DATA, DATA_BYTES, Frontend, Setup, blk, check_service, memory, segment,
};
use ringhaul_kit::server::Engine;
use tempfile::TempDir;

for_each_engine! {
    sixty_four_exports_with_front_ends_that_vanish,
    a_guest_that_floods_slows_no_other_thread,
}

/// Tests run one at a time, because they measure behaviour under load.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const EXPORTS: u64 = 64;
const QUEUES: u16 = 4;
/// Requests on each export in a round.
const REQUESTS: usize = 60;
/// The model of a disk: the number of places, and the bytes of each.
const PLACES: usize = 64;
const PLACE_BYTES: usize = 4096;
const DISK_BYTES: u64 = 4 << 20;
/// The limit in bytes on the growth of the daemon's own memory in the second round.
const GROWTH_MAX: usize = 2 << 20;

/// A daemon with many exports.
struct Farm {
    daemon: Daemon,
    sockets: Vec<std::path::PathBuf>,
    _folders: [TempDir; 2],
}

impl Farm {
    fn start(engine: Engine, exports: u64, queues: u16) -> Result<Self> {
        let disks = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let folder = tempfile::tempdir_in(disks)?;
        let socket_folder = tempfile::tempdir()?;
        let mut options = DaemonOptions::new(engine).with("--iothreads", "2");
        options.num_queues = queues;
        let mut sockets = Vec::new();
        for number in 1..exports {
            let file = folder.path().join(format!("{number}.img"));
            std::fs::File::create(&file).and_then(|file| file.set_len(DISK_BYTES))?;
            let socket = socket_folder.path().join(format!("{number}.sock"));
            let export = format!("socket-path={},blk-file={}", socket.display(), file.display());
            options = options.with("--export", &export);
            sockets.push(socket);
        }
        let daemon = Daemon::start(disks, &options)?;
        daemon.wait_for_message("serving on", usize::try_from(exports)?)?;
        sockets.push(daemon.socket().to_owned());
        Ok(Self { daemon, sockets, _folders: [folder, socket_folder] })
    }
}

/// A generator of numbers that depend on the seed alone.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from((self.0 >> 33) % end as u64).expect("an index fits")
    }
}

/// The successive front-ends of an export, and the expected contents of its disk.
struct User<'a> {
    socket: &'a Path,
    random: Random,
    /// The possible contents of each place: several if a write was cut short.
    places: Vec<Vec<Vec<u8>>>,
    seed: u64,
}

impl<'a> User<'a> {
    /// Zeroes all places, so that the model starts with known contents.
    fn new(socket: &'a Path, seed: u64) -> Result<Self> {
        let mut user = Self { socket, random: Random(seed), places: Vec::new(), seed };
        let mut frontend = user.attach()?;
        let zeroes = frontend.request(
            0,
            blk::WRITE_ZEROES,
            0,
            &segment(0, u32::try_from(PLACES * PLACE_BYTES / SECTOR_BYTES)?, 0),
            0,
        )?;
        ensure!(zeroes.status == blk::OK, "zeroing ended with {zeroes:?}");
        user.places = vec![vec![vec![0; PLACE_BYTES]]; PLACES];
        Ok(user)
    }

    fn attach(&self) -> Result<Frontend> {
        Frontend::attach(self.socket, &Setup { queues: QUEUES, ..Setup::default() })
    }

    fn sector(place: usize) -> u64 {
        (place * PLACE_BYTES / SECTOR_BYTES) as u64
    }

    fn new_content(&mut self) -> Vec<u8> {
        self.seed = self.seed.wrapping_add(EXPORTS);
        pattern(self.seed, PLACE_BYTES)
    }

    fn run(&mut self) -> Result<()> {
        let mut frontend = self.attach()?;
        for _ in 0..REQUESTS {
            let (queue, place) = (self.random.below(QUEUES.into()), self.random.below(PLACES));
            match self.random.below(100) {
                0..45 => {
                    let data = self.new_content();
                    frontend.write(queue, Self::sector(place), &data)?;
                    self.places[place] = vec![data];
                }
                45..90 => self.check(&mut frontend, queue, place)?,
                90..92 => {
                    let flush = frontend.request(queue, blk::FLUSH, 0, &[], 0)?;
                    ensure!(flush.status == blk::OK, "a flush ended with {flush:?}");
                }
                92..95 => {
                    let sectors = u32::try_from(PLACE_BYTES / SECTOR_BYTES)?;
                    let range = segment(Self::sector(place), sectors, 0);
                    let zeroes = frontend.request(queue, blk::WRITE_ZEROES, 0, &range, 0)?;
                    ensure!(zeroes.status == blk::OK, "zeroing ended with {zeroes:?}");
                    self.places[place] = vec![vec![0; PLACE_BYTES]];
                }
                _ => {
                    self.vanish(frontend)?;
                    frontend = self.attach()?;
                }
            }
        }
        (0..PLACES).try_for_each(|place| self.check(&mut frontend, place % 4, place))
    }

    fn check(&mut self, frontend: &mut Frontend, queue: usize, place: usize) -> Result<()> {
        let read = frontend.read(queue, Self::sector(place), PLACE_BYTES)?;
        ensure!(self.places[place].contains(&read), "place {place} has what was never written");
        self.places[place] = vec![read];
        Ok(())
    }

    /// Ends a front-end in the middle of writes on all queues, each to a different place.
    fn vanish(&mut self, mut frontend: Frontend) -> Result<()> {
        let first = self.random.below(PLACES / 16) * 16;
        for queue in 0..usize::from(QUEUES) {
            for slot in 0..4_u16 {
                let place = first + 4 * queue + usize::from(slot);
                let data = self.new_content();
                let addr = DATA + queue as u64 * DATA_BYTES + u64::from(slot) * PLACE_BYTES as u64;
                frontend.memory.write(addr, &data)?;
                let (header, status) =
                    frontend.put_header(queue, slot, blk::OUT, Self::sector(place))?;
                let bytes = u32::try_from(PLACE_BYTES)?;
                let chain = [
                    Desc::readable(header, 16),
                    Desc::readable(addr, bytes),
                    Desc::writable(status, 1),
                ];
                frontend.rings[queue].put_chain(3 * slot, &chain);
                frontend.rings[queue].offer(3 * slot);
                self.places[place].push(data);
            }
            frontend.rings[queue].kick()?;
        }
        if self.random.below(2) == 0 {
            frontend.rings[0].wait_used()?;
        }
        Ok(())
    }
}

/// Runs all users at the same time.
fn run_all(users: &mut [User<'_>]) -> Result<()> {
    std::thread::scope(|scope| {
        let running: Vec<_> =
            users.iter_mut().map(|user| scope.spawn(move || user.run())).collect();
        for (export, running) in running.into_iter().enumerate() {
            let Ok(result) = running.join() else { bail!("a front-end has panicked") };
            result.with_context(|| format!("the front-end of export {export}, its seed"))?;
        }
        Ok(())
    })
}

fn sixty_four_exports_with_front_ends_that_vanish(engine: Engine) -> Result<()> {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut farm = Farm::start(engine, EXPORTS, QUEUES)?;
    let descriptors = farm.daemon.descriptors()?;
    let mut users = Vec::new();
    for (seed, socket) in (0..).zip(&farm.sockets) {
        users.push(User::new(socket, seed).with_context(|| format!("export {seed}"))?);
    }
    farm.daemon.wait_released(&descriptors)?;
    let threads = farm.daemon.threads()?;
    // The first round allocates memory that the daemon keeps.
    run_all(&mut users)?;
    farm.daemon.wait_released(&descriptors)?;
    let before = farm.daemon.own_memory()?;
    run_all(&mut users)?;
    farm.daemon.wait_released(&descriptors)?;
    farm.daemon.wait_threads(&threads)?;
    let after = farm.daemon.own_memory()?;
    ensure!(after < before + GROWTH_MAX, "{before} bytes of memory became {after}");
    check_service(&mut farm.daemon)?;
    farm.daemon.terminate()?;
    Ok(())
}

/// The first queues of two exports are on two IoThreads. The flooding guest kicks one without end
/// and reads no answers. All requests of the second export are answered.
fn a_guest_that_floods_slows_no_other_thread(engine: Engine) -> Result<()> {
    const REQUESTS_MEANWHILE: u64 = 500;
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut farm = Farm::start(engine, 2, 1)?;
    let setup = Setup { queues: 1, ..Setup::default() };
    let mut good = Frontend::attach(&farm.sockets[0], &setup)?;
    let mut flood = Frontend::attach(&farm.sockets[1], &setup)?;
    let (stop, started) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let flooding = scope.spawn(|| {
            let mut kicks = 0_u64;
            for slot in 0..16 {
                let (header, status) = flood.put_header(0, slot, blk::IN, 0)?;
                let data = Desc::writable(DATA, 4096);
                let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
                flood.rings[0].put_chain(3 * slot, &chain);
                flood.rings[0].offer(3 * slot);
            }
            while !stop.load(Ordering::Relaxed) {
                memory::signal(&flood.rings[0].kick)?;
                kicks += 1;
                started.store(true, Ordering::Relaxed);
            }
            anyhow::Ok(kicks)
        });
        while !started.load(Ordering::Relaxed) && !flooding.is_finished() {
            std::thread::yield_now();
        }
        let served = (0..REQUESTS_MEANWHILE).try_for_each(|number| {
            let data = pattern(number, PLACE_BYTES);
            good.write(0, 8 * number, &data)?;
            ensure!(good.read(0, 8 * number, PLACE_BYTES)? == data, "other data than was written");
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        let Ok(kicks) = flooding.join() else { bail!("the flood has panicked") };
        let kicks = kicks?;
        served.with_context(|| format!("during {kicks} kicks of another"))?;
        ensure!(kicks > REQUESTS_MEANWHILE, "{kicks} kicks are not a flood");
        Ok(())
    })?;
    // All answers are in the used ring, unread.
    flood.rings[0].poll_used(16)?;
    drop((good, flood));
    ensure!(!farm.daemon.messages().contains("its ring is bad"));
    farm.daemon.check_running()?;
    farm.daemon.terminate()?;
    Ok(())
}
