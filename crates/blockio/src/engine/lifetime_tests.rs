//! Lifetimes of disks, futures and memory, with real engines and safe code alone.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::*;
use crate::config::EngineKind;
use crate::disk::{Disk, DiskOptions, DiskSource};
use crate::thread::IoThread;
use crate::thread::io::Io;
use crate::thread::turn::Wait;
use iomem::Buffers;
use tempfile::TempPath;

const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads];

/// Returns a file that the test does not keep open. A process that keeps it open gets no extra time
/// for the kernel to close a file by itself, for example after a flush by one of its workers.
fn temp_file(fill: u8) -> TempPath {
    let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
    std::fs::write(file.path(), vec![fill; 1 << 20]).unwrap();
    file.into_temp_path()
}

fn open(file: &TempPath) -> DiskSource {
    let options = DiskOptions { direct: true, ..DiskOptions::default() };
    DiskSource::file(file, &options).unwrap()
}

fn poll_once<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// If the kernel wrote to memory after its end, it would write to the memory of the next round.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_disk_that_outlives_its_thread_starts_nothing() {
    let file = temp_file(0x5a);
    for engine in ENGINES {
        let source = open(&file);
        for _ in 0..50 {
            let config =
                IoThreadConfig { engine: engine.into(), depth: 64, ..IoThreadConfig::default() };
            let thread = IoThread::new(&config).unwrap();
            let disk = source.attach(thread.io());
            let before = thread.block_on(disk.read(0, Buffers::aligned(4096, 4096)));
            before.unwrap().unwrap();
            drop(thread);
            for offset in [0, 65_536] {
                let memory = Buffers::aligned(65_536, 4096);
                let view = memory.duplicate();
                let Poll::Ready(result) = poll_once(disk.read(offset, memory)) else {
                    panic!("{engine}: the read of a thread that has ended is still pending");
                };
                assert_eq!(result.unwrap_err().error().raw_os_error(), Some(libc::ECANCELED));
                assert!(view.to_vec().iter().all(|&byte| byte == 0), "{engine}: it was done");
            }
            let flushed = poll_once(disk.flush());
            assert!(matches!(flushed, Poll::Ready(Err(_))), "{engine}: {flushed:?}");
            // The disk itself works: no flush was lost.
            drop(disk);
        }
        let thread =
            IoThread::new(&IoThreadConfig { engine: engine.into(), ..IoThreadConfig::default() });
        let thread = thread.unwrap();
        let disk = source.attach(thread.io());
        thread.block_on(disk.flush()).unwrap().unwrap();
    }
}

/// The owner of memory is the caller's, and its drop may do anything.
struct DropUsesIo(Rc<Io>, Rc<Cell<bool>>);

impl Drop for DropUsesIo {
    fn drop(&mut self) {
        self.1.set(self.0.ops.try_borrow_mut().is_ok());
        self.0.stop();
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn memory_of_a_dropped_op_may_use_the_io_thread_when_it_goes() {
    let file = temp_file(0x5a);
    for engine in ENGINES {
        let config = IoThreadConfig { engine: engine.into(), ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        let disk = open(&file).attach(thread.io());
        let gone = Rc::new(Cell::new(false));
        let owner = DropUsesIo(Rc::clone(thread.io()), Rc::clone(&gone));
        let memory = Buffers::uninitialized(4096, 4096, owner).unwrap();
        let read = async { poll_once(disk.read(0, memory)).is_pending() };
        assert!(thread.block_on(read).unwrap());
        // The loop stops when the memory is dropped.
        thread.run().unwrap();
        assert!(gone.get(), "{engine}: its owner cannot use the IoThread");
    }
}

/// A submission thread takes entries later, and they name files by an index.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_dropped_write_goes_to_its_own_disk() {
    let (a, b) = (temp_file(0), temp_file(0));
    let (source_a, source_b) = (open(&a), open(&b));
    for sqpoll in [true, false] {
        let engine = EngineConfig::IoUring { sqpoll, iopoll: false };
        let config = IoThreadConfig { engine, depth: 64, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        for round in 0..200u8 {
            let disk_a = source_a.attach(thread.io());
            let data = Buffers::aligned(4096, 4096);
            data.copy_from(0, &[round + 1; 4096]);
            let _ = poll_once(disk_a.write(4096, data, false));
            drop(disk_a);
            let disk_b = source_b.attach(thread.io());
            let read = thread.block_on(disk_b.read(4096, Buffers::aligned(4096, 4096))).unwrap();
            read.unwrap();
            while thread.io().ops() > 0 {
                thread.turn(Wait::ForEvent).unwrap();
            }
            let at = |file: &TempPath| std::fs::read(file).unwrap()[4096];
            assert_eq!((at(&a), at(&b)), (round + 1, 0), "sqpoll {sqpoll}, round {round}");
        }
    }
}

/// The file of a dropped disk is closed: its lock ends, and its device is free.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_is_given_back_with_its_last_op() {
    let file = temp_file(1);
    for engine in ENGINES {
        let config =
            IoThreadConfig { engine: engine.into(), depth: 64, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        for waits in [false, true] {
            let disk = open(&file).attach(thread.io());
            if waits {
                let _ = poll_once(disk.read(0, Buffers::aligned(4096, 4096)));
            }
            drop(disk);
            while thread.io().ops() > 0 {
                thread.turn(Wait::ForEvent).unwrap();
            }
            // The file was opened for writing, which its lock allows once at a time.
            drop(open(&file));
        }
    }
}

/// A future that is dropped in the middle leaves its slot to its op, and no slot is lost.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn futures_may_be_dropped_at_any_time() {
    let file = temp_file(0x77);
    let source = open(&file);
    for engine in ENGINES {
        let config =
            IoThreadConfig { engine: engine.into(), depth: 64, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        let disk: Disk = source.attach(thread.io());
        for round in 0..300u64 {
            let offset = round % 256 * 4096;
            let mut read = Box::pin(disk.read(offset, Buffers::aligned(4096, 4096)));
            let _ = read.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            if round % 3 == 0 {
                // Its op may be done after this turn, or not.
                thread.turn(Wait::Never).unwrap();
            }
            drop(read);
            let view = Buffers::aligned(4096, 4096);
            let data = view.duplicate();
            thread.block_on(disk.read(offset, view)).unwrap().unwrap();
            assert!(data.to_vec().iter().all(|&byte| byte == 0x77));
        }
        while thread.io().ops() > 0 {
            thread.turn(Wait::ForEvent).unwrap();
        }
    }
}
