//! Calls that hang: found, interrupted, and from then on made in a way that cannot hang.
//!
//! A write to a front-end's eventfd waits for ever if the front-end makes it so, and with it all
//! queues of the IoThread. An [`EventfdAdder`] cannot be made to wait, but costs twice the system
//! time of a write. So queues write, and leave a mark while they do; a thread looks at the marks
//! ten times a second while any queue runs. The write behind a mark that stays is interrupted by a
//! signal, and that export makes no call by a write any more, whoever its front-end is: what others
//! on the IoThread lose is a fifth of a second, once.
//!
//! A VMM that embeds the device has no need of this for eventfds of its own, and starts no watch.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::{EventfdAdder, Remote};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;

use crate::thread_watch::ThreadWatch;

/// How long a call may take before it hangs; it takes a microsecond.
const INTERVAL: Duration = Duration::from_millis(100);

/// What interrupts a write. By default it does nothing, so others may send it.
const SIGNAL: libc::c_int = libc::SIGURG;

/// What an export has shown of its front-ends, for as long as it is there.
pub(crate) struct CallTrust {
    name: String,
    /// A call hung once.
    lost: AtomicBool,
}

impl CallTrust {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), lost: AtomicBool::new(false) }
    }
}

/// A thread that makes calls.
struct Mark {
    /// Odd while it writes to an eventfd.
    writes: AtomicU32,
    thread: rustix::thread::Pid,
    trust: Arc<CallTrust>,
}

struct Watch {
    marks: Vec<Weak<Mark>>,
    /// None: nobody watches.
    thread: Option<Thread>,
    /// The thread is not to end.
    running: bool,
    /// While queues run, that thread looks at these too.
    threads: ThreadWatch,
}

static WATCH: Mutex<Watch> = Mutex::new(Watch {
    marks: Vec::new(),
    thread: None,
    running: false,
    threads: ThreadWatch::new(),
});

fn watch() -> MutexGuard<'static, Watch> {
    WATCH.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static ADDER: Option<EventfdAdder> = match EventfdAdder::new() {
        Ok(adder) => Some(adder),
        Err(error) => {
            tracing::warn!("{error}; a front-end may make an IoThread wait for a full eventfd");
            None
        }
    };
}

/// Has an IoThread looked at, while queues run.
pub(crate) fn watch_thread(name: String, remote: Remote) {
    let mut watch = watch();
    if watch.running {
        watch.threads.add(name, remote);
    }
}

/// Makes what queues on this thread share, so that the thread says at its start what it lacks.
pub(crate) fn prepare_thread() {
    ADDER.with(|_| ());
}

/// Makes the calls of one queue, on the thread that it was made on.
pub(crate) struct Caller {
    mark: Arc<Mark>,
    /// Of the mark, which nobody else changes.
    writes: Cell<u32>,
}

impl Caller {
    pub(crate) fn new(trust: Arc<CallTrust>) -> Self {
        let writes = AtomicU32::new(0);
        let mark = Arc::new(Mark { writes, thread: rustix::thread::gettid(), trust });
        let mut watch = watch();
        if let Some(thread) = &watch.thread {
            thread.unpark();
            watch.marks.push(Arc::downgrade(&mark));
        }
        Self { mark, writes: Cell::new(0) }
    }

    /// Adds one to an eventfd of the front-end.
    ///
    /// A full counter means that the front-end has yet to look, and no other failure is ours to
    /// handle: the descriptor is the front-end's choice.
    #[inline]
    pub(crate) fn add_one(&self, fd: &OwnedFd) {
        if self.mark.trust.lost.load(Ordering::Relaxed) && add_without_waiting(fd) {
            return;
        }
        let writes = self.writes.get();
        self.mark.writes.store(writes.wrapping_add(1), Ordering::Relaxed);
        let result = rustix::io::write(fd, &1u64.to_ne_bytes());
        self.mark.writes.store(writes.wrapping_add(2), Ordering::Relaxed);
        self.writes.set(writes.wrapping_add(2));
        if result == Err(Errno::INTR) {
            add_without_waiting(fd);
        }
    }
}

/// False when the system has no way to do so.
#[cold]
fn add_without_waiting(fd: &OwnedFd) -> bool {
    let add = |adder: &Option<EventfdAdder>| adder.as_ref()?.add_one(fd.as_fd()).ok();
    ADDER.try_with(add).ok().flatten().is_some()
}

/// Watches the calls of this process until it is dropped.
pub(crate) struct CallWatch {
    thread: Option<JoinHandle<()>>,
}

impl CallWatch {
    /// Starts the watch; queues that start afterwards are watched. Takes over SIGURG.
    pub(crate) fn start() -> Result<Self> {
        install_handler().context("cannot take over SIGURG")?;
        // Before the thread looks.
        watch().running = true;
        let thread = std::thread::Builder::new()
            .name("ringhaul-watch".into())
            .spawn(watch_calls)
            .context("cannot start the thread that watches calls")?;
        watch().thread = Some(thread.thread().clone());
        Ok(Self { thread: Some(thread) })
    }
}

impl Drop for CallWatch {
    fn drop(&mut self) {
        let mut watch = watch();
        watch.marks.clear();
        watch.threads = ThreadWatch::new();
        watch.running = false;
        let thread = watch.thread.take();
        drop(watch);
        if let (Some(thread), Some(handle)) = (thread, self.thread.take()) {
            thread.unpark();
            let _ = handle.join();
        }
    }
}

fn watch_calls() {
    loop {
        let marks: Vec<Arc<Mark>> = {
            let mut watch = watch();
            if !watch.running {
                return;
            }
            watch.marks.retain(|mark| mark.strong_count() > 0);
            if !watch.marks.is_empty() {
                watch.threads.look(Instant::now());
            }
            watch.marks.iter().filter_map(Weak::upgrade).collect()
        };
        if marks.is_empty() {
            std::thread::park();
            continue;
        }
        let before: Vec<u32> = marks.iter().map(|m| m.writes.load(Ordering::Relaxed)).collect();
        let end = Instant::now() + INTERVAL;
        while let Some(left) = end.checked_duration_since(Instant::now())
            && watch().running
        {
            std::thread::park_timeout(left);
        }
        for (mark, before) in marks.iter().zip(before) {
            if !before.is_multiple_of(2) && mark.writes.load(Ordering::Relaxed) == before {
                cut_short(mark);
            }
        }
    }
}

/// Ends the write of a thread that has been in it for an interval. If it is only about to wait, or
/// was only kept from running, the next look interrupts it, or nothing is lost but trust.
fn cut_short(mark: &Mark) {
    if !mark.trust.lost.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            export = mark.trust.name,
            "a call did not return and was interrupted: its eventfd was made to block, or \
             this process was kept from running; calls are made without waiting from now on"
        );
    }
    let process = rustix::process::getpid().as_raw_pid();
    let thread = mark.thread.as_raw_pid();
    // SAFETY: sends a signal, for which there is a handler, to a thread of this process.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, SIGNAL) };
}

/// A signal without a handler would not interrupt anything.
fn install_handler() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: all zeroes are a valid action, without SA_RESTART; the handler does nothing.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int) = nothing;
        action.sa_sigaction = handler as usize;
        libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
