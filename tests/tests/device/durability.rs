//! Writes are on stable storage when they are answered, unless the driver can flush.
//!
//! strace shows the system calls of the daemon. The kernel's own trace shows its synchronisations,
//! of which strace shows none with io_uring, and no end with Linux AIO. Both show the order: data
//! is on stable storage before the driver is called.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, bail, ensure};
use ringhaul_kit::daemon::{Daemon, DaemonOptions, pattern};
use ringhaul_kit::frontend::memory::{take_count, wait_readable};
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk, feature, segment};
use ringhaul_kit::kernel_trace::KernelTrace;
use ringhaul_kit::server::{Cache, Engine};
use ringhaul_kit::system::print_skipped;
use ringhaul_kit::{for_each_engine, for_each_engine_with_system_calls};

use crate::start;

/// A way to observe the daemon.
type Observer =
    fn(Engine, Cache, u64, &dyn Fn(&mut Frontend) -> Result<()>) -> Result<Option<Observed>>;

/// Makes the tests with one way to observe.
macro_rules! tests {
    ($each:ident, $observe:expr) => {
        tests! { $each, $observe,
            without_a_cache_writes_are_synchronous,
            a_driver_without_flush_gets_synchronous_writes,
            a_driver_that_flushes_gets_synchronous_flushes_only,
            the_driver_turns_the_cache_off,
            wce_without_flush_begins_without_a_cache,
            without_a_cache_zeroes_are_flushed,
        }
    };
    ($each:ident, $observe:expr, $($name:ident),* $(,)?) => {
        use super::*;
        $each! { $($name),* }
        $(fn $name(engine: Engine) -> Result<()> {
            super::$name($observe, engine)
        })*
    };
}

mod seen_with_strace {
    tests! { for_each_engine_with_system_calls, with_strace }
}

mod seen_in_the_kernel {
    tests! { for_each_engine, in_the_kernel }
}

const WRITEBACK: u32 = 32;

/// The thread that serves all queues.
const IO_THREAD: &str = "iothread-0";

/// `EXT4_SUPER_MAGIC` of linux/magic.h.
const EXT4: i64 = 0xef53;

/// A call that takes long on a busy machine is interrupted by a signal, and later calls are made in
/// a way that these traces do not show. The run is then repeated.
const TRIES: u32 = 5;

/// Linux's number of that signal.
const SIGURG: i32 = 23;

/// Operations that the daemon asked of the kernel.
#[derive(Debug, Default, Eq, PartialEq)]
struct Observed {
    /// Writes, if the trace shows them.
    writes: Option<usize>,
    /// Operations that brought data to stable storage, writes included.
    syncs: usize,
    /// `S` where data reached stable storage, `C` where the driver was called.
    order: String,
}

impl Observed {
    /// Reads a trace by strace, which shows the begin and the end of system calls. An operation of
    /// Linux AIO is shown when it is submitted; its end is not shown.
    fn in_calls(trace: &str) -> Self {
        // Engines probe the kernel at the start, so count from the first front-end.
        let trace = trace.split_once(" accept4(").map_or("", |(_, rest)| rest);
        let mut observed = Self { writes: Some(0), ..Self::default() };
        let mut syncing = HashSet::new();
        for line in trace.lines() {
            let (thread, call) = line.split_once(' ').unwrap_or_default();
            let call = call.trim_start();
            let is_any = |names: &[&str]| names.iter().any(|name| call.starts_with(name));
            let begins_write = is_any(&["pwritev2(", "pwritev(", "pwrite64("]);
            let begins_sync = is_any(&["fdatasync(", "fsync("]) || call.contains("RWF_DSYNC");
            let writes = call.matches("IOCB_CMD_PWRITE").count() + usize::from(begins_write);
            observed.writes = observed.writes.map(|count| count + writes);
            let syncs = call.matches("IOCB_CMD_FDSYNC").count() + call.matches("RWF_DSYNC").count();
            if call.contains("io_submit") {
                observed.sync(syncs);
            } else if begins_sync && call.ends_with("<unfinished ...>") {
                syncing.insert(thread);
            } else if begins_sync || (call.contains(" resumed>") && syncing.remove(thread)) {
                let failed = call.contains(" = -1 ");
                observed.sync(usize::from(!failed));
            } else if thread.ends_with(&format!("<{IO_THREAD}>")) && call.starts_with("write(") {
                observed.order.push('C');
            }
        }
        observed
    }

    /// Reads events of the selection in [`in_the_kernel`].
    fn in_events(engine: Engine, events: &[String]) -> Self {
        let mut observed = Self::default();
        if engine == Engine::IoUring {
            observed.writes = Some(0);
        }
        for event in events {
            if event.contains(" ext4_sync_file_exit: ") {
                observed.sync(1);
            } else if event.contains(" sys_write(") {
                observed.order.push('C');
            } else if event.contains(" opcode WRITE") {
                observed.writes = observed.writes.map(|count| count + 1);
            }
        }
        observed
    }

    fn sync(&mut self, count: usize) {
        self.syncs += count;
        self.order.extend(std::iter::repeat_n('S', count));
    }
}

/// Runs `driver` on a daemon under strace. `None` if strace is not installed.
fn with_strace(
    engine: Engine,
    cache: Cache,
    features: u64,
    driver: &dyn Fn(&mut Frontend) -> Result<()>,
) -> Result<Option<Observed>> {
    let found = std::process::Command::new("strace").arg("-V").output();
    if found.is_err() {
        print_skipped("there is no strace here");
        return Ok(None);
    }
    let mut options = DaemonOptions::new(engine);
    options.cache = cache;
    options.trace =
        Some("accept4,io_submit,pwritev,pwritev2,pwrite64,fdatasync,fsync,fallocate,write");
    for _ in 0..TRIES {
        let daemon = start(&options)?;
        drive(&daemon, features, driver)?;
        let trace = daemon.terminate()?;
        if !trace.contains("--- SIGURG ") {
            return Ok(Some(Observed::in_calls(&trace)));
        }
    }
    bail!("calls took too long in each of {TRIES} runs");
}

/// Runs `driver` on a daemon while the kernel traces synchronisations of its file: on ext4
/// synchronous writes and flushes alike. `None` if that is not possible.
fn in_the_kernel(
    engine: Engine,
    cache: Cache,
    features: u64,
    driver: &dyn Fn(&mut Frontend) -> Result<()>,
) -> Result<Option<Observed>> {
    let mut options = DaemonOptions::new(engine);
    options.cache = cache;
    in_the_kernel_of(&options, features, driver)
}

fn in_the_kernel_of(
    options: &DaemonOptions,
    features: u64,
    driver: &dyn Fn(&mut Frontend) -> Result<()>,
) -> Result<Option<Observed>> {
    for _ in 0..TRIES {
        let Some(events) = kernel_events(options, features, driver)? else { return Ok(None) };
        if !events.iter().any(|event| event.contains(" signal_generate: ")) {
            return Ok(Some(Observed::in_events(options.engine, &events)));
        }
    }
    bail!("calls took too long in each of {TRIES} runs");
}

/// Records the kernel's events during `driver`. `None` if the kernel cannot trace them.
fn kernel_events(
    options: &DaemonOptions,
    features: u64,
    driver: &dyn Fn(&mut Frontend) -> Result<()>,
) -> Result<Option<Vec<String>>> {
    let daemon = start(options)?;
    let path = daemon.disk();
    let kind = rustix::fs::statfs(path).context("looking at the file system of the disk")?.f_type;
    if kind != EXT4 {
        print_skipped(&format!("{} is not on ext4, whose events are needed", path.display()));
        return Ok(None);
    }
    let metadata = fs::metadata(path).with_context(|| format!("looking at {path:?}"))?;
    // The kernel has 20 bits for the minor number, unlike the C library.
    let (major, minor) = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
    let of_file =
        format!("ret == 0 && ino == {} && dev == {}", metadata.ino(), (major << 20) | minor);
    let thread = daemon.thread_id(IO_THREAD)?.as_raw_nonzero();
    let of_thread = format!("common_pid == {thread}");
    let events = [
        ("ext4/ext4_sync_file_exit", of_file),
        ("syscalls/sys_enter_write", format!("{of_thread} && count == 8")),
        ("io_uring/io_uring_submit_req", of_thread),
        ("signal/signal_generate", format!("sig == {SIGURG} && pid == {thread}")),
    ];
    let trace = match KernelTrace::start(&events)? {
        Ok(trace) => trace,
        Err(reason) => {
            print_skipped(&reason);
            return Ok(None);
        }
    };
    drive(&daemon, features, driver)?;
    let events = trace.finish()?;
    daemon.terminate()?;
    Ok(Some(events))
}

/// Runs `driver`, which makes one request at a time. All calls are made before this returns.
fn drive(
    daemon: &Daemon,
    features: u64,
    driver: &dyn Fn(&mut Frontend) -> Result<()>,
) -> Result<()> {
    let setup = Setup { features, ..Setup::default() };
    let mut frontend = Frontend::attach(daemon.socket(), &setup)?;
    for ring in &frontend.rings {
        wait_readable(&ring.call, "call at the start of a queue")?;
        take_count(&ring.call);
    }
    driver(&mut frontend)?;
    (0..frontend.rings.len()).try_for_each(|queue| frontend.stop_queue(queue).map(|_| ()))
}

/// Makes five writes on each of two queues, all into holes of the file. The device alone may make
/// an overwrite durable, which no event of the file system shows.
fn ten_writes(frontend: &mut Frontend) -> Result<()> {
    for number in 0..5 {
        let data = pattern(number, 4096);
        frontend.write(0, 5000 + 8 * number, &data)?;
        write_from_two_buffers(frontend, 1, 6000 + 8 * number, &data)?;
    }
    Ok(())
}

fn write_from_two_buffers(
    frontend: &mut Frontend,
    queue: usize,
    sector: u64,
    data: &[u8],
) -> Result<()> {
    let (header, status) = frontend.put_header(queue, 0, blk::OUT, sector)?;
    let half = u32::try_from(data.len() / 2)?;
    let apart = DATA + 0x1_0000;
    frontend.memory.write(DATA, &data[..data.len() / 2])?;
    frontend.memory.write(apart, &data[data.len() / 2..])?;
    let halves = [Desc::readable(DATA, half), Desc::readable(apart, half)];
    let chain = [&[Desc::readable(header, 16)], &halves[..], &[Desc::writable(status, 1)]].concat();
    frontend.execute(queue, &chain)?;
    let status = frontend.memory.read(status, 1)?;
    ensure!(status == [blk::OK], "a write from two buffers ended with {status:?}");
    Ok(())
}

fn flush(frontend: &mut Frontend) -> Result<()> {
    let answer = frontend.request(0, blk::FLUSH, 0, &[], 0)?;
    ensure!(answer.status == blk::OK, "a flush ended with {answer:?}");
    Ok(())
}

/// Compares with `order`, which begins after the calls of the two queues that start.
fn expect(observed: Option<Observed>, writes: usize, order: &str) {
    if let Some(observed) = observed {
        let writes = observed.writes.map(|_| writes);
        let order = format!("CC{order}");
        assert_eq!(observed, Observed { writes, syncs: order.matches('S').count(), order });
    }
}

fn without_a_cache_writes_are_synchronous(observe: Observer, engine: Engine) -> Result<()> {
    for cache in [Cache::Directsync, Cache::Writethrough] {
        for features in [feature::FLUSH, 0, feature::FLUSH | feature::CONFIG_WCE] {
            let features = features | feature::VERSION_1 | feature::MQ;
            expect(observe(engine, cache, features, &ten_writes)?, 10, &"SC".repeat(10));
        }
    }
    Ok(())
}

fn a_driver_without_flush_gets_synchronous_writes(observe: Observer, engine: Engine) -> Result<()> {
    for cache in [Cache::None, Cache::Writeback] {
        let features = feature::VERSION_1 | feature::MQ;
        expect(observe(engine, cache, features, &ten_writes)?, 10, &"SC".repeat(10));
    }
    Ok(())
}

fn a_driver_that_flushes_gets_synchronous_flushes_only(
    observe: Observer,
    engine: Engine,
) -> Result<()> {
    for cache in [Cache::None, Cache::Writeback] {
        for features in [feature::FLUSH, feature::FLUSH | feature::CONFIG_WCE] {
            let features = features | feature::VERSION_1 | feature::MQ;
            let observed = observe(engine, cache, features, &|frontend| {
                ten_writes(frontend)?;
                flush(frontend)
            })?;
            expect(observed, 10, &("C".repeat(10) + "SC"));
        }
    }
    Ok(())
}

fn the_driver_turns_the_cache_off(observe: Observer, engine: Engine) -> Result<()> {
    let features = feature::VERSION_1 | feature::MQ | feature::FLUSH | feature::CONFIG_WCE;
    let observed = observe(engine, Cache::None, features, &|frontend| {
        frontend.send_checked(Message::config(code::SET_CONFIG, WRITEBACK, &[0]))?;
        ten_writes(frontend)?;
        frontend.send_checked(Message::config(code::SET_CONFIG, WRITEBACK, &[1]))?;
        frontend.write(0, 5000, &pattern(1, 4096)).context("with the cache on again")
    })?;
    expect(observed, 11, &("SC".repeat(10) + "C"));
    Ok(())
}

/// Virtio 1.3, section 5.2.5.2: such a driver cannot flush, so it must not start with a cache.
fn wce_without_flush_begins_without_a_cache(observe: Observer, engine: Engine) -> Result<()> {
    let features = feature::VERSION_1 | feature::MQ | feature::CONFIG_WCE;
    let observed = observe(engine, Cache::None, features, &|frontend| {
        let writeback = frontend.config(WRITEBACK, 1)?;
        ensure!(writeback == [0], "the driver sees a cache that it cannot flush");
        ten_writes(frontend)?;
        // The driver cannot switch the cache on either.
        frontend.send_checked(Message::config(code::SET_CONFIG, WRITEBACK, &[1]))?;
        frontend.write(0, 5000, &pattern(1, 4096)).context("with the cache switched on")
    })?;
    expect(observed, 11, &"SC".repeat(11));
    Ok(())
}

fn without_a_cache_zeroes_are_flushed(observe: Observer, engine: Engine) -> Result<()> {
    let features = feature::VERSION_1
        | feature::MQ
        | feature::DISCARD
        | feature::WRITE_ZEROES
        | feature::FLUSH;
    for (cache, order) in [(Cache::Directsync, "SCSC"), (Cache::None, "CC")] {
        let observed = observe(engine, cache, features, &|frontend| {
            for kind in [blk::DISCARD, blk::WRITE_ZEROES] {
                let answer = frontend.request(0, kind, 0, &segment(0, 8, 0), 0)?;
                ensure!(answer.status == blk::OK, "type {kind} ended with {answer:?}");
            }
            Ok(())
        })?;
        expect(observed, 0, order);
    }
    Ok(())
}

/// io_uring has a separate operation for registered memory.
#[test]
fn writes_from_registered_memory_are_synchronous() -> Result<()> {
    let mut options = DaemonOptions::new(Engine::IoUring).with("--fixed-buffers", "");
    options.cache = Cache::Directsync;
    let features = feature::VERSION_1 | feature::MQ;
    expect(in_the_kernel_of(&options, features, &ten_writes)?, 10, &"SC".repeat(10));
    Ok(())
}
