//! Servers that allow one connection, and IoThreads that come and go.

use std::rc::Rc;
use std::sync::mpsc::{self, TryRecvError};

use super::super::handshake::can;
use super::super::scripted::{Event, READ, Server};
use super::{MIB, Running, new_thread, open, read, wait_a_turn};

const ONE: u16 = can::HAS_FLAGS | can::FLUSH;

/// As an image is opened: its header is read on a thread that ends.
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
        assert_eq!(source.remark().as_deref(), Some("0 connections"));
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
    drop((home, gone));
    assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None);
    go.0.send(0).unwrap();
    // The new home has to work for that.
    let byte = loop {
        match done.1.try_recv() {
            Ok(byte) => break byte,
            Err(TryRecvError::Empty) => wait_a_turn(&thread),
            Err(TryRecvError::Disconnected) => panic!("the other IoThread has failed"),
        }
    };
    assert_eq!(byte, 1);
    other.join().unwrap();
}
