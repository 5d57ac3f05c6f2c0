//! Calls that hang: found, interrupted, and from then on made in a way that cannot hang.
//!
//! A write to an eventfd waits for ever if another process makes it block, and with it all queues
//! of the IoThread. An [`EventfdAdder`] cannot be made to wait, but costs twice the system time of
//! a write. So queues write, and leave a mark while they do; a thread looks at the marks ten times
//! a second while any queue runs. It interrupts the write behind a mark that stays with a signal,
//! and that device never makes a call by a write again, whoever drives it. Others on the IoThread
//! lose a fifth of a second, once.
//!
//! A VMM that embeds the device does not need this for its own eventfds, and starts no watch.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;

use crate::eventfd::EventfdAdder;
use crate::events::Events;

/// How long a call may take before it hangs; it takes a microsecond.
const INTERVAL: Duration = Duration::from_millis(100);

/// What interrupts a write. By default it does nothing, so others may send it.
const SIGNAL: libc::c_int = libc::SIGURG;

/// What a device has learnt about the owners of its eventfds.
pub(crate) struct CallTrust {
    events: Arc<dyn Events>,
    /// A call hung once.
    lost: AtomicBool,
}

impl CallTrust {
    pub(crate) fn new(events: Arc<dyn Events>) -> Self {
        Self { events, lost: AtomicBool::new(false) }
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
}

static WATCH: Mutex<Watch> = Mutex::new(Watch { marks: Vec::new(), thread: None, running: false });

fn watch() -> MutexGuard<'static, Watch> {
    WATCH.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static ADDER: Result<EventfdAdder, Errno> = EventfdAdder::new();
}

/// Makes what the queues of this thread share for calls that cannot wait.
///
/// # Errors
///
/// When the system has no Linux AIO, or none left. Then other users of an eventfd can make this
/// thread wait.
pub fn prepare_calls() -> io::Result<()> {
    ADDER.with(|adder| adder.as_ref().map(|_| ()).map_err(|errno| (*errno).into()))
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

    /// Adds one to an eventfd.
    ///
    /// A full counter means that the other side has yet to look, and no other failure is ours to
    /// handle: the descriptor is the other side's choice.
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
    let add = |adder: &Result<EventfdAdder, Errno>| adder.as_ref().ok()?.add_one(fd.as_fd()).ok();
    ADDER.try_with(add).ok().flatten().is_some()
}

/// Why there is no [`CallWatch`].
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The signal that interrupts calls cannot be handled.
    #[error("cannot take over SIGURG")]
    Signal(#[source] io::Error),
    /// The kernel has no thread left.
    #[error("cannot start the thread that watches calls")]
    Thread(#[source] io::Error),
}

/// Watches the calls of this process until it is dropped. There is one at a time.
pub struct CallWatch {
    thread: Option<JoinHandle<()>>,
}

impl CallWatch {
    /// Starts the watch; queues that start afterwards are watched. Takes over SIGURG. While any
    /// queue runs, the watch's thread calls `beside` ten times a second with the time, so that the
    /// process needs no second thread that looks after things.
    ///
    /// # Errors
    ///
    /// When the kernel refuses a signal handler or a thread.
    pub fn start(beside: impl FnMut(Instant) + Send + 'static) -> Result<Self, WatchError> {
        install_handler().map_err(WatchError::Signal)?;
        // Before the thread looks.
        watch().running = true;
        let thread = std::thread::Builder::new()
            .name("ringhaul-watch".into())
            .spawn(move || watch_calls(beside))
            .map_err(WatchError::Thread)?;
        watch().thread = Some(thread.thread().clone());
        Ok(Self { thread: Some(thread) })
    }
}

impl Drop for CallWatch {
    fn drop(&mut self) {
        let mut watch = watch();
        watch.marks.clear();
        watch.running = false;
        let thread = watch.thread.take();
        drop(watch);
        if let (Some(thread), Some(handle)) = (thread, self.thread.take()) {
            thread.unpark();
            let _ = handle.join();
        }
    }
}

fn watch_calls(mut beside: impl FnMut(Instant)) {
    loop {
        let marks: Vec<Arc<Mark>> = {
            let mut watch = watch();
            if !watch.running {
                return;
            }
            watch.marks.retain(|mark| mark.strong_count() > 0);
            watch.marks.iter().filter_map(Weak::upgrade).collect()
        };
        if marks.is_empty() {
            std::thread::park();
            continue;
        }
        beside(Instant::now());
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
        mark.trust.events.call_cut_short();
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
