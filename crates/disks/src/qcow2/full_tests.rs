//! Images on storage with a size of its own, such as a server or a cluster.

use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};

use blockio::testing::RemoteStub;
use blockio::{Disk, DiskOptions, DiskSource, IoThread, IoThreadConfig};
use iomem::Buffers;

use super::core::Layer;

const MIB: usize = 1 << 20;
const CLUSTER: u64 = 64 << 10;

/// The file of a new image of a disk of 16 MiB, resized to `bytes`. `None` without qemu-img.
fn new_file(bytes: usize) -> Option<Vec<u8>> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut create = Command::new("qemu-img");
    let create = create.args(["create", "-q", "-f", "qcow2"]).arg(file.path()).arg("16M");
    if create.stderr(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return None;
    }
    let mut content = std::fs::read(file.path()).unwrap();
    content.resize(bytes, 0);
    Some(content)
}

/// A new image on storage of a fixed size.
fn new_image(bytes: usize) -> Option<RemoteStub> {
    new_file(bytes).map(|content| RemoteStub::fixed_size(&content))
}

/// The disk in an image, with a layer below it and one over it.
fn disk_of(end: &RemoteStub) -> DiskSource {
    let part = DiskSource::raw(end.clone().source(), 0, None).unwrap();
    let image = crate::qcow2::open(vec![Layer::qcow2(part).unwrap()], false).unwrap();
    DiskSource::raw(image, 0, None).unwrap()
}

/// Fills clusters from `from` on until a write fails, and returns the cluster without space.
fn fill(thread: &IoThread, disk: &Disk, from: u64) -> u64 {
    let write = |cluster: &u64| {
        let data = Buffers::from_vec(vec![7; 512]);
        thread.block_on(disk.write(cluster * CLUSTER, data, false)).unwrap()
    };
    let error = |cluster: u64| write(&cluster).err().map(|error| (cluster, error));
    let (cluster, error) = (from..256).find_map(error).unwrap();
    assert_eq!(error.error().raw_os_error(), Some(libc::ENOSPC));
    cluster
}

/// The loop of an image serves all its requests, and a remote end may take long to answer.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_does_not_wait_for_the_size_of_its_remote_end() {
    let Some(end) = new_image(2 * MIB) else { return };
    let source = disk_of(&end);
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = source.attach(thread.io());
    source.set_size(24 * MIB as u64, || ()).unwrap();
    assert_eq!(source.refresh().unwrap(), 24 * MIB as u64);
    let first = fill(&thread, &disk, 0);
    assert_eq!(end.asked(), 0);
    end.tell_size(4 * MIB as u64);
    assert!(fill(&thread, &disk, first) > first);
    assert_eq!(end.asked(), 0);
}

/// Held writes fail again and again until their disk recovers.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn writes_that_fail_repeatedly_do_not_extend_the_image() {
    let Some(content) = new_file(MIB) else { return };
    let end = RemoteStub::new(&content);
    let source = disk_of(&end);
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = source.attach(thread.io());
    let cluster = || Buffers::from_vec(vec![7; 64 << 10]);
    let write = |number| thread.block_on(disk.write(number * CLUSTER, cluster(), false)).unwrap();
    write(0).unwrap();
    let before = end.size_bytes();
    end.have_some_fail(1);
    for _ in 0..100 {
        write(1).unwrap_err();
    }
    assert_eq!(end.size_bytes(), before);
    end.have_some_fail(0);
    write(1).unwrap();
    assert_eq!(end.size_bytes(), before);
}

/// The space is found on request, or by the check that the daemon makes each second. The disk keeps
/// its size.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_uses_the_space_that_a_probe_has_found() {
    let asked = |source: &DiskSource| source.probe_space().unwrap();
    let seen = |source: &DiskSource| {
        assert_eq!(
            source.size_probe().unwrap().size_bytes().unwrap(),
            None,
            "the disk is as it was"
        );
    };
    for probe in [asked, seen] {
        let Some(end) = new_image(2 * MIB) else { return };
        let source = disk_of(&end);
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        let first = fill(&thread, &disk, 0);
        end.have_size(4 * MIB as u64);
        assert_eq!(fill(&thread, &disk, first), first, "nobody has said so");
        probe(&source);
        assert!(fill(&thread, &disk, first) > first + 16);
    }
}

/// Bytes behind the last whole block are no space for a cluster.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_uses_only_whole_blocks_of_its_remote_end() {
    let Some(end) = new_image(2 * MIB) else { return };
    let source = disk_of(&end);
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = source.attach(thread.io());
    let first = fill(&thread, &disk, 0);
    end.tell_size(4 * MIB as u64 - 512);
    assert!(fill(&thread, &disk, first) > first);
}

/// A file system with copy on write needs space for the tables that record the removal.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_removal_on_a_full_file_system_releases_its_space_first() {
    for is_marked in [false, true] {
        for unmaps in [false, true] {
            let Some(content) = new_file(4 * MIB) else { return };
            let end = RemoteStub::exclusive(&content);
            let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
            let write = |disk: &Disk, cluster: u64| {
                let data = Buffers::from_vec(vec![7; 64 << 10]);
                thread.block_on(disk.write(cluster * CLUSTER, data, false)).unwrap().unwrap();
            };
            let mut source = disk_of(&end);
            let mut disk = source.attach(thread.io());
            (0..4).for_each(|cluster| write(&disk, cluster));
            thread.block_on(disk.flush()).unwrap().unwrap();
            if !is_marked {
                drop((disk, source));
                source = disk_of(&end);
                disk = source.attach(thread.io());
            }
            end.have_no_space();
            let removed = match unmaps {
                true => thread.block_on(disk.write_zeroes(0, 2 * CLUSTER, true)).unwrap(),
                false => thread.block_on(disk.discard(0, 2 * CLUSTER)).unwrap(),
            };
            removed.unwrap_or_else(|error| panic!("{is_marked} {unmaps}: {error}"));
            let memory = Buffers::from_vec(vec![1; 4 * MIB / 16]);
            let read = memory.duplicate();
            thread.block_on(disk.read(0, memory)).unwrap().unwrap();
            let (gone, kept) = (vec![0; 128 << 10], vec![7; 128 << 10]);
            assert!(read.to_vec() == [gone, kept].concat(), "{is_marked} {unmaps}");
            drop((disk, source));
            assert_eq!(super::leaks_tests::check(&end.content()), Some(0));
        }
    }
}

/// The file of an image of 4 MiB with clusters of 4 KiB. `None` without qemu-img.
fn new_small(options: &str, below: Option<&Path>) -> Option<Vec<u8>> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size=4k,{options}")]);
    let over = below.map(|below| ["-F", "raw", "-b", below.to_str().unwrap()]);
    create.args(over.into_iter().flatten()).arg(file.path()).arg("4M");
    if create.status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return None;
    }
    let mut content = std::fs::read(file.path()).unwrap();
    content.resize(content.len().next_multiple_of(4096), 0);
    Some(content)
}

/// The disk in an image with these layers.
fn layered(end: &RemoteStub, below: Option<&Path>) -> DiskSource {
    let options = DiskOptions { read_only: true, ..DiskOptions::default() };
    let open = |below: &Path| Layer::raw(DiskSource::file(below, &options).unwrap());
    let top = Layer::qcow2(end.clone().source()).unwrap();
    crate::qcow2::open([top].into_iter().chain(below.map(open)).collect(), false).unwrap()
}

fn content_of(thread: &IoThread, disk: &Disk, range: Range<usize>) -> Vec<u8> {
    let memory = Buffers::aligned(range.len(), 4096);
    let read = memory.duplicate();
    thread.block_on(disk.read(range.start as u64, memory)).unwrap().unwrap();
    read.to_vec()
}

/// Data below an image of the older format would show instead.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_discard_leaves_zeroes_and_releases_their_space_unless_it_would_show_data_below() {
    let below = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(below.path(), vec![9; 4 * MIB]).unwrap();
    for (options, is_over, expected) in [
        ("compat=1.1", false, 0),
        ("compat=1.1", true, 0),
        ("compat=0.10", false, 0),
        ("compat=0.10", true, 7),
    ] {
        let below = is_over.then(|| below.path());
        let Some(content) = new_small(options, below) else { return };
        let (end, thread) =
            (RemoteStub::exclusive(&content), IoThread::new(&IoThreadConfig::default()).unwrap());
        let source = layered(&end, below);
        let disk = source.attach(thread.io());
        let data = Buffers::from_vec(vec![7; 64 << 10]);
        thread.block_on(disk.write(0, data, false)).unwrap().unwrap();
        thread.block_on(disk.discard(0, 64 << 10)).unwrap().unwrap();
        let left = content_of(&thread, &disk, 0..64 << 10);
        assert!(left == vec![expected; 64 << 10], "{options} {is_over}");
        let has_space = end.content().as_chunks::<512>().0.contains(&[7; 512]);
        assert_eq!(has_space, expected == 7, "{options} {is_over}");
    }
}

/// Errors come at any write, with a full file system or without. The removal needs a new table.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_removal_that_is_answered_survives_a_kill() {
    const RANGE: Range<usize> = MIB..3 * MIB;
    let below = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(below.path(), vec![9; 4 * MIB]).unwrap();
    let below = Some(below.path());
    let Some(content) = new_small("compat=1.1", below) else { return };
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let mut answered = [0; 4];
    for case in 0..60 {
        let (is_full, may_unmap, one_fails_in) = (case % 2 == 1, case % 4 > 1, 2 + case / 4);
        let end = RemoteStub::exclusive(&content);
        let source = layered(&end, below);
        let disk = source.attach(thread.io());
        let data = Buffers::from_vec(vec![7; 16 << 10]);
        thread.block_on(disk.write(RANGE.start as u64, data, false)).unwrap().unwrap();
        if is_full {
            end.have_no_space();
        }
        end.have_some_fail(one_fails_in);
        let (start, len) = (RANGE.start as u64, RANGE.len() as u64);
        let zeroed = thread.block_on(disk.write_zeroes(start, len, may_unmap)).unwrap();
        end.have_some_fail(0);
        if zeroed.is_ok() {
            answered[usize::try_from(case % 4).unwrap()] += 1;
            let left = layered(&RemoteStub::exclusive(&end.content()), below);
            let left = content_of(&thread, &left.attach(thread.io()), RANGE);
            assert!(left.iter().all(|byte| *byte == 0), "{case}");
        }
    }
    let [zeroed, _, unmapped, full] = answered;
    assert!(zeroed > 0 && unmapped > 0 && full > 0, "{answered:?}");
}
