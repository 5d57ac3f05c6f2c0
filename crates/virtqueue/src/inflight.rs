//! The inflight region: the record of requests in the device, kept for the process that serves the
//! queue next (vhost-user specification, "Inflight I/O tracking").
//!
//! A front-end keeps the region while its back-end is away. Each queue has an account in it, with a
//! mark for each head. The mark is set when the queue sees the head in the avail ring, before the
//! request has any effect. It is removed when the used element is visible. The process may die
//! between any two stores, and the account must hold at each of these moments:
//!
//! - Before the mark: the request is found in the avail ring. Marks are set in the order of the
//!   ring, so the requests that have marks are the entries before it.
//! - After the mark and before used idx: the request is executed again.
//! - After used idx and before the mark is gone: the ring's used idx is ahead of the account's. The
//!   heads between them are linked from the last one that was pushed, and lose their marks.
//!
//! A killed process has carried out its stores up to one of them in program order, so compiler
//! fences are enough to keep their order.

mod packed;
mod region;

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering, compiler_fence};

use crate::death::before_store;
use crate::error::{InflightError, QueueError};
use crate::memory::GuestMemory;
use crate::rings::Rings;
pub(crate) use packed::{PackedInflight, Taken};
pub use region::{InflightAccount, InflightRegion, Recovery, RingLayout};
use region::{SPLIT_ENTRY_BYTES, SPLIT_HEADER_BYTES, VERSION};

/// Offsets in the account of a split ring. Its features, which are none, are at 0.
const OFFSET_VERSION: usize = 8;
const OFFSET_ENTRIES: usize = 10;
const OFFSET_LAST_HEAD: usize = 12;
const OFFSET_USED_IDX: usize = 14;
/// Offsets in an entry. Its mark is at 0.
const OFFSET_NEXT: usize = 6;
const OFFSET_COUNTER: usize = 8;

/// The state of the ring for which an account is opened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingState {
    pub(crate) size: u16,
    pub(crate) used_idx: u16,
    pub(crate) avail_idx: u16,
}

/// A marked request. Marks are ordered by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Mark {
    counter: u64,
    head: u16,
}

/// The account of a queue in service.
#[derive(Debug)]
pub(crate) struct Inflight {
    account: Account,
    /// The number of the next request.
    counter: u64,
    /// The number of the first request of this process.
    first_counter: u64,
    /// The head of the element that was published last.
    last_head: u16,
    /// Heads that the previous process saw and did not answer, in the order in which it saw them.
    again: Vec<u16>,
}

impl Inflight {
    /// Opens the account for a ring. Repairs it if the previous process died during a change, and
    /// resets it if it is new or of an earlier ring.
    pub(crate) fn open(
        queue: &InflightAccount,
        ring: RingState,
    ) -> Result<(Self, Recovery), QueueError> {
        let account = Account::map(queue)?;
        if ring.size > account.entries {
            return Err(
                InflightError::RingTooLong { entries: account.entries, size: ring.size }.into()
            );
        }
        let (recovery, mut again) = account.recover(ring)?;
        if !account.memory.is_intact() {
            return Err(InflightError::Gone.into());
        }
        again.sort_unstable();
        let counter = again.last().map_or(0, |mark| mark.counter.wrapping_add(1));
        let again = again.into_iter().map(|mark| mark.head).collect();
        let last_head = account.load(OFFSET_LAST_HEAD);
        // Only heads of this ring are marked from now on.
        let address = AccountAddress { entries: ring.size, ..account.address };
        let account = Account { address, ..account };
        Ok((Self { account, counter, first_counter: counter, last_head, again }, recovery))
    }

    /// Returns false once an access has found that the front-end truncated the account.
    pub(crate) fn is_intact(&self) -> bool {
        self.account.memory.is_intact()
    }

    /// Returns the first of the last `left` heads that the previous process saw.
    pub(crate) fn recovered_head(&self, left: u16) -> u16 {
        self.again[self.again.len() - usize::from(left)]
    }

    /// Returns true if the previous process saw this head, which is marked.
    pub(crate) fn is_recovered(&self, head: u16) -> bool {
        !self.again.is_empty() && self.account.counter(head) < self.first_counter
    }

    /// Marks heads in the order of the avail ring, before their requests have any effect.
    #[inline]
    pub(crate) fn seen(&mut self, heads: impl Iterator<Item = u16>) {
        let (mut counter, account) = (self.counter, self.account.address);
        for head in heads {
            if let Some(entry) = account.entry(head) {
                account.mark(entry, counter);
                counter = counter.wrapping_add(1);
            }
        }
        self.counter = counter;
        compiler_fence(Ordering::SeqCst);
    }

    /// Removes the marks of heads that are left to the next process, the last head first: marked
    /// heads must precede unmarked ones in the ring.
    pub(crate) fn release(&mut self, heads: impl Iterator<Item = u16>) {
        for entry in heads.filter_map(|head| self.account.entry(head)) {
            self.account.unmark(entry);
            compiler_fence(Ordering::SeqCst);
        }
    }

    /// Makes used elements visible, and removes the marks of their requests.
    #[inline(never)]
    pub(crate) fn publish(&mut self, rings: &Rings, first: u16, end: u16) {
        let heads = || {
            let indices = (0..end.wrapping_sub(first)).map(|at| first.wrapping_add(at));
            indices.map(|index| rings.used_head(index))
        };
        for head in heads() {
            if let Some(entry) = self.account.entry(head) {
                self.account.set_next(entry, self.last_head);
                self.last_head = head;
            }
        }
        self.account.store(OFFSET_LAST_HEAD, self.last_head);
        compiler_fence(Ordering::SeqCst);
        rings.store_used_idx(end);
        compiler_fence(Ordering::SeqCst);
        heads().filter_map(|head| self.account.entry(head)).for_each(|it| self.account.unmark(it));
        compiler_fence(Ordering::SeqCst);
        self.account.store(OFFSET_USED_IDX, end);
    }

    /// Makes a single used element visible. On disks that answer at once, each element is alone.
    #[inline(never)]
    pub(crate) fn publish_one(&mut self, rings: &Rings, index: u16) {
        let (head, end) = (rings.used_head(index), index.wrapping_add(1));
        let account = self.account.address;
        let Some(entry) = account.entry(head) else { return self.publish(rings, index, end) };
        account.set_next(entry, self.last_head);
        self.last_head = head;
        account.store(OFFSET_LAST_HEAD, head);
        compiler_fence(Ordering::SeqCst);
        rings.store_used_idx(end);
        compiler_fence(Ordering::SeqCst);
        account.unmark(entry);
        compiler_fence(Ordering::SeqCst);
        account.store(OFFSET_USED_IDX, end);
    }
}

/// The account itself, in memory that the front-end shares.
///
/// The start of `address` is aligned for a `u64`, and `memory` maps at least as many entries from
/// there as `address` states. The front-end may write there at any time: every access is atomic,
/// and every value that is read is checked.
#[derive(Debug)]
struct Account {
    memory: Arc<GuestMemory>,
    address: AccountAddress,
}

/// The address of an account. A function that copies it loads it once, because the compiler knows
/// that stores into the account do not change the copy.
#[derive(Debug, Clone, Copy)]
struct AccountAddress {
    start: *mut u8,
    entries: u16,
}

impl Deref for Account {
    type Target = AccountAddress;

    fn deref(&self) -> &AccountAddress {
        &self.address
    }
}

impl Account {
    fn map(queue: &InflightAccount) -> Result<Self, InflightError> {
        let address =
            AccountAddress { start: queue.host(RingLayout::Split)?, entries: queue.entries };
        Ok(Self { memory: Arc::clone(&queue.memory), address })
    }

    /// Repairs the account for a ring. Returns the requests to be executed again, in no order. Each
    /// field is read once, because the front-end may change it at any time.
    fn recover(&self, ring: RingState) -> Result<(Recovery, Vec<Mark>), InflightError> {
        match (self.load(OFFSET_VERSION), self.load(OFFSET_ENTRIES)) {
            (0, _) => {
                self.begin(ring.used_idx);
                return Ok((Recovery::New, Vec::new()));
            }
            (VERSION, entries) if entries != self.entries => {
                return Err(InflightError::OtherSize { entries, expected: self.entries });
            }
            (VERSION, _) => {}
            (version, _) => return Err(InflightError::Version { version }),
        }
        let mut again = self.marks();
        let seen = self.published_heads(ring.used_idx)?;
        again.retain(|mark| !seen.as_ref().is_some_and(|seen| seen.contains(&mark.head)));
        let requests: u16 = iomem::fits(again.len(), "marks");
        // Every available chain was answered, is marked, or is still to be popped.
        let waiting = ring.avail_idx.wrapping_sub(ring.used_idx.wrapping_add(requests));
        let is_of_ring = again.iter().all(|mark| mark.head < ring.size);
        let Some(seen) = seen.filter(|_| is_of_ring && waiting <= ring.size - requests) else {
            self.begin(ring.used_idx);
            return Ok((Recovery::Stale { requests }, Vec::new()));
        };
        seen.into_iter().filter_map(|head| self.entry(head)).for_each(|entry| self.unmark(entry));
        compiler_fence(Ordering::SeqCst);
        self.store(OFFSET_USED_IDX, ring.used_idx);
        Ok((Recovery::Known { requests }, again))
    }

    /// Returns the heads whose used elements the driver sees, and whose marks the previous process
    /// may not have removed. `None` if the ring's used idx cannot have come from that of the
    /// account.
    fn published_heads(&self, used_idx: u16) -> Result<Option<Vec<u16>>, InflightError> {
        let count = used_idx.wrapping_sub(self.load(OFFSET_USED_IDX));
        if count > self.entries {
            return Ok(None);
        }
        let mut head = self.load(OFFSET_LAST_HEAD);
        let mut seen = Vec::with_capacity(count.into());
        for _ in 0..count {
            let Some(entry) = self.entry(head) else {
                return Err(InflightError::LinkOutOfRange { head, entries: self.entries });
            };
            seen.push(head);
            head = self.next(entry);
        }
        Ok(Some(seen))
    }

    /// Resets the account to one without requests.
    fn begin(&self, used_idx: u16) {
        // Version 0 comes first: a process that finds the reset half done starts it again.
        self.store(OFFSET_VERSION, 0);
        compiler_fence(Ordering::SeqCst);
        (0..self.entries).filter_map(|head| self.entry(head)).for_each(|entry| self.unmark(entry));
        self.store(OFFSET_LAST_HEAD, 0);
        self.store(OFFSET_ENTRIES, self.entries);
        self.store(OFFSET_USED_IDX, used_idx);
        compiler_fence(Ordering::SeqCst);
        self.store(OFFSET_VERSION, VERSION);
    }

    fn marks(&self) -> Vec<Mark> {
        let marked = (0..self.entries).filter(|head| self.is_marked(*head));
        marked.map(|head| Mark { counter: self.counter(head), head }).collect()
    }
}

impl AccountAddress {
    /// Returns the entry of a head. `None` if the driver wrote a head outside of the ring, which
    /// the walk of the chain reports.
    #[inline]
    fn entry(&self, head: u16) -> Option<*mut u8> {
        let offset = SPLIT_HEADER_BYTES + usize::from(head) * SPLIT_ENTRY_BYTES;
        (head < self.entries).then(|| self.start.wrapping_add(offset))
    }

    /// Removes the mark of an entry.
    #[inline]
    fn unmark(&self, entry: *mut u8) {
        before_store();
        // SAFETY: the entry is in the account, see `Account`; a byte is always aligned.
        unsafe { AtomicU8::from_ptr(entry) }.store(0, Ordering::Relaxed);
    }

    fn is_marked(&self, head: u16) -> bool {
        self.entry(head).is_some_and(|entry| {
            // SAFETY: the entry is in the account, see `Account`; a byte is always aligned.
            unsafe { AtomicU8::from_ptr(entry) }.load(Ordering::Relaxed) != 0
        })
    }

    /// Links an entry to the head that was pushed before it.
    #[inline]
    fn set_next(&self, entry: *mut u8, next: u16) {
        before_store();
        let field = entry.wrapping_add(OFFSET_NEXT).cast();
        // SAFETY: the entry is in the account and aligned, see `Account`, and so is its field.
        unsafe { AtomicU16::from_ptr(field) }.store(next, Ordering::Relaxed);
    }

    fn next(&self, entry: *mut u8) -> u16 {
        let field = entry.wrapping_add(OFFSET_NEXT).cast();
        // SAFETY: the entry is in the account and aligned, see `Account`, and so is its field.
        unsafe { AtomicU16::from_ptr(field) }.load(Ordering::Relaxed)
    }

    /// Sets the number of an entry, and then its mark.
    #[inline]
    fn mark(&self, entry: *mut u8, counter: u64) {
        before_store();
        // SAFETY: the entry is in the account and aligned, see `Account`, and so is its field.
        let field = unsafe { AtomicU64::from_ptr(entry.wrapping_add(OFFSET_COUNTER).cast()) };
        field.store(counter, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        before_store();
        // SAFETY: the entry is in the account, see `Account`; a byte is always aligned.
        unsafe { AtomicU8::from_ptr(entry) }.store(1, Ordering::Relaxed);
    }

    /// The number of a marked request.
    fn counter(&self, head: u16) -> u64 {
        self.entry(head).map_or(0, |entry| {
            let field = entry.wrapping_add(OFFSET_COUNTER).cast();
            // SAFETY: the entry is in the account and aligned, see `Account`, and so is its field.
            unsafe { AtomicU64::from_ptr(field) }.load(Ordering::Relaxed)
        })
    }

    fn load(&self, offset: usize) -> u16 {
        let field = self.start.wrapping_add(offset).cast();
        // SAFETY: the offset is of a field of the account, which is aligned, see `Account`.
        unsafe { AtomicU16::from_ptr(field) }.load(Ordering::Relaxed)
    }

    #[inline]
    fn store(&self, offset: usize, value: u16) {
        before_store();
        let field = self.start.wrapping_add(offset).cast();
        // SAFETY: the offset is of a field of the account, which is aligned, see `Account`.
        unsafe { AtomicU16::from_ptr(field) }.store(value, Ordering::Relaxed);
    }
}

#[cfg(test)]
pub(crate) mod tests;
