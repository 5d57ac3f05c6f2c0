//! The region of a device, and the places of the accounts in it.

use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

use crate::death::before_store;
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

/// The note at the end of the region, where there is room behind the accounts: a mark that a byte
/// is there, the byte, and the layout of the rings that used the accounts last.
const NOTE_BYTES: u64 = 64;
const NOTE_MARK: u64 = u64::from_le_bytes(*b"ringhaul");
const NOTE_BYTE: u64 = 8;
const NOTE_LAYOUT: u64 = 16;
const SPLIT_MARK: u64 = u64::from_le_bytes(*b"of split");
const PACKED_MARK: u64 = u64::from_le_bytes(*b"of packd");
/// All accounts are new, of whatever layout.
const NEW_MARK: u64 = u64::from_le_bytes(*b"of none.");

/// The layout of a ring. Accounts differ by layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingLayout {
    /// Three parts (virtio 1.3, section 2.7).
    Split,
    /// A single part (virtio 1.3, section 2.8).
    Packed,
}

/// The inflight region of a device, with an account for each of its queues.
///
/// A front-end may ask for it before its driver has chosen a layout, and keep it when the next
/// driver chooses another. So a region has no layout; each start of a ring gives one.
#[derive(Debug, Clone)]
pub struct InflightRegion {
    memory: Arc<GuestMemory>,
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
    pub const fn bytes(layout: RingLayout, queues: u16, queue_size: u16) -> u64 {
        queues as u64 * account_bytes(layout, queue_size) as u64
    }

    /// The number of bytes of such a region and a note.
    pub const fn bytes_with_note(layout: RingLayout, queues: u16, queue_size: u16) -> u64 {
        Self::bytes(layout, queues, queue_size) + NOTE_BYTES
    }

    /// Returns the note of the previous process. `None` if there is no note, or no room for one.
    pub fn note(&self) -> Option<u8> {
        let mut note = [0; 9];
        self.memory.read(self.place_of_note()?, &mut note).ok()?;
        let [mark @ .., value] = note;
        (u64::from_ne_bytes(mark) == NOTE_MARK).then_some(value)
    }

    /// Leaves a note for the next process, if there is room.
    pub fn set_note(&self, value: u8) {
        let Some(place) = self.place_of_note() else { return };
        // The value comes first, so that the mark never stands without it.
        self.store(place + NOTE_BYTE, &[value]);
        self.store(place, &NOTE_MARK.to_ne_bytes());
    }

    /// The place of the note, behind the accounts of all layouts for which there is room.
    fn place_of_note(&self) -> Option<u64> {
        let place = self.memory.bytes().checked_sub(NOTE_BYTES)?;
        let longest =
            if self.has_room(RingLayout::Packed) { RingLayout::Packed } else { RingLayout::Split };
        (place >= self.needed(longest)).then_some(place)
    }

    /// The region for `queues` rings of at most `queue_size` entries, which `memory` holds
    /// from address 0 on.
    ///
    /// # Errors
    ///
    /// If there are no queues, their size is not of a ring, or the memory is too short for the
    /// accounts of split rings, which are the shorter ones.
    pub fn new(
        memory: Arc<GuestMemory>,
        queues: u16,
        queue_size: u16,
    ) -> Result<Self, InflightError> {
        if queues == 0 || queue_size == 0 || queue_size > MAX_QUEUE_SIZE {
            return Err(InflightError::Shape { queues, queue_size });
        }
        let region = Self { memory, queues, queue_size };
        region.check_room(RingLayout::Split)?;
        Ok(region)
    }

    /// Returns true if the memory is long enough for the accounts of rings of this layout.
    pub fn has_room(&self, layout: RingLayout) -> bool {
        self.check_room(layout).is_ok()
    }

    fn check_room(&self, layout: RingLayout) -> Result<(), InflightError> {
        let (bytes, needed) = (self.memory.bytes(), self.needed(layout));
        if bytes >= needed {
            return Ok(());
        }
        let Self { queues, queue_size, .. } = *self;
        Err(InflightError::TooShort { bytes, needed, queues, queue_size })
    }

    fn needed(&self, layout: RingLayout) -> u64 {
        Self::bytes(layout, self.queues, self.queue_size)
    }

    /// Returns the account of queue `index` for a ring of this layout, which starts next. If rings
    /// of another layout used the region before, all accounts become new: another driver has set up
    /// the rings. Call it while no queue runs with a different layout.
    ///
    /// # Errors
    ///
    /// If the region has no account for the queue, or is too short for rings of this layout.
    pub fn queue(&self, index: u16, layout: RingLayout) -> Result<InflightAccount, InflightError> {
        let Self { queues, queue_size, .. } = *self;
        if index >= queues {
            return Err(InflightError::NoAccount { index, queues });
        }
        self.check_room(layout)?;
        self.take_up(layout);
        let memory = Arc::clone(&self.memory);
        let start = Self::bytes(layout, index, queue_size);
        Ok(InflightAccount { memory, layout, start, entries: queue_size })
    }

    /// Marks all accounts as new: their queues continue at their configured places. `layout` is
    /// that of the rings, which matters only to a region without room for a note. Call it while no
    /// queue runs, and only after all requests are answered, or dropped by their driver.
    pub fn forget(&self, layout: RingLayout) {
        self.reset_accounts(layout);
        if let Some(place) = self.place_of_note() {
            self.store(place + NOTE_LAYOUT, &NEW_MARK.to_ne_bytes());
        }
    }

    fn reset_accounts(&self, layout: RingLayout) {
        if !self.has_room(layout) {
            return;
        }
        for index in 0..self.queues {
            let start = Self::bytes(layout, index, self.queue_size);
            self.store(start + OFFSET_VERSION, &[0; 2]);
        }
    }

    fn store(&self, place: u64, bytes: &[u8]) {
        before_store();
        // The memory is mapped.
        let _ = self.memory.write(place, bytes);
        compiler_fence(Ordering::SeqCst);
    }

    /// Notes the layout of the rings, and forgets all accounts if it differs from the one before. A
    /// process that dies in between leaves the earlier note, so the next process forgets them, too.
    fn take_up(&self, layout: RingLayout) {
        let Some(place) = self.place_of_note() else { return };
        let own = match layout {
            RingLayout::Split => SPLIT_MARK,
            RingLayout::Packed => PACKED_MARK,
        };
        let mut mark = [0; 8];
        // The memory is mapped.
        let _ = self.memory.read(place + NOTE_LAYOUT, &mut mark);
        let mark = u64::from_ne_bytes(mark);
        // There is no mark in a region of an earlier version, or of another back-end.
        if mark != own && mark != 0 {
            self.reset_accounts(layout);
        }
        if mark != own {
            self.store(place + NOTE_LAYOUT, &own.to_ne_bytes());
        }
    }
}

impl InflightAccount {
    /// Marks the account as new: the next start of the queue continues at its configured place.
    /// Call it while the queue does not run, and only after it has answered all requests.
    pub fn forget(&self) {
        before_store();
        // The memory is mapped.
        let _ = self.memory.write(self.start + OFFSET_VERSION, &[0; 2]);
    }

    /// The address of the account, which must be for rings of this layout.
    pub(super) fn host(&self, layout: RingLayout) -> Result<*mut u8, InflightError> {
        assert!(self.layout == layout, "the region is for rings of another layout");
        let len = account_bytes(layout, self.entries);
        let host = self.memory.host_of(self.start, len).ok_or(InflightError::Gone)?;
        match host.addr().is_multiple_of(align_of::<u64>()) {
            true => Ok(host),
            false => Err(InflightError::Misaligned),
        }
    }
}

pub(super) const fn account_bytes(layout: RingLayout, queue_size: u16) -> usize {
    let (header, entry) = match layout {
        RingLayout::Split => (SPLIT_HEADER_BYTES, SPLIT_ENTRY_BYTES),
        RingLayout::Packed => (PACKED_HEADER_BYTES, PACKED_ENTRY_BYTES),
    };
    (header + entry * queue_size as usize).next_multiple_of(ALIGN)
}

/// The state that the previous process has left in an account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// No state: the account is new.
    New,
    /// The account is of this ring, and its requests are executed again.
    Known {
        /// The number of requests that had been taken and not answered.
        requests: u16,
    },
    /// The account is of an earlier ring, which the driver has replaced. It was reset.
    Stale {
        /// The number of requests of that ring that had been taken and not answered.
        requests: u16,
    },
}

impl Recovery {
    /// Returns a description for the log, or `None` if no requests were left.
    pub fn describe(self) -> Option<String> {
        let count = |requests| match requests {
            1 => "1 request".to_owned(),
            _ => format!("{requests} requests"),
        };
        match self {
            Self::New | Self::Known { requests: 0 } | Self::Stale { requests: 0 } => None,
            Self::Known { requests } => {
                Some(format!("{} of an earlier process are repeated", count(requests)))
            }
            Self::Stale { requests } => {
                let requests = count(requests);
                Some(format!(
                    "{requests} of an earlier process are dropped, because the driver has set up \
                     the ring again"
                ))
            }
        }
    }
}
