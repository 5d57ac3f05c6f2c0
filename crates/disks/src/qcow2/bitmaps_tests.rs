//! Persistent bitmaps: they are valid until the first change, and their clusters are in use.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use blockio::{Disk, DiskOptions, DiskSource, Error, IoThread, IoThreadConfig};
use iomem::Buffers;
use tempfile::TempDir;

use super::core::Layer;

const MIB: u64 = 1 << 20;

fn qemu_img(words: &[&str], path: &Path) -> Option<String> {
    let output = Command::new("qemu-img").args(words).arg(path).output();
    let Ok(output) = output else {
        eprintln!("skipped: qemu-img is not installed");
        return None;
    };
    assert!(output.status.success(), "{words:?}: {output:?}");
    Some(String::from_utf8(output.stdout).unwrap())
}

/// An image of a disk of 16 MiB with two bitmaps. Its first MiB is written, and marked as changed.
struct Image {
    _folder: TempDir,
    path: PathBuf,
    thread: IoThread,
}

impl Image {
    fn new(options: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let bitmap = ["bitmap", "--add", "--enable", "-g", "4096"];
        let options = format!("cluster_size=4k,{options}");
        let create = ["create", "-q", "-f", "qcow2", "-o", &options];
        let made = Command::new("qemu-img").args(create).arg(&path).arg("16M").status();
        if made.is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return None;
        }
        assert!(made.unwrap().success());
        for name in ["backup0", "backup1"] {
            let added = Command::new("qemu-img").args(bitmap).arg(&path).arg(name).status();
            assert!(added.unwrap().success());
        }
        let write = ["-f", "qcow2", "-c", "write -q -P 5 0 1M"];
        assert!(Command::new("qemu-io").args(write).arg(&path).status().unwrap().success());
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        Some(Self { _folder: folder, path, thread })
    }

    fn open(&self, options: DiskOptions) -> Result<DiskSource, Error> {
        let options = DiskOptions { holds_image: true, ..options };
        let source = DiskSource::file(&self.path, &options)?;
        crate::qcow2::open(vec![Layer::qcow2(source)?], false)
    }

    fn write(&self, disk: &Disk, offset: u64) {
        let data = Buffers::from_vec(vec![7; 4096]);
        self.thread.block_on(disk.write(offset, data, false)).unwrap().unwrap();
    }

    fn content(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap()
    }

    fn has_bitmaps(&self) -> bool {
        let names = qemu_img(&["info", "--output=json", "-U"], &self.path).unwrap();
        assert_eq!(names.contains("backup0"), names.contains("backup1"));
        names.contains("backup0")
    }
}

type Change = fn(&Image, &Disk);

/// Changes of tables, and of data that has its place already.
const CHANGES: [(&str, Change); 5] = [
    ("write", |image, disk| image.write(disk, 4 * MIB)),
    ("write in place", |image, disk| image.write(disk, 0)),
    ("write in a place that was read", |image, disk| {
        let data = Buffers::aligned(4096, 4096);
        image.thread.block_on(disk.read(8192, data)).unwrap().unwrap();
        image.write(disk, 8192);
    }),
    ("discard", |image, disk| image.thread.block_on(disk.discard(0, 8192)).unwrap().unwrap()),
    ("zero", |image, disk| {
        image.thread.block_on(disk.write_zeroes(512, 4096, false)).unwrap().unwrap();
    }),
];

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn bitmaps_become_invalid_with_the_first_change() {
    for options in ["compat=1.1", "lazy_refcounts=on"] {
        for no_lock in [false, true] {
            for (name, change) in CHANGES {
                let Some(image) = Image::new(options) else { return };
                let before = image.content();
                let source = image.open(DiskOptions { no_lock, ..DiskOptions::default() }).unwrap();
                let warning = source.warning().unwrap();
                assert!(
                    warning.contains("bitmaps (backup0, backup1), which the first write"),
                    "{warning}"
                );
                let disk = source.attach(image.thread.io());
                let data = Buffers::aligned(8192, 4096);
                image.thread.block_on(disk.read(0, data)).unwrap().unwrap();
                image.thread.block_on(disk.flush()).unwrap().unwrap();
                assert!(image.content() == before, "{options}, {name}: nothing was changed");
                change(&image, &disk);
                assert!(!image.has_bitmaps(), "{options}, {name}: they are not valid any more");
                assert_eq!(source.warning(), None, "{options}, {name}");
                // Writes in place go straight to the file from now on.
                let data = Buffers::aligned(4096, 4096);
                image.thread.block_on(disk.read(MIB / 2, data)).unwrap().unwrap();
                image.write(&disk, MIB / 2);
                drop(disk);
                drop(source);
                assert!(!image.has_bitmaps());
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_that_is_opened_and_closed_keeps_its_bitmaps() {
    let Some(image) = Image::new("compat=1.1") else { return };
    let before = image.content();
    drop(image.open(DiskOptions::default()).unwrap());
    let read_only = DiskOptions { read_only: true, ..DiskOptions::default() };
    assert_eq!(image.open(read_only).unwrap().warning(), None);
    assert!(image.content() == before && image.has_bitmaps());
}

/// Valid bitmaps keep their clusters when leaks are freed. Invalid bitmaps lose them.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn leaks_are_freed_beside_bitmaps() {
    for is_valid in [true, false] {
        let Some(image) = Image::new("compat=1.1") else { return };
        let file = std::fs::File::options().read(true).write(true).open(&image.path).unwrap();
        let mut front = [0; 104];
        file.read_exact_at(&mut front, 0).unwrap();
        front[79] |= 1;
        front[95] = u8::from(is_valid);
        // A leaked cluster at the end.
        let table = u64::from_be_bytes(front[48..56].try_into().unwrap());
        let mut block = [0; 8];
        file.read_exact_at(&mut block, table).unwrap();
        let leaked = u64::from_be_bytes(block) + 2 * 1500;
        file.write_all_at(&[0, 1], leaked).unwrap();
        file.write_all_at(&front, 0).unwrap();
        let before = std::fs::read(&image.path).unwrap();
        drop(image.open(DiskOptions::default()).unwrap());
        assert!(std::fs::read(&image.path).unwrap() == before, "an opening has changed it");
        let source = image.open(DiskOptions::default()).unwrap();
        let disk = source.attach(image.thread.io());
        image.thread.block_on(disk.discard(8 * MIB, MIB)).unwrap().unwrap();
        drop((disk, source));
        assert!(!image.has_bitmaps());
        let mut count = [1; 2];
        file.read_exact_at(&mut count, leaked).unwrap();
        assert_eq!(count, [0, 0], "a cluster stays leaked");
        // Bitmaps that were valid until the discard keep their clusters, which `qemu-img check`
        // would report.
        if !is_valid {
            qemu_img(&["check", "-q"], &image.path).unwrap();
        }
    }
}
