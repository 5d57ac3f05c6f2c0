//! Tables and data that are missing when an image is opened.

use std::os::unix::fs::FileExt as _;
use std::process::Command;

use blockio::testing::RemoteStub;
use blockio::{DiskOptions, DiskSource, Error, IoThread, IoThreadConfig};
use iomem::Buffers;
use tempfile::NamedTempFile;

use super::core::Layer;

const CLUSTER: u64 = 4096;

/// An image with a table for each 2 MiB of a disk of 16 MiB. `None` without qemu-img.
fn new_image() -> Option<NamedTempFile> {
    create("cluster_size=4k,preallocation=metadata", "16M")
}

fn create(options: &str, size: &str) -> Option<NamedTempFile> {
    let file = NamedTempFile::new().unwrap();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-o", options]).arg(file.path());
    if create.arg(size).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return None;
    }
    Some(file)
}

fn open(file: &NamedTempFile, read_only: bool) -> Result<DiskSource, Error> {
    let options = DiskOptions { read_only, holds_image: true, ..DiskOptions::default() };
    let source = DiskSource::file(file.path(), &options)?;
    crate::qcow2::open(vec![Layer::qcow2(source)?], false)
}

fn number(file: &NamedTempFile, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    file.as_file().read_exact_at(&mut bytes, offset).unwrap();
    u64::from_be_bytes(bytes)
}

/// The place of the L2 table with this index.
fn second(file: &NamedTempFile, index: u64) -> u64 {
    number(file, number(file, 40) + index * 8) & ((1 << 56) - 512)
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_that_ends_before_a_table_has_a_warning() {
    let Some(file) = new_image() else { return };
    assert_eq!(open(&file, false).unwrap().warning(), None);
    let last = (0..8).map(|index| second(&file, index)).max().unwrap();
    file.as_file().set_len(last + CLUSTER / 2).unwrap();
    let warning = open(&file, true).unwrap().warning().unwrap();
    assert!(warning.contains("of its tables (the first is at byte "), "{warning}");
    // The last block of reference counts is gone, too.
    let error = open(&file, false).unwrap_err().to_string();
    assert!(error.contains("has the reference count 0"), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_with_a_table_that_counts_as_free_is_only_read() {
    for index in 0..4 {
        let Some(file) = new_image() else { return };
        let (first, counts) = (number(&file, 40), number(&file, 48));
        let block = number(&file, counts);
        let place = [0, first, counts, second(&file, 3)][index];
        file.as_file().write_all_at(&[0, 0], block + place / CLUSTER * 2).unwrap();
        open(&file, true).unwrap();
        let error = open(&file, false).unwrap_err().to_string();
        let expected = format!("at byte {place} has the reference count 0");
        assert!(error.contains(&expected) && error.contains("qemu-img check -r all"), "{error}");
    }
}

/// The copy of an image with data has lost its end. All of its tables are at the front.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_that_ends_before_its_data_has_a_warning() {
    let Some(file) = create("cluster_size=64k", "64M") else { return };
    let mut write = Command::new("qemu-io");
    write.args(["-f", "qcow2", "-c", "write -q -P 7 0 4M"]).arg(file.path());
    assert!(write.status().unwrap().success());
    assert_eq!(open(&file, false).unwrap().warning(), None);
    let entry = |index: u64| number(&file, second(&file, 0) + index * 8) & ((1 << 56) - 512);
    // A part of the last cluster may be missing.
    file.as_file().set_len(entry(63) + 512).unwrap();
    assert_eq!(open(&file, false).unwrap().warning(), None);
    for (left, part, lost) in [(63, 0, 1), (20, 512, 43), (20, 0, 44)] {
        file.as_file().set_len(entry(left) + part).unwrap();
        let left = left + u64::from(part > 0);
        for read_only in [true, false] {
            let warning = open(&file, read_only).unwrap().warning().unwrap();
            let expected = format!(
                "ends before {lost} of its clusters of data (the first is at byte {})",
                entry(left)
            );
            assert!(warning.contains(&expected) && warning.contains("qemu-img check"), "{warning}");
        }
    }
}

/// A count without a use is a leak, as after a crash, and no loss.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_leak_behind_the_end_of_the_file_has_no_warning() {
    let Some(file) = create("cluster_size=64k", "64M") else { return };
    let clusters = file.as_file().metadata().unwrap().len().div_ceil(64 << 10);
    let block = number(&file, number(&file, 48));
    file.as_file().write_all_at(&[0, 1], block + clusters * 2).unwrap();
    assert_eq!(open(&file, false).unwrap().warning(), None);
}

/// The disk may have ended within a cluster, whose place was known as far as that.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn places_behind_the_old_end_of_a_disk_are_found_again_when_it_grows() {
    const BELOW: u8 = 6;
    const OWN: u8 = 7;
    const KIB: usize = 1 << 10;
    // A part of the last cluster is data of the image, data below, or a hole.
    for (own, below) in [(false, true), (true, true), (true, false), (false, false)] {
        let end = 64 * KIB + 512;
        let Some(image) = create("cluster_size=64k", &end.to_string()) else { return };
        let mut content = std::fs::read(image.path()).unwrap();
        content.resize(content.len().next_multiple_of(4096), 0);
        let mut layers = vec![Layer::qcow2(RemoteStub::exclusive(&content).source()).unwrap()];
        if below {
            layers.push(Layer::raw(RemoteStub::new(&vec![BELOW; end]).source()));
        }
        let source = crate::qcow2::open(layers, false).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        let write = |at: usize, byte: u8| {
            let data = Buffers::from_vec(vec![byte; 512]);
            thread.block_on(disk.write(at as u64, data, false)).unwrap().unwrap();
        };
        let mut expected = vec![if below { BELOW } else { 0 }; end];
        if own {
            write(64 * KIB, OWN);
            expected[64 * KIB..].fill(OWN);
        }
        for bytes in [end, 66 * KIB, 128 * KIB, 300 * KIB] {
            source.set_size(bytes as u64, || ()).unwrap();
            expected.resize(bytes, 0);
            let read = thread.block_on(disk.read_vec(0, bytes)).unwrap().unwrap();
            assert!(read == expected, "{bytes} bytes, own data: {own}, data below: {below}");
            if bytes == end {
                // Its last cluster stays as it is.
                continue;
            }
            let last = bytes - 512;
            write(last, OWN);
            expected[last..].fill(OWN);
            let read = thread.block_on(disk.read_vec(0, bytes)).unwrap().unwrap();
            assert!(read == expected, "written at {last}, own: {own}, below: {below}");
        }
    }
}

/// The content of a new image, in whole blocks.
fn content(options: &str) -> Option<Vec<u8>> {
    let mut content = std::fs::read(create(options, "16M")?.path()).unwrap();
    content.resize(content.len().next_multiple_of(4096), 0);
    Some(content)
}

/// The entry of a cluster is written again, though imago has it in memory already.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_first_write_that_has_failed_is_in_the_file_after_the_next_try() {
    let Some(content) = content("cluster_size=4k") else { return };
    let end = RemoteStub::exclusive(&content);
    let open = || {
        let layer = Layer::qcow2(end.clone().source()).unwrap();
        crate::qcow2::open(vec![layer], false).unwrap()
    };
    let (source, thread) = (open(), IoThread::new(&IoThreadConfig::default()).unwrap());
    let disk = source.attach(thread.io());
    let write = |cluster: u64| {
        let data = Buffers::from_vec(vec![7; 512]);
        thread.block_on(disk.write(cluster * CLUSTER, data, false)).unwrap()
    };
    // From now on clusters are counted ahead, and their entries are written alone.
    (0..3).for_each(|cluster| write(cluster).unwrap());
    // No two entries are in one block of a table, which would be written with the next of them.
    for cluster in [70, 140, 210] {
        end.have_some_fail(1);
        write(cluster).unwrap_err();
        end.have_some_fail(0);
        write(cluster).unwrap();
    }
    thread.block_on(disk.flush()).unwrap().unwrap();
    drop((disk, source));
    let disk = open().attach(thread.io());
    for cluster in [0, 1, 2, 70, 140, 210] {
        let read = thread.block_on(disk.read_vec(cluster * CLUSTER, 512)).unwrap().unwrap();
        assert!(read == [7; 512], "cluster {cluster} is lost");
    }
}

/// Any of its writes and flushes may fail.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_growth_that_is_reported_is_in_the_file() {
    const NEW: u64 = 64 << 20;
    // The table of tables has to move.
    let Some(content) = content("cluster_size=512") else { return };
    let (mut done, mut failed) = (0, 0);
    for one_fails_in in [2, 3, 4, 6, 9] {
        for earlier in 0..10 {
            let end = RemoteStub::exclusive(&content);
            let layer = Layer::qcow2(end.clone().source()).unwrap();
            let source = crate::qcow2::open(vec![layer], false).unwrap();
            let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
            let disk = source.attach(thread.io());
            // Other writes fail, depending on these.
            for cluster in 0..=earlier {
                let data = Buffers::from_vec(vec![7; 512]);
                thread.block_on(disk.write(cluster * 512, data, false)).unwrap().unwrap();
            }
            end.have_some_fail(one_fails_in);
            let grown = source.set_size(NEW, || ());
            end.have_some_fail(0);
            let in_file = Layer::qcow2(end.clone().source()).unwrap().header.unwrap().size_bytes;
            match grown {
                Ok(()) => {
                    done += 1;
                    assert_eq!(in_file, NEW, "{one_fails_in}, {earlier}");
                }
                Err(_) => failed += 1,
            }
            drop((disk, source));
        }
    }
    assert!(done > 5 && failed > 5, "{done} of {}", done + failed);
}
