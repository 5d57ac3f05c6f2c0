//! Requests larger than an op.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use iomem::RepeatedBlock;

use super::*;
use crate::Wait;
use crate::config::ByteLimits;

const LARGE: usize = 16 << 20;
const PIECES: u64 = (LARGE / ByteLimits::OP) as u64;

/// A list of many ranges, none of which ends at a bound of pieces.
fn scattered(bytes: usize) -> Buffers {
    RepeatedBlock::pattern(&pattern(2, 36 << 10), 36 << 10, 4096)
        .unwrap()
        .buffers(bytes, ())
        .unwrap()
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn no_op_is_larger_than_the_bound_and_no_byte_is_lost() {
    let bytes = 5 * ByteLimits::OP + 4096;
    with_each(8 * MIB, |thread, disk, file| {
        let (source, target) = (scattered(bytes), Buffers::aligned(bytes, 4096));
        let data = source.to_vec();
        for fua in [false, true] {
            thread.block_on(disk.write(4096, source.duplicate(), fua)).unwrap().unwrap();
        }
        thread.block_on(disk.read(4096, target.duplicate())).unwrap().unwrap();
        assert!(target.to_vec() == data, "data differ");
        assert!(std::fs::read(file.path()).unwrap()[4096..4096 + bytes] == data, "data differ");
        let stats = thread.io().stats();
        assert!(stats.read.ops.get() >= 6, "{} reads", stats.read.ops.get());
        assert!(stats.write.ops.get() >= 12, "{} writes", stats.write.ops.get());
        assert_eq!(stats.bounced.get(), 0, "a piece was misaligned");
    });
}

/// The caller learns the first byte that it does not have, also beyond the first step.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_long_read_that_fails_halfway_has_its_first_part() {
    const CUT: usize = 6 << 20;
    for (engine, _) in SETUPS {
        let file = temp_file(LARGE as u64);
        let data = pattern(3, LARGE);
        std::fs::write(file.path(), &data).unwrap();
        let thread = thread(engine);
        let disk = DiskSource::file(file.path(), &options(false)).unwrap().attach(thread.io());
        file.as_file().set_len(CUT as u64).unwrap();
        let target = Buffers::aligned(LARGE, 4096);
        let unfinished = thread.block_on(disk.read(0, target.duplicate())).unwrap().unwrap_err();
        let (error, rest) = unfinished.into_parts();
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{engine}");
        assert_eq!(LARGE - rest.bytes(), CUT, "{engine}");
        assert!(target.to_vec()[..CUT] == data[..CUT], "{engine}: data differ");
    }
}

/// Small requests come between the pieces of a large one.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn ready_requests_come_between_the_pieces() {
    for (engine, _) in SETUPS {
        let (large, small) = (temp_file(LARGE as u64), temp_file(MIB));
        let thread = thread(engine);
        let io = thread.io();
        let attach = |file: &NamedTempFile| {
            Rc::new(DiskSource::file(file.path(), &options(false)).unwrap().attach(io))
        };
        let (large, small) = (attach(&large), attach(&small));
        let (is_done, served) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(0)));
        let (done, stop) = (Rc::clone(&is_done), Rc::clone(io));
        io.spawn(async move {
            large.read(0, scattered(LARGE)).await.unwrap();
            done.set(true);
            stop.stop();
        });
        let count = Rc::clone(&served);
        io.spawn(async move {
            while !is_done.get() {
                small.read(0, Buffers::aligned(4096, 4096)).await.unwrap();
                count.set(count.get() + 1);
            }
        });
        thread.run().unwrap();
        // With pool threads, which end in any order, there may be fewer.
        assert!(served.get() >= PIECES / 4, "{engine}: {} requests came between", served.get());
    }
}

/// A program that polls from outside of the loop gets the thread back after two ops at most.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_poll_from_outside_moves_two_pieces_at_most() {
    let file = temp_file(LARGE as u64);
    std::fs::write(file.path(), pattern(3, LARGE)).unwrap();
    let thread = thread(EngineKind::IoUring);
    let disk = DiskSource::file(file.path(), &options(false)).unwrap().attach(thread.io());
    let mut read = pin!(disk.read(0, scattered(LARGE)));
    let mut polls = 0;
    loop {
        match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => break result.unwrap(),
            Poll::Pending => polls += 1,
        }
        if thread.io().ops() > 0 {
            thread.turn(Wait::ForEvent).unwrap();
        }
    }
    // The last piece of a step and the first one of the next share a poll.
    assert!(polls >= PIECES / 2, "{polls} polls");
}
