//! Durable writes to a server without FUA: a write, and a flush by the same connection.

use std::rc::Rc;

use blockio::disk::{DiskState, ErrorAction, ErrorPolicy};
use blockio::{Disk, DiskSource, IoThread};

use super::super::handshake::can;
use super::super::options::NbdOptions;
use super::scripted::{Event, FLUSH, Server, WRITE};
use super::{DEADLINE, FLAGS, MIB, Running, filled, new_thread, open, wait_a_turn, wait_for};

/// Makes a durable write that fails. Returns the bytes that are left of it, and its errno.
fn failed(threads: [&IoThread; 2], disk: &Rc<Disk>) -> (usize, Option<i32>) {
    let (writer, rest) = (Rc::clone(disk), Rc::<std::cell::Cell<_>>::default());
    let seen = Rc::clone(&rest);
    let write = Running::start(threads[0].io(), async move {
        let written = writer.write(0, filled(1, 4096), true).await;
        written.map_err(|unfinished| {
            seen.set(unfinished.rest().bytes());
            unfinished.error().raw_os_error()
        })
    });
    while write.0.get().is_none() {
        threads.into_iter().for_each(wait_a_turn);
    }
    (rest.get(), write.0.get().and_then(|outcome| outcome.err().flatten()))
}

fn try_again(source: &DiskSource) {
    source.set_error_policy(ErrorPolicy { write: ErrorAction::Retry, ..ErrorPolicy::default() });
}

/// A second connection may lead to a server that has come back, before this one is known to break.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_connection_of_a_write_flushes_it() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(NbdOptions { connections: 2, ..server.options() }));
    let disk = Rc::new(source.attach(thread.io()));
    while source.remark().is_none_or(|remark| !remark.ends_with(" 2")) {
        wait_a_turn(&thread);
    }
    // The first connection has a write, so the second gets the next one.
    server.change(|state| state.holds = (WRITE, 2));
    let write = Running::write(&thread, &disk, 4096, 1);
    wait_for(&thread, &server, Event::Request(0, WRITE));
    let durable = Running::write_durably(&thread, &disk, 0, 2);
    wait_for(&thread, &server, Event::Request(1, WRITE));
    server.answer_held();
    assert_eq!((write.end(&thread), durable.end(&thread)), (None, None));
    let events = server.state().events.clone();
    let expected = [(0, WRITE), (1, WRITE), (1, FLUSH)];
    assert_eq!(events, expected.map(|(of, command)| Event::Request(of, command)));
    // Nothing counts as unanswered: the connections end with their disk.
    drop((disk, source));
    for turns in 0.. {
        if [0, 1].iter().all(|of| server.state().events.contains(&Event::Ended(*of))) {
            break;
        }
        assert!(turns < 10_000, "{:?}", server.state().events);
        wait_a_turn(&thread);
    }
}

/// The next try makes both again.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_durable_write_whose_flush_is_late_is_tried_again() {
    let server = Server::start(MIB, FLAGS);
    let options = NbdOptions { deadline: Some(DEADLINE), ..server.options() };
    let (thread, source) = (new_thread(), open(options));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| state.holds = (FLUSH, 1));
    // On a busy machine even the write may be late.
    while server.state().holds.1 > 0 {
        assert_eq!(failed([&thread; 2], &disk), (4096, Some(libc::ETIMEDOUT)));
    }
    try_again(&source);
    server.change(|state| {
        state.seen.clear();
        state.holds = (FLUSH, 1);
    });
    assert_eq!(Running::write_durably(&thread, &disk, 0, 1).end(&thread), None);
    let mut seen: Vec<u16> = server.state().seen.iter().map(|seen| seen.0).collect();
    seen.dedup();
    assert!(seen.len() >= 4 && seen.chunks(2).all(|pair| pair == [WRITE, FLUSH]), "{seen:?}");
}

/// The next flush may succeed, and other writers would not know of the loss.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_durable_write_with_a_failed_flush_fails_and_is_a_loss() {
    for is_home in [true, false] {
        let server = Server::start(MIB, FLAGS & !can::MULTI_CONN);
        let (thread, home, source) = (new_thread(), new_thread(), open(server.options()));
        try_again(&source);
        let disk = Rc::new(source.attach(home.io()));
        assert_eq!(Running::write(&home, &disk, 4096, 2).end(&home), None);
        server.change(|state| state.failing_flushes = 1);
        let by = if is_home { &home } else { &thread };
        let writer = Rc::new(source.attach(by.io()));
        assert_eq!(failed([by, &home], &writer), (0, Some(libc::EIO)));
        assert_eq!(server.state().seen.len(), 3);
        assert_eq!((source.state(), source.hand_over().loss()), (DiskState::Lost, Some(libc::EIO)));
        assert_eq!(Running::flush(&home, &disk).end(&home), Some(libc::EIO));
        let later = Running::write_durably(&home, &disk, 0, 1);
        assert_eq!(later.end(&home), Some(libc::EIO));
    }
}

/// The server may have dropped the data of both.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn nothing_is_durable_that_is_answered_after_a_failed_flush() {
    for command in [FLUSH, WRITE] {
        let server = Server::start(MIB, FLAGS | can::FUA);
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(Running::write(&thread, &disk, 4096, 1).end(&thread), None);
        server.change(|state| (state.holds, state.failing_flushes) = ((command, 1), 1));
        let promised = match command {
            FLUSH => Running::flush(&thread, &disk),
            _ => Running::write_durably(&thread, &disk, 0, 2),
        };
        while server.state().seen.len() < 2 {
            wait_a_turn(&thread);
        }
        let failed = Running::flush(&thread, &disk);
        assert_eq!(failed.end(&thread), Some(libc::EIO), "{command}");
        assert!(promised.0.get().is_none(), "{command} is answered without the server");
        server.answer_held();
        assert_eq!(promised.end(&thread), Some(libc::EIO), "{command}");
    }
}

/// The deadline is the same, however often the write is made again.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_durable_write_has_one_deadline_over_repeated_breaks() {
    let server = Server::start(MIB, FLAGS);
    let options = NbdOptions { deadline: Some(DEADLINE), ..server.options() };
    let (thread, source) = (new_thread(), open(options));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| state.holds_first_flushes = true);
    let write = Running::write_durably(&thread, &disk, 0, 1);
    let mut breaks = 0;
    while write.0.get().is_none() {
        let writes = server.state().seen.iter().filter(|seen| seen.0 == WRITE).count();
        let is_held = server.state().seen.last().is_some_and(|seen| seen.0 == FLUSH);
        if is_held && writes > breaks {
            assert!(breaks < 100, "it goes on for ever");
            server.hang_up();
            breaks = writes;
        }
        wait_a_turn(&thread);
    }
    assert_eq!(write.end(&thread), Some(libc::ETIMEDOUT));
}
