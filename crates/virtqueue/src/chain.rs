//! Descriptor chains: the walk along a chain, and the guest buffers that it names.

use iomem::Buffers;

use crate::error::{ChainFault, QueueError};
use crate::memory::{
    AnswerPlace, DESC_F_INDIRECT, Descriptor, Direction, LocalMemory, MAX_INDIRECT_ENTRIES,
    Translator,
};

/// The chain continues at `next` (virtio 1.3, section 2.7.5).
pub(crate) const DESC_F_NEXT: u16 = 1;
/// The device writes the buffer.
pub(crate) const DESC_F_WRITE: u16 = 2;

/// Bytes of a descriptor, in the type of an indirect table's length.
const DESCRIPTOR_LEN: u32 = 16;

/// The most bytes of a chain. A driver must not make longer ones (virtio 1.3, section 2.7.5.2), and
/// used lengths have 32 bits.
const MAX_BYTES: usize = u32::MAX as usize;

/// A request of the driver, popped from the avail ring.
#[derive(Debug)]
pub struct Chain {
    /// The head, which [`SplitQueue::push`](crate::SplitQueue::push) takes back, once for each
    /// chain.
    pub head: u16,
    /// The bytes that the driver wrote for the device. Empty if there is a fault.
    ///
    /// A buffer that crosses the border of two memory regions is two ranges. No range is empty.
    pub readable: Buffers,
    /// The place for the device's answer. If there is a fault, it shrinks according to the queue's
    /// [`AnswerPlace`]:
    ///
    /// - `LastByte`: the last byte of the last device-writable buffer. Empty if that byte is not in
    ///   guest memory or no such buffer exists.
    /// - `Front`: all device-writable buffers up to the first byte that is not in guest memory.
    pub writable: Buffers,
    /// The reason why the request cannot be carried out, if there is one.
    pub fault: Option<ChainFault>,
    /// The map that the buffers are in.
    pub memory: LocalMemory,
}

/// The links from descriptor to descriptor, which differ by the layout of the ring.
pub(crate) trait Links: Sized {
    /// The facts about a chain that only its walk finds.
    type Facts;

    /// Returns the first descriptor that names a buffer.
    fn first(&mut self, translator: &mut Translator) -> Result<Descriptor, QueueError>;

    /// Returns the descriptor after one that names a buffer, or `None` at the end of the chain.
    fn after(
        &mut self,
        translator: &mut Translator,
        descriptor: Descriptor,
    ) -> Result<Option<Descriptor>, QueueError>;

    /// Returns the facts, at the end of the chain.
    fn facts(self) -> Self::Facts;
}

/// Walks the chain of a split ring that starts at `head`, and leaves its buffers in the translator.
/// Returns the fault of a chain that has an end but cannot be carried out.
///
/// # Errors
///
/// If the descriptors themselves are invalid, so that the end of the chain is not known.
#[inline]
pub(crate) fn walk(
    translator: &mut Translator,
    head: u16,
    indirect: bool,
) -> Result<Option<ChainFault>, QueueError> {
    translator.start_chain();
    let links = SplitLinks { head, left: translator.entries(), indirect, in_indirect: false };
    walk_links(translator, links).map(|(fault, ())| fault)
}

/// Walks a chain along `links`, like [`walk`]. The translator has started the chain.
#[inline]
pub(crate) fn walk_links<L: Links>(
    translator: &mut Translator,
    mut links: L,
) -> Result<(Option<ChainFault>, L::Facts), QueueError> {
    let mut descriptor = links.first(translator)?;
    let mut writable_seen = false;
    loop {
        let direction = direction(descriptor);
        if direction == Direction::Readable && writable_seen {
            return find_end(links, translator, descriptor, ChainFault::ReadableAfterWritable);
        }
        writable_seen = direction == Direction::Writable;
        if descriptor.len > 0
            && let Err(fault) = translator.append(direction, descriptor.addr, descriptor.len)
        {
            return find_end(links, translator, descriptor, fault);
        }
        match links.after(translator, descriptor)? {
            Some(next) => descriptor = next,
            None => break,
        }
    }
    if translator.bytes() > MAX_BYTES {
        let bytes = translator.bytes();
        translator.shrink_to_answer_place();
        return Ok((Some(ChainFault::TooLong { bytes }), links.facts()));
    }
    Ok((None, links.facts()))
}

/// Makes a chain of the buffers in the translator.
#[inline(always)]
pub(crate) fn finish(translator: &mut Translator, head: u16, fault: Option<ChainFault>) -> Chain {
    let (readable, writable) = translator.finish_chain();
    Chain { head, readable, writable, fault, memory: translator.memory().clone() }
}

/// Continues in the indirect table at an address, with a length in bytes, that chain `head` names.
/// Returns the number of its descriptors.
#[inline(always)]
pub(crate) fn enter_table(
    translator: &mut Translator,
    head: u16,
    (addr, len): (u64, u32),
) -> Result<u16, QueueError> {
    let max = MAX_INDIRECT_ENTRIES;
    let entries = match u16::try_from(len / DESCRIPTOR_LEN) {
        Ok(entries @ 1..=MAX_INDIRECT_ENTRIES) if len.is_multiple_of(DESCRIPTOR_LEN) => entries,
        _ => return Err(QueueError::IndirectLength { head, len, max }),
    };
    if !translator.enter_indirect(addr, entries) {
        return Err(QueueError::IndirectUnmapped { head, addr, len });
    }
    Ok(entries)
}

#[inline]
fn direction(descriptor: Descriptor) -> Direction {
    if descriptor.flags & DESC_F_WRITE != 0 { Direction::Writable } else { Direction::Readable }
}

/// The links of a split ring: through the queue's table, and at its end at most one indirect table.
struct SplitLinks {
    head: u16,
    /// The number of descriptors that the chain may still have in this table without a loop.
    left: u16,
    /// True if indirect tables were negotiated.
    indirect: bool,
    in_indirect: bool,
}

impl Links for SplitLinks {
    type Facts = ();

    #[inline]
    fn first(&mut self, translator: &mut Translator) -> Result<Descriptor, QueueError> {
        let (head, entries) = (self.head, translator.entries());
        let first =
            translator.descriptor(head).ok_or(QueueError::HeadOutOfRange { head, entries })?;
        self.resolve(translator, first)
    }

    #[inline]
    fn after(
        &mut self,
        translator: &mut Translator,
        descriptor: Descriptor,
    ) -> Result<Option<Descriptor>, QueueError> {
        if descriptor.flags & DESC_F_NEXT == 0 {
            return Ok(None);
        }
        let (head, next, entries) = (self.head, descriptor.next, translator.entries());
        self.left -= 1;
        if self.left == 0 {
            return Err(QueueError::Loop { head, entries });
        }
        let descriptor = translator.descriptor(next).ok_or(QueueError::NextOutOfRange {
            head,
            next,
            entries,
        })?;
        self.resolve(translator, descriptor).map(Some)
    }

    #[inline]
    fn facts(self) {}
}

impl SplitLinks {
    /// Returns the descriptor itself, or the first one of the table that it names (virtio 1.3,
    /// section 2.7.5.3). The `WRITE` flag of such a descriptor has no meaning.
    #[inline]
    fn resolve(
        &mut self,
        translator: &mut Translator,
        descriptor: Descriptor,
    ) -> Result<Descriptor, QueueError> {
        let Descriptor { addr, len, flags, .. } = descriptor;
        if flags & DESC_F_INDIRECT == 0 {
            return Ok(descriptor);
        }
        let head = self.head;
        if !self.indirect {
            return Err(QueueError::IndirectNotNegotiated { head });
        }
        if self.in_indirect {
            return Err(QueueError::NestedIndirect { head });
        }
        if flags & DESC_F_NEXT != 0 {
            return Err(QueueError::IndirectWithNext { head });
        }
        (self.in_indirect, self.left) = (true, enter_table(translator, head, (addr, len))?);
        match translator.descriptor(0) {
            Some(first) if first.flags & DESC_F_INDIRECT != 0 => {
                Err(QueueError::NestedIndirect { head })
            }
            Some(first) => Ok(first),
            None => Err(QueueError::IndirectUnmapped { head, addr, len }),
        }
    }
}

/// Continues after a fault in `descriptor`, to find the end of the chain and the place of its
/// answer.
#[cold]
#[inline(never)]
fn find_end<L: Links>(
    mut links: L,
    translator: &mut Translator,
    mut descriptor: Descriptor,
    fault: ChainFault,
) -> Result<(Option<ChainFault>, L::Facts), QueueError> {
    let place = translator.shrink_to_answer_place();
    let mut is_intact = direction(descriptor) == Direction::Readable;
    loop {
        let Descriptor { addr, len, .. } = descriptor;
        if direction(descriptor) == Direction::Writable && len > 0 {
            match place {
                AnswerPlace::LastByte => translator.replace_with_last_byte(addr, len),
                AnswerPlace::Front => {
                    let adds = |t: &mut Translator| t.append(Direction::Writable, addr, len);
                    is_intact = is_intact && adds(translator).is_ok();
                }
            }
        }
        match links.after(translator, descriptor)? {
            Some(next) => descriptor = next,
            None => return Ok((Some(fault), links.facts())),
        }
    }
}
