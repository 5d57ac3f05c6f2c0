//! An IoThread and its end. The files of the folder have the turn of its loop, the API for tasks,
//! busy-polling and fairness.

pub(crate) mod fairness;
pub(crate) mod foreign_op;
pub(crate) mod io;
pub(crate) mod io_state;
mod poll_budget;
pub(crate) mod poll_window;
pub(crate) mod reactor;
pub(crate) mod registered;
pub(crate) mod remote;
pub(crate) mod task_set;
pub(crate) mod time_slice;
pub(crate) mod turn;

use std::future::Future;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::clock;
use crate::config::IoThreadConfig;
use crate::error::Error;
use io::Io;
use remote::Remote;
use turn::{Activity, Wait, earlier};

#[doc(hidden)]
pub use fairness::{ROUND_BYTES_UNTIL_SERVED, ROUNDS_UNTIL_SERVED};
pub use reactor::{Armed, Source, SourceId};
#[doc(hidden)]
pub use registered::RegisteredMemory;

/// A loop, owned by the thread that made it. For programs that embed it in a loop of their own, its
/// descriptor ([`AsFd`]) is readable when a turn with [`Wait::Never`] has something to do. Such a
/// program sets [`IoThreadConfig::embedded`], takes a first turn, and then waits for the
/// descriptor.
///
/// Dropping it waits for the ops in the kernel, drops the tasks, and waits for [foreign
/// ops](Io::foreign_op).
pub struct IoThread {
    io: Rc<Io>,
    descriptor: OwnedFd,
}

impl IoThread {
    /// Sets up a loop for the calling thread.
    ///
    /// # Errors
    ///
    /// If an option is out of range, the kernel does not offer the engine, or a limit on
    /// descriptors or AIO is reached.
    pub fn new(config: &IoThreadConfig) -> Result<Self, Error> {
        if config.depth == 0 || config.depth > 65_535 {
            let depth = config.depth;
            return Err(Error::Options(format!(
                "the depth of an IoThread must be 1 to 65535, not {depth}"
            )));
        }
        if config.bounce.share_bytes_min == 0 {
            return Err(Error::Options(
                "the share of a disk in bounce memory must be at least 1 byte".into(),
            ));
        }
        if !config.slice.is_zero()
            && let Err(errno) = time_slice::set(config.slice)
        {
            // A filter of system calls may refuse it. Then the loop is slower beside other
            // programs.
            tracing::warn!(
                "cannot set the time slice of an IoThread: sched_setattr: {errno}; the kernel's \
                 default applies"
            );
        }
        let (io, descriptor) = Io::new(config)?;
        io.stats()
            .thread_id
            .set(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs().into());
        Ok(Self { io: Rc::new(io), descriptor })
    }

    /// The handle for tasks and disks on this thread.
    pub fn io(&self) -> &Rc<Io> {
        &self.io
    }

    /// Returns a handle with which other threads reach this one.
    pub fn remote(&self) -> Remote {
        self.io.remote()
    }

    /// Runs until [`Io::stop`] is called.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to wait for events.
    pub fn run(&self) -> Result<(), Error> {
        while !self.io.state.stopped.get() {
            self.turn(Wait::ForEvent)?;
        }
        Ok(())
    }

    /// Runs one turn of the loop; `turn.rs` describes its phases.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to wait for events.
    pub fn turn(&self, wait: Wait) -> Result<Activity, Error> {
        self.io.turn(wait)
    }

    /// Runs the loop until `future` is done: for set-up and tests.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to wait for events.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> Result<T, Error> {
        self.io.block_on(future)
    }

    /// The time at which a turn is due even if the descriptor is not readable. Reasons are a timer,
    /// a submit to repeat, and, once a second while the kernel has ops, a check for late ops.
    pub fn deadline(&self) -> Option<Instant> {
        let (io, stalled) = (&self.io, &self.io.stalled);
        let may_be_late = io.ops.borrow().engine.in_kernel() > 0 || !stalled.is_empty();
        earlier(io.work_deadline(), may_be_late.then(|| stalled.due()))
    }

    /// Like [`deadline`](Self::deadline), but without the checks for late ops, so that they end no
    /// sleep.
    pub fn work_deadline(&self) -> Option<Instant> {
        self.io.work_deadline()
    }
}

impl AsFd for IoThread {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.io.drain();
        // Tasks hold the `Io` that holds them; taking them out ends that cycle.
        let tasks = self.io.tasks.executor.borrow_mut().clear();
        drop(tasks);
        self.io.drain_all();
        drop(self.io.tasks.mailbox.close());
        // A disk may outlive its IoThread, which can no longer submit its ops or take their
        // results.
        let ops = &mut *self.io.ops.borrow_mut();
        if ops.engine.queued() + ops.engine.in_kernel() == 0 {
            ops.slots.lanes.assert_idle();
        }
        let slots = &mut ops.slots;
        slots.lanes.close();
        slots.fail_tracked(clock::now());
    }
}

/// The delay before a wait that failed for a passing reason is repeated.
const RETRY_WAIT: Duration = Duration::from_millis(1);

impl Io {
    /// Waits until the kernel has answered every op. Posted calls stay queued: to a waiting caller,
    /// a dropped call means that this IoThread has nothing left in the kernel.
    pub(crate) fn drain(&self) {
        self.drain_until(false);
    }

    /// Like [`drain`](Self::drain), but also waits for foreign ops. Drops posted calls, which will
    /// never run: they may hold resources that such an op waits for.
    pub(crate) fn drain_all(&self) {
        self.drain_until(true);
        // No turn will call the wakers of ops that were polled outside of tasks.
        self.has_ready();
    }

    fn drain_until(&self, includes_foreign: bool) {
        loop {
            if includes_foreign {
                drop(self.tasks.mailbox.take());
            }
            self.state.harvest_is_due.set(true);
            // Submits and harvests: no turn will.
            self.submit_and_harvest();
            if self.state.has_kept_ops.get() {
                continue;
            }
            let mut ops = self.ops.borrow_mut();
            let foreign = if includes_foreign { ops.slots.foreign() } else { 0 };
            if ops.engine.queued() + ops.engine.in_kernel() + foreign == 0 {
                return;
            }
            self.tasks.mailbox.arm();
            if self.tasks.mailbox.has_results()
                || (includes_foreign && self.tasks.mailbox.has_anything())
            {
                continue;
            }
            let retry = ops.engine.retry_at();
            if let Err(error) = self.wait_in_kernel(&mut ops, retry, clock::now()) {
                if !is_transient(&error) {
                    return;
                }
                std::thread::sleep(RETRY_WAIT);
            }
        }
    }
}

/// Returns true if a failed wait may succeed when it is repeated.
fn is_transient(error: &Error) -> bool {
    let errno = error.system_error().and_then(std::io::Error::raw_os_error);
    matches!(errno, Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}
