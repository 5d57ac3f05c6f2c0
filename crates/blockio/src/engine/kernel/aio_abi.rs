//! The structures and constants of the system calls of Linux AIO.

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
