//! First writes that change only entries, beside discards and at the end of the image.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::task::Poll;

use blockio::disk::ExtentKind;
use blockio::testing::RemoteStub;
use blockio::{Disk, DiskSource};
use futures_util::future::join;
use iomem::Buffers;

use super::{KINDS, SECTOR, World, filled};
use crate::qcow2::consistency::mark;
use crate::qcow2::consistency::write_order::{L1_OFFSET, Roots};
use crate::qcow2::readers::{ReaderGuard, Readers};
use crate::qcow2::{Layer, open_image};

const CLUSTER: u64 = 64 << 10;

/// The entry of one of the first clusters.
fn entry(content: &[u8], cluster: u64) -> u64 {
    let number = |at: u64| {
        let at = usize::try_from(at).unwrap();
        u64::from_be_bytes(*content[at..].first_chunk().unwrap())
    };
    let table = number(Roots::parse(content.first_chunk().unwrap()).l1.start) & L1_OFFSET;
    number(table + cluster * 8)
}

/// The discard comes while a write waits for its entry.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_discard_during_a_first_write_forgets_its_place() {
    if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let world = World::new(&KINDS[KINDS.len() - 1], true);
    let disk = world.image.attach(world.thread.io());
    let write = |cluster| {
        let data = Buffers::from_vec(filled(7, CLUSTER / SECTOR as u64));
        disk.write(cluster * CLUSTER, data, false)
    };
    // From now on clusters are counted ahead, and the table is known.
    world.thread.block_on(write(0)).unwrap().unwrap();
    for cluster in 1..9 {
        world.file.set_silent(true);
        let mut first = Box::pin(write(cluster));
        let asked = poll_fn(|context| {
            assert!(first.as_mut().poll(context).is_pending());
            match world.file.is_asked() {
                true => Poll::Ready(()),
                false => {
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
            }
        });
        world.thread.block_on(asked).unwrap();
        let mut discard = Box::pin(disk.discard(cluster * CLUSTER, CLUSTER));
        let begun = poll_fn(|context| {
            assert!(discard.as_mut().poll(context).is_pending());
            Poll::Ready(())
        });
        world.thread.block_on(begun).unwrap();
        // Time for the owner to take the image for the discard.
        (0..1000).for_each(|_| std::thread::yield_now());
        world.file.set_silent(false);
        let (first, discarded) = world.thread.block_on(join(first, discard)).unwrap();
        first.unwrap();
        discarded.unwrap();
        let status = world.thread.block_on(disk.block_status(cluster * CLUSTER, CLUSTER)).unwrap();
        let is_there = status.unwrap().kind == ExtentKind::Data;
        let content = world.file.content();
        world.is_clean(&content, "after a discard");
        let entry = entry(&content, cluster);
        assert_eq!(is_there, entry > 1, "cluster {cluster}: the entry is {entry:#x}");
    }
}

/// A request that is under way may still write to the old place, which another cluster may get.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn places_are_removed_from_tables_when_no_request_uses_them() {
    if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    type Remove = fn(&Disk) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>>;
    let removals: [(&str, Remove); 3] = [
        ("discard", |disk| Box::pin(disk.discard(0, CLUSTER))),
        ("unmap", |disk| Box::pin(disk.write_zeroes(0, CLUSTER, true))),
        ("zero", |disk| Box::pin(disk.write_zeroes(0, CLUSTER, false))),
    ];
    let world = World::new(&KINDS[KINDS.len() - 1], true);
    for (name, remove) in removals {
        let end = RemoteStub::exclusive(&world.content);
        let layers = vec![Layer::qcow2(end.clone().source()).unwrap()];
        let (info, source) = open_image(layers, false).unwrap();
        let readers = Arc::<Readers>::default();
        source.image.core.add_thread(world.thread.remote(), &readers);
        let disk = DiskSource::from_driver(info, Arc::new(source)).attach(world.thread.io());
        let data = Buffers::from_vec(filled(7, CLUSTER / SECTOR as u64));
        world.thread.block_on(disk.write(0, data, false)).unwrap().unwrap();
        let (events, guard) = (end.events(), ReaderGuard::new(&readers));
        let mut removed = remove(&disk);
        let is_waited_for = poll_fn(|context| {
            let is_pending = removed.as_mut().poll(context).is_pending();
            assert!(is_pending, "{name} does not wait for a request");
            context.waker().wake_by_ref();
            if guard.is_current_round() { Poll::Pending } else { Poll::Ready(()) }
        });
        world.thread.block_on(is_waited_for).unwrap();
        assert_eq!(end.events(), events, "{name} has changed the tables");
        drop(guard);
        world.thread.block_on(removed).unwrap().unwrap();
        assert!(end.events() > events, "{name}");
    }
}

/// imago writes its counts before it is closed, for good or to be opened again.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn clusters_of_entries_stay_counted_when_imago_is_closed() {
    if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let world = World::new(&KINDS[KINDS.len() - 1], true);
    for is_opened_again in [false, true] {
        let end = RemoteStub::exclusive(&world.content);
        let layers = vec![Layer::qcow2(end.clone().source()).unwrap()];
        let (info, source) = open_image(layers, false).unwrap();
        let core = Arc::clone(&source.image.core);
        let source = DiskSource::from_driver(info, Arc::new(source));
        let disk = source.attach(world.thread.io());
        for cluster in 0..8 {
            if is_opened_again && cluster == 4 {
                core.cache_limit.reach();
            }
            let data = Buffers::from_vec(filled(7, 1));
            world.thread.block_on(disk.write(cluster * CLUSTER, data, false)).unwrap().unwrap();
        }
        drop((core, disk, source));
        let content = end.content();
        assert!(!mark::is_set(&content) && world.is_clean(&content, "at its end"));
        let mut entries: Vec<u64> = (0..8).map(|cluster| entry(&content, cluster)).collect();
        entries.sort_unstable();
        entries.dedup();
        assert!(entries.len() == 8 && entries[0] > 1, "{entries:x?}");
    }
}
