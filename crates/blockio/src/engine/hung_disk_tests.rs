//! A hung disk beside a healthy one, on one IoThread, with real engines.
//!
//! The hung disk is a file on a frozen file system, which takes root.

use std::cell::Cell;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::TaskSet;
use crate::config::{ByteLimits, EngineKind};
use crate::disk::{Disk, DiskOptions, DiskSource};
use crate::thread::IoThread;
use iomem::Buffers;

/// Runs one test at a time: mounting a file system may wait for one that is frozen.
static ALONE: Mutex<()> = Mutex::new(());

/// An ext4 file system in a file, mounted, with one file on it.
struct Volume {
    folder: tempfile::TempDir,
    /// Thaws the file system and unmounts it, even if this process is killed.
    keeper: Child,
}

/// The keeper waits until its input ends, and for a minute at most: threads that hang keep the
/// input of a killed process open. A neighbour that hangs as well would hang forever.
const KEEPER: &str = "timeout 60 cat
    fsfreeze --unfreeze \"$1/place\" 2>/dev/null
    umount --lazy \"$1/place\"
    rm -r \"$1\"";

/// Thaws the file system when dropped, which must be before the IoThread waits for its ops.
struct Frozen(PathBuf);

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("--unfreeze").arg(&self.0).status();
    }
}

impl Volume {
    /// Returns `None`, with a message, if the machine cannot mount it.
    fn new() -> Option<Self> {
        let root = rustix::process::geteuid().is_root();
        let run = |program: &str, args: &[&std::ffi::OsStr]| {
            Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
        };
        let folder = tempfile::tempdir_in(crate::testing::disk_folder()).unwrap();
        let (image, place) = (folder.path().join("image"), folder.path().join("place"));
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        std::fs::create_dir(&place).unwrap();
        let (image, target) = (image.as_os_str(), place.as_os_str());
        if !root
            || !run("mkfs.ext4", &["-q".as_ref(), image])
            || !run("mount", &["-o".as_ref(), "loop".as_ref(), image, target])
        {
            eprintln!("skipped: mounting a file system takes root, mkfs.ext4 and loop devices");
            return None;
        }
        // A signal to the process group of the test does not reach another session.
        let mut keeper = Command::new("setsid");
        let keeper = keeper.args(["sh", "-c", KEEPER, "sh"]).arg(folder.path());
        let keeper = keeper.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let volume = Self { folder, keeper };
        std::fs::write(place.join("disk"), vec![1; 16 << 20]).unwrap();
        std::fs::File::open(place.join("disk")).unwrap().sync_all().unwrap();
        Some(volume)
    }

    fn place(&self) -> PathBuf {
        self.folder.path().join("place")
    }

    fn freeze(&self) -> Frozen {
        let status = Command::new("fsfreeze").arg("--freeze").arg(self.place()).status().unwrap();
        assert!(status.success(), "fsfreeze fails");
        Frozen(self.place())
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

fn open(path: &Path, direct: bool) -> DiskSource {
    DiskSource::file(path, &DiskOptions { direct, ..DiskOptions::default() }).unwrap()
}

/// Starts `count` writes, and counts the finished ones. The loop stops when all are done.
fn write_at_once(thread: &IoThread, disk: Disk, count: u32) -> Rc<Cell<u32>> {
    let done = Rc::new(Cell::new(0));
    let (io, counter) = (Rc::clone(thread.io()), Rc::clone(&done));
    thread.io().spawn(async move {
        let mut writes = TaskSet::new(Rc::clone(&io));
        let disk = Rc::new(disk);
        for number in 0..count {
            let (disk, counter) = (Rc::clone(&disk), Rc::clone(&counter));
            let write = async move {
                let offset = u64::from(number % 4096) * 4096;
                disk.write(offset, Buffers::aligned(4096, 4096), false).await.unwrap();
                counter.set(counter.get() + 1);
            };
            writes.start(write).await;
        }
        writes.finish().await;
        io.stop();
    });
    done
}

/// Does everything that a disk can do.
async fn use_disk(disk: &Disk) {
    for round in 0..20 {
        let offset = round * 8192;
        disk.write(offset, Buffers::aligned(8192, 4096), round % 2 == 0).await.unwrap();
        disk.read(offset, Buffers::aligned(8192, 4096)).await.unwrap();
        disk.flush().await.unwrap();
        disk.write_zeroes(offset, 8192, false).await.unwrap();
        disk.discard(offset, 8192).await.unwrap();
    }
}

/// If the neighbour needed a resource of the hung disk, it would hang as well: the file system is
/// thawed only after the neighbour is done.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_hung_disk_holds_nothing_that_its_neighbour_needs() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Some(volume) = Volume::new() else { return };
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        for direct in [true, false] {
            let thread = IoThread::new(&IoThreadConfig {
                engine: engine.into(),
                ..IoThreadConfig::default()
            })
            .unwrap();
            let hung = open(&volume.place().join("disk"), direct).attach(thread.io());
            let well = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
            well.as_file().set_len(1 << 20).unwrap();
            let frozen = volume.freeze();
            let done = write_at_once(&thread, hung, 600);
            // The neighbour comes when the first disk hangs already. The kernel serialises cached
            // writes of io_uring for all files of one hash of 64, so the neighbour has direct I/O
            // there.
            let well_direct = direct || engine == EngineKind::IoUring;
            let well = open(well.path(), well_direct).attach(thread.io());
            thread.block_on(use_disk(&well)).unwrap();
            assert_eq!(done.get(), 0, "{engine}, direct I/O {direct}: nothing has hung");
            drop(frozen);
            thread.run().unwrap();
            assert_eq!(done.get(), 600);
        }
    }
}

/// Like the test above, but the two disks have different engines.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_hung_disk_holds_nothing_that_a_disk_of_another_engine_needs() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Some(volume) = Volume::new() else { return };
    let all = [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads];
    // A submit of Linux AIO waits for a file system that is frozen.
    for of_hung in [EngineKind::IoUring, EngineKind::Threads] {
        for of_well in all.into_iter().filter(|&engine| engine != of_hung) {
            let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
            for engine in all {
                thread.io().add_engine(engine.into()).unwrap();
            }
            let hung = open(&volume.place().join("disk"), true)
                .prefer_engine(of_hung, "the test asks for it");
            let hung = hung.attach(thread.io());
            let well = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
            well.as_file().set_len(1 << 20).unwrap();
            let frozen = volume.freeze();
            let done = write_at_once(&thread, hung, 600);
            let well = open(well.path(), true)
                .prefer_engine(of_well, "the test asks for it")
                .attach(thread.io());
            thread.block_on(use_disk(&well)).unwrap();
            assert_eq!(done.get(), 0, "{of_well} beside {of_hung}: nothing has hung");
            drop(frozen);
            thread.run().unwrap();
            assert_eq!(done.get(), 600);
        }
    }
}

/// Returns true if a thread of this process is in an uninterruptible wait.
fn is_stuck(thread: rustix::thread::Pid) -> bool {
    let path = format!("/proc/self/task/{}/status", thread.as_raw_pid());
    let status = std::fs::read_to_string(path).unwrap();
    status.lines().any(|line| line.starts_with("State:") && line.contains('D'))
}

/// Linux AIO waits in the submit. From then on the engine knows the disk that it waited for.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_submit_that_waited_for_a_disk_does_not_do_so_again() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Some(volume) = Volume::new() else { return };
    let config = IoThreadConfig { engine: EngineKind::Aio.into(), ..IoThreadConfig::default() };
    let thread = IoThread::new(&config).unwrap();
    let hung = open(&volume.place().join("disk"), true);
    let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let well = open(file.path(), true).attach(thread.io());
    let frozen = volume.freeze();
    let waiting = rustix::thread::gettid();
    let (stats, disk) = (Arc::clone(thread.io().stats()), volume.place().join("disk"));
    let thaws = std::thread::spawn(move || {
        while !is_stuck(waiting) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let blamed = stats.submits_to();
        // Shorter waits do not count.
        std::thread::sleep(Duration::from_millis(500));
        drop(frozen);
        assert_eq!(blamed, disk.canonicalize().ok(), "while it waits");
    });
    // Both writes are queued together. No later submit waits.
    let first = hung.attach(thread.io());
    let both = async {
        let mut one = std::pin::pin!(first.write(0, Buffers::aligned(4096, 4096), false));
        let mut other = std::pin::pin!(well.write(0, Buffers::aligned(4096, 4096), false));
        std::future::poll_fn(|cx| {
            let _ = other.as_mut().poll(cx);
            std::task::Poll::Ready(one.as_mut().poll(cx).is_ready())
        })
        .await;
        one.await.unwrap();
        other.await.unwrap();
    };
    thread.block_on(both).unwrap();
    thaws.join().unwrap();
    assert_eq!(thread.io().stats().submits_to(), None);
    assert!(first.is_known_to_block(), "the submit did not wait, or nobody noticed");
    assert!(!well.is_known_to_block(), "the neighbour was blamed");
    let frozen = volume.freeze();
    let done = write_at_once(&thread, first, 300);
    thread.block_on(use_disk(&well)).unwrap();
    assert_eq!(done.get(), 0, "nothing has hung");
    drop(frozen);
    thread.run().unwrap();
    assert_eq!(done.get(), 300);
}

/// A hundred cached reads of 1 MiB complete in their submit, or beside other programs on threads of
/// the kernel: then all that the disk may have in its engine can complete at once. A task that runs
/// in each round sees few bytes go by between two of its runs.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn cached_reads_hold_the_loop_for_few_bytes_at_a_time() {
    const READS: usize = 100;
    // Pool threads copy on their own time.
    for engine in [EngineKind::IoUring, EngineKind::Aio] {
        let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
        std::fs::write(file.path(), vec![7; 4 << 20]).unwrap();
        let config = IoThreadConfig { engine: engine.into(), ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        let io = thread.io();
        let source = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let disk = Rc::new(source.attach(io));
        let left = Rc::new(Cell::new(10 * READS));
        for read in 0..READS {
            let (disk, left, io_of_read) = (Rc::clone(&disk), Rc::clone(&left), Rc::clone(io));
            io.spawn(async move {
                while left.get() > 0 {
                    left.set(left.get().saturating_sub(1));
                    let offset = (read % 4) as u64 * (1 << 20);
                    disk.read(offset, Buffers::aligned(1 << 20, 4096)).await.unwrap();
                }
                io_of_read.stop();
            });
        }
        let most = Rc::new(Cell::new(0));
        let (seen, io_of_neighbour, rest) = (Rc::clone(&most), Rc::clone(io), Rc::clone(&left));
        io.spawn(async move {
            let mut before = 0;
            while rest.get() > 0 {
                let now = io_of_neighbour.stats().read.bytes.get();
                seen.set(seen.get().max(now - before));
                before = now;
                io_of_neighbour.wake_me();
                io_of_neighbour.suspend().await;
            }
        });
        thread.run().unwrap();
        let (most, bound) = (most.get(), (ByteLimits::DISK + ByteLimits::ROUND) as u64);
        assert!(most <= bound, "{engine}: {most} bytes between two runs of a neighbour");
    }
}
