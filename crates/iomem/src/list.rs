//! A list of ranges of shared memory.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::rc::Rc;

use libc::iovec;

use crate::copy::{copy_across, copy_in, copy_out, zero};
use crate::memory::{IOVECS_MAX, Memory, Parts, Ranges};
use crate::shared_byte::SharedByte;

/// A list of memory ranges. Its [`Memory`] keeps them mapped, and takes back its storage on drop. A
/// log receives copies into the list, and other writes only by [`wrote`](Self::wrote).
pub struct Buffers(ManuallyDrop<Box<Parts>>);

impl std::fmt::Debug for Buffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffers")
            .field("iovecs", &self.iovecs().len())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl Buffers {
    /// Makes a list of `ranges`.
    ///
    /// # Safety
    ///
    /// Every range must be mapped and writable (readable is enough for lists that are only written
    /// to a disk) for as long as `memory`, or a clone of it, lives. No Rust reference to any of the
    /// bytes may exist during that time.
    #[inline]
    pub unsafe fn from_raw_parts(ranges: Ranges, memory: Memory) -> Self {
        let mut parts = ranges.into_parts();
        parts.memory = Some(memory);
        Self(ManuallyDrop::new(parts))
    }

    /// Makes a list without ranges, for operations that move no data.
    pub fn empty() -> Self {
        let memory = Memory::none();
        // SAFETY: the list has no range.
        unsafe { Self::from_raw_parts(memory.storage(), memory) }
    }

    /// Returns a copy of all bytes, for set-up and tests.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut data = vec![0; self.0.bytes];
        self.copy_to(0, &mut data);
        data
    }

    /// The number of bytes left in all ranges.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Returns true if no byte is left.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// The ranges that are left, in order. The kernel may read and write them for as long as this
    /// list, or any list of its [`memory`](Self::memory), lives.
    #[inline]
    pub fn iovecs(&self) -> &[iovec] {
        &self.0.iovecs[self.0.first..]
    }

    /// The number of ranges, including ranges that were used up from the front.
    #[inline]
    pub fn ranges(&self) -> usize {
        self.0.iovecs.len()
    }

    /// The memory that keeps the ranges mapped.
    #[inline]
    pub fn memory(&self) -> &Memory {
        self.0.memory.as_ref().expect("a list has its memory")
    }

    /// Drops the first `bytes` bytes, or all if there are fewer.
    #[inline]
    pub fn advance(&mut self, bytes: usize) {
        let parts = &mut **self.0;
        let mut left = bytes.min(parts.bytes);
        parts.bytes -= left;
        while let Some(range) = parts.iovecs.get_mut(parts.first) {
            if left < range.iov_len {
                range.iov_base = range.iov_base.wrapping_byte_add(left);
                range.iov_len -= left;
                return;
            }
            left -= range.iov_len;
            parts.first += 1;
        }
    }

    /// Drops all but the first `bytes` bytes. Changes nothing if there are fewer.
    #[inline]
    pub fn truncate(&mut self, bytes: usize) {
        if let Some(excess @ 1..) = self.0.bytes.checked_sub(bytes) {
            self.cut(excess);
        }
    }

    /// Drops the last `excess` bytes.
    fn cut(&mut self, mut excess: usize) {
        self.0.bytes -= excess;
        while excess > 0 {
            let last =
                self.0.iovecs.last_mut().expect("the ranges have the bytes that are counted");
            if excess < last.iov_len {
                last.iov_len -= excess;
                return;
            }
            excess -= last.iov_len;
            self.0.iovecs.pop();
        }
    }

    /// Removes and copies the first `N` bytes. Returns `None`, without a change, if there are
    /// fewer.
    #[inline]
    #[must_use]
    pub fn take_front<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut front = [0; N];
        if let Some(start) = self.take_from_range(N) {
            // SAFETY: the caller of `from_raw_parts` vouches for the range, and `front` is local.
            unsafe { copy_out(start, front.as_mut_ptr(), N) };
            return Some(front);
        }
        self.take_front_in_pieces(&mut front).then_some(front)
    }

    /// Removes the first `bytes` bytes and returns the eight at each offset of `at`, as
    /// little-endian numbers. Returns `None`, without a change, if there are fewer. Reads each byte
    /// once unless two numbers overlap.
    ///
    /// # Panics
    ///
    /// If a number ends beyond `bytes`.
    #[inline]
    #[must_use]
    pub fn take_words<const N: usize>(&mut self, at: [usize; N], bytes: usize) -> Option<[u64; N]> {
        assert!(at.iter().all(|at| at + size_of::<u64>() <= bytes), "a word that is not taken");
        if let Some(start) = self.take_from_range(bytes) {
            return Some(at.map(|at| {
                let mut word = [0; size_of::<u64>()];
                // SAFETY: as in `take_front`. The word is among the `bytes` bytes, and `word` is
                // local.
                unsafe { copy_out(start.add(at), word.as_mut_ptr(), word.len()) };
                u64::from_le_bytes(word)
            }));
        }
        self.take_words_in_pieces(at, bytes)
    }

    /// Removes the first `bytes` bytes, to be written later. Returns `None`, without a change, if
    /// there are fewer.
    #[inline]
    #[must_use]
    pub fn take_shared_bytes(&mut self, bytes: usize) -> Option<SharedBytes> {
        if let Some(start) = self.take_from_range(bytes) {
            let memory = self.memory().clone();
            return Some(SharedBytes(Segments::Range { start, bytes, memory }));
        }
        self.take_list(bytes).map(|list| SharedBytes(Segments::List(list)))
    }

    /// Removes the first `bytes` bytes if they are all in the first range.
    #[inline]
    fn take_from_range(&mut self, bytes: usize) -> Option<*mut u8> {
        let parts = &mut **self.0;
        let range = parts.iovecs.get_mut(parts.first).filter(|range| range.iov_len >= bytes)?;
        let start = range.iov_base;
        parts.bytes -= bytes;
        range.iov_base = start.wrapping_byte_add(bytes);
        range.iov_len -= bytes;
        parts.first += usize::from(range.iov_len == 0);
        Some(start.cast())
    }

    #[cold]
    fn take_list(&mut self, bytes: usize) -> Option<Self> {
        if self.0.bytes < bytes {
            return None;
        }
        let mut front = self.duplicate();
        front.truncate(bytes);
        self.advance(bytes);
        Some(front)
    }

    #[cold]
    fn take_front_in_pieces(&mut self, front: &mut [u8]) -> bool {
        let is_there = self.0.bytes >= front.len();
        if is_there {
            self.copy_to(0, front);
            self.advance(front.len());
        }
        is_there
    }

    #[cold]
    fn take_words_in_pieces<const N: usize>(
        &mut self,
        at: [usize; N],
        bytes: usize,
    ) -> Option<[u64; N]> {
        if self.bytes() < bytes {
            return None;
        }
        let words = at.map(|at| {
            let mut word = [0; size_of::<u64>()];
            self.copy_to(at, &mut word);
            u64::from_le_bytes(word)
        });
        self.advance(bytes);
        Some(words)
    }

    /// Removes the last byte, to be written later. Returns `None` if the list is empty.
    #[inline]
    pub fn take_last_byte(&mut self) -> Option<SharedByte> {
        self.0.bytes = self.0.bytes.checked_sub(1)?;
        loop {
            let range = self.0.iovecs.last_mut()?;
            if let Some(left) = range.iov_len.checked_sub(1) {
                range.iov_len = left;
                let address = range.iov_base.cast::<u8>().wrapping_add(left);
                if left == 0 {
                    self.0.iovecs.pop();
                }
                return Some(SharedByte::new(address, self.memory().clone()));
            }
            self.0.iovecs.pop();
        }
    }

    /// Returns true if each range starts at a multiple of `addresses` and is a multiple of
    /// `lengths` long (powers of two). Parts that are cut between ranges are then aligned, too.
    #[inline]
    pub fn is_aligned(&self, addresses: usize, lengths: usize) -> bool {
        let bits = |bits, range: &iovec| {
            bits | (range.iov_base.addr() & (addresses - 1)) | (range.iov_len & (lengths - 1))
        };
        self.iovecs().iter().fold(0, bits) == 0
    }

    /// Reports that the first `bytes` remaining bytes were written; they stay in the list. A log
    /// receives writes by a device or the kernel only through this call.
    #[inline]
    pub fn wrote(&self, bytes: usize) {
        self.wrote_at(0, bytes);
    }

    #[inline]
    fn wrote_at(&self, offset: usize, bytes: usize) {
        if self.memory().is_logged() {
            self.report(offset, bytes);
        }
    }

    #[cold]
    fn report(&self, offset: usize, bytes: usize) {
        self.each_part(offset, bytes, |_, start, len| self.memory().report(start, len));
    }

    /// Copies `data` into the list from byte `offset` on, as far as there is room. Returns the
    /// number of bytes copied.
    ///
    /// Only the specification, not the list, keeps a device from writing to device-readable memory.
    #[inline]
    pub fn copy_from(&self, offset: usize, data: &[u8]) -> usize {
        let copied = self.each_part(offset, data.len(), |done, start, len| {
            let part = &data[done..done + len];
            // SAFETY: `each_part` yields parts of the ranges, for which the caller of
            // `from_raw_parts` vouches, and `data` is a Rust slice, so no part of it lies in them.
            unsafe { copy_in(part.as_ptr(), start, len) };
        });
        self.wrote_at(offset, copied);
        copied
    }

    /// Copies bytes from `offset` on into `data`, as far as there are any. Returns their number.
    #[inline]
    pub fn copy_to(&self, offset: usize, data: &mut [u8]) -> usize {
        self.each_part(offset, data.len(), |done, start, len| {
            let part = &mut data[done..done + len];
            // SAFETY: as in `copy_from`.
            unsafe { copy_out(start, part.as_mut_ptr(), len) };
        })
    }

    /// Copies the first `len` bytes of `other` over the first bytes of this list.
    pub fn copy_from_buffers(&self, other: &Self, len: usize) {
        let copied = other.each_part(0, len, |done, source, len| {
            self.each_part(done, len, |inner, target, len| {
                // SAFETY: both parts are from `each_part`, and `inner + len` is at most the outer
                // length.
                unsafe { copy_across(source.wrapping_add(inner), target, len) };
            });
        });
        self.wrote_at(0, copied);
    }

    /// Writes zeroes from byte `offset` to the end.
    pub fn zero_from(&self, offset: usize) {
        let len = self.0.bytes.saturating_sub(offset);
        self.each_part(offset, len, |_, start, len| {
            // SAFETY: as in `copy_from`.
            unsafe { zero(start, len) };
        });
        self.wrote_at(offset, len);
    }

    /// Holds `kept`, in addition to earlier values, until the list is dropped or [lets it
    /// go](Self::drop_kept). Lists made from this one hold it, too.
    pub fn keep(&mut self, kept: Rc<dyn Any>) {
        self.0.kept = Some(match self.0.kept.take() {
            Some(earlier) => Rc::new((earlier, kept)),
            None => kept,
        });
    }

    /// Drops all values that this list [keeps](Self::keep).
    pub fn drop_kept(&mut self) {
        self.0.kept = None;
    }

    /// Returns another list of the same memory.
    pub fn duplicate(&self) -> Self {
        self.with_ranges(self.iovecs().iter().copied())
    }

    /// Returns another list of the first `most` bytes, or fewer. It has at most [`IOVECS_MAX`]
    /// ranges, so one system call takes it whole. Only its last range may be cut, to a multiple of
    /// `unit` (a power of two).
    pub fn prefix(&self, most: usize, unit: usize) -> Self {
        let (mut left, mut is_cut) = (most, false);
        let some = self.iovecs().iter().filter(|range| range.iov_len > 0).take(IOVECS_MAX);
        self.with_ranges(some.map_while(|range| {
            let fits = if range.iov_len > left { left & !(unit - 1) } else { range.iov_len };
            left -= fits;
            let is_intact = !std::mem::replace(&mut is_cut, fits < range.iov_len) && fits > 0;
            is_intact.then_some(iovec { iov_len: fits, ..*range })
        }))
    }

    /// Makes a list of parts of the ranges of this list.
    fn with_ranges(&self, parts: impl Iterator<Item = iovec>) -> Self {
        let mut ranges = self.memory().storage();
        parts.for_each(|range| ranges.push(range));
        // SAFETY: the caller of `from_raw_parts` vouches for the ranges and the memory.
        let mut beside = unsafe { Self::from_raw_parts(ranges, self.memory().clone()) };
        beside.0.kept.clone_from(&self.0.kept);
        beside
    }

    /// Returns all bytes, for a [report](SharedBytes::wrote) after the list itself has gone. `None`
    /// if there is no log of writes to them, now or later. A list of one range is not copied.
    pub fn to_report(&self) -> Option<SharedBytes> {
        if !self.memory().may_be_logged() {
            return None;
        }
        Some(SharedBytes(match *self.iovecs() {
            [iovec { iov_base, iov_len: bytes }] => {
                Segments::Range { start: iov_base.cast(), bytes, memory: self.memory().clone() }
            }
            _ => Segments::List(self.duplicate()),
        }))
    }

    /// Calls `visit(done, start, len)` for each contiguous part of the bytes `offset..offset + len`
    /// that exist. `done` counts the bytes visited before. Returns their total.
    #[inline]
    fn each_part(
        &self,
        mut offset: usize,
        len: usize,
        mut visit: impl FnMut(usize, *mut u8, usize),
    ) -> usize {
        let mut done = 0;
        for range in self.iovecs() {
            if done == len {
                break;
            }
            if offset >= range.iov_len {
                offset -= range.iov_len;
                continue;
            }
            let part = (range.iov_len - offset).min(len - done);
            visit(done, range.iov_base.cast::<u8>().wrapping_add(offset), part);
            done += part;
            offset = 0;
        }
        done
    }
}

impl Drop for Buffers {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `self.0` is not used again.
        let mut parts = unsafe { ManuallyDrop::take(&mut self.0) };
        if let Some(memory) = parts.memory.take() {
            memory.recycle(parts);
        }
    }
}

/// Bytes of shared memory that may be written once. Keeps them mapped.
#[derive(Debug)]
pub struct SharedBytes(Segments);

#[derive(Debug)]
enum Segments {
    Range { start: *mut u8, bytes: usize, memory: Memory },
    List(Buffers),
}

impl SharedBytes {
    /// The number of bytes.
    #[inline]
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Segments::Range { bytes, .. } => *bytes,
            Segments::List(list) => list.bytes(),
        }
    }

    /// Reports that all bytes were written.
    pub fn wrote(&self) {
        match &self.0 {
            &Segments::Range { start, bytes, ref memory } => {
                if memory.is_logged() {
                    memory.report(start, bytes);
                }
            }
            Segments::List(list) => list.wrote(list.bytes()),
        }
    }

    /// Writes zeroes to all bytes.
    #[inline]
    pub fn zero(&self) {
        match &self.0 {
            &Segments::Range { start, bytes, ref memory } => {
                // SAFETY: the bytes are part of a range of a list, which `memory` keeps mapped.
                unsafe { zero(start, bytes) };
                if memory.is_logged() {
                    memory.report(start, bytes);
                }
            }
            Segments::List(list) => list.zero_from(0),
        }
    }

    /// Writes `data`, as far as there is room, and fills the rest with zeroes.
    pub fn write(&self, data: &[u8]) {
        match &self.0 {
            &Segments::Range { start, bytes, ref memory } => {
                let len = data.len().min(bytes);
                // SAFETY: the bytes are part of a range of a list, which `memory` keeps mapped.
                // `data` is a Rust slice, so no part of it lies in them.
                unsafe {
                    copy_in(data.as_ptr(), start, len);
                    zero(start.wrapping_add(len), bytes - len);
                }
                if memory.is_logged() {
                    memory.report(start, bytes);
                }
            }
            Segments::List(list) => {
                list.copy_from(0, data);
                list.zero_from(data.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::BufferMemory;
    use crate::memory::WriteLog;
    use proptest::prelude::*;

    /// Makes a list over one block, cut at the given lengths.
    fn scattered(lengths: &[usize]) -> Buffers {
        let whole = Buffers::aligned(lengths.iter().sum(), 512);
        cut(&whole, whole.memory().clone(), lengths)
    }

    fn cut(whole: &Buffers, memory: Memory, lengths: &[usize]) -> Buffers {
        let mut at = whole.iovecs()[0].iov_base;
        let mut iovecs = Vec::new();
        for &len in lengths {
            iovecs.push(iovec { iov_base: at, iov_len: len });
            at = at.wrapping_byte_add(len);
        }
        // SAFETY: the ranges are parts of `whole`, whose memory is kept by the list or the caller.
        unsafe { Buffers::from_raw_parts(iovecs.into(), memory) }
    }

    #[test]
    fn a_list_is_truncated_at_any_byte_and_to_nothing() {
        for lengths in [&[24][..], &[16, 8], &[1, 15, 8]] {
            let all: Vec<u8> = (0..24).collect();
            for bytes in 0..=25 {
                let mut list = scattered(lengths);
                list.copy_from(0, &all);
                list.truncate(bytes);
                let kept = bytes.min(all.len());
                assert_eq!(list.to_vec(), all[..kept], "{lengths:?}");
                assert_eq!((list.bytes(), list.is_empty()), (kept, kept == 0), "{lengths:?}");
                assert!(list.iovecs().iter().all(|range| range.iov_len > 0), "{lengths:?}");
            }
        }
    }

    #[test]
    fn the_front_is_taken_off_however_it_is_cut() {
        for lengths in [&[24][..], &[16, 8], &[1, 15, 8], &[7, 7, 7, 3], &[16]] {
            let mut list = scattered(lengths);
            let bytes: Vec<u8> = (0..=255).take(lengths.iter().sum()).collect();
            list.copy_from(0, &bytes);
            let mut again = list.duplicate();
            let front = list.take_front::<16>().expect("it is there");
            assert_eq!(front[..], bytes[..16], "{lengths:?}");
            assert_eq!(list.to_vec(), bytes[16..], "{lengths:?}");
            assert_eq!(list.take_front::<16>(), None, "{lengths:?}");
            assert_eq!(list.to_vec(), bytes[16..], "nothing is taken that is not whole");
            let word = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
            assert_eq!(again.take_words([0, 3], 16), Some([word(0), word(3)]), "{lengths:?}");
            assert_eq!(again.to_vec(), bytes[16..], "{lengths:?}");
            assert_eq!(again.take_words([8], 16), None, "{lengths:?}");
            assert_eq!(again.to_vec(), bytes[16..], "nothing is taken that is not whole");
            assert!(list.iovecs().iter().all(|range| range.iov_len > 0));
        }
    }

    #[test]
    fn shared_bytes_are_the_front_however_it_is_cut() {
        for lengths in [&[24][..], &[16, 8], &[1, 15, 8], &[7, 7, 7, 3], &[16]] {
            for data in [0, 5, 12, 16, 20] {
                let mut list = scattered(lengths);
                let total = list.bytes();
                let whole = list.duplicate();
                whole.copy_from(0, &vec![0xaa; total]);
                let front = list.take_shared_bytes(16).expect("they are there");
                assert_eq!((front.bytes(), list.bytes()), (16, total - 16));
                front.write(&vec![0x55; data]);
                let written = data.min(16);
                let expected = [vec![0x55; written], vec![0; 16 - written], vec![0xaa; total - 16]];
                assert_eq!(whole.to_vec(), expected.concat(), "{lengths:?}, {data}");
                assert!(list.take_shared_bytes(16).is_none());
                assert_eq!(list.bytes(), total - 16, "nothing is taken that is not whole");
            }
        }
    }

    #[test]
    fn a_front_is_cut_at_a_unit_and_taken_by_one_system_call() {
        for (lengths, most, unit, front) in [
            (&[24][..], 16, 1, &[16][..]),
            (&[24], 24, 8, &[24]),
            (&[8, 24], 16, 8, &[8, 8]),
            // The cut is at a multiple of the unit from the start of its range.
            (&[4, 24], 16, 8, &[4, 8]),
            // A range behind the cut is not next to the range before it.
            (&[24, 4], 20, 8, &[16]),
            (&[4, 24, 4], 12, 16, &[4]),
            (&[8, 8], 16, 8, &[8, 8]),
            (&[1; 1500], 1200, 1, &[1; IOVECS_MAX]),
            (&[0; 1500], 1200, 1, &[]),
            (&[0, 8, 0, 8], 12, 1, &[8, 4]),
        ] {
            let mut list = scattered(lengths);
            list.keep(Rc::new(7));
            let bytes: Vec<u8> = (0..=255).cycle().take(list.bytes()).collect();
            list.copy_from(0, &bytes);
            let taken = list.prefix(most, unit);
            let cut: Vec<usize> = taken.iovecs().iter().map(|range| range.iov_len).collect();
            assert_eq!(cut, front, "{lengths:?}");
            assert_eq!(taken.bytes(), cut.iter().sum::<usize>());
            assert_eq!(taken.to_vec(), bytes[..taken.bytes()], "{lengths:?}");
            assert!(taken.0.kept.is_some(), "what is kept goes with the list");
            assert_eq!(list.to_vec(), bytes, "the list itself stays");
        }
    }

    #[test]
    fn all_that_is_kept_goes_with_the_last_list() {
        let tokens = [(); 3].map(|()| Rc::new(()));
        let are_kept = || tokens.each_ref().map(|token| Rc::strong_count(token) > 1);
        let mut list = scattered(&[8, 8]);
        list.keep(Rc::<()>::clone(&tokens[0]));
        let front = list.prefix(8, 1);
        list.keep(Rc::<()>::clone(&tokens[1]));
        list.keep(Rc::<()>::clone(&tokens[2]));
        let mut again = list.duplicate();
        drop(list);
        assert_eq!(are_kept(), [true; 3]);
        again.drop_kept();
        assert_eq!(are_kept(), [true, false, false], "the front has the first one");
        drop(front);
        assert_eq!(are_kept(), [false; 3]);
    }

    proptest! {
        #[test]
        fn a_scattered_list_behaves_like_one_slice(
            lengths in proptest::collection::vec(0usize..9, 1..12),
            offset in 0usize..40, skip in 0usize..40,
            data in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut list = scattered(&lengths);
            let total: usize = lengths.iter().sum();
            let mut model = vec![0u8; total];
            let copied = list.copy_from(offset, &data);
            prop_assert_eq!(copied, data.len().min(total.saturating_sub(offset)));
            for (i, byte) in data.iter().enumerate() {
                if let Some(slot) = model.get_mut(offset + i) { *slot = *byte; }
            }
            prop_assert_eq!(list.to_vec(), model.clone());
            list.advance(skip);
            let rest = model.split_off(skip.min(total));
            prop_assert_eq!(list.bytes(), rest.len());
            prop_assert_eq!(list.to_vec(), rest.clone());
            let copy = Buffers::aligned(rest.len(), 1);
            copy.copy_from_buffers(&list, rest.len());
            prop_assert_eq!(copy.to_vec(), rest.clone());
            list.zero_from(offset);
            let mut zeroed = rest;
            zeroed.iter_mut().skip(offset).for_each(|byte| *byte = 0);
            prop_assert_eq!(list.to_vec(), zeroed.clone());
            prop_assert_eq!(list.duplicate().to_vec(), zeroed.clone());
            let last = list.take_last_byte();
            prop_assert_eq!(last.is_some(), !zeroed.is_empty());
            if let (Some(byte), Some(_)) = (last, zeroed.pop()) {
                byte.write(0x5a);
                prop_assert_eq!(list.to_vec(), zeroed);
            }
        }

        #[test]
        fn alignment_is_that_of_every_range(
            ranges in proptest::collection::vec((0usize..3, 0usize..3), 1..IOVECS_MAX.min(20)),
        ) {
            let memory = BufferMemory::new(8192, 4096);
            let start = memory.buffers(8192).iovecs()[0].iov_base;
            let iovecs: Vec<_> = ranges
                .iter()
                .map(|&(at, len)| iovec {
                    iov_base: start.wrapping_byte_add(at * 256),
                    iov_len: len * 256,
                })
                .collect();
            let kept = memory.buffers(0).memory().clone();
            // SAFETY: each range ends within 1,024 bytes of the start of the block.
            let list = unsafe { Buffers::from_raw_parts(iovecs.into(), kept) };
            let expected = ranges.iter().all(|(at, len)| at % 2 == 0 && len % 2 == 0);
            prop_assert_eq!(list.is_aligned(512, 512), expected);
            prop_assert!(list.is_aligned(256, 256));
            let addresses = ranges.iter().all(|(at, _)| at % 2 == 0);
            prop_assert_eq!(list.is_aligned(512, 256), addresses);
            let lengths = ranges.iter().all(|(_, len)| len % 2 == 0);
            prop_assert_eq!(list.is_aligned(256, 512), lengths);
        }
    }

    /// Records each byte that was written.
    #[derive(Default)]
    struct Bytes(RefCell<Vec<usize>>);

    impl WriteLog for Bytes {
        fn wrote(&self, start: *const u8, bytes: usize) {
            self.0.borrow_mut().extend(start.addr()..start.addr() + bytes);
        }
    }

    #[test]
    fn a_log_hears_of_each_byte_that_is_written_and_of_no_other() {
        let whole = Buffers::aligned(64, 64);
        let log = Rc::new(Bytes::default());
        let base = whole.iovecs()[0].iov_base.addr();
        let memory = Memory::loggable(whole.memory().clone());
        memory.set_log(Some(Rc::<Bytes>::clone(&log)));
        let mut list = cut(&whole, memory, &[10, 0, 20, 34]);
        let heard = || {
            let mut bytes = std::mem::take(&mut *log.0.borrow_mut());
            bytes.iter_mut().for_each(|byte| *byte -= base);
            bytes
        };
        let of = |range: std::ops::Range<usize>| range.collect::<Vec<_>>();
        list.copy_to(0, &mut [0; 64]);
        assert_eq!(heard(), []);
        list.copy_from(8, &[1; 4]);
        assert_eq!(heard(), of(8..12));
        list.copy_from(62, &[1; 4]);
        assert_eq!(heard(), of(62..64), "what finds no room is not written");
        list.wrote(12);
        assert_eq!(heard(), of(0..12));
        list.advance(5);
        list.wrote(12);
        assert_eq!(heard(), of(5..17));
        list.copy_from_buffers(&Buffers::aligned(6, 1), 100);
        assert_eq!(heard(), of(5..11));
        list.zero_from(50);
        assert_eq!(heard(), of(55..64));
        if let Some(byte) = list.take_last_byte() {
            byte.write(1);
        }
        assert_eq!(heard(), of(63..64));
        for bytes in [2, 40] {
            let start = 64 - 1 - list.bytes();
            list.take_shared_bytes(bytes).expect("they are there").write(&[1]);
            assert_eq!(heard(), of(start..start + bytes));
        }
    }

    #[test]
    fn a_log_is_replaced_under_lists_that_exist() {
        let whole = Buffers::aligned(64, 64);
        assert!(whole.to_report().is_none());
        for lengths in [&[64][..], &[40, 0, 24]] {
            let memory = Memory::loggable(whole.memory().clone());
            let list = cut(&whole, memory.clone(), lengths);
            let later = list.to_report().expect("there may be a log");
            assert_eq!(
                matches!(later.0, Segments::Range { .. }),
                lengths.len() == 1,
                "it is copied"
            );
            let logs = [Rc::new(Bytes::default()), Rc::new(Bytes::default())];
            list.wrote(1);
            drop(list);
            later.wrote();
            for log in &logs {
                memory.set_log(Some(Rc::<Bytes>::clone(log)));
                later.wrote();
            }
            memory.set_log(None);
            assert!(!memory.is_logged(), "each write would be looked up");
            later.wrote();
            assert_eq!(logs.map(|log| log.0.borrow().len()), [64, 64]);
        }
    }

    /// Otherwise the kernel would get an empty range with each request.
    #[test]
    fn a_range_that_is_used_up_from_the_end_is_gone() {
        let mut list = scattered(&[3, 1]);
        list.take_last_byte().expect("the status").write(1);
        assert_eq!((list.iovecs().len(), list.bytes()), (1, 3));
    }

    #[test]
    fn the_storage_of_a_list_is_used_for_the_next() {
        let list = scattered(&[1, 2, 3]);
        let (memory, first) = (list.memory().clone(), list.iovecs().as_ptr());
        drop(list);
        let storage = memory.storage();
        assert_eq!(storage.iovecs().as_ptr(), first);
    }
}
