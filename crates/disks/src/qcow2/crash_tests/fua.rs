//! Writes with FUA, which need stable pointers too.

use std::process::{Command, Stdio};

use blockio::driver::Driver as _;
use blockio::op::OpKind;
use blockio::testing::Event;
use blockio::{DiskOptions, DiskSource, IoThread, IoThreadConfig};
use iomem::Buffers;
use tempfile::NamedTempFile;

use super::{KINDS, Moment, SECTOR, World, filled, open};
use crate::qcow2::disk::Qcow2Disk;
use crate::qcow2::{Layer, open_image};

/// The previous process has not flushed the pointers to its data. The image was not marked, so it
/// was not checked since.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_write_with_fua_survives_in_a_cluster_of_an_earlier_process() {
    if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    for kind in &KINDS {
        let mut world = World::new(kind, false);
        for fua in [false, true] {
            world.image = open(&world.folder, &world.file, world.below);
            let disk = world.image.attach(world.thread.io());
            // From now on the place of the data is known.
            let read = disk.read(9 * SECTOR as u64, Buffers::aligned(SECTOR, 4096));
            world.thread.block_on(read).unwrap().unwrap();
            world.last += 1;
            let data = Buffers::from_vec(filled(world.last, 3));
            world.thread.block_on(disk.write(9 * SECTOR as u64, data, fua)).unwrap().unwrap();
            world.now.set(&(9..12), world.last);
        }
        let journal = world.file.journal();
        let (events, flushed) = (journal.len(), world.now.clone());
        world.moments.push(Moment { events, flushed });
        let content = world.cut_with(&journal, events, false, 0);
        world.check(&content, events, kind.options);
    }
}

/// A commit that ends during a flush may not be covered by the flush.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_write_with_fua_flushes_a_commit_that_ended_during_a_flush() {
    if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let world = World::new(&KINDS[0], true);
    let disk = world.image.attach(world.thread.io());
    let data = || Buffers::from_vec(filled(7, 1));
    world.file.set_silent(true);
    let flushed = async {
        let mut flush = Box::pin(disk.flush());
        std::future::poll_fn(|context| {
            assert!(flush.as_mut().poll(context).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
                let disk = world.image.attach(thread.io());
                thread.block_on(disk.write(0, data(), false)).unwrap().unwrap();
            });
            world.file.set_silent(false);
            other.join().unwrap();
        });
        // The answer to the flush is read after the commit.
        flush.await
    };
    world.thread.block_on(flushed).unwrap().unwrap();
    let before = world.file.events();
    world.thread.block_on(disk.write(0, data(), true)).unwrap().unwrap();
    let journal = world.file.journal();
    let flushes = journal[before..].iter().filter(|event| matches!(event, Event::Flush)).count();
    assert_eq!(flushes, 1, "the entry that leads to the data may be lost");
}

/// Requests to a file take a way of their own.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_write_with_fua_goes_straight_to_a_file_only_if_its_pointer_is_stable() {
    let file = NamedTempFile::new().unwrap();
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(file.path()).arg("1M");
    if create.status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let options = DiskOptions { holds_image: true, ..DiskOptions::default() };
    let below = DiskSource::file(file.path(), &options).unwrap();
    let (_, source) = open_image(vec![Layer::qcow2(below).unwrap()], false).unwrap();
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = Qcow2Disk::new(&source.image, thread.io(), None);
    let are_routed = || {
        [false, true].map(|fua| {
            let mut data = Buffers::aligned(4096, 4096);
            disk.route_to_file(OpKind::Write { fua }, 0, &mut data).is_some()
        })
    };
    assert_eq!(are_routed(), [false, false]);
    thread.block_on(disk.write(0, Buffers::aligned(4096, 4096), false)).unwrap().unwrap();
    assert_eq!(are_routed(), [true, false]);
    thread.block_on(disk.flush()).unwrap().unwrap();
    assert_eq!(are_routed(), [true, true]);
}

/// Its parts lie apart in the file, and a flush has covered all changes of the tables.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn each_part_of_a_write_with_fua_is_stable() {
    if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    for kind in &KINDS {
        let world = World::new(kind, true);
        let disk = world.image.attach(world.thread.io());
        let cluster = 1u64 << world.content[23];
        let sectors = cluster / SECTOR as u64;
        // The last one has the first place.
        for number in (0..4).rev() {
            let data = Buffers::from_vec(filled(number + 1, sectors));
            let written = disk.write(number * cluster, data, false);
            world.thread.block_on(written).unwrap().unwrap();
        }
        let all = Buffers::aligned(4 * usize::try_from(cluster).unwrap(), 4096);
        world.thread.block_on(disk.read(0, all)).unwrap().unwrap();
        world.thread.block_on(disk.flush()).unwrap().unwrap();
        let before = world.file.events();
        let data = Buffers::from_vec(filled(9, 2 * sectors));
        world.thread.block_on(disk.write(cluster, data, true)).unwrap().unwrap();
        let journal = world.file.journal();
        let journal = &journal[before..];
        let last = journal.iter().rposition(|event| matches!(event, Event::Write(..))).unwrap();
        let is_stable = |(index, event): (usize, &Event)| {
            !matches!(event, Event::Write(..))
                || matches!(journal.get(index + 1), Some(Event::Stable))
        };
        let is_flushed = journal[last..].iter().any(|event| matches!(event, Event::Flush));
        let are_stable = journal.iter().enumerate().all(is_stable);
        assert!(is_flushed || are_stable, "{}: {} events", kind.options, journal.len());
    }
}
