//! Files that lack an operation, or put ops off. The disk remembers the first, and not the second.

use std::time::Instant;

use super::*;
use crate::config::ByteLimits;
use crate::disk::{Extent, ExtentKind};

/// The most bytes of an op.
const OP_BYTES: usize = 8192;

/// A kernel with answers of a test: bytes, or a negative errno.
struct Answers {
    now: Cell<Instant>,
    ops: RefCell<Vec<OpKind>>,
    answer: RefCell<Box<dyn FnMut(OpKind, i64) -> i64>>,
}

impl World for Answers {
    fn now(&self) -> Instant {
        self.now.get()
    }

    fn preempt(&self) {}

    fn ring(&self, _: u32) -> RingSetup {
        unreachable!("its engine has threads")
    }

    fn admit(&self, _: RawFd, count: usize, _: usize) -> Result<usize, libc::c_int> {
        Ok(count)
    }

    fn ends_poll(&self) -> bool {
        false
    }

    fn start(&self, op: KernelOp) -> bool {
        let (kind, bytes) = (op.kind(), i64::try_from(op.buffers().bytes()).unwrap());
        self.ops.borrow_mut().push(kind);
        let result = (self.answer.borrow_mut())(kind, bytes);
        op.answer(result).send();
        true
    }

    fn spin(&self) {
        self.now.set(self.now.get() + Duration::from_micros(1));
    }

    fn run_sq_thread(&self, _: SqThread) {
        unreachable!("no ring has a submission thread");
    }

    fn run_thread(&self, work: Box<dyn FnOnce()>) {
        work();
    }

    fn sleep(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool) {
        if !is_over() {
            let when = deadline.expect("the loop sleeps and nothing will wake it");
            self.now.set(self.now.get().max(when));
        }
    }
}

/// A disk on a kernel with these answers.
fn with_answers(
    is_block_device: bool,
    answer: impl FnMut(OpKind, i64) -> i64 + 'static,
    test: impl FnOnce(&IoThread, &Disk, &Answers),
) {
    let (now, answer) = (Cell::new(Instant::now()), RefCell::new(Box::new(answer) as _));
    let world = Rc::new(Answers { now, ops: RefCell::default(), answer });
    let _installed = install(Rc::<Answers>::clone(&world));
    let bytes = ByteLimits { op: OP_BYTES, ..ByteLimits::default() };
    let engine = EngineKind::Threads.into();
    let config = IoThreadConfig { engine, bytes, ..IoThreadConfig::default() };
    let thread = IoThread::new(&config).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    let disk = simulated_file(&file, is_block_device).attach(thread.io());
    test(&thread, &disk, &world);
}

#[test]
fn a_file_system_is_asked_once_for_durable_writes_that_it_lacks() {
    let (durable, plain) = (OpKind::Write { fua: true }, OpKind::Write { fua: false });
    let answer =
        move |kind, bytes| if kind == durable { -i64::from(libc::EOPNOTSUPP) } else { bytes };
    with_answers(false, answer, |thread, disk, world| {
        for is_first in [true, false] {
            let write = disk.write(0, Buffers::aligned(4 * OP_BYTES, 4096), true);
            thread.block_on(write).unwrap().unwrap();
            let all = [&[durable][..usize::from(is_first)], &[plain; 4], &[OpKind::Flush]];
            assert_eq!(world.ops.take(), all.concat(), "invariant 11: first: {is_first}");
        }
    });
}

#[test]
fn a_file_system_is_asked_once_for_holes_and_zeroes_that_it_lacks() {
    for errno in [libc::EOPNOTSUPP, libc::ENOSYS, libc::ENODEV, libc::ENOTTY] {
        let answer = move |kind, bytes| match kind {
            OpKind::Write { .. } => bytes,
            _ => -i64::from(errno),
        };
        with_answers(false, answer, |thread, disk, world| {
            let ops = || {
                let is_write = |kind: &OpKind| matches!(kind, OpKind::Write { .. });
                let ops = world.ops.take();
                let writes = ops.iter().filter(|kind| is_write(kind)).count();
                (ops.len() - writes, writes)
            };
            for asked in [2, 0] {
                let zeroes = disk.write_zeroes(0, OP_BYTES as u64, true);
                thread.block_on(zeroes).unwrap().unwrap();
                assert_eq!(ops(), (asked, 1), "{errno}");
            }
            for asked in [1, 0] {
                thread.block_on(disk.discard(0, 4096)).unwrap().unwrap();
                assert_eq!(ops(), (asked, 0), "{errno}: a discard is a hint");
            }
        });
    }
}

/// Some file systems do not know the question, some refuse it.
#[test]
fn a_file_system_is_asked_once_for_places_of_holes_that_it_lacks() {
    for (errno, is_asked_again) in
        [(libc::EINVAL, false), (libc::EOPNOTSUPP, false), (libc::EIO, true)]
    {
        let answer = move |_, _| -i64::from(errno);
        with_answers(false, answer, |thread, disk, world| {
            for times in 1..3 {
                let found = thread.block_on(disk.block_status(0, 4096)).unwrap();
                let found = found.map_err(|error| error.raw_os_error());
                let expected = if is_asked_again {
                    Err(Some(errno))
                } else {
                    Ok(Extent { bytes: 4096, kind: ExtentKind::Data })
                };
                assert_eq!(found, expected);
                let asked = if is_asked_again { times } else { 1 };
                assert_eq!(world.ops.borrow().len(), asked, "{errno}");
            }
        });
    }
}

/// A device that has shrunk moves nothing. Zeroes would be wrong.
#[test]
fn an_op_that_moves_nothing_is_an_error_of_a_device_and_the_end_of_a_file() {
    for (is_block_device, bytes, read, write) in [
        (true, 512, Some(libc::EIO), Some(libc::EIO)),
        (true, 4096, Some(libc::EIO), Some(libc::EIO)),
        (false, 4096, Some(libc::EIO), Some(libc::ENOSPC)),
    ] {
        with_answers(
            is_block_device,
            |_, _| 0,
            |thread, disk, _| {
                let errno = |result: Result<(), crate::disk::TransferError>| {
                    result.err().and_then(|unfinished| unfinished.error().raw_os_error())
                };
                let data = || Buffers::aligned(bytes, 512);
                let found = [
                    errno(thread.block_on(disk.read(0, data())).unwrap()),
                    errno(thread.block_on(disk.write(0, data(), false)).unwrap()),
                ];
                assert_eq!(found, [read, write], "device: {is_block_device}, {bytes} bytes");
            },
        );
    }
}

/// Each part of a transfer has its own patience.
#[test]
fn a_transfer_that_makes_progress_may_be_put_off_again_and_again() {
    // In sum far more than an op is put off without progress.
    for (times, is_patient) in [(8, true), (1000, false)] {
        let mut left = times;
        let answer = move |_, _| {
            left = if left > 0 { left - 1 } else { times };
            if left > 0 { -i64::from(libc::EAGAIN) } else { 512 }
        };
        with_answers(false, answer, |thread, disk, world| {
            let begun = world.now.get();
            let read = thread.block_on(disk.read(0, Buffers::aligned(OP_BYTES, 512))).unwrap();
            let errno = read.err().and_then(|unfinished| unfinished.error().raw_os_error());
            assert_eq!(errno, (!is_patient).then_some(libc::EAGAIN));
            assert!(world.now.get() - begun > Duration::from_millis(90));
        });
    }
}
