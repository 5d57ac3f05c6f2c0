//! The driver's side of a split virtqueue, raw: every field can be given any value.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Result, ensure};

use super::memory::{Memory, new_eventfd, signal, take_count, wait_readable};

/// The chain goes on (virtio 1.3, section 2.7.5).
pub const NEXT: u16 = 1;
/// The buffer is for the device to write.
pub const WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// In the avail ring's flags: no calls, please.
const NO_INTERRUPT: u16 = 1;

const DESCRIPTOR_BYTES: u64 = 16;
const IDX: u64 = 2;
const ENTRIES: u64 = 4;

/// A descriptor.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Desc {
    /// Guest address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`].
    pub flags: u16,
    /// The descriptor after this one.
    pub next: u16,
}

impl Desc {
    /// A buffer for the device to read.
    #[must_use]
    pub fn readable(addr: u64, len: u32) -> Self {
        Self { addr, len, flags: 0, next: 0 }
    }

    /// A buffer for the device to write.
    #[must_use]
    pub fn writable(addr: u64, len: u32) -> Self {
        Self { addr, len, flags: WRITE, next: 0 }
    }

    /// The same with `next` after it.
    #[must_use]
    pub fn then(self, next: u16) -> Self {
        Self { flags: self.flags | NEXT, next, ..self }
    }

    /// As it is in memory.
    #[must_use]
    pub fn bytes(self) -> Vec<u8> {
        [
            self.addr.to_le_bytes().to_vec(),
            self.len.to_le_bytes().to_vec(),
            self.flags.to_le_bytes().to_vec(),
            self.next.to_le_bytes().to_vec(),
        ]
        .concat()
    }
}

/// Where the parts of a ring are, as guest addresses.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Entries.
    pub size: u16,
    /// The descriptor table.
    pub desc_table: u64,
    /// The avail ring.
    pub avail_ring: u64,
    /// The used ring.
    pub used_ring: u64,
}

impl Place {
    /// Bytes from one ring to the next: enough for 1024 entries.
    pub const STRIDE: u64 = 0x8000;

    /// A ring of up to 1024 entries whose parts are one after the other.
    #[must_use]
    pub fn at(addr: u64, size: u16) -> Self {
        Self { size, desc_table: addr, avail_ring: addr + 0x4000, used_ring: addr + 0x5000 }
    }
}

/// A used element.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Used {
    /// The head of the chain.
    pub head: u32,
    /// Bytes that the device has written.
    pub bytes: u32,
}

/// A queue, seen from the driver.
pub struct Ring {
    memory: Arc<Memory>,
    /// Where it is.
    pub place: Place,
    /// Whether event idx was negotiated.
    pub event_idx: bool,
    /// What avail idx is to become with the next chain.
    pub next_avail: u16,
    /// The used element to be taken next.
    pub next_used: u16,
    /// Driver to device.
    pub kick: Arc<OwnedFd>,
    /// Device to driver.
    pub call: Arc<OwnedFd>,
    /// Device to front-end: the ring is bad.
    pub err: Arc<OwnedFd>,
}

impl Ring {
    /// An empty ring, which asks for calls.
    ///
    /// # Errors
    /// When the place is not in memory, or the kernel has no descriptor left.
    pub fn new(memory: &Arc<Memory>, place: Place, event_idx: bool) -> Result<Self> {
        let ring = Self {
            memory: Arc::clone(memory),
            place,
            event_idx,
            next_avail: 0,
            next_used: 0,
            kick: new_eventfd()?,
            call: new_eventfd()?,
            err: new_eventfd()?,
        };
        ring.want_calls()?;
        Ok(ring)
    }

    /// Writes descriptor `index` of the queue's own table.
    ///
    /// # Errors
    /// When it is not in memory.
    pub fn put_desc(&self, index: u16, desc: Desc) -> Result<()> {
        let addr = self.place.desc_table + u64::from(index) * DESCRIPTOR_BYTES;
        self.memory.write(addr, &desc.bytes())
    }

    /// Writes a chain into descriptors `first`, `first` + 1 and so on.
    ///
    /// # Errors
    /// When they are not in memory.
    pub fn put_chain(&self, first: u16, buffers: &[Desc]) -> Result<()> {
        for (index, desc) in (first..).zip(linked(first, buffers)) {
            self.put_desc(index, desc)?;
        }
        Ok(())
    }

    /// Writes an indirect table, and descriptor `head` that names it.
    ///
    /// # Errors
    /// When they are not in memory.
    pub fn put_indirect(&self, head: u16, table: u64, buffers: &[Desc]) -> Result<()> {
        let bytes: Vec<u8> = linked(0, buffers).flat_map(Desc::bytes).collect();
        self.memory.write(table, &bytes)?;
        let len = u32::try_from(bytes.len())?;
        self.put_desc(head, Desc { addr: table, len, flags: INDIRECT, next: 0 })
    }

    /// Makes a chain available, without a kick.
    ///
    /// # Errors
    /// When the ring is not in memory.
    pub fn offer(&mut self, head: u16) -> Result<()> {
        let slot = u64::from(self.next_avail % self.place.size);
        self.memory.store_u16(self.place.avail_ring + ENTRIES + 2 * slot, head)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        self.put_avail_idx(self.next_avail)
    }

    /// Gives avail idx any value.
    ///
    /// # Errors
    /// When the ring is not in memory.
    pub fn put_avail_idx(&self, idx: u16) -> Result<()> {
        self.memory.store_u16(self.place.avail_ring + IDX, idx)
    }

    /// Kicks.
    ///
    /// # Errors
    /// When the eventfd is full.
    pub fn kick(&self) -> Result<()> {
        fence(Ordering::SeqCst);
        signal(&self.kick)
    }

    /// Makes a chain available and kicks.
    ///
    /// # Errors
    /// As [`offer`](Self::offer) and [`kick`](Self::kick).
    pub fn submit(&mut self, head: u16) -> Result<()> {
        self.offer(head)?;
        self.kick()
    }

    /// The device's used idx.
    ///
    /// # Errors
    /// When the ring is not in memory.
    pub fn used_idx(&self) -> Result<u16> {
        self.memory.load_u16(self.place.used_ring + IDX)
    }

    /// Asks for a call with the next used element.
    ///
    /// # Errors
    /// When the ring is not in memory.
    pub fn want_calls(&self) -> Result<()> {
        if self.event_idx {
            self.put_used_event(self.next_used)
        } else {
            self.memory.store_u16(self.place.avail_ring, 0)
        }
    }

    /// Asks for no calls: by the flag, or by an event that lies behind.
    ///
    /// # Errors
    /// When the ring is not in memory.
    pub fn want_no_calls(&self) -> Result<()> {
        if self.event_idx {
            self.put_used_event(self.next_used.wrapping_sub(1))
        } else {
            self.memory.store_u16(self.place.avail_ring, NO_INTERRUPT)
        }
    }

    /// Asks for a call when used element `event` is published (event idx only).
    ///
    /// # Errors
    /// When the ring is not in memory.
    pub fn put_used_event(&self, event: u16) -> Result<()> {
        let addr = self.place.avail_ring + ENTRIES + 2 * u64::from(self.place.size);
        self.memory.store_u16(addr, event)
    }

    /// The next used element, if there is one.
    ///
    /// # Errors
    /// When the ring is not in memory.
    pub fn take_used(&mut self) -> Result<Option<Used>> {
        if self.used_idx()? == self.next_used {
            return Ok(None);
        }
        let slot = u64::from(self.next_used % self.place.size);
        let bytes = self.memory.read(self.place.used_ring + ENTRIES + 8 * slot, 8)?;
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(word)
        };
        self.next_used = self.next_used.wrapping_add(1);
        Ok(Some(Used { head: word(0), bytes: word(4) }))
    }

    /// Waits for the next used element as a driver does: a call that is not made is missed.
    ///
    /// # Errors
    /// When there is no call in time.
    pub fn wait_used(&mut self) -> Result<Used> {
        loop {
            if let Some(used) = self.take_used()? {
                return Ok(used);
            }
            self.want_calls()?;
            fence(Ordering::SeqCst);
            if self.used_idx()? == self.next_used {
                wait_readable(&self.call, "call")?;
                take_count(&self.call);
            }
        }
    }

    /// Looks at the used ring until it has `count` elements that were not taken, calls or not.
    ///
    /// # Errors
    /// When that takes too long.
    pub fn watch_used(&self, count: u16) -> Result<()> {
        let deadline = std::time::Instant::now() + crate::daemon::LIMIT;
        while self.used_idx()?.wrapping_sub(self.next_used) < count {
            ensure!(std::time::Instant::now() < deadline, "{count} requests were not answered");
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Waits until the daemon says that the ring is bad.
    ///
    /// # Errors
    /// When it does not in time.
    pub fn wait_err(&self) -> Result<()> {
        wait_readable(&self.err, "write to the err eventfd")
    }
}

/// Buffers as a chain whose first descriptor is number `first` of its table.
fn linked(first: u16, buffers: &[Desc]) -> impl Iterator<Item = Desc> + '_ {
    let last = buffers.len() - 1;
    (0..).zip(buffers).zip(first + 1..).map(
        move |((index, desc), next): ((usize, _), u16)| {
            if index == last { *desc } else { desc.then(next) }
        },
    )
}
