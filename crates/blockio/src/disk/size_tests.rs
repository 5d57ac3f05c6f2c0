//! Disks that change their size while they are in use, and disks that give space back.

use std::os::unix::fs::MetadataExt;

use futures_util::future::join;
use iomem::Buffers;

use super::hand_over::DiskHandOver;
use super::*;
use crate::config::{EngineKind, IoThreadConfig};
use crate::error::Error;
use crate::testing::RemoteStub;
use crate::thread::IoThread;

const MIB: u64 = 1 << 20;

/// Attached disks see the new size at once, and an impossible size changes nothing.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_size_of_a_disk_may_change() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(MIB).unwrap();
    let config = IoThreadConfig { engine: EngineKind::Threads.into(), ..IoThreadConfig::default() };
    let thread = IoThread::new(&config).unwrap();
    let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
    let (other, disk) = (source.clone(), source.attach(thread.io()));
    let can_read = |offset: u64| {
        thread.block_on(disk.read(offset, Buffers::aligned(512, 512))).unwrap().is_ok()
    };
    for (bytes, is_possible) in
        [(2 * MIB, true), (2 * MIB + 100, false), (0, false), (MIB / 2, true), (512, true)]
    {
        let before = source.info().size_bytes;
        file.as_file().set_len(bytes).unwrap();
        let expected = if is_possible { bytes } else { before };
        assert_eq!(other.refresh().is_ok(), is_possible, "{bytes}");
        assert_eq!((source.info().size_bytes, disk.info().size_bytes), (expected, expected));
        let is_there = bytes >= expected;
        assert_eq!((can_read(expected - 512), can_read(expected)), (is_there, false), "{bytes}");
    }
    let null = DiskSource::null(MIB, &DiskOptions::default()).unwrap();
    assert!(null.set_size(MIB + 1, || ()).is_err() && null.set_size(0, || ()).is_err());
    null.set_size(MIB + 512, || ()).unwrap();
    assert_eq!(null.refresh().unwrap(), MIB + 512);
    assert_eq!(null.state(), DiskState::Ready);
}

/// The storage itself may still be as long as it was.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_request_that_waits_for_another_try_fails_if_its_disk_has_shrunk() {
    for size_bytes in [8192, 4096] {
        let end = RemoteStub::new(&[0; 8192]);
        let source = end.clone().source();
        let write = ErrorAction::Retry;
        source.set_error_policy(ErrorPolicy { write, ..ErrorPolicy::default() });
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        end.have_some_fail(1);
        let shrinks = async {
            while source.retry_state().is_none() {
                thread.io().next_round().await;
            }
            source.cut_off(size_bytes);
            end.have_some_fail(0);
            source.resume();
        };
        let write = disk.write(4096, Buffers::aligned(4096, 4096), false);
        let (written, ()) = thread.block_on(join(write, shrinks)).unwrap();
        let errno = written.err().and_then(|unfinished| unfinished.error().raw_os_error());
        let expected = if size_bytes == 8192 { (None, 1) } else { (Some(libc::EINVAL), 0) };
        assert_eq!((errno, end.events()), expected, "{size_bytes}");
    }
}

/// Zeroes would pass for the lost data, and a write beyond the end would keep them.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_that_was_cut_fails_beyond_its_end() {
    let usual = IoThreadConfig::default().engine;
    let ways = [(EngineKind::Threads.into(), false), (usual, false), (usual, true)];
    for ((engine, direct), is_part) in ways.into_iter().flat_map(|way| [(way, false), (way, true)])
    {
        let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
        file.as_file().set_len(MIB).unwrap();
        let thread = IoThread::new(&IoThreadConfig { engine, ..IoThreadConfig::default() });
        let thread = thread.unwrap();
        let options = DiskOptions { direct, ..DiskOptions::default() };
        let source = DiskSource::file(file.path(), &options).unwrap();
        let source = if is_part { DiskSource::raw(source, 0, None).unwrap() } else { source };
        let disk = source.attach(thread.io());
        let errno = |result: std::io::Result<()>| result.err().and_then(|e| e.raw_os_error());
        let read = |offset: u64, bytes: usize| {
            let buffers = Buffers::aligned(bytes, 4096);
            buffers.copy_from(0, &vec![1; bytes]);
            let view = buffers.duplicate();
            let result = thread.block_on(disk.read(offset, buffers)).unwrap();
            (errno(result.map_err(Into::into)), view.to_vec())
        };
        let write = |offset: u64| {
            let data = Buffers::aligned(4096, 4096);
            errno(thread.block_on(disk.write(offset, data, false)).unwrap().map_err(Into::into))
        };
        let zero =
            |offset: u64| errno(thread.block_on(disk.write_zeroes(offset, 4096, false)).unwrap());
        let look = || source.size_probe().unwrap().size_bytes().unwrap();

        let (cut, eio) = (MIB / 2 + 8192, Some(libc::EIO));
        file.as_file().set_len(cut).unwrap();
        assert_eq!((read(MIB / 2, 8192).0, read(cut, 4096).0), (None, eio), "{direct} {is_part}");
        assert_eq!((read(MIB - 4096, 4096).0, read(MIB / 2, 16384).0), (eio, eio));
        // Zeroes complete the last sector and nothing more.
        file.as_file().set_len(cut - 100).unwrap();
        let (error, data) = read(MIB / 2, 8192);
        assert_eq!((error, &data[8092..]), (None, &[0; 100][..]), "{direct} {is_part}");
        assert_eq!(read(cut, 4096).0, eio);

        assert_eq!(look(), Some(cut - 100));
        assert_eq!((write(cut), zero(MIB - 4096), write(cut - 4096)), (eio, eio, None));
        assert_eq!(file.as_file().metadata().unwrap().len(), cut, "the last sector is whole");
        assert_eq!(look(), Some(cut));
        file.as_file().set_len(MIB).unwrap();
        assert_eq!(look(), Some(MIB));
        assert_eq!((write(cut), zero(MIB - 4096), read(cut, 4096).0), (None, None, None));
        file.as_file().set_len(cut).unwrap();
        assert_eq!((look(), write(cut)), (Some(cut), eio));
        // A size that was set is the end of the file from then on.
        source.set_size(2 * MIB, || ()).unwrap();
        assert_eq!((write(2 * MIB - 4096), zero(cut)), (None, None));
        file.as_file().set_len(3 * MIB).unwrap();
        source.refresh().unwrap();
        assert_eq!(write(3 * MIB - 4096), None);
    }
}

/// The answer to an earlier query may come later.
#[test]
fn the_size_is_that_of_the_look_that_began_last() {
    let other_end = RemoteStub::new(&[0; 4096]);
    let source = other_end.clone().source();
    other_end.keep_back(1);
    let asking = source.clone();
    let older = std::thread::spawn(move || asking.refresh().unwrap());
    while other_end.asked() == 0 {
        std::thread::yield_now();
    }
    other_end.announce_size(8192);
    assert_eq!(source.refresh().unwrap(), 8192);
    other_end.keep_back(0);
    assert_eq!(older.join().unwrap(), 8192);
    assert_eq!(source.info().size_bytes, 8192);
}

/// The file follows its disk. It is cut only when no request can begin beyond the new end.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_is_given_the_size_that_its_disk_is_to_have() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(MIB).unwrap();
    let length = || file.as_file().metadata().unwrap().len();
    let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
    source.set_size(4 * MIB, || panic!("nothing is cut off")).unwrap();
    assert_eq!((source.info().size_bytes, length()), (4 * MIB, 4 * MIB));
    let mut seen = None;
    source.set_size(2 * MIB, || seen = Some((source.info().size_bytes, length()))).unwrap();
    assert_eq!(seen, Some((2 * MIB, 4 * MIB)));
    assert_eq!((source.info().size_bytes, length()), (2 * MIB, 2 * MIB));
    for bad in [0, 2 * MIB + 100, u64::MAX - 511, u64::MAX] {
        let error = source.set_size(bad, || ()).unwrap_err().to_string();
        // The error does not advise to cut the file off.
        assert!(!error.contains("truncate"), "{bad}: {error}");
        assert_eq!((source.info().size_bytes, length()), (2 * MIB, 2 * MIB), "{bad}");
    }
    file.as_file().set_len(3 * MIB).unwrap();
    assert_eq!(source.covered_bytes().unwrap(), 3 * MIB);
    drop(source);
    let options = DiskOptions { read_only: true, ..DiskOptions::default() };
    let source = DiskSource::file(file.path(), &options).unwrap();
    assert!(source.set_size(MIB, || ()).unwrap_err().to_string().contains("it is open read-only"));
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn space_is_given_back_in_the_units_that_a_disk_says() {
    let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
    std::fs::write(file.path(), vec![1; 4 << 20]).unwrap();
    file.as_file().sync_all().unwrap();
    let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
    let unit = u64::from(source.discard_bytes().unwrap());
    assert!(unit > 512, "the file system has blocks of {unit} bytes");
    let config = IoThreadConfig { engine: EngineKind::Threads.into(), ..IoThreadConfig::default() };
    let thread = IoThread::new(&config).unwrap();
    let disk = source.attach(thread.io());
    let sectors = || std::fs::metadata(file.path()).unwrap().blocks();
    let full = sectors();
    let discard = |offset, len| thread.block_on(disk.discard(offset, len)).unwrap().unwrap();
    discard(MIB, unit - 512);
    discard(MIB + unit + 512, unit - 512);
    assert_eq!(sectors(), full);
    discard(MIB + 4 * unit, unit);
    assert_eq!(sectors(), full - unit / 512);
}

/// The descriptor has the lock: no other program comes in between.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_open_disk_can_be_handed_over() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(MIB).unwrap();
    let options = DiskOptions::default();
    let source = DiskSource::file(file.path(), &options).unwrap();
    source.hand_over().inherit(Some(libc::EIO), false);
    let handed = || {
        let descriptor = source.hand_over().descriptor().unwrap();
        std::fs::File::from(descriptor.try_clone_to_owned().unwrap())
    };
    for wrong in [
        DiskOptions { direct: true, ..options.clone() },
        DiskOptions { logical_block_bytes: Some(700), ..options.clone() },
    ] {
        assert!(DiskHandOver::open(handed(), file.path(), &wrong).is_err());
    }
    // The file was cut, and the hand-over does not show it.
    file.as_file().set_len(MIB / 2).unwrap();
    let other = DiskHandOver::open(handed(), file.path(), &options).unwrap();
    other.adopt_size(MIB);
    // The size is that of the other process, even if a probe saw the cut file before.
    assert_eq!(other.size_probe().unwrap().size_bytes().unwrap(), Some(MIB / 2));
    other.adopt_size(MIB);
    file.as_file().set_len(MIB).unwrap();
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = other.attach(thread.io());
    let last = disk.write(MIB - 512, Buffers::aligned(512, 512), false);
    assert!(thread.block_on(last).unwrap().is_ok(), "an end that has been seen is no longer one");
    drop((disk, thread));
    assert_eq!((other.info(), other.identity()), (source.info(), source.identity()));
    assert_eq!((source.hand_over().loss(), other.hand_over().loss()), (Some(libc::EIO), None));
    drop(source);
    let error = DiskSource::file(file.path(), &options).unwrap_err();
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    drop(other);
    DiskSource::file(file.path(), &options).unwrap();
}

/// The caller that stops queues makes these requests fail.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_that_wait_show_though_the_disk_may_have_lost_data() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(MIB).unwrap();
    let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
    source.hand_over().inherit(Some(libc::EIO), false);
    let mut tries = crate::disk::qos::error_policy::RetryState::new(&source.shared.retry_stats);
    let no_space = io::Error::from_raw_os_error(libc::ENOSPC);
    assert!(
        tries.record_failure(ErrorAction::Hold, &no_space, std::time::Instant::now()).is_some()
    );
    assert_eq!(source.state(), DiskState::Lost);
    assert!(matches!(source.retry_state(), Some(DiskState::Held(_))));
    drop(tries);
    assert_eq!(source.retry_state(), None);
}
