//! Promises of every kind of disk.

use std::io;
use std::os::unix::fs::FileExt;
use std::task::{Context, Poll, Waker};

use blockio::disk::{DiskState, ExtentKind};
use blockio::testing::{Call, HandOverFacts, RemoteStub};
use blockio::{Disk, DiskOptions, DiskSource, EngineConfig, EngineKind, IoThread, IoThreadConfig};
use iomem::Buffers;
use tempfile::NamedTempFile;

const MIB: u64 = 1 << 20;

fn new_thread() -> IoThread {
    IoThread::new(&IoThreadConfig::default()).unwrap()
}

/// A file next to the sources: the system's temporary folder may lack direct I/O.
fn temp_file(bytes: u64) -> NamedTempFile {
    let file = NamedTempFile::new_in(blockio::testing::disk_folder()).unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

fn open(file: &NamedTempFile, direct: bool) -> DiskSource {
    let options = DiskOptions { direct, ..DiskOptions::default() };
    DiskSource::file(file.path(), &options).unwrap()
}

fn elsewhere(bytes: u64) -> RemoteStub {
    RemoteStub::new(&vec![0; usize::try_from(bytes).unwrap()])
}

/// Runs `test` with a disk of 4 MiB of each kind, and layers of them.
fn with_each(test: impl Fn(&IoThread, DiskSource)) {
    let part = |source, offset, size| DiskSource::raw(source, offset, size).unwrap();
    let whole = |source| part(source, 0, None);
    for direct in [false, true] {
        let [file, larger] = [4 * MIB, 6 * MIB].map(temp_file);
        test(&new_thread(), open(&file, direct));
        test(&new_thread(), whole(open(&file, direct)));
        test(&new_thread(), part(open(&larger, direct), MIB + 512, Some(4 * MIB)));
        test(&new_thread(), whole(whole(part(open(&larger, direct), 2 * MIB, None))));
        test_encrypted(&test, direct);
    }
    test(&new_thread(), elsewhere(4 * MIB).source());
    test(&new_thread(), part(elsewhere(5 * MIB).source(), MIB, None));
}

/// Runs `test` with an encrypted disk.
fn test_encrypted(test: &impl Fn(&IoThread, DiskSource), direct: bool) {
    use crate::luks::tests::{DATA_OFFSET, header, image, options};

    let file = image(&header(|_| ()), DATA_OFFSET + 4 * MIB);
    test(&new_thread(), crate::luks::open(open(&file, direct), &options(true)).unwrap());
}

/// Buffers with these bytes, which begin `skew` bytes behind an aligned address.
fn filled(data: &[u8], skew: usize) -> Buffers {
    let mut buffers = Buffers::aligned(data.len() + skew, 4096);
    buffers.advance(skew);
    buffers.copy_from(0, data);
    buffers
}

fn read(thread: &IoThread, disk: &Disk, offset: u64, bytes: usize) -> Vec<u8> {
    let target = filled(&vec![0xee; bytes], bytes % 3);
    let view = target.duplicate();
    thread.block_on(disk.read(offset, target)).unwrap().unwrap();
    view.to_vec()
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at + at / 509) % 251 + 1).unwrap()).collect()
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn written_data_is_read_back_from_each_kind() {
    with_each(|thread, source| {
        let (disk, data) = (source.attach(thread.io()), pattern(70_144));
        assert_eq!((source.info().size_bytes, disk.info()), (4 * MIB, source.info()));
        for (offset, skew, fua) in
            [(0, 0, true), (MIB + 512, 5, false), (4 * MIB - 70_144, 0, true)]
        {
            thread.block_on(disk.write(offset, filled(&data, skew), fua)).unwrap().unwrap();
            assert!(read(thread, &disk, offset, data.len()) == data, "{offset}");
        }
        thread.block_on(disk.flush()).unwrap().unwrap();
        let part = thread.block_on(disk.read_part(MIB + 512, 70_144)).unwrap().unwrap();
        let bytes = part.bytes();
        assert!((512..=70_144).contains(&bytes) && part.to_vec() == data[..bytes]);
        drop(part);
        thread.block_on(disk.write_zeroes(MIB, 32_768, true)).unwrap().unwrap();
        let now = read(thread, &disk, MIB, 70_656);
        assert!(now[..32_768].iter().all(|byte| *byte == 0) && now[32_768..] == data[32_256..]);
        thread.block_on(disk.discard(2 * MIB, MIB)).unwrap().unwrap();
        assert!(read(thread, &disk, MIB, 70_656) == now, "a discard went too far");
        assert_eq!(thread.io().ops(), 0, "slots are left over");
    });
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_stay_on_each_kind_of_disk() {
    let errno = |result: io::Result<()>| result.unwrap_err().raw_os_error();
    with_each(|thread, source| {
        let disk = source.attach(thread.io());
        for (offset, len) in
            [(4 * MIB, 512), (4 * MIB - 512, 1024), (256, 512), (u64::MAX - 511, 512)]
        {
            let data = || filled(&vec![1; usize::try_from(len).unwrap()], 0);
            let results = [
                thread.block_on(disk.read(offset, data())).unwrap().map_err(Into::into),
                thread.block_on(disk.write(offset, data(), false)).unwrap().map_err(Into::into),
                thread.block_on(disk.discard(offset, len)).unwrap(),
                thread.block_on(disk.write_zeroes(offset, len, false)).unwrap(),
                thread.block_on(disk.block_status(offset, len)).unwrap().map(|_| ()),
                thread.block_on(disk.read_part(offset, len)).unwrap().map(|_| ()),
            ];
            for result in results {
                assert_eq!(errno(result), Some(libc::EINVAL), "{offset} {len}");
            }
        }
        for result in [disk.discard(4 * MIB, 0), disk.discard(0, 0)] {
            thread.block_on(result).unwrap().unwrap();
        }
        thread.block_on(disk.write_zeroes(4 * MIB, 0, true)).unwrap().unwrap();
    });
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn all_of_a_disk_has_a_status_in_each_kind() {
    with_each(|thread, source| {
        let disk = source.attach(thread.io());
        thread.block_on(disk.write(MIB, filled(&pattern(65_536), 0), false)).unwrap().unwrap();
        let mut offset = 0;
        while offset < 4 * MIB {
            let len = 4 * MIB - offset;
            let extent = thread.block_on(disk.block_status(offset, len)).unwrap().unwrap();
            assert!((1..=len).contains(&extent.bytes), "{extent:?}");
            let bytes = usize::try_from(extent.bytes).unwrap();
            let is_zero = read(thread, &disk, offset, bytes).iter().all(|byte| *byte == 0);
            assert!(extent.kind == ExtentKind::Data || is_zero, "{extent:?} at {offset}");
            offset += extent.bytes;
        }
        assert!(thread.block_on(disk.block_status(0, 0)).unwrap().is_err());
    });
}

/// Each engine finds holes, also with blocks larger than the pages of the file.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn holes_of_a_file_are_known() {
    let usual = IoThreadConfig::default().engine;
    for engine in [EngineConfig::Threads, usual] {
        let file = temp_file(4 * MIB);
        file.as_file().write_all_at(&[1; 4096], MIB).unwrap();
        file.as_file().write_all_at(&[1; 4096], 2 * MIB + 4096).unwrap();
        for (logical_block_bytes, start, bytes) in
            [(512, 2 * MIB + 4096, 4096), (8192, 2 * MIB, 8192)]
        {
            let thread = IoThread::new(&IoThreadConfig { engine, ..IoThreadConfig::default() });
            let thread = thread.unwrap();
            let logical_block_bytes = Some(logical_block_bytes);
            let options =
                DiskOptions { no_lock: true, logical_block_bytes, ..DiskOptions::default() };
            let source = DiskSource::file(file.path(), &options).unwrap();
            let source = DiskSource::raw(source, 512 << 10, None).unwrap();
            let (disk, offset) = (source.attach(thread.io()), MIB / 2);
            let status = |at: u64, len: u64| {
                let extent = thread.block_on(disk.block_status(at - offset, len)).unwrap().unwrap();
                (extent.bytes, extent.kind == ExtentKind::Hole)
            };
            let first = u64::from(options.logical_block_bytes.unwrap()).max(4096);
            assert_eq!(status(offset, 3 * MIB), (offset, true));
            assert_eq!(status(MIB, 3 * MIB), (first, false));
            assert_eq!(status(MIB + first, MIB), (start - MIB - first, true));
            assert_eq!(status(start, 4 * MIB - start), (bytes, false));
            assert_eq!(status(start + bytes, MIB), (MIB, true));
            // Nothing is stored behind the end.
            file.as_file().set_len(3 * MIB).unwrap();
            assert_eq!(status(3 * MIB, MIB), (MIB, true));
            file.as_file().set_len(4 * MIB).unwrap();
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_disk_gets_another_size_with_all_that_lies_on_it() {
    let file = temp_file(4 * MIB);
    let source = DiskSource::raw(open(&file, false), MIB, None).unwrap();
    let outside = source.size_probe().unwrap();
    file.as_file().set_len(5 * MIB).unwrap();
    assert_eq!(outside.size_bytes().unwrap(), Some(4 * MIB));
    assert_eq!(source.info().size_bytes, 3 * MIB, "nobody has taken it over");
    assert_eq!((source.refresh().unwrap(), source.info().size_bytes), (4 * MIB, 4 * MIB));
    let mut settled = false;
    source.set_size(2 * MIB, || settled = true).unwrap();
    assert_eq!(file.as_file().metadata().unwrap().len(), 3 * MIB);
    assert!(settled && source.covered_bytes().unwrap() == 2 * MIB);
    assert!(source.set_size(0, || ()).is_err() && source.set_size(100, || ()).is_err());
    assert_eq!(source.info().size_bytes, 2 * MIB);
    // In another process the disk keeps its size, although the file was cut.
    let taken = DiskSource::raw(open_again(&file), MIB, None).unwrap();
    taken.adopt_size(4 * MIB);
    let thread = new_thread();
    let taken = taken.attach(thread.io());
    let cut = taken.read_part(3 * MIB, 512);
    assert_eq!(thread.block_on(cut).unwrap().unwrap_err().raw_os_error(), Some(libc::EIO));
    let fixed = DiskSource::raw(open_again(&file), MIB, Some(MIB)).unwrap();
    assert!(fixed.size_probe().is_none() && !fixed.abilities().resize);
    assert!(fixed.set_size(512, || ()).unwrap_err().to_string().contains("its size was set"));
    let end = elsewhere(MIB);
    let told = DiskSource::raw(end.clone().source(), 512, None).unwrap();
    end.announce_size(2 * MIB);
    assert_eq!(told.size_probe().unwrap().size_bytes().unwrap(), Some(2 * MIB - 512));
    assert_eq!(told.refresh().unwrap(), 2 * MIB - 512);
}

fn open_again(file: &NamedTempFile) -> DiskSource {
    let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
    DiskSource::file(file.path(), &options).unwrap()
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn parts_are_disks_of_their_own_and_all_of_a_disk_is_that_disk() {
    let file = temp_file(4 * MIB);
    let source = open(&file, false);
    let of = |offset, size| DiskSource::raw(source.clone(), offset, size).unwrap();
    assert_eq!(of(0, None).identity(), source.identity());
    let parts = [of(0, Some(MIB)), of(MIB, None), of(MIB, Some(MIB)), source.clone()];
    let names: std::collections::BTreeSet<&str> = parts.iter().map(DiskSource::identity).collect();
    assert_eq!(names.len(), 4);
    let before = of(MIB, None).identity().to_owned();
    source.set_size(8 * MIB, || ()).unwrap();
    assert_eq!(of(MIB, None).identity(), before);
    let kinds =
        |source: &DiskSource| source.chain().iter().map(|link| link.kind).collect::<Vec<_>>();
    assert_eq!(kinds(&DiskSource::raw(of(MIB, None), 0, None).unwrap()), ["raw", "raw", "file"]);
    for (offset, size, expected) in [
        (100, None, "its offset of 100 bytes is not a multiple"),
        (0, Some(100), "its size of 100 bytes is not a multiple"),
        (8 * MIB, None, "0 of them from offset"),
        (MIB, Some(8 * MIB), "choose a smaller offset or size"),
        (0, Some(0), "above zero"),
    ] {
        let error = DiskSource::raw(source.clone(), offset, size).unwrap_err().to_string();
        assert!(
            error.contains(expected) && error.contains(file.path().to_str().unwrap()),
            "{error}"
        );
    }
    // A part has the engine of its file, and blocks that fit its offset.
    let odd = of(512, None).prefer_engine(EngineKind::Aio, "a test");
    let thread = new_thread();
    thread.io().add_engine(EngineKind::Aio.into()).unwrap();
    assert_eq!(odd.engine_on(thread.io()), Some(EngineKind::Aio));
    assert_eq!((odd.info().physical_block_bytes, odd.discard_bytes()), (512, Some(512)));
    let away = elsewhere(512).source();
    assert!(odd.hand_over().descriptor().is_some() && away.hand_over().descriptor().is_none());
}

/// Requests wait for an end that is away: they are neither lost nor failed, until the disk is given
/// up.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn requests_wait_for_an_end_that_is_away_until_it_is_abandoned() {
    for gives_up in [false, true] {
        let end = elsewhere(MIB);
        let source = DiskSource::raw(end.clone().source(), 0, None).unwrap();
        assert_eq!((source.state(), source.has_engine()), (DiskState::Ready, false));
        end.set_away(true);
        assert!(matches!(source.state(), DiskState::Away(_)) && source.stalled_since().is_some());
        let thread = new_thread();
        let disk = source.attach(thread.io());
        let mut write = Box::pin(disk.write(0, filled(&[7; 512], 0), false));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(matches!(write.as_mut().poll(&mut cx), Poll::Pending));
        assert_eq!(source.remark().unwrap(), "1 jobs");
        if gives_up {
            source.abandon();
            let error = thread.block_on(write).unwrap().unwrap_err();
            assert_eq!(error.error().raw_os_error(), Some(libc::EIO));
        } else {
            end.set_away(false);
            thread.block_on(write).unwrap().unwrap();
            assert_eq!(read(&thread, &disk, 0, 512), [7; 512]);
        }
    }
}

/// A layer of each kind over the disk `end`, and the bytes of that disk before the layer's.
fn layers(end: &RemoteStub) -> Vec<(DiskSource, u64)> {
    use crate::luks::tests::{DATA_OFFSET, options};

    let source = || end.clone().source();
    let part = |source, offset, size| DiskSource::raw(source, offset, size).unwrap();
    let encrypted = || crate::luks::open(source(), &options(false)).unwrap();
    vec![
        (part(source(), 0, None), 0),
        (part(source(), MIB, None), MIB),
        (encrypted(), DATA_OFFSET),
        (part(encrypted(), MIB, None), DATA_OFFSET + MIB),
    ]
}

/// Another process, the end of a queue and a full image ask a disk by its top layer.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn layers_pass_questions_and_orders_on_to_the_disk_below() {
    use crate::luks::tests::{DATA_OFFSET, header};

    let mut content = header(|_| ());
    content.resize(usize::try_from(DATA_OFFSET + 4 * MIB).unwrap(), 0);
    let end = RemoteStub::new(&content);
    for (source, offset) in layers(&end) {
        let (handed, name) = (source.hand_over(), source.chain_text());
        end.take_calls();
        for number in 0..8 {
            let [is_flushed, may_still_change, is_written_back] =
                [1, 2, 4].map(|bit| number & bit != 0);
            end.set_hand_over(HandOverFacts { is_flushed, may_still_change, is_written_back });
            let seen = HandOverFacts {
                is_flushed: handed.is_flushed(),
                may_still_change: handed.may_still_change(),
                is_written_back: handed.is_written_back(),
            };
            assert_eq!(seen, HandOverFacts { is_flushed, may_still_change, is_written_back });
        }
        assert_eq!(source.state(), DiskState::Ready);
        end.set_away(true);
        assert!(matches!(source.state(), DiskState::Away(_)), "{name}");
        end.set_away(false);
        handed.inherit(Some(libc::ENOSPC), false);
        handed.inherit(None, true);
        handed.write_back().unwrap();
        handed.release_lock();
        source.probe_space().unwrap();
        source.check_new_size(2 * MIB).unwrap();
        source.adopt_size(3 * MIB);
        source.abandon();
        let expected = [
            Call::Inherit(Some(libc::ENOSPC), false),
            Call::Inherit(None, true),
            Call::WriteBack,
            Call::ReleaseLock,
            Call::ProbeSpace,
            Call::CheckSize(offset + 2 * MIB),
            Call::AdoptSize(offset + 3 * MIB),
            Call::Abandon,
        ];
        assert_eq!(end.take_calls(), expected, "{name}");
        assert_eq!(source.info().size_bytes, 3 * MIB);
        // The size that a server has announced counts before the disk has taken it over.
        end.announce_size(offset + 5 * MIB);
        assert_eq!(source.covered_bytes().unwrap(), 5 * MIB, "{name}");
        end.announce_size(DATA_OFFSET + 4 * MIB);
    }
}

/// A backing file may be on a disk that goes away, and has a lock and a cache.
#[test]
#[cfg(feature = "qcow2")]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_passes_questions_and_orders_on_to_its_backing_file() {
    use crate::qcow2::Layer;

    let file = NamedTempFile::new().unwrap();
    let mut create = std::process::Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-u", "-F", "raw", "-b", "below"]);
    if create.arg(file.path()).arg("4M").status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let options = DiskOptions { holds_image: true, no_lock: true, ..DiskOptions::default() };
    let below = elsewhere(4 * MIB);
    let top = Layer::qcow2(DiskSource::file(file.path(), &options).unwrap()).unwrap();
    let layers = vec![top, Layer::raw(below.clone().source())];
    let source = crate::qcow2::open(layers, false).unwrap();
    // The bytes of the disk may be anywhere in the file.
    let place = source.place();
    assert!(place.is_spread && !place.disk.is_empty(), "{place:?}");
    let part = |offset| DiskSource::raw(source.clone(), offset, Some(MIB)).unwrap().place();
    assert!(part(0).overlaps(&part(2 * MIB)) && part(MIB) == place);
    assert_eq!(source.state(), DiskState::Ready);
    below.set_away(true);
    assert!(matches!(source.state(), DiskState::Away(_)));
    below.set_away(false);
    below.take_calls();
    source.hand_over().write_back().unwrap();
    source.hand_over().release_lock();
    source.abandon();
    assert_eq!(below.take_calls(), [Call::WriteBack, Call::ReleaseLock, Call::Abandon]);
}

/// A part with a size of its own keeps it.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_part_of_fixed_size_does_not_resize_the_disk_below() {
    let end = elsewhere(4 * MIB);
    let part = DiskSource::raw(end.clone().source(), MIB, Some(MIB)).unwrap();
    part.adopt_size(2 * MIB);
    assert!(part.check_new_size(2 * MIB).is_err());
    assert_eq!(end.take_calls(), []);
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_query_for_holes_is_short_and_not_counted() {
    let file = temp_file(4 << 30);
    let (thread, source) = (new_thread(), open(&file, false));
    let disk = source.attach(thread.io());
    let extent = thread.block_on(disk.block_status(0, 4 << 30)).unwrap().unwrap();
    assert_eq!(extent.bytes, 1 << 30);
    let stats = thread.io().stats();
    for counted in [&stats.read, &stats.write, &stats.flush, &stats.deallocate] {
        assert_eq!((counted.ops.get(), counted.bytes.get()), (0, 0));
    }
    thread.block_on(disk.discard(0, 1 << 20)).unwrap().unwrap();
    assert_eq!(stats.deallocate.ops.get(), 1);
}
