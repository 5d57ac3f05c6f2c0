//! Malicious images: opening them fails, or their requests do, and nothing else happens.

use std::os::unix::fs::FileExt as _;
use std::process::Command;

use blockio::{DiskOptions, DiskSource, Error, IoThread, IoThreadConfig};
use iomem::Buffers;
use tempfile::NamedTempFile;

use super::core::Layer;

const CLUSTER: u64 = 512;

/// Makes an image with clusters of 512 bytes, one of them with data, and changes it. `None` without
/// qemu-img.
fn image(options: &str, change: impl FnOnce(&mut Vec<u8>)) -> Option<NamedTempFile> {
    let file = NamedTempFile::new().unwrap();
    let options = format!("cluster_size=512,{options}");
    let mut make = Command::new("qemu-img");
    let made = make.args(["create", "-q", "-f", "qcow2", "-o", &options]).arg(file.path());
    if made.arg("256k").status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return None;
    }
    let mut write = Command::new("qemu-io");
    let written = write.args(["-f", "qcow2", "-c", "write -q 0 512"]).arg(file.path()).status();
    assert!(written.unwrap().success());
    let mut content = std::fs::read(file.path()).unwrap();
    change(&mut content);
    file.as_file().write_all_at(&content, 0).unwrap();
    Some(file)
}

fn open(file: &NamedTempFile) -> Result<DiskSource, Error> {
    let options = DiskOptions { holds_image: true, ..DiskOptions::default() };
    let layers = vec![Layer::qcow2(DiskSource::file(file.path(), &options)?)?];
    crate::qcow2::open(layers, false)
}

fn number(content: &[u8], at: u64) -> u64 {
    let at: usize = iomem::fits(at, "a place");
    u64::from_be_bytes(*content[at..].first_chunk().unwrap())
}

fn set(content: &mut [u8], at: u64, number: u64) {
    let at: usize = iomem::fits(at, "a place");
    content[at..at + 8].copy_from_slice(&number.to_be_bytes());
}

const L1: u64 = 40;
const COUNTS: u64 = 48;
const PLACE: u64 = (1 << 56) - 512;
/// The flag of a cluster that reads as zeroes.
const ZEROES: u64 = 1;

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_with_two_tables_in_one_place_is_refused() {
    for field in [L1, COUNTS] {
        let twice = |content: &mut Vec<u8>| {
            let table = number(content, field);
            let entry = number(content, table);
            set(content, table + 8, entry);
        };
        let Some(file) = image("refcount_bits=1", twice) else { return };
        let error = open(&file).unwrap_err().to_string();
        assert!(error.contains("two of its tables overlap"), "{error}");
        assert!(error.contains("qemu-img check"), "{error}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_whose_tables_are_not_counted_is_refused() {
    let none = |content: &mut Vec<u8>| {
        let table = number(content, COUNTS);
        set(content, table, 0);
    };
    let Some(file) = image("refcount_bits=16", none) else { return };
    let error = open(&file).unwrap_err().to_string();
    assert!(error.contains("has the reference count 0"), "{error}");
}

/// Writes, and returns true on success.
fn writes(source: &DiskSource, offset: u64) -> bool {
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = source.attach(thread.io());
    let memory = Buffers::aligned(512, 512);
    memory.copy_from(0, &[0xff; 512]);
    thread.block_on(disk.write(offset, memory, false)).unwrap().is_ok()
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_place_of_a_table_is_never_allocated() {
    let Some(file) = image("refcount_bits=16", |_| ()) else { return };
    let source = open(&file).unwrap();
    // No block of counts was read to allocate a cluster yet, and all were checked at the opening.
    let content = std::fs::read(file.path()).unwrap();
    let block = number(&content, number(&content, COUNTS));
    let table = number(&content, number(&content, L1)) & PLACE;
    file.as_file().write_all_at(&[0, 0], block + table / CLUSTER * 2).unwrap();
    // Data that exists already needs no place.
    assert!(writes(&source, 0));
    assert!(!writes(&source, 128 << 10));
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn no_data_is_written_over_a_table() {
    for field in [L1, COUNTS] {
        let over = |content: &mut Vec<u8>| {
            let place = number(content, field);
            let second = number(content, number(content, L1)) & PLACE;
            set(content, second, 1 << 63 | place);
        };
        let Some(file) = image("refcount_bits=16", over) else { return };
        let before = std::fs::read(file.path()).unwrap();
        let source = open(&file).unwrap();
        assert!(!writes(&source, 0), "{field}");
        drop(source);
        assert!(std::fs::read(file.path()).unwrap() == before, "{field}");
    }
}

/// A partial write zeroes the rest of the cluster.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn no_table_is_zeroed() {
    for field in [L1, COUNTS] {
        let over = |content: &mut Vec<u8>| {
            let place = number(content, field);
            let second = number(content, number(content, L1)) & PLACE;
            set(content, second, 1 << 63 | place | ZEROES);
        };
        let Some(file) = image("refcount_bits=16,cluster_size=4k", over) else { return };
        let before = std::fs::read(file.path()).unwrap();
        let source = open(&file).unwrap();
        assert!(!writes(&source, 4096 - 512), "{field}");
        drop(source);
        assert!(std::fs::read(file.path()).unwrap() == before, "{field}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_space_of_a_table_is_never_released() {
    for field in [L1, COUNTS] {
        let mut place = 0;
        let over = |content: &mut Vec<u8>| {
            place = number(content, field);
            let second = number(content, number(content, L1)) & PLACE;
            set(content, second, 1 << 63 | place);
            let block = number(content, number(content, COUNTS));
            // The discard lowers the count to one, the correct count of a table.
            let count: usize = iomem::fits(block + place / CLUSTER * 2, "a place");
            content[count..count + 2].copy_from_slice(&2u16.to_be_bytes());
        };
        let Some(file) = image("refcount_bits=16", over) else { return };
        let table = || {
            let place: usize = iomem::fits(place, "a place");
            std::fs::read(file.path()).unwrap()[place..place + 512].to_vec()
        };
        let before = table();
        let source = open(&file).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        let discarded = thread.block_on(disk.discard(0, CLUSTER)).unwrap();
        assert!(table() == before, "{field}: {discarded:?}");
    }
}
