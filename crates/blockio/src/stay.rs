//! A thread that keeps to one CPU for a while, with others that it works with, and threads that it
//! starts meanwhile.
//!
//! On that CPU none of them takes it from another when it wakes up. So each mostly does all that
//! there is to do before the next one runs, where they would otherwise pass on every operation.

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

/// How a thread runs that does not keep to one CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Free {
    cpus: CpuSet,
    /// It has another policy meanwhile.
    has_policy: bool,
}

thread_local! {
    /// How this thread runs otherwise, while it keeps to one CPU.
    static BEFORE: Cell<Option<Free>> = const { Cell::new(None) };
}

/// While this is there, the thread that made it keeps to the CPU where it was.
#[cfg(feature = "rbd")]
pub(crate) struct Stay {
    here: CpuSet,
    /// It is for one thread.
    _thread: PhantomData<*const ()>,
}

#[cfg(feature = "rbd")]
impl Stay {
    /// Fails with `EBUSY` if this thread does so already.
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

    /// Brings another thread to this CPU. Returns how it runs otherwise; `None` if it cannot be
    /// brought.
    pub(crate) fn bring(&self, thread: Pid) -> Option<Free> {
        take(Some(thread), &self.here).ok()
    }

    /// Lets a thread go that was brought here, unless somebody else has given it other CPUs, or
    /// another policy. It fails where none of its CPUs is left, and the kernel has chosen others.
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
    // One that somebody has given a policy keeps it.
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

/// To be called by a thread that this one starts: it would otherwise keep to the same CPU, and to
/// the policy there, for good.
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
