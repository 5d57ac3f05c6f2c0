//! A ring of either layout, from the driver's side. Each slot has a place of its own: descriptors
//! of a split ring, an id of a packed one.

#![forbid(unsafe_code)]

use std::sync::Arc;

use iomem::fits;
use virtqueue::QueueConfig;
use virtqueue::driver::{Desc, PackedDriver, Ring};

use crate::memory::SharedMemory;

pub(crate) enum DriverRing {
    /// With the number of descriptors of a slot.
    Split(Ring<Arc<SharedMemory>>, u32),
    Packed(PackedDriver<Arc<SharedMemory>>),
}

impl DriverRing {
    pub(crate) fn new(
        memory: Arc<SharedMemory>,
        config: QueueConfig,
        is_packed: bool,
        descriptors_per_slot: u32,
    ) -> Self {
        match is_packed {
            true => Self::Packed(PackedDriver::new(memory, config)),
            false => Self::Split(Ring::new(memory, config), descriptors_per_slot),
        }
    }

    pub(crate) fn config(&self) -> &QueueConfig {
        match self {
            Self::Split(ring, _) => &ring.config,
            Self::Packed(ring) => &ring.config,
        }
    }

    /// The place of the next chain, for [`needs_kick`](Self::needs_kick).
    #[inline]
    pub(crate) fn next_avail(&self) -> u16 {
        match self {
            Self::Split(ring, _) => ring.next_avail,
            Self::Packed(ring) => ring.next_avail,
        }
    }

    #[inline]
    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        match self {
            Self::Split(ring, _) => &ring.memory,
            Self::Packed(ring) => &ring.memory,
        }
    }

    /// Makes the chain of a slot available. `table` is the guest address of the slot's indirect
    /// table, for a queue that negotiated indirect tables.
    #[inline]
    pub(crate) fn offer(&mut self, slot: u32, chain: &[Desc], table: u64) {
        let is_indirect = self.config().indirect;
        match self {
            Self::Split(ring, per_slot) => {
                let head = fits(slot * *per_slot, "the number of a descriptor");
                match is_indirect {
                    true => ring.put_indirect(head, table, chain),
                    false => ring.put_chain(head, chain),
                }
                ring.offer(head);
            }
            Self::Packed(ring) => {
                let id = fits(slot, "the number of a slot");
                match is_indirect {
                    true => ring.put_indirect(id, table, chain),
                    false => ring.put_chain(id, chain),
                }
                ring.publish();
            }
        }
    }

    /// Takes the next used element, if there is one. Returns its slot; `None` inside if it is of no
    /// slot.
    #[inline]
    pub(crate) fn take_used(&mut self) -> Option<Option<u32>> {
        match self {
            Self::Split(ring, per_slot) => {
                let head = ring.take_used()?.head;
                Some(head.is_multiple_of(*per_slot).then_some(head / *per_slot))
            }
            Self::Packed(ring) => Some(Some(ring.take_element()?.head)),
        }
    }

    #[inline]
    pub(crate) fn has_used(&self) -> bool {
        match self {
            Self::Split(ring, _) => ring.has_used(),
            Self::Packed(ring) => ring.has_used(),
        }
    }

    /// Returns true if the device wants a kick for the chains since `old`.
    #[inline]
    pub(crate) fn needs_kick(&self, old: u16) -> bool {
        match self {
            Self::Split(ring, _) => ring.needs_kick(old),
            Self::Packed(ring) => ring.needs_kick(old),
        }
    }

    pub(crate) fn enable_calls(&self) {
        match self {
            Self::Split(ring, _) => ring.enable_calls(),
            Self::Packed(ring) => ring.enable_calls(),
        }
    }

    /// Asks for no calls. With event idx, a split ring keeps the armed position where it was, so
    /// this must come before completions are taken. Otherwise the server would make one more call.
    pub(crate) fn disable_calls(&self) {
        match self {
            Self::Split(ring, _) if ring.config.event_idx => ring.put_used_event(ring.next_used),
            Self::Split(ring, _) => ring.disable_calls(),
            Self::Packed(ring) => ring.disable_calls(),
        }
    }
}
