//! The links between the descriptors of a packed ring: neighbours, until one has no successor, or a
//! single indirect table (virtio 1.3, sections 2.8.6 and 2.8.7).

use crate::chain::{self, DESC_F_NEXT, DESC_F_WRITE, Links};
use crate::error::QueueError;
use crate::memory::{DESC_F_INDIRECT, Descriptor, Translator};

/// A place that descriptors are read from: the ring, or the account of an earlier process.
pub(super) trait Slots {
    fn descriptor(&self, slot: u16) -> Result<Descriptor, QueueError>;

    /// The slot after this one.
    fn after(&self, slot: u16) -> u16;
}

/// The facts about a chain that the queue keeps until it is used.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChainFacts {
    /// The buffer id, which the last descriptor has.
    pub(super) id: u16,
    /// Descriptors of the ring.
    pub(super) count: u16,
    /// The address and the length in the first descriptor.
    pub(super) addr: u64,
    pub(super) bytes: u32,
    pub(super) is_indirect: bool,
}

pub(super) struct PackedLinks<'a, S> {
    slots: &'a S,
    head: u16,
    slot: u16,
    size: u16,
    /// The number of descriptors that the chain may still have without a loop: of the ring, or of
    /// the indirect table.
    left: u16,
    indirect: bool,
    found: ChainFacts,
}

impl<'a, S: Slots> PackedLinks<'a, S> {
    /// The chain that starts at `head` and has at most `left` descriptors of the ring.
    pub(super) fn new(slots: &'a S, head: u16, (left, size): (u16, u16), indirect: bool) -> Self {
        let found = ChainFacts { id: 0, count: 0, addr: 0, bytes: 0, is_indirect: false };
        Self { slots, head, slot: head, size, left, indirect, found }
    }

    /// Reads the descriptor in the present slot of the ring.
    #[inline(always)]
    fn read(&mut self, translator: &mut Translator) -> Result<Descriptor, QueueError> {
        let Descriptor { addr, len, flags, next: id } = self.slots.descriptor(self.slot)?;
        self.found.id = id;
        self.found.count += 1;
        if self.found.count == 1 {
            (self.found.addr, self.found.bytes) = (addr, len);
        }
        if flags & DESC_F_INDIRECT == 0 {
            return Ok(Descriptor { addr, len, flags, next: id });
        }
        let head = self.head;
        if !self.indirect {
            return Err(QueueError::IndirectNotNegotiated { head });
        }
        if flags & DESC_F_NEXT != 0 || self.found.count > 1 {
            return Err(QueueError::IndirectNotAlone { head });
        }
        self.left = chain::enter_table(translator, head, (addr, len))?;
        self.found.is_indirect = true;
        self.next_of_table(translator)?.ok_or(QueueError::IndirectUnmapped { head, addr, len })
    }

    /// Reads the next descriptor of the indirect table, in which only the flag `WRITE` has a
    /// meaning. `None` at its end.
    #[inline(always)]
    fn next_of_table(&mut self, translator: &Translator) -> Result<Option<Descriptor>, QueueError> {
        if self.left == 0 {
            return Ok(None);
        }
        let index = translator.entries() - self.left;
        self.left -= 1;
        let (head, addr, len) = (self.head, self.found.addr, self.found.bytes);
        let descriptor =
            translator.descriptor(index).ok_or(QueueError::IndirectUnmapped { head, addr, len })?;
        let descriptor = descriptor.of_packed();
        Ok(Some(Descriptor { flags: descriptor.flags & DESC_F_WRITE, ..descriptor }))
    }
}

impl<S: Slots> Links for PackedLinks<'_, S> {
    type Facts = ChainFacts;

    #[inline(always)]
    fn first(&mut self, translator: &mut Translator) -> Result<Descriptor, QueueError> {
        self.read(translator)
    }

    #[inline(always)]
    fn after(
        &mut self,
        translator: &mut Translator,
        descriptor: Descriptor,
    ) -> Result<Option<Descriptor>, QueueError> {
        if self.found.is_indirect {
            return self.next_of_table(translator);
        }
        if descriptor.flags & DESC_F_NEXT == 0 {
            return Ok(None);
        }
        self.left -= 1;
        if self.left == 0 {
            return Err(QueueError::Loop { head: self.head, entries: self.size });
        }
        self.slot = self.slots.after(self.slot);
        self.read(translator).map(Some)
    }

    #[inline]
    fn facts(self) -> ChainFacts {
        self.found
    }
}
