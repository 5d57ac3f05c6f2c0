//! The choice between the kernel's ring and a simulated one.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::Instant;

use io_uring::{cqueue, squeue};
use libc::iovec;
use rustix::fd::AsFd;

use super::ring::{KernelRing, Setup};
use super::sim_ring::SimRing;
use crate::stats::Stats;

/// The kernel's ring, or a simulated one where the calling thread's kernel is.
#[expect(clippy::large_enum_variant, reason = "an IoThread has one")]
pub(super) enum Ring {
    Kernel(KernelRing),
    Simulated(SimRing),
}

macro_rules! either {
    ($ring:ident, $name:ident($($argument:expr),*)) => {
        match $ring {
            Ring::Kernel(ring) => ring.$name($($argument),*),
            Ring::Simulated(ring) => ring.$name($($argument),*),
        }
    };
}

impl Ring {
    pub(super) fn new(setup: &Setup<'_>) -> io::Result<Self> {
        match SimRing::new(setup) {
            Some(ring) => Ok(Self::Simulated(ring)),
            None => KernelRing::new(setup).map(Self::Kernel),
        }
    }

    pub(super) fn has_uring_cmd(&self) -> bool {
        either!(self, has_uring_cmd())
    }

    pub(super) fn update_file(&self, index: u32, file: RawFd) -> io::Result<()> {
        either!(self, update_file(index, file))
    }

    /// # Safety
    ///
    /// As that of [`KernelRing::update_buffer`].
    pub(super) unsafe fn update_buffer(&self, index: u32, range: iovec) -> io::Result<()> {
        match self {
            // SAFETY: the caller vouches for the same.
            Self::Kernel(ring) => unsafe { ring.update_buffer(index, range) },
            Self::Simulated(ring) => {
                ring.update_buffer(index, range);
                Ok(())
            }
        }
    }

    pub(super) fn room(&mut self) -> usize {
        either!(self, room())
    }

    pub(super) fn unsubmitted(&mut self) -> usize {
        either!(self, unsubmitted())
    }

    pub(super) fn is_untold(&mut self) -> bool {
        either!(self, is_untold())
    }

    /// # Safety
    ///
    /// As that of [`KernelRing::push`].
    pub(super) unsafe fn push(&mut self, entry: &squeue::Entry) {
        match self {
            // SAFETY: the caller vouches for the same.
            Self::Kernel(ring) => unsafe { ring.push(entry) },
            Self::Simulated(ring) => ring.push(entry),
        }
    }

    pub(super) fn make_room(&mut self, stats: Option<&Stats>) -> bool {
        either!(self, make_room(stats))
    }

    pub(super) fn submit(&mut self, stats: &Stats) -> io::Result<()> {
        either!(self, submit(stats))
    }

    pub(super) fn submit_and_wait(
        &mut self,
        deadline: Option<Instant>,
        stats: &Stats,
    ) -> io::Result<()> {
        either!(self, submit_and_wait(deadline, stats))
    }

    pub(super) fn only_wait(&mut self, until: Instant, stats: &Stats) {
        either!(self, only_wait(until, stats));
    }

    pub(super) fn has_completions(&self) -> bool {
        either!(self, has_completions())
    }

    pub(super) fn has_entries(&self) -> bool {
        either!(self, has_entries())
    }

    pub(super) fn has_anything(&self) -> bool {
        either!(self, has_anything())
    }

    pub(super) fn run_deferred(&mut self, stats: &Stats) {
        either!(self, run_deferred(stats));
    }

    pub(super) fn take(&mut self, entries: &mut Vec<cqueue::Entry>) {
        either!(self, take(entries));
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Kernel(ring) => ring.as_fd(),
            Self::Simulated(ring) => ring.as_fd(),
        }
    }
}
