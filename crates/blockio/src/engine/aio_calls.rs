//! The system calls of Linux AIO, and what they take and give.

use std::io;
use std::os::fd::AsRawFd;

#[cfg(feature = "sim")]
use super::sim;
use crate::error::Error;
use crate::op::{OpKind, OpView};

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct IoEvent {
    pub(super) data: u64,
    pub(super) obj: u64,
    pub(super) res: i64,
    pub(super) res2: i64,
}

/// `struct iocb` of linux/aio_abi.h, for little-endian machines.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Iocb {
    pub(super) data: u64,
    pub(super) key: u32,
    pub(super) rw_flags: libc::c_int,
    pub(super) opcode: u16,
    pub(super) reqprio: i16,
    pub(super) fd: libc::c_int,
    pub(super) buf: u64,
    pub(super) nbytes: u64,
    pub(super) offset: i64,
    pub(super) reserved: u64,
    pub(super) flags: u32,
    pub(super) resfd: libc::c_int,
}

const _: () = assert!(size_of::<Iocb>() == 64);
#[cfg(target_endian = "big")]
compile_error!("struct iocb has key and rw_flags the other way round on big-endian machines");

pub(super) const IOCB_CMD_PREAD: u16 = 0;
pub(super) const IOCB_CMD_PWRITE: u16 = 1;
pub(super) const IOCB_CMD_FDSYNC: u16 = 3;
pub(super) const IOCB_CMD_PREADV: u16 = 7;
pub(super) const IOCB_CMD_PWRITEV: u16 = 8;
pub(super) const IOCB_FLAG_RESFD: u32 = 1;

/// `aio_context_t`: the address of the mapped completion ring.
type KernelContext = libc::c_ulong;

/// A context: what ops are submitted to and whose ring they complete in.
pub(super) enum AioContext {
    Kernel(KernelContext),
    /// The kernel is simulated on this thread.
    #[cfg(feature = "sim")]
    Simulated(sim::SimContext),
}

impl AioContext {
    /// Sets up a context for `depth` ops.
    pub(super) fn setup(depth: u32) -> Result<Self, Error> {
        #[cfg(feature = "sim")]
        if let Some(context) = sim::SimContext::new(depth) {
            return Ok(Self::Simulated(context));
        }
        Self::setup_in_kernel(depth)
    }

    /// As [`setup`](Self::setup), for what has nothing to do with disks: never simulated.
    pub(super) fn setup_in_kernel(depth: u32) -> Result<Self, Error> {
        let mut context: KernelContext = 0;
        // SAFETY: io_setup writes one context id to the address given.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, depth, &raw mut context) };
        if result == 0 {
            return Ok(Self::Kernel(context));
        }
        let error = io::Error::last_os_error();
        Err(if error.raw_os_error() == Some(libc::EAGAIN) {
            Error::AioExhausted { requested: depth }
        } else {
            Error::AioUnavailable { error }
        })
    }

    /// Where the completion ring is, for as long as the context lives.
    pub(super) fn ring_address(&self) -> usize {
        match self {
            Self::Kernel(context) => usize::try_from(*context).unwrap_or(0),
            #[cfg(feature = "sim")]
            Self::Simulated(context) => context.ring_address(),
        }
    }

    /// Submits iocbs in order. Returns how many were taken, or an errno when not even the first
    /// was.
    ///
    /// # Safety
    ///
    /// Each address must be that of a filled iocb, and the file and the memory that it names must
    /// stay until its completion. The kernel copies iocbs and iovecs before this returns.
    pub(super) unsafe fn submit(&self, iocbs: &mut [*mut Iocb]) -> Result<usize, libc::c_int> {
        match self {
            Self::Kernel(context) => {
                // SAFETY: the context is live; for the rest the caller vouches.
                let result = unsafe {
                    libc::syscall(libc::SYS_io_submit, *context, iocbs.len(), iocbs.as_mut_ptr())
                };
                usize::try_from(result)
                    .map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
            }
            #[cfg(feature = "sim")]
            // SAFETY: the caller vouches for the same.
            Self::Simulated(context) => unsafe { context.submit(iocbs) },
        }
    }

    /// Events that are there now, copied out by the kernel.
    pub(super) fn getevents<'a>(&self, events: &'a mut [IoEvent]) -> &'a [IoEvent] {
        match self {
            Self::Kernel(context) => {
                let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                // SAFETY: the context is live, the kernel writes at most `events.len()` events.
                let result = unsafe {
                    libc::syscall(
                        libc::SYS_io_getevents,
                        *context,
                        0,
                        events.len(),
                        events.as_mut_ptr(),
                        &raw const zero,
                    )
                };
                &events[..usize::try_from(result).unwrap_or(0)]
            }
            #[cfg(feature = "sim")]
            Self::Simulated(context) => context.getevents(events),
        }
    }

    /// Whether the kernel has `IOCB_CMD_FDSYNC` (Linux 4.18), found out by one on a memory file.
    /// Its event is waited for, so the ring is empty again afterwards.
    pub(super) fn probe_fdsync(&self) -> bool {
        let context = match self {
            Self::Kernel(context) => *context,
            #[cfg(feature = "sim")]
            Self::Simulated(context) => return context.has_fdsync(),
        };
        let Ok(file) = rustix::fs::memfd_create("fdsync-probe", rustix::fs::MemfdFlags::CLOEXEC)
        else {
            return false;
        };
        let view = OpView {
            registered: -1,
            kind: OpKind::Flush,
            fd: file.as_raw_fd(),
            offset: 0,
            iovecs: std::ptr::null(),
            iovecs_len: 0,
        };
        let mut iocb = Iocb { flags: 0, ..iocb(0, &view, 0) };
        let mut address = &raw mut iocb;
        let mut event = IoEvent::default();
        // SAFETY: the context is live; the kernel reads one iocb, which has no data, and writes at
        // most one event. io_getevents waits for it, so nothing is left in the kernel.
        unsafe {
            libc::syscall(libc::SYS_io_submit, context, 1, &raw mut address) == 1
                && libc::syscall(libc::SYS_io_getevents, context, 1, 1, &raw mut event, 0usize) == 1
                && event.res == 0
        }
    }
}

impl Drop for AioContext {
    fn drop(&mut self) {
        match self {
            // SAFETY: the context is live and is not used again. The kernel waits for ops that it
            // still has; an IoThread drains them before it drops its engine.
            Self::Kernel(context) => unsafe {
                libc::syscall(libc::SYS_io_destroy, *context);
            },
            #[cfg(feature = "sim")]
            Self::Simulated(_) => {}
        }
    }
}

/// The iocb for the op in `slot`, whose completion writes the eventfd `wake`.
pub(super) fn iocb(slot: u32, view: &OpView, wake: libc::c_int) -> Iocb {
    let single = view.iovecs_len == 1;
    let (opcode, rw_flags) = match view.kind {
        OpKind::Read if single => (IOCB_CMD_PREAD, 0),
        OpKind::Read => (IOCB_CMD_PREADV, 0),
        OpKind::Write { fua } => (
            if single { IOCB_CMD_PWRITE } else { IOCB_CMD_PWRITEV },
            if fua { libc::RWF_DSYNC } else { 0 },
        ),
        _ => (IOCB_CMD_FDSYNC, 0),
    };
    let (buf, nbytes, offset) = if opcode == IOCB_CMD_FDSYNC {
        (0, 0, 0)
    } else if single {
        // SAFETY: a list of one iovec has a first.
        let range = unsafe { *view.iovecs };
        (range.iov_base as u64, range.iov_len as u64, view.offset)
    } else {
        (view.iovecs as u64, view.iovecs_len as u64, view.offset)
    };
    Iocb {
        data: u64::from(slot),
        key: 0,
        rw_flags,
        opcode,
        reqprio: 0,
        fd: view.fd,
        buf,
        nbytes,
        offset: i64::try_from(offset).unwrap_or(i64::MAX),
        reserved: 0,
        flags: IOCB_FLAG_RESFD,
        resfd: wake,
    }
}
