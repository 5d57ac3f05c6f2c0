//! Properties that only the real kernel shows: the objects that it still holds, and the calls that
//! it got.

use std::future::poll_fn;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tempfile::NamedTempFile;

use crate::config::{EngineKind, IoThreadConfig};
use crate::disk::{DiskOptions, DiskSource};
use crate::op::OpKind;
use crate::thread::IoThread;
use crate::thread::reactor::{Armed, Source};
use crate::thread::turn::{Activity, Wait};
use iomem::Buffers;

const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads];

fn thread(engine: EngineKind) -> IoThread {
    IoThread::new(&IoThreadConfig { engine: engine.into(), depth: 64, ..IoThreadConfig::default() })
        .unwrap()
}

fn temp_file(bytes: u64) -> NamedTempFile {
    let file = NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

fn open(path: &Path) -> DiskSource {
    DiskSource::file(path, &DiskOptions { direct: true, ..DiskOptions::default() }).unwrap()
}

fn filled(bytes: usize, byte: u8) -> Buffers {
    let buffers = Buffers::aligned(bytes, 4096);
    buffers.copy_from(0, &vec![byte; bytes]);
    buffers
}

fn turn_until_idle(thread: &IoThread) {
    while thread.turn(Wait::Never).unwrap() == Activity::Ready {}
}

/// Otherwise it would go on with the old pages when other memory is mapped at their address.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_kernel_forgets_memory_whose_registration_is_dropped() {
    let thread = thread(EngineKind::IoUring);
    let memory = filled(8192, 0);
    let start = format!("0x{:x}/", memory.iovecs()[0].iov_base.addr());
    let is_known = || {
        let path = format!("/proc/self/fdinfo/{}", thread.as_fd().as_raw_fd());
        std::fs::read_to_string(path).unwrap().contains(&start)
    };
    assert!(!is_known());
    let registered = thread.io().register_memory(memory).unwrap();
    assert!(is_known());
    drop(registered);
    assert!(!is_known());
}

/// The kernel refuses durable writes to this file, and takes other writes.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_pool_makes_writes_durable_that_have_to_be() {
    let thread = thread(EngineKind::Threads);
    let path = "/proc/thread-self/oom_score_adj";
    let present = std::fs::read(path).unwrap();
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let file = Arc::new(rustix::fd::OwnedFd::from(file).into());
    let file = thread.io().attach_file(&file, EngineKind::Threads);
    for (fua, expected) in [(false, None), (true, Some(libc::EOPNOTSUPP))] {
        let data = Buffers::from_vec(present.clone());
        let op = thread.io().op(OpKind::Write { fua }, &file, 0, data);
        let result = thread.block_on(op).unwrap().result;
        assert_eq!(result.err().and_then(|error| error.raw_os_error()), expected, "{fua}");
    }
}

/// A source that never has work.
struct Silent;

impl Source for Silent {
    fn notify(&self) {}
    fn arm(&self, _: Instant) -> Armed {
        Armed::Yes
    }
    fn disarm(&self) {}
    fn has_work(&self) -> bool {
        false
    }
}

/// A call from another thread is the last thing in a turn. Even then the kernel must get the new
/// watch, because a program with its own loop waits for the descriptor next.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_kernel_has_each_watch_at_the_end_of_a_turn() {
    for engine in ENGINES {
        let thread = thread(engine);
        turn_until_idle(&thread);
        let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let watched = kick.try_clone().unwrap();
        assert!(thread.remote().post(|io| {
            io.add_source(Rc::new(Silent), Some(watched)).unwrap();
        }));
        turn_until_idle(&thread);
        rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
        let long = Timespec { tv_sec: 30, tv_nsec: 0 };
        let seen = poll(&mut [PollFd::new(&thread, PollFlags::IN)], Some(&long)).unwrap();
        assert_eq!(seen, 1, "{engine}: the kernel does not know of the eventfd");
    }
}

/// Counts the lines of `section` in the kernel's description of the ring.
fn ring_has(thread: &IoThread, section: &str) -> Option<usize> {
    use rustix::fd::AsFd;
    let path = format!("/proc/self/fdinfo/{}", thread.as_fd().as_raw_fd());
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().skip_while(|line| !line.starts_with(section));
    lines.next()?;
    Some(lines.take_while(|line| line.starts_with(' ')).count())
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_ring_has_no_polls_of_eventfds_that_were_removed() {
    let thread = thread(EngineKind::IoUring);
    turn_until_idle(&thread);
    let Some(before) = ring_has(&thread, "PollList:") else {
        eprintln!("skipped: this kernel does not list the polls of a ring");
        return;
    };
    let add = || {
        let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        thread.io().add_source(Rc::new(Silent), Some(kick)).unwrap()
    };
    let kept = add();
    turn_until_idle(&thread);
    assert_eq!(ring_has(&thread, "PollList:"), Some(before + 1), "polls are not listed");
    for _ in 0..100 {
        let id = add();
        turn_until_idle(&thread);
        thread.io().remove_source(id);
        turn_until_idle(&thread);
    }
    assert_eq!(ring_has(&thread, "PollList:"), Some(before + 1));
    thread.io().remove_source(kept);
    turn_until_idle(&thread);
    assert_eq!(ring_has(&thread, "PollList:"), Some(before));
}

/// Opens a file that was in use a moment ago: the kernel closes files of rings a little later, and
/// a process that another test starts has them open until its program runs.
fn open_at_last(engine: EngineKind, path: &Path) -> DiskSource {
    let options = DiskOptions { direct: true, ..DiskOptions::default() };
    let start = Instant::now();
    loop {
        match DiskSource::file(path, &options) {
            Ok(source) => return source,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "{engine}: {error}"),
        }
        std::thread::yield_now();
    }
}

/// Otherwise the file stays locked, open, and, if it is a device, claimed.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_file_is_let_go_with_its_disk_while_the_thread_continues() {
    for engine in ENGINES {
        let thread = thread(engine);
        let file = temp_file(1 << 20);
        for _ in 0..3 {
            let source = open_at_last(engine, file.path());
            let disk = source.attach(thread.io());
            thread.block_on(disk.write(0, filled(4096, 1), false)).unwrap().unwrap();
            drop((disk, source));
            turn_until_idle(&thread);
        }
    }
}

/// Polls `future` once. Returns true if it is done.
async fn poll_once(future: &mut std::pin::Pin<&mut impl Future>) -> bool {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await
}

/// The progress of an op when its future is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    Queued,
    InKernel,
    Done,
}

/// Nothing is left of abandoned requests, and later requests are served.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn futures_are_dropped_in_the_middle_and_the_thread_continues() {
    for engine in ENGINES {
        let file = temp_file(1 << 20);
        let source = open(file.path());
        for moment in [Moment::Done, Moment::Queued, Moment::InKernel] {
            let thread = thread(engine);
            let disk = source.attach(thread.io());
            let io = Rc::clone(thread.io());
            thread.io().spawn(async move {
                for round in 1..=50u8 {
                    let ops = || io.stats().write.ops.get() + io.stats().read.ops.get();
                    let before = ops();
                    // A future of a turn is submitted at the end of the round, so its first poll
                    // never finds it done.
                    let mut write = pin!(disk.write(0, filled(65_536, round), false));
                    assert!(!poll_once(&mut write).await);
                    let mut read = pin!(disk.read(0, Buffers::aligned(4096, 4096)));
                    if moment != Moment::Queued {
                        assert!(!poll_once(&mut read).await);
                        io.wake_me();
                        io.suspend().await;
                    }
                    while moment == Moment::Done && ops() < before + 2 {
                        io.suspend().await;
                    }
                }
                io.stop();
            });
            thread.run().unwrap();
            // Abandoned ops are still to end.
            let io = thread.io();
            let disk = source.attach(io);
            thread.block_on(disk.flush()).unwrap().unwrap();
            while io.ops() > 0 && moment != Moment::Done {
                thread.block_on(disk.flush()).unwrap().unwrap();
            }
            assert_eq!(io.ops(), 0, "{engine}, {moment:?}: slots are left over");
            thread.block_on(disk.write(0, filled(8192, 99), true)).unwrap().unwrap();
            let left = std::fs::read(file.path()).unwrap();
            let other = left[..8192].iter().position(|byte| *byte != 99);
            assert_eq!(other.map(|at| (at, left[at])), None, "{engine}, {moment:?}");
        }
    }
}

/// A loop device that disappears when its last user closes it, even after a panic.
struct Loop {
    _open: OwnedFd,
    path: PathBuf,
}

impl Loop {
    /// Returns `None` if the machine gives none.
    fn over(file: &Path) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can make loop devices");
            return None;
        }
        let run = |arguments: &[&str]| {
            let output = Command::new("losetup").args(arguments).output().ok()?;
            output.status.success().then(|| String::from_utf8(output.stdout).ok()).flatten()
        };
        let path = run(&["--find", "--show", file.to_str()?]);
        let Some(path) = path.map(|path| path.trim().to_owned()) else {
            eprintln!("skipped: no loop device is available");
            return None;
        };
        let open = std::fs::File::open(&path).unwrap();
        // The device is in use, so this takes effect at its last close.
        run(&["--detach", &path]).unwrap();
        Some(Self { _open: open.into(), path: path.into() })
    }
}

/// The kernel zeroes a device that discards nothing, too. A call for discards would not do: it is
/// refused, which leaves writing zeroes to us, or it keeps the data.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_block_device_without_discards_is_zeroed_by_the_kernel() {
    for engine in ENGINES {
        let file = temp_file(4 << 20);
        let Some(device) = Loop::over(file.path()) else { return };
        let name = device.path.file_name().unwrap().to_str().unwrap().to_owned();
        let limit = format!("/sys/block/{name}/queue/discard_max_bytes");
        if std::fs::write(&limit, "0").is_err() {
            eprintln!("skipped: the limit on discards cannot be set");
            return;
        }
        let thread = thread(engine);
        let source = open(&device.path);
        let disk = source.attach(thread.io());
        thread.block_on(disk.write(0, filled(1 << 20, 0x5a), true)).unwrap().unwrap();
        let before = thread.io().stats().write.ops.get();
        thread.block_on(disk.write_zeroes(4096, 65_536, false)).unwrap().unwrap();
        let target = Buffers::aligned(1 << 20, 4096);
        let view = target.duplicate();
        thread.block_on(disk.read(0, target)).unwrap().unwrap();
        let mut expected = vec![0x5a; 1 << 20];
        expected[4096..][..65_536].fill(0);
        assert!(view.to_vec() == expected, "{engine}: other bytes are zero");
        let written = thread.io().stats().write.ops.get() - before;
        assert_eq!(written, 0, "{engine}: the kernel was not asked for zeroes");
    }
}
