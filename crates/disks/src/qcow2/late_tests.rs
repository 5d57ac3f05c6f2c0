//! Images that two processes have open, and use in turn.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Command;

use blockio::disk::{DiskState, LateLock};
use blockio::testing::{Call, HandOverFacts, RemoteStub};
use blockio::{DiskOptions, DiskSource, IoThread, IoThreadConfig};
use iomem::Buffers;
use tempfile::TempDir;

use super::core::Layer;
use crate::qcow2::consistency::mark;
use crate::test_log::{keep_log, log_of};

const DISK_BYTES: usize = 4 << 20;
const CLUSTER: usize = 4096;

struct Scene {
    _folder: TempDir,
    image: PathBuf,
    thread: IoThread,
}

impl Scene {
    /// Makes an image. `None` without qemu-img.
    fn new(options: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"]).args(options);
        if create.arg(&image).arg(DISK_BYTES.to_string()).status().is_err() {
            eprintln!("skipped: qemu-img is not installed");
            return None;
        }
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        Some(Self { _folder: folder, image, thread })
    }

    fn late(&self) -> Process {
        let options = DiskOptions {
            no_lock: true,
            late_lock: true,
            holds_image: true,
            ..DiskOptions::default()
        };
        let file = DiskSource::file(&self.image, &options).unwrap();
        let source = crate::qcow2::open_late(vec![Layer::qcow2(file).unwrap()]).unwrap();
        Process { lock: source.late_lock().unwrap(), source }
    }

    /// Writes a cluster of this byte, and returns the content of the disk.
    fn use_once(&self, process: &Process, cluster: usize, byte: u8) -> Vec<u8> {
        let disk = process.source.attach(self.thread.io());
        let data = Buffers::from_vec(vec![byte; CLUSTER]);
        let written = disk.write((cluster * CLUSTER) as u64, data, false);
        self.thread.block_on(written).unwrap().unwrap();
        let all = Buffers::aligned(DISK_BYTES, 4096);
        let found = all.duplicate();
        self.thread.block_on(disk.read(0, all)).unwrap().unwrap();
        found.to_vec()
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.image).unwrap()
    }

    /// Fails if the image has errors or leaks.
    fn check(&self) {
        let check = Command::new("qemu-img").arg("check").arg(&self.image).output().unwrap();
        assert!(check.status.success(), "{check:?}");
    }
}

/// One of the processes that have the image open.
struct Process {
    source: DiskSource,
    lock: LateLock,
}

fn is_locked(image: &Path) -> bool {
    let options = DiskOptions { at_once: true, holds_image: true, ..DiskOptions::default() };
    DiskSource::file(image, &options).is_err()
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn each_user_finds_the_data_of_the_one_before() {
    for options in [&[][..], &["-o", "compat=0.10"], &["-o", "preallocation=metadata"]] {
        let Some(scene) = Scene::new(options) else { return };
        let processes = [scene.late(), scene.late()];
        let mut expected = vec![0; DISK_BYTES];
        for turn in 0..10 {
            let process = &processes[turn % 2];
            assert!(!is_locked(&scene.image));
            process.lock.take(turn as u64 + 1).unwrap();
            assert!(is_locked(&scene.image));
            // New clusters, and clusters of the user before. They lie in the first table and in
            // further ones.
            for cluster in [turn, turn + 1, 700 + turn, 1023 - turn] {
                let byte = 1 + u8::try_from(turn).unwrap();
                expected[cluster * CLUSTER..(cluster + 1) * CLUSTER].fill(byte);
                let found = scene.use_once(process, cluster, byte);
                assert!(found == expected, "{options:?}: turn {turn}");
            }
            process.lock.release(turn as u64 + 1).unwrap();
            scene.check();
            assert!(!mark::is_set(&scene.bytes()), "the next user checks all of the image");
        }
    }
}

/// Another process writes to the image until the lock is taken, and after its release.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_is_not_touched_without_its_lock() {
    let Some(scene) = Scene::new(&[]) else { return };
    let owner = scene.late();
    owner.lock.take(1).unwrap();
    scene.use_once(&owner, 7, 9);
    let before = scene.bytes();
    let early = scene.late();
    assert!(early.source.set_size(8 << 20, || ()).is_err(), "it has no lock");
    // A request that comes too early fails.
    let disk = early.source.attach(scene.thread.io());
    for byte in [1, 2] {
        let data = Buffers::from_vec(vec![byte; CLUSTER]);
        assert!(scene.thread.block_on(disk.write(0, data, false)).unwrap().is_err());
        assert!(scene.thread.block_on(disk.discard(7 * CLUSTER as u64, 4096)).unwrap().is_err());
    }
    drop((disk, early));
    assert!(scene.bytes() == before, "it was changed without its lock");

    owner.lock.release(1).unwrap();
    let before = scene.bytes();
    let late = owner.source.attach(scene.thread.io());
    let data = Buffers::from_vec(vec![3; CLUSTER]);
    assert!(scene.thread.block_on(late.write(0, data, false)).unwrap().is_err());
    drop((late, owner));
    assert!(scene.bytes() == before, "it was changed after the release");
}

/// The counts of a user that was killed are checked and repaired as at a start.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_that_a_killed_user_has_left_is_repaired() {
    let Some(scene) = Scene::new(&[]) else { return };
    let next = scene.late();
    {
        let killed = scene.late();
        killed.lock.take(1).unwrap();
        scene.use_once(&killed, 7, 9);
        let left = scene.bytes();
        killed.lock.release(1).unwrap();
        std::fs::write(&scene.image, left).unwrap();
    }
    assert!(mark::is_set(&scene.bytes()));
    next.lock.take(2).unwrap();
    let found = scene.use_once(&next, 8, 9);
    assert!(found[7 * CLUSTER..9 * CLUSTER].iter().all(|byte| *byte == 9));
    next.lock.release(2).unwrap();
    assert!(!mark::is_set(&scene.bytes()));
    scene.check();
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_that_has_become_another_one_is_refused() {
    let Some(scene) = Scene::new(&[]) else { return };
    let process = scene.late();
    let qemu_img = |arguments: &[&str]| {
        let mut command = Command::new("qemu-img");
        assert!(command.args(arguments).arg(&scene.image).arg("1M").status().unwrap().success());
    };
    let take = |user| process.lock.take(user).map_err(|error| error.to_string());
    qemu_img(&["resize", "-q", "--shrink"]);
    let refused = take(1).unwrap_err();
    assert!(refused.contains("1048576 bytes") && refused.contains("4194304"), "{refused}");
    assert!(!is_locked(&scene.image), "a refused lock stays");
    let base = scene.image.with_file_name("base");
    std::fs::write(&base, [0; 1 << 20]).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", &base.to_string_lossy(), "-F", "raw"]);
    let refused = take(2).unwrap_err();
    assert!(refused.contains("another backing file"), "{refused}");
    std::fs::write(&scene.image, vec![0; 1 << 20]).unwrap();
    assert!(take(3).is_err());
    assert!(!is_locked(&scene.image));
}

/// Its data would be other data.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_over_another_backing_file_is_refused() {
    let Some(scene) = Scene::new(&[]) else { return };
    let base = |name: &str| scene.image.with_file_name(name);
    let rebase = |to: &str| {
        let mut rebase = Command::new("qemu-img");
        rebase.args(["rebase", "-u", "-F", "raw", "-b", to]).arg(&scene.image);
        assert!(rebase.status().unwrap().success());
    };
    ["one", "two"].iter().for_each(|name| std::fs::write(base(name), [1; 4096]).unwrap());
    rebase("one");
    let late =
        DiskOptions { no_lock: true, late_lock: true, holds_image: true, ..Default::default() };
    let file = DiskSource::file(&scene.image, &late).unwrap();
    let below = DiskOptions { read_only: true, ..DiskOptions::default() };
    let below = DiskSource::file(&base("one"), &below).unwrap();
    let layers = vec![Layer::qcow2(file).unwrap(), Layer::raw(below)];
    let source = crate::qcow2::open_late(layers).unwrap();
    let lock = source.late_lock().unwrap();
    for (user, name, is_usable) in [(1, "one", true), (2, "two", false), (3, "one", true)] {
        rebase(name);
        let taken = lock.take(user).map_err(|error| error.to_string());
        match is_usable {
            true => taken.unwrap(),
            false => assert!(taken.unwrap_err().contains("another backing file"), "{name}"),
        }
        lock.release(user).unwrap();
    }
}

/// It may have grown on a second host, and requests rely on that.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_larger_size_is_used_at_once() {
    let Some(scene) = Scene::new(&[]) else { return };
    let (before, after) = (DISK_BYTES as u64, 2 * DISK_BYTES as u64);
    let [first, second] = [scene.late(), scene.late()];
    first.lock.take(1).unwrap();
    first.source.set_size(after, || ()).unwrap();
    first.lock.release(1).unwrap();
    // Another host may use it from now on.
    for process in [&first, &second] {
        let error = process.source.set_size(2 * after, || ()).unwrap_err().to_string();
        assert!(error.contains("it is not locked now"), "{error}");
    }
    second.lock.take(2).unwrap();
    let source = &second.source;
    assert_eq!((source.info().size_bytes, source.announced_bytes()), (after, before));
    let disk = source.attach(scene.thread.io());
    let beyond = disk.write(before, Buffers::from_vec(vec![5; CLUSTER]), false);
    scene.thread.block_on(beyond).unwrap().unwrap();
    assert_eq!(source.size_probe().unwrap().size_bytes().unwrap(), Some(after));
    second.lock.release(2).unwrap();
}

/// An image on a server. `None` without qemu-img.
fn image_on_server() -> Option<(RemoteStub, IoThread)> {
    let scene = Scene::new(&[])?;
    let mut content = scene.bytes();
    content.resize(content.len().next_multiple_of(4096), 0);
    Some((RemoteStub::exclusive(&content), scene.thread))
}

/// Another process gives the disk in an image another size.
fn write_size(end: &RemoteStub, thread: &IoThread, size_bytes: u64) {
    let mut header = end.content()[..4096].to_vec();
    header[24..32].copy_from_slice(&size_bytes.to_be_bytes());
    let disk = end.clone().source().attach(thread.io());
    thread.block_on(disk.write(0, Buffers::from_vec(header), false)).unwrap().unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_size_of_an_image_on_a_server_is_checked() {
    let Some((end, thread)) = image_on_server() else { return };
    // The table of the image has room for the largest size.
    let size = DISK_BYTES as u64 / 2;
    write_size(&end, &thread, size);
    let layers = vec![Layer::qcow2(end.clone().source()).unwrap()];
    let source = crate::qcow2::open_late(layers).unwrap();
    let lock = source.late_lock().unwrap();
    write_size(&end, &thread, size / 2);
    let refused = lock.take(1).unwrap_err().to_string();
    assert!(refused.contains("1048576 bytes") && refused.contains("2097152"), "{refused}");
    assert!(refused.contains("restore its size"), "{refused}");
    for (user, now) in [(2, size), (3, 2 * size)] {
        write_size(&end, &thread, now);
        lock.take(user).unwrap();
        assert_eq!((source.info().size_bytes, source.announced_bytes()), (now, size));
        lock.release(user).unwrap();
    }
}

/// The log has the reason, since a request gets only a number.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_reason_of_a_failed_request_is_logged_at_intervals() {
    keep_log();
    let Some(scene) = Scene::new(&[]) else { return };
    let options = DiskOptions { holds_image: true, ..DiskOptions::default() };
    let file = DiskSource::file(&scene.image, &options).unwrap();
    let source = crate::qcow2::open(vec![Layer::qcow2(file).unwrap()], false).unwrap();
    source.adopt_size(2 * DISK_BYTES as u64);
    let disk = source.attach(scene.thread.io());
    for _ in 0..3 {
        let read = disk.read(DISK_BYTES as u64, Buffers::from_vec(vec![0; CLUSTER]));
        scene.thread.block_on(read).unwrap().unwrap_err();
    }
    let lines = log_of(&scene.image.display().to_string());
    assert_eq!(lines.len(), 1, "{lines:?}");
    let is_clear = lines[0].starts_with("ERROR") && lines[0].contains("goes beyond its end");
    assert!(is_clear && lines[0].contains("qemu-img check"), "{lines:?}");
}

/// The front-end and the daemon see no difference to an image with one user.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_with_several_users_answers_as_with_one() {
    for (options, len) in [
        (&[][..], None),
        (&["-o", "compat=0.10"], None),
        (&["-o", "preallocation=metadata"], Some(DISK_BYTES as u64 / 2)),
    ] {
        let Some(scene) = Scene::new(options) else { return };
        if let Some(len) = len {
            std::fs::File::options().write(true).open(&scene.image).unwrap().set_len(len).unwrap();
        }
        let Process { source: late, lock } = scene.late();
        lock.take(1).unwrap();
        let options = DiskOptions { no_lock: true, holds_image: true, ..DiskOptions::default() };
        let file = DiskSource::file(&scene.image, &options).unwrap();
        let early = crate::qcow2::open(vec![Layer::qcow2(file).unwrap()], false).unwrap();
        assert_eq!(late.info(), early.info());
        assert_eq!(late.identity(), early.identity());
        assert_eq!(late.chain_text(), early.chain_text());
        assert!(late.chain_text().starts_with("qcow2"), "{}", late.chain_text());
        assert_eq!(late.place(), early.place());
        assert_eq!(late.abilities(), early.abilities());
        assert_eq!(late.discard_bytes(), early.discard_bytes());
        assert_eq!((late.warning(), late.warning().is_some()), (early.warning(), len.is_some()));
        let [of_late, of_early] = [&late, &early].map(DiskSource::hand_over);
        assert_eq!(of_late.is_flushed(), of_early.is_flushed());
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn an_image_with_several_users_passes_questions_and_orders_on() {
    let Some((end, _)) = image_on_server() else { return };
    let source =
        crate::qcow2::open_late(vec![Layer::qcow2(end.clone().source()).unwrap()]).unwrap();
    end.set_hand_over(HandOverFacts { is_written_back: false, ..HandOverFacts::default() });
    assert!(source.hand_over().is_written_back(), "an image has tables to write");
    assert_eq!(source.state(), DiskState::Ready);
    end.set_away(true);
    assert!(matches!(source.state(), DiskState::Away(_)));
    end.set_away(false);
    end.take_calls();
    source.hand_over().write_back().unwrap();
    source.hand_over().release_lock();
    source.abandon();
    assert_eq!(end.take_calls(), [Call::WriteBack, Call::ReleaseLock, Call::Abandon]);
}

/// A request repeats a look-up that other requests undo. Beyond the end none would succeed.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_request_beyond_the_end_of_an_image_fails() {
    let Some((end, thread)) = image_on_server() else { return };
    let layers = vec![Layer::qcow2(end.source()).unwrap()];
    let source = crate::qcow2::open(layers, false).unwrap();
    let size = DISK_BYTES as u64;
    source.adopt_size(2 * size);
    let disk = source.attach(thread.io());
    let buffers = || Buffers::from_vec(vec![5; 2 * CLUSTER]);
    // The first write makes the image count clusters ahead.
    thread.block_on(disk.write(0, buffers(), false)).unwrap().unwrap();
    for offset in [size - CLUSTER as u64, size, 2 * size - 2 * CLUSTER as u64] {
        let read = async { disk.read(offset, buffers()).await.is_err() };
        let written = async { disk.write(offset, buffers(), false).await.is_err() };
        let found = async { disk.block_status(offset, 2 * CLUSTER as u64).await.is_err() };
        let zeroed = async { disk.write_zeroes(offset, 2 * CLUSTER as u64, true).await.is_err() };
        let mut all = pin!(async { [read.await, written.await, found.await, zeroed.await] });
        let mut polls = 0;
        let failed = std::future::poll_fn(|context| {
            polls += 1;
            assert!(polls < 1000, "a request is repeated");
            all.as_mut().poll(context)
        });
        assert_eq!(thread.block_on(failed).unwrap(), [true; 4]);
    }
}
