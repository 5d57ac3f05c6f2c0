//! The policies by which the kernel schedules threads, as far as the threads of this process choose
//! between two of them.

use libc::c_int;
use rustix::process::Pid;

/// A policy that leaves a thread its share of the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    /// The one that threads have if nobody asks for another.
    Other,
    /// A thread that wakes up takes the CPU from nobody before his time has come.
    Batch,
}

impl Policy {
    fn number(self) -> c_int {
        match self {
            Self::Other => libc::SCHED_OTHER,
            Self::Batch => libc::SCHED_BATCH,
        }
    }
}

/// Whether a thread, or this one, has this policy.
pub(crate) fn has(thread: Option<Pid>, policy: Policy) -> bool {
    // SAFETY: it is about no memory.
    let now = unsafe { libc::sched_getscheduler(Pid::as_raw(thread)) };
    now == policy.number()
}

/// Gives a thread, or this one, another policy. False: it has not had `from`, or the kernel
/// refuses.
pub(crate) fn change(thread: Option<Pid>, from: Policy, to: Policy) -> bool {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the parameters, and does so during the call alone.
    let set = || unsafe {
        libc::sched_setscheduler(Pid::as_raw(thread), to.number(), &raw const parameters)
    };
    has(thread, from) && set() == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_policy_is_changed_for_those_who_have_it() {
        let of_thread = || {
            assert!(!change(None, Policy::Batch, Policy::Other), "it has not had it");
            assert!(change(None, Policy::Other, Policy::Batch) && has(None, Policy::Batch));
            assert!(!change(None, Policy::Other, Policy::Batch), "it has it");
            let here = Some(rustix::thread::gettid());
            let other = std::thread::scope(|scope| {
                let other = scope.spawn(|| change(here, Policy::Batch, Policy::Other));
                other.join().unwrap()
            });
            assert!(other, "another thread may change it");
            assert!(change(None, Policy::Other, Policy::Other));
        };
        std::thread::spawn(of_thread).join().unwrap();
    }
}
