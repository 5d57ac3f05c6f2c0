//! The seam for kinds of disks in other crates, with the parts of this crate that they share.
//!
//! A kind implements [`DriverSource`] and [`Driver`], and opens its disks with
//! [`DiskSource::from_driver`](crate::DiskSource::from_driver).

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;
use std::time::Instant;

use iomem::Buffers;

pub use crate::disk::driver::{Driver, DriverSource, FilePosition, Opened, Request};
pub use crate::disk::file::source::FileSource;
pub use crate::disk::foreign::not_qcow2;
pub use crate::engine::interest::Interest;
pub use crate::engine::kernel::start_thread;
pub use crate::executor::task::Owner;
pub use crate::op::bounce::BounceShare;
use crate::thread::io::Io;
pub use crate::watchdog::rate_limit::RateLimit;
pub use crate::watchdog::stall_log::{LATE, Line, StallLog, is_late};

impl Io {
    /// The memory for data that the disk cannot take as it is. All requests of the IoThread to
    /// `disk`, the shared object of its source, have one share.
    #[must_use]
    pub fn bounce_share<T: ?Sized>(&self, disk: &Arc<T>) -> Rc<BounceShare> {
        self.bounce_budget.share(disk)
    }

    /// Returns a list of zeroes that may only be read.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn zeroes(&self, bytes: usize) -> io::Result<Buffers> {
        self.bounce_budget.zeroes(bytes, ())
    }

    /// The time at which the current round of the loop began: a reading without a system call.
    #[must_use]
    pub fn recently(&self) -> Instant {
        self.recently.get()
    }

    /// The owner to [wake](Self::wake_owner) for a future that is polled with `cx`.
    #[must_use]
    pub fn owner(&self, cx: &Context<'_>) -> Owner {
        self.running.owner(cx)
    }

    /// Wakes `owner` before the loop checks for ready tasks the next time.
    pub fn wake_owner(&self, owner: Owner) {
        self.running.wake(owner);
    }
}
