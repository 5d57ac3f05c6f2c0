//! Writes are on stable storage when they are answered, unless the driver can flush.
//!
//! What the daemon asks of the kernel is seen with strace.

use anyhow::{Context, Result, ensure};
use ringhaul_tests::daemon::{DaemonOptions, pattern};
use ringhaul_tests::for_each_engine_with_system_calls;
use ringhaul_tests::frontend::message::{Message, code};
use ringhaul_tests::frontend::{Frontend, Setup, blk, feature, segment};
use ringhaul_tests::guest::{Cache, Engine};

use crate::start;

for_each_engine_with_system_calls! {
    without_a_cache_writes_are_synchronous,
    a_driver_without_flush_gets_synchronous_writes,
    a_driver_that_flushes_gets_neither_more_nor_less,
    the_driver_turns_the_cache_off,
    wce_without_flush_begins_without_a_cache,
    without_a_cache_zeroes_are_flushed,
}

const WRITEBACK: u32 = 32;

/// What was asked of the kernel, in the order in which it was asked.
#[derive(Debug, Default, Eq, PartialEq)]
struct Asked {
    writes: usize,
    synchronous_writes: usize,
    flushes: usize,
}

impl Asked {
    /// Counts from the first front-end on: engines try out at the start what the kernel has.
    fn of(trace: &str) -> Self {
        let trace = trace.split_once(" accept4(").map_or("", |(_, rest)| rest);
        let count = |text: &str| trace.matches(text).count();
        // An io_submit may be shown in two lines; its iocbs are in one of them.
        let aio_writes = count("IOCB_CMD_PWRITEV") + count("IOCB_CMD_PWRITE,");
        // Calls of the pool, where flags of zero are shown as a number.
        let pool_writes = count(" pwritev2(") + count(" pwritev(") + count(" pwrite64(");
        Self {
            writes: aio_writes + pool_writes,
            synchronous_writes: count("RWF_DSYNC"),
            flushes: count("IOCB_CMD_FDSYNC")
                + count("IOCB_CMD_FSYNC")
                + count(" fdatasync(")
                + count(" fsync("),
        }
    }
}

/// Runs `driver` on a daemon under strace. None where there is no strace.
fn trace(
    engine: Engine,
    cache: Cache,
    features: u64,
    driver: impl FnOnce(&mut Frontend) -> Result<()>,
) -> Result<Option<Asked>> {
    let found = std::process::Command::new("strace").arg("-V").output();
    if found.is_err() {
        eprintln!("skipped: there is no strace here");
        return Ok(None);
    }
    let mut options = DaemonOptions::new(engine);
    options.cache = cache;
    options.trace = Some("accept4,io_submit,pwritev,pwritev2,pwrite64,fdatasync,fsync,fallocate");
    let daemon = start(&options)?;
    let setup = Setup { features, ..Setup::default() };
    let mut frontend = Frontend::attach(daemon.socket(), &setup)?;
    driver(&mut frontend)?;
    drop(frontend);
    Ok(Some(Asked::of(&daemon.terminate()?)))
}

/// Five writes on each of two queues.
fn ten_writes(frontend: &mut Frontend) -> Result<()> {
    for sector in 0..5 {
        for queue in [0, 1] {
            frontend.write(queue, 5000 + 8 * sector, &pattern(sector, 4096))?;
        }
    }
    Ok(())
}

fn flush(frontend: &mut Frontend) -> Result<()> {
    let answer = frontend.request(0, blk::FLUSH, 0, &[], 0)?;
    ensure!(answer.status == blk::OK, "a flush ended with {answer:?}");
    Ok(())
}

fn expect(asked: Option<Asked>, writes: usize, synchronous: usize, flushes: usize) {
    if let Some(asked) = asked {
        assert_eq!(asked, Asked { writes, synchronous_writes: synchronous, flushes });
    }
}

fn without_a_cache_writes_are_synchronous(engine: Engine) -> Result<()> {
    for cache in [Cache::Directsync, Cache::Writethrough] {
        for features in [feature::FLUSH, 0, feature::FLUSH | feature::CONFIG_WCE] {
            let features = features | feature::VERSION_1 | feature::MQ;
            expect(trace(engine, cache, features, ten_writes)?, 10, 10, 0);
        }
    }
    Ok(())
}

fn a_driver_without_flush_gets_synchronous_writes(engine: Engine) -> Result<()> {
    for cache in [Cache::None, Cache::Writeback] {
        let features = feature::VERSION_1 | feature::MQ;
        expect(trace(engine, cache, features, ten_writes)?, 10, 10, 0);
    }
    Ok(())
}

fn a_driver_that_flushes_gets_neither_more_nor_less(engine: Engine) -> Result<()> {
    for cache in [Cache::None, Cache::Writeback] {
        for features in [feature::FLUSH, feature::FLUSH | feature::CONFIG_WCE] {
            let features = features | feature::VERSION_1 | feature::MQ;
            let asked = trace(engine, cache, features, |frontend| {
                ten_writes(frontend)?;
                flush(frontend)
            })?;
            expect(asked, 10, 0, 1);
        }
    }
    Ok(())
}

fn the_driver_turns_the_cache_off(engine: Engine) -> Result<()> {
    let features = feature::VERSION_1 | feature::MQ | feature::FLUSH | feature::CONFIG_WCE;
    let asked = trace(engine, Cache::None, features, |frontend| {
        frontend.tell(Message::config(code::SET_CONFIG, WRITEBACK, &[0]))?;
        ten_writes(frontend)?;
        frontend.tell(Message::config(code::SET_CONFIG, WRITEBACK, &[1]))?;
        frontend.write(0, 5000, &pattern(1, 4096)).context("with the cache on again")
    })?;
    expect(asked, 11, 10, 0);
    Ok(())
}

/// Virtio 1.3, section 5.2.5.2: such a driver cannot flush, so it must not start with a cache.
fn wce_without_flush_begins_without_a_cache(engine: Engine) -> Result<()> {
    let features = feature::VERSION_1 | feature::MQ | feature::CONFIG_WCE;
    let asked = trace(engine, Cache::None, features, |frontend| {
        let writeback = frontend.config(WRITEBACK, 1)?;
        ensure!(writeback == [0], "the driver sees a cache that it cannot flush");
        ten_writes(frontend)
    })?;
    expect(asked, 10, 10, 0);
    Ok(())
}

fn without_a_cache_zeroes_are_flushed(engine: Engine) -> Result<()> {
    let features = feature::VERSION_1
        | feature::MQ
        | feature::DISCARD
        | feature::WRITE_ZEROES
        | feature::FLUSH;
    for (cache, flushes) in [(Cache::Directsync, 2), (Cache::None, 0)] {
        let asked = trace(engine, cache, features, |frontend| {
            for kind in [blk::DISCARD, blk::WRITE_ZEROES] {
                let answer = frontend.request(0, kind, 0, &segment(0, 8, 0), 0)?;
                ensure!(answer.status == blk::OK, "type {kind} ended with {answer:?}");
            }
            Ok(())
        })?;
        expect(asked, 0, 0, flushes);
    }
    Ok(())
}
