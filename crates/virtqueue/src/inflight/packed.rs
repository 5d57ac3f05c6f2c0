//! The account of a packed ring (vhost-user specification, "Inflight I/O tracking").
//!
//! Used descriptors overwrite available ones in the order of completion, so the ring does not keep
//! the requests in the device. The account has a copy of their descriptors, in a list of entries
//! for each request; free entries are one list. It also has the place of the next used element,
//! which no ring has in memory. The descriptors in the device are those behind that place: their
//! number gives the place of the next chain.
//!
//! The process may die between any two stores:
//!
//! - While a request is taken, its entries still are in the free list from the *old* head, which
//!   the last store moves. Before it, the request is found in the ring.
//! - While used elements are published, the account has the place before and after them. The flags
//!   of the first element decide: if the driver sees it, the elements behind it, which were written
//!   before, are complete. If not, nothing has happened. Then the elements behind it are taken out
//!   of the ring: the driver would find them after the next use of the first place.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering, compiler_fence};

use super::region::{
    InflightAccount, PACKED_ENTRY_BYTES, PACKED_HEADER_BYTES, Recovery, RingLayout, VERSION,
};
use crate::death::before_store;
use crate::descriptor_ring::{DescriptorRing, UsedWord};
use crate::error::{InflightError, QueueError};
use crate::memory::{Descriptor, GuestMemory};
use crate::position::{DESC_F_LAP, Position};

/// Offsets in the account. Its features, which are none, are at 0.
const OFFSET_VERSION: usize = 8;
const OFFSET_ENTRIES: usize = 10;
const OFFSET_FREE_HEAD: usize = 12;
const OFFSET_OLD_FREE_HEAD: usize = 14;
/// Offset of a word with the place of the next used element, after the last change and before it:
/// two descriptors of 16 bits each, and two wrap counters of 8 bits each.
const OFFSET_USED: usize = 16;
const HEADER_BYTES: usize = PACKED_HEADER_BYTES;
const ENTRY_BYTES: usize = PACKED_ENTRY_BYTES;

/// Offsets in an entry. Its mark is at 0.
const ENTRY_NEXT: usize = 2;
const ENTRY_LAST: usize = 4;
const ENTRY_COUNT: usize = 6;
const ENTRY_COUNTER: usize = 8;
/// Offset of a word with the id, the flags and the length of a descriptor.
const ENTRY_REST: usize = 16;
const ENTRY_ADDR: usize = 24;

/// A request in the account: its first entry, and its descriptors of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) entry: u16,
    pub(crate) count: u16,
}

/// The account of a packed queue in service.
#[derive(Debug)]
pub(crate) struct PackedInflight {
    account: PackedAccount,
    /// The number of the next request.
    counter: u64,
    free_head: u16,
    /// The entries of requests that were pushed and are not visible, in that order.
    batch: Vec<u16>,
    /// Requests that the previous process took and did not answer, the last one first.
    again: Vec<Taken>,
}

/// The account itself, in memory that the front-end shares.
///
/// `start` is aligned for a `u64`, and `memory` maps a header and `entries` entries from there. The
/// front-end may write there at any time: every access is atomic, and every value that is read is
/// checked.
#[derive(Debug)]
struct PackedAccount {
    memory: Arc<GuestMemory>,
    start: *mut u8,
    entries: u16,
}

/// The state in which an account is opened.
struct Opened {
    recovery: Recovery,
    /// Requests to be executed again, with their numbers, in no order.
    again: Vec<(u64, Taken)>,
    /// The place of the next used element.
    used: Position,
    free_head: u16,
}

/// The place of the next used element, after and before a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct UsedPlaces {
    new: Position,
    old: Position,
}

impl PackedInflight {
    /// Opens the account for a ring. Repairs both if the previous process died during a change.
    /// `used` is the place of the next used element in a new ring. Returns the place at which the
    /// queue continues.
    pub(crate) fn open(
        queue: &InflightAccount,
        ring: &DescriptorRing,
        used: Position,
    ) -> Result<(Self, Recovery, Position), QueueError> {
        let account = PackedAccount::map(queue)?;
        let PackedAccount { entries, .. } = account;
        if ring.size > entries {
            return Err(InflightError::RingTooLong { entries, size: ring.size }.into());
        }
        let Opened { recovery, mut again, used, free_head } = account.recover(ring, used)?;
        if !account.memory.is_intact() {
            return Err(InflightError::Gone.into());
        }
        again.sort_unstable_by_key(|(counter, _)| *counter);
        let counter = again.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        let again = again.into_iter().rev().map(|(_, taken)| taken).collect();
        let batch = Vec::with_capacity(ring.size.into());
        Ok((Self { account, counter, free_head, batch, again }, recovery, used))
    }

    /// The number of descriptors of requests that the previous process left.
    pub(crate) fn descriptors_again(&self) -> u16 {
        self.again.iter().map(|taken| taken.count).sum()
    }

    /// Takes the next request that the previous process left. It stays in the account.
    pub(crate) fn take_again(&mut self) -> Option<Taken> {
        self.again.pop()
    }

    /// Returns a copied descriptor of a request.
    pub(crate) fn descriptor(&self, entry: u16) -> Result<Descriptor, QueueError> {
        let PackedAccount { entries, .. } = self.account;
        if entry >= entries {
            return Err(InflightError::LinkOutOfRange { head: entry, entries }.into());
        }
        Ok(self.account.descriptor(entry))
    }

    /// Returns the entry behind this one.
    pub(crate) fn after(&self, entry: u16) -> u16 {
        self.account.next(entry)
    }

    /// Takes a request of `count` descriptors from `first` on into the account, before it has any
    /// effect. Returns its entry.
    pub(crate) fn take(
        &mut self,
        ring: &DescriptorRing,
        first: Position,
        count: u16,
    ) -> Result<u16, InflightError> {
        let (account, head) = (&self.account, self.free_head);
        let entries = account.entries;
        let (mut last, mut free, mut place) = (head, head, first);
        for at in 0..count {
            if free >= entries {
                return Err(InflightError::LinkOutOfRange { head: free, entries });
            }
            if at == 0 {
                account.store_word(account.entry(head, ENTRY_COUNTER), self.counter);
                account.set_mark(head, 1);
            }
            account.copy(free, ring.descriptor(place.slot));
            (last, free, place) = (free, account.next(free), place.after(1, ring.size));
        }
        account.store(account.entry(head, ENTRY_LAST), last);
        account.store(account.entry(head, ENTRY_COUNT), count);
        compiler_fence(Ordering::SeqCst);
        self.move_free_head(free);
        self.counter = self.counter.wrapping_add(1);
        if self.account.memory.is_intact() { Ok(head) } else { Err(InflightError::Gone) }
    }

    /// Gives the request that was taken last back to the ring.
    pub(crate) fn release(&mut self, entry: u16) {
        self.link_free(entry);
        compiler_fence(Ordering::SeqCst);
        let head = self.free_head;
        self.move_free_head(head);
        compiler_fence(Ordering::SeqCst);
        self.account.set_mark(entry, 0);
    }

    /// Notes that the request of this entry has a used element that is not visible.
    #[inline]
    pub(crate) fn push(&mut self, entry: u16) {
        self.batch.push(entry);
    }

    /// Makes used elements from `old` up to `new` visible by the first of them, and removes the
    /// marks of their requests.
    pub(crate) fn publish(
        &mut self,
        ring: &DescriptorRing,
        (old, new): (Position, Position),
        first: UsedWord,
    ) {
        let batch = std::mem::take(&mut self.batch);
        batch.iter().for_each(|entry| self.link_free(*entry));
        self.account.store(OFFSET_FREE_HEAD, self.free_head);
        compiler_fence(Ordering::SeqCst);
        self.account.set_used(UsedPlaces { new, old });
        compiler_fence(Ordering::SeqCst);
        ring.store_first_used(old.slot, first);
        compiler_fence(Ordering::SeqCst);
        batch.iter().for_each(|entry| self.account.set_mark(*entry, 0));
        compiler_fence(Ordering::SeqCst);
        self.account.store(OFFSET_OLD_FREE_HEAD, self.free_head);
        compiler_fence(Ordering::SeqCst);
        self.account.set_used(UsedPlaces { new, old: new });
        self.batch = batch;
        self.batch.clear();
    }

    /// Puts the entries of a request in front of the free list, which the account does not know
    /// yet.
    fn link_free(&mut self, entry: u16) {
        let account = &self.account;
        let last = account.load(account.entry(entry, ENTRY_LAST));
        // Only a front-end that writes into the account makes this false.
        if last < account.entries {
            account.store(account.entry(last, ENTRY_NEXT), self.free_head);
            self.free_head = entry;
        }
    }

    fn move_free_head(&mut self, head: u16) {
        self.account.store(OFFSET_FREE_HEAD, head);
        compiler_fence(Ordering::SeqCst);
        self.account.store(OFFSET_OLD_FREE_HEAD, head);
        self.free_head = head;
    }
}

impl PackedAccount {
    fn map(queue: &InflightAccount) -> Result<Self, InflightError> {
        let start = queue.host(RingLayout::Packed)?;
        Ok(Self { memory: Arc::clone(&queue.memory), start, entries: queue.entries })
    }

    /// Repairs the account and the ring. Each field is read once, because the front-end may change
    /// it at any time.
    fn recover(&self, ring: &DescriptorRing, used: Position) -> Result<Opened, InflightError> {
        match (self.load(OFFSET_VERSION), self.load(OFFSET_ENTRIES)) {
            (0, _) => {
                return Ok(self.begin(used, Recovery::New));
            }
            (VERSION, entries) if entries != self.entries => {
                return Err(InflightError::OtherSize { entries, expected: self.entries });
            }
            (VERSION, _) => {}
            (version, _) => return Err(InflightError::Version { version }),
        }
        let places = self.used();
        let settled = self.settle(ring, places);
        let again = self.requests();
        let requests: u16 = iomem::fits(again.len(), "requests of an account");
        // Each request has a descriptor.
        let count = again.iter().try_fold(0_u16, |sum, (_, taken)| {
            sum.checked_add(taken.count).filter(|_| taken.count > 0)
        });
        let fits = |((own, _), count): &((Position, u16), u16)| fits_ring(ring, *own, *count);
        let Some(((own, free_head), count)) = settled.zip(count).filter(fits) else {
            return Ok(self.begin(used, Recovery::Stale { requests }));
        };
        (0..count).for_each(|at| ring.restore_available(own.after(at, ring.size)));
        Ok(Opened { recovery: Recovery::Known { requests }, again, used: own, free_head })
    }

    /// Completes or undoes the publishing that the previous process was in, and clears the marks of
    /// free entries. Returns the place of the next used element and the first free entry; `None` if
    /// the ring has no such place.
    fn settle(
        &self,
        ring: &DescriptorRing,
        UsedPlaces { new, old }: UsedPlaces,
    ) -> Option<(Position, u16)> {
        if new.slot >= ring.size || old.slot >= ring.size {
            return None;
        }
        let is_visible = new != old && !old.is_available(ring.flags(old.slot));
        let used = if is_visible { new } else { old };
        let [from, to] = if is_visible {
            [OFFSET_FREE_HEAD, OFFSET_OLD_FREE_HEAD]
        } else {
            [OFFSET_OLD_FREE_HEAD, OFFSET_FREE_HEAD]
        };
        let free_head = self.load(from);
        self.store(to, free_head);
        compiler_fence(Ordering::SeqCst);
        self.set_used(UsedPlaces { new: used, old: used });
        let mut entry = free_head;
        // The list ends with the number of entries, and has no more than these.
        for _ in 0..self.entries {
            if entry >= self.entries {
                break;
            }
            self.set_mark(entry, 0);
            entry = self.next(entry);
        }
        Some((used, free_head))
    }

    /// Resets the account to one without requests.
    fn begin(&self, used: Position, recovery: Recovery) -> Opened {
        // Version 0 comes first: a process that finds the reset half done starts it again.
        self.store(OFFSET_VERSION, 0);
        compiler_fence(Ordering::SeqCst);
        for entry in 0..self.entries {
            self.set_mark(entry, 0);
            self.store(self.entry(entry, ENTRY_NEXT), entry + 1);
        }
        self.store(OFFSET_FREE_HEAD, 0);
        self.store(OFFSET_OLD_FREE_HEAD, 0);
        self.store(OFFSET_ENTRIES, self.entries);
        self.set_used(UsedPlaces { new: used, old: used });
        compiler_fence(Ordering::SeqCst);
        self.store(OFFSET_VERSION, VERSION);
        Opened { recovery, again: Vec::new(), used, free_head: 0 }
    }

    fn requests(&self) -> Vec<(u64, Taken)> {
        let marked = (0..self.entries).filter(|entry| self.is_marked(*entry));
        let request = |entry| {
            let count = self.load(self.entry(entry, ENTRY_COUNT));
            (self.load_word(self.entry(entry, ENTRY_COUNTER)), Taken { entry, count })
        };
        marked.map(request).collect()
    }

    fn used(&self) -> UsedPlaces {
        let [n0, n1, o0, o1, new_wrap, old_wrap, ..] = self.load_word(OFFSET_USED).to_ne_bytes();
        UsedPlaces {
            new: Position { slot: u16::from_ne_bytes([n0, n1]), wrap: new_wrap != 0 },
            old: Position { slot: u16::from_ne_bytes([o0, o1]), wrap: old_wrap != 0 },
        }
    }

    /// Stores both places at once: no process finds a part of them.
    fn set_used(&self, UsedPlaces { new, old }: UsedPlaces) {
        let ([n0, n1], [o0, o1]) = (new.slot.to_ne_bytes(), old.slot.to_ne_bytes());
        let bytes = [n0, n1, o0, o1, new.wrap.into(), old.wrap.into(), 0, 0];
        self.store_word(OFFSET_USED, u64::from_ne_bytes(bytes));
    }

    /// Copies a descriptor of the ring into an entry.
    fn copy(&self, entry: u16, descriptor: Descriptor) {
        let Descriptor { addr, len, flags, next: id } = descriptor;
        let rest = u64::from(id) | u64::from(flags) << 16 | u64::from(len) << 32;
        self.store_word(self.entry(entry, ENTRY_REST), rest.to_le());
        self.store_word(self.entry(entry, ENTRY_ADDR), addr.to_le());
    }

    fn descriptor(&self, entry: u16) -> Descriptor {
        let rest = u64::from_le(self.load_word(self.entry(entry, ENTRY_REST)));
        let [i0, i1, f0, f1, len @ ..] = rest.to_le_bytes();
        Descriptor {
            addr: u64::from_le(self.load_word(self.entry(entry, ENTRY_ADDR))),
            len: u32::from_le_bytes(len),
            flags: u16::from_le_bytes([f0, f1]),
            next: u16::from_le_bytes([i0, i1]),
        }
    }

    /// The offset of a field of an entry.
    fn entry(&self, entry: u16, field: usize) -> usize {
        assert!(entry < self.entries, "entry {entry} of {}", self.entries);
        HEADER_BYTES + usize::from(entry) * ENTRY_BYTES + field
    }

    /// The entry behind this one, or the number of entries at the end of the free list.
    fn next(&self, entry: u16) -> u16 {
        self.load(self.entry(entry, ENTRY_NEXT))
    }

    fn is_marked(&self, entry: u16) -> bool {
        let field = self.start.wrapping_add(self.entry(entry, 0));
        // SAFETY: the entry is in the account, see `PackedAccount`; a byte is always aligned.
        unsafe { AtomicU8::from_ptr(field) }.load(Ordering::Relaxed) != 0
    }

    fn set_mark(&self, entry: u16, mark: u8) {
        before_store();
        let field = self.start.wrapping_add(self.entry(entry, 0));
        // SAFETY: the entry is in the account, see `PackedAccount`; a byte is always aligned.
        unsafe { AtomicU8::from_ptr(field) }.store(mark, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }

    fn load(&self, offset: usize) -> u16 {
        let field = self.start.wrapping_add(offset).cast();
        // SAFETY: the offset is of a field of the account, which is aligned, see `PackedAccount`.
        unsafe { AtomicU16::from_ptr(field) }.load(Ordering::Relaxed)
    }

    fn store(&self, offset: usize, value: u16) {
        before_store();
        let field = self.start.wrapping_add(offset).cast();
        // SAFETY: the offset is of a field of the account, which is aligned, see `PackedAccount`.
        unsafe { AtomicU16::from_ptr(field) }.store(value, Ordering::Relaxed);
    }

    fn load_word(&self, offset: usize) -> u64 {
        let field = self.start.wrapping_add(offset).cast();
        // SAFETY: the offset is of a word of the account, which is aligned, see `PackedAccount`.
        unsafe { AtomicU64::from_ptr(field) }.load(Ordering::Relaxed)
    }

    fn store_word(&self, offset: usize, value: u64) {
        before_store();
        let field = self.start.wrapping_add(offset).cast();
        // SAFETY: the offset is of a word of the account, which is aligned, see `PackedAccount`.
        unsafe { AtomicU64::from_ptr(field) }.store(value, Ordering::Relaxed);
    }
}

/// Returns true if the next used element of a ring can be at `used`, with `count` descriptors in
/// the device behind it. A driver that has set up the ring again has written zeroes over it.
fn fits_ring(ring: &DescriptorRing, used: Position, count: u16) -> bool {
    if count > ring.size || (count > 0 && !used.is_available(ring.flags(used.slot))) {
        return false;
    }
    (0..ring.size).all(|at| {
        let place = used.after(at, ring.size);
        // Not yet used in the lap of its place. Behind the first place, the previous process may
        // have written elements that no driver saw.
        at < count || ring.flags(place.slot) & DESC_F_LAP != place.used_flags()
    })
}

#[cfg(test)]
mod tests;
