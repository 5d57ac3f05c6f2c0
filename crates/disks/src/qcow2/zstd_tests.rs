//! Images that `qemu-img` has compressed with Zstandard.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use blockio::testing::RemoteStub;
use blockio::{Disk, DiskOptions, DiskSource, IoThread, IoThreadConfig};
use iomem::Buffers;
use tempfile::TempDir;

use super::core::Layer;

const SECTOR: usize = 512;

/// A folder with an image, and the content of its disk.
struct Scene {
    folder: TempDir,
    content: Vec<u8>,
}

impl Scene {
    /// Makes a disk that ends inside a cluster. `None` without qemu-img.
    fn new(cluster: &str, sectors: usize) -> Option<Self> {
        let mut content = vec![0; sectors * SECTOR];
        for (index, piece) in content.chunks_mut(24 * SECTOR).enumerate() {
            match index % 4 {
                0 => piece.fill(0),
                1 => piece.fill(index.to_le_bytes()[0] | 1),
                2 => piece.chunks_mut(8).for_each(|part| {
                    part.copy_from_slice(&b"ringhaul"[..part.len()]);
                }),
                _ => piece.fill_with(|| fastrand_byte(index)),
            }
        }
        let scene = Self { folder: tempfile::tempdir().unwrap(), content };
        std::fs::write(scene.path("raw"), &scene.content).unwrap();
        let options = format!("compression_type=zstd,cluster_size={cluster}");
        let words = ["convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", &options];
        let mut convert = Command::new("qemu-img");
        let status = convert.args(words).args([scene.path("raw"), scene.path("image")]).status();
        match status {
            Err(_) => {
                eprintln!("skipped: qemu-img is not installed");
                None
            }
            Ok(status) => {
                assert!(status.success());
                Some(scene)
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the same bytes to the disk and to the content.
    fn write(&mut self, thread: &IoThread, disk: &Disk, first: usize, sectors: usize) {
        let range = first * SECTOR..(first + sectors) * SECTOR;
        let byte = first.to_le_bytes()[0] | 128;
        self.content[range.clone()].fill(byte);
        let data = Buffers::from_vec(vec![byte; range.len()]);
        thread.block_on(disk.write(range.start as u64, data, false)).unwrap().unwrap();
    }

    fn check(&self, name: &str) {
        let mut check = Command::new("qemu-img");
        let checked = check.arg("check").arg(self.path(name)).output().unwrap();
        assert!(checked.status.success(), "{checked:?}");
        let mut convert = Command::new("qemu-img");
        let words = ["convert", "-q", "-f", "qcow2", "-O", "raw"];
        let out = self.path("out");
        assert!(convert.args(words).arg(self.path(name)).arg(&out).status().unwrap().success());
        assert!(std::fs::read(out).unwrap() == self.content, "{name} has other data");
    }
}

fn fastrand_byte(index: usize) -> u8 {
    thread_local! {
        static STATE: std::cell::Cell<u64> = const { std::cell::Cell::new(1) };
    }
    STATE.with(|state| {
        let next =
            state.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(index as u64 | 1);
        state.set(next);
        next.to_be_bytes()[0]
    })
}

fn layer(path: &Path, read_only: bool) -> Layer {
    let options = DiskOptions { read_only, holds_image: true, ..DiskOptions::default() };
    Layer::qcow2(DiskSource::file(path, &options).unwrap()).unwrap()
}

fn read(thread: &IoThread, disk: &Disk, bytes: usize) -> Vec<u8> {
    let all = Buffers::aligned(bytes, 4096);
    let read = all.duplicate();
    thread.block_on(disk.read(0, all)).unwrap().unwrap();
    read.to_vec()
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn images_compressed_by_zstd_are_read_and_written() {
    for (cluster, sectors) in [("512", 700), ("4k", 1501), ("64k", 2085), ("2M", 8201)] {
        let Some(mut scene) = Scene::new(cluster, sectors) else { return };
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let source = crate::qcow2::open(vec![layer(&scene.path("image"), false)], false).unwrap();
        let disk = source.attach(thread.io());
        assert!(read(&thread, &disk, scene.content.len()) == scene.content, "{cluster}");
        for (first, count) in
            [(25, 1), (127, 2), (256, 300), (sectors - 1, 1), (sectors - 140, 100), (0, 128)]
        {
            scene.write(&thread, &disk, first, count);
            let found = read(&thread, &disk, scene.content.len());
            assert!(found == scene.content, "{cluster}: a write of {count} sectors at {first}");
        }
        let zeroed = 300 * SECTOR..sectors * SECTOR;
        scene.content[zeroed.clone()].fill(0);
        let (start, len) = (zeroed.start as u64, zeroed.len() as u64);
        thread.block_on(disk.write_zeroes(start, len, true)).unwrap().unwrap();
        assert!(read(&thread, &disk, scene.content.len()) == scene.content, "{cluster}: zeroes");
        // Growth inside the last cluster, and beyond.
        for more in [1, 9001] {
            scene.content.resize(scene.content.len() + more * SECTOR, 0);
            source.set_size(scene.content.len() as u64, || ()).unwrap();
            let last = scene.content.len() / SECTOR - 1;
            scene.write(&thread, &disk, last, 1);
        }
        assert!(read(&thread, &disk, scene.content.len()) == scene.content, "{cluster}: growth");
        drop((disk, source));
        scene.check("image");
        let again = crate::qcow2::open(vec![layer(&scene.path("image"), false)], false).unwrap();
        assert_eq!(again.info().size_bytes, scene.content.len() as u64);
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_overlay_copies_from_clusters_compressed_by_zstd() {
    for cluster in ["512", "64k", "2M"] {
        let Some(mut scene) = Scene::new("4k", 2085) else { return };
        let options = format!("cluster_size={cluster}");
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-o", &options, "-b", "image", "-F", "qcow2"]);
        assert!(create.arg(scene.path("top")).status().unwrap().success());
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let layers = || vec![layer(&scene.path("top"), false), layer(&scene.path("image"), true)];
        let source = crate::qcow2::open(layers(), false).unwrap();
        let disk = source.attach(thread.io());
        for (first, count) in [(30, 1), (127, 2), (700, 400), (2084, 1)] {
            scene.write(&thread, &disk, first, count);
        }
        assert!(read(&thread, &disk, scene.content.len()) == scene.content, "{cluster}");
        drop((disk, source));
        scene.check("top");
    }
}

/// The first compressed cluster of an image with clusters of 64 KiB: its number and its place.
fn first_compressed(file: &std::fs::File) -> (u64, u64) {
    let number = |offset| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, offset).unwrap();
        u64::from_be_bytes(bytes)
    };
    let table = number(number(40)) & ((1 << 56) - 512);
    let entries = (0..16).map(|index| (index, number(table + index * 8)));
    let found = entries.into_iter().find(|(_, entry)| entry >> 62 == 1).unwrap();
    (found.0, found.1 & ((1 << 54) - 1))
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_damaged_frame_fails_only_its_own_reads() {
    let Some(scene) = Scene::new("64k", 2048) else { return };
    let file = std::fs::OpenOptions::new().read(true).write(true).open(scene.path("image"));
    let file = file.unwrap();
    let (index, place) = first_compressed(&file);
    let damages: [(u64, &[u8]); 3] = [(0, b"none"), (4, &[0xff; 8]), (9, &[0; 40])];
    for (at, bytes) in damages {
        let mut before = vec![0; bytes.len()];
        file.read_exact_at(&mut before, place + at).unwrap();
        file.write_all_at(bytes, place + at).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let source = crate::qcow2::open(vec![layer(&scene.path("image"), false)], false).unwrap();
        let disk = source.attach(thread.io());
        let cluster = 65_536;
        for other in 0..16 {
            let data = Buffers::aligned(4096, 4096);
            let memory = data.duplicate();
            let done = thread.block_on(disk.read(other * cluster, data)).unwrap();
            assert_eq!(done.is_err(), other == index, "{other}, bytes {bytes:?} at {at}");
            let start = usize::try_from(other * cluster).unwrap();
            let is_right = memory.to_vec() == scene.content[start..start + 4096];
            assert!(other == index || is_right);
        }
        let part = Buffers::from_vec(vec![1; 512]);
        assert!(thread.block_on(disk.write(index * cluster, part, false)).unwrap().is_err());
        drop((disk, source));
        file.write_all_at(&before, place + at).unwrap();
    }
    scene.check("image");
}

/// The next header would have a size that the disk never got.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_disk_keeps_its_size_if_its_growth_fails() {
    const SECTORS: usize = 2085;
    // Growth inside the last cluster, and beyond.
    for more in [1, 9001] {
        let Some(scene) = Scene::new("64k", SECTORS) else { return };
        let mut content = std::fs::read(scene.path("image")).unwrap();
        content.resize(content.len().next_multiple_of(4096), 0);
        let end = RemoteStub::exclusive(&content);
        let layers = vec![Layer::qcow2(end.clone().source()).unwrap()];
        let (info, source) = super::open_image(layers, false).unwrap();
        let core = Arc::clone(&source.image.core);
        let source = DiskSource::from_driver(info, Arc::new(source));
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        // The mark is set, and no change waits.
        thread.block_on(disk.discard(0, 65_536)).unwrap().unwrap();
        let before = (SECTORS * SECTOR) as u64;
        let after = before + (more * SECTOR) as u64;
        end.have_some_fail(1);
        source.set_size(after, || ()).unwrap_err();
        end.have_some_fail(0);
        assert_eq!(core.order.disk_bytes(), Some(before), "{more}");
        assert_eq!(source.info().size_bytes, before, "{more}");
        source.set_size(after, || ()).unwrap();
        assert_eq!(core.order.disk_bytes(), Some(after), "{more}");
        drop((disk, source, core));
        let again = Layer::qcow2(end.source()).unwrap();
        assert_eq!(again.header.unwrap().size_bytes, after, "{more}");
    }
}
