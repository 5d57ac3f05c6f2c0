//! Images whose file fails some of its writes and flushes; and removals.

use std::ops::Range;
use std::path::Path;
use std::process::Command;

use blockio::testing::{Event, RemoteStub};
use blockio::{Disk, DiskOptions, DiskSource, IoThread, IoThreadConfig};
use iomem::Buffers;

use super::core::Layer;

const MIB: usize = 1 << 20;
const CLUSTER: usize = 4096;

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

/// The write of the mark may fail, and its flush.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn nothing_changes_before_a_mark_is_stable() {
    let Some(content) = new_small("compat=1.1", None) else { return };
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    for one_fails_in in 2..20 {
        let end = RemoteStub::exclusive(&content);
        let source = layered(&end, None);
        let disk = source.attach(thread.io());
        end.have_some_fail(one_fails_in);
        let write = |_| {
            let data = Buffers::from_vec(vec![7; CLUSTER]);
            thread.block_on(disk.write(0, data, false)).unwrap().is_ok()
        };
        assert!((0..100).any(write), "{one_fails_in}");
        let journal = end.journal();
        let is_flush = |event: &Event| matches!(event, Event::Flush);
        let is_header = |event: &Event| matches!(event, Event::Write(0, _));
        let mut before = journal.iter().take_while(|event| is_header(event) || is_flush(event));
        assert!(before.any(is_header) && before.any(is_flush), "{one_fails_in}");
    }
}
