//! Changes of each kind that a server has answered, and no flush has covered. They are lost when a
//! connection breaks, here or in the process that continues with the disk.

use std::rc::Rc;

use blockio::disk::DiskState;
use blockio::{Disk, IoThread};

use super::super::handshake::can;
use super::super::options::NbdOptions;
use super::super::retry::{RETRY_MAX, RETRY_MIN, Retry};
use super::scripted::{Event, FLUSH, READ, Server, WRITE};
use super::{FLAGS, MIB, Running, filled, new_thread, open, read, wait_a_turn, wait_for};

/// A request that changes the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Write,
    Zeroes,
    Trim,
    /// Stable with its answer.
    DurableWrite,
}

/// A flush, relative to the change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flush {
    Never,
    Earlier,
    /// Sent before the change, and answered after it.
    Around,
    /// The only one that covers the change.
    Later,
}

/// The moment at which the connection breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Break {
    /// In the only process.
    Alone,
    BeforeHandOver,
    AfterHandOver,
}

fn carry_out(change: Change, thread: &IoThread, disk: &Disk) {
    let request = async {
        match change {
            Change::Write => disk.write(0, filled(1, 4096), false).await.map_err(drop),
            Change::DurableWrite => disk.write(0, filled(1, 4096), true).await.map_err(drop),
            Change::Zeroes => disk.write_zeroes(0, 4096, false).await.map_err(drop),
            Change::Trim => disk.discard(0, 4096).await.map_err(drop),
        }
    };
    thread.block_on(request).unwrap().unwrap();
}

/// The outcome of a flush after a break.
fn flush_after(change: Change, flush: Flush, at: Break, flags: u16) -> Option<i32> {
    let server = Server::start(MIB, flags);
    let options = || NbdOptions { distrust: true, ..server.options() };
    let (thread, source) = (new_thread(), open(options()));
    let disk = Rc::new(source.attach(thread.io()));
    let flushed = || assert_eq!(Running::flush(&thread, &disk).end(&thread), None);
    match flush {
        Flush::Never => carry_out(change, &thread, &disk),
        Flush::Earlier => {
            flushed();
            carry_out(change, &thread, &disk);
        }
        Flush::Around => {
            server.change(|state| state.holds = (FLUSH, 1));
            let around = Running::flush(&thread, &disk);
            wait_for(&thread, &server, Event::Request(0, FLUSH));
            carry_out(change, &thread, &disk);
            server.answer_held();
            assert_eq!(around.end(&thread), None);
        }
        Flush::Later => {
            carry_out(change, &thread, &disk);
            flushed();
        }
    }
    let break_it = |disk: &Disk| {
        server.hang_up();
        let _ = read(&thread, disk, 0);
    };
    if at != Break::AfterHandOver {
        break_it(&disk);
    }
    if at == Break::Alone {
        return Running::flush(&thread, &disk).end(&thread);
    }
    let next = open(options());
    next.hand_over().inherit(source.hand_over().loss(), source.hand_over().is_flushed());
    drop((disk, source));
    let disk = Rc::new(next.attach(thread.io()));
    if at == Break::AfterHandOver {
        // The old process leaves no connection; the read waits for a new one.
        let _ = read(&thread, &disk, 0);
        break_it(&disk);
    }
    let outcome = Running::flush(&thread, &disk).end(&thread);
    assert_eq!(next.state() == DiskState::Lost, outcome.is_some());
    outcome
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn each_change_that_no_flush_has_covered_is_lost_with_its_connection() {
    let all = FLAGS | can::WRITE_ZEROES | can::TRIM;
    for change in [Change::Write, Change::Zeroes, Change::Trim, Change::DurableWrite] {
        for flush in [Flush::Never, Flush::Earlier, Flush::Around, Flush::Later] {
            for at in [Break::Alone, Break::BeforeHandOver, Break::AfterHandOver] {
                let is_stable = change == Change::DurableWrite || flush == Flush::Later;
                // A server without FUA flushes within a durable write.
                for flags in [all, all | can::FUA] {
                    let outcome = flush_after(change, flush, at, flags);
                    let expected = (!is_stable).then_some(libc::EIO);
                    assert_eq!(outcome, expected, "{change:?} {flush:?} {at:?} {flags:#x}");
                }
            }
        }
    }
}

/// A server without FUA flushes within a durable write, and that flush covers all earlier changes.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_flush_of_a_durable_write_covers_earlier_changes() {
    for (flags, expected) in [(FLAGS, None), (FLAGS | can::FUA, Some(libc::EIO))] {
        let server = Server::start(MIB, flags);
        let options = NbdOptions { distrust: true, ..server.options() };
        let (thread, source) = (new_thread(), open(options));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(Running::write(&thread, &disk, 8192, 3).end(&thread), None);
        carry_out(Change::DurableWrite, &thread, &disk);
        assert_eq!(source.hand_over().is_flushed(), expected.is_none(), "{flags:#x}");
        server.hang_up();
        assert_eq!(read(&thread, &disk, 0), 1);
        assert_eq!(Running::flush(&thread, &disk).end(&thread), expected, "{flags:#x}");
    }
}

/// A durable write fails like a flush on a disk that has lost data.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn nothing_is_durable_on_a_disk_that_has_lost_data() {
    for flags in [FLAGS, FLAGS | can::FUA, can::HAS_FLAGS, can::HAS_FLAGS | can::FUA] {
        let server = Server::start(MIB, flags);
        let options = NbdOptions { distrust: true, ..server.options() };
        let (thread, source) = (new_thread(), open(options));
        let disk = Rc::new(source.attach(thread.io()));
        carry_out(Change::Write, &thread, &disk);
        server.hang_up();
        assert_eq!(read(&thread, &disk, 0), 1);
        for bytes in [4096, 0] {
            let write = disk.write(0, filled(2, bytes), true);
            let error = thread.block_on(write).unwrap().unwrap_err();
            assert_eq!(error.error().raw_os_error(), Some(libc::EIO), "{flags:#x} {bytes}");
        }
        assert_eq!(Running::write(&thread, &disk, 0, 4).end(&thread), None, "others go on");
        assert_eq!(Running::flush(&thread, &disk).end(&thread), Some(libc::EIO), "{flags:#x}");
    }
}

/// The next request gets the slot of an answered one.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_second_answer_to_a_request_is_not_the_answer_to_the_next_one() {
    for (command, is_extended) in [(READ, false), (READ, true), (WRITE, false), (WRITE, true)] {
        let server = Server::start(MIB, FLAGS);
        server.change(|state| {
            state.is_extended = is_extended;
            state.content[..4096].fill(1);
            state.content[4096..8192].fill(2);
        });
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        assert_eq!(Running::start_one(&thread, &disk, command).end(&thread), None);
        server.change(|state| state.holds = (command, 1));
        let memory = filled(0xee, 4096);
        let (seen, of_disk) = (memory.duplicate(), Rc::clone(&disk));
        let next = Running::start(thread.io(), async move {
            let moved = match command {
                READ => of_disk.read(4096, memory).await,
                _ => of_disk.write(4096, memory, false).await,
            };
            moved.map_err(|unfinished| unfinished.error().raw_os_error())
        });
        while server.state().seen.len() < 2 {
            wait_a_turn(&thread);
        }
        server.answer_again();
        assert_eq!(next.end(&thread), None);
        let connections = server.state().connections;
        assert_eq!(connections, 2, "a server that answers twice is understood");
        let byte = if command == READ { 2 } else { 0xee };
        assert_eq!((seen.to_vec()[0], server.state().content[4096]), (byte, byte));
    }
}

#[test]
fn a_server_that_is_away_is_tried_again_within_a_second() {
    let mut retry = Retry::new();
    let pauses = Vec::from_iter((0..20).map(|_| retry.next_pause()));
    assert_eq!(pauses[..3], [RETRY_MIN, 2 * RETRY_MIN, 4 * RETRY_MIN]);
    assert!(pauses.is_sorted());
    assert_eq!(pauses[5..], [RETRY_MAX; 15]);
}

/// Otherwise the test program aborts, and no other test has a result.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_test_that_fails_while_it_locks_the_server_fails_alone() {
    let server = Server::start(MIB, FLAGS);
    let (thread, source) = (new_thread(), open(server.options()));
    let disk = Rc::new(source.attach(thread.io()));
    let failed = std::thread::scope(|scope| {
        let look = || {
            let _state = server.state();
            panic!("a test has failed, as it should here");
        };
        scope.spawn(look).join()
    });
    assert!(failed.is_err());
    assert_eq!(Running::write(&thread, &disk, 0, 1).end(&thread), None, "the server has ended");
    drop(server);
}
