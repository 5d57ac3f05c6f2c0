//! Files with different engines on one IoThread, with the real kernel.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::*;
use crate::disk::{Disk, DiskOptions, DiskSource};
use crate::thread::IoThread;
use iomem::Buffers;

const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads];

/// The configurations of all engines.
fn configs() -> [EngineConfig; 3] {
    ENGINES.map(EngineConfig::from)
}

/// An IoThread with all engines, `first` from the start.
fn thread(first: EngineConfig, config: &IoThreadConfig) -> IoThread {
    let thread = IoThread::new(&IoThreadConfig { engine: first, ..config.clone() }).unwrap();
    for engine in configs() {
        thread.io().add_engine(engine).unwrap();
    }
    thread
}

fn file() -> (tempfile::NamedTempFile, DiskSource) {
    let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let options = DiskOptions { direct: true, ..DiskOptions::default() };
    let source = DiskSource::file(file.path(), &options).unwrap();
    (file, source)
}

/// Does everything that a disk can do, step by step: the loop sleeps for each step.
async fn use_disk(disk: &Disk, number: u8) {
    for round in 0..8 {
        let (offset, fill) = (round * 4096, [number; 4096]);
        let data = Buffers::aligned(4096, 4096);
        data.copy_from(0, &fill);
        disk.write(offset, data, round % 2 == 0).await.unwrap();
        disk.flush().await.unwrap();
        let data = Buffers::aligned(4096, 4096);
        let view = data.duplicate();
        disk.read(offset, data).await.unwrap();
        assert!(view.to_vec() == fill, "it is not what was written");
        disk.write_zeroes(offset, 4096, false).await.unwrap();
        disk.discard(offset, 4096).await.unwrap();
    }
}

/// Returns a flag that a lost wake sets. The timer behind it ends that sleep, and later ones.
fn guard(thread: &IoThread) -> Rc<Cell<bool>> {
    let (io, is_late) = (Rc::clone(thread.io()), Rc::new(Cell::new(false)));
    let late = Rc::clone(&is_late);
    thread.io().spawn(async move {
        io.sleep_until(Instant::now() + Duration::from_secs(30)).await;
        late.set(true);
        loop {
            io.sleep_until(Instant::now() + Duration::from_millis(1)).await;
        }
    });
    is_late
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn completions_of_each_engine_wake_a_loop_that_has_all_of_them() {
    for (first, harvest_on_submit) in configs().into_iter().flat_map(|e| [(e, true), (e, false)]) {
        // Without a harvest behind the submit, only a wake announces a completion.
        let config =
            IoThreadConfig { harvest_on_submit, poll_max: Duration::ZERO, ..Default::default() };
        let thread = thread(first, &config);
        let is_late = guard(&thread);
        let stats = std::sync::Arc::clone(thread.io().stats());
        for (engine, number) in ENGINES.into_iter().zip(1..) {
            let (_file, source) = file();
            let disk = source.prefer_engine(engine, "the test asks for it").attach(thread.io());
            let before = (stats.syscalls.io_submit.get(), stats.syscalls.epoll_wait.get());
            thread.block_on(use_disk(&disk, number)).unwrap();
            assert!(!is_late.get(), "{engine} on a loop that began with {first:?}: no wake");
            let submits = stats.syscalls.io_submit.get() - before.0;
            assert_eq!(submits > 0, engine == EngineKind::Aio, "{engine}: {submits} submits");
            assert_eq!(stats.syscalls.epoll_wait.get(), before.1, "the ring is what waits");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn disks_with_different_engines_are_busy_at_the_same_time() {
    for submit_max in [u32::MAX, 1] {
        let config = IoThreadConfig { submit_max, depth: 16, ..Default::default() };
        let thread = thread(EngineConfig::Threads, &config);
        let is_late = guard(&thread);
        let null = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        assert_eq!(null.engine_on(thread.io()), None);
        let (files, sources): (Vec<_>, Vec<_>) = (0..6).map(|_| file()).unzip();
        let done = Rc::new(Cell::new(0));
        for (source, index) in sources.into_iter().chain([null]).zip(0_u8..) {
            let engine = ENGINES[usize::from(index) % 3];
            let source = source.prefer_engine(engine, "the test asks for it");
            assert!(!source.has_engine() || source.engine_on(thread.io()) == Some(engine));
            let (io, done) = (Rc::clone(thread.io()), Rc::clone(&done));
            let disk = source.attach(thread.io());
            thread.io().spawn(async move {
                if !source.has_engine() {
                    disk.read(0, Buffers::aligned(4096, 4096)).await.unwrap();
                } else {
                    use_disk(&disk, index + 1).await;
                }
                done.set(done.get() + 1);
                if done.get() == 7 {
                    io.stop();
                }
            });
        }
        thread.run().unwrap();
        assert!(!is_late.get() && done.get() == 7, "a wake was lost");
        drop(files);
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_disk_has_the_engine_that_it_prefers_where_that_is() {
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let (_file, source) = file();
    assert_eq!(source.engine_on(thread.io()), Some(EngineKind::Threads));
    let source = source.prefer_engine(EngineKind::Aio, "the test asks for it");
    assert_eq!(source.engine_on(thread.io()), Some(EngineKind::Threads));
    thread.block_on(use_disk(&source.attach(thread.io()), 1)).unwrap();
    assert_eq!(thread.io().stats().syscalls.io_submit.get(), 0);
    thread.io().add_engine(EngineKind::Aio.into()).unwrap();
    assert_eq!(source.engine_on(thread.io()), Some(EngineKind::Aio));
    thread.block_on(use_disk(&source.attach(thread.io()), 1)).unwrap();
    assert!(thread.io().stats().syscalls.io_submit.get() > 0);
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_program_that_waits_for_the_descriptor_keeps_it() {
    let config = IoThreadConfig { embedded: true, ..IoThreadConfig::default() };
    let thread = IoThread::new(&config).unwrap();
    thread.io().add_engine(EngineKind::Aio.into()).unwrap();
    let error = thread.io().add_engine(EngineKind::IoUring.into()).unwrap_err();
    assert!(error.to_string().contains("choose io_uring at its start"), "{error}");
    let config = IoThreadConfig { engine: EngineKind::IoUring.into(), ..config };
    let thread = IoThread::new(&config).unwrap();
    let new = configs().map(|engine| thread.io().add_engine(engine).unwrap());
    assert_eq!(new, [false, true, false]);
}
