//! The end of an IoThread: it waits until the kernel has answered everything.

use std::time::Duration;

use crate::clock;
use crate::error::Error;
use crate::thread::io::Io;

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
