//! Scheduling policies and time slices of threads.

use std::mem::size_of;
use std::time::Duration;

use libc::{c_int, c_long, sched_attr};
use rustix::io::Errno;
use rustix::process::Pid;

/// A policy that leaves a thread its share of the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    /// The default policy.
    Other,
    /// A thread that wakes up does not preempt the running thread.
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

/// Returns true if a thread has this policy; `None` is this thread.
pub(crate) fn has(thread: Option<Pid>, policy: Policy) -> bool {
    // SAFETY: the call accesses no memory.
    let now = unsafe { libc::sched_getscheduler(Pid::as_raw(thread)) };
    now == policy.number()
}

/// Changes the policy of a thread; `None` is this thread. Returns false if it did not have `from`,
/// or the kernel refuses.
pub(crate) fn change(thread: Option<Pid>, from: Policy, to: Policy) -> bool {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the kernel reads the parameters, and does so during the call alone.
    let set = || unsafe {
        libc::sched_setscheduler(Pid::as_raw(thread), to.number(), &raw const parameters)
    };
    has(thread, from) && set() == 0
}

/// Reads the policy and the slice of this thread.
fn attributes() -> Result<sched_attr, Errno> {
    let size = u32::try_from(size_of::<sched_attr>()).unwrap_or_else(|_| unreachable!("48 bytes"));
    // SAFETY: the type has only integers, for which zeroes are valid.
    let mut attributes: sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes `size` bytes at most, during the call alone.
    let got = unsafe {
        libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, c_long::from(size), 0)
    };
    checked(got).map(|()| sched_attr { size, ..attributes })
}

fn checked(result: c_long) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}

/// Sets the time slice of this thread. The kernel runs a thread with a short slice earlier and for
/// less time, so that its share of the CPU stays the same. Linux before 6.12 ignores it. A thread
/// with a real-time policy has no slices, and stays as it is.
pub(crate) fn set_slice(slice: Duration) -> Result<(), Errno> {
    let mut attributes = attributes()?;
    let has_slices = [Policy::Other, Policy::Batch]
        .iter()
        .any(|policy| u32::try_from(policy.number()) == Ok(attributes.sched_policy));
    if !has_slices {
        return Ok(());
    }
    attributes.sched_runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: the kernel reads the attributes, and does so during the call alone.
    checked(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_slice_changes_nothing_else() {
        let of_thread = || {
            let before = attributes().unwrap();
            set_slice(Duration::from_micros(700)).unwrap();
            let after = attributes().unwrap();
            // Older kernels report 0.
            assert!([0, 700_000].contains(&after.sched_runtime), "{}", after.sched_runtime);
            assert_eq!(
                (after.sched_policy, after.sched_nice, after.sched_flags),
                (before.sched_policy, before.sched_nice, before.sched_flags)
            );
            // A thread keeps its slice under another policy.
            assert!(change(None, Policy::Other, Policy::Batch));
            assert_eq!(attributes().unwrap().sched_runtime, after.sched_runtime);
        };
        std::thread::spawn(of_thread).join().unwrap();
    }

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
