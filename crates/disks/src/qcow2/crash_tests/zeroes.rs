//! Zeroes and discards over clusters of each kind.

use std::process::{Command, Stdio};

use blockio::disk::ExtentKind;
use blockio::testing::{Event, RemoteStub};
use blockio::{DiskSource, IoThread, IoThreadConfig};
use iomem::Buffers;

use super::qemu_img;
use crate::qcow2::Layer;

/// One L2 table covers this many bytes of a disk with clusters of 512 bytes.
const COVERED: usize = 32 << 10;
const COMPRESSED: u8 = 5;
const BELOW: u8 = 6;

/// The first table has compressed clusters. The second one is missing, and made by the zeroes.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_kill_during_zeroes_leaves_old_data_or_zeroes() {
    if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [data, image] = ["data", "image"].map(|name| folder.path().join(name));
    std::fs::write(&data, [COMPRESSED; COVERED]).unwrap();
    let [data, path] = [&data, &image].map(|path| path.to_str().unwrap());
    let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=512"];
    qemu_img(&[&convert[..], &[data, path]].concat());
    qemu_img(&["resize", "-q", "-f", "qcow2", path, "64K"]);
    let mut content = std::fs::read(&image).unwrap();
    content.resize(content.len().next_multiple_of(4096), 0);

    let below = RemoteStub::new(&[BELOW; 2 * COVERED]);
    let open = |file: &RemoteStub| -> DiskSource {
        let top = Layer::qcow2(file.clone().source()).unwrap();
        crate::qcow2::open(vec![top, Layer::raw(below.clone().source())], false).unwrap()
    };
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let file = RemoteStub::exclusive(&content);
    let disk = open(&file).attach(thread.io());
    // This write takes the cluster that is free before the compressed ones.
    let data = Buffers::from_vec(vec![COMPRESSED; 512]);
    thread.block_on(disk.write(COVERED as u64 - 512, data, false)).unwrap().unwrap();
    thread.block_on(disk.write_zeroes(0, 2 * COVERED as u64, false)).unwrap().unwrap();
    let journal = file.journal();
    assert!(journal.len() > 4, "the tables have not changed");
    for end in 0..=journal.len() {
        if let Some(Event::Write(offset, data)) = end.checked_sub(1).map(|last| &journal[last]) {
            let start = usize::try_from(*offset).unwrap();
            content.resize(content.len().max(start + data.len()), 0);
            content[start..start + data.len()].copy_from_slice(data);
        }
        let killed = RemoteStub::exclusive(&content);
        let disk = open(&killed).attach(thread.io());
        let memory = Buffers::aligned(COVERED, 4096);
        let read = memory.duplicate();
        thread.block_on(disk.read(0, memory)).unwrap().unwrap();
        let is_intact = read.to_vec().iter().all(|byte| [COMPRESSED, 0].contains(byte));
        assert!(is_intact, "killed after {end} of {} events", journal.len());
    }
}

/// No data lies behind the end of the disk.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_removal_up_to_the_end_of_the_disk_removes_its_last_cluster() {
    const CLUSTER: u64 = 64 << 10;
    const END: u64 = 2 * CLUSTER + 1536;
    if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image").display().to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", &path, &END.to_string()]);
    let mut content = std::fs::read(&path).unwrap();
    content.resize(content.len().next_multiple_of(4096), 0);
    let top = Layer::qcow2(RemoteStub::exclusive(&content).source()).unwrap();
    let disk_source = crate::qcow2::open(vec![top], false).unwrap();
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = disk_source.attach(thread.io());
    for zeroes in [false, true] {
        for (end, expected) in [(END - 512, ExtentKind::Data), (END, ExtentKind::Hole)] {
            let data = Buffers::from_vec(vec![COMPRESSED; 1536]);
            thread.block_on(disk.write(2 * CLUSTER, data, false)).unwrap().unwrap();
            let removed = thread.block_on(async {
                match zeroes {
                    true => disk.write_zeroes(CLUSTER, end - CLUSTER, true).await,
                    false => disk.discard(CLUSTER, end - CLUSTER).await,
                }
            });
            removed.unwrap().unwrap();
            let status = thread.block_on(disk.block_status(END - 512, 512)).unwrap();
            assert_eq!(status.unwrap().kind, expected, "up to {end}, zeroes: {zeroes}");
        }
    }
}
