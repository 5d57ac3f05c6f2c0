//! The driver's side of a virtqueue (virtio 1.3, sections 2.7 and 2.8), for code that plays a
//! guest: tests, the simulation, fuzzing, examples. A device does not need it, so the feature
//! `driver` hides it.
//!
//! [`PackedDriver`] is for packed rings. For split ones, [`Ring`] is raw: every field can be given
//! any value, so that a test can make a ring as bad as it needs. [`Driver`] keeps to the rules and
//! manages its descriptors. Neither shares an offset or a flag with the device's side, because it
//! would share the mistakes, too.

mod desc;
mod packed;

use std::sync::atomic::{Ordering, fence};

use crate::split::QueueConfig;
pub use desc::{Desc, DriverMemory, INDIRECT, NEXT, Used, WRITE};
pub use packed::{PACKED_START, PackedDriver};

/// A flag of the avail ring: the driver wants no calls.
const NO_INTERRUPT: u16 = 1;
/// A flag of the used ring: the device wants no kicks.
const NO_NOTIFY: u16 = 1;

const DESCRIPTOR_BYTES: u64 = 16;
const USED_BYTES: u64 = 8;
/// Offset of the index in both rings. The flags are before it, the entries behind it.
const IDX: u64 = 2;
const ENTRIES: u64 = 4;

/// The fields of a ring, each of which can be read and given any value.
#[derive(Clone, Debug)]
pub struct Ring<M> {
    /// The memory that the ring is in.
    pub memory: M,
    /// The addresses and the size of the ring, and whether event idx was negotiated.
    pub config: QueueConfig,
    /// The avail entry of the next chain.
    pub next_avail: u16,
    /// The used element to take next.
    pub next_used: u16,
}

impl<M: DriverMemory> Ring<M> {
    /// The ring as it is in memory. Avail and used entries both continue at the configured avail
    /// entry.
    pub fn new(memory: M, config: QueueConfig) -> Self {
        Self { memory, config, next_avail: config.next_avail, next_used: config.next_avail }
    }

    /// Empties the ring, as a driver does at its start.
    pub fn clear(&self) {
        let entries = u64::from(self.config.size);
        (0..entries + 3).for_each(|word| self.store(self.config.avail_ring + 2 * word, 0));
        (0..4 * entries + 3).for_each(|word| self.store(self.config.used_ring + 2 * word, 0));
        self.put_avail_idx(self.next_avail);
        self.put_used_idx(self.next_used);
    }

    /// Copies the ring and its contents to the addresses in `config`, and continues there.
    pub fn move_to(&mut self, config: QueueConfig) {
        let entries = u64::from(config.size);
        for (from, to, words) in [
            (self.config.desc_table, config.desc_table, 8 * entries),
            (self.config.avail_ring, config.avail_ring, entries + 3),
            (self.config.used_ring, config.used_ring, 4 * entries + 3),
        ] {
            (0..words).for_each(|word| self.store(to + 2 * word, self.load(from + 2 * word)));
        }
        self.config = config;
    }

    /// Writes descriptor `index` of a table.
    pub(crate) fn put_desc_of(&self, table: u64, index: u16, desc: Desc) {
        self.memory.store(table + u64::from(index) * DESCRIPTOR_BYTES, &desc.bytes());
    }

    /// Writes descriptor `index` of the queue's own table.
    pub fn put_desc(&self, index: u16, desc: Desc) {
        self.put_desc_of(self.config.desc_table, index, desc);
    }

    /// Writes buffers into descriptors `first`, `first + 1` and so on of a table, and links them.
    pub fn put_table(&self, table: u64, first: u16, buffers: &[Desc]) {
        let left = (0..buffers.len()).rev();
        for (index, (desc, left)) in (first..).zip(buffers.iter().zip(left)) {
            let next = index.wrapping_add(1);
            self.put_desc_of(table, index, if left > 0 { desc.then(next) } else { *desc });
        }
    }

    /// Writes a chain into descriptors `first`, `first + 1` and so on of the queue's own table.
    pub fn put_chain(&self, first: u16, buffers: &[Desc]) {
        self.put_table(self.config.desc_table, first, buffers);
    }

    /// Writes an indirect table, and descriptor `head` that names it.
    pub fn put_indirect(&self, head: u16, table: u64, buffers: &[Desc]) {
        self.put_table(table, 0, buffers);
        self.put_desc(head, Desc::table(table, buffers.len()));
    }

    /// Writes the head of a chain into the next entry of the avail ring. The device does not see it
    /// before [`put_avail_idx`](Self::put_avail_idx).
    pub fn put_head(&mut self, head: u16) {
        let entry = u64::from(self.next_avail % self.config.size);
        self.store(self.config.avail_ring + ENTRIES + 2 * entry, head);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Makes a chain available, without a kick.
    pub fn offer(&mut self, head: u16) {
        self.put_head(head);
        self.put_avail_idx(self.next_avail);
    }

    /// Gives avail idx any value, after all earlier writes.
    pub fn put_avail_idx(&self, idx: u16) {
        fence(Ordering::Release);
        self.store(self.config.avail_ring + IDX, idx);
    }

    /// The avail idx in the ring.
    pub fn avail_idx(&self) -> u16 {
        self.load(self.config.avail_ring + IDX)
    }

    /// Gives the avail ring any flags.
    pub fn put_avail_flags(&self, flags: u16) {
        self.store(self.config.avail_ring, flags);
    }

    /// Asks for a call when used element `event` is published (event idx only).
    pub fn put_used_event(&self, event: u16) {
        self.store(self.config.avail_ring + ENTRIES + 2 * u64::from(self.config.size), event);
    }

    /// Asks for a call with the next used element. Afterwards, the caller must check for elements
    /// that are there already.
    pub fn enable_calls(&self) {
        match self.config.event_idx {
            true => self.put_used_event(self.next_used),
            false => self.put_avail_flags(0),
        }
        fence(Ordering::SeqCst);
    }

    /// Asks for no calls: by the flag, or by an event that lies in the past.
    pub fn disable_calls(&self) {
        match self.config.event_idx {
            true => self.put_used_event(self.next_used.wrapping_sub(1)),
            false => self.put_avail_flags(NO_INTERRUPT),
        }
    }

    /// Returns true if the device wants a kick for the chains made available since avail idx was
    /// `old`.
    pub fn needs_kick(&self, old: u16) -> bool {
        fence(Ordering::SeqCst);
        match self.config.event_idx {
            // True if the step from old to new passes the event (virtio 1.3, section 2.7.7.1).
            true => {
                let (event, new) = (self.avail_event(), self.avail_idx());
                new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
            }
            false => self.used_flags() & NO_NOTIFY == 0,
        }
    }

    /// The flags of the used ring, which the device sets.
    pub fn used_flags(&self) -> u16 {
        self.load(self.config.used_ring)
    }

    /// The avail entry for which the device wants a kick (event idx only).
    pub fn avail_event(&self) -> u16 {
        let entries = USED_BYTES * u64::from(self.config.size);
        self.load(self.config.used_ring + ENTRIES + entries)
    }

    /// The device's used idx.
    pub fn used_idx(&self) -> u16 {
        self.load(self.config.used_ring + IDX)
    }

    /// Gives used idx any value. Otherwise, only the device changes it.
    pub fn put_used_idx(&self, idx: u16) {
        self.store(self.config.used_ring + IDX, idx);
    }

    /// Returns a used element, valid or not.
    pub fn used(&self, index: u16) -> Used {
        let mut bytes = [0; 8];
        let entry = u64::from(index % self.config.size);
        self.memory.load(self.config.used_ring + ENTRIES + USED_BYTES * entry, &mut bytes);
        let [a, b, c, d, len @ ..] = bytes;
        Used { head: u32::from_le_bytes([a, b, c, d]), bytes: u32::from_le_bytes(len) }
    }

    /// Returns true if there is a used element to take.
    pub fn has_used(&self) -> bool {
        self.used_idx() != self.next_used
    }

    /// Takes the next used element, if there is one.
    pub fn take_used(&mut self) -> Option<Used> {
        if !self.has_used() {
            return None;
        }
        // The element is read after used idx, before which the device wrote it.
        fence(Ordering::Acquire);
        let used = self.used(self.next_used);
        self.next_used = self.next_used.wrapping_add(1);
        Some(used)
    }

    fn load(&self, addr: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.load(addr, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    fn store(&self, addr: u64, value: u16) {
        self.memory.store(addr, &value.to_le_bytes());
    }
}

/// A driver that keeps to the rules and knows its free descriptors.
#[derive(Clone, Debug)]
pub struct Driver<M> {
    ring: Ring<M>,
    free: Vec<u16>,
    /// The avail idx that the device sees.
    published: u16,
    /// The descriptors of each chain in the device, by head.
    taken: Vec<Vec<u16>>,
}

impl<M: DriverMemory> Driver<M> {
    /// A driver that starts with an empty ring, at the configured avail entry.
    pub fn new(memory: M, config: QueueConfig) -> Self {
        let ring = Ring::new(memory, config);
        ring.clear();
        Self {
            ring,
            free: (0..config.size).rev().collect(),
            published: config.next_avail,
            taken: vec![Vec::new(); config.size.into()],
        }
    }

    /// The raw ring, for a test to read it or to ask for calls.
    pub fn ring(&self) -> &Ring<M> {
        &self.ring
    }

    /// Moves the ring and its contents to the addresses in `config`.
    pub fn move_to(&mut self, config: QueueConfig) {
        self.ring.move_to(config);
    }

    /// The number of free descriptors.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// The head of the next chain, if a descriptor is free.
    pub fn next_head(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Adds a chain and returns its head. The device does not see it yet. With `table`, the
    /// descriptors are in an indirect table at that guest address.
    ///
    /// # Panics
    ///
    /// If there is not enough [`room`](Self::room).
    pub fn add(&mut self, buffers: &[Desc], table: Option<u64>) -> u16 {
        let count = if table.is_some() { 1 } else { buffers.len() };
        let mut taken = self.free.split_off(self.free.len() - count);
        taken.reverse();
        let head = taken[0];
        match table {
            Some(table) => self.ring.put_indirect(head, table, buffers),
            None => {
                for (index, (own, desc)) in taken.iter().zip(buffers).enumerate() {
                    let next = taken.get(index + 1);
                    self.ring.put_desc(*own, next.map_or(*desc, |next| desc.then(*next)));
                }
            }
        }
        self.taken[usize::from(head)] = taken;
        self.ring.put_head(head);
        head
    }

    /// Makes the added chains visible to the device. Returns the avail idx from before, for
    /// [`Ring::needs_kick`].
    pub fn publish(&mut self) -> u16 {
        self.ring.put_avail_idx(self.ring.next_avail);
        std::mem::replace(&mut self.published, self.ring.next_avail)
    }

    /// The avail idx that the device sees.
    pub fn avail_idx(&self) -> u16 {
        self.published
    }

    /// Takes the next used element, if there is one, and frees the descriptors of its chain.
    pub fn take_used(&mut self) -> Option<Used> {
        let used = self.ring.take_used()?;
        let taken = usize::try_from(used.head).ok().and_then(|head| self.taken.get_mut(head));
        if let Some(taken) = taken {
            self.free.extend(std::mem::take(taken).into_iter().rev());
        }
        Some(used)
    }
}
