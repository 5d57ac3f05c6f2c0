//! The system calls of Linux AIO.

use std::io;
use std::os::fd::AsRawFd;

use crate::engine::kernel::abi::{IOCB_CMD_FDSYNC, IoEvent, Iocb};
use crate::error::Error;

/// `aio_context_t`: the address of the mapped completion ring.
type KernelContext = libc::c_ulong;

/// A context, to which ops are submitted and in whose ring they complete.
pub(in crate::engine) struct AioContext(KernelContext);

impl AioContext {
    /// Sets up a context for `depth` ops.
    pub(in crate::engine) fn setup(depth: u32) -> Result<Self, Error> {
        let mut context: KernelContext = 0;
        // SAFETY: io_setup writes one context id to the address given.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) };
        if result == 0 {
            return Ok(Self(context));
        }
        let error = io::Error::last_os_error();
        Err(if error.raw_os_error() == Some(libc::EAGAIN) {
            Error::AioExhausted { requested: depth }
        } else {
            Error::AioUnavailable { error }
        })
    }

    /// The address of the completion ring, valid as long as the context lives.
    pub(in crate::engine) fn ring_address(&self) -> usize {
        usize::try_from(self.0).unwrap_or_else(|_| unreachable!("the kernel maps it at an address"))
    }

    /// Submits iocbs in order. Returns the number taken, or an errno if not even the first was
    /// taken.
    ///
    /// # Safety
    ///
    /// Each address must be that of a filled iocb, and the file and the memory that it names must
    /// stay until its completion. The kernel copies iocbs and iovecs before this returns.
    pub(in crate::engine) unsafe fn submit(
        &self,
        iocbs: &mut [*mut Iocb],
    ) -> Result<usize, libc::c_int> {
        // SAFETY: the context is live; the caller vouches for the rest.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.0, iocbs.len(), iocbs.as_mut_ptr()) };
        usize::try_from(result)
            .map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// Returns the events that are there now, copied out by the kernel.
    pub(in crate::engine) fn getevents<'a>(&self, events: &'a mut [IoEvent]) -> &'a [IoEvent] {
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let (count, first) = (events.len(), events.as_mut_ptr());
        // SAFETY: the context is live, the kernel writes at most `events.len()` events.
        let result = unsafe {
            libc::syscall(libc::SYS_io_getevents, self.0, 0, count, first, &raw const zero)
        };
        &events[..usize::try_from(result).unwrap_or(0)]
    }

    /// Returns true if the kernel has `IOCB_CMD_FDSYNC` (Linux 4.18). Tests it on a memory file and
    /// waits for the event, so the ring is empty again afterwards.
    pub(in crate::engine) fn probe_fdsync(&self) -> bool {
        let context = self.0;
        let Ok(file) = rustix::fs::memfd_create("fdsync-probe", rustix::fs::MemfdFlags::CLOEXEC)
        else {
            return false;
        };
        let (opcode, fd) = (IOCB_CMD_FDSYNC, file.as_raw_fd());
        let mut iocb = Iocb { opcode, fd, ..Iocb::default() };
        let mut address = &raw mut iocb;
        let mut event = IoEvent::default();
        // SAFETY: the context is live; the kernel reads one iocb, which has no data.
        if unsafe { libc::syscall(libc::SYS_io_submit, context, 1, &raw mut address) } != 1 {
            return false;
        }
        loop {
            // SAFETY: the context is live; the kernel writes at most one event.
            let events = unsafe {
                libc::syscall(libc::SYS_io_getevents, context, 1, 1, &raw mut event, 0usize)
            };
            if events == 1 {
                return event.res == 0;
            }
            // A signal may interrupt the wait, and so may work of a ring that this thread has
            // closed. The event must not stay: it would be taken for that of the first op.
            if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return false;
            }
        }
    }
}

impl Drop for AioContext {
    fn drop(&mut self) {
        // SAFETY: the context is live and is not used again. The kernel waits for ops that it still
        // has; an IoThread drains them before it drops its engine.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}
