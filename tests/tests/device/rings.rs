//! Queues that start, stop and start again; kicks and calls.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{Daemon, DaemonOptions, SECTOR_BYTES, pattern, sector_content};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::memory::{new_eventfd, take_count, wait_readable};
use ringhaul_kit::frontend::message::{Message, code};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk, check_service, feature};
use ringhaul_kit::server::Engine;

use crate::start;

for_each_engine! {
    a_kick_before_enable_is_not_lost,
    a_stopped_queue_resumes_at_its_position,
    a_queue_is_enabled_and_disabled,
    stopping_waits_for_requests,
    each_start_makes_one_call,
    a_new_call_eventfd_takes_over,
    a_driver_that_polls_is_not_called,
    calls_follow_event_idx,
    queues_on_two_iothreads,
    indexes_wrap,
    a_queue_without_a_kick_is_polled_or_refused,
}

fn attach(daemon: &Daemon, without: u64) -> Result<Frontend> {
    Frontend::attach(daemon.socket(), &Setup::default().without(without))
}

/// Puts a read of one sector into a slot's three descriptors, without making it available.
fn prepare(frontend: &Frontend, queue: usize, slot: u16, sector: u64) -> Result<()> {
    let (header, status) = frontend.put_header(queue, slot, blk::IN, sector)?;
    let data = DATA + u64::from(slot) * 512;
    let chain = [Desc::readable(header, 16), Desc::writable(data, 512), Desc::writable(status, 1)];
    frontend.rings[queue].put_chain(3 * slot, &chain);
    Ok(())
}

#[track_caller]
fn check_slot(frontend: &Frontend, slot: u16, sector: u64) -> Result<()> {
    let data = frontend.memory.read(DATA + u64::from(slot) * 512, SECTOR_BYTES)?;
    ensure!(data == sector_content(sector), "slot {slot} does not have sector {sector}");
    Ok(())
}

fn a_kick_before_enable_is_not_lost(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
    frontend.negotiate()?;
    frontend.share_memory()?;
    // Queue 0 is kicked between start and enable, queue 1 before its start.
    frontend.start_queue(0, 0)?;
    for queue in [1, 0] {
        prepare(&frontend, queue, 0, 30)?;
        frontend.rings[queue].submit(0)?;
    }
    frontend.start_queue(1, 0)?;
    assert_eq!(frontend.rings[0].used_idx(), 0, "a disabled queue was served");
    for queue in [0, 1] {
        frontend.enable_queue(queue, true)?;
        assert_eq!(frontend.rings[queue].wait_used()?.bytes, 513);
        check_slot(&frontend, 0, 30)?;
    }
    Ok(())
}

fn a_stopped_queue_resumes_at_its_position(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    for without in [0, feature::EVENT_IDX] {
        let mut frontend = attach(&daemon, without)?;
        let mut done = 0;
        for round in 0..5_u8 {
            for _ in 0..round {
                frontend.read(0, 3, 512)?;
                done += 1;
            }
            assert_eq!(frontend.stop_queue(0)?, done, "requests were taken, not counted");
            // A second stop changes nothing.
            assert_eq!(frontend.stop_queue(0)?, done);
            prepare(&frontend, 0, 0, 40 + u64::from(round))?;
            frontend.rings[0].submit(0)?;
            // Both queues are on one IoThread. After it has served queue 1, it has also had a
            // chance to serve this queue.
            frontend.read(1, 1, 512)?;
            assert_eq!(frontend.rings[0].used_idx(), done, "a stopped queue was served");
            frontend.start_queue(0, done)?;
            assert_eq!(frontend.rings[0].wait_used()?.bytes, 513);
            check_slot(&frontend, 0, 40 + u64::from(round))?;
            done += 1;
        }
    }
    Ok(())
}

fn a_queue_is_enabled_and_disabled(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = attach(&daemon, 0)?;
    for round in 0..4 {
        frontend.read(0, 3, 512)?;
        frontend.enable_queue(0, false)?;
        prepare(&frontend, 0, 0, 50 + round)?;
        frontend.rings[0].submit(0)?;
        frontend.read(1, 1, 512)?;
        assert!(frontend.rings[0].take_used().is_none(), "a disabled queue was served");
        frontend.enable_queue(0, true)?;
        assert_eq!(frontend.rings[0].wait_used()?.bytes, 513);
        check_slot(&frontend, 0, 50 + round)?;
    }
    Ok(())
}

/// The writes are so large that the disk has not finished the first when the last is popped.
fn stopping_waits_for_requests(engine: Engine) -> Result<()> {
    const WRITE_BYTES: u32 = 128 << 10;
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = attach(&daemon, 0)?;
    let data = pattern(8, usize::try_from(WRITE_BYTES)?);
    frontend.memory.write(DATA, &data)?;
    let mut done: u16 = 0;
    for _ in 0..10 {
        let base = done;
        for slot in 0..20 {
            let (header, status) =
                frontend.put_header(0, slot, blk::OUT, 4096 + 256 * u64::from(slot))?;
            frontend.rings[0].put_chain(
                3 * slot,
                &[
                    Desc::readable(header, 16),
                    Desc::readable(DATA, WRITE_BYTES),
                    Desc::writable(status, 1),
                ],
            );
            frontend.rings[0].offer(3 * slot);
        }
        frontend.rings[0].kick()?;
        done = frontend.stop_queue(0)?;
        assert_eq!(frontend.rings[0].used_idx(), done, "not all that was taken was answered");
        for _ in base..done {
            let used = frontend.rings[0].take_used();
            let slot = used.map_or(0, |used| used.head / 3);
            let sector = 4096 + 256 * u64::from(slot);
            ensure!(daemon.read_disk(sector, data.len())? == data, "slot {slot} is not written");
        }
        // Requests that were not popped are not lost.
        frontend.start_queue(0, done)?;
        while done != base + 20 {
            frontend.rings[0].wait_used()?;
            done += 1;
        }
    }
    Ok(())
}

fn each_start_makes_one_call(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    for without in [0, feature::EVENT_IDX] {
        let mut frontend = attach(&daemon, without)?;
        for queue in [0, 1] {
            wait_readable(&frontend.rings[queue].call, "call at the first start")?;
        }
        frontend.settle(1)?;
        assert_eq!(take_count(&frontend.rings[0].call), 1, "calls of an idle queue");
        for _ in 0..3 {
            let base = frontend.stop_queue(0)?;
            frontend.rings[0].disable_calls();
            frontend.start_queue(0, base)?;
            wait_readable(&frontend.rings[0].call, "call at a later start")?;
            frontend.settle(1)?;
            assert_eq!(take_count(&frontend.rings[0].call), 1, "calls of an idle queue");
        }
    }
    Ok(())
}

fn a_new_call_eventfd_takes_over(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    for without in [0, feature::EVENT_IDX] {
        let mut frontend = attach(&daemon, without)?;
        for sector in 0..4 {
            frontend.read(0, sector, 512)?;
            let new = new_eventfd()?;
            frontend.send_checked(Message::ring_fd(code::SET_VRING_CALL, 0, Some(&new)))?;
            // A call may have been lost in between, so the daemon makes one.
            wait_readable(&new, "call by the new eventfd")?;
            frontend.settle(1)?;
            take_count(&new);
            let old = std::mem::replace(&mut frontend.rings[0].call, Arc::clone(&new));
            take_count(&old);
            frontend.read(0, sector, 512)?;
            frontend.settle(1)?;
            assert_eq!(take_count(&old), 0, "the old eventfd is still called");
        }
        // Without an eventfd the driver polls. Requests are still answered.
        frontend.send_checked(Message::ring_fd(code::SET_VRING_CALL, 0, None))?;
        prepare(&frontend, 0, 0, 60)?;
        frontend.rings[0].submit(0)?;
        frontend.rings[0].poll_used(1)?;
        check_slot(&frontend, 0, 60)?;
        frontend.rings[0].take_used();
        // Restores the eventfd.
        let call = Arc::clone(&frontend.rings[0].call);
        frontend.send_checked(Message::ring_fd(code::SET_VRING_CALL, 0, Some(&call)))?;
        frontend.read(0, 1, 512)?;
    }
    Ok(())
}

fn a_driver_that_polls_is_not_called(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    for without in [0, feature::EVENT_IDX] {
        let mut frontend = attach(&daemon, without)?;
        frontend.read(0, 1, 512)?;
        for round in 0..20 {
            frontend.rings[0].disable_calls();
            frontend.settle(1)?;
            take_count(&frontend.rings[0].call);
            let slots = 1 + round % 8;
            for slot in 0..slots {
                prepare(&frontend, 0, slot, 70 + u64::from(slot))?;
                frontend.rings[0].offer(3 * slot);
            }
            frontend.rings[0].kick()?;
            frontend.rings[0].poll_used(slots)?;
            // The IoThread carries out this command after its notify phase.
            frontend.settle(1)?;
            assert_eq!(take_count(&frontend.rings[0].call), 0, "a call that was not wanted");
            for slot in 0..slots {
                frontend.rings[0].take_used();
                check_slot(&frontend, slot, 70 + u64::from(slot))?;
            }
        }
        // Calls are enabled again, and come.
        frontend.read(0, 1, 512)?;
    }
    Ok(())
}

fn calls_follow_event_idx(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = attach(&daemon, 0)?;
    frontend.read(0, 1, 512)?;
    for wait_for in 1..10_u16 {
        // The call comes with the `wait_for`-th used element from here, and not before.
        let first = frontend.rings[0].next_used;
        frontend.rings[0].put_used_event(first.wrapping_add(wait_for - 1));
        frontend.settle(1)?;
        take_count(&frontend.rings[0].call);
        for done in 1..=wait_for {
            prepare(&frontend, 0, 0, 80)?;
            frontend.rings[0].submit(0)?;
            frontend.rings[0].poll_used(done)?;
            frontend.settle(1)?;
            let calls = take_count(&frontend.rings[0].call);
            assert_eq!(calls, u64::from(done == wait_for), "{done} of {wait_for} requests");
        }
        // The event has passed: no further calls.
        prepare(&frontend, 0, 0, 80)?;
        frontend.rings[0].submit(0)?;
        frontend.rings[0].poll_used(wait_for + 1)?;
        frontend.settle(1)?;
        assert_eq!(take_count(&frontend.rings[0].call), 0, "the event lies behind");
        while frontend.rings[0].take_used().is_some() {}
    }
    Ok(())
}

fn queues_on_two_iothreads(engine: Engine) -> Result<()> {
    let mut options = DaemonOptions::new(engine).with("--iothreads", "2");
    options.num_queues = 4;
    let daemon = start(&options)?;
    let names = daemon.threads()?;
    for name in ["iothread-0", "iothread-1"] {
        ensure!(names.iter().any(|other| other == name), "there is no {name} in {names:?}");
    }
    let mut frontend = Frontend::attach(daemon.socket(), &Setup { queues: 4, ..Setup::default() })?;
    for round in 0..50 {
        // All queues read at once. Then each queue reads the data that its predecessor wrote.
        for queue in 0..4 {
            prepare(&frontend, queue, u16::try_from(queue)?, 90 + u64::try_from(queue)?)?;
            frontend.rings[queue].submit(u16::try_from(3 * queue)?)?;
        }
        for queue in 0..4 {
            assert_eq!(frontend.rings[queue].wait_used()?.bytes, 513);
            check_slot(&frontend, u16::try_from(queue)?, 90 + u64::try_from(queue)?)?;
        }
        let data = pattern(round, 4096);
        for queue in 0..4 {
            let sector = 5000 + 8 * u64::try_from(queue)?;
            frontend.write(queue, sector, &data)?;
            assert!(frontend.read((queue + 1) % 4, sector, data.len())? == data);
        }
    }
    // A stopped queue delays no other queue, on either IoThread.
    frontend.stop_queue(2)?;
    for queue in [0, 1, 3] {
        frontend.read(queue, 1, 512)?;
    }
    Ok(())
}

fn indexes_wrap(engine: Engine) -> Result<()> {
    const BATCH: u16 = 20;
    let daemon = start(&DaemonOptions::new(engine).with("--serial", "wrap"))?;
    for without in [0, feature::EVENT_IDX] {
        let mut frontend = attach(&daemon, without)?;
        for slot in 0..BATCH {
            let (header, status) = frontend.put_header(0, slot, blk::GET_ID, 0)?;
            frontend.rings[0].put_chain(
                3 * slot,
                &[
                    Desc::readable(header, 16),
                    Desc::writable(DATA + 32 * u64::from(slot), 20),
                    Desc::writable(status, 1),
                ],
            );
        }
        let mut answered: u32 = 0;
        while answered < 70_000 {
            for slot in 0..BATCH {
                frontend.rings[0].offer(3 * slot);
            }
            frontend.rings[0].kick()?;
            let mut seen = [false; BATCH as usize];
            for _ in 0..BATCH {
                let used = frontend.rings[0].wait_used()?;
                ensure!(used.bytes == 21 && used.head % 3 == 0, "{used:?}");
                let slot = usize::try_from(used.head / 3)?;
                ensure!(!std::mem::replace(&mut seen[slot], true), "{used:?} twice");
            }
            answered += u32::from(BATCH);
        }
        // Data is still right, and the base has wrapped like the indexes.
        assert!(frontend.read(0, 2, 512)? == sector_content(2));
        assert_eq!(u32::from(frontend.stop_queue(0)?), (answered + 1) % 65_536);
    }
    Ok(())
}

/// Without a descriptor, SET_VRING_KICK asks the device to poll. The device must poll or refuse.
fn a_queue_without_a_kick_is_polled_or_refused(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = attach(&daemon, 0)?;
    let base = frontend.stop_queue(1)?;
    frontend.start_queue(1, base)?;
    if frontend.send_checked(Message::ring_fd(code::SET_VRING_KICK, 1, None)).is_ok() {
        // After queue 0 was served, the work of the start is over.
        frontend.read(0, 1, 512)?;
        for sector in 0..3 {
            prepare(&frontend, 1, 0, sector)?;
            frontend.rings[1].offer(0);
            frontend.rings[1].poll_used(1).context("the queue is not polled")?;
            frontend.rings[1].take_used();
            check_slot(&frontend, 0, sector)?;
        }
    }
    drop(frontend);
    check_service(&mut daemon)
}
