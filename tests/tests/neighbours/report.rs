//! A neighbour's speed while another export misbehaves, compared with its speed in quiet.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use ringhaul_kit::cli::{bench, run};
use ringhaul_kit::daemon::{Daemon, DaemonOptions};
use ringhaul_kit::frontend::memory::{Region, memfd};
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, MEMORY_END, Setup, blk};
use ringhaul_kit::fuse::{Fuse, opcode};
use ringhaul_kit::server::{Cache, Engine};
use ringhaul_kit::system::{FileSystem, LoopDevice, can_change_system, thread_id};
use rustix::process::Pid;

use crate::log::Unread;
use crate::scene::{PendingWrites, Scene, disks};
use crate::slow_disks::{ext4, switch_to_pool_threads};

const MIB: u64 = 1 << 20;

/// A guest that verifies its data.
const BENCH: &str = "--rw randrw --rwmixread 70 --bs 4k --iodepth 8 --verify --ramp_time 0.1 \
                     --eta never --output-format json";

/// The pauses between two bad requests, and between two rounds of mapping. They let the effect of
/// the requests count, rather than the share of processors.
const PAUSE: Duration = Duration::from_millis(2);
const LONG_PAUSE: Duration = Duration::from_millis(100);

/// Ends a disturbance, and fails if there was none.
type Stop = Box<dyn FnOnce() -> Result<()>>;

/// Quiet and disturbed spans, in turn.
#[derive(Clone, Copy)]
struct Spans {
    rounds: usize,
    runtime_ms: u64,
}

impl Spans {
    /// Reads the settings of `cargo lab neighbours`.
    fn from_environment() -> Result<Self> {
        let number = |name: &str, default: u64| match std::env::var(name) {
            Ok(value) => value.parse().with_context(|| format!("{name}={value} is not a number")),
            Err(_) => Ok(default),
        };
        let rounds = usize::try_from(number("RINGHAUL_NEIGHBOURS_ROUNDS", 7)?)?;
        ensure!(rounds > 0, "without a round nothing is measured");
        Ok(Self { rounds, runtime_ms: number("RINGHAUL_NEIGHBOURS_RUNTIME_MS", 1000)? })
    }

    /// The IOPS of a neighbour; all of its answers must be right.
    fn measure(self, socket: &Path) -> Result<f64> {
        let options = format!("{BENCH} --runtime {}ms", self.runtime_ms);
        let finished = run(&mut bench(socket, &options)?)?.expect_code(0)?;
        let report: serde_json::Value = serde_json::from_str(&finished.stdout)?;
        let number = |key: &str| {
            report[key].as_f64().with_context(|| format!("no {key} in {}", finished.stdout))
        };
        for key in ["errors", "verify_mismatches"] {
            ensure!(number(key)? == 0.0, "the neighbour has {key}: {}", finished.stdout);
        }
        number("iops")
    }

    /// Measures, and prints a row of the table.
    fn compare(
        self,
        name: &str,
        engine: Engine,
        socket: &Path,
        mut disturb: impl FnMut() -> Result<Stop>,
    ) -> Result<()> {
        let (mut ratios, mut quiet_iops) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            let quiet = self.measure(socket).context("in quiet")?;
            let stop = disturb().context("beginning to disturb")?;
            let disturbed = self.measure(socket).context("beside one that misbehaves");
            stop().context("what disturbs")?;
            ratios.push(disturbed? / quiet);
            quiet_iops.push(quiet);
        }
        let (least, greatest) = range(&ratios);
        println!(
            "| {name} | {engine} | {:.1} | {:.2} | {least:.2} to {greatest:.2} |",
            median(quiet_iops) / 1000.0,
            median(ratios),
        );
        Ok(())
    }

    /// Measures the healthy file of a scene.
    fn compare_in(
        self,
        name: &str,
        engine: Engine,
        scene: Scene,
        mut disturb: impl FnMut(&Daemon) -> Result<Stop>,
    ) -> Result<()> {
        let Scene { daemon, file, null, sockets, _folders } = scene;
        // The load generator takes the place of this neighbour.
        drop(file);
        self.compare(name, engine, &sockets[0], || disturb(&daemon))
            .with_context(|| format!("{name}, {engine}:\n{}", daemon.messages()))?;
        drop(null);
        daemon.terminate()?;
        ensure!(!sockets[0].exists(), "a socket is left behind");
        Ok(())
    }
}

/// The least and the greatest of positive values.
fn range(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::MAX, 0.0), |(least, most), value| (value.min(least), value.max(most)))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// Repeats an action on a separate thread, until the returned function is called.
fn repeat_until_stopped(
    pause: Duration,
    mut act: impl FnMut() -> Result<()> + Send + 'static,
) -> Stop {
    let stop = Arc::new(AtomicBool::new(false));
    let thread = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || -> Result<u64> {
            let mut times = 0;
            while !stop.load(Ordering::Relaxed) {
                act()?;
                times += 1;
                std::thread::sleep(pause);
            }
            Ok(times)
        }
    });
    Box::new(move || {
        stop.store(true, Ordering::Relaxed);
        let times = thread.join().map_err(|_| anyhow!("the thread that disturbs panicked"))??;
        ensure!(times > 0, "it was done {times} times");
        Ok(())
    })
}

fn hung_writes(
    spans: Spans,
    name: &str,
    engine: Engine,
    is_loop: bool,
    misaligned: bool,
) -> Result<()> {
    let file_system = Rc::new(ext4(64 * MIB)?);
    let mut options = DaemonOptions { cache: Cache::None, ..DaemonOptions::new(engine) };
    let device = if is_loop { Some(loop_device(&file_system)?) } else { None };
    if let Some(device) = &device {
        options = options.with("--disk", &format!("file,path={}", device.path().display()));
    }
    let home = if is_loop { disks() } else { file_system.path() };
    let scene = Scene::start(home, &options)?;
    switch_to_pool_threads(engine, &scene, &file_system)?;
    spans.compare_in(name, engine, scene, |daemon| {
        let mut stuck = PendingWrites::attach(daemon.socket())?;
        let frozen = file_system.freeze()?;
        if misaligned {
            for number in 0..2040 {
                let data = Desc::readable(DATA + 1, u32::try_from(MIB)?);
                stuck.put(number, blk::OUT, 0, Some(data))?;
            }
            stuck.kick()?;
        } else {
            stuck.write(300, 2)?;
        }
        Ok(Box::new(move || {
            let answered = stuck.answered()?;
            drop(frozen);
            ensure!(answered <= 2, "{answered} requests of a frozen disk were answered");
            stuck.finish()
        }))
    })
}

fn loop_device(file_system: &FileSystem) -> Result<LoopDevice> {
    let backing = file_system.path().join("backing.img");
    std::fs::File::create(&backing).and_then(|file| file.set_len(16 * MIB))?;
    LoopDevice::attach(&backing)
}

/// A descriptor that hangs on close.
fn hung_descriptor(spans: Spans, name: &str, engine: Engine) -> Result<()> {
    let Some(fuse) = Fuse::mount()? else { return Ok(()) };
    let fuse = Rc::new(fuse);
    spans.compare_in(name, engine, Scene::with_engine(engine)?, |daemon| {
        let mut bad = Frontend::connect(daemon.socket(), &Setup::default())?;
        bad.negotiate()?;
        fuse.withhold(daemon.pid(), &[opcode::FLUSH, opcode::POLL]);
        let message = Message::ring_fd(code::SET_VRING_KICK, 0, Some(&fuse.open()?));
        bad.channel.send(&message.needs_reply())?;
        fuse.wait_for(opcode::FLUSH)?;
        let fuse = Rc::clone(&fuse);
        Ok(Box::new(move || {
            fuse.release();
            drop(bad);
            Ok(())
        }))
    })
}

/// A front-end that repeatedly shares the maximum of memory, in regions of 64 GiB that are holes,
/// and disconnects.
fn sparse_regions(spans: Spans, name: &str, engine: Engine) -> Result<()> {
    const REGION_BYTES: u64 = 64 << 30;
    /// The regions that one front-end may share by default, beside its memory that is no hole.
    const REGIONS: u64 = (16 << 40) / REGION_BYTES - 1;
    let hole = Arc::new(memfd(REGION_BYTES)?);
    spans.compare_in(name, engine, Scene::with_engine(engine)?, |daemon| {
        let (socket, hole) = (daemon.socket().to_owned(), Arc::clone(&hole));
        Ok(repeat_until_stopped(LONG_PAUSE, move || {
            let mut bad = Frontend::connect(&socket, &Setup::default())?;
            bad.negotiate()?;
            bad.share_memory()?;
            for number in 0..=REGIONS {
                let guest_addr = MEMORY_END + number * REGION_BYTES;
                let user_addr = 0x1000_0000 + guest_addr;
                let file = Arc::clone(&hole);
                let bytes = REGION_BYTES;
                let region = Region { guest_addr, bytes, user_addr, file_offset: 0, file };
                let taken = bad.send_checked(Message::add_region(&region)).is_ok();
                ensure!(taken == (number < REGIONS), "region {number}: taken {taken}");
            }
            Ok(())
        }))
    })
}

/// A guest with requests beyond the limit on the size of files.
fn limit_on_files(spans: Spans, name: &str, engine: Engine) -> Result<()> {
    let options =
        DaemonOptions { wrapper: &["prlimit", "--fsize=8388608"], ..DaemonOptions::new(engine) };
    spans.compare_in(name, engine, Scene::start(disks(), &options)?, |daemon| {
        let mut bad = Frontend::attach(daemon.socket(), &Setup::default())?;
        Ok(repeat_until_stopped(PAUSE, move || {
            let answer = bad.request(0, blk::OUT, (12 << 20) / 512, &[7; 4096], 0)?;
            ensure!(answer.status == blk::IOERR, "a write beyond the limit: {answer:?}");
            Ok(())
        }))
    })
}

/// A log without a reader, and a guest with invalid requests.
fn full_pipe(spans: Spans, name: &str, engine: Engine) -> Result<()> {
    let unread = Rc::new(std::cell::RefCell::new(Unread::start(engine)?));
    let [bad, good] = unread.borrow().sockets.clone();
    spans.compare(name, engine, &good, || {
        let mut bad = Frontend::attach(&bad, &Setup::default())?;
        unread.borrow_mut().fill()?;
        let stop = repeat_until_stopped(PAUSE, move || {
            let answer = bad.request(0, 0xdead, 0, &[], 512)?;
            ensure!(answer.status == blk::UNSUPP, "an unknown request: {answer:?}");
            Ok(())
        });
        let unread = Rc::clone(&unread);
        Ok(Box::new(move || {
            stop()?;
            // A line about the load generator's front-end had to wait.
            let mut unread = unread.borrow_mut();
            unread.wait_behind_filling("a front-end has connected")?;
            unread.start_again(engine)
        }))
    })?;
    unread.borrow_mut().terminate()
}

/// The CPU time of the threads that answer a scrape, in nanoseconds. The kernel cuts their names.
fn scrape_cpu_ns(daemon: Pid) -> Result<u64> {
    let mut sum = 0;
    for name in ["ringhaul-metric", "ringhaul-contro"] {
        let thread = thread_id(daemon, name)?.as_raw_nonzero();
        let path = format!("/proc/{}/task/{thread}/schedstat", daemon.as_raw_nonzero());
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        sum += text.split(' ').next().context("an empty file")?.parse::<u64>()?;
    }
    Ok(sum)
}

/// Ten scrapes a second of 256 exports. Prints the CPU time of a scrape in a second row.
fn scrapes(spans: Spans, name: &str, engine: Engine) -> Result<()> {
    /// The exports beside those of the scene.
    const MORE: usize = 253;
    let folder = tempfile::tempdir()?;
    let page = folder.path().join("metrics");
    let mut options = DaemonOptions::new(engine)
        .with("--iothreads", "1")
        .with("--metrics", &format!("unix:{}", page.display()));
    for number in 0..MORE {
        let socket = folder.path().join(number.to_string());
        options = options.with("--export", &format!("socket-path={},null=1M", socket.display()));
    }
    let scene = Scene::start(disks(), &options)?;
    scene.daemon.wait_for_message("serving on", MORE + 3)?;
    let all_cpu_ms = Arc::new(Mutex::new(Vec::new()));
    spans.compare_in(name, engine, scene, |daemon| {
        let (page, cpu_ms, pid) = (page.clone(), Arc::clone(&all_cpu_ms), daemon.pid());
        Ok(repeat_until_stopped(LONG_PAUSE, move || {
            let before = scrape_cpu_ns(pid)?;
            let mut stream = UnixStream::connect(&page)?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            let exports = text.matches("ringhaul_export_connected{").count();
            ensure!(exports == MORE + 3, "{exports} exports in the metrics");
            let used = Duration::from_nanos(scrape_cpu_ns(pid)? - before);
            cpu_ms.lock().unwrap_or_else(PoisonError::into_inner).push(used.as_secs_f64() * 1e3);
            Ok(())
        }))
    })?;
    let cpu_ms = all_cpu_ms.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let (least, greatest) = range(&cpu_ms);
    println!(
        "| milliseconds of CPU of each scrape | {engine} | | {:.1} | {least:.1} to {greatest:.1} |",
        median(cpu_ms),
    );
    Ok(())
}

/// Measures one case with one engine.
type Case = fn(Spans, &str, Engine) -> Result<()>;

const CASES: [(&str, Case); 8] = [
    ("300 writes to a frozen file system", |spans, name, engine| {
        hung_writes(spans, name, engine, false, false)
    }),
    ("300 writes to a loop device on one", |spans, name, engine| {
        hung_writes(spans, name, engine, true, false)
    }),
    ("2,040 misaligned writes of 1 MiB to one", |spans, name, engine| {
        hung_writes(spans, name, engine, false, true)
    }),
    ("a FUSE file that hangs while it is closed", hung_descriptor),
    ("maps 16 TiB of holes, ten times a second", sparse_regions),
    ("bad requests, and stderr is a full pipe", full_pipe),
    ("writes beyond RLIMIT_FSIZE", limit_on_files),
    ("256 exports, scraped ten times a second", scrapes),
];

/// `cargo lab neighbours` runs this. It takes minutes, and its figures depend on the machine.
#[test]
#[ignore = "a measurement, and no test"]
fn report() -> Result<()> {
    if !can_change_system("mounts") {
        return Ok(());
    }
    let spans = Spans::from_environment()?;
    let only = std::env::var("RINGHAUL_NEIGHBOURS_ONLY").unwrap_or_default();
    println!("| the other export | engine | thousand IOPS in quiet | times as many | from, to |");
    println!("|---|---|--:|--:|---|");
    for engine in [Engine::IoUring, Engine::Aio, Engine::Threads] {
        for (name, case) in CASES {
            if format!("{engine}/{name}").contains(&only) {
                case(spans, name, engine)?;
            }
        }
    }
    Ok(())
}
