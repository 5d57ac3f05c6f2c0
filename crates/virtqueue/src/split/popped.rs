//! Popped chains: the way back into the ring, a second look at the header, and the view of other
//! threads.

use super::SplitQueue;
use crate::avail_idx::AvailIdx;
use crate::memory::{DESC_F_INDIRECT, DESCRIPTOR_BYTES};

impl SplitQueue {
    /// Returns true if an earlier process saw this chain, which must be popped and not yet pushed.
    pub fn is_recovered(&self, head: u16) -> bool {
        self.inflight.as_ref().is_some_and(|inflight| inflight.is_recovered(head))
    }

    /// The head of the next used element, if chains are answered in the order of the avail ring and
    /// none is of an earlier process.
    pub fn in_order_head(&self) -> u16 {
        self.rings.avail_entry(self.next_used.wrapping_add(self.avail_lead))
    }

    /// Gives the chain that was popped last back to the avail ring. The next pop returns it again.
    /// It must not be a chain that an earlier process had taken.
    pub fn put_back(&mut self) {
        self.next_avail = self.next_avail.wrapping_sub(1);
        self.in_device -= 1;
    }

    /// Unmarks chains that were seen and not popped. The next process finds them in the avail ring.
    ///
    /// # Panics
    ///
    /// If [chains of an earlier process](Self::has_recovered) are still to be popped.
    pub fn unmark_rest(&mut self) {
        assert!(self.recovered == 0, "the avail ring does not have {} chains", self.recovered);
        let Self { inflight, rings, next_avail, avail_shadow, .. } = self;
        if let Some(inflight) = inflight {
            let count = avail_shadow.wrapping_sub(*next_avail);
            let entries = (0..count).rev().map(|at| next_avail.wrapping_add(at));
            inflight.release(entries.map(|index| rings.avail_entry(index)));
        }
        self.avail_shadow = self.next_avail;
    }

    /// Returns a handle with which other threads read avail idx.
    pub fn avail_idx(&self) -> AvailIdx {
        AvailIdx::split(self.memory.map(), self.config.avail_ring)
    }

    /// Reads the first bytes of a chain that was popped and not pushed. They may differ from those
    /// at the pop. `None` if its first descriptor has fewer, or the driver has changed it.
    ///
    /// The functions of a pop are not used: a second caller would make them slower.
    #[cold]
    pub fn header<const BYTES: usize>(&self, head: u16) -> Option<[u8; BYTES]> {
        let place = usize::from(head) * DESCRIPTOR_BYTES;
        let mut first = self.descriptor_at(self.config.desc_table.checked_add(place as u64)?)?;
        if first.2 & DESC_F_INDIRECT != 0 {
            first = self.descriptor_at(first.0)?;
        }
        let (addr, bytes, _) = first;
        let mut header = [0; BYTES];
        let is_long = usize::try_from(bytes).is_ok_and(|bytes| bytes >= BYTES);
        (is_long && self.memory.map().read(addr, &mut header).is_ok()).then_some(header)
    }

    /// The address, the bytes and the flags of a descriptor (virtio 1.3, section 2.7.5).
    fn descriptor_at(&self, addr: u64) -> Option<(u64, u32, u16)> {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        self.memory.map().read(addr, &mut bytes).ok()?;
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, _, _] = bytes;
        let addr = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        Some((addr, u32::from_le_bytes([l0, l1, l2, l3]), u16::from_le_bytes([f0, f1])))
    }
}
