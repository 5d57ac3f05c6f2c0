//! What a server is asked for, by what it says that it can.

use std::rc::Rc;

use super::super::handshake::can;
use super::super::scripted::{FLUSH, Server, TRIM, WRITE, ZEROES};
use super::super::wire::{FLAG_FAST_ZERO, FLAG_FUA, FLAG_NO_HOLE};
use super::{MIB, filled, new_thread, open};

/// What is asked of the disk.
#[derive(Debug, Clone, Copy)]
enum Asked {
    Durable,
    Discard,
    Zeroes { may_unmap: bool },
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_server_is_asked_for_what_it_can() {
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
            // A server that is no faster with zeroes does nothing, which is what a discard may do.
            Discard => thread.block_on(disk.discard(0, bytes)).unwrap().unwrap(),
            Zeroes { may_unmap } => {
                thread.block_on(disk.write_zeroes(0, bytes, may_unmap)).unwrap().unwrap();
            }
        }
        let state = server.state();
        assert_eq!(state.seen, expected, "{asked:?} with {flags:#x}");
        let first = match asked {
            Durable => 1,
            Discard => 7,
            Zeroes { .. } => 0,
        };
        assert_eq!(state.content[0], first, "{asked:?} with {flags:#x}");
        assert_eq!(state.content[2 * MIB], 7, "it went beyond");
    }
}
