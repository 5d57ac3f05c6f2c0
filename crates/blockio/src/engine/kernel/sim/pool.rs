//! The pool threads of a simulated kernel (see `kernel/sim.rs`).

use std::sync::Arc;

use libc::iovec;

use super::world::{Destination, KernelOp, Signal, world};
use crate::engine::pool::{Job, Pool};
use crate::executor::mailbox::Mailbox;

/// Gives jobs to the simulated kernel instead of pool threads. Returns false if nothing is
/// simulated.
pub(in crate::engine) fn simulate_jobs(pool: &Arc<Pool>) -> bool {
    let Some(world) = world() else {
        return false;
    };
    while let Some(Job { slot, view }) = { pool.jobs().waiting.pop_front() } {
        let iovecs: &[iovec] = match view.iovecs_len {
            0 => &[],
            // SAFETY: the slot owns the iovecs until its completion (see `op.rs`).
            len => unsafe { std::slice::from_raw_parts(view.iovecs, len) },
        };
        let destination = Box::new(PoolDestination { mailbox: Arc::clone(&pool.mailbox), slot });
        // SAFETY: the slot owns the memory until its completion (see `op.rs`).
        world.start(unsafe { KernelOp::new(view.kind, view.fd, view.offset, iovecs, destination) });
    }
    true
}

/// The destination of the result of a job.
struct PoolDestination {
    mailbox: Arc<Mailbox>,
    slot: u32,
}

impl Destination for PoolDestination {
    fn holds_submitter(&self) -> bool {
        false
    }

    fn post(self: Box<Self>, result: i64) -> Signal {
        if self.mailbox.put_result(self.slot, result) {
            Signal::new(move || self.mailbox.wake())
        } else {
            Signal::none()
        }
    }
}
