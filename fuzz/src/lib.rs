//! Shared parts of the fuzz targets: an input as a list of numbers, an IoThread that is stepped by
//! hand, and a count of open descriptors.

use std::fs::File;
use std::time::Instant;

use blockio::{Activity, IoThread, Wait, oneshot};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;

/// Reads an input piece by piece. Zeroes follow its end, so that any input is valid.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Starts at the beginning of an input.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// True if nothing is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next bytes, fewer at the end.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.bytes(N);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    /// The next two bytes, little-endian.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// The next four bytes, little-endian.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next eight bytes, little-endian.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// The remaining bytes.
    #[must_use]
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}

/// Takes a turn that does not wait.
///
/// # Panics
///
/// When the turn fails.
pub fn turn(thread: &IoThread) -> Activity {
    thread.turn(Wait::Never).expect("the kernel waits for events")
}

/// Steps the IoThread until it has given an answer, and sleeps whenever it reports that it is idle:
/// a lost wake-up becomes a hang.
///
/// # Panics
///
/// Like [`turn`], and when waiting for the thread fails.
pub fn wait<T>(thread: &IoThread, pending: &oneshot::Receiver<T>) -> T {
    loop {
        let activity = turn(thread);
        if let Some(answer) = pending.poll() {
            return answer;
        }
        if activity == Activity::Idle {
            sleep(thread);
        }
    }
}

/// Sleeps until the IoThread's descriptor is readable or its deadline has come.
fn sleep(thread: &IoThread) {
    let left = thread.deadline().map(|at| at.saturating_duration_since(Instant::now()));
    let left = left.map(|left| Timespec::try_from(left).expect("deadlines are near"));
    match poll(&mut [PollFd::new(thread, PollFlags::IN)], left.as_ref()) {
        // The timer of libFuzzer interrupts.
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => panic!("cannot wait for an IoThread: {error}"),
    }
}

/// An anonymous file of this length.
///
/// # Panics
///
/// When the kernel refuses one.
#[must_use]
pub fn memfd(bytes: u64) -> File {
    let file = File::from(memfd_create("ringhaul-fuzz", MemfdFlags::CLOEXEC).expect("a memfd"));
    file.set_len(bytes).expect("the length of a memfd");
    file
}

/// The number of open descriptors of this process.
///
/// # Panics
///
/// Without /proc.
#[must_use]
pub fn open_descriptors() -> usize {
    // Each count includes the descriptor that reads the folder.
    std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

/// True if this process has a thread of this name, of at most 15 bytes.
///
/// # Panics
///
/// Without /proc.
#[must_use]
pub fn has_thread(name: &str) -> bool {
    let threads = std::fs::read_dir("/proc/self/task").expect("/proc is mounted");
    // A thread that has ended since the listing no longer has a name.
    let names =
        threads.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.into_iter().any(|of_thread| of_thread.trim_end() == name)
}
