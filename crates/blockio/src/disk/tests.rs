//! Disks over the real kernel, with each engine.

use super::*;
use crate::config::{BounceConfig, EngineConfig, EngineKind, EngineOptions, IoThreadConfig};
use crate::disk::file::source::FileSource;
use crate::thread::IoThread;
use std::cell::Cell;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use tempfile::NamedTempFile;

mod claims;
mod parts;
mod pieces;

/// Engines, and whether they poll for completions.
const SETUPS: [(EngineKind, bool); 4] = [
    (EngineKind::IoUring, false),
    (EngineKind::IoUring, true),
    (EngineKind::Aio, false),
    (EngineKind::Threads, false),
];
const MIB: u64 = 1 << 20;

fn thread(engine: EngineKind) -> IoThread {
    thread_with((engine, false))
}

fn thread_with((engine, iopoll): (EngineKind, bool)) -> IoThread {
    let engine = EngineOptions { iopoll, ..EngineOptions::default() }.engine(engine);
    let config = IoThreadConfig { engine, depth: 64, ..IoThreadConfig::default() };
    IoThread::new(&config).unwrap()
}

/// A disk without knowledge beyond the kernel's answer to each op: its ops go to a polled ring
/// first, even if it cannot be polled.
fn open_unknown(path: &Path, direct: bool) -> DiskSource {
    let mut source = DiskSource::file(path, &options(direct)).unwrap();
    if let SourceKind::File(file) = &mut source.kind {
        file.forget_polling();
    }
    source
}

/// A file next to the sources: the system's temporary folder may lack direct I/O.
fn temp_file(bytes: u64) -> NamedTempFile {
    let file = NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

fn options(direct: bool) -> DiskOptions {
    DiskOptions { direct, ..DiskOptions::default() }
}

/// Runs `test` with a disk over a fresh file, for each engine, direct and with the page cache.
fn with_each(bytes: u64, test: impl Fn(&IoThread, &Disk, &NamedTempFile)) {
    for setup in SETUPS {
        for direct in [true, false] {
            let file = temp_file(bytes);
            let thread = thread_with(setup);
            let source = open_unknown(file.path(), direct);
            test(&thread, &source.attach(thread.io()), &file);
            assert_eq!(thread.io().ops(), 0, "slots are left over");
        }
    }
}

fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| u8::try_from((i * 7 + seed * 13 + i / 509) % 251).unwrap()).collect()
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn written_data_are_read_back() {
    with_each(MIB, |thread, disk, file| {
        let data = pattern(1, 8192);
        let buffers = Buffers::aligned(8192, 4096);
        buffers.copy_from(0, &data);
        thread.block_on(disk.write(4096, buffers, true)).unwrap().unwrap();
        thread.block_on(disk.flush()).unwrap().unwrap();
        let target = Buffers::aligned(8192, 4096);
        let view = target.duplicate();
        thread.block_on(disk.read(4096, target)).unwrap().unwrap();
        assert_eq!(view.to_vec(), data);
        assert_eq!(std::fs::read(file.path()).unwrap()[4096..12288], data);
    });
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn misaligned_memory_is_bounced_only_where_it_must_be() {
    with_each(4 * MIB, |thread, disk, _| {
        for bytes in [512usize * 8, 3 << 20] {
            let bytes_with_skew = bytes + 3;
            let mut source = Buffers::aligned(bytes_with_skew, 4096);
            source.copy_from(0, &pattern(5, bytes_with_skew));
            source.advance(3);
            let expected = source.to_vec();
            thread.block_on(disk.write(0, source, false)).unwrap().unwrap();
            let mut target = Buffers::aligned(bytes_with_skew, 4096);
            target.advance(3);
            let view = target.duplicate();
            thread.block_on(disk.read(0, target)).unwrap().unwrap();
            assert!(view.to_vec() == expected, "data differ");
        }
        let bounced = thread.io().stats().bounced.get();
        assert_eq!(bounced, if disk.info().direct { 4 } else { 0 });
    });
}

/// Requests use the whole budget at once, and all end. Some are dropped on the way.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn misaligned_requests_take_no_more_memory_than_the_budget_has() {
    for (engine, _) in SETUPS {
        let file = temp_file(4 * MIB);
        let config = IoThreadConfig {
            engine: engine.into(),
            bounce: BounceConfig { budget_bytes: 1 << 20, ..BounceConfig::default() },
            ..IoThreadConfig::default()
        };
        let thread = IoThread::new(&config).unwrap();
        let disk = open_unknown(file.path(), true).attach(thread.io());
        let memory = Buffers::aligned((1 << 20) + 1, 4096);
        let read = || {
            let mut buffers = memory.duplicate();
            buffers.advance(1);
            Box::pin(disk.read(0, buffers))
        };
        let mut reads: Vec<_> = (0..200).map(|_| read()).collect();
        let mut polls = 0;
        let all = std::future::poll_fn(|cx| {
            polls += 1;
            reads.retain_mut(|read| match read.as_mut().poll(cx) {
                std::task::Poll::Ready(result) => {
                    result.unwrap();
                    false
                }
                std::task::Poll::Pending => true,
            });
            if polls == 3 {
                reads.drain(..reads.len() / 3).for_each(drop);
            }
            if reads.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        });
        thread.block_on(all).unwrap();
        thread.block_on(disk.flush()).unwrap().unwrap();
        let stats = &thread.io().stats().bounce;
        assert_eq!((stats.bytes_most.get(), stats.failed.get()), (1 << 20, 0), "{engine}");
        assert!(stats.waits.get() > 100, "{engine}: {} waits", stats.waits.get());
        drop(reads);
        while thread.io().ops() > 0 {
            thread.turn(crate::Wait::ForEvent).unwrap();
        }
        assert_eq!(stats.bytes.get(), 0, "{engine}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_lack_of_memory_fails_a_request_and_is_counted() {
    // More than any machine has.
    let bytes = 1 << 46;
    let bounce = BounceConfig { budget_bytes: bytes, piece_bytes_max: bytes, ..Default::default() };
    let thread = IoThread::new(&IoThreadConfig { bounce, ..Default::default() }).unwrap();
    let file = temp_file(MIB);
    let disk = open_unknown(file.path(), false).attach(thread.io());
    let stats = &thread.io().stats().bounce;
    let Kind::File(of_file) = &disk.kind else { panic!("it is no file") };
    let failed = of_file.count_failure(Buffers::uninitialized(bytes, 4096, ()));
    assert_eq!(failed.map(|_| ()).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
    assert_eq!(stats.failed.get(), 1);
    assert!(of_file.count_failure(Buffers::uninitialized(4096, 4096, ())).is_ok());
    assert_eq!((stats.failed.get(), stats.bytes.get()), (1, 0));
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn many_requests_of_one_task_are_in_the_kernel_together() {
    for setup in SETUPS {
        let file = temp_file(MIB);
        let thread = thread_with(setup);
        let source = open_unknown(file.path(), true);
        let disk = std::rc::Rc::new(source.attach(thread.io()));
        let done = std::rc::Rc::new(std::cell::Cell::new(0u32));
        let (io, count) = (std::rc::Rc::clone(thread.io()), std::rc::Rc::clone(&done));
        let finished = std::rc::Rc::clone(&io);
        thread.io().spawn(async move {
            let mut requests = crate::TaskSet::new(io);
            for i in 0..200u64 {
                let (disk, count) = (std::rc::Rc::clone(&disk), std::rc::Rc::clone(&count));
                let request = async move {
                    let offset = i % 256 * 4096;
                    let result = disk.read(offset, Buffers::aligned(4096, 4096)).await;
                    result.unwrap();
                    count.set(count.get() + 1);
                };
                requests.start(request).await;
            }
            requests.finish().await;
            finished.stop();
        });
        thread.run().unwrap();
        assert_eq!(done.get(), 200);
        let stats = thread.io().stats();
        assert_eq!(stats.read.ops.get(), 200);
        assert_eq!(stats.read.bytes.get(), 200 * 4096);
        // All of them come in one round. Parallel tests use the device, too, and later requests
        // come as the disk has room.
        assert!(stats.submitted_at_once.percentile(100.0) >= 8, "submits are not batched");
    }
}

/// No request is lost, and files that cannot be polled for are remembered.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn ops_without_polling_use_the_other_ring() {
    let of_page_cache = temp_file(MIB);
    let of_memory = NamedTempFile::new_in("/dev/shm").unwrap();
    of_memory.as_file().set_len(MIB).unwrap();
    // A tmpfs has had direct I/O since Linux 6.6.
    let has_direct = DiskSource::file(of_memory.path(), &options(true)).is_ok();
    let cases = [(&of_page_cache, false), (&of_memory, has_direct)];
    for ((file, direct), sqpoll) in cases.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        let source = open_unknown(file.path(), direct);
        let SourceKind::File(inner) = &source.kind else { panic!("not a file") };
        assert!(inner.may_be_polled());
        let engine = EngineConfig::IoUring { sqpoll, iopoll: true };
        let config = IoThreadConfig { engine, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        for round in 0..3u64 {
            let disk = source.attach(thread.io());
            let write = |number: u64| {
                let data = Buffers::aligned(4096, 4096);
                data.copy_from(0, &pattern(usize::try_from(round + number).unwrap(), 4096));
                Box::pin(disk.write(number * 4096, data, number.is_multiple_of(2)))
            };
            let mut writes: Vec<_> = (0..100).map(write).collect();
            let all = std::future::poll_fn(|cx| {
                writes.retain_mut(|write| match write.as_mut().poll(cx) {
                    std::task::Poll::Ready(result) => {
                        result.unwrap();
                        false
                    }
                    std::task::Poll::Pending => true,
                });
                if writes.is_empty() {
                    std::task::Poll::Ready(())
                } else {
                    std::task::Poll::Pending
                }
            });
            thread.block_on(all).unwrap();
            assert!(!inner.may_be_polled(), "it is tried over and over");
            let data = std::fs::read(file.path()).unwrap();
            for (number, data) in data.chunks(4096).take(100).enumerate() {
                let seed = usize::try_from(round).unwrap() + number;
                assert!(data == pattern(seed, 4096), "write {number} of round {round}");
            }
        }
        let stats = thread.io().stats();
        assert_eq!((stats.write.ops.get(), stats.write.errors.get()), (300, 0));
        assert_eq!((stats.polled.get(), thread.io().ops()), (0, 0));
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_cut_while_in_use_fails_behind_its_last_sector() {
    with_each(MIB, |thread, disk, file| {
        std::fs::write(file.path(), pattern(2, 1 << 20)).unwrap();
        file.as_file().set_len(5000).unwrap();
        let read = |bytes: usize| {
            let target = Buffers::aligned(bytes, 4096);
            target.copy_from(0, &vec![0xff; bytes]);
            let view = target.duplicate();
            thread.block_on(disk.read(0, target)).unwrap().map(|()| view.to_vec())
        };
        let direct = disk.info().direct;
        let mut expected = pattern(2, 5000);
        expected.resize(5120, 0);
        assert!(read(5120).unwrap() == expected, "invariant 10: direct {direct}");
        let error = io::Error::from(read(16384).unwrap_err());
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "invariant 10: direct {direct}");
        // Until the first probe, a write makes the file longer again.
        let far = Buffers::aligned(4096, 4096);
        far.copy_from(0, &[7; 4096]);
        thread.block_on(disk.write(512 << 10, far, false)).unwrap().unwrap();
        assert_eq!(std::fs::metadata(file.path()).unwrap().len(), (512 << 10) + 4096);
    });
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn discard_gives_space_back_and_zeroing_zeroes() {
    with_each(4 * MIB, |thread, disk, file| {
        let fill = || {
            let data = Buffers::aligned(4 << 20, 4096);
            data.copy_from(0, &vec![0xab; 4 << 20]);
            thread.block_on(disk.write(0, data, false)).unwrap().unwrap();
            thread.block_on(disk.flush()).unwrap().unwrap();
        };
        let blocks = || std::fs::metadata(file.path()).unwrap().blocks();
        fill();
        let full = blocks();
        thread.block_on(disk.discard(MIB, 2 * MIB)).unwrap().unwrap();
        assert!(blocks() <= full - 2 * 2000, "{full} sectors, then {}", blocks());
        for may_unmap in [false, true] {
            fill();
            thread.block_on(disk.write_zeroes(MIB + 512, 2 * MIB, may_unmap)).unwrap().unwrap();
            let data = std::fs::read(file.path()).unwrap();
            let (start, end) = ((1 << 20) + 512, (3 << 20) + 512);
            assert!(data[..start].iter().chain(&data[end..]).all(|byte| *byte == 0xab));
            assert!(data[start..end].iter().all(|byte| *byte == 0));
            assert_eq!(blocks() < full, may_unmap);
        }
    });
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn zeroes_are_written_where_the_file_system_has_no_call_for_it() {
    with_each(4 * MIB, |thread, disk, file| {
        std::fs::write(file.path(), pattern(3, 4 << 20)).unwrap();
        let Kind::File(inner) = &disk.kind else { panic!("not a file") };
        thread.block_on(inner.write_zero_bytes(4096, 3 * MIB, None)).unwrap().unwrap();
        let data = std::fs::read(file.path()).unwrap();
        assert!(data[4096..4096 + (3 << 20)].iter().all(|byte| *byte == 0));
        assert_eq!(data[..4096], pattern(3, 4 << 20)[..4096]);
        assert!(data[4096 + (3 << 20)..] == pattern(3, 4 << 20)[4096 + (3 << 20)..]);
    });
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_full_file_system_is_reported_as_such() {
    let info = DiskSource::null(MIB, &options(false)).unwrap().info();
    let source = DiskSource::new(info, SourceKind::File(FileSource::from_device("/dev/full")));
    // Linux AIO does not take this device.
    let thread = thread(EngineKind::Threads);
    let disk = source.attach(thread.io());
    let result = thread.block_on(disk.write(0, Buffers::aligned(512, 512), false)).unwrap();
    assert_eq!(result.unwrap_err().error().raw_os_error(), Some(libc::ENOSPC));
}

/// A character device has no pages to write back: `fdatasync` fails with EINVAL, and calls that
/// only start writing back, which are no flush, fail with ESPIPE.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_flush_is_an_fdatasync_with_every_engine() {
    for engine in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
        let info = DiskSource::null(MIB, &options(false)).unwrap().info();
        let file = FileSource::from_device("/dev/null");
        let source = DiskSource::new(info, SourceKind::File(file));
        let thread = thread(engine);
        let disk = source.attach(thread.io());
        let error = thread.block_on(disk.flush()).unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{engine}");
    }
}

/// The kernel's log has nothing more to read (EAGAIN), or overwrote messages in between (EPIPE).
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_read_that_would_block_is_tried_again_and_fails_in_the_end() {
    if std::fs::File::options().write(true).open("/dev/kmsg").is_err() {
        eprintln!("skipped: only root can read the kernel's log");
        return;
    }
    let info =
        DiskInfo { size_bytes: 1 << 30, ..DiskSource::null(MIB, &options(false)).unwrap().info() };
    let source = DiskSource::new(info, SourceKind::File(FileSource::from_device("/dev/kmsg")));
    let thread = thread(EngineKind::Threads);
    let disk = source.attach(thread.io());
    let read = || thread.block_on(disk.read(0, Buffers::aligned(64 << 20, 512))).unwrap();
    let errnos = std::iter::repeat_with(|| read().unwrap_err().error().raw_os_error());
    let errno = errnos.take(100).find(|errno| *errno != Some(libc::EPIPE));
    assert_eq!(errno, Some(Some(libc::EAGAIN)));
    let failed = thread.io().stats().read.errors.get();
    assert!(failed >= 2, "it was not tried again");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn ranges_are_checked_and_read_only_is_kept() {
    let file = temp_file(MIB);
    let thread = thread(EngineKind::Threads);
    let options = DiskOptions { read_only: true, ..options(false) };
    let disk = DiskSource::file(file.path(), &options).unwrap().attach(thread.io());
    for (offset, bytes) in
        [(MIB, 512), (MIB - 512, 1024), (1, 512), (0, 100), (u64::MAX - 511, 512)]
    {
        let result = thread.block_on(disk.read(offset, Buffers::aligned(bytes, 512))).unwrap();
        let errno = result.unwrap_err().error().raw_os_error();
        assert_eq!(errno, Some(libc::EINVAL), "{offset} {bytes}");
    }
    let result = thread.block_on(disk.write(0, Buffers::aligned(512, 512), false)).unwrap();
    assert_eq!(result.unwrap_err().error().raw_os_error(), Some(libc::EROFS));
    assert!(thread.block_on(disk.discard(0, 512)).unwrap().is_err());
    assert!(thread.block_on(disk.write_zeroes(0, 512, true)).unwrap().is_err());
}

fn open_error(path: &Path, options: &DiskOptions) -> String {
    DiskSource::file(path, options).unwrap_err().to_string()
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_that_is_no_disk_is_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let plain = options(false);
    let missing = folder.path().join("missing");
    assert!(open_error(&missing, &plain).contains("No such file"));
    assert!(open_error(folder.path(), &plain).contains("is a directory"));
    assert!(open_error(Path::new("/dev/null"), &plain).contains("neither a regular file"));
    assert!(open_error(temp_file(0).path(), &plain).contains("truncate -s"));
    assert!(open_error(temp_file(1000).path(), &plain).contains("truncate -s 1024"));
    let four_k = DiskOptions { logical_block_bytes: Some(4096), ..options(false) };
    assert!(open_error(temp_file(4096 + 512).path(), &four_k).contains("truncate -s 8192"));
    for bytes in [256, 1000, 131_072] {
        let odd = DiskOptions { logical_block_bytes: Some(bytes), ..options(false) };
        assert!(open_error(temp_file(MIB).path(), &odd).contains("power of two"));
    }
    assert!(DiskSource::null(100, &plain).is_err());
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_is_written_by_one_daemon_only() {
    let file = temp_file(MIB);
    let first = DiskSource::file(file.path(), &options(false)).unwrap();
    assert!(open_error(file.path(), &options(false)).contains("locked"));
    drop(first);
    let read_only = DiskOptions { read_only: true, ..options(false) };
    let _one = DiskSource::file(file.path(), &read_only).unwrap();
    let _two = DiskSource::file(file.path(), &read_only).unwrap();
    assert!(open_error(file.path(), &options(false)).contains("locked"));
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn disks_of_one_thread_share_its_engine() {
    let files = [temp_file(MIB), temp_file(MIB)];
    let thread = thread(EngineKind::Aio);
    let disks = files
        .each_ref()
        .map(|f| DiskSource::file(f.path(), &options(true)).unwrap().attach(thread.io()));
    let both = async {
        for (seed, disk) in disks.iter().enumerate() {
            let data = Buffers::aligned(4096, 4096);
            data.copy_from(0, &pattern(seed, 4096));
            disk.write(8192, data, false).await.unwrap();
        }
    };
    thread.block_on(both).unwrap();
    for (seed, file) in files.iter().enumerate() {
        assert!(std::fs::read(file.path()).unwrap()[8192..12288] == pattern(seed, 4096));
    }
    assert_eq!(thread.io().stats().write.ops.get(), 2);
}
