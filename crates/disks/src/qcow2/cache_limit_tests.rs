//! The memory of the tables of an image in use.

use std::process::Command;
use std::sync::Arc;

use blockio::{DiskOptions, DiskSource, IoThread, IoThreadConfig};
use iomem::Buffers;

use super::owner::{Job, run_job_blocking};
use super::{Layer, open_image};
use crate::qcow2::consistency::cache_limit::BYTES_MAX;

const CLUSTER: u64 = 64 << 10;
/// The bytes of the disk that one table covers.
const PART: u64 = CLUSTER * CLUSTER / 8;
const PARTS: u64 = 40;

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn tables_stay_within_the_cache_limit() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut make = Command::new("qemu-img");
    let made = make.args(["create", "-q", "-f", "qcow2"]).arg(file.path()).arg("20G").status();
    if made.is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let options = DiskOptions { holds_image: true, ..DiskOptions::default() };
    let source = DiskSource::file(file.path(), &options).unwrap();
    let (info, source) = open_image(vec![Layer::qcow2(source).unwrap()], false).unwrap();
    let cache_limit = Arc::clone(&source.image.core.cache_limit);
    let source = DiskSource::from_driver(info, Arc::new(source));
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = source.attach(thread.io());
    for part in 0..PARTS {
        let memory = Buffers::aligned(512, 512);
        memory.copy_from(0, &part.to_le_bytes());
        thread.block_on(disk.write(part * PART, memory, false)).unwrap().unwrap();
    }
    // The table that exceeds the bound, its block of counts, and data of a cluster.
    let most = cache_limit.most_bytes();
    assert!((BYTES_MAX..BYTES_MAX + 4 * CLUSTER).contains(&most), "{most}");
    drop(disk);
    drop(source);
    let check = Command::new("qemu-img").args(["check", "-q"]).arg(file.path()).status();
    assert!(check.unwrap().success());
    for is_zeroed in [false, true] {
        let source = DiskSource::file(file.path(), &options).unwrap();
        let (info, source) = open_image(vec![Layer::qcow2(source).unwrap()], false).unwrap();
        if is_zeroed {
            // The limit is reached between the tables of one job, too.
            let zero = Job::Zero { range: 0..PARTS * PART, may_unmap: false };
            run_job_blocking(&source.image.owner, zero).unwrap();
        }
        let disk = DiskSource::from_driver(info, Arc::new(source)).attach(thread.io());
        for part in 0..PARTS {
            let memory = Buffers::aligned(512, 512);
            let read = memory.duplicate();
            thread.block_on(disk.read(part * PART, memory)).unwrap().unwrap();
            let mut data = [0; 8];
            read.copy_to(0, &mut data);
            assert_eq!(u64::from_le_bytes(data), if is_zeroed { 0 } else { part });
        }
    }
}
