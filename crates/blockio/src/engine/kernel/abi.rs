//! Structures and constants of system calls: the set-up of an io_uring ring, the flags with which
//! the kernel is entered, and the control blocks of Linux AIO.

use std::os::fd::BorrowedFd;

/// Flags of `io_uring_enter` (linux/io_uring.h).
pub(super) const ENTER_GETEVENTS: u32 = 1 << 0;
pub(super) const ENTER_SQ_WAKEUP: u32 = 1 << 1;
pub(super) const ENTER_SQ_WAIT: u32 = 1 << 2;

/// The most files that can be registered. Further files work unregistered.
pub(in crate::engine) const FILES_MAX: u32 = 256;
/// The most pieces of memory that can be registered. Further memory works unregistered.
pub(in crate::engine) const BUFFERS_MAX: u32 = 2048;

/// The most submission entries. More ops than this at once take more than one system call.
pub(super) const ENTRIES_MAX: u32 = 256;
/// Enough entries for watches while the kernel takes none for a moment.
pub(super) const ENTRIES_MIN: u32 = 64;

/// The set-up of a ring.
pub(in crate::engine) struct Setup<'a> {
    pub(in crate::engine) depth: u32,
    /// A kernel thread takes submissions in, so that a submit needs no system call.
    pub(in crate::engine) sqpoll: bool,
    /// A program may wait for the ring's descriptor.
    pub(in crate::engine) embedded: bool,
    /// The descriptor of the main ring, if this ring polls for completions. The kernel polls only
    /// when entered, or all the time in the submission thread of the main ring.
    pub(in crate::engine) polled_beside: Option<BorrowedFd<'a>>,
}

/// The event that an `io_uring_enter` waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitFor {
    Nothing,
    /// A completion, or the end of the timeout.
    Completion,
    /// A free submission entry. Without a submission thread the call itself frees it.
    Room,
}

/// The flags of an `io_uring_enter`; `None` if no call is needed. `asleep`: true if the submission
/// thread sleeps, `None` without one.
pub(super) fn enter_flags(asleep: Option<bool>, waits: WaitFor) -> Option<u32> {
    let flags = match (asleep, waits) {
        (None, _) | (Some(false), WaitFor::Completion) => 0,
        (Some(false), WaitFor::Nothing) => return None,
        (Some(false), WaitFor::Room) => ENTER_SQ_WAIT,
        (Some(true), WaitFor::Room) => ENTER_SQ_WAKEUP | ENTER_SQ_WAIT,
        (Some(true), _) => ENTER_SQ_WAKEUP,
    };
    Some(flags | ENTER_GETEVENTS)
}

/// Submission entries of a ring for `depth` ops.
pub(super) fn entries_for(depth: u32) -> u32 {
    depth.next_power_of_two().clamp(ENTRIES_MIN, ENTRIES_MAX)
}

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::engine) struct IoEvent {
    pub(in crate::engine) data: u64,
    pub(in crate::engine) obj: u64,
    pub(in crate::engine) res: i64,
    pub(in crate::engine) res2: i64,
}

/// `struct iocb` of linux/aio_abi.h, for little-endian machines.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::engine) struct Iocb {
    pub(in crate::engine) data: u64,
    pub(in crate::engine) key: u32,
    pub(in crate::engine) rw_flags: libc::c_int,
    pub(in crate::engine) opcode: u16,
    pub(in crate::engine) reqprio: i16,
    pub(in crate::engine) fd: libc::c_int,
    pub(in crate::engine) buf: u64,
    pub(in crate::engine) nbytes: u64,
    pub(in crate::engine) offset: i64,
    pub(in crate::engine) reserved: u64,
    pub(in crate::engine) flags: u32,
    pub(in crate::engine) resfd: libc::c_int,
}

impl Iocb {
    /// An iocb whose completion writes the eventfd `wake`.
    #[inline]
    pub(in crate::engine) fn announced(wake: libc::c_int) -> Self {
        Self { flags: IOCB_FLAG_RESFD, resfd: wake, ..Self::default() }
    }
}

const _: () = assert!(size_of::<Iocb>() == 64);
#[cfg(target_endian = "big")]
compile_error!("struct iocb has key and rw_flags the other way round on big-endian machines");

pub(in crate::engine) const IOCB_CMD_PREAD: u16 = 0;
pub(in crate::engine) const IOCB_CMD_PWRITE: u16 = 1;
pub(in crate::engine) const IOCB_CMD_FDSYNC: u16 = 3;
pub(in crate::engine) const IOCB_CMD_PREADV: u16 = 7;
pub(in crate::engine) const IOCB_CMD_PWRITEV: u16 = 8;
pub(in crate::engine) const IOCB_FLAG_RESFD: u32 = 1;
