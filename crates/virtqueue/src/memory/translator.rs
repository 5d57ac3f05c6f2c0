//! The translation of descriptors and guest addresses into ranges of this process.

use iomem::{Buffers, Ranges};
use libc::iovec;

use super::local::LocalMemory;
use super::map::{HostRegion, to_usize};
use super::table::{
    DESC_F_INDIRECT, DESCRIPTOR_BYTES, Descriptor, MAX_INDIRECT_ENTRIES, MAX_QUEUE_SIZE, Table,
    prefetch,
};
use crate::error::ChainFault;

/// The most pieces that the buffers of one chain may be in, for each direction. Descriptors alone
/// cannot exceed it. Buffers that cross many small regions can.
pub(crate) const MAX_PIECES: usize = 2 * (MAX_QUEUE_SIZE as usize + MAX_INDIRECT_ENTRIES as usize);

/// The direction of a buffer, from the device's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Readable,
    Writable,
}

/// The place where a device answers a request. The queue needs to know it for chains that have a
/// fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AnswerPlace {
    /// The last device-writable byte, as in virtio-blk.
    #[default]
    LastByte,
    /// The front of the device-writable bytes, as in virtio-scsi.
    Front,
}

#[inline]
fn range(host: *mut u8, len: usize) -> iovec {
    iovec { iov_base: host.cast(), iov_len: len }
}

/// Makes a list of the collected ranges, and starts an empty one.
#[inline]
fn take(ranges: &mut Ranges, memory: &LocalMemory) -> Buffers {
    memory.buffers(std::mem::replace(ranges, memory.lists().storage()))
}

/// Reads the descriptors of a queue and translates guest addresses into host ranges, for one map.
#[derive(Debug)]
pub(crate) struct Translator {
    memory: LocalMemory,
    /// The region of the last hit, always of `memory`.
    last: HostRegion,
    main: Table,
    current: Table,
    /// The buffers of a chain, while they are collected.
    readable: Ranges,
    writable: Ranges,
    answer_place: AnswerPlace,
}

impl Translator {
    /// Makes a translator for a queue whose descriptor table is at `desc_table`. `None` if the
    /// table is not wholly inside one region.
    pub(crate) fn new(memory: LocalMemory, desc_table: u64, entries: u16) -> Option<Self> {
        let host = memory.host_of(desc_table, usize::from(entries) * DESCRIPTOR_BYTES)?;
        let main = Table::new(desc_table, entries, Some(host));
        let (readable, writable) = (memory.lists().storage(), memory.lists().storage());
        Some(Self {
            memory,
            last: HostRegion::NONE,
            main,
            current: main,
            readable,
            writable,
            answer_place: AnswerPlace::default(),
        })
    }

    pub(crate) fn answer_place(&self) -> AnswerPlace {
        self.answer_place
    }

    /// Sets the place that chains with a fault keep.
    pub(crate) fn set_answer_place(&mut self, place: AnswerPlace) {
        self.answer_place = place;
    }

    /// The map.
    pub(crate) fn memory(&self) -> &LocalMemory {
        &self.memory
    }

    /// Drops the buffers of the previous chain, and returns to the queue's own table.
    #[inline]
    pub(crate) fn start_chain(&mut self) {
        self.current = self.main;
        if self.bytes() > 0 {
            // A chain without an end has left buffers.
            self.clear();
        }
    }

    /// Continues in an indirect table. Returns false, without a change, if the table is not wholly
    /// mapped. It need not be aligned (virtio 1.3, section 2.7.5.3 requires nothing) and may cross
    /// regions.
    #[inline]
    pub(crate) fn enter_indirect(&mut self, guest_addr: u64, entries: u16) -> bool {
        let len = usize::from(entries) * DESCRIPTOR_BYTES;
        let host = match self.last.tail(guest_addr) {
            Some((host, tail)) if len <= tail => Some(host),
            _ => self.memory.host_of(guest_addr, len),
        };
        if host.is_none() && self.memory.for_each_piece(guest_addr, len, |_, _| ()).is_err() {
            return false;
        }
        self.current = Table::new(guest_addr, entries, host);
        true
    }

    /// The number of entries of the current table.
    #[inline]
    pub(crate) fn entries(&self) -> u16 {
        self.current.entries
    }

    /// Reads a descriptor of the current table. `None` if the table has no such entry.
    #[inline]
    pub(crate) fn descriptor(&self, index: u16) -> Option<Descriptor> {
        self.current.read(&self.memory, index)
    }

    /// Returns true if the last chain ended in an indirect table.
    #[inline]
    pub(crate) fn is_indirect(&self) -> bool {
        !self.current.is(&self.main)
    }

    /// Prefetches a descriptor of the queue's table.
    #[inline]
    pub(crate) fn prefetch_descriptor(&self, index: u16) {
        self.main.prefetch(index);
    }

    /// Prefetches the start of the buffer or indirect table that a descriptor of the queue's table
    /// names.
    #[inline]
    pub(crate) fn prefetch_named(&self, index: u16) {
        if let Some(Descriptor { addr, .. }) = self.main.read(&self.memory, index) {
            self.prefetch(addr);
        }
    }

    /// Prefetches the start of the first buffer of an indirect table, if a descriptor of the
    /// queue's table names one.
    #[inline]
    pub(crate) fn prefetch_in_indirect(&self, index: u16) {
        if let Some(Descriptor { addr, flags, .. }) = self.main.read(&self.memory, index)
            && flags & DESC_F_INDIRECT != 0
            && let Some((host, DESCRIPTOR_BYTES..)) = self.last.tail(addr)
            && let Some(first) = Table::new(addr, 1, Some(host)).read(&self.memory, 0)
        {
            self.prefetch(first.addr);
        }
    }

    /// Prefetches only from the region of the last hit, where nearly all addresses are.
    #[inline]
    pub(crate) fn prefetch(&self, addr: u64) {
        if let Some((host, _)) = self.last.tail(addr) {
            prefetch(host);
        }
    }

    /// Adds a buffer of the guest, which must not be empty. After a fault, the list of its
    /// direction ends with the pieces before the fault; the opposite direction is not affected.
    #[inline(always)]
    pub(crate) fn append(
        &mut self,
        direction: Direction,
        addr: u64,
        len: u32,
    ) -> Result<(), ChainFault> {
        let bytes = to_usize(u64::from(len));
        let host = match self.last.tail(addr) {
            Some((host, tail)) if bytes <= tail => host,
            _ => match self.find(addr, bytes) {
                Some(host) => host,
                None => return self.append_pieces(direction, addr, len),
            },
        };
        self.list(direction).push(range(host, bytes));
        Ok(())
    }

    /// The number of bytes collected in both directions.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        self.readable.bytes() + self.writable.bytes()
    }

    /// Drops the collected buffers, except for the place of the answer, as far as it was collected.
    /// Returns that place.
    pub(crate) fn shrink_to_answer_place(&mut self) -> AnswerPlace {
        match self.answer_place {
            AnswerPlace::LastByte => self.shrink_to_last_byte(),
            AnswerPlace::Front => self.readable.clear(),
        }
        self.answer_place
    }

    fn shrink_to_last_byte(&mut self) {
        let last = self.writable.iovecs().last().copied();
        self.clear();
        if let Some(last) = last {
            let host = last.iov_base.cast::<u8>().wrapping_add(last.iov_len - 1);
            self.writable.push(range(host, 1));
        }
    }

    /// Drops the collected buffers, and adds the last byte of a buffer, which must not be empty, if
    /// that byte is mapped.
    pub(crate) fn replace_with_last_byte(&mut self, addr: u64, len: u32) {
        self.clear();
        if let Some(host) = addr.checked_add(u64::from(len) - 1).and_then(|addr| self.find(addr, 1))
        {
            self.writable.push(range(host, 1));
        }
    }

    /// Returns the device-readable and the device-writable buffers, in the order in which they were
    /// added.
    #[inline(always)]
    pub(crate) fn finish_chain(&mut self) -> (Buffers, Buffers) {
        (take(&mut self.readable, &self.memory), take(&mut self.writable, &self.memory))
    }

    #[cold]
    fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }

    #[inline]
    fn list(&mut self, direction: Direction) -> &mut Ranges {
        match direction {
            Direction::Readable => &mut self.readable,
            Direction::Writable => &mut self.writable,
        }
    }

    /// Returns the host address of a range that is inside one region. The region of its start
    /// becomes that of the last hit.
    fn find(&mut self, addr: u64, bytes: usize) -> Option<*mut u8> {
        self.last = *self.memory.find(addr)?;
        let (host, tail) = self.last.tail(addr)?;
        (bytes <= tail).then_some(host)
    }

    #[cold]
    fn append_pieces(
        &mut self,
        direction: Direction,
        addr: u64,
        len: u32,
    ) -> Result<(), ChainFault> {
        let memory = self.memory.clone();
        let list = self.list(direction);
        let found = memory.for_each_piece(addr, to_usize(u64::from(len)), |host, len| {
            if list.iovecs().len() <= MAX_PIECES {
                list.push(range(host, len));
            }
        });
        match found {
            Err(_) => Err(ChainFault::Unmapped { addr, len }),
            Ok(()) if list.iovecs().len() > MAX_PIECES => {
                Err(ChainFault::TooManyPieces { max: MAX_PIECES })
            }
            Ok(()) => Ok(()),
        }
    }
}
