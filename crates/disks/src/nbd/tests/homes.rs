//! Servers that allow one connection, and IoThreads that come and go.

use std::rc::Rc;
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};

use blockio::IoThread;
use blockio::disk::DiskState;

use super::super::handshake::can;
use super::super::options::NbdOptions;
use super::rerouting::end;
use super::scripted::{Event, FLUSH, READ, Server, WRITE};
use super::{DEADLINE, FLAGS, MIB, Running, new_thread, open, read, wait_a_turn};

const ONE: u16 = can::HAS_FLAGS | can::FLUSH;

/// The case of an image that is opened: its header is read on a thread that ends.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_connection_outlives_the_iothread_that_has_opened_the_disk() {
    for flags in [ONE, ONE | can::MULTI_CONN] {
        let server = Server::start(MIB, flags);
        let source = open(server.options());
        for _ in 0..3 {
            let thread = new_thread();
            let disk = source.attach(thread.io());
            assert_eq!(read(&thread, &disk, 0), 0);
        }
        let events = server.state().events.clone();
        assert_eq!(events, [Event::Request(0, READ); 3], "another connection was made");
        assert_eq!(source.remark().as_deref(), Some("connections: 0"));
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn iothreads_find_a_new_home_when_theirs_has_ended() {
    let server = Server::start(MIB, ONE);
    let source = open(server.options());
    let home = new_thread();
    let gone = source.attach(home.io());
    let ([ready, go, done], theirs) = ([(); 3].map(|()| mpsc::channel()), source.clone());
    let other = std::thread::spawn(move || {
        let thread = new_thread();
        let disk = theirs.attach(thread.io());
        ready.0.send(0).unwrap();
        go.1.recv().unwrap();
        done.0.send(read(&thread, &disk, 0)).unwrap();
    });
    let thread = new_thread();
    let disk = Rc::new(source.attach(thread.io()));
    ready.1.recv().unwrap();
    drop(home);
    assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
    drop(gone);
    go.0.send(0).unwrap();
    // The new home has to run for that.
    let byte = loop {
        match done.1.try_recv() {
            Ok(byte) => break byte,
            Err(TryRecvError::Empty) => wait_a_turn(&thread),
            Err(TryRecvError::Disconnected) => panic!("the other IoThread has failed"),
        }
    };
    assert_eq!(byte, 1);
    other.join().unwrap();
    let events = server.state().events.clone();
    assert_eq!(events, [Event::Request(0, WRITE), Event::Request(0, READ)], "there are two homes");
}

/// Runs two IoThreads until the server has seen an event.
fn wait_for(threads: [&IoThread; 2], server: &Server, event: Event) {
    while !server.state().events.contains(&event) {
        threads.into_iter().for_each(wait_a_turn);
    }
}

/// The end of a request's home is no error of the disk. The server has to end the request first, so
/// that it does not land after a newer one.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_request_whose_home_ends_goes_to_another_home() {
    for (is_sent, outlives) in [(false, true), (true, true), (true, false)] {
        let server = Server::start(MIB, ONE);
        let source = open(server.options());
        let home = new_thread();
        let gone = source.attach(home.io());
        assert_eq!(read(&home, &gone, 0), 0);
        let thread = new_thread();
        let disk = Rc::new(source.attach(thread.io()));
        server.change(|state| (state.holds, state.lingers) = ((WRITE, 1), is_sent));
        let write = Running::write(&thread, &disk, 0, 1);
        if is_sent {
            wait_for([&home, &thread], &server, Event::Request(0, WRITE));
        } else {
            server.change(|state| state.holds = (WRITE, 0));
            wait_a_turn(&thread);
        }
        let _outlives = outlives.then_some(gone);
        drop(home);
        assert_eq!(read(&thread, &disk, 8192), 0);
        if is_sent {
            super::wait_for(&thread, &server, Event::HalfClosed(0));
            assert_eq!(read(&thread, &disk, 8192), 0);
            assert!(
                write.0.get().is_none() && source.hand_over().may_still_change(),
                "it does not wait"
            );
            server.change(|state| (state.holds, state.lingers) = ((WRITE, 0), false));
        }
        assert_eq!(write.end(&thread), None);
        assert_eq!(read(&thread, &disk, 0), 1);
        let events = server.state().events.clone();
        let at = |event| events.iter().position(|seen| *seen == event);
        assert!(at(Event::Ended(0)) < at(Event::Request(1, WRITE)) || !is_sent, "{events:?}");
        assert!(!source.hand_over().may_still_change());
    }
}

/// The request is past its deadline.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_request_that_is_overdue_when_its_home_ends_is_not_sent() {
    let server = Server::start(MIB, ONE);
    let source = open(NbdOptions { deadline: Some(DEADLINE), ..server.options() });
    let home = new_thread();
    let gone = source.attach(home.io());
    let thread = new_thread();
    let disk = Rc::new(source.attach(thread.io()));
    let write = Running::write(&thread, &disk, 0, 1);
    let due = Instant::now() + DEADLINE;
    while Instant::now() < due {
        wait_a_turn(&thread);
    }
    drop((home, gone));
    assert_eq!(write.end(&thread), Some(libc::ETIMEDOUT));
    assert!(server.state().seen.is_empty(), "it was sent");
}

/// The last IoThread that drains a connection may end before the server has.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn pending_changes_of_a_server_pass_to_a_remaining_iothread() {
    let server = Server::start(MIB, FLAGS);
    let source = open(server.options());
    server.change(|state| (state.holds, state.lingers) = ((WRITE, 1), true));
    let first = new_thread();
    let disk = Rc::new(source.attach(first.io()));
    let older = Running::write(&first, &disk, 0, 1);
    super::wait_for(&first, &server, Event::Request(0, WRITE));
    drop((first, disk));
    assert!(older.0.get().is_none() && source.hand_over().may_still_change());
    let second = new_thread();
    let disk = Rc::new(source.attach(second.io()));
    super::wait_for(&second, &server, Event::HalfClosed(0));
    let thread = new_thread();
    let disks = (disk, Rc::new(source.attach(thread.io())));
    // Before this IoThread has a connection, the other one may get the request.
    let connected = Running::start_one(&thread, &disks.1, READ);
    assert_eq!(end(&connected, [&second, &thread]), None);
    drop((second, disks.0));
    let newer = Running::write(&thread, &disks.1, 0, 2);
    assert_eq!(read(&thread, &disks.1, 0), 0);
    assert!(newer.0.get().is_none(), "it does not wait");
    server.change(|state| state.lingers = false);
    assert_eq!(newer.end(&thread), None);
    assert_eq!(read(&thread, &disks.1, 0), 2, "the old write came last");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn changes_without_a_task_are_released_when_the_server_closes() {
    let server = Server::start(MIB, FLAGS);
    let source = open(server.options());
    server.change(|state| (state.holds, state.lingers) = ((WRITE, 1), true));
    let first = new_thread();
    let disk = Rc::new(source.attach(first.io()));
    let _older = Running::write(&first, &disk, 0, 1);
    super::wait_for(&first, &server, Event::Request(0, WRITE));
    drop((first, disk));
    let until = Instant::now() + Duration::from_secs(20);
    while !server.state().events.contains(&Event::HalfClosed(0)) {
        assert!(Instant::now() < until, "it was not told to end");
        std::thread::yield_now();
    }
    assert!(source.hand_over().may_still_change(), "the server has not ended it");
    server.change(|state| state.lingers = false);
    while source.hand_over().may_still_change() {
        assert!(Instant::now() < until, "it is held for ever");
        std::thread::yield_now();
    }
    let thread = new_thread();
    let disk = Rc::new(source.attach(thread.io()));
    assert_eq!(Running::write(&thread, &disk, 0, 2).end(&thread), None);
    assert_eq!(server.state().content[0], 2, "the old write came last");
}

/// The connection waits for the next IoThread. No other one can flush the writes on it.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn written_data_is_flushed_after_its_home_has_ended() {
    for fails_flushes in [false, true] {
        let server = Server::start(MIB, ONE);
        server.change(|state| state.failing_flushes = usize::from(fails_flushes));
        let (source, home) = (open(server.options()), new_thread());
        let disk = Rc::new(source.attach(home.io()));
        assert_eq!(Running::write(&home, &disk, 0, 1).end(&home), None);
        drop((home, disk));
        assert_eq!(source.hand_over().write_back().is_err(), fails_flushes);
        assert_eq!(source.hand_over().is_flushed(), !fails_flushes);
        assert_eq!(source.hand_over().loss(), fails_flushes.then_some(libc::EIO));
        let thread = new_thread();
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(read(&thread, &disk, 0), 1);
        if fails_flushes {
            // A second try succeeds, but the loss stays.
            assert!(source.hand_over().write_back().is_ok());
            assert_eq!(Running::flush(&thread, &disk).end(&thread), Some(libc::EIO));
        }
        let events = server.state().events.clone();
        let expected = [WRITE, FLUSH, READ].map(|command| Event::Request(0, command));
        assert_eq!(events, expected, "another connection was made");
    }
}

/// Without multi-conn no other connection can flush the writes on one that has ended.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_home_that_ends_with_requests_loses_unflushed_changes() {
    let server = Server::start(MIB, ONE);
    let source = open(NbdOptions { distrust: true, ..server.options() });
    let home = new_thread();
    let disk = Rc::new(source.attach(home.io()));
    assert_eq!(Running::write(&home, &disk, 0, 1).end(&home), None);
    server.change(|state| state.holds = (READ, 1));
    let read = Running::start_one(&home, &disk, READ);
    super::wait_for(&home, &server, Event::Request(0, READ));
    drop((home, disk));
    assert!(read.0.get().is_none());
    assert_eq!(source.state(), DiskState::Lost);
}

/// The server has answered and died, and is back before this IoThread notices. An IoThread with a
/// connection of its own to the new server could have a flush answered that covers nothing.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_distrusted_server_has_one_connection() {
    let server = Server::start(MIB, FLAGS);
    let source = open(NbdOptions { distrust: true, connections: 2, ..server.options() });
    let [ours, other] = [(); 2].map(|()| new_thread());
    let [disk, disk_there] = [&ours, &other].map(|thread| Rc::new(source.attach(thread.io())));
    assert_eq!(read(&ours, &disk, 0), 0);
    server.change(|state| state.holds = (WRITE, 1));
    let write = Running::write(&ours, &disk, 0, 1);
    wait_for([&ours, &ours], &server, Event::Request(0, WRITE));
    server.answer_held();
    server.hang_up();
    for _ in 0..50 {
        wait_a_turn(&other);
    }
    assert_eq!(server.state().connections, 1, "another IoThread has a connection of its own");
    assert_eq!(write.end(&ours), None);
    let flush = Running::flush(&other, &disk_there);
    assert_eq!(end(&flush, [&ours, &other]), Some(libc::EIO));
    assert_eq!(source.state(), DiskState::Lost);
}
