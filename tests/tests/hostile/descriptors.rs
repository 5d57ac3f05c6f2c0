//! Descriptors of wrong kinds, and wrong numbers of descriptors in a message.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::DaemonOptions;
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::memory::{memfd, new_eventfd, take_count};
use ringhaul_kit::frontend::message::{HEADER_BYTES, Message, NO_FD, code};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, Setup, blk, check_service};
use ringhaul_kit::rest::wait_for_rest;
use ringhaul_kit::server::Engine;
use rustix::event::epoll;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::{start, with_attached, with_negotiated};

for_each_engine! {
    anything_as_a_kick,
    anything_as_a_call,
    anything_as_an_err,
    a_call_that_is_full_and_may_block,
    a_call_that_may_block_after_a_rest,
    an_err_that_is_full_and_may_block,
    an_err_that_is_replaced,
}

/// The eventfd among these descriptors.
const EVENTFD: &str = "a full eventfd";

/// The kinds beside eventfds to which calls are relayed.
const RELAYED: [&str; 5] = [
    "the end of a pipe to write",
    "a pipe that nobody reads",
    "a full pipe",
    "a socket",
    "a socket without a peer",
];

/// A descriptor of any kind, its name, and the descriptors that must stay open beside it.
struct Odd {
    what: &'static str,
    fd: Arc<OwnedFd>,
    _others: Vec<OwnedFd>,
}

fn odd(what: &'static str, fd: impl Into<OwnedFd>, others: Vec<OwnedFd>) -> Odd {
    Odd { what, fd: Arc::new(fd.into()), _others: others }
}

/// A descriptor of each kind.
fn odd_descriptors() -> Result<Vec<Odd>> {
    let pipe = || pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).context("making a pipe");
    let (readable, writer) = pipe()?;
    let (reader, writable) = pipe()?;
    let (_, broken) = pipe()?;
    let (full_reader, full) = pipe()?;
    while rustix::io::write(&full, &[0; 4096]).is_ok() {}
    let (socket, peer) = UnixStream::pair()?;
    let (lonely, _) = UnixStream::pair()?;
    let full_eventfd = new_eventfd()?;
    rustix::io::write(&full_eventfd, &(u64::MAX - 1).to_ne_bytes())?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let device = |path: &str| {
        File::options().read(true).write(true).open(path).with_context(|| format!("opening {path}"))
    };
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    Ok(vec![
        odd("a file", tempfile::tempfile_in(scratch)?, Vec::new()),
        odd("a file open for reading", File::open("/proc/self/exe")?, Vec::new()),
        odd("a folder", File::open(scratch)?, Vec::new()),
        odd("/dev/null", device("/dev/null")?, Vec::new()),
        odd("/dev/zero", device("/dev/zero")?, Vec::new()),
        odd("/dev/full", device("/dev/full")?, Vec::new()),
        odd("a memfd", memfd(4096)?, Vec::new()),
        odd("the end of a pipe to read", readable, vec![writer]),
        odd("the end of a pipe to write", writable, vec![reader]),
        odd("a pipe that nobody reads", broken, Vec::new()),
        odd("a full pipe", full, vec![full_reader]),
        odd("a socket", socket, vec![peer.into()]),
        odd("a socket without a peer", lonely, Vec::new()),
        odd("an epoll instance", epoll, Vec::new()),
        odd(EVENTFD, full_eventfd.try_clone()?, Vec::new()),
    ])
}

/// Checks that the front-end's other queue is served.
fn check_good_queue(frontend: &mut Frontend) -> Result<()> {
    frontend.read(0, 0, 512).context("the other queue does not go on")?;
    Ok(())
}

/// Makes a read available on the bad queue.
fn offer_read(frontend: &mut Frontend) -> Result<()> {
    let (header, status) = frontend.put_header(1, 0, blk::IN, 0)?;
    let chain = [Desc::readable(header, 16), Desc::writable(DATA, 512), Desc::writable(status, 1)];
    frontend.rings[1].put_chain(0, &chain);
    frontend.rings[1].submit(0)
}

fn anything_as_a_kick(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let descriptors = daemon.descriptors()?;
    for Odd { what, fd, .. } in odd_descriptors()? {
        with_attached(&mut daemon, &Setup::default(), what, |frontend| {
            let refused = frontend
                .send_checked(Message::ring_fd(code::SET_VRING_KICK, 1, Some(&fd)))
                .is_err();
            if refused {
                return Ok(());
            }
            check_good_queue(frontend)?;
            // The queue stops, and starts again with a valid kick.
            let base = frontend.stop_queue(1)?;
            frontend.start_queue(1, base)?;
            frontend.read(1, 0, 512)?;
            check_good_queue(frontend)
        })?;
    }
    daemon.wait_released(&descriptors)
}

fn anything_as_a_call(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let descriptors = daemon.descriptors()?;
    for Odd { what, fd, .. } in odd_descriptors()? {
        with_attached(&mut daemon, &Setup::default(), what, |frontend| {
            let taken = frontend.send_checked(Message::ring_fd(code::SET_VRING_CALL, 1, Some(&fd)));
            let should_be = what == EVENTFD || RELAYED.contains(&what);
            ensure!(taken.is_ok() == should_be, "whether it is taken as a call: {taken:?}");
            if taken.is_err() {
                return Ok(());
            }
            for _ in 0..3 {
                offer_read(frontend)?;
                // The requests are answered, although the driver gets no call.
                frontend.rings[1].poll_used(1)?;
                frontend.rings[1].take_used();
            }
            check_good_queue(frontend)?;
            frontend.stop_queue(1)?;
            check_good_queue(frontend)
        })?;
    }
    daemon.wait_released(&descriptors)
}

fn anything_as_an_err(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let descriptors = daemon.descriptors()?;
    for Odd { what, fd, .. } in odd_descriptors()? {
        with_attached(&mut daemon, &Setup::default(), what, |frontend| {
            let taken = frontend.send_checked(Message::ring_fd(code::SET_VRING_ERR, 1, Some(&fd)));
            ensure!(taken.is_ok() == (what == EVENTFD), "whether it is taken as an err");
            if taken.is_err() {
                return Ok(());
            }
            frontend.rings[1].put_avail_idx(0x8000);
            frontend.rings[1].kick()?;
            check_good_queue(frontend)?;
            frontend.stop_queue(1)?;
            check_good_queue(frontend)
        })?;
    }
    daemon.wait_released(&descriptors)
}

/// Makes the descriptor block again, after the daemon made it non-blocking, and fills its counter.
/// A wait for it would never end: a process that has ended empties no counter.
fn make_block(fd: &OwnedFd) -> Result<()> {
    take_count(fd);
    fcntl_setfl(fd, fcntl_getfl(fd)? - OFlags::NONBLOCK)?;
    rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes())?;
    Ok(())
}

fn a_call_that_is_full_and_may_block(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    // Both queues are on one IoThread, which each of these calls would block.
    for _ in 0..3 {
        let call = new_eventfd()?;
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        frontend.send_checked(Message::ring_fd(code::SET_VRING_CALL, 1, Some(&call)))?;
        frontend.settle(0)?;
        make_block(&call)?;
        for _ in 0..3 {
            frontend.rings[1].enable_calls();
            offer_read(&mut frontend)?;
            frontend.rings[1].poll_used(1)?;
            frontend.rings[1].take_used();
            check_good_queue(&mut frontend)?;
        }
        frontend.stop_queue(1)?;
        check_good_queue(&mut frontend)?;
        drop((frontend, call));
        check_service(&mut daemon)?;
    }
    // Only the first call could block.
    daemon.wait_for_exactly("a call did not return", 1)?;
    // Nor does the first blocked call keep a daemon from ending.
    let daemon = start(&DaemonOptions::new(engine))?;
    let call = new_eventfd()?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    make_block(&call)?;
    frontend.send_checked(Message::ring_fd(code::SET_VRING_CALL, 1, Some(&call)))?;
    offer_read(&mut frontend)?;
    frontend.rings[1].poll_used(1)?;
    daemon.terminate()?;
    Ok(())
}

/// The watch of calls rests while a guest is idle, and returns with its next request.
fn a_call_that_may_block_after_a_rest(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let call = new_eventfd()?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    frontend.send_checked(Message::ring_fd(code::SET_VRING_CALL, 1, Some(&call)))?;
    frontend.settle(0)?;
    make_block(&call)?;
    wait_for_rest(daemon.pid(), "ringhaul-watch")?;
    frontend.rings[1].enable_calls();
    offer_read(&mut frontend)?;
    frontend.rings[1].poll_used(1)?;
    check_good_queue(&mut frontend)?;
    daemon.wait_for_exactly("a call did not return", 1)?;
    drop(frontend);
    daemon.terminate()?;
    Ok(())
}

fn an_err_that_is_full_and_may_block(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    let err = Arc::clone(&frontend.rings[1].err);
    make_block(&err)?;
    frontend.rings[1].put_avail_idx(0x8000);
    frontend.rings[1].kick()?;
    check_good_queue(&mut frontend)?;
    frontend.stop_queue(1)?;
    drop((frontend, err));
    check_service(&mut daemon)
}

/// The err eventfd is replaced while the queue runs, or set after none.
fn an_err_that_is_replaced(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    for round in 0..2 {
        let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
        frontend.rings[1].err = new_eventfd()?;
        let new = Arc::clone(&frontend.rings[1].err);
        let set = |frontend: &mut Frontend, fd| {
            frontend.send_checked(Message::ring_fd(code::SET_VRING_ERR, 1, fd))
        };
        if round == 1 {
            set(&mut frontend, None)?;
        }
        set(&mut frontend, Some(&new))?;
        frontend.rings[1].put_avail_idx(0x8000);
        frontend.rings[1].kick()?;
        frontend.rings[1].wait_err()?;
        check_good_queue(&mut frontend)?;
    }
    check_service(&mut daemon)
}

/// The number of descriptors in a message for which the daemon has room.
const ROOM: usize = 32;

/// Sends a message that must not be carried out. A message with more than [`ROOM`] descriptors may
/// be lost instead of refused.
fn refused(frontend: &mut Frontend, message: Message) -> Result<()> {
    if message.fds.len() > ROOM {
        return frontend.channel.send(&message);
    }
    let reply = frontend.channel.exchange(&message.needs_reply())?;
    ensure!(reply.is_none_or(|reply| reply.number().is_ok_and(|status| status != 0)));
    Ok(())
}

#[test]
fn more_descriptors_than_a_message_has() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    let many: Vec<Arc<OwnedFd>> = (0..253).map(|_| new_eventfd()).collect::<Result<_>>()?;
    for count in [2, 3, 8, 31, 32, 33, 64, 253] {
        for request in [code::SET_VRING_KICK, code::SET_VRING_CALL, code::SET_VRING_ERR] {
            let what = format!("request {request} with {count} descriptors");
            with_negotiated(&mut daemon, &what, |frontend| {
                let mut message = Message::number(request, 0);
                message.fds = many[..count].to_vec();
                refused(frontend, message)
            })?;
        }
        for request in [code::GET_FEATURES, code::SET_OWNER, code::GET_QUEUE_NUM, 63, 0] {
            let what = format!("request {request} with {count} descriptors");
            with_negotiated(&mut daemon, &what, |frontend| {
                let mut message = Message::new(request, Vec::new());
                message.fds = many[..count].to_vec();
                refused(frontend, message)
            })?;
        }
        let what = format!("regions with {count} descriptors");
        with_negotiated(&mut daemon, &what, |frontend| {
            let memory = Arc::clone(&frontend.memory);
            let mut message = Message::add_region(&memory.regions[0]);
            message.fds = many[..count].to_vec();
            refused(frontend, message)
        })?;
    }
    daemon.wait_released(&descriptors)
}

#[test]
fn fewer_descriptors_than_a_message_has() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    for request in [code::SET_VRING_KICK, code::SET_VRING_CALL, code::SET_VRING_ERR] {
        with_negotiated(&mut daemon, "a descriptor is announced and is not there", |frontend| {
            frontend.expect_refused(Message::number(request, 0))
        })?;
        with_negotiated(&mut daemon, "none is announced and one is there", |frontend| {
            let fd = Arc::clone(&frontend.rings[0].kick);
            frontend.expect_refused(Message::number(request, NO_FD).with_fd(&fd))
        })?;
    }
    with_negotiated(&mut daemon, "a region without a descriptor", |frontend| {
        let memory = Arc::clone(&frontend.memory);
        let mut message = Message::add_region(&memory.regions[0]);
        message.fds.clear();
        frontend.expect_refused(message)
    })?;
    for count in [0, 1, 3, 33] {
        let what = format!("a table of two regions with {count} descriptors");
        with_negotiated(&mut daemon, &what, |frontend| {
            let memory = Arc::clone(&frontend.memory);
            let mut message = Message::memory_table(&memory.regions.iter().collect::<Vec<_>>());
            message.fds = vec![Arc::clone(&memory.regions[0].file); count];
            frontend.expect_refused(message)
        })?;
    }
    daemon.wait_released(&descriptors)
}

/// Descriptors belong to the header. Descriptors that arrive later are neither used nor kept.
#[test]
fn descriptors_in_the_middle_of_a_message() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    for cut in [1, 4, 11, HEADER_BYTES, 13, 19] {
        with_negotiated(&mut daemon, &format!("after {cut} bytes"), |frontend| {
            let fd = Arc::clone(&frontend.rings[0].kick);
            let bytes = Message::number(code::SET_VRING_KICK, 0).needs_reply().bytes();
            frontend.channel.send_bytes(&bytes[..cut], &[])?;
            // The connection may already be closed.
            if frontend.channel.send_bytes(&bytes[cut..], &[fd]).is_ok() {
                let reply = frontend.channel.receive()?;
                let refused = reply.is_none_or(|r| r.number().is_ok_and(|status| status != 0));
                ensure!(refused || cut < HEADER_BYTES, "the descriptor was taken");
            }
            Ok(())
        })?;
    }
    daemon.wait_released(&descriptors)
}

/// The daemon's own calls would arrive at its own socket.
#[test]
fn the_connection_itself_as_a_call() -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(Engine::Aio))?;
    let descriptors = daemon.descriptors()?;
    for request in [code::SET_VRING_CALL, code::SET_VRING_ERR] {
        with_attached(&mut daemon, &Setup::default(), "itself", |frontend| {
            let own = Arc::new(frontend.channel.descriptor()?);
            frontend.expect_refused(Message::ring_fd(request, 1, Some(&own)))
        })?;
    }
    daemon.wait_released(&descriptors)
}
