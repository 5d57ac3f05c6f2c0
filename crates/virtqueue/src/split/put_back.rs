//! The way of a popped chain back into the ring.

use super::SplitQueue;

impl SplitQueue {
    /// Gives the chain that was popped last back to the avail ring. The next pop returns it again.
    /// It must not be a chain that an earlier process had taken.
    pub fn put_back(&mut self) {
        self.next_avail = self.next_avail.wrapping_sub(1);
        self.in_device -= 1;
    }
}
