//! A thread that keeps to one CPU for a while, with threads that it works with or starts then.
//!
//! On that CPU no thread preempts the running one when it wakes up. So each mostly finishes its
//! work before the next one runs; otherwise they would pass on every operation.

use std::cell::Cell;
#[cfg(feature = "rbd")]
use std::marker::PhantomData;

#[cfg(feature = "rbd")]
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
#[cfg(feature = "rbd")]
use rustix::thread::{sched_getaffinity, sched_getcpu};

use crate::policy::{self, Policy};

/// The CPUs and policy of a thread that does not keep to one CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Free {
    cpus: CpuSet,
    /// True if it has another policy for the time.
    has_policy: bool,
}

thread_local! {
    /// The saved state of this thread while it keeps to one CPU.
    static BEFORE: Cell<Option<Free>> = const { Cell::new(None) };
}

/// Keeps the thread that made it on its CPU until it is dropped.
#[cfg(feature = "rbd")]
pub(crate) struct Stay {
    here: CpuSet,
    /// Not `Send`: it acts on one thread.
    _thread: PhantomData<*const ()>,
}

#[cfg(feature = "rbd")]
impl Stay {
    /// Fails with `EBUSY` if this thread keeps to one CPU already.
    pub(crate) fn begin() -> Result<Self, Errno> {
        if BEFORE.get().is_some() {
            return Err(Errno::BUSY);
        }
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        let before = take(None, &here)?;
        BEFORE.set(Some(before));
        Ok(Self { here, _thread: PhantomData })
    }

    /// Brings another thread to this CPU. Returns its saved state; `None` if that fails.
    pub(crate) fn bring(&self, thread: Pid) -> Option<Free> {
        take(Some(thread), &self.here).ok()
    }

    /// Releases a thread that was brought here, unless its CPUs or its policy were changed since.
    /// Setting the CPUs fails if none of them is left, and the kernel has replaced them.
    pub(crate) fn let_go(&self, thread: Option<Pid>, before: &Free) {
        if sched_getaffinity(thread).is_ok_and(|now| now == self.here) {
            let _ = sched_setaffinity(thread, &before.cpus);
        }
        before.restore_policy(thread);
    }
}

#[cfg(feature = "rbd")]
fn take(thread: Option<Pid>, here: &CpuSet) -> Result<Free, Errno> {
    let cpus = sched_getaffinity(thread)?;
    sched_setaffinity(thread, here)?;
    // A thread with a policy of its own keeps it.
    let has_policy = policy::change(thread, Policy::Other, Policy::Batch);
    Ok(Free { cpus, has_policy })
}

impl Free {
    fn restore_policy(&self, thread: Option<Pid>) {
        if self.has_policy {
            policy::change(thread, Policy::Batch, Policy::Other);
        }
    }
}

#[cfg(feature = "rbd")]
impl Drop for Stay {
    fn drop(&mut self) {
        if let Some(before) = BEFORE.take() {
            self.let_go(None, &before);
        }
    }
}

/// Returns a function for a thread that this one starts, which would otherwise inherit the one CPU
/// and its policy for good.
pub(crate) fn for_new_thread() -> impl FnOnce() + Send {
    let before = BEFORE.get();
    move || {
        if let Some(before) = before {
            // As in `let_go`.
            let _ = sched_setaffinity(None, &before.cpus);
            before.restore_policy(None);
        }
    }
}
