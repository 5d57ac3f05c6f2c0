//! The time slice of a thread.

use std::mem::size_of;
use std::time::Duration;

use libc::{c_long, sched_attr};
use rustix::io::Errno;

/// Policies whose threads have time slices.
const SLICED: [i32; 2] = [libc::SCHED_OTHER, libc::SCHED_BATCH];

/// Reads the scheduling attributes of this thread.
fn attributes() -> Result<sched_attr, Errno> {
    let size = u32::try_from(size_of::<sched_attr>()).unwrap_or_else(|_| unreachable!("48 bytes"));
    // SAFETY: the type holds numbers alone, for which zeroes are valid.
    let mut attributes: sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes, during the call alone.
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
/// less time, so that its share of the CPU stays the same. Linux before 6.12 ignores the slice. A
/// thread with a real-time policy has no slices, and stays as it is.
///
/// # Errors
///
/// An error of the kernel, such as `EPERM` of a sandbox.
pub(crate) fn set(slice: Duration) -> Result<(), Errno> {
    let mut attributes = attributes()?;
    if !SLICED.iter().any(|policy| u32::try_from(*policy) == Ok(attributes.sched_policy)) {
        return Ok(());
    }
    attributes.sched_runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: the kernel reads the attributes, during the call alone.
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
            set(Duration::from_micros(700)).unwrap();
            let after = attributes().unwrap();
            // Older kernels report 0.
            assert!([0, 700_000].contains(&after.sched_runtime), "{}", after.sched_runtime);
            assert_eq!(
                (after.sched_policy, after.sched_nice, after.sched_flags),
                (before.sched_policy, before.sched_nice, before.sched_flags)
            );
        };
        std::thread::spawn(of_thread).join().unwrap();
    }
}
