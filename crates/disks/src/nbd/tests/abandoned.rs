//! Disks that were abandoned: their requests must not wait.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::scripted::{Event, Server, WRITE};
use super::{FLAGS, MIB, Running, new_thread, open, read, wait_for};

/// Requests that an answering server has begun do not fail: they are done.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_to_an_answering_server_continue() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| state.holds = (WRITE, 1));
    let write = Running::write(&thread, &disk, 0, 1);
    wait_for(&thread, &server, Event::Request(0, WRITE));
    source.abandon();
    assert_eq!(read(&thread, &disk, 4096), 0, "it answers");
    server.answer_held();
    assert_eq!(write.end(&thread), None);
    // A server that breaks the connection, or does not answer, has had its time.
    server.change(|state| state.holds = (WRITE, 1));
    let write = Running::write(&thread, &disk, 0, 2);
    while server.state().events.iter().filter(|seen| **seen == Event::Request(0, WRITE)).count() < 2
    {
        super::wait_a_turn(&thread);
    }
    server.hang_up();
    assert_eq!(write.end(&thread), Some(libc::EIO));
    let later = Running::write(&thread, &disk, 0, 3);
    assert_eq!(later.end(&thread), Some(libc::EIO), "nobody carries it");
}

/// The server may still carry out an older write, and nothing tells when.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_write_that_is_held_back_fails_at_once() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| (state.holds, state.lingers) = ((WRITE, 1), true));
    let older = Running::write(&thread, &disk, 0, 1);
    wait_for(&thread, &server, Event::Request(0, WRITE));
    server.send_garbage();
    assert_eq!(read(&thread, &disk, 8192), 0, "on another connection");
    let newer = Running::write(&thread, &disk, 0, 2);
    super::wait_a_turn(&thread);
    assert!(older.0.get().is_none() && newer.0.get().is_none());
    source.abandon();
    let hopeless = Instant::now() + Duration::from_secs(20);
    while older.0.get().is_none() || newer.0.get().is_none() {
        assert!(Instant::now() < hopeless, "they wait for ever");
        super::wait_a_turn(&thread);
    }
    assert_eq!((older.end(&thread), newer.end(&thread)), (Some(libc::EIO), Some(libc::EIO)));
    assert_eq!(read(&thread, &disk, 8192), 0, "it answers");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_to_a_server_without_answers_fail() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| state.holds = (WRITE, 1));
    let write = Running::write(&thread, &disk, 0, 1);
    wait_for(&thread, &server, Event::Request(0, WRITE));
    source.abandon();
    assert_eq!(write.end(&thread), Some(libc::ETIMEDOUT));
    assert_eq!(Running::write(&thread, &disk, 0, 2).end(&thread), Some(libc::EIO));
}

/// The wait for the server's changes ends with the disk, and not at its next tick.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_last_user_of_a_disk_ends_the_waits_for_abandoned_connections() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    server.change(|state| (state.holds, state.lingers) = ((WRITE, 1), true));
    let write = Running::write(&thread, &disk, 0, 1);
    wait_for(&thread, &server, Event::Request(0, WRITE));
    server.send_garbage();
    wait_for(&thread, &server, Event::HalfClosed(0));
    assert_eq!(read(&thread, &disk, 8192), 0, "on another connection");
    assert!(write.0.get().is_none() && source.hand_over().may_still_change());
    source.abandon();
    assert_eq!(write.end(&thread), Some(libc::EIO));
    drop((disk, source));
    while thread.turn(blockio::Wait::Never).unwrap() == blockio::Activity::Ready {}
    assert_eq!(thread.io().tasks(), 0, "a task waits for the server");
}

/// Otherwise all changes would wait after each further break.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn abandoned_connections_that_have_ended_do_not_count() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    for connection in 0..3 {
        server.change(|state| (state.holds, state.lingers) = ((WRITE, 1), true));
        let older = Running::write(&thread, &disk, 0, 1);
        wait_for(&thread, &server, Event::Request(connection, WRITE));
        server.send(connection, &[0x55; 64]);
        wait_for(&thread, &server, Event::HalfClosed(connection));
        assert_eq!(Running::write(&thread, &disk, 8192, 2).end(&thread), None);
        assert!(older.0.get().is_none());
        server.change(|state| state.lingers = false);
        assert_eq!(older.end(&thread), None);
    }
}
