//! Faults of single ops, and checks that ops are valid.

use blockio::engine::kernel::sim::KernelOp;
use blockio::op::OpKind;
use iomem::fits;

use crate::content::SECTOR;
use crate::failure::Failure;
use crate::plan::Plan;
use crate::rng::Rng;

/// The class of a failed op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Read,
    Write,
    Flush,
    Deallocate,
    /// An op that only the engine can identify.
    Any,
}

/// An injected error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Injected {
    /// True if some request must report the error. Otherwise a request may.
    pub(crate) must_fail: bool,
    pub(crate) class: Class,
    pub(crate) when: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// The disk says that it has no such blocks.
    pub(crate) refuses: bool,
    /// From then on flushes may fail, and so may writes that must be stable at their answer.
    pub(crate) loses: bool,
}

/// Returns the result of an op and the bytes that it moves. Also returns the op's class if a
/// request must report an error, or may report one although the op succeeds.
pub(crate) fn outcome(
    plan: &Plan,
    rng: &mut Rng,
    end_sector: u64,
    op: &KernelOp,
) -> (i64, usize, Option<Class>) {
    let len = op_len(op);
    let errno = |errno: libc::c_int| -i64::from(errno);
    let is_supported = match op.kind() {
        OpKind::Write { fua } => !fua || plan.no_dsync == 0,
        OpKind::Fallocate { mode, .. } if mode & libc::FALLOC_FL_PUNCH_HOLE != 0 => {
            plan.no_punch == 0
        }
        OpKind::DiscardBlocks { .. } => plan.no_punch == 0,
        OpKind::Fallocate { .. } | OpKind::ZeroBlocks { .. } => plan.no_zero_range == 0,
        OpKind::Read | OpKind::Flush => true,
        // Simulated disks have no holes.
        OpKind::FindExtent { .. } => false,
    };
    let class = class_of(op.kind());
    if rng.chance(plan.eintr) {
        return (errno(libc::EINTR), 0, None);
    }
    if rng.chance(plan.eagain) {
        return (errno(libc::EAGAIN), 0, None);
    }
    if !is_supported {
        return (errno(libc::EOPNOTSUPP), 0, None);
    }
    let fails = op.kind() == OpKind::Flush && rng.chance(plan.flush_eio);
    if fails || rng.chance(plan.eio) {
        return (errno(libc::EIO), rng.index(len / SECTOR + 1) * SECTOR, Some(class));
    }
    if matches!(class, Class::Write | Class::Deallocate) && rng.chance(plan.enospc) {
        return (errno(libc::ENOSPC), rng.index(len / SECTOR + 1) * SECTOR, Some(class));
    }
    // There is nothing to read beyond the end of a cut file. Any request may report that: a write
    // of a part of a block reads the rest of it.
    let (moved, short, cause) = match class {
        Class::Read => {
            let end = end_sector * SECTOR as u64;
            let left = fits(end.saturating_sub(op.offset()), "a length");
            (len.min(left), plan.short_reads, (left < len).then_some(Class::Any))
        }
        Class::Write => (len, plan.short_writes, None),
        _ => return (0, len, None),
    };
    if !rng.chance(short) {
        return (i64::try_from(moved).unwrap_or(0), moved, cause);
    }
    // At least one unit: a transfer of none means the end of the file, or of the space.
    let unit = match (plan.odd_shorts, plan.direct) {
        (0, 0) => SECTOR,
        (_, 0) => 1,
        _ => fits(plan.block_bytes(), "the size of a block"),
    };
    let units = rng.between(1, (moved / unit).max(1) as u64);
    let moved = moved.min(fits::<_, usize>(units, "a number of units") * unit);
    (i64::try_from(moved).unwrap_or(0), moved, cause)
}

/// Returns io_uring's rejection of an entry that it has taken, if it rejects it: the result, and a
/// class if a request must report the error.
pub(crate) fn rejection(plan: &Plan, rng: &mut Rng, op: &KernelOp) -> Option<(i64, Option<Class>)> {
    if !op.is_ring_entry() || !rng.chance(plan.entry_reject) {
        return None;
    }
    let errno = rng.pick(&[libc::EINVAL, libc::EOPNOTSUPP, libc::EAGAIN, libc::EINTR]);
    // Transient errors are tried again, and an unsupported op may have a fallback.
    let has_way = match op.kind() {
        OpKind::Read | OpKind::Write { fua: false } | OpKind::Flush => false,
        _ => errno == libc::EOPNOTSUPP,
    };
    let is_transient = matches!(errno, libc::EAGAIN | libc::EINTR);
    let class = (!has_way && !is_transient).then(|| class_of(op.kind()));
    Some((-i64::from(errno), class))
}

/// Checks an op before it reaches the kernel: it is for a disk, inside, aligned, and not too large.
/// `found`: there is a disk with its descriptor.
pub(crate) fn check_op(plan: &Plan, found: bool, op: &KernelOp) -> Result<(), Failure> {
    let (len, block) = (op_len(op), plan.block_bytes());
    let end = op.offset().checked_add(len as u64);
    let is_data = matches!(op.kind(), OpKind::Read | OpKind::Write { .. });
    let block_bytes = fits(block, "the size of a block");
    let memory_align = fits(plan.memory_align(), "an alignment");
    let aligned = plan.direct == 0
        || !is_data
        || ((op.offset() | len as u64) & (block - 1) == 0
            && op.buffers().is_aligned(memory_align, block_bytes));
    let inside = end.is_some_and(|end| end <= plan.sectors() * SECTOR as u64);
    let fits_size = !is_data || (len > 0 && len <= plan.op_bytes_max());
    if !found || !aligned || !inside || !fits_size {
        let (kind, offset, buffers) = (op.kind(), op.offset(), op.buffers());
        let text = format!("{kind:?} at {offset} of {buffers:?}: {:?}", buffers.iovecs());
        return Err(Failure::new("bad op", text));
    }
    Ok(())
}

pub(crate) fn class_of(kind: OpKind) -> Class {
    match kind {
        OpKind::Read => Class::Read,
        OpKind::Write { .. } => Class::Write,
        OpKind::Flush => Class::Flush,
        _ => Class::Deallocate,
    }
}

/// Length of the op's range in bytes.
pub(crate) fn op_len(op: &KernelOp) -> usize {
    let len = match op.kind() {
        OpKind::Fallocate { len, .. }
        | OpKind::DiscardBlocks { len }
        | OpKind::ZeroBlocks { len } => len,
        _ => op.buffers().bytes() as u64,
    };
    fits(len, "a length")
}
