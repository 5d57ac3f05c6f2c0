//! The mark of an image: when it is set, and when it is removed.

use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use blockio::disk::hand_over::DiskHandOver;
use blockio::testing::{Event, HandOverFacts, RemoteStub};
use blockio::{Disk, DiskOptions, DiskSource, Error, IoThread, IoThreadConfig};
use iomem::Buffers;
use tempfile::NamedTempFile;

use super::core::Layer;
use crate::qcow2::consistency::mark;

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 4096;

/// The file of a new image of a disk of 16 MiB. `None` without qemu-img.
fn new_image(options: &str) -> Option<Vec<u8>> {
    let file = NamedTempFile::new().unwrap();
    let options = format!("cluster_size=4k,{options}");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-o", &options]).arg(file.path());
    if create.arg("16M").status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return None;
    }
    let mut content = std::fs::read(file.path()).unwrap();
    content.resize(content.len().next_multiple_of(4096), 0);
    Some(content)
}

fn open(source: DiskSource, is_deferred: bool) -> Result<DiskSource, Error> {
    crate::qcow2::open(vec![Layer::qcow2(source)?], is_deferred)
}

/// A disk in an image, and the storage of the image.
struct World {
    thread: IoThread,
    end: RemoteStub,
    source: Option<DiskSource>,
}

impl World {
    fn new(content: &[u8]) -> Self {
        let end = RemoteStub::exclusive(content);
        let source = open(end.clone().source(), false).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        Self { thread, end, source: Some(source) }
    }

    fn source(&self) -> &DiskSource {
        self.source.as_ref().unwrap()
    }

    fn disk(&self) -> Disk {
        self.source().attach(self.thread.io())
    }

    fn write(&self, cluster: u64) -> std::io::Result<()> {
        let disk = self.disk();
        let data = Buffers::from_vec(vec![7; iomem::fits(CLUSTER, "bytes")]);
        let written = self.thread.block_on(disk.write(cluster * CLUSTER, data, false)).unwrap();
        written.map_err(std::io::Error::from)
    }

    fn is_marked(&self) -> bool {
        mark::is_set(&self.end.content())
    }

    /// Closes the image, and returns true if it stays marked.
    fn is_marked_at_end(&mut self) -> bool {
        self.source = None;
        self.is_marked()
    }
}

/// The indices of events that write a header, each with true if the header has the mark.
fn headers(journal: &[Event]) -> Vec<(usize, bool)> {
    let header = |(index, event): (usize, &Event)| match event {
        Event::Write(0, data) => Some((index, mark::is_set(data))),
        _ => None,
    };
    journal.iter().enumerate().filter_map(header).collect()
}

type Change = fn(&World) -> bool;

/// Requests that may change tables.
const CHANGES: [(&str, Change); 5] = [
    ("write", |world| world.write(0).is_ok()),
    ("discard", |world| {
        let disk = world.disk();
        world.thread.block_on(disk.discard(0, CLUSTER)).unwrap().is_ok()
    }),
    ("zero", |world| {
        let disk = world.disk();
        world.thread.block_on(disk.write_zeroes(512, CLUSTER, false)).unwrap().is_ok()
    }),
    ("unmap", |world| {
        let disk = world.disk();
        world.thread.block_on(disk.write_zeroes(0, MIB, true)).unwrap().is_ok()
    }),
    ("grow", |world| world.source().set_size(1 << 32, || ()).is_ok()),
];

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_mark_is_stable_before_any_change_and_is_removed_at_the_end() {
    let options = format!("preallocation=metadata,cluster_size={CLUSTER}");
    for (name, change) in CHANGES {
        let Some(content) = new_image(if name == "write" { "compat=1.1" } else { &options }) else {
            return;
        };
        let mut world = World::new(&content);
        let (disk, thread) = (world.disk(), &world.thread);
        thread.block_on(disk.read(0, Buffers::aligned(4096, 512))).unwrap().unwrap();
        thread.block_on(disk.flush()).unwrap().unwrap();
        drop(disk);
        assert!(headers(&world.end.journal()).is_empty(), "{name}: nothing has changed");
        let before = world.end.events();
        assert!(change(&world), "{name}");
        let journal = world.end.journal();
        let headers_then = headers(&journal);
        assert_eq!(headers_then.first(), Some(&(before, true)), "{name}");
        assert!(matches!(journal[before + 1], Event::Flush), "{name}");
        assert!(journal.len() > before + 2, "{name} has changed nothing");
        assert!(headers_then.iter().all(|(_, is_set)| *is_set), "{name}: a header without a mark");
        // A second change finds the mark set.
        world.write(100).unwrap();
        assert_eq!(headers(&world.end.journal()), headers_then, "{name}");
        let before = world.end.events();
        assert!(!world.is_marked_at_end(), "{name}");
        let journal = world.end.journal();
        // Clusters that were counted ahead are uncounted, and the counts are stable before the mark
        // is removed.
        let uncounted = if matches!(name, "write" | "grow") { 2 } else { 0 };
        assert_eq!(headers(&journal[before..]), [(uncounted, false)], "{name}");
        assert_eq!(journal.len(), before + uncounted + 1, "{name}: an end is quick");
        let flushes = journal[before..].iter().filter(|event| matches!(event, Event::Flush));
        assert_eq!(flushes.count(), uncounted / 2, "{name}");
    }
}

/// Its last user may have been killed before the mark was stable.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_mark_of_an_earlier_process_is_stable_before_the_first_change() {
    let Some(mut content) = new_image("compat=1.1") else { return };
    mark::set(&mut content, true);
    let mut world = World::new(&content);
    assert_eq!(world.end.events(), 0);
    world.write(0).unwrap();
    let journal = world.end.journal();
    assert!(matches!(journal[0], Event::Flush) && journal.len() > 2, "{}", journal.len());
    assert!(world.is_marked() && !world.is_marked_at_end());
}

/// imago does not know the mark, and writes headers when tables move.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_rewritten_header_keeps_the_mark() {
    let Some(content) = new_image("cluster_size=512,refcount_bits=64") else { return };
    let mut world = World::new(&content);
    // The table of counts has to move.
    for number in 0..600 {
        world.write(number).unwrap();
    }
    world.source().set_size(64 * MIB, || ()).unwrap();
    world.write(700).unwrap();
    let headers = headers(&world.end.journal());
    assert!(headers.len() > 2 && headers.iter().all(|(_, is_set)| *is_set), "{headers:?}");
    assert!(!world.is_marked_at_end());
}

/// The image is opened again in between, as its tables take too much memory.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_reopened_image_stays_marked() {
    let Some(content) = new_image("compat=1.1") else { return };
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let end = RemoteStub::exclusive(&content);
    let layers = vec![Layer::qcow2(end.clone().source()).unwrap()];
    let (_, source) = super::open_image(layers, false).unwrap();
    let core = std::sync::Arc::clone(&source.image.core);
    let disk = DiskSource::from_driver(end.clone().source().info(), std::sync::Arc::new(source));
    let write = |cluster: u64| {
        let (attached, data) = (disk.attach(thread.io()), Buffers::from_vec(vec![7; 512]));
        thread.block_on(attached.write(cluster * CLUSTER, data, false)).unwrap().unwrap();
    };
    write(0);
    assert!(mark::is_set(&end.content()));
    core.cache_limit.reach();
    write(1);
    assert!(!core.cache_limit.is_reached(), "it was opened anew");
    assert!(mark::is_set(&end.content()));
    drop(core);
    drop(disk);
    assert!(!mark::is_set(&end.content()));
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_stays_marked_when_clusters_may_be_leaked() {
    let Some(content) = new_image("compat=1.1") else { return };
    let mut world = World::new(&content);
    let disk = world.disk();
    world.thread.block_on(disk.discard(0, CLUSTER)).unwrap().unwrap();
    drop(disk);
    assert!(world.is_marked());
    world.end.have_some_fail(1);
    world.write(1).unwrap_err();
    world.end.have_some_fail(0);
    world.write(1).unwrap();
    assert!(world.is_marked_at_end());
    // An image that could not be marked has not changed.
    let mut world = World::new(&content);
    world.end.have_some_fail(1);
    world.write(1).unwrap_err();
    world.end.have_some_fail(0);
    assert!(world.end.journal().is_empty());
    world.write(1).unwrap();
    assert!(world.is_marked());
    assert!(!world.is_marked_at_end());
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn images_without_exclusive_use_or_later_checks_are_not_marked() {
    for (options, is_held) in
        [("compat=1.1", false), ("lazy_refcounts=on", true), ("compat=0.10", true)]
    {
        let Some(content) = new_image(options) else { return };
        let end = if is_held { RemoteStub::exclusive } else { RemoteStub::new }(&content);
        let source = open(end.clone().source(), false).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let mut world = World { thread, end, source: Some(source) };
        for (name, change) in CHANGES {
            assert!(change(&world), "{name}");
            let disk = world.disk();
            world.thread.block_on(disk.flush()).unwrap().unwrap();
            // Without a mark, clusters that a killed process had counted ahead would never be
            // freed.
            let found = super::leaks_tests::check(&world.end.content());
            assert_eq!(found, Some(0), "{options}: {name}");
        }
        assert!(!world.is_marked_at_end());
        assert!(headers(&world.end.journal()).iter().all(|(_, is_set)| !is_set), "{options}");
    }
}

/// Images that another process has left marked.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_marked_image_that_cannot_be_checked_is_only_read() {
    for (options, is_held, expected) in [
        ("compat=1.1", false, "where its file can be locked"),
        ("lazy_refcounts=on", true, "(lazy_refcounts); repair it"),
    ] {
        let Some(mut content) = new_image(options) else { return };
        mark::set(&mut content, true);
        let end = if is_held { RemoteStub::exclusive } else { RemoteStub::new }(&content);
        for is_deferred in [false, true] {
            match open(end.clone().source(), is_deferred) {
                // The process that hands the image over has marked it.
                Ok(_) => assert!(is_deferred && !is_held),
                Err(error) => {
                    let error = error.to_string();
                    let is_advice = error.contains("qemu-img check -r all");
                    assert!(error.contains(expected) && is_advice, "{error}");
                }
            }
            let source = open(end.clone().source().for_reading(), is_deferred).unwrap();
            let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
            let disk = source.attach(thread.io());
            thread.block_on(disk.read(0, Buffers::aligned(4096, 512))).unwrap().unwrap();
        }
        assert!(end.journal().is_empty());
    }
}

/// Reading lets the owner of the image save its data.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_that_is_marked_as_corrupt_is_only_read() {
    let Some(mut content) = new_image("compat=1.1") else { return };
    content[79] |= 2;
    let end = RemoteStub::exclusive(&content);
    let error = open(end.clone().source(), false).unwrap_err().to_string();
    assert!(error.contains("open it read-only to copy its data"), "{error}");
    let source = open(end.clone().source().for_reading(), false).unwrap();
    let warning = source.warning().unwrap();
    assert!(warning.contains("it is marked as corrupt, so its data may be wrong"), "{warning}");
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = source.attach(thread.io());
    thread.block_on(disk.read(0, Buffers::aligned(4096, 512))).unwrap().unwrap();
    assert!(end.journal().is_empty());
}

/// The first of two processes writes to the image until the second one begins.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_is_handed_over_without_a_mark() {
    let Some(content) = new_image("compat=1.1") else { return };
    let mut old = World::new(&content);
    old.write(0).unwrap();
    let new = || open(old.end.clone().source(), true).unwrap();
    let abandoned = new();
    // The next process can do without the cache of the server, but not with a mark.
    old.end.set_hand_over(HandOverFacts { is_written_back: false, ..HandOverFacts::default() });
    assert!(old.source().hand_over().is_written_back());
    old.source().hand_over().write_back().unwrap();
    assert!(!old.is_marked());
    drop(abandoned);
    // The old process resumes, and marks the image again.
    old.write(1).unwrap();
    assert!(old.is_marked());
    let source = Some(new());
    old.source().hand_over().write_back().unwrap();
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let mut new = World { thread, end: old.end.clone(), source };
    new.write(2).unwrap();
    let events = new.end.events();
    assert!(old.is_marked_at_end(), "it is the other one's mark");
    assert_eq!(new.end.events(), events, "the old one has written to it");
    assert!(!new.is_marked_at_end());
}

/// Answered writes would be missing in the other process.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_whose_file_cannot_be_written_back_is_not_handed_over() {
    let Some(content) = new_image("compat=1.1") else { return };
    let world = World::new(&content);
    world.write(0).unwrap();
    world.end.fail_write_back();
    let error = world.source().hand_over().write_back().unwrap_err().to_string();
    assert!(error.contains("its cache cannot be written"), "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_mark_that_is_handed_over_stays() {
    let Some(content) = new_image("compat=1.1") else { return };
    let mut old = World::new(&content);
    old.write(0).unwrap();
    old.end.have_some_fail(1);
    old.write(1).unwrap_err();
    let source = Some(open(old.end.clone().source(), true).unwrap());
    old.source().hand_over().write_back().unwrap();
    old.end.have_some_fail(0);
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let mut new = World { thread, end: old.end.clone(), source };
    new.write(2).unwrap();
    let events = new.end.events();
    assert!(old.is_marked_at_end());
    assert_eq!(new.end.events(), events, "the old one has written to it");
    new.source().set_size(1 << 32, || ()).unwrap();
    assert!(new.is_marked_at_end());
    // The next process checks the image.
    let mut next = World::new(&new.end.content());
    assert!(next.is_marked());
    next.write(3).unwrap();
    assert!(!next.is_marked_at_end());
}

/// Writes to an image in a file, and closes it. In between the mark is as expected.
fn check_file(thread: &IoThread, source: DiskSource, file: &NamedTempFile, is_marked: bool) {
    let has_mark = || mark::is_set(&std::fs::read(file.path()).unwrap());
    let disk = source.attach(thread.io());
    let write = disk.write(0, Buffers::from_vec(vec![7; 512]), false);
    thread.block_on(write).unwrap().unwrap();
    assert_eq!(has_mark(), is_marked);
    drop((disk, source));
    assert!(!has_mark());
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_is_marked_if_it_is_locked() {
    let Some(content) = new_image("compat=1.1") else { return };
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    for (no_lock, over_part) in [(false, false), (false, true), (true, false)] {
        let file = NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&content, 0).unwrap();
        let options = DiskOptions { holds_image: true, no_lock, ..DiskOptions::default() };
        let below = DiskSource::file(file.path(), &options).unwrap();
        let below = if over_part { DiskSource::raw(below, 0, None).unwrap() } else { below };
        check_file(&thread, open(below, false).unwrap(), &file, !no_lock);
    }
}

/// The process that takes over gets the lock with the file.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_that_is_handed_over_is_marked_if_it_is_locked() {
    let Some(content) = new_image("compat=1.1") else { return };
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    for no_lock in [false, true] {
        let file = NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&content, 0).unwrap();
        let options = DiskOptions { holds_image: true, no_lock, ..DiskOptions::default() };
        let old = DiskSource::file(file.path(), &options).unwrap();
        let handed = old.hand_over().descriptor().unwrap().try_clone_to_owned().unwrap();
        let below = DiskHandOver::open(handed.into(), file.path(), &options).unwrap();
        let source = open(below, true).unwrap();
        drop(old);
        check_file(&thread, source, &file, !no_lock);
    }
}

/// The disk did not answer when the old process was to close the image.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_process_writes_nothing_to_an_image_that_it_has_handed_over() {
    let Some(content) = new_image("compat=1.1") else { return };
    let mut old = World::new(&content);
    old.write(0).unwrap();
    let source = Some(open(old.end.clone().source(), true).unwrap());
    old.end.set_away(true);
    old.source().hand_over().write_back().unwrap();
    old.end.set_away(false);
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let mut new = World { thread, end: old.end.clone(), source };
    new.write(2).unwrap();
    let events = new.end.events();
    assert!(old.is_marked_at_end());
    assert_eq!(new.end.events(), events, "the old one has written to it");
    assert!(new.is_marked_at_end(), "nobody has looked at it");
}

/// A second request may come before the disk has answered the first.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_hand_over_ends_after_the_last_write() {
    let Some(content) = new_image("compat=1.1") else { return };
    let world = World::new(&content);
    world.write(0).unwrap();
    world.end.set_silent(true);
    let (sender, left) = mpsc::channel();
    let hand_over = || {
        let (source, end, sender) = (world.source().clone(), world.end.clone(), sender.clone());
        std::thread::spawn(move || {
            source.hand_over().write_back().unwrap();
            sender.send(end.events()).unwrap();
        })
    };
    let first = hand_over();
    while !world.end.is_asked() {
        std::thread::yield_now();
    }
    let second = hand_over();
    assert!(left.recv_timeout(Duration::from_millis(100)).is_err(), "it is left too early");
    world.end.set_silent(false);
    for thread in [first, second] {
        thread.join().unwrap();
    }
    assert!(!world.is_marked());
    let written = world.end.events();
    assert_eq!(left.try_iter().collect::<Vec<_>>(), [written; 2]);
}

/// A disk below may have any bytes at the place of the mark.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_backing_file_has_no_mark() {
    let Some(content) = new_image("compat=1.1") else { return };
    let base = RemoteStub::new(&[0xff; 1 << 20]);
    let layers = vec![
        Layer::qcow2(RemoteStub::exclusive(&content).source()).unwrap(),
        Layer::raw(base.source()),
    ];
    let source = crate::qcow2::open(layers, false).unwrap();
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = source.attach(thread.io());
    // The rest of the cluster is copied.
    let write = disk.write(512, Buffers::from_vec(vec![7; 512]), false);
    thread.block_on(write).unwrap().unwrap();
    let memory = Buffers::aligned(512, 512);
    let read = memory.duplicate();
    thread.block_on(disk.read(0, memory)).unwrap().unwrap();
    assert_eq!(read.to_vec(), [0xff; 512]);
}
