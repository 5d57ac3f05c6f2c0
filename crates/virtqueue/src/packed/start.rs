//! The start of a packed queue, and its move to another memory map.

use std::sync::Arc;

use super::{NOT_IN_DEVICE, PackedQueue, SeenChains};
use crate::avail_idx::{AvailIdx, Progress};
use crate::descriptor_ring::{DescriptorRing, EventSuppression, PackedParts, UsedWord};
use crate::error::{QueueError, RingPart};
use crate::inflight::{InflightAccount, PackedInflight, Recovery};
use crate::memory::{DESCRIPTOR_BYTES, LocalMemory, MAX_QUEUE_SIZE, Translator};
use crate::position::{DESC_F_LAP, Position};
use crate::queue_memory::QueueMemory;
use crate::split::QueueConfig;

impl PackedQueue {
    /// Takes over a queue that the driver has set up, and disables kicks. The first `publish` asks
    /// for a call.
    ///
    /// The configuration's descriptor table is the descriptor ring, its avail ring the driver's
    /// event structure, and its used ring the device's. `next_avail` and `next_used` are
    /// descriptors with a wrap counter in the last bit, 0x8000 in a new ring. User Mode Linux
    /// states 0 for both in a new ring. The ring tells that from a place that it has come to.
    ///
    /// # Errors
    ///
    /// If the size is 0 or more than [`MAX_QUEUE_SIZE`], a place is not in the ring, both places
    /// differ, or a part is misaligned or not within one memory region. Descriptors between the
    /// places are in the device, but the ring does not tell which requests they belong to.
    pub fn new(
        memory: LocalMemory,
        config: QueueConfig,
        next_used: u16,
    ) -> Result<Self, QueueError> {
        Self::at_base(memory, config, next_used)?.without_requests()
    }

    /// Refuses a queue with requests that no account has: they would have no answer.
    fn without_requests(self) -> Result<Self, QueueError> {
        match self.config.size - self.room {
            0 => Ok(self),
            descriptors => Err(QueueError::NoAccountOfRequests { descriptors }),
        }
    }

    /// Takes over a queue at the places that the front-end states.
    fn at_base(
        memory: LocalMemory,
        config: QueueConfig,
        next_used: u16,
    ) -> Result<Self, QueueError> {
        let QueueConfig { size, .. } = config;
        if size == 0 || size > MAX_QUEUE_SIZE {
            return Err(QueueError::Size { size, max: MAX_QUEUE_SIZE });
        }
        let (mut next, mut used) =
            (Position::from_bits(config.next_avail), Position::from_bits(next_used));
        for Position { slot, .. } in [next, used] {
            if slot >= size {
                return Err(QueueError::Base { slot, size });
            }
        }
        let taken = used.distance(next, size);
        if taken > size {
            return Err(QueueError::Base { slot: next.slot, size });
        }
        let (translator, ring) = map_parts(memory, &config)?;
        if (config.next_avail, next_used) == (0, 0) && is_new(&ring) {
            (next, used) = (Position::START, Position::START);
        }
        ring.store_device_suppression(EventSuppression::Never);
        Ok(Self {
            memory: QueueMemory::new(translator),
            ring,
            config,
            next,
            used,
            published: used,
            first: UsedWord::default(),
            unpublished: 0,
            room: size - taken,
            chains: vec![NOT_IN_DEVICE; size.into()].into(),
            in_device: 0,
            popped: 0,
            seen: SeenChains::none(next),
            checked: used,
            unchecked: 0,
            call_forced: true,
            recovered: 0,
            inflight: None,
            progress: None,
        })
    }

    /// Takes over a queue whose requests are marked in an inflight region. If the region knows the
    /// ring, the queue continues from it. The chains that an earlier process took and did not
    /// answer come first, in the order in which they were taken.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new), and if the region is invalid. The places may differ if the region
    /// knows the ring.
    pub fn with_inflight(
        memory: LocalMemory,
        config: QueueConfig,
        next_used: u16,
        inflight: &InflightAccount,
    ) -> Result<(Self, Recovery), QueueError> {
        let mut queue = Self::at_base(memory, config, next_used)?;
        let (inflight, recovery, used) = PackedInflight::open(inflight, &queue.ring, queue.used)?;
        if let Recovery::Known { requests } = recovery {
            let taken = inflight.descriptors_again();
            let next = used.after(taken, config.size);
            (queue.used, queue.published, queue.checked) = (used, used, used);
            (queue.next, queue.seen) = (next, SeenChains::none(next));
            queue.room = config.size - taken;
            queue.recovered = requests;
        } else {
            queue = queue.without_requests()?;
        }
        queue.inflight = Some(Box::new(inflight));
        Ok((queue, recovery))
    }

    /// Continues in a changed memory map, in which the ring has the same guest addresses. Chains
    /// that were popped keep the old map.
    ///
    /// # Errors
    ///
    /// As for [`PackedQueue::new`]. The queue then keeps the old map.
    pub fn set_memory(&mut self, memory: LocalMemory) -> Result<(), QueueError> {
        let (translator, ring) = map_parts(memory, &self.config)?;
        self.memory.replace(translator);
        self.ring = ring;
        Ok(())
    }

    /// Returns a handle with which other threads learn the driver's progress.
    pub fn avail_idx(&mut self) -> AvailIdx {
        let (number, next) = (self.next_in_ring(), self.next);
        let progress = self.progress.get_or_insert_with(|| Arc::new(Progress::new(number, next)));
        let QueueConfig { desc_table, size, .. } = self.config;
        AvailIdx::packed(self.memory.map(), desc_table, size, Arc::clone(progress))
    }
}

/// Returns true if no lap of the ring has ended: each descriptor is of the first lap and not used,
/// or was never written.
fn is_new(ring: &DescriptorRing) -> bool {
    (0..ring.size).all(|slot| {
        let flags = ring.flags(slot) & DESC_F_LAP;
        flags == 0 || flags == Position::START.available_flags()
    })
}

fn map_parts(
    memory: LocalMemory,
    config: &QueueConfig,
) -> Result<(Translator, DescriptorRing), QueueError> {
    let QueueConfig { size, desc_table, avail_ring, used_ring, event_idx, .. } = *config;
    let ring = DescriptorRing::new(
        &memory,
        &PackedParts {
            size,
            descriptors: desc_table,
            driver_events: avail_ring,
            device_events: used_ring,
            event_idx,
        },
    )?;
    let len = usize::from(size) * DESCRIPTOR_BYTES;
    let part = RingPart::DescTable;
    let translator = Translator::new(memory, desc_table, size).ok_or(QueueError::Unmapped {
        part,
        addr: desc_table,
        len,
    })?;
    Ok((translator, ring))
}
