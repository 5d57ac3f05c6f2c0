//! Front-ends that disconnect at any time, and leave nothing behind.

use std::collections::HashSet;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{DaemonOptions, SECTOR_BYTES, pattern};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::message::{HEADER_BYTES, Message, code};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{BORDER, Frontend, Setup, blk, check_service};
use ringhaul_kit::server::Engine;

use crate::start;

for_each_engine! {
    front_ends_that_vanish_at_every_step,
    front_ends_that_vanish_with_requests,
    two_hundred_front_ends_leave_nothing,
    the_daemon_ends_while_requests_run,
}

const DATA_BYTES: u32 = 128 << 10;

/// Kicks the device for 20 large requests on each queue. Returns the addresses of their status
/// bytes.
fn submit_many(frontend: &mut Frontend, kind: u32) -> Result<[Vec<u64>; 2]> {
    let mut statuses = [Vec::new(), Vec::new()];
    for queue in [0, 1] {
        for slot in 0..20 {
            let sector = 8192 + 256 * u64::from(slot);
            let (header, status) = frontend.put_header(queue, slot, kind, sector)?;
            let data = match kind {
                blk::OUT => Desc::readable(BORDER, DATA_BYTES),
                _ => Desc::writable(BORDER, DATA_BYTES),
            };
            let chain = [Desc::readable(header, 16), data, Desc::writable(status, 1)];
            frontend.rings[queue].put_chain(3 * slot, &chain);
            frontend.rings[queue].offer(3 * slot);
            statuses[queue].push(status);
        }
        frontend.rings[queue].kick()?;
    }
    Ok(statuses)
}

/// Each step of a session may be the last one.
fn front_ends_that_vanish_at_every_step(engine: Engine) -> Result<()> {
    type Step = fn(&mut Frontend) -> Result<()>;
    let steps: [(&str, Step); 12] = [
        ("connect", |_| Ok(())),
        ("negotiate", Frontend::negotiate),
        ("share memory", Frontend::share_memory),
        ("start queue 0", |frontend| frontend.start_queue(0, 0)),
        ("enable queue 0", |frontend| frontend.enable_queue(0, true)),
        ("use queue 0", |frontend| frontend.read(0, 0, 512).map(|_| ())),
        ("start queue 1", |frontend| frontend.start_queue(1, 0)),
        ("enable queue 1", |frontend| frontend.enable_queue(1, true)),
        ("requests", |frontend| submit_many(frontend, blk::IN).map(|_| ())),
        ("disable queue 0", |frontend| frontend.enable_queue(0, false)),
        ("stop queue 0", |frontend| frontend.stop_queue(0).map(|_| ())),
        ("stop queue 1", |frontend| frontend.stop_queue(1).map(|_| ())),
    ];
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let descriptors = daemon.descriptors()?;
    for last in 0..steps.len() {
        let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
        for (what, step) in &steps[..=last] {
            step(&mut frontend).context(*what)?;
        }
        drop(frontend);
        check_service(&mut daemon).with_context(|| format!("after {}", steps[last].0))?;
    }
    daemon.wait_released(&descriptors)
}

fn front_ends_that_vanish_with_requests(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let descriptors = daemon.descriptors()?;
    let data = pattern(3, usize::try_from(DATA_BYTES)?);
    for round in 0..10 {
        for kind in [blk::IN, blk::OUT] {
            let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
            frontend.memory.write(BORDER, &data)?;
            submit_many(&mut frontend, kind)?;
            // Some disconnect as soon as one request is answered, before all are.
            if round % 2 == 0 {
                frontend.rings[0].wait_used()?;
            }
            let memory = std::sync::Arc::clone(&frontend.memory);
            drop(frontend);
            daemon.wait_released(&descriptors)?;
            // The daemon no longer touches released memory.
            let before = memory.read(BORDER, data.len())?;
            check_service(&mut daemon)?;
            ensure!(memory.read(BORDER, data.len())? == before);
        }
    }
    // Requests that were taken were carried out.
    ensure!(daemon.read_disk(8192, SECTOR_BYTES)? == data[..SECTOR_BYTES]);
    Ok(())
}

fn two_hundred_front_ends_leave_nothing(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let descriptors = daemon.descriptors()?;
    check_service(&mut daemon)?;
    let threads = daemon.threads()?;
    for round in 0..200 {
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        if round % 3 == 0 {
            submit_many(&mut frontend, blk::IN)?;
        }
        if round % 5 == 0 {
            frontend.stop_queue(0)?;
        }
    }
    daemon.wait_released(&descriptors)?;
    let now = daemon.threads()?;
    ensure!(now.len() <= threads.len(), "{now:?} instead of {threads:?}");
    check_service(&mut daemon)
}

/// After SIGTERM all taken requests are answered, and the end is clean.
fn the_daemon_ends_while_requests_run(engine: Engine) -> Result<()> {
    for kind in [blk::IN, blk::OUT] {
        let daemon = start(&DaemonOptions::new(engine))?;
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        let submitted = submit_many(&mut frontend, kind)?;
        frontend.rings[0].poll_used(1)?;
        daemon.terminate()?;
        frontend.channel.wait_closed()?;
        // A request has either a visible answer or none at all.
        for (queue, statuses) in submitted.iter().enumerate() {
            let mut answered = HashSet::new();
            while let Some(used) = frontend.rings[queue].take_used() {
                ensure!(answered.insert(used.head / 3), "{used:?} was answered twice");
            }
            for (slot, &addr) in (0..).zip(statuses) {
                let expected = if answered.contains(&slot) { blk::OK } else { blk::PENDING };
                let status = frontend.memory.read(addr, 1)?[0];
                ensure!(status == expected, "status {status} in slot {slot} of queue {queue}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_daemon_ends_while_a_front_end_dawdles() -> Result<()> {
    let message = Message::number(code::SET_FEATURES, 0).bytes();
    for sent in [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1] {
        let daemon = start(&DaemonOptions::new(Engine::Aio))?;
        let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
        frontend.negotiate()?;
        frontend.channel.send_bytes(&message[..sent], &[])?;
        daemon.terminate().with_context(|| format!("after {sent} bytes of a message"))?;
    }
    Ok(())
}

/// A front-end that sends requests and reads no replies fills the socket until the daemon waits for
/// it.
#[test]
fn a_front_end_that_does_not_read() -> Result<()> {
    for ends in [false, true] {
        let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
        let stream = UnixStream::connect(daemon.socket())?;
        stream.set_nonblocking(true)?;
        let question = Message::new(code::GET_FEATURES, Vec::new()).bytes();
        // Both directions are full when no byte can be sent, even after the daemon had a chance to
        // make room.
        let mut refused = 0;
        while refused < 1000 {
            match std::io::Write::write(&mut &stream, &question) {
                Ok(_) => refused = 0,
                Err(_) => {
                    refused += 1;
                    std::thread::yield_now();
                }
            }
        }
        if ends {
            daemon.terminate()?;
        } else {
            drop(stream);
            check_service(&mut daemon)?;
        }
    }
    Ok(())
}

#[test]
fn a_front_end_that_stops_sending() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    for direction in [Shutdown::Write, Shutdown::Read, Shutdown::Both] {
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        submit_many(&mut frontend, blk::IN)?;
        UnixStream::from(frontend.channel.descriptor()?).shutdown(direction)?;
        if direction == Shutdown::Read {
            // The request is carried out, and its reply cannot arrive.
            let _ = frontend.stop_queue(0);
        }
        // The connection is still open on this side.
        check_service(&mut daemon).with_context(|| format!("after {direction:?}"))?;
        drop(frontend);
    }
    daemon.wait_released(&descriptors)
}

#[test]
fn front_ends_that_wait_for_their_turn() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    let mut first = Frontend::attach(daemon.socket(), &Setup::default())?;
    // Some waiting front-ends are gone when their turn comes, some in the middle of a message.
    let message = Message::new(code::GET_FEATURES, Vec::new());
    let mut waiting = Vec::new();
    for index in 0..20 {
        let mut frontend = Frontend::connect(daemon.socket(), &Setup::default())?;
        match index % 4 {
            0 => drop(frontend),
            1 => frontend.channel.send_bytes(&message.bytes()[..5], &[])?,
            2 => frontend.channel.send(&message)?,
            _ => waiting.push(frontend),
        }
    }
    first.read(0, 0, 512)?;
    daemon.wait_for_message("another front-end has connected and waits", 1)?;
    drop(first);
    for mut frontend in waiting {
        frontend.negotiate()?;
        frontend.share_memory()?;
        frontend.start_queue(1, 0)?;
        frontend.enable_queue(1, true)?;
        frontend.read(1, 0, 512)?;
    }
    check_service(&mut daemon)?;
    daemon.wait_released(&descriptors)
}
