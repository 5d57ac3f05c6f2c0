//! Sequential writers with places for the clusters ahead of them.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockio::DiskSource;
use blockio::testing::RemoteStub;
use iomem::Buffers;

use super::{KINDS, Moment, SECTOR, World, filled};
use crate::qcow2::{Layer, open_image};

const CLUSTER: u64 = 64 << 10;
const CLUSTER_SECTORS: u64 = CLUSTER / SECTOR as u64;

fn lacks_qemu_img() -> bool {
    let version = Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status();
    if version.is_err() {
        eprintln!("skipped: qemu-img is not installed");
    }
    version.is_err()
}

/// Two writers alternate, and the clusters ahead of both have places when the power goes.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn clusters_ahead_of_a_writer_are_zeroes_after_a_loss_of_power_or_a_kill() {
    if lacks_qemu_img() {
        return;
    }
    let mut world = World::new(&KINDS[KINDS.len() - 1], true);
    let disk = world.image.attach(world.thread.io());
    for cluster in 0..24 {
        for first in [cluster * CLUSTER_SECTORS, (128 + cluster) * CLUSTER_SECTORS] {
            world.last += 1;
            // A part of each cluster. The rest stays zeroes.
            let sectors = first..first + CLUSTER_SECTORS / 2;
            world.moments.last_mut().unwrap().flushed.add(&sectors, world.last);
            let data = Buffers::from_vec(filled(world.last, CLUSTER_SECTORS / 2));
            let write = disk.write(first * SECTOR as u64, data, false);
            world.thread.block_on(write).unwrap().unwrap();
            world.now.set(&sectors, world.last);
        }
        let moment = |world: &World| {
            let (events, flushed) = (world.file.events(), world.now.clone());
            Moment { events, flushed }
        };
        world.answered.push(moment(&world));
        if cluster % 8 == 7 {
            world.thread.block_on(disk.flush()).unwrap().unwrap();
            world.moments.push(moment(&world));
        }
    }
    let journal = world.file.journal();
    for end in (0..=journal.len()).step_by(1 + journal.len() / 24) {
        let content = world.cut(&journal, end, false);
        world.check(&content, end, &format!("cut {end} of {}", journal.len()));
        let content = world.cut_to_last(&journal, end);
        world.check(&content, end, &format!("last of {end} of {}", journal.len()));
    }
    world.check_kills(&journal, "two writers");
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_writer_waits_for_few_commits() {
    if lacks_qemu_img() {
        return;
    }
    let world = World::new(&KINDS[KINDS.len() - 1], true);
    let end = RemoteStub::exclusive(&world.content);
    let layers = vec![Layer::qcow2(end.clone().source()).unwrap()];
    let (info, source) = open_image(layers, false).unwrap();
    let core = Arc::clone(&source.image.core);
    let source = DiskSource::from_driver(info, Arc::new(source));
    let disk = source.attach(world.thread.io());
    let commits = || core.committed.load(Ordering::Relaxed);
    let write = |cluster: u64| {
        let data = Buffers::from_vec(filled(7, 1));
        world.thread.block_on(disk.write(cluster * CLUSTER, data, false)).unwrap().unwrap();
    };
    (0..4).for_each(&write);
    let before = commits();
    (4..68).for_each(&write);
    // A quarter of the clusters that are ready get places at once. Tests have 16 of them.
    let in_order = commits() - before;
    assert!(in_order <= 32, "{in_order} commits for 64 clusters in order");
    let before = commits();
    (0..32).map(|index| 100 + index * 37 % 64 * 2).for_each(&write);
    let apart = commits() - before;
    assert!(apart >= 32, "{apart} commits for 32 clusters apart");
}
