//! Images that another process still writes to when a layer over them is opened.

use std::process::{Command, Stdio};

use blockio::testing::RemoteStub;
use blockio::{DiskSource, IoThread, IoThreadConfig};
use iomem::Buffers;

use super::core::Layer;
#[cfg(feature = "luks")]
use crate::luks::tests::{header, options};

/// The size of a cluster: 64 KiB.
const CLUSTER: usize = 64 << 10;
const DISK_BYTES: usize = 4 << 20;

/// The bytes of a new image.
fn new_image(options: &str, bytes: usize) -> Vec<u8> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-o", options]).arg(file.path());
    create.arg(bytes.to_string());
    assert!(create.status().unwrap().success());
    let mut content = std::fs::read(file.path()).unwrap();
    content.resize(content.len().next_multiple_of(CLUSTER), 0);
    content
}

fn image(below: DiskSource, is_deferred: bool) -> DiskSource {
    crate::qcow2::open(vec![Layer::qcow2(below).unwrap()], is_deferred).unwrap()
}

/// A kind of layer over an image, with the bytes that it needs at its start.
struct Kind {
    name: &'static str,
    start: Vec<u8>,
    open: fn(DiskSource, bool) -> DiskSource,
}

fn kinds() -> Vec<Kind> {
    // An image with pointers to its data, though there is none.
    let inner = new_image("preallocation=metadata", DISK_BYTES / 2);
    let part = |below, _| DiskSource::raw(below, 0, None).unwrap();
    let kinds = vec![
        Kind { name: "nothing", start: vec![1; 512], open: |below, _| below },
        Kind { name: "an image", start: inner.clone(), open: image },
        Kind {
            name: "an image on a part of an image",
            start: inner.clone(),
            open: |below, is_deferred| image(DiskSource::raw(below, 0, None).unwrap(), is_deferred),
        },
        Kind { name: "a part", start: vec![1; 512], open: part },
    ];
    #[cfg(feature = "luks")]
    let kinds = kinds.into_iter().chain(encrypted_kinds()).collect();
    kinds
}

#[cfg(feature = "luks")]
fn encrypted_kinds() -> [Kind; 2] {
    let encrypted = Kind {
        name: "an encrypted disk",
        start: header(|_| ()),
        open: |below, _| crate::luks::open(below, &options(false)).unwrap(),
    };
    let no_image = Kind {
        name: "an encrypted disk whose content is no image",
        start: header(|_| ()),
        open: |below, _| {
            let disk = crate::luks::open(below, &options(false)).unwrap();
            assert!(crate::qcow2::image_header(&disk).unwrap().is_none());
            disk
        },
    };
    [encrypted, no_image]
}

fn content(thread: &IoThread, source: &DiskSource) -> Vec<u8> {
    let disk = source.attach(thread.io());
    let buffers = Buffers::aligned(usize::try_from(source.info().size_bytes).unwrap(), 4096);
    let all = buffers.duplicate();
    thread.block_on(disk.read(0, buffers)).unwrap().unwrap();
    all.to_vec()
}

/// A layer that is opened for later requests reads all data that was written before them, even if
/// it was probed earlier.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_deferred_disk_reads_all_data_written_before_its_first_request() {
    if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    for Kind { name, start, open } in kinds() {
        let mut bytes = new_image("preallocation=off", DISK_BYTES);
        bytes.resize(8 << 20, 0);
        let file = RemoteStub::new(&bytes);
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let old = image(file.clone().source(), false);
        assert!(!old.hand_over().is_flushed(), "tables may be written back at any time");
        let writer = old.attach(thread.io());
        let write = |offset: usize, data: Vec<u8>| {
            let written = writer.write(offset as u64, Buffers::from_vec(data), false);
            thread.block_on(written).unwrap().unwrap();
        };
        let mut clusters: Vec<Vec<u8>> = start.chunks(CLUSTER).map(<[u8]>::to_vec).collect();
        clusters.resize(DISK_BYTES / CLUSTER, Vec::new());
        let is_there = |cluster: &&Vec<u8>| cluster.iter().any(|byte| *byte != 0);
        let with_place = || (0..).step_by(CLUSTER).zip(&clusters);
        with_place()
            .filter(|(_, cluster)| is_there(cluster))
            .for_each(|(at, cluster)| write(at, cluster.clone()));
        let new = open(image(file.clone().source(), true), true);
        with_place()
            .filter(|(_, cluster)| !is_there(cluster))
            .for_each(|(at, _)| write(at, vec![7; 512]));
        thread.block_on(writer.flush()).unwrap().unwrap();
        drop((writer, old));
        let found = content(&thread, &new);
        drop(new);
        let expected = content(&thread, &open(image(file.source(), false), false));
        assert!(found == expected, "{name}");
    }
}
