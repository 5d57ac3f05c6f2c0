//! Additions to an eventfd that another process may have made blocking.
//!
//! A write to an eventfd with a full counter waits, unless `O_NONBLOCK` is set. That flag belongs
//! to the open file: any process that shares it can clear the flag, fill the counter and go away.
//! Then the write never returns.
//!
//! An addition by the kernel itself never waits, and leaves a full counter full. The kernel adds to
//! an eventfd when an AIO op completes. A read of nothing from an empty file is complete when
//! `io_submit` returns, so the addition takes one system call, like a write.

use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

/// `struct iocb` of linux/aio_abi.h, for little-endian machines.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: libc::c_int,
    opcode: u16,
    reqprio: i16,
    fd: libc::c_int,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: libc::c_int,
}

const _: () = assert!(size_of::<Iocb>() == 64);
#[cfg(target_endian = "big")]
compile_error!("struct iocb has key and rw_flags the other way round on big-endian machines");

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;
/// Bytes of a `struct io_event` of linux/aio_abi.h, in units of 8.
const EVENT_WORDS: usize = 4;
/// Events taken from the kernel's ring in one call.
const EVENTS: usize = 64;

/// Adds to eventfds without ever waiting. Belongs to one thread.
pub(crate) struct EventfdAdder {
    /// The `aio_context_t`, owned by this value.
    context: libc::c_ulong,
    empty: OwnedFd,
}

impl EventfdAdder {
    /// Sets up a context of one op. Fails if the system has no Linux AIO or none left. The
    /// file is one in memory, so that a sandbox may deny the thread to open files.
    pub(crate) fn new() -> Result<Self, Errno> {
        let empty = rustix::fs::memfd_create("ringhaul-empty", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: io_setup writes one context id to the address given.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, 1_usize, &raw mut context) };
        if result == 0 { Ok(Self { context, empty }) } else { Err(last_errno()) }
    }

    /// Adds one to the counter of an eventfd unless it is full. Fails, adding nothing, if `fd` is
    /// not an eventfd or the kernel has no memory for the op.
    pub(crate) fn add_one(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        match self.submit(fd) {
            Err(Errno::AGAIN) => {
                self.take_events();
                self.submit(fd)
            }
            result => result,
        }
    }

    fn submit(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        let mut iocb = Iocb {
            opcode: IOCB_CMD_PREAD,
            fd: self.empty.as_raw_fd(),
            flags: IOCB_FLAG_RESFD,
            resfd: fd.as_raw_fd(),
            ..Iocb::default()
        };
        let mut iocbs = [&raw mut iocb];
        // SAFETY: the context is live; the kernel copies the iocb, which names no memory, before
        // this returns.
        let result = unsafe {
            libc::syscall(libc::SYS_io_submit, self.context, 1_usize, iocbs.as_mut_ptr())
        };
        if result == 1 { Ok(()) } else { Err(last_errno()) }
    }

    /// Discards events to make room in the ring, which fills up about once in a hundred calls.
    #[cold]
    fn take_events(&self) {
        let mut events = [0_u64; EVENT_WORDS * EVENTS];
        let timeout: *const libc::timespec = std::ptr::null();
        // SAFETY: the context is live, and the array has room for EVENTS events. With a minimum of
        // none the kernel does not wait.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0_usize,
                EVENTS,
                events.as_mut_ptr(),
                timeout,
            )
        };
    }
}

impl Drop for EventfdAdder {
    fn drop(&mut self) {
        // SAFETY: the context is live, and is not used afterwards.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn last_errno() -> Errno {
    // A failed system call has left its errno.
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
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
    fn a_descriptor_of_another_kind_is_an_error() {
        let adder = EventfdAdder::new().unwrap();
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let error = adder.add_one(writer.as_fd()).unwrap_err();
        assert_eq!(error, Errno::INVAL);
    }
}
