//! The region of a device, and the places of the accounts in it.

use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use crate::error::InflightError;
use crate::memory::{GuestMemory, MAX_QUEUE_SIZE};

/// The alignment of the accounts.
const ALIGN: usize = 64;

/// The offset of the version in an account of either layout.
const OFFSET_VERSION: u64 = 8;

/// The version of an account. A new one has 0.
pub(super) const VERSION: u16 = 1;

/// Sizes in the account of a split ring: the header, and an entry for each descriptor.
pub(super) const SPLIT_HEADER_BYTES: usize = 16;
pub(super) const SPLIT_ENTRY_BYTES: usize = 16;

/// Sizes in the account of a packed ring. The header has two used indices and wrap counters, and
/// each entry has a copy of a descriptor.
pub(super) const PACKED_HEADER_BYTES: usize = 32;
pub(super) const PACKED_ENTRY_BYTES: usize = 32;

/// The note behind the accounts, where there is room: a mark that a note is there, and a byte.
const NOTE_BYTES: u64 = 64;
const NOTE_MARK: u64 = u64::from_le_bytes(*b"ringhaul");

/// The layout of a ring. Accounts differ by layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingLayout {
    /// Three parts (virtio 1.3, section 2.7).
    Split,
    /// A single part (virtio 1.3, section 2.8).
    Packed,
}

/// The inflight region of a device, with an account for each of its queues.
#[derive(Debug, Clone)]
pub struct InflightRegion {
    memory: Arc<GuestMemory>,
    layout: RingLayout,
    queues: u16,
    queue_size: u16,
}

/// The account of one queue, for [`Virtqueue::with_inflight`](crate::Virtqueue::with_inflight).
#[derive(Debug, Clone)]
pub struct InflightAccount {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) layout: RingLayout,
    pub(super) start: u64,
    pub(super) entries: u16,
}

impl InflightRegion {
    /// The version of the accounts.
    pub const VERSION: u16 = VERSION;

    /// The number of bytes of a region for `queues` queues of `queue_size` entries each.
    #[must_use]
    pub const fn bytes(layout: RingLayout, queues: u16, queue_size: u16) -> u64 {
        queues as u64 * account_bytes(layout, queue_size) as u64
    }

    /// The number of bytes of such a region and a note.
    #[must_use]
    pub const fn bytes_with_note(layout: RingLayout, queues: u16, queue_size: u16) -> u64 {
        Self::bytes(layout, queues, queue_size) + NOTE_BYTES
    }

    /// Returns the note of the previous process. `None` if there is no note, or no room for one.
    #[must_use]
    pub fn note(&self) -> Option<u8> {
        let mut note = [0; 9];
        self.memory.read(self.place_of_note()?, &mut note).ok()?;
        let [mark @ .., value] = note;
        (u64::from_ne_bytes(mark) == NOTE_MARK).then_some(value)
    }

    /// Leaves a note for the next process, if there is room.
    pub fn set_note(&self, value: u8) {
        let Some(place) = self.place_of_note() else { return };
        // The value comes first, so that the mark never stands without it. The memory is mapped.
        let _ = self.memory.write(place + size_of::<u64>() as u64, &[value]);
        compiler_fence(Ordering::SeqCst);
        let _ = self.memory.write(place, &NOTE_MARK.to_ne_bytes());
    }

    fn place_of_note(&self) -> Option<u64> {
        let place = Self::bytes(self.layout, self.queues, self.queue_size);
        (self.memory.bytes() >= place + NOTE_BYTES).then_some(place)
    }

    /// The region for `queues` rings of at most `queue_size` entries, which `memory` holds
    /// from address 0 on.
    ///
    /// # Errors
    ///
    /// If there are no queues, their size is not of a ring, or the memory is too short.
    pub fn new(
        memory: Arc<GuestMemory>,
        layout: RingLayout,
        queues: u16,
        queue_size: u16,
    ) -> Result<Self, InflightError> {
        if queues == 0 || queue_size == 0 || queue_size > MAX_QUEUE_SIZE {
            return Err(InflightError::Shape { queues, queue_size });
        }
        let needed = Self::bytes(layout, queues, queue_size);
        let bytes = memory.bytes();
        if bytes < needed {
            return Err(InflightError::TooShort { bytes, needed, queues, queue_size });
        }
        Ok(Self { memory, layout, queues, queue_size })
    }

    /// Returns the same memory as a region for rings of this layout.
    ///
    /// # Errors
    ///
    /// If the memory is too short.
    pub fn with_layout(&self, layout: RingLayout) -> Result<Self, InflightError> {
        Self::new(Arc::clone(&self.memory), layout, self.queues, self.queue_size)
    }

    /// The layout of the rings.
    #[must_use]
    pub fn layout(&self) -> RingLayout {
        self.layout
    }

    /// Returns the account of queue `index`.
    ///
    /// # Errors
    ///
    /// If the region has no account for it.
    pub fn queue(&self, index: u16) -> Result<InflightAccount, InflightError> {
        let Self { layout, queues, queue_size, .. } = *self;
        if index >= queues {
            return Err(InflightError::NoAccount { index, queues });
        }
        let memory = Arc::clone(&self.memory);
        let start = Self::bytes(layout, index, queue_size);
        Ok(InflightAccount { memory, layout, start, entries: queue_size })
    }
}

impl InflightAccount {
    /// Marks the account as new: the next start of the queue continues at its configured place.
    /// Call it while the queue does not run, and only after it has answered all requests.
    pub fn forget(&self) {
        // The memory is mapped.
        let _ = self.memory.write(self.start + OFFSET_VERSION, &[0; 2]);
    }
}

pub(super) const fn account_bytes(layout: RingLayout, queue_size: u16) -> usize {
    let (header, entry) = match layout {
        RingLayout::Split => (SPLIT_HEADER_BYTES, SPLIT_ENTRY_BYTES),
        RingLayout::Packed => (PACKED_HEADER_BYTES, PACKED_ENTRY_BYTES),
    };
    (header + entry * queue_size as usize).next_multiple_of(ALIGN)
}
