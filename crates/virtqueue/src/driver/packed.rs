//! The driver's side of a packed virtqueue (virtio 1.3, section 2.8).

use std::sync::atomic::{Ordering, fence};

use super::desc::{Desc, DriverMemory, NEXT, Used};
use crate::split::QueueConfig;

/// The bits of a descriptor's flags that tell its lap (virtio 1.3, section 2.8.1).
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// The wrap counter in a place of 16 bits.
const WRAP: u16 = 1 << 15;

/// The flags of an event structure (virtio 1.3, section 2.8.10).
const EVENTS_ON: u16 = 0;
const EVENTS_OFF: u16 = 1;
const EVENT_AT: u16 = 2;

const DESCRIPTOR_BYTES: u64 = 16;

/// The place of the first descriptor in a new ring.
pub const PACKED_START: u16 = WRAP;

/// A driver that keeps to the rules, knows its free descriptors, and can be made to break rules.
///
/// The configuration's descriptor table is the descriptor ring, its avail ring the driver's event
/// structure, and its used ring the device's. Its `next_avail` is the place of the first chain.
#[derive(Clone, Debug)]
pub struct PackedDriver<M> {
    /// The memory that the ring is in.
    pub memory: M,
    /// The addresses and the size of the ring, and whether event idx was negotiated.
    pub config: QueueConfig,
    /// The place of the next chain: a descriptor, and the wrap counter in the last bit.
    pub next_avail: u16,
    /// The place of the used element to take next.
    pub next_used: u16,
    free: Vec<u16>,
    /// The number of descriptors of each chain in the device, by id.
    counts: Vec<u16>,
    room: u16,
    /// The address and the second word of the first descriptor that the device must not see yet.
    withheld: Option<(u64, u64)>,
    /// The place of the first chain that was not published.
    published: u16,
}

impl<M: DriverMemory> PackedDriver<M> {
    /// A driver that starts with an empty ring.
    pub fn new(memory: M, config: QueueConfig) -> Self {
        let ring = Self {
            memory,
            config,
            next_avail: config.next_avail,
            next_used: config.next_avail,
            free: (0..config.size).rev().collect(),
            counts: vec![0; config.size.into()],
            room: config.size,
            withheld: None,
            published: config.next_avail,
        };
        ring.clear();
        ring
    }

    /// Empties the ring: descriptors of an earlier lap are used.
    fn clear(&self) {
        for slot in 0..self.config.size {
            // Before the first place the lap of its wrap counter, behind it the lap before.
            let is_before = slot < self.config.next_avail & !WRAP;
            let wrap = (self.config.next_avail & WRAP != 0) == is_before;
            self.put_words(slot, 0, u64::from(if wrap { AVAILABLE | USED } else { 0 }) << 48);
        }
        self.put_driver_events(0, EVENTS_ON);
        self.memory.store(self.config.used_ring, &[0; 4]);
    }

    /// The number of free descriptors.
    pub fn room(&self) -> usize {
        self.room.into()
    }

    /// The id of the next chain, if a descriptor is free.
    pub fn next_head(&self) -> Option<u16> {
        self.free.last().copied().filter(|_| self.room > 0)
    }

    /// Adds a chain and returns its id. The device does not see it yet. With `table`, the
    /// descriptors are in an indirect table at that guest address.
    ///
    /// # Panics
    ///
    /// If there is not enough [`room`](Self::room).
    pub fn add(&mut self, buffers: &[Desc], table: Option<u64>) -> u16 {
        let id = self.free.pop().expect("there is room");
        match table {
            None => self.put_chain(id, buffers),
            Some(table) => self.put_indirect(id, table, buffers),
        }
        id
    }

    /// Writes an indirect table, and adds a chain that names it.
    ///
    /// # Panics
    ///
    /// If there is not enough [`room`](Self::room).
    pub fn put_indirect(&mut self, id: u16, table: u64, buffers: &[Desc]) {
        self.put_table(table, buffers);
        self.put_named(id, table, buffers.len());
    }

    /// Writes an indirect table.
    pub fn put_table(&self, table: u64, buffers: &[Desc]) {
        for (at, desc) in (0..).zip(buffers) {
            // Only the flag WRITE is valid there.
            let (addr, rest) = words(*desc, 0, desc.flags);
            let place = table + at * DESCRIPTOR_BYTES;
            self.memory.store(place, &addr.to_le_bytes());
            self.memory.store(place + 8, &rest.to_le_bytes());
        }
    }

    /// Adds a chain that names an indirect table.
    ///
    /// # Panics
    ///
    /// If there is not enough [`room`](Self::room).
    pub fn put_named(&mut self, id: u16, table: u64, entries: usize) {
        self.put_chain(id, &[Desc::table(table, entries)]);
    }

    /// Adds a chain with an id that the caller manages. The device does not see it yet.
    ///
    /// # Panics
    ///
    /// If there is not enough [`room`](Self::room).
    pub fn put_chain(&mut self, id: u16, buffers: &[Desc]) {
        let left = (0..buffers.len()).rev();
        for (desc, left) in buffers.iter().zip(left) {
            let next = if left > 0 { NEXT } else { 0 };
            self.put_next(id, *desc, next);
        }
        self.counts[usize::from(id)] += u16::try_from(buffers.len()).expect("a ring is shorter");
    }

    /// Writes the next descriptor of the ring. Only the last one of a chain has the id (virtio 1.3,
    /// section 2.8.6); a device must not use the ids of earlier ones.
    fn put_next(&mut self, id: u16, desc: Desc, next: u16) {
        assert!(self.room > 0, "the ring has no room");
        let id = if next == 0 { id } else { !id };
        let lap = if self.next_avail & WRAP != 0 { AVAILABLE } else { USED };
        let (addr, rest) = words(desc, id, desc.flags | next | lap);
        let place = self.place_of(self.next_avail & !WRAP);
        self.memory.store(place, &addr.to_le_bytes());
        match self.withheld {
            None => self.withheld = Some((place + 8, rest)),
            Some(_) => self.memory.store(place + 8, &rest.to_le_bytes()),
        }
        self.next_avail = self.step(self.next_avail, 1);
        self.room -= 1;
    }

    /// Makes the added chains visible to the device. Returns the place of the first, for
    /// [`needs_kick`](Self::needs_kick).
    pub fn publish(&mut self) -> u16 {
        if let Some((place, rest)) = self.withheld.take() {
            // The rest of the chains is there before the flags of the first descriptor.
            fence(Ordering::Release);
            self.memory.store(place, &rest.to_le_bytes());
        }
        std::mem::replace(&mut self.published, self.next_avail)
    }

    /// Returns true if the device wants a kick for the chains that were published since `old`, at
    /// most one lap ago.
    pub fn needs_kick(&self, old: u16) -> bool {
        fence(Ordering::SeqCst);
        let (place, flags) = self.device_events();
        match flags & 3 {
            EVENTS_OFF => false,
            EVENT_AT if self.config.event_idx => {
                self.ahead(old, place) < self.ahead(old, self.published)
            }
            _ => true,
        }
    }

    /// The device's event structure: a place, and flags.
    pub fn device_events(&self) -> (u16, u16) {
        let mut bytes = [0; 4];
        self.memory.load(self.config.used_ring, &mut bytes);
        let [p0, p1, f0, f1] = bytes;
        (u16::from_le_bytes([p0, p1]), u16::from_le_bytes([f0, f1]))
    }

    /// Gives the driver's event structure any content.
    pub fn put_driver_events(&self, place: u16, flags: u16) {
        let ([p0, p1], [f0, f1]) = (place.to_le_bytes(), flags.to_le_bytes());
        self.memory.store(self.config.avail_ring, &[p0, p1, f0, f1]);
    }

    /// Asks for a call with the next used element. Afterwards, the caller must check for elements
    /// that are there already.
    pub fn enable_calls(&self) {
        match self.config.event_idx {
            true => self.put_driver_events(self.next_used, EVENT_AT),
            false => self.put_driver_events(0, EVENTS_ON),
        }
        fence(Ordering::SeqCst);
    }

    /// Asks for a call with the used element `later` descriptors behind the next one.
    pub fn ask_for_call(&self, later: u16) {
        self.put_driver_events(self.step(self.next_used, later), EVENT_AT);
    }

    /// Asks for no calls.
    pub fn disable_calls(&self) {
        self.put_driver_events(0, EVENTS_OFF);
    }

    /// Returns true if there is a used element to take.
    pub fn has_used(&self) -> bool {
        let flags = self.flags(self.next_used & !WRAP);
        let expected = if self.next_used & WRAP != 0 { AVAILABLE | USED } else { 0 };
        flags & (AVAILABLE | USED) == expected
    }

    /// Takes the next used element, if there is one, and frees the descriptors of its chain. An
    /// element with an id of no chain frees one descriptor, as the caller will report.
    pub fn take_used(&mut self) -> Option<Used> {
        let used = self.take_element()?;
        if let Ok(id) = u16::try_from(used.head)
            && id < self.config.size
        {
            self.free.push(id);
        }
        Some(used)
    }

    /// Like [`take_used`](Self::take_used), for ids that the caller manages.
    pub fn take_element(&mut self) -> Option<Used> {
        if !self.has_used() {
            return None;
        }
        // The element is read after its flags, before which the device wrote it.
        fence(Ordering::Acquire);
        let mut bytes = [0; 8];
        self.memory.load(self.place_of(self.next_used & !WRAP) + 8, &mut bytes);
        let [l0, l1, l2, l3, i0, i1, ..] = bytes;
        let id = u16::from_le_bytes([i0, i1]);
        let count = self.counts.get_mut(usize::from(id)).map_or(0, std::mem::take).max(1);
        self.next_used = self.step(self.next_used, count);
        self.room = (self.room + count).min(self.config.size);
        Some(Used { head: id.into(), bytes: u32::from_le_bytes([l0, l1, l2, l3]) })
    }

    /// Gives a descriptor any content, at once.
    pub fn put_desc(&self, slot: u16, desc: Desc, id: u16, flags: u16) {
        let (addr, rest) = words(desc, id, flags);
        self.put_words(slot, addr, rest);
    }

    /// The flags of a descriptor.
    pub fn flags(&self, slot: u16) -> u16 {
        let mut bytes = [0; 2];
        self.memory.load(self.place_of(slot) + 14, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// Copies the ring and its contents to the addresses in `config`, and continues there.
    pub fn move_to(&mut self, config: QueueConfig) {
        let ring = DESCRIPTOR_BYTES * u64::from(config.size);
        for (from, to, bytes) in [
            (self.config.desc_table, config.desc_table, ring),
            (self.config.avail_ring, config.avail_ring, 4),
            (self.config.used_ring, config.used_ring, 4),
        ] {
            let mut content = vec![0; usize::try_from(bytes).expect("64 bits")];
            self.memory.load(from, &mut content);
            self.memory.store(to, &content);
        }
        self.config = config;
    }

    fn put_words(&self, slot: u16, addr: u64, rest: u64) {
        let place = self.place_of(slot);
        self.memory.store(place, &addr.to_le_bytes());
        self.memory.store(place + 8, &rest.to_le_bytes());
    }

    fn place_of(&self, slot: u16) -> u64 {
        self.config.desc_table + DESCRIPTOR_BYTES * u64::from(slot)
    }

    /// The place behind the last chain that the device sees.
    pub fn published(&self) -> u16 {
        self.published
    }

    /// The number of descriptors of the chain with this id, if the device has it.
    pub fn descriptors_of(&self, id: u16) -> u16 {
        self.counts[usize::from(id)]
    }

    /// Returns the place `count` descriptors later, at most one lap.
    pub fn step(&self, place: u16, count: u16) -> u16 {
        let next = (place & !WRAP) + count;
        match next.checked_sub(self.config.size) {
            None => next | place & WRAP,
            Some(next) => next | !place & WRAP,
        }
    }

    /// The number of descriptors from a place to another, which is less than two laps ahead.
    pub fn ahead(&self, from: u16, to: u16) -> u16 {
        let lap = if (from ^ to) & WRAP == 0 { 0 } else { self.config.size };
        (lap + (to & !WRAP) + 2 * self.config.size - (from & !WRAP)) % (2 * self.config.size)
    }
}

/// The two words of a descriptor.
fn words(desc: Desc, id: u16, flags: u16) -> (u64, u64) {
    (desc.addr, u64::from(desc.len) | u64::from(id) << 32 | u64::from(flags) << 48)
}
