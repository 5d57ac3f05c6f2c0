//! A thread that keeps to one CPU for a while, and threads that it starts meanwhile.

use std::cell::Cell;
#[cfg(feature = "rbd")]
use std::marker::PhantomData;

#[cfg(feature = "rbd")]
use rustix::io::Errno;
#[cfg(feature = "rbd")]
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
#[cfg(feature = "rbd")]
use rustix::thread::{sched_getaffinity, sched_getcpu};

thread_local! {
    /// Where this thread may be otherwise, while it keeps to one CPU.
    static BEFORE: Cell<Option<CpuSet>> = const { Cell::new(None) };
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
        let before = sched_getaffinity(None)?;
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        sched_setaffinity(None, &here)?;
        BEFORE.set(Some(before));
        Ok(Self { here, _thread: PhantomData })
    }

    /// Brings another thread to this CPU. Returns where it may be otherwise; `None` if it cannot be
    /// brought.
    pub(crate) fn bring(&self, thread: Pid) -> Option<CpuSet> {
        let before = sched_getaffinity(Some(thread)).ok()?;
        sched_setaffinity(Some(thread), &self.here).ok()?;
        Some(before)
    }

    /// Lets a thread go that was brought here, unless somebody else has given it other CPUs. It
    /// fails where none of its CPUs is left, and the kernel has chosen others.
    pub(crate) fn let_go(&self, thread: Option<Pid>, before: &CpuSet) {
        if sched_getaffinity(thread).is_ok_and(|now| now == self.here) {
            let _ = sched_setaffinity(thread, before);
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

/// To be called by a thread that this one starts: it would otherwise keep to the same CPU, for
/// good.
pub(crate) fn for_new_thread() -> impl FnOnce() + Send {
    let before = BEFORE.get();
    move || {
        if let Some(before) = before {
            // As in `let_go`.
            let _ = sched_setaffinity(None, &before);
        }
    }
}
