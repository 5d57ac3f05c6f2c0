//! A chain that goes back into the ring.

use super::SplitQueue;

impl SplitQueue {
    /// Gives the chain that was popped last back to the avail ring. It is none that an earlier
    /// process had taken, and is popped again next.
    pub fn put_back(&mut self) {
        self.next_avail = self.next_avail.wrapping_sub(1);
        self.in_device -= 1;
    }
}
