//! Properties of a disk that follow from the offers of its server.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use blockio::disk::Abilities;
use blockio::driver::DriverSource;
use blockio::{DiskOptions, DiskSource, Error};

use super::super::connect::connect;
use super::super::connection_task::Handle;
use super::super::handshake::can;
use super::super::shared::{Home, SharedExport};
use super::super::{NbdSource, SILENCE, info};
use super::scripted::{Event, FLUSH, Server};
use super::{FLAGS, MIB, Running, new_thread, open, wait_a_turn};

/// Opens an export with these blocks.
fn open_with(blocks: Option<[u32; 3]>, logical: Option<u32>) -> Result<DiskSource, Error> {
    let server = Server::start(MIB, FLAGS);
    server.change(|state| state.blocks = blocks);
    let options = DiskOptions { logical_block_bytes: logical, ..DiskOptions::default() };
    crate::nbd::open(server.options(), &options)
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_blocks_of_a_disk_fit_the_blocks_of_its_server() {
    const MOST: u32 = 32 << 20;
    for (blocks, logical, expected) in [
        (None, None, (512, 4096, None)),
        (None, Some(4096), (4096, 4096, None)),
        (Some([1, 512, MOST]), None, (512, 512, None)),
        (Some([1, 512, MOST]), Some(4096), (4096, 4096, None)),
        (Some([1024, 4096, MOST]), Some(1024), (1024, 4096, None)),
        (Some([4096, 4096, MOST]), None, (4096, 4096, None)),
        (Some([1, 65_536, MOST]), None, (512, 65_536, None)),
        (Some([1, 131_072, MOST]), None, (512, 65_536, Some(131_072))),
    ] {
        let source = open_with(blocks, logical).unwrap();
        let info = source.info();
        let found = (info.logical_block_bytes, info.physical_block_bytes, source.optimal_bytes());
        assert_eq!(found, expected, "{blocks:?}, {logical:?}");
    }
    for (blocks, logical, expected) in [
        (Some([4096, 4096, MOST]), 512, "at least 4096 bytes, and the logical block has 512"),
        (Some([1024, 4096, MOST]), 512, "choose a larger logical block"),
        (None, 1000, "1000"),
    ] {
        let error = open_with(blocks, Some(logical)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_abilities_of_a_disk_are_those_of_its_server() {
    let none = Abilities::default();
    for (flags, abilities, discard_bytes) in [
        (0, none, None),
        (can::FLUSH, Abilities { flush: true, ..none }, None),
        (can::TRIM, Abilities { discard: true, ..none }, Some(4096)),
        (can::WRITE_ZEROES, Abilities { zeroes: true, ..none }, None),
        // A discard writes zeroes if that is fast.
        (
            can::WRITE_ZEROES | can::FAST_ZERO,
            Abilities { zeroes: true, discard: true, ..none },
            Some(4096),
        ),
        (can::FUA | can::MULTI_CONN, none, None),
    ] {
        let server = Server::start(MIB, can::HAS_FLAGS | flags);
        let source = open(server.options());
        let found = (source.abilities(), source.discard_bytes());
        assert_eq!(found, (abilities, discard_bytes), "{flags:#x}");
    }
}

/// The connection is not in use yet, so each IoThread may have it.
fn unused(server: &Server, read_only: bool) -> NbdSource {
    let options = server.options();
    let name = options.to_string();
    let (connected, _) = connect(&options).unwrap();
    let of_disk = DiskOptions { read_only, ..DiskOptions::default() };
    let info = info(&connected.facts, &of_disk).unwrap();
    let shared = Arc::new(SharedExport::new(options, read_only, SILENCE, connected));
    let taken = AtomicU64::new(info.size_bytes);
    NbdSource { handle: Arc::new(Handle { shared }), name, info, taken }
}

/// The IoThread may have left the connection since it became known as the home.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn written_data_is_flushed_if_the_home_has_no_connection_any_more() {
    let server = Server::start(MIB, FLAGS & !can::MULTI_CONN);
    let (thread, source) = (new_thread(), unused(&server, false));
    let shared = source.shared();
    shared.count_change();
    assert!(matches!(shared.home(&thread.io().remote()), Home::Local(_)));
    std::thread::scope(|scope| {
        let written = scope.spawn(|| source.write_back());
        while !written.is_finished() {
            wait_a_turn(&thread);
        }
        written.join().unwrap().unwrap();
    });
    assert!(shared.is_flushed() && shared.home_remote().is_none());
    assert_eq!(server.state().events, [Event::Request(0, FLUSH)]);
}

/// It has written nothing, and its process before may have written.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_disk_that_is_only_read_flushes_nothing_for_the_next_process() {
    for (read_only, expected) in [(true, 0), (false, 1)] {
        let server = Server::start(MIB, FLAGS & !can::MULTI_CONN);
        let source = unused(&server, read_only);
        source.inherit(None, false);
        source.write_back().unwrap();
        assert_eq!(server.state().events.len(), expected);
    }
}

/// The disk goes while a new connection is made.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_server_is_told_the_end_of_a_connection_that_comes_too_late() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    assert_eq!(Running::flush(&thread, &disk).end(&thread), None);
    server.change(|state| state.keeps_back = Some(1));
    server.hang_up();
    while !server.state().events.contains(&Event::KeptBack(1)) {
        wait_a_turn(&thread);
    }
    drop((disk, source));
    wait_a_turn(&thread);
    server.change(|state| state.keeps_back = None);
    while !server.state().events.contains(&Event::Ended(1)) {
        wait_a_turn(&thread);
    }
    assert_eq!(server.state().disconnects, 1);
}

/// A server may have room for one client only.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_server_is_told_the_end_of_a_connection() {
    for is_used in [false, true] {
        let server = Server::start(MIB, FLAGS);
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = is_used.then(|| Rc::new(source.attach(thread.io())));
        if let Some(disk) = &disk {
            assert_eq!(Running::flush(&thread, disk).end(&thread), None);
        }
        drop((disk, source));
        while !server.state().events.contains(&Event::Ended(0)) {
            wait_a_turn(&thread);
        }
        assert_eq!(server.state().disconnects, 1, "in use: {is_used}");
    }
}
