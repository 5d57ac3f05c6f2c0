//! The requests to a server, depending on its abilities.

use std::cell::Cell;
use std::rc::Rc;

use super::super::handshake::can;
use super::super::options::NbdOptions;
use super::super::wire::{FLAG_FAST_ZERO, FLAG_FUA, FLAG_NO_HOLE};
use super::deadlines::{end_in_time, in_time};
use super::scripted::{FLUSH, Server, TRIM, WRITE, ZEROES};
use super::{DEADLINE, FLAGS, MIB, Running, filled, new_thread, open, wait_a_turn};

/// A request to the disk.
#[derive(Debug, Clone, Copy)]
enum Asked {
    Durable,
    Discard,
    Zeroes { may_unmap: bool },
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_use_only_commands_of_the_server() {
    use Asked::{Discard, Durable, Zeroes};
    let fast = can::WRITE_ZEROES | can::FAST_ZERO;
    let (kept, freed) = (Zeroes { may_unmap: false }, Zeroes { may_unmap: true });
    for (flags, asked, expected) in [
        (can::FUA, Durable, &[(WRITE, FLAG_FUA)][..]),
        (0, Durable, &[(WRITE, 0), (FLUSH, 0)]),
        (can::TRIM | fast, Discard, &[(TRIM, 0)]),
        (fast, Discard, &[(ZEROES, FLAG_FAST_ZERO)]),
        (can::WRITE_ZEROES, Discard, &[]),
        (can::WRITE_ZEROES, kept, &[(ZEROES, FLAG_NO_HOLE)]),
        (can::WRITE_ZEROES, freed, &[(ZEROES, 0)]),
        (0, freed, &[(WRITE, 0), (WRITE, 0)]),
    ] {
        let server = Server::start(4 * MIB, can::HAS_FLAGS | can::FLUSH | flags);
        server.change(|state| {
            state.content.fill(7);
            state.is_slow_with_zeroes = true;
        });
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        let bytes = 2 * MIB as u64;
        match asked {
            Durable => thread.block_on(disk.write(0, filled(1, 4096), true)).unwrap().unwrap(),
            // A server that is no faster with zeroes does nothing, as a discard may.
            Discard => thread.block_on(disk.discard(0, bytes)).unwrap().unwrap(),
            Zeroes { may_unmap } => {
                thread.block_on(disk.write_zeroes(0, bytes, may_unmap)).unwrap().unwrap();
            }
        }
        let state = server.state();
        assert_eq!(state.seen, expected, "{asked:?} with {flags:#x}");
        let (bytes, byte) = match asked {
            Durable => (4096, 1),
            Discard => (2 * MIB, 7),
            Zeroes { .. } => (2 * MIB, 0),
        };
        let (asked_for, beyond) = state.content.split_at(bytes);
        assert!(asked_for.iter().all(|found| *found == byte), "{asked:?} with {flags:#x}");
        assert!(beyond.iter().all(|found| *found == 7), "{asked:?} went beyond");
    }
}

/// A discard fails with any error, except that zeroes would take as long as data.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_discard_fails_if_the_server_fails_it() {
    const EIO: u32 = 5;
    const NOT_SUPPORTED: u32 = 95;
    let fast = can::WRITE_ZEROES | can::FAST_ZERO;
    for (flags, command, error, expected) in [
        (can::TRIM, TRIM, EIO, Some(libc::EIO)),
        (can::TRIM, TRIM, NOT_SUPPORTED, Some(libc::EOPNOTSUPP)),
        (fast, ZEROES, EIO, Some(libc::EIO)),
        (fast, ZEROES, NOT_SUPPORTED, None),
    ] {
        let server = Server::start(MIB, can::HAS_FLAGS | can::FLUSH | flags);
        server.change(|state| state.fails = Some((command, error)));
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        let done = thread.block_on(disk.discard(0, 4096)).unwrap();
        let failed = done.err().map(|error| error.raw_os_error());
        assert_eq!(failed, expected.map(Some), "{command} with {error}");
        assert_eq!(server.state().seen.len(), 1, "{command} with {error}");
    }
}

/// Lengths of simple requests have 32 bits. The disk is never touched, so it takes no memory.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_range_that_is_too_long_for_one_request_is_cut_and_has_no_gap() {
    const MOST: u64 = 1 << 31;
    for (is_extended, expected) in [
        (false, &[(4096, MOST), (4096 + MOST, MOST), (4096 + 2 * MOST, 512)][..]),
        (true, &[(4096, 2 * MOST + 512)]),
    ] {
        let bytes = usize::try_from(3 * MOST).unwrap();
        let server = Server::start(bytes, can::HAS_FLAGS | can::FLUSH | can::TRIM);
        server.change(|state| state.is_extended = is_extended);
        let (thread, source) = (new_thread(), open(server.options()));
        let disk = Rc::new(source.attach(thread.io()));
        thread.block_on(disk.discard(4096, 2 * MOST + 512)).unwrap().unwrap();
        assert_eq!(server.state().ranges, expected);
    }
}

/// All parts are in progress at once. The initiator writes again from the first failure on. After a
/// failed flush it must not write again: the next flush may succeed and hide the loss.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn parts_behind_a_failed_part_count_as_failed() {
    const PART: u32 = 4096;
    for (held, flushes, failing, left) in [
        (1, 0, WRITE, Some(3)),
        (3, 0, WRITE, Some(3)),
        (1, 2, WRITE, Some(0)),
        (0, 0, ZEROES, None),
    ] {
        let server = Server::start(MIB, FLAGS);
        server.change(|state| {
            state.blocks = Some([1, 4096, PART]);
            state.holds = (WRITE, held);
            state.failing_flushes = flushes;
        });
        let (thread, source) = (new_thread(), open(server.options()));
        let (disk, rest) = (Rc::new(source.attach(thread.io())), Rc::new(Cell::new(0)));
        let seen = Rc::clone(&rest);
        let write = Running::start(thread.io(), async move {
            let written = disk.write(0, filled(1, 3 * PART as usize), flushes > 0).await;
            written.map_err(|unfinished| {
                seen.set(unfinished.rest().bytes() / PART as usize);
                unfinished.error().raw_os_error()
            })
        });
        while server.state().seen.len() < 3 + flushes {
            wait_a_turn(&thread);
        }
        server.change(|state| state.fails = Some((failing, 5)));
        server.answer_held();
        let expected = (left.map(|_| libc::EIO), left.unwrap_or(0));
        assert_eq!((write.end(&thread), rest.get()), expected, "{held} held");
    }
}

/// A change that has failed at its deadline may still be carried out.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_overdue_change_of_each_kind_holds_back_writes_to_its_range() {
    for command in [WRITE, ZEROES, TRIM] {
        let server = Server::start(MIB, FLAGS | can::WRITE_ZEROES | can::TRIM);
        let options = NbdOptions { deadline: Some(DEADLINE), connections: 2, ..server.options() };
        let (thread, source) = (new_thread(), open(options));
        let disk = Rc::new(source.attach(thread.io()));
        server.change(|state| state.holds = (command, 1));
        let of_disk = Rc::clone(&disk);
        let overdue = Running::start(thread.io(), async move {
            let errno = |error: &std::io::Error| error.raw_os_error();
            match command {
                ZEROES => of_disk.write_zeroes(0, 4096, false).await.map_err(|error| errno(&error)),
                TRIM => of_disk.discard(0, 4096).await.map_err(|error| errno(&error)),
                _ => {
                    let written = of_disk.write(0, filled(1, 4096), false).await;
                    written.map_err(|unfinished| errno(unfinished.error()))
                }
            }
        });
        assert_eq!(overdue.end(&thread), Some(libc::ETIMEDOUT), "{command}");
        assert!(source.hand_over().may_still_change(), "{command}");
        let newer = Running::write(&thread, &disk, 0, 2);
        let beside = || Running::write(&thread, &disk, 4096, 3);
        assert_eq!(in_time(&thread, beside), None, "other places can be written to");
        assert_ne!(newer.0.get(), Some(Ok(())), "{command} may land after it");
        server.answer_held();
        assert_eq!(end_in_time(&thread, &disk, newer, 2), None);
        assert_eq!(server.state().content[0], 2, "{command} came last");
        assert!(!source.hand_over().may_still_change(), "{command}");
    }
}
