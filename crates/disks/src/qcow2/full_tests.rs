//! Images on storage with a size of its own, such as a server or a cluster.

use std::process::{Command, Stdio};

use blockio::testing::RemoteStub;
use blockio::{Disk, DiskSource, IoThread, IoThreadConfig};
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
    end.announce_size(4 * MIB as u64);
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
    end.announce_size(4 * MIB as u64 - 512);
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

/// A file system may have data in a part that would go.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn sizes_that_an_image_cannot_have_are_refused() {
    let Some(end) = new_image(2 * MIB) else { return };
    let image = crate::qcow2::open(vec![Layer::qcow2(end.source()).unwrap()], false).unwrap();
    let now = 16 * MIB as u64;
    for (bytes, expected) in [
        (now / 2, "can only grow"),
        (now + 100, "not a multiple of the logical block"),
        (1 << 62, "is too large"),
    ] {
        let error = image.set_size(bytes, || ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{bytes}: {error}");
        assert_eq!(image.refresh().unwrap(), now, "{bytes}");
    }
}
