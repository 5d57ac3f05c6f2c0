//! IoThread: the owner of a loop, for one OS thread.

use std::future::Future;
use std::rc::Rc;
use std::time::Instant;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::clock;
use crate::config::IoThreadConfig;
use crate::error::Error;
use crate::thread::io::Io;
use crate::thread::remote::Remote;
use crate::thread::time_slice;
use crate::thread::turn::{Activity, Wait, earlier};

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
    #[must_use]
    pub fn io(&self) -> &Rc<Io> {
        &self.io
    }

    /// Returns a handle with which other threads reach this one.
    #[must_use]
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
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let (io, stalled) = (&self.io, &self.io.stalled);
        let may_be_late = io.ops.borrow().engine.in_kernel() > 0 || !stalled.is_empty();
        earlier(io.work_deadline(), may_be_late.then(|| stalled.due()))
    }

    /// Like [`deadline`](Self::deadline), but without the checks for late ops, so that they end no
    /// sleep.
    #[must_use]
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
        let slots = &mut self.io.ops.borrow_mut().slots;
        slots.lanes.close();
        slots.fail_tracked(clock::now());
    }
}
