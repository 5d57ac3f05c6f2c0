//! The number of chains that the driver has made available, for any thread.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};

use crate::chain::DESC_F_NEXT;
use crate::memory::{DESCRIPTOR_BYTES, GuestMemory, LocalMemory};
use crate::position::Position;
use crate::rings::RING_IDX;

/// The offset of the flags in a descriptor of a packed ring.
const DESC_FLAGS: u64 = 14;

/// The avail idx of a queue, for any thread. Does not keep the memory map alive.
#[derive(Debug)]
pub struct AvailIdx {
    memory: Weak<GuestMemory>,
    place: AvailPlace,
}

#[derive(Debug)]
enum AvailPlace {
    /// The guest address of the index.
    Split(u64),
    Packed(PackedPlace),
}

#[derive(Debug)]
struct PackedPlace {
    /// The guest address of the descriptor ring.
    ring: u64,
    size: u16,
    progress: Arc<Progress>,
}

/// The next chain that a packed queue pops from its ring: the number of chains before it, and its
/// place.
#[derive(Debug)]
pub(crate) struct Progress(AtomicU64);

#[derive(Debug, Clone, Copy)]
struct NextChain {
    /// The number of chains before it. It wraps.
    number: u32,
    place: Position,
}

impl Progress {
    pub(crate) fn new(number: u32, place: Position) -> Self {
        Self(AtomicU64::new(Self::word(number, place)))
    }

    /// Notes the next chain, before any chain before it is answered.
    #[inline]
    pub(crate) fn store(&self, number: u32, place: Position) {
        self.0.store(Self::word(number, place), Ordering::Release);
        // A thread that reads a used element also sees this progress, since it was stored before.
        fence(Ordering::Release);
    }

    fn load(&self) -> NextChain {
        let [p0, p1, n0, n1, n2, n3, ..] = self.0.load(Ordering::Acquire).to_le_bytes();
        NextChain {
            number: u32::from_le_bytes([n0, n1, n2, n3]),
            place: Position::from_bits(u16::from_le_bytes([p0, p1])),
        }
    }

    #[inline]
    fn word(number: u32, place: Position) -> u64 {
        u64::from(number) << 16 | u64::from(place.bits())
    }
}

impl AvailIdx {
    pub(crate) fn split(memory: &LocalMemory, avail_ring: u64) -> Self {
        let place = AvailPlace::Split(avail_ring + RING_IDX as u64);
        Self { memory: Arc::downgrade(memory.shared()), place }
    }

    pub(crate) fn packed(
        memory: &LocalMemory,
        ring: u64,
        size: u16,
        progress: Arc<Progress>,
    ) -> Self {
        let place = AvailPlace::Packed(PackedPlace { ring, size, progress });
        Self { memory: Arc::downgrade(memory.shared()), place }
    }

    /// Returns the avail entry behind the last chain that the driver made available; of a packed
    /// ring, the number of these chains. The result covers all chains from before any action of the
    /// driver that this thread has seen. `None` if the map is gone.
    pub fn load(&self) -> Option<u16> {
        let memory = self.memory.upgrade()?;
        match &self.place {
            AvailPlace::Split(addr) => load_word(&memory, *addr),
            AvailPlace::Packed(place) => place.count(|slot| {
                let descriptor = place.ring + u64::from(slot) * DESCRIPTOR_BYTES as u64;
                load_word(&memory, descriptor + DESC_FLAGS)
            }),
        }
    }
}

impl PackedPlace {
    /// Returns the number of chains up to the first descriptor that is not available, by the flags
    /// of descriptors. The queue may pop these chains at the same time: the count then continues at
    /// its new place, since used elements may be in the old one.
    fn count(&self, mut flags: impl FnMut(u16) -> Option<u16>) -> Option<u16> {
        let first = self.progress.load();
        let mut next = first;
        // The ring had no more chains at the start. A longer count would chase a busy driver.
        while next.number.wrapping_sub(first.number) < self.size.into() {
            let end = self.end_of_chain(&mut flags, next.place)?;
            // Reads of flags come before this read of the progress.
            fence(Ordering::Acquire);
            let now = self.progress.load();
            if now.number.wrapping_sub(next.number).cast_signed() > 0 {
                next = now;
            } else if let Some(place) = end {
                next = NextChain { number: next.number.wrapping_add(1), place };
            } else {
                break;
            }
        }
        let [low, high, ..] = next.number.to_le_bytes();
        Some(u16::from_le_bytes([low, high]))
    }

    /// Returns the place behind the chain at `place`, or `Some(None)` if no chain is there. `None`
    /// if the ring is not mapped.
    fn end_of_chain(
        &self,
        mut flags: impl FnMut(u16) -> Option<u16>,
        mut place: Position,
    ) -> Option<Option<Position>> {
        let mut present = flags(place.slot)?;
        if !place.is_available(present) {
            return Some(None);
        }
        for _ in 1..self.size {
            place = place.after(1, self.size);
            if present & DESC_F_NEXT == 0 {
                return Some(Some(place));
            }
            present = flags(place.slot)?;
        }
        Some(Some(place.after(1, self.size)))
    }
}

fn load_word(memory: &GuestMemory, addr: u64) -> Option<u16> {
    let mut bytes = [0; 2];
    memory.read(addr, &mut bytes).ok()?;
    Some(u16::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::device_queue::DeviceQueue;
    use crate::driver::{Desc, PACKED_START, PackedDriver};
    use crate::packed::PackedQueue;
    use crate::split::QueueConfig;

    const SIZE: u16 = 7;
    const RING: QueueConfig = QueueConfig {
        size: SIZE,
        desc_table: 0x1000,
        avail_ring: 0x2000,
        used_ring: 0x3000,
        event_idx: false,
        indirect: false,
        next_avail: PACKED_START,
    };

    /// A count that begins again each time would have no end, and one that stops at a used element
    /// would lack chains.
    #[test]
    fn chains_are_counted_while_the_queue_answers_one_after_each_read() {
        let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x10000)]).unwrap());
        let mut driver = PackedDriver::new(Arc::clone(&memory), RING);
        let local = LocalMemory::new(Arc::clone(&memory));
        let mut queue = PackedQueue::new(local, RING, PACKED_START).unwrap();
        let AvailPlace::Packed(place) = queue.avail_idx().place else { panic!("it is packed") };
        let offered = Cell::new(0);
        let offer = |driver: &mut PackedDriver<_>, length: u16| {
            if driver.room() >= length.into() {
                driver.add(&vec![Desc::writable(0x8000, 1); length.into()], None);
                driver.publish();
                offered.set(offered.get() + 1);
            }
        };
        for round in 0..100 {
            (0..SIZE).for_each(|at| offer(&mut driver, (at + round) % 3 + 1));
            let (mut reads, least) = (0, offered.get());
            let counted = place.count(|slot| {
                let flags = driver.flags(slot);
                reads += 1;
                assert!(reads < 1000, "it has no end");
                if reads % (round % 4 + 1) == 0
                    && let Some(chain) = queue.pop().unwrap()
                {
                    queue.push(chain.head, 0);
                    let _ = queue.publish();
                    driver.take_used().unwrap();
                    offer(&mut driver, reads % 3 + 1);
                }
                Some(flags)
            });
            let range = least..=offered.get();
            assert!(
                counted.is_some_and(|counted| range.contains(&counted)),
                "{counted:?} {range:?}"
            );
        }
    }
}
