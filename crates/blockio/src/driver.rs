//! The interface of disks of other kinds: disks that are no local file, such as the export of a
//! server, and formats and layers, which are disks over other disks.
//!
//! Such a kind is a module of another crate, like the kinds of the crate `disks`, or of this one,
//! like `disk/raw.rs`. It has
//!
//! - a function that opens it, like [`DiskSource::raw`](crate::DiskSource::raw). It may take long,
//!   since disks are opened by threads of their own. It ends with
//!   [`DiskSource::from_driver`](crate::DiskSource::from_driver);
//! - a [`DriverSource`], for all threads: the properties of the disk, its size, its state;
//! - a [`Driver`] for each IoThread: the requests.
//!
//! A layer opens the disk below first, keeps that [`DiskSource`](crate::DiskSource), and attaches
//! it with the engine that it is given. [`DriverSource::below`] names that disk, which answers for
//! the layer where the layer changes nothing: its state, the file at the bottom, the loss of data.
//!
//! Files and null disks do not come this way: [`Disk`](crate::Disk) knows them by name, and nothing
//! is virtual there. A request to a disk of another kind costs two allocations, for futures, and
//! virtual calls. A [straight](Driver::route_to_file) request goes to the file below as if it were
//! a request to the file, after one virtual call.
//!
//! Requests come checked: they lie on the disk, in whole logical blocks, and none changes a disk
//! that is read-only. Memory may have any alignment. Operations of another library or thread go
//! through [`foreign_op`](Io::foreign_op), which owns the memory until they have ended. A request
//! to a server without a foreign op holds a [`RemoteOp`], or the loop polls as if it had nothing to
//! wait for. The future of a request may be dropped at any time; an operation that it has begun
//! then ends by itself.
//!
//! Hidden items of this module are parts of this crate that the kinds of the crate `disks` share.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;
use std::time::Instant;

use iomem::Buffers;

use crate::clock::LoopClock;
use crate::disk::TransferError;
pub use crate::disk::driver::{Driver, FilePosition, Request};
#[doc(hidden)]
pub use crate::disk::qos::copy_turns::{COPY_BYTES_MAX, CopyTurns};
pub use crate::disk::source::DriverSource;
#[doc(hidden)]
pub use crate::engine::kernel::Interest;
#[doc(hidden)]
pub use crate::executor::task::Owner;
#[doc(hidden)]
pub use crate::op::bounce::BounceShare;
pub use crate::thread::foreign_op::{ForeignCompleter, ForeignOp};
use crate::thread::io::Io;
#[doc(hidden)]
pub use crate::thread::io::TaskRef;
#[doc(hidden)]
pub use crate::watchdog::{Line, RateLimit, StallLog};

/// Transfers all of `rest` from byte `offset`. `part` moves some of the first bytes, and returns
/// their number.
///
/// # Errors
///
/// The error of a part, with all bytes from that part on.
#[doc(hidden)]
pub async fn in_parts(
    mut offset: u64,
    mut rest: Buffers,
    part: impl AsyncFn(u64, &Buffers) -> io::Result<usize>,
) -> Result<(), TransferError> {
    while !rest.is_empty() {
        match part(offset, &rest).await {
            Ok(bytes) => {
                rest.advance(bytes);
                offset += bytes as u64;
            }
            Err(error) => return Err(TransferError::new(error, rest)),
        }
    }
    Ok(())
}

impl Io {
    /// The memory for data that the disk cannot take as it is. All requests of the IoThread to
    /// `disk`, the shared object of its source, have one share.
    pub fn bounce_share<T: ?Sized>(&self, disk: &Arc<T>) -> Rc<BounceShare> {
        self.shared.bounce_budget.share(disk)
    }

    /// Returns a list of zeroes that may only be read.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub fn zeroes(&self, bytes: usize) -> io::Result<Buffers> {
        self.shared.bounce_budget.zeroes(bytes, ())
    }

    /// The time at which the current round of the loop began: a reading without a system call.
    pub fn recently(&self) -> Instant {
        self.state.clock.recently()
    }

    /// The clock of this loop, for sources that read it often.
    pub fn clock(&self) -> Rc<LoopClock> {
        Rc::clone(&self.state.clock)
    }

    /// The owner to [wake](Self::wake_owner) for a future that is polled with `cx`.
    pub fn owner(&self, cx: &Context<'_>) -> Owner {
        self.tasks.running.owner(cx)
    }

    /// Wakes `owner` before the loop checks for ready tasks the next time.
    pub fn wake_owner(&self, owner: Owner) {
        self.tasks.running.wake(owner);
    }

    /// Begins an operation of a server that no foreign op stands for. The loop decides by such
    /// operations whether to busy-poll: an answer may come at any time, and a server on this
    /// machine may need the CPU.
    #[must_use]
    pub fn begin_remote_op(self: &Rc<Self>) -> RemoteOp {
        self.poll_window.begin_remote_op();
        RemoteOp { io: Rc::clone(self) }
    }
}

/// An operation of a server, which ends when this is dropped.
pub struct RemoteOp {
    io: Rc<Io>,
}

impl Drop for RemoteOp {
    fn drop(&mut self) {
        self.io.poll_window.end_remote_op(self.io.recently());
    }
}

#[cfg(test)]
mod tests {
    use crate::thread::poll_window::Awaited;
    use crate::{IoThread, IoThreadConfig};

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_loop_with_a_remote_op_awaits_an_op() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let io = thread.io();
        assert_eq!(io.awaited(), Awaited::Source);
        let op = io.begin_remote_op();
        assert_eq!((io.awaited(), io.poll_window.remote_ops()), (Awaited::Op, 1));
        drop(op);
        assert_eq!((io.awaited(), io.poll_window.remote_ops()), (Awaited::Source, 0));
    }
}
