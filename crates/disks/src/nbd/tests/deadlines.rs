//! Requests beyond their deadline, and requests beside them.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blockio::disk::DiskState;
use blockio::driver::Driver as _;
use blockio::testing::remote_ops;
use blockio::{Disk, IoThread};

use super::super::SILENCE;
use super::super::connect::connect;
use super::super::connection_task::Handle;
use super::super::disk::NbdDisk;
use super::super::options::NbdOptions;
use super::super::shared::SharedExport;
use super::scripted::{FLUSH, READ, Server, WRITE};
use super::{DEADLINE, FLAGS, MIB, Running, filled, new_thread, open, wait_a_turn};

/// A busy machine may delay an answer beyond the deadline. The request is then made again.
pub(super) fn in_time(thread: &IoThread, start: impl Fn() -> Running) -> Option<i32> {
    let mut ends = (0..20).map(|_| start().end(thread));
    ends.find(|error| *error != Some(libc::ETIMEDOUT)).unwrap_or(Some(libc::ETIMEDOUT))
}

/// Ends a write of this byte that has waited for the end of an earlier one, like [`in_time`].
pub(super) fn end_in_time(
    thread: &IoThread,
    disk: &Rc<Disk>,
    write: Running,
    byte: u8,
) -> Option<i32> {
    match write.end(thread) {
        Some(libc::ETIMEDOUT) => in_time(thread, || Running::write(thread, disk, 0, byte)),
        ended => ended,
    }
}

fn read_in_time(thread: &IoThread, disk: &Rc<Disk>, offset: u64) -> u8 {
    let memory = filled(0xee, 4096);
    let read = || {
        let (disk, memory) = (Rc::clone(disk), memory.duplicate());
        Running::start(thread.io(), async move {
            let read = disk.read(offset, memory).await;
            read.map_err(|unfinished| unfinished.error().raw_os_error())
        })
    };
    assert_eq!(in_time(thread, read), None);
    memory.to_vec()[4095]
}

/// A write that has failed at its deadline may still be carried out: later writes to the same place
/// are not sent before that.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_overdue_write_fails_and_never_lands_after_a_newer_one() {
    let server = Server::start(MIB, FLAGS);
    let options = NbdOptions { deadline: Some(DEADLINE), connections: 2, ..server.options() };
    let (thread, source) = (new_thread(), open(options));
    let disk = Rc::new(source.attach(thread.io()));
    for command in [READ, WRITE] {
        server.change(|state| state.holds = (command, 1));
        let request = Running::start_one(&thread, &disk, command);
        assert_eq!(request.end(&thread), Some(libc::ETIMEDOUT), "another connection has taken it");
        assert_eq!(remote_ops(thread.io()), 0, "an op that has failed");
    }
    assert!(source.hand_over().may_still_change(), "another process would not know");
    let newer = Running::write(&thread, &disk, 0, 2);
    let beside = || Running::write(&thread, &disk, 4096, 3);
    assert_eq!(in_time(&thread, beside), None, "other places can be written to");
    let bytes = [0, 4096].map(|offset| read_in_time(&thread, &disk, offset));
    assert_eq!(bytes, [0, 3]);
    server.answer_held();
    assert_eq!(end_in_time(&thread, &disk, newer, 2), None);
    assert_eq!(server.state().content[0], 2, "the old write came last");
    assert!(!source.hand_over().may_still_change());
    drop((disk, source));
}

/// A long read was abandoned with the write. Its data has no place any more.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_answer_to_an_overdue_read_goes_nowhere() {
    let server = Server::start(MIB, FLAGS);
    let options = NbdOptions { deadline: Some(DEADLINE), ..server.options() };
    let (thread, source) = (new_thread(), open(options));
    let disk = Rc::new(source.attach(thread.io()));
    // The server takes the write, and nothing more.
    server.change(|state| {
        state.content[..65_536].fill(1);
        (state.holds, state.stalls) = ((WRITE, 1), true);
    });
    let write = Running::write(&thread, &disk, MIB as u64 / 2, 2);
    let memory = filled(0xee, 65_536);
    let (view, of_disk) = (memory.duplicate(), Rc::clone(&disk));
    let read = Running::start(thread.io(), async move {
        let read = of_disk.read(0, memory).await;
        read.map_err(|unfinished| unfinished.error().raw_os_error())
    });
    let ends = (write.end(&thread), read.end(&thread));
    assert_eq!(ends, (Some(libc::ETIMEDOUT), Some(libc::ETIMEDOUT)));
    server.change(|state| state.stalls = false);
    while !server.state().seen.iter().any(|seen| seen.0 == READ) {
        wait_a_turn(&thread);
    }
    server.answer_held();
    while source.hand_over().may_still_change() {
        wait_a_turn(&thread);
    }
    assert!(view.to_vec() == [0xee; 65_536], "memory of a request that has ended");
    assert_eq!(read_in_time(&thread, &disk, 0), 1);
}

/// No answer is due on the only connection, and nothing else makes it check for the deadline.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_write_that_is_held_back_has_its_deadline_beside_an_idle_connection() {
    let server = Server::start(MIB, FLAGS);
    let options = NbdOptions { deadline: Some(DEADLINE), ..server.options() };
    let (connected, _) = connect(&options).unwrap();
    let thread = new_thread();
    let shared = Arc::new(SharedExport::new(options, false, SILENCE, connected));
    let handle = Arc::new(Handle { shared: Arc::clone(&shared) });
    let disk = Rc::new(NbdDisk::new(&handle, thread.io()));
    while shared.remark() != "connections: 1" {
        wait_a_turn(&thread);
    }
    shared.held.add(vec![0..2048, 2048..4096]);
    let of_disk = Rc::clone(&disk);
    let write = Running::start(thread.io(), async move {
        let written = of_disk.write(0, filled(1, 4096), false).await;
        written.map_err(|unfinished| unfinished.error().raw_os_error())
    });
    let hopeless = Instant::now() + 40 * DEADLINE;
    while write.0.get().is_none() {
        assert!(Instant::now() < hopeless, "it waits for ever");
        wait_a_turn(&thread);
    }
    assert_eq!(write.end(&thread), Some(libc::ETIMEDOUT));
    assert!(server.state().seen.is_empty(), "it was sent");
}

/// Nothing but the search for a connection makes the requests check for their deadline.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_to_a_server_that_is_away_have_their_deadline() {
    let server = Server::start(MIB, FLAGS);
    let options = NbdOptions { deadline: Some(DEADLINE), ..server.options() };
    let (thread, source) = (new_thread(), open(options));
    let disk = Rc::new(source.attach(thread.io()));
    assert_eq!(read_in_time(&thread, &disk, 0), 0);
    server.change(|state| state.is_full = true);
    server.hang_up();
    while source.state() == DiskState::Ready {
        wait_a_turn(&thread);
    }
    let requests = [READ, WRITE].map(|command| Running::start_one(&thread, &disk, command));
    let hopeless = Instant::now() + 80 * DEADLINE;
    while requests.iter().any(|request| request.0.get().is_none()) {
        assert!(Instant::now() < hopeless, "they wait for ever");
        wait_a_turn(&thread);
    }
    for request in requests {
        assert_eq!(request.end(&thread), Some(libc::ETIMEDOUT));
    }
}

/// The server may forget data that it could not write, and flush the rest.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_failed_flush_is_a_loss_and_a_late_flush_is_not() {
    for (is_answered, expected) in [(false, None), (true, Some(libc::EIO))] {
        let server = Server::start(MIB, FLAGS);
        let options = NbdOptions { deadline: Some(DEADLINE), ..server.options() };
        let (thread, source) = (new_thread(), open(options));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(in_time(&thread, || Running::write(&thread, &disk, 0, 1)), None);
        server.change(|state| match is_answered {
            true => state.failing_flushes = 1,
            false => state.holds = (FLUSH, 1),
        });
        let flush = || Running::flush(&thread, &disk);
        match is_answered {
            true => assert_eq!(in_time(&thread, flush), expected),
            false => assert_eq!(flush().end(&thread), Some(libc::ETIMEDOUT)),
        }
        assert_eq!(source.hand_over().loss(), expected);
        assert_eq!(in_time(&thread, flush), expected, "a later one");
        assert_eq!(read_in_time(&thread, &disk, 0), 1, "reads go on");
    }
}
