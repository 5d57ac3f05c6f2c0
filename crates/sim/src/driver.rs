//! The driver's side of one split virtqueue (virtio 1.3, section 2.7).

use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use ringhaul::queue::Ring;
use virtqueue::GuestMemory;

pub(crate) const F_NEXT: u16 = 1;
pub(crate) const F_WRITE: u16 = 2;
pub(crate) const F_INDIRECT: u16 = 4;

/// A buffer of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) writable: bool,
}

pub(crate) struct Driver {
    memory: Rc<GuestMemory>,
    pub(crate) ring: Ring,
    event_idx: bool,
    free: Vec<u16>,
    /// The avail idx as the device sees it, and with what was added since.
    published: u16,
    added: u16,
    next_used: u16,
    /// Descriptors of each head that is out.
    taken: Vec<Vec<u16>>,
}

impl Driver {
    /// A driver that starts with an empty ring, at the ring's next avail entry.
    pub(crate) fn new(memory: Rc<GuestMemory>, ring: Ring, event_idx: bool) -> Self {
        let (size, first) = (ring.size, ring.next_avail);
        let mut driver = Self {
            memory,
            ring,
            event_idx,
            free: (0..size).rev().collect(),
            published: first,
            added: first,
            next_used: first,
            taken: vec![Vec::new(); size.into()],
        };
        driver.clear_ring();
        driver
    }

    /// The rings of a driver that starts.
    fn clear_ring(&mut self) {
        let entries = u64::from(self.ring.size);
        for at in 0..entries + 3 {
            self.store(self.ring.avail_ring + 2 * at, 0);
        }
        for at in 0..4 * entries + 3 {
            self.store(self.ring.used_ring + 2 * at, 0);
        }
        self.store(self.ring.avail_ring + 2, self.added);
        self.store(self.ring.used_ring + 2, self.next_used);
    }

    /// Has its rings elsewhere from now on.
    pub(crate) fn move_to(&mut self, ring: Ring) {
        let entries = u64::from(ring.size);
        for (from, to, words) in [
            (self.ring.desc_table, ring.desc_table, 8 * entries),
            (self.ring.avail_ring, ring.avail_ring, entries + 3),
            (self.ring.used_ring, ring.used_ring, 4 * entries + 3),
        ] {
            (0..words).for_each(|word| self.store(to + 2 * word, self.load(from + 2 * word)));
        }
        self.ring = ring;
    }

    fn load(&self, addr: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.read(addr, &mut bytes).expect("the rings are mapped");
        u16::from_le_bytes(bytes)
    }

    fn store(&self, addr: u64, value: u16) {
        self.memory.write(addr, &value.to_le_bytes()).expect("the rings are mapped");
    }

    fn entry(&self, index: u16) -> u64 {
        u64::from(index % self.ring.size)
    }

    /// Descriptors that are left.
    pub(crate) fn room(&self) -> usize {
        self.free.len()
    }

    /// The head that the next chain will have.
    pub(crate) fn next_head(&self) -> Option<u16> {
        self.free.last().copied()
    }

    fn descriptor(&self, addr: u64, (buffer, len, flags, next): (u64, u32, u16, u16)) {
        let mut bytes = buffer.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.memory.write(addr, &bytes).expect("descriptors are in mapped memory");
    }

    /// Adds a chain. The device does not see it yet. With `table`, the descriptors are there.
    pub(crate) fn add(&mut self, pieces: &[Piece], table: Option<u64>) -> u16 {
        let count = if table.is_some() { 1 } else { pieces.len() };
        let taken = self.free.split_off(self.free.len() - count);
        let taken: Vec<u16> = taken.into_iter().rev().collect();
        let head = taken[0];
        for (index, piece) in pieces.iter().enumerate() {
            let is_last = index + 1 == pieces.len();
            let flags = if piece.writable { F_WRITE } else { 0 } | if is_last { 0 } else { F_NEXT };
            let (at, next) = match table {
                Some(table) => {
                    (table + 16 * index as u64, u16::try_from(index + 1).unwrap_or(u16::MAX))
                }
                None => (
                    self.ring.desc_table + 16 * u64::from(taken[index]),
                    taken.get(index + 1).copied().unwrap_or(0),
                ),
            };
            let next = if is_last { 0 } else { next };
            self.descriptor(at, (piece.addr, piece.len, flags, next));
        }
        if let Some(table) = table {
            let len = u32::try_from(16 * pieces.len()).unwrap_or(u32::MAX);
            let at = self.ring.desc_table + 16 * u64::from(head);
            self.descriptor(at, (table, len, F_INDIRECT, 0));
        }
        self.taken[usize::from(head)] = taken;
        self.store(self.ring.avail_ring + 4 + 2 * self.entry(self.added), head);
        self.added = self.added.wrapping_add(1);
        head
    }

    /// Shows the device what was added. Returns what [`wants_kick`](Self::wants_kick) asks for.
    pub(crate) fn publish(&mut self) -> u16 {
        let old = self.published;
        fence(Ordering::Release);
        self.store(self.ring.avail_ring + 2, self.added);
        self.published = self.added;
        old
    }

    /// Whether the device wants a kick for what was published since `old`.
    pub(crate) fn wants_kick(&self, old: u16) -> bool {
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.load(self.ring.used_ring + 4 + 8 * u64::from(self.ring.size));
            need_event(event, self.published, old)
        } else {
            self.load(self.ring.used_ring) & 1 == 0
        }
    }

    pub(crate) fn used_idx(&self) -> u16 {
        self.load(self.ring.used_ring + 2)
    }

    pub(crate) fn avail_idx(&self) -> u16 {
        self.published
    }

    pub(crate) fn has_used(&self) -> bool {
        self.used_idx() != self.next_used
    }

    /// The next used element: id and length. The descriptors of its chain are free then.
    pub(crate) fn take_used(&mut self) -> Option<(u32, u32)> {
        if !self.has_used() {
            return None;
        }
        fence(Ordering::Acquire);
        let at = self.ring.used_ring + 4 + 8 * self.entry(self.next_used);
        let mut element = [0; 8];
        self.memory.read(at, &mut element).expect("the rings are mapped");
        self.next_used = self.next_used.wrapping_add(1);
        let [a, b, c, d, len @ ..] = element;
        let id = u32::from_le_bytes([a, b, c, d]);
        if let Some(taken) = usize::try_from(id).ok().and_then(|id| self.taken.get_mut(id)) {
            self.free.extend(std::mem::take(taken).into_iter().rev());
        }
        Some((id, u32::from_le_bytes(len)))
    }

    /// Asks for a call with the next used element. Those that are there already must be looked for
    /// afterwards.
    pub(crate) fn enable_calls(&self) {
        if self.event_idx {
            let event = self.ring.avail_ring + 4 + 2 * u64::from(self.ring.size);
            self.store(event, self.next_used);
        } else {
            self.store(self.ring.avail_ring, 0);
        }
        fence(Ordering::SeqCst);
    }

    /// Says that no calls are needed for now. With event idx the event falls behind by itself.
    pub(crate) fn disable_calls(&self) {
        if !self.event_idx {
            self.store(self.ring.avail_ring, 1);
        }
    }
}

/// Whether the step from `old` to `new` passes `event` (virtio 1.3, section 2.7.7.1).
fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
