//! Adding to an eventfd that somebody else may have made block.
//!
//! A write to an eventfd whose counter is full waits, unless `O_NONBLOCK` is set. That flag belongs
//! to whoever holds the same open file, who can take it back at any time, fill the counter and go
//! away: then the write never returns. What the kernel adds to an eventfd by itself never waits,
//! and leaves a full counter full. It does so when an AIO op completes, and a read of nothing from
//! /dev/null is complete when `io_submit` returns: one system call, as the write would be.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::aio_calls::{AioContext, IOCB_CMD_PREAD, IOCB_FLAG_RESFD, Iocb};
use super::aio_ring::AioRing;
use crate::error::Error;

/// Adds to eventfds without ever waiting. Belongs to one thread.
pub struct EventfdAdder {
    context: AioContext,
    ring: RefCell<AioRing>,
    null: File,
}

impl EventfdAdder {
    /// Sets up a context of one op.
    ///
    /// # Errors
    ///
    /// When the system has no Linux AIO, or none left, or no /dev/null.
    pub fn new() -> Result<Self, Error> {
        let null = File::open("/dev/null").map_err(|error| Error::AioUnavailable { error })?;
        let context = AioContext::setup_in_kernel(1)?;
        // SAFETY: the context was just made, and goes with the ring.
        let Ok(ring) = (unsafe { AioRing::new(context.ring_address()) }) else {
            let error = io::Error::other("its completion ring is not laid out as known");
            return Err(Error::AioUnavailable { error });
        };
        Ok(Self { context, ring: RefCell::new(ring), null })
    }

    /// Adds one to the counter of an eventfd, if it is not full.
    ///
    /// # Errors
    ///
    /// When `fd` is no eventfd, or the kernel has no memory for the op. Nothing was added then.
    pub fn add_one(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let mut iocb = Iocb {
            opcode: IOCB_CMD_PREAD,
            fd: self.null.as_raw_fd(),
            flags: IOCB_FLAG_RESFD,
            resfd: fd.as_raw_fd(),
            ..Iocb::default()
        };
        // SAFETY: the iocb is filled, and names no memory.
        let result = unsafe { self.context.submit(&mut [&raw mut iocb]) };
        let result = result.map(|_| ()).map_err(io::Error::from_raw_os_error);
        // Makes room for the next event. A ring that is not read is full one day, which is then
        // the error.
        let _ = self.ring.borrow_mut().consume(|_| ());
        result
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{read, write};

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn it_adds_as_often_as_it_is_asked() {
        let adder = EventfdAdder::new().unwrap();
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        for _ in 0..10_000 {
            adder.add_one(fd.as_fd()).unwrap();
        }
        let mut count = [0; 8];
        read(&fd, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 10_000);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_full_counter_that_blocks_is_not_waited_for() {
        let adder = EventfdAdder::new().unwrap();
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..100 {
            adder.add_one(fd.as_fd()).unwrap();
        }
        let mut count = [0; 8];
        read(&fd, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), u64::MAX);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn what_is_no_eventfd_is_an_error() {
        let adder = EventfdAdder::new().unwrap();
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let error = adder.add_one(writer.as_fd()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }
}
