//! Detects calls that hang, interrupts them, and makes later calls in a way that cannot hang.
//!
//! A write to an eventfd waits for ever if another process makes it block, and all queues of the
//! IoThread wait with it. An [`EventfdAdder`] cannot be made to wait, but costs twice the system
//! time of a write. So queues write, and set a mark while they do.
//!
//! A thread checks the marks ten times a second while any queue runs and any IoThread works. A mark
//! that stays set means a hung write, which the thread interrupts with a signal. The device of that
//! queue never calls by a write again, not even for another driver. All queues of the IoThread lose
//! a fifth of a second, once.
//!
//! A VMM that embeds the device does not need this for its own eventfds, and starts no watch.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use blockio::executor::{Lock, start_thread};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;

use crate::events::Events;
use crate::queue::eventfd::EventfdAdder;

/// A call that takes this long hangs; a usual call takes a microsecond.
const INTERVAL: Duration = Duration::from_millis(100);

/// The signal that interrupts a write. Its default action is to ignore it, so other processes may
/// send it.
const SIGNAL: libc::c_int = libc::SIGURG;

/// The trust of a device in the owners of its eventfds.
pub(crate) struct CallTrust {
    events: Arc<dyn Events>,
    /// True once a call hung.
    has_hung: AtomicBool,
}

impl CallTrust {
    pub(crate) fn new(events: Arc<dyn Events>) -> Self {
        Self { events, has_hung: AtomicBool::new(false) }
    }
}

/// The mark of a thread that makes calls.
struct Mark {
    /// Odd while the thread writes to an eventfd.
    writes: AtomicU32,
    thread: rustix::thread::Pid,
    trust: Arc<CallTrust>,
}

struct Registry {
    marks: Vec<Weak<Mark>>,
    /// `None` if no watch runs.
    thread: Option<Thread>,
    /// False if the thread is to end.
    running: bool,
}

static REGISTRY: Lock<Registry> =
    Lock::new(Registry { marks: Vec::new(), thread: None, running: false });

thread_local! {
    static ADDER: Result<EventfdAdder, Errno> = EventfdAdder::new();
}

/// Prepares this thread for calls that cannot wait. All its queues share the preparation.
///
/// # Errors
///
/// When the system has no Linux AIO, or none left. Then other processes that have an eventfd can
/// make this thread wait.
pub fn prepare_calls() -> io::Result<()> {
    ADDER.with(|adder| adder.as_ref().map(|_| ()).map_err(|errno| (*errno).into()))
}

/// The eventfds of a queue, and the means to write to them.
pub(crate) struct Eventfds {
    /// For the reactor, which takes it.
    pub(crate) kick: Cell<Option<OwnedFd>>,
    pub(crate) call: RefCell<Option<OwnedFd>>,
    pub(crate) err: RefCell<Option<OwnedFd>>,
    pub(crate) caller: Caller,
}

/// Makes the calls of one queue, on the thread that created it.
pub(crate) struct Caller {
    mark: Arc<Mark>,
    /// A copy of the mark's counter, which only this thread changes.
    writes: Cell<u32>,
}

impl Caller {
    pub(crate) fn new(trust: Arc<CallTrust>) -> Self {
        let writes = AtomicU32::new(0);
        let mark = Arc::new(Mark { writes, thread: rustix::thread::gettid(), trust });
        let mut registry = REGISTRY.lock();
        if let Some(thread) = &registry.thread {
            thread.unpark();
            registry.marks.push(Arc::downgrade(&mark));
        }
        Self { mark, writes: Cell::new(0) }
    }

    /// Adds one to an eventfd.
    ///
    /// A full counter means that its reader has yet to check. All other failures are ignored as
    /// well: the reader's side chose the descriptor.
    #[inline]
    pub(crate) fn add_one(&self, fd: &OwnedFd) {
        if self.mark.trust.has_hung.load(Ordering::Relaxed) && add_without_waiting(fd) {
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

/// Returns false if the system does not support it.
#[cold]
fn add_without_waiting(fd: &OwnedFd) -> bool {
    let add = |adder: &Result<EventfdAdder, Errno>| adder.as_ref().ok()?.add_one(fd.as_fd()).ok();
    ADDER.try_with(add).ok().flatten().is_some()
}

/// The reasons why a [`CallWatch`] does not start.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The signal that interrupts calls cannot be handled.
    #[error("cannot take over SIGURG")]
    Signal(#[source] io::Error),
    /// The kernel has no thread left.
    #[error("cannot start the thread that watches calls")]
    Thread(#[source] io::Error),
}

/// Watches the calls of this process until it is dropped. A process has at most one.
pub struct CallWatch {
    thread: Option<JoinHandle<()>>,
}

impl CallWatch {
    /// Starts the watch; queues that start afterwards are watched. Takes over SIGURG. While any
    /// queue runs, the watch's thread calls `periodic` ten times a second with the time, so that
    /// the process needs no second thread for periodic checks. If that returns true, the thread
    /// rests until it is unparked: that must happen before an IoThread makes a call.
    ///
    /// # Errors
    ///
    /// When the kernel refuses a signal handler or a thread.
    pub fn start(
        periodic: impl FnMut(Instant) -> bool + Send + 'static,
    ) -> Result<Self, WatchError> {
        install_handler().map_err(WatchError::Signal)?;
        // Set before the thread checks it.
        REGISTRY.lock().running = true;
        let thread = start_thread("ringhaul-watch", move || watch_calls(periodic))
            .map_err(WatchError::Thread)?;
        REGISTRY.lock().thread = Some(thread.thread().clone());
        Ok(Self { thread: Some(thread) })
    }
}

impl Drop for CallWatch {
    fn drop(&mut self) {
        let mut registry = REGISTRY.lock();
        registry.marks.clear();
        registry.running = false;
        let thread = registry.thread.take();
        drop(registry);
        if let (Some(thread), Some(handle)) = (thread, self.thread.take()) {
            thread.unpark();
            let _ = handle.join();
        }
    }
}

fn watch_calls(mut periodic: impl FnMut(Instant) -> bool) {
    loop {
        let marks: Vec<Arc<Mark>> = {
            let mut registry = REGISTRY.lock();
            if !registry.running {
                return;
            }
            registry.marks.retain(|mark| mark.strong_count() > 0);
            registry.marks.iter().filter_map(Weak::upgrade).collect()
        };
        if marks.is_empty() || periodic(Instant::now()) {
            drop(marks);
            std::thread::park();
            continue;
        }
        let before: Vec<u32> = marks.iter().map(|m| m.writes.load(Ordering::Relaxed)).collect();
        let end = Instant::now() + INTERVAL;
        while let Some(left) = end.checked_duration_since(Instant::now())
            && REGISTRY.lock().running
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

/// Interrupts a write that has taken a whole interval. If the signal comes just before the write
/// blocks, the next check interrupts it. If the thread was only preempted, nothing is lost but
/// trust.
fn cut_short(mark: &Mark) {
    if !mark.trust.has_hung.swap(true, Ordering::Relaxed) {
        mark.trust.events.call_cut_short();
    }
    let process = rustix::process::getpid().as_raw_pid();
    let thread = mark.thread.as_raw_pid();
    // SAFETY: sends a signal, for which there is a handler, to a thread of this process.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, SIGNAL) };
}

/// Installs a handler that does nothing: a signal without a handler would not interrupt the write.
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
