//! Exports that change their size. Each connection keeps its size.

use std::rc::Rc;

use blockio::disk::DiskState;
use blockio::{DiskOptions, clock};

use super::super::handshake::{Facts, can};
use super::super::info;
use super::super::options::NbdOptions;
use super::super::retry::RETRY_MIN;
use super::super::wire::Framing;
use super::scripted::{Event, FLUSH, Server, WRITE};
use super::{FLAGS, MIB, Running, announced_size, new_thread, open, read, wait_a_turn, wait_for};

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_growth_of_an_export_is_reached_by_new_connections() {
    let one = FLAGS & !can::MULTI_CONN;
    for (flags, distrust, is_needed) in
        [(FLAGS, false, false), (FLAGS, true, true), (one, true, true)]
    {
        let server = Server::start(MIB, flags);
        // A connection that is replaced does not lose its writes.
        let options = NbdOptions { distrust, ..server.options() };
        let (thread, source) = (new_thread(), open(options));
        let disk = Rc::new(source.attach(thread.io()));
        server.change(|state| state.holds = (WRITE, 1));
        let held = Running::write(&thread, &disk, 0, 1);
        wait_for(&thread, &server, Event::Request(0, WRITE));
        server.change(|state| state.content.resize(2 * MIB, 0));
        assert_eq!(source.refresh().unwrap(), 2 * MIB as u64);
        let beyond = Running::write(&thread, &disk, MIB as u64, 2);
        wait_a_turn(&thread);
        assert!(beyond.0.get().is_none(), "the old connection has taken it");
        server.answer_held();
        assert_eq!((held.end(&thread), beyond.end(&thread)), (None, None));
        assert_eq!(read(&thread, &disk, MIB as u64), 2);
        let events = server.state().events.clone();
        // Connection 1 was made to ask.
        let at = |event| events.iter().position(|seen| *seen == event);
        assert!(at(Event::HalfClosed(0)) < at(Event::Request(2, WRITE)), "{events:?}");
        let is_flushed = events.contains(&Event::Request(0, FLUSH));
        assert_eq!(is_flushed, is_needed, "{events:?}");
        assert_eq!(Running::flush(&thread, &disk).end(&thread), None);
        assert_eq!(source.state(), DiskState::Ready);
    }
}

/// Nothing else would wake its task.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_idle_connection_to_an_export_that_has_grown_is_replaced() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = source.attach(thread.io());
    while source.remark().as_deref() != Some("connections: 1") {
        wait_a_turn(&thread);
    }
    server.change(|state| state.content.resize(2 * MIB, 0));
    assert_eq!(source.refresh().unwrap(), 2 * MIB as u64);
    assert_eq!(read(&thread, &disk, MIB as u64), 0);
}

#[test]
fn an_impossible_size_is_refused() {
    let usual = DiskOptions::default();
    let facts = Facts {
        size_bytes: MIB as u64,
        flags: FLAGS,
        framing: Framing::Simple,
        block_bytes_min: 1,
        block_bytes_preferred: 4096,
        payload_bytes_max: 1 << 20,
        context: None,
    };
    let most = Facts { size_bytes: (1 << 63) - 512, ..facts };
    assert_eq!(info(&most, &usual).unwrap().size_bytes, (1 << 63) - 512);
    for (facts, expected) in [
        (Facts { size_bytes: 0, ..facts }, "its size is zero"),
        (Facts { size_bytes: 1000, ..facts }, "not a multiple of the logical block of 512"),
        (Facts { size_bytes: 1 << 63, ..facts }, "exceeds the limit of 2^63 - 1"),
        (Facts { size_bytes: u64::MAX - 511, ..facts }, "exceeds the limit of 2^63 - 1"),
        (Facts { flags: FLAGS | can::READ_ONLY, ..facts }, "with --read-only, or drive it with"),
        (Facts { block_bytes_min: 4096, size_bytes: 512, ..facts }, "logical block of 4096"),
    ] {
        let error = info(&facts, &usual).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

/// The next connection has nothing that a flush could fail for.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn unflushed_changes_of_a_replaced_connection_are_lost() {
    let server = Server::start(MIB, FLAGS & !can::MULTI_CONN);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
    server.change(|state| {
        state.failing_flushes = 1;
        state.content.resize(2 * MIB, 0);
    });
    assert_eq!(source.refresh().unwrap(), 2 * MIB as u64);
    assert_eq!(read(&thread, &disk, MIB as u64), 0, "on another connection");
    let is_flush = |seen: &&Event| matches!(seen, Event::Request(_, FLUSH));
    assert_eq!(server.state().events.iter().filter(is_flush).count(), 1);
    assert_eq!((source.state(), source.hand_over().loss()), (DiskState::Lost, Some(libc::EIO)));
    assert_eq!(Running::flush(&thread, &disk).end(&thread), Some(libc::EIO));
}

/// Otherwise two connections would replace each other as long as the export grows.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn connections_to_an_export_that_grows_are_replaced_ever_more_slowly() {
    let server = Server::start(MIB, FLAGS);
    let options = NbdOptions { connections: 2, ..server.options() };
    let (thread, source) = (new_thread(), open(options));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| state.growth = 4096);
    source.refresh().unwrap();
    let begun = clock::now();
    while server.state().connections < 8 {
        assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
        wait_a_turn(&thread);
    }
    // Each of the two has been replaced at least twice, the second time after two pauses.
    assert!(clock::now() - begun >= 3 * RETRY_MIN, "they were replaced at once");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_size_from_the_only_connection_is_adopted() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
    server.change(|state| state.growth = MIB);
    server.hang_up();
    assert_eq!(Running::write(&thread, &disk, 0, 2).end(&thread), None);
    server.change(|state| state.is_full = true);
    assert_eq!(
        (announced_size(&source), source.refresh().unwrap()),
        (2 * MIB as u64, 2 * MIB as u64)
    );
    let is_refused = || {
        let refused = source.refresh().unwrap_err().to_string();
        assert!(refused.contains("cannot receive from the server"), "nothing is news: {refused}");
    };
    is_refused();
    assert_eq!(Running::write(&thread, &disk, MIB as u64, 3).end(&thread), None);
    // A size that the server was asked for is no news either.
    server.change(|state| state.is_full = false);
    let asked = source.refresh().unwrap();
    server.change(|state| state.is_full = true);
    is_refused();
    assert_eq!(announced_size(&source), asked);
    // No disk can have the next size.
    server.change(|state| (state.is_full, state.growth) = (false, 100));
    server.hang_up();
    assert_eq!(read(&thread, &disk, 0), 2);
    server.change(|state| state.is_full = true);
    is_refused();
    assert_eq!(announced_size(&source), asked + 100);
}

/// A flush on the next connection would not cover the write.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_connection_is_replaced_after_the_flush_of_a_durable_write() {
    let server = Server::start(MIB, FLAGS & !can::MULTI_CONN);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| state.holds = (WRITE, 1));
    let write = Running::write_durably(&thread, &disk, 0, 1);
    wait_for(&thread, &server, Event::Request(0, WRITE));
    server.change(|state| state.content.resize(2 * MIB, 0));
    assert_eq!(source.refresh().unwrap(), 2 * MIB as u64);
    server.answer_held();
    assert_eq!(write.end(&thread), None);
    let events = server.state().events.clone();
    let requests = [WRITE, FLUSH].map(|command| Event::Request(0, command));
    assert!(events.starts_with(&requests), "its flush does not cover it: {events:?}");
}

/// An answer may be on its way for long.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_older_answer_does_not_replace_a_newer_one() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    server.change(|state| state.keeps_back = Some(1));
    let asking = source.clone();
    let older = std::thread::spawn(move || asking.refresh().unwrap());
    wait_for(&thread, &server, Event::KeptBack(1));
    server.change(|state| state.content.resize(2 * MIB, 0));
    assert_eq!(source.refresh().unwrap(), 2 * MIB as u64);
    server.change(|state| state.keeps_back = None);
    assert_eq!(older.join().unwrap(), 2 * MIB as u64);
    assert_eq!(
        (announced_size(&source), source.refresh().unwrap()),
        (2 * MIB as u64, 2 * MIB as u64)
    );
    // No disk can have this size.
    server.change(|state| state.content.resize(2 * MIB + 100, 0));
    let refused = source.refresh().unwrap_err().to_string();
    assert!(refused.contains("not a multiple of the logical block of 512"), "{refused}");
    assert_eq!(announced_size(&source), 2 * MIB as u64);
    // A later answer may be smaller.
    server.change(|state| state.content.truncate(MIB));
    assert_eq!((source.refresh().unwrap(), announced_size(&source)), (MIB as u64, MIB as u64));
}
