//! Checks of images that were not closed, with any content.

use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::time::Duration;

use blockio::testing::{Event, RemoteStub};
use blockio::{DiskOptions, DiskSource, Error, IoThread, IoThreadConfig};
use iomem::Buffers;
use tempfile::NamedTempFile;

use super::core::Layer;
use crate::qcow2::consistency::counts;
use crate::qcow2::consistency::leaks::{BOUNDS, Bounds, READ_BYTES_MIN, find, free};
use crate::qcow2::consistency::mark;

const L1: u64 = 40;
const COUNTS: u64 = 48;
const PLACE: u64 = (1 << 56) - 512;
const COPIED: u64 = 1 << 63;

/// The bytes of an image that was not closed.
struct Image {
    content: Vec<u8>,
    cluster: u64,
    bits: u32,
}

fn number(content: &[u8], at: u64) -> u64 {
    let at: usize = iomem::fits(at, "a place");
    u64::from_be_bytes(*content[at..].first_chunk().unwrap())
}

fn set(content: &mut [u8], at: u64, number: u64) {
    let at: usize = iomem::fits(at, "a place");
    content[at..at + 8].copy_from_slice(&number.to_be_bytes());
}

impl Image {
    /// Makes an image of a disk of 1 MiB, in which QEMU has written at some places. `None` without
    /// qemu-img.
    fn new(cluster: u64, bits: u32) -> Option<Self> {
        let file = NamedTempFile::new().unwrap();
        let options = format!("cluster_size={cluster},refcount_bits={bits}");
        let create = ["create", "-q", "-f", "qcow2", "-o", &options];
        let made = Command::new("qemu-img").args(create).arg(file.path()).arg("1M").status();
        if made.is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return None;
        }
        // Clusters of zeroes keep their space.
        let mut write = Command::new("qemu-io");
        for what in ["write -q 0 40k", "write -q 512k 4k", "write -q -z 512k 4k"] {
            write.args(["-c", what]);
        }
        assert!(write.args(["-f", "qcow2"]).arg(file.path()).status().unwrap().success());
        Some(Self::from_file(&file, cluster, bits))
    }

    fn from_file(file: &NamedTempFile, cluster: u64, bits: u32) -> Self {
        let mut content = std::fs::read(file.path()).unwrap();
        content.resize(content.len().next_multiple_of(512), 0);
        mark::set(&mut content, true);
        Self { content, cluster, bits }
    }

    fn at(&self, at: u64) -> u64 {
        number(&self.content, at)
    }

    fn l1(&self) -> u64 {
        self.at(L1)
    }

    /// The first L2 table.
    fn l2(&self) -> u64 {
        self.at(self.l1()) & PLACE
    }

    /// The number of clusters in the file.
    fn clusters(&self) -> u64 {
        (self.content.len() as u64).div_ceil(self.cluster)
    }

    /// The block that counts a cluster, and the index of the count.
    fn count(&mut self, cluster: u64) -> (&mut [u8], usize) {
        let per_block = self.cluster * 8 / u64::from(self.bits);
        let block = self.at(self.at(COUNTS) + cluster / per_block * 8);
        assert_ne!(block, 0, "cluster {cluster} has no count");
        let range = iomem::fits(block, "a place")..iomem::fits(block + self.cluster, "a place");
        (&mut self.content[range], iomem::fits(cluster % per_block, "an index"))
    }

    fn get_count(&mut self, cluster: u64) -> u64 {
        let bits = self.bits;
        let (block, index) = self.count(cluster);
        counts::get(block, index, bits)
    }

    fn set_count(&mut self, cluster: u64, count: u64) {
        let bits = self.bits;
        let (block, index) = self.count(cluster);
        counts::set(block, index, bits, count);
    }

    fn file(&self) -> NamedTempFile {
        let file = NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&self.content, 0).unwrap();
        file
    }

    /// Returns the bytes after a check, and the result of the check.
    fn run_check(&self, bounds: &Bounds) -> (Vec<u8>, Result<(), Error>) {
        let file = self.file();
        let source = source(&file);
        let result = free_within(&source, bounds);
        drop(source);
        (std::fs::read(file.path()).unwrap(), result)
    }

    /// Asserts that QEMU finds leaks before a check, and no fault after it.
    fn assert_freed(&self, bounds: &Bounds, what: &str) -> Vec<u8> {
        // 2 is for data with `COPIED` and a count above one.
        assert!(matches!(check(&self.content), Some(3 | 2)), "{what}: nothing is leaked");
        let (content, result) = self.run_check(bounds);
        result.unwrap();
        assert_eq!(check(&content), Some(0), "{what}");
        assert!(!mark::is_set(&content), "{what}");
        content
    }

    /// Asserts that a check changes nothing. The image then opens if `opens` is true, and stays
    /// marked.
    fn assert_unchanged(&self, opens: bool, what: &str) {
        let (content, result) = self.run_check(&BOUNDS);
        result.unwrap();
        assert!(content == self.content, "{what}: something was changed");
        let file = self.file();
        let opened = crate::qcow2::open(vec![Layer::qcow2(source(&file)).unwrap()], false);
        assert_eq!(opened.is_ok(), opens, "{what}: {opened:?}");
        drop(opened);
        assert!(mark::is_set(&std::fs::read(file.path()).unwrap()), "{what}");
    }
}

fn source(file: &NamedTempFile) -> DiskSource {
    let options = DiskOptions { holds_image: true, ..DiskOptions::default() };
    DiskSource::file(file.path(), &options).unwrap()
}

/// Frees leaks as the first write to an image does.
fn free_within(source: &DiskSource, bounds: &Bounds) -> Result<(), Error> {
    let header = crate::qcow2::image_header(source)?.unwrap();
    let thread = IoThread::new(&IoThreadConfig::default())?;
    thread.block_on(free(thread.io(), source, &header, bounds))?.map(drop)
}

/// The exit code of a check by QEMU: 0 for a clean image, 3 for leaked clusters.
pub(super) fn check(content: &[u8]) -> Option<i32> {
    let file = NamedTempFile::new().unwrap();
    file.as_file().write_all_at(content, 0).unwrap();
    let mut check = Command::new("qemu-img");
    let output = check.args(["check", "-q", "-f", "qcow2"]).arg(file.path()).output().unwrap();
    output.status.code()
}

/// Windows of one block, so that several passes are needed.
const SMALL: Bounds = Bounds { clusters_at_once: 1, ..BOUNDS };

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn unused_clusters_are_freed() {
    for (cluster, bits) in [(512, 1), (512, 64), (4096, 8), (4096, 2), (65_536, 16), (2 << 20, 32)]
    {
        let Some(mut image) = Image::new(cluster, bits) else { return };
        let what = format!("clusters of {cluster}, counts of {bits}");
        let (clean, result) = image.run_check(&BOUNDS);
        result.unwrap();
        let mut unmarked = image.content.clone();
        mark::set(&mut unmarked, false);
        assert!(clean == unmarked, "{what}: something was changed");
        // Clusters in the file, and behind its end.
        let last = image.clusters() - 1;
        image.content.resize(iomem::fits((last + 3) * cluster, "bytes"), 0);
        for cluster in [last + 1, last + 2, last + 3] {
            image.set_count(cluster, 1);
        }
        for bounds in [BOUNDS, SMALL] {
            let freed = image.assert_freed(&bounds, &what);
            assert!(freed[..unmarked.len()] == unmarked, "{what}: something else was changed");
        }
        // A table is no longer used, nor are the clusters that it names.
        let first = image.l1();
        set(&mut image.content, first, 0);
        for bounds in [BOUNDS, SMALL] {
            let freed = image.assert_freed(&bounds, &what);
            let mut freed = Image { content: freed, ..image };
            assert_eq!(freed.get_count(last + 3), 0, "{what}: behind the end");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn counts_above_the_uses_are_lowered() {
    let Some(mut image) = Image::new(4096, 16) else { return };
    let data = image.at(image.l2()) & PLACE;
    image.set_count(data / 4096, 300);
    let freed = image.assert_freed(&BOUNDS, "data");
    let mut freed = Image { content: freed, ..image };
    assert_eq!(freed.get_count(data / 4096), 1);
}

/// The entry lacks `COPIED`, which it needs if the count is one.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn data_that_counts_as_shared_stays_unchanged() {
    let Some(mut image) = Image::new(4096, 16) else { return };
    let entry = image.l2();
    let data = image.at(entry) & PLACE;
    image.set_count(data / 4096, 2);
    set(&mut image.content, entry, data);
    assert_eq!(check(&image.content), Some(3), "nothing is leaked");
    for bounds in [BOUNDS, SMALL] {
        let (content, result) = image.run_check(&bounds);
        assert!(result.is_ok() && content == image.content);
    }
}

/// Some clusters of the file hold several compressed clusters, and some of these lie in two.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn compressed_clusters_use_each_cluster_that_they_touch() {
    for cluster in [512, 4096, 65_536, 2 << 20] {
        let (raw, file) = (NamedTempFile::new().unwrap(), NamedTempFile::new().unwrap());
        // A third of it cannot be compressed.
        let mut random = 1u64;
        let data = (0..12u32 << 20).map(|at| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let [sector, ..] = (at / 512).to_le_bytes();
            if sector.is_multiple_of(3) { random.to_be_bytes()[0] } else { sector }
        });
        let data: Vec<u8> = data.collect();
        raw.as_file().write_all_at(&data, 0).unwrap();
        let options = format!("cluster_size={cluster}");
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options]);
        if convert.arg(raw.path()).arg(file.path()).status().is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return;
        }
        let mut image = Image::from_file(&file, cluster, 16);
        let shared = (0..image.clusters()).find(|cluster| image.get_count(*cluster) > 1);
        let before = image.content.clone();
        for bounds in [BOUNDS, SMALL] {
            let (checked, result) = image.run_check(&bounds);
            result.unwrap();
            assert!(checked[80..] == before[80..], "clusters of {cluster} bytes");
        }
        let Some(shared) = shared else {
            assert_eq!(cluster, 512, "no cluster is shared");
            continue;
        };
        let count = image.get_count(shared);
        image.set_count(shared, count + 1);
        let freed = image.assert_freed(&BOUNDS, "a shared cluster");
        assert!(freed[80..] == before[80..], "clusters of {cluster} bytes");
        image.set_count(shared, count - 1);
        let (left, result) = image.run_check(&BOUNDS);
        assert!(result.is_err() && left == image.content);
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_whose_counts_are_too_low_is_refused() {
    for bounds in [BOUNDS, SMALL] {
        let Some(mut image) = Image::new(512, 16) else { return };
        let leaked = image.clusters();
        image.set_count(leaked, 1);
        let data = image.at(image.l2() + 8) & PLACE;
        for cluster in [0, image.l1() / 512, image.l2() / 512, image.at(COUNTS) / 512, data / 512] {
            let mut image = Image { content: image.content.clone(), ..image };
            image.set_count(cluster, 0);
            let (content, result) = image.run_check(&bounds);
            let error = result.unwrap_err().to_string();
            assert!(error.contains("qemu-img check -r all"), "{error}");
            assert!(error.contains(&format!("at byte {} ", cluster * 512)), "{error}");
            assert!(content == image.content, "something was changed");
            let file = image.file();
            let layers = vec![Layer::qcow2(source(&file)).unwrap()];
            assert!(crate::qcow2::open(layers, false).is_err());
        }
        // No block counts the data or any table.
        let mut without = Image { content: image.content.clone(), ..image };
        let table = image.at(COUNTS);
        set(&mut without.content, table, 0);
        assert!(without.run_check(&bounds).1.is_err());
        let entry = image.l2();
        set(&mut image.content, entry, COPIED | 1 << 40);
        let error = image.run_check(&bounds).1.unwrap_err().to_string();
        assert!(error.contains("reference count of 0"), "{error}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_odd_image_stays_unchanged() {
    let Some(mut image) = Image::new(512, 16) else { return };
    let leaked = image.clusters();
    image.set_count(leaked, 1);
    let (first, second, table) = (image.l1(), image.l2(), image.at(COUNTS));
    let end = image.content.len() as u64;
    let odd = |opens: bool, what: &str, at: u64, value: u64| {
        let mut odd = Image { content: image.content.clone(), ..image };
        set(&mut odd.content, at, value);
        odd.assert_unchanged(opens, what);
    };
    odd(true, "a table behind the end of the file", first + 8, COPIED | end.next_multiple_of(512));
    odd(true, "reserved bits of L2", second, COPIED | second | 1 << 57);
    odd(true, "data that is unaligned, and compressed", second, COPIED | 1 << 62 | 512);
    odd(true, "data where a table is", second, COPIED | first);
    odd(true, "data where the header is", second, 1 << 62);
    odd(false, "reserved bits of L1", first + 8, COPIED | second | 2);
    odd(false, "two tables in one place", first + 8, COPIED | second);
    odd(false, "a table of counts that is too long", 56, 1 << 40);
    odd(false, "a block behind the end of the file", table + 8, 1 << 40);
    // The oddities would be found, but the bounds end the check first.
    for bounds in [Bounds { time: Duration::ZERO, ..BOUNDS }, Bounds { counts: 200, ..BOUNDS }] {
        let (content, result) = image.run_check(&bounds);
        assert!(result.is_ok() && content == image.content);
    }
    let Some(mut large) = Image::new(65_536, 16) else { return };
    let second = large.l2();
    set(&mut large.content, second, COPIED | 512);
    large.assert_unchanged(true, "data that is unaligned");
}

/// The clusters of a table that was read from elsewhere would count as leaked.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_table_without_a_cluster_of_its_own_ends_a_check() {
    let Some(mut image) = Image::new(65_536, 16) else { return };
    let leaked = image.clusters();
    image.set_count(leaked, 1);
    let (l1, counts) = (image.l1(), image.at(COUNTS));
    for (what, at) in [("L1", L1), ("L2", l1), ("counts", COUNTS), ("a block of counts", counts)] {
        // Without an entry there is no table.
        let first = if [L1, COUNTS].contains(&at) { 0 } else { image.at(at) + 1024 };
        for place in [first, image.at(at) + 512] {
            let mut odd = Image { content: image.content.clone(), ..image };
            set(&mut odd.content, at, place);
            let (content, result) = odd.run_check(&BOUNDS);
            result.unwrap();
            assert!(content == odd.content, "{what} at {place}: something was changed");
        }
    }
}

/// Lowered counts stay, and the next check continues.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_check_may_end_after_any_read() {
    let Some(mut image) = Image::new(512, 16) else { return };
    let end = image.clusters();
    for leaked in [end, end + 1] {
        image.set_count(leaked, 1);
    }
    for bounds in [BOUNDS, SMALL] {
        let mut left = 0;
        loop {
            let (content, result) =
                image.run_check(&Bounds { read_bytes: left * READ_BYTES_MIN, ..bounds });
            result.unwrap();
            if !mark::is_set(&content) {
                break assert!(left > 3, "nothing was read");
            }
            let rest = Image { content, ..image };
            let (content, result) = rest.run_check(&BOUNDS);
            result.unwrap();
            assert_eq!(check(&content), Some(0), "after {left} reads");
            left += 1;
        }
    }
}

/// An unknown extension may own clusters, as bitmaps do.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn clusters_of_unknown_extensions_stay() {
    let Some(image) = Image::new(65_536, 16) else { return };
    let mut content = image.content.clone();
    mark::set(&mut content, false);
    let file = NamedTempFile::new().unwrap();
    file.as_file().write_all_at(&content, 0).unwrap();
    let mut bitmap = Command::new("qemu-img");
    assert!(bitmap.args(["bitmap", "--add"]).arg(file.path()).arg("b").status().unwrap().success());
    let mut image = Image::from_file(&file, 65_536, 16);
    let is_extension = |bytes: &[u8]| bytes == 0x2385_2875_u32.to_be_bytes();
    let place = image.content[..4096].windows(4).position(is_extension).unwrap();
    image.content[place] = 0x12;
    let (checked, result) = image.run_check(&BOUNDS);
    result.unwrap();
    assert!(checked == image.content);
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_check_ends_when_the_disk_is_abandoned() {
    let Some(image) = Image::new(512, 16) else { return };
    let file = image.file();
    let source = source(&file);
    let layer = Layer::qcow2(source.clone()).unwrap();
    source.abandon();
    let error = crate::qcow2::open(vec![layer], false).unwrap_err().to_string();
    assert!(error.contains("was cancelled"), "{error}");
}

/// A sparse file may have any length, and all of its tables may lie in holes.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_check_of_an_image_of_any_size_ends() {
    let Some(image) = Image::new(512, 1) else { return };
    let file = image.file();
    let entries = 4u64 << 20;
    let (first, table) = (1u64 << 30, 2u64 << 30);
    let write = |data: &[u8], at| file.as_file().write_all_at(data, at).unwrap();
    file.as_file().set_len(1 << 42).unwrap();
    for (field, table) in [(L1, first), (COUNTS, table)] {
        write(&table.to_be_bytes(), field);
        let places = (1..=entries).map(|index| (table * 4) + index * 512);
        let flag = if field == L1 { COPIED } else { 0 };
        let all: Vec<u8> = places.flat_map(|place| (flag | place).to_be_bytes()).collect();
        write(&all, table);
    }
    write(&4_194_304u32.to_be_bytes(), 36);
    write(&65_536u32.to_be_bytes(), 56);
    let source = source(&file);
    free_within(&source, &BOUNDS).unwrap();
    let mut front = [0; 80];
    file.as_file().read_exact_at(&mut front, 0).unwrap();
    assert!(mark::is_set(&front));
}

/// Pointers that were removed may not be stable, nor may the written counts.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn counts_fall_between_flushes() {
    let Some(mut image) = Image::new(512, 16) else { return };
    let leaked = image.clusters();
    image.set_count(leaked, 1);
    let block = image.at(image.at(COUNTS));
    let mut content = image.content.clone();
    content.resize(content.len().next_multiple_of(4096), 0);
    let end = RemoteStub::exclusive(&content);
    free_within(&end.clone().source(), &BOUNDS).unwrap();
    let place = |event: &Event| match event {
        Event::Write(place, _) => Some(*place),
        Event::Flush | Event::Stable => None,
    };
    let events: Vec<_> = end.journal().iter().map(place).collect();
    assert_eq!(events, [None, Some(block), None, Some(0)]);
}

/// A start that fails for another reason has opened the image, too.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn leaks_are_freed_with_the_first_write_and_not_before() {
    for leaked in [0, 3] {
        let Some(mut image) = Image::new(4096, 16) else { return };
        let end = image.clusters();
        for cluster in end..end + leaked {
            image.set_count(cluster, 1);
        }
        let mut content = image.content.clone();
        content.resize(content.len().next_multiple_of(4096), 0);
        let elsewhere = RemoteStub::exclusive(&content);
        let layer = || Layer::qcow2(elsewhere.clone().source()).unwrap();
        let header = layer().header.unwrap();
        assert_eq!(find(&elsewhere.clone().source(), &header).unwrap(), Some(leaked));
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let open = || crate::qcow2::open(vec![layer()], false).unwrap();
        let source = open();
        let disk = source.attach(thread.io());
        thread.block_on(disk.read(0, Buffers::aligned(4096, 4096))).unwrap().unwrap();
        thread.block_on(disk.flush()).unwrap().unwrap();
        drop((disk, source));
        assert!(elsewhere.content() == content, "{leaked}: something was changed");
        let source = open();
        let disk = source.attach(thread.io());
        // The data has its place already.
        let write = disk.write(4096, Buffers::from_vec(vec![7; 4096]), false);
        thread.block_on(write).unwrap().unwrap();
        assert!(mark::is_set(&elsewhere.content()));
        drop((disk, source));
        assert!(!mark::is_set(&elsewhere.content()));
        assert_eq!(check(&elsewhere.content()), Some(0), "{leaked}: leaks are left");
    }
}
