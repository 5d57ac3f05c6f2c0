//! A guest that keeps the IoThread busy, beside one with a single request at a time.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::cli::{Running, bench};
use ringhaul_kit::daemon::{DaemonOptions, LIMIT};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::server::{Cache, Engine};
use rustix::process::Signal;

use crate::scene::{Scene, disks};

for_each_engine! { a_guest_that_is_always_busy }

/// Four queues of 128 requests each, over and over, from a fast separate program. The IoThread may
/// still run out of work, depending on the processors, so the simulation proves the bound on
/// starvation. The test ends the load long before its time is over.
const LOAD: &str = "--rw randread --bs 64k --iodepth 128 --numjobs 4 --runtime 600 --eta never";

/// Waits until the IoThread has run for half a second.
fn wait_busy(scene: &Scene) -> Result<()> {
    const BUSY_NS: u64 = 500_000_000;
    let (process, thread) = (scene.daemon.pid(), scene.daemon.thread_id("iothread-0")?);
    let (process, thread) = (process.as_raw_nonzero(), thread.as_raw_nonzero());
    let path = format!("/proc/{process}/task/{thread}/schedstat");
    let worked = || -> Result<u64> {
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        Ok(text.split(' ').next().context("an empty file")?.parse()?)
    };
    let (before, deadline) = (worked()?, Instant::now() + LIMIT);
    while worked()? < before + BUSY_NS {
        ensure!(Instant::now() < deadline, "the IoThread is not busy");
        std::thread::yield_now();
    }
    Ok(())
}

fn a_guest_that_is_always_busy(engine: Engine) -> Result<()> {
    let mut options = DaemonOptions { cache: Cache::Writeback, ..DaemonOptions::new(engine) };
    options.num_queues = 4;
    let mut scene = Scene::start(disks(), &options)?;
    let mut busy = Running::start(&mut bench(scene.daemon.socket(), LOAD)?)?;
    scene.daemon.wait_for_message("a front-end has connected", 3)?;
    wait_busy(&scene)?;
    scene.check_neighbours().context("beside a guest that is always busy")?;
    // The load was busy all the time.
    busy.signal(Signal::INT).context("the busy guest was done before its neighbours")?;
    let finished = busy.finish()?;
    ensure!(finished.stderr.is_empty(), "the busy guest: {}", finished.stderr);
    scene.terminate()
}
