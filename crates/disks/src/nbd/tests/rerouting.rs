//! IoThreads without a connection, which use the connections of other IoThreads.

use std::rc::Rc;

use blockio::IoThread;
use blockio::disk::DiskState;

use super::scripted::{Event, FLUSH, READ, Server, WRITE};
use super::{FLAGS, MIB, Running, new_thread, open, wait_a_turn, wait_for};

/// Runs two IoThreads until a request ends. Returns its errno.
pub(super) fn end(request: &Running, threads: [&IoThread; 2]) -> Option<i32> {
    loop {
        match request.0.get() {
            Some(result) => return result.err().flatten(),
            None => threads.into_iter().for_each(wait_a_turn),
        }
    }
}

/// The server lets the second connection wait, like one that allows a few.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_iothread_without_a_connection_uses_another_iothread() {
    let server = Server::start(MIB, FLAGS);
    server.change(|state| state.keeps_back = Some(1));
    let (source, first, second) = (open(server.options()), new_thread(), new_thread());
    let disk = Rc::new(source.attach(first.io()));
    let read = Running::start_one(&first, &disk, READ);
    assert_eq!(read.end(&first), None);
    let late = Rc::new(source.attach(second.io()));
    wait_for(&second, &server, Event::KeptBack(1));
    let write = Running::start_one(&second, &late, WRITE);
    assert_eq!(end(&write, [&first, &second]), None);
    let flush = Running::flush(&second, &late);
    assert_eq!(end(&flush, [&first, &second]), None);
    let last = server.state().events.last().copied();
    assert_eq!(last, Some(Event::Request(0, FLUSH)));
    assert_eq!(source.remark().as_deref(), Some("connections: 1"));
    assert_eq!(source.state(), DiskState::Ready);
    server.change(|state| state.keeps_back = None);
}

/// The requests waited for a connection of their own while there was none.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn waiting_requests_go_to_an_iothread_with_a_connection() {
    let server = Server::start(MIB, FLAGS);
    let (source, first, second) = (open(server.options()), new_thread(), new_thread());
    let disk = Rc::new(source.attach(first.io()));
    let read = Running::start_one(&first, &disk, READ);
    assert_eq!(read.end(&first), None);
    server.change(|state| state.keeps_back = Some(1));
    server.hang_up();
    wait_for(&first, &server, Event::KeptBack(1));
    let write = Running::start_one(&first, &disk, WRITE);
    wait_a_turn(&first);
    assert!(write.0.get().is_none() && matches!(source.state(), DiskState::Away(_)));
    let _other = source.attach(second.io());
    assert_eq!(end(&write, [&second, &first]), None);
    let last = server.state().events.last().copied();
    assert_eq!(last, Some(Event::Request(2, WRITE)));
    server.change(|state| state.keeps_back = None);
}
