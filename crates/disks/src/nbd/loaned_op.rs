//! Memory of a request that another IoThread carries out.

use iomem::{Buffers, Memory};
use libc::iovec;

use super::borrower::Borrower;
use super::client::Client;
use super::requests::{IssuedRequest, Waiter};

/// The memory of a foreign op, for another thread. It is valid until the op is completed.
pub(super) struct LoanedMemory {
    ranges: Vec<iovec>,
}

// SAFETY: the ranges are addresses of memory that any thread may read and write, as long as the
// foreign op owns it.
unsafe impl Send for LoanedMemory {}

impl LoanedMemory {
    pub(super) fn new(buffers: &Buffers) -> Self {
        Self { ranges: buffers.iovecs().to_vec() }
    }

    /// Returns the memory as a list of this thread.
    ///
    /// # Safety
    ///
    /// The list, and all lists that are made of it, must be gone when the op that owns the memory
    /// is completed.
    unsafe fn into_buffers(self) -> Buffers {
        // SAFETY: the slot of the foreign op keeps the ranges mapped until its completion, which
        // the caller makes last.
        unsafe { Buffers::from_raw_parts(self.ranges.into(), Memory::new(())) }
    }
}

impl Client {
    /// Starts a request of another IoThread, which waits for it.
    pub(super) fn start_for(&self, made: IssuedRequest, lent: LoanedMemory, waiter: Borrower) {
        // SAFETY: `finish` drops the list before it notifies the borrower. A slot that is dropped
        // drops its list before its borrower. Lists made of it last no longer than a call of
        // `client.rs` or `channel.rs`.
        let buffers = unsafe { lent.into_buffers() };
        let slot = self.begin(made, buffers, Waiter::Borrower(waiter));
        self.assign_or_refuse(slot);
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loan_has_all_ranges_of_its_memory() {
        let mut memory = [1; 1024];
        let base = memory.as_mut_ptr();
        let ranges = [(0, 512), (768, 128), (512, 256)].map(|(at, iov_len)| iovec {
            // SAFETY: all ranges lie in `memory`.
            iov_base: unsafe { base.add(at) }.cast(),
            iov_len,
        });
        // SAFETY: `memory` outlives the list.
        let buffers = unsafe { Buffers::from_raw_parts(ranges.to_vec().into(), Memory::new(())) };
        // SAFETY: the list outlives the loan.
        let there = unsafe { LoanedMemory::new(&buffers).into_buffers() };
        let data: Vec<u8> = (0..=255).cycle().take(896).collect();
        assert_eq!(there.copy_from(0, &data), 896);
        assert!(buffers.to_vec() == data);
    }
}
