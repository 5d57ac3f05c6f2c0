//! A guest that keeps the IoThread busy, beside one with a request at a time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tests::daemon::DaemonOptions;
use ringhaul_tests::for_each_engine;
use ringhaul_tests::frontend::ring::Desc;
use ringhaul_tests::frontend::{DATA, Frontend, SCRATCH, Setup, blk};
use ringhaul_tests::guest::{Cache, Engine};

use crate::scene::{OPERATIONS, Scene, disks};

for_each_engine! { a_guest_that_is_always_busy }

const QUEUES: u16 = 4;
const DEPTH: u16 = 128;
const READ_BYTES: u32 = 64 << 10;

/// Requests of the neighbours for each of their operations, at most: a write, two reads, a flush.
const REQUESTS_OF_OPERATION: u64 = 4;

/// Requests of the busy guest that may be answered for one of a neighbour: all that it has in the
/// device, eight times over. Without a bound it is a hundred thousand and more.
const ANSWERED_FOR_EACH: u64 = 8 * (QUEUES as u64) * (DEPTH as u64);

/// Fills all queues, and puts each request in again when it is answered.
fn keep_busy(guest: &mut Frontend, stop: &AtomicBool, answered: &AtomicU64) -> Result<()> {
    for queue in 0..guest.rings.len() {
        for slot in 0..DEPTH {
            let sector = u64::from(slot % 16) * u64::from(READ_BYTES) / 512;
            let (header, status) = guest.put_header(queue, slot, blk::IN, sector)?;
            let data = Desc::writable(DATA, READ_BYTES);
            let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
            let table = SCRATCH + (queue as u64 * u64::from(DEPTH) + u64::from(slot)) * 48;
            let ring = &mut guest.rings[queue];
            ring.put_indirect(slot, table, &chain)?;
            ring.offer(slot)?;
        }
        guest.rings[queue].kick()?;
    }
    while !stop.load(Ordering::Relaxed) {
        for ring in &mut guest.rings {
            let mut taken = 0;
            while let Some(used) = ring.take_used()? {
                ring.offer(u16::try_from(used.head)?)?;
                taken += 1;
            }
            if taken > 0 {
                ring.want_no_calls()?;
                ring.kick()?;
                answered.fetch_add(taken, Ordering::Relaxed);
            }
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn a_guest_that_is_always_busy(engine: Engine) -> Result<()> {
    let mut options = DaemonOptions { cache: Cache::Writeback, ..DaemonOptions::new(engine) };
    options.num_queues = QUEUES;
    let mut scene = Scene::start(disks(), &options)?;
    let setup = Setup { queues: QUEUES, ..Setup::default() }.queue_size(DEPTH);
    let mut guest = Frontend::attach(scene.daemon.socket(), &setup)?;
    let (stop, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| keep_busy(&mut guest, &stop, &answered));
        while answered.load(Ordering::Relaxed) < ANSWERED_FOR_EACH && !busy.is_finished() {
            std::thread::yield_now();
        }
        let before = answered.load(Ordering::Relaxed);
        let result = scene.check_neighbours().context("beside a guest that is always busy");
        let meanwhile = answered.load(Ordering::Relaxed) - before;
        stop.store(true, Ordering::Relaxed);
        let Ok(busy) = busy.join() else { bail!("the busy guest has panicked") };
        busy.context("the busy guest")?;
        result?;
        let requests = 2 * OPERATIONS as u64 * REQUESTS_OF_OPERATION;
        eprintln!("{meanwhile} requests were answered while {requests} of the neighbours were");
        ensure!(
            meanwhile <= requests * ANSWERED_FOR_EACH,
            "{meanwhile} requests of the busy guest for {requests} of its neighbours"
        );
        Ok(())
    })?;
    drop(guest);
    scene.terminate()
}
