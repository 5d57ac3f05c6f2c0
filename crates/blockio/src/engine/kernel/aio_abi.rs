//! What the system calls of Linux AIO take and give.

use crate::op::{OpKind, OpView};
use iomem::fits;

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

const _: () = assert!(size_of::<Iocb>() == 64);
#[cfg(target_endian = "big")]
compile_error!("struct iocb has key and rw_flags the other way round on big-endian machines");

pub(in crate::engine) const IOCB_CMD_PREAD: u16 = 0;
pub(in crate::engine) const IOCB_CMD_PWRITE: u16 = 1;
pub(in crate::engine) const IOCB_CMD_FDSYNC: u16 = 3;
pub(in crate::engine) const IOCB_CMD_PREADV: u16 = 7;
pub(in crate::engine) const IOCB_CMD_PWRITEV: u16 = 8;
pub(in crate::engine) const IOCB_FLAG_RESFD: u32 = 1;

/// The iocb for the op in `slot`, whose completion writes the eventfd `wake`.
pub(in crate::engine) fn iocb(slot: u32, view: &OpView, wake: libc::c_int) -> Iocb {
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
        offset: fits(offset, "the offset of an op"),
        reserved: 0,
        flags: IOCB_FLAG_RESFD,
        resfd: wake,
    }
}
