//! The driver's side of a ring of either layout.
//!
//! A *place* in a ring is 16 bits: an index of a split ring, or a descriptor of a packed ring with
//! the wrap counter in the last bit.

use std::rc::Rc;

use device::Ring;
use iomem::fits;
use virtqueue::driver::{Desc, Driver, PACKED_START, PackedDriver, Used};
use virtqueue::{QueueConfig, RingLayout};

use crate::plan::Plan;
use crate::ram::Ram;

type Memory = Rc<Ram>;

pub(super) enum GuestRing {
    Split(Driver<Memory>),
    Packed(PackedDriver<Memory>),
}

use GuestRing::{Packed, Split};

/// The place of the first chain of a new ring.
pub(super) fn first_place(plan: &Plan) -> u16 {
    match plan.layout() {
        RingLayout::Split => plan.first_index(),
        RingLayout::Packed => PACKED_START,
    }
}

/// The driver's configuration of a ring.
fn config(plan: &Plan, ring: Ring) -> QueueConfig {
    ring.config(plan.event_idx > 0, plan.indirect > 0)
}

/// The base of a new ring.
pub(crate) fn first_base(plan: &Plan) -> u32 {
    match plan.layout() {
        RingLayout::Split => plan.first_index().into(),
        // As User Mode Linux states it.
        RingLayout::Packed if plan.first_index == 1 => 0,
        RingLayout::Packed => base(plan, PACKED_START, PACKED_START),
    }
}

/// The base of a ring at these places of the next used element and of the next chain.
fn base(plan: &Plan, used: u16, next: u16) -> u32 {
    match plan.layout() {
        RingLayout::Split => next.into(),
        RingLayout::Packed => u32::from(next) | u32::from(used) << 16,
    }
}

/// `ring` at this base.
pub(super) fn at_base(plan: &Plan, ring: Ring, base: u32) -> Ring {
    let [n0, n1, u0, u1] = base.to_le_bytes();
    let next_used = match plan.layout() {
        RingLayout::Split => 0,
        RingLayout::Packed => u16::from_le_bytes([u0, u1]),
    };
    Ring { next_avail: u16::from_le_bytes([n0, n1]), next_used, ..ring }
}

impl GuestRing {
    /// A driver that starts with an empty ring.
    pub(super) fn new(plan: &Plan, memory: Memory, ring: Ring) -> Self {
        let config = config(plan, ring);
        match plan.layout() {
            RingLayout::Split => Split(Driver::new(memory, config)),
            RingLayout::Packed => Packed(PackedDriver::new(memory, config)),
        }
    }

    /// The number of free descriptors.
    pub(super) fn room(&self) -> usize {
        match self {
            Split(driver) => driver.room(),
            Packed(driver) => driver.room(),
        }
    }

    /// The head of the next chain, if a descriptor is free.
    pub(super) fn next_head(&self) -> Option<u16> {
        match self {
            Split(driver) => driver.next_head(),
            Packed(driver) => driver.next_head(),
        }
    }

    /// Adds a chain. The device does not see it yet.
    pub(super) fn add(&mut self, buffers: &[Desc], table: Option<u64>) {
        match self {
            Split(driver) => driver.add(buffers, table),
            Packed(driver) => driver.add(buffers, table),
        };
    }

    /// Makes the added chains visible to the device. Returns the place of the first.
    pub(super) fn publish(&mut self) -> u16 {
        match self {
            Split(driver) => driver.publish(),
            Packed(driver) => driver.publish(),
        }
    }

    /// True if the device wants a kick for the chains from this place on.
    pub(super) fn needs_kick(&self, from: u16) -> bool {
        match self {
            Split(driver) => driver.ring().needs_kick(from),
            Packed(driver) => driver.needs_kick(from),
        }
    }

    pub(super) fn has_used(&self) -> bool {
        match self {
            Split(driver) => driver.ring().has_used(),
            Packed(driver) => driver.has_used(),
        }
    }

    pub(super) fn take_used(&mut self) -> Option<Used> {
        match self {
            Split(driver) => driver.take_used(),
            Packed(driver) => driver.take_used(),
        }
    }

    /// Asks for a call with the next used element.
    pub(super) fn enable_calls(&self) {
        match self {
            Split(driver) => driver.ring().enable_calls(),
            Packed(driver) => driver.enable_calls(),
        }
    }

    /// Asks for no calls, unless the wish for one ends by itself.
    pub(super) fn disable_calls(&self) {
        match self {
            // With event idx, the used event falls behind.
            Split(driver) if driver.ring().config.event_idx => {}
            Split(driver) => driver.ring().disable_calls(),
            Packed(driver) => driver.disable_calls(),
        }
    }

    /// Moves the ring and its contents to the addresses in `ring`.
    pub(super) fn move_to(&mut self, plan: &Plan, ring: Ring) {
        let config = config(plan, ring);
        match self {
            Split(driver) => driver.move_to(config),
            Packed(driver) => driver.move_to(config),
        }
    }

    /// The place of the next chain, visible or not.
    pub(super) fn next_place(&self) -> u16 {
        match self {
            Split(driver) => driver.ring().next_avail,
            Packed(driver) => driver.next_avail,
        }
    }

    /// The place behind the last chain that the device sees.
    pub(super) fn end(&self) -> u16 {
        match self {
            Split(driver) => driver.avail_idx(),
            Packed(driver) => driver.published(),
        }
    }

    /// The place behind the last used element that the driver can see.
    pub(super) fn used_place(&self) -> u16 {
        match self {
            Split(driver) => driver.ring().used_idx(),
            Packed(driver) => Self::all_taken(driver).0,
        }
    }

    /// The heads of used elements that the driver can see and has not taken.
    pub(super) fn unseen(&self) -> Vec<u32> {
        match self {
            Split(driver) => {
                let ring = driver.ring();
                let count = ring.used_idx().wrapping_sub(ring.next_used);
                (0..count).map(|at| ring.used(ring.next_used.wrapping_add(at)).head).collect()
            }
            Packed(driver) => Self::all_taken(driver).1,
        }
    }

    /// The place and the heads after a driver has taken all used elements.
    fn all_taken(driver: &PackedDriver<Memory>) -> (u16, Vec<u32>) {
        if !driver.has_used() {
            return (driver.next_used, Vec::new());
        }
        let mut later = driver.clone();
        let heads = std::iter::from_fn(|| later.take_used()).map(|used| used.head).collect();
        (later.next_used, heads)
    }

    /// The base at which a device has stopped that has left these heads in its region.
    pub(super) fn base(&self, plan: &Plan, left: &[usize]) -> u32 {
        let used = self.used_place();
        let next = match self {
            Split(_) => used.wrapping_add(fits(left.len(), "a number of chains")),
            Packed(driver) => left.iter().fold(used, |place, head| {
                driver.step(place, driver.descriptors_of(fits(*head, "a head")))
            }),
        };
        base(plan, used, next)
    }

    /// True if a device that takes the chain at `next` now has more chains to take before `end`.
    pub(super) fn has_more(&self, next: u16, end: u16) -> bool {
        match self {
            Split(_) => end.wrapping_sub(next).cast_signed() > 0,
            // The device is ahead of `end` by less than it is behind the last chain.
            Packed(driver) => {
                let last = driver.published();
                driver.ahead(next, last) > driver.ahead(end, last)
            }
        }
    }

    /// True if a device that takes the chain at `next` now has taken the chain at `place`, which is
    /// not answered.
    pub(super) fn has_taken(&self, next: u16, place: u16) -> bool {
        match self {
            Split(_) => next.wrapping_sub(place).cast_signed() > 0,
            Packed(driver) => {
                let taken = driver.ahead(place, next);
                (1..=driver.config.size).contains(&taken)
            }
        }
    }
}
