//! Popped chains: the way back into the ring, and a second look at the header.

use super::{NOT_IN_DEVICE, PackedQueue, SeenChains};
use crate::memory::DESCRIPTOR_BYTES;
use crate::position::Position;

impl PackedQueue {
    /// Gives the chain that was popped last back to the ring. The next pop returns it again. It
    /// must not be a chain that an earlier process had taken.
    ///
    /// # Panics
    ///
    /// If the device does not hold this chain.
    pub fn put_back(&mut self, head: u16) {
        let chain = std::mem::replace(&mut self.chains[usize::from(head)], NOT_IN_DEVICE);
        assert!(chain.count > 0, "chain {head} was pushed or never popped");
        let (size, count) = (self.config.size, chain.count);
        // A lap back is a step forward with the other wrap counter.
        let Position { slot, wrap } = self.next.after(size - count, size);
        self.next = Position { slot, wrap: !wrap };
        self.room += count;
        self.in_device -= 1;
        self.popped = self.popped.wrapping_sub(1);
        self.seen = SeenChains::none(self.next);
        if let Some(inflight) = &mut self.inflight {
            inflight.release(chain.entry);
        }
        self.note_progress();
    }

    /// Reads the first bytes of a chain that was popped and not pushed. They may differ from those
    /// at the pop. `None` if its first descriptor has fewer, or the driver has changed it.
    #[cold]
    pub fn header<const BYTES: usize>(&self, head: u16) -> Option<[u8; BYTES]> {
        let chain = self.chains.get(usize::from(head)).filter(|chain| chain.count > 0)?;
        let memory = self.memory.map();
        let (mut addr, mut bytes) = (chain.addr, chain.bytes);
        if chain.is_indirect {
            let mut first = [0; DESCRIPTOR_BYTES];
            memory.read(addr, &mut first).ok()?;
            let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, ..] = first;
            addr = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
            bytes = u32::from_le_bytes([l0, l1, l2, l3]);
        }
        let mut header = [0; BYTES];
        let is_long = usize::try_from(bytes).is_ok_and(|bytes| bytes >= BYTES);
        (is_long && memory.read(addr, &mut header).is_ok()).then_some(header)
    }
}
