//! Bounds on the bytes that disks give to their engines: in a round, and at a time.
//!
//! The kernel does its part of a submit on the IoThread: with the page cache the copy, with direct
//! I/O the look-up of the memory. So the bytes of a round are bounded, and the loop checks its
//! sources between rounds.

use std::cell::Cell;

use crate::config::{ByteLimits, EngineKind};

/// The part of a round's bytes up to which ops are not counted. 1,024 of them in an engine make two
/// rounds' worth.
const UNCOUNTED_DIVISOR: usize = 512;

/// The bytes on which a disk that moves 5 GB a second works for 100 µs.
const BUSY_BYTES: usize = 512 << 10;

/// The bounds of an IoThread, and the bytes given in this round.
pub(super) struct RoundBytes {
    limits: ByteLimits,
    /// The size up to which an op does not count.
    small: usize,
    given: usize,
    /// Counted bytes in all engines.
    in_engines: usize,
    is_full: Cell<bool>,
}

impl RoundBytes {
    pub(super) fn new(limits: ByteLimits) -> Self {
        let small = limits.round / UNCOUNTED_DIVISOR;
        Self { limits, small, given: 0, in_engines: 0, is_full: Cell::new(false) }
    }

    /// Returns true if an op of this size counts.
    #[inline]
    pub(super) fn counts(&self, bytes: usize) -> bool {
        bytes > self.small
    }

    /// The bytes of an op as they count.
    #[inline]
    pub(super) fn counted(&self, bytes: usize) -> usize {
        if self.counts(bytes) { bytes } else { 0 }
    }

    /// Returns true if a round takes an op of `counted` bytes. An op alone always has room.
    pub(super) fn has_room(&self, counted: usize) -> bool {
        let fits = counted == 0 || self.given == 0 || self.given + counted <= self.limits.round;
        self.is_full.set(self.is_full.get() || !fits);
        fits
    }

    /// Returns true if a disk with `before` counted bytes in this engine may have `counted` more.
    pub(super) fn disk_has_room(&self, engine: EngineKind, before: usize, counted: usize) -> bool {
        let most = match engine {
            // Each op has a thread, and the threads compete with the loop for CPUs.
            EngineKind::Threads => self.limits.disk / 2,
            EngineKind::IoUring | EngineKind::Aio => self.limits.disk,
        };
        counted == 0 || before == 0 || before + counted <= most
    }

    /// Counts an op that goes to an engine.
    pub(super) fn charge(&mut self, counted: usize) {
        self.given += counted;
        self.in_engines += counted;
    }

    /// Takes back the counted bytes of an op that has completed.
    #[inline]
    pub(super) fn release(&mut self, counted: usize) {
        self.in_engines -= counted;
    }

    /// Counted bytes of the ops in all engines.
    pub(super) fn in_engines(&self) -> usize {
        self.in_engines
    }

    /// Returns true while disks have work for longer than a wake-up takes.
    pub(super) fn is_busy(&self) -> bool {
        self.in_engines >= BUSY_BYTES
    }

    /// Returns true once an op was kept for the next round.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.is_full.get()
    }

    /// Begins a round. Returns the counted bytes of the previous one.
    #[inline]
    pub(super) fn begin(&mut self) -> usize {
        self.is_full.set(false);
        std::mem::take(&mut self.given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND: usize = 1 << 20;
    const DISK: usize = 64 << 10;

    fn new() -> RoundBytes {
        RoundBytes::new(ByteLimits { op: ROUND, round: ROUND, disk: DISK })
    }

    #[test]
    fn small_ops_do_not_count() {
        for (bytes, counted) in [(0, 0), (2048, 0), (2049, 2049), (ROUND, ROUND)] {
            assert_eq!(new().counted(bytes), counted);
        }
    }

    #[test]
    fn a_round_takes_its_bytes_or_one_op() {
        let mut bytes = new();
        assert!(bytes.has_room(2 * ROUND));
        bytes.charge(ROUND - 4096);
        assert!(bytes.has_room(4096) && !bytes.is_full());
        assert!(!bytes.has_room(4097) && bytes.is_full() && bytes.has_room(0));
        assert!(bytes.is_full(), "an op was kept");
        bytes.charge(4096);
        assert_eq!(bytes.begin(), ROUND);
        assert!(!bytes.is_full() && bytes.has_room(ROUND));
        assert_eq!(bytes.begin(), 0);
    }

    #[test]
    fn a_disk_has_half_as_much_in_threads() {
        use EngineKind::{Aio, IoUring, Threads};
        for (engine, most) in [(IoUring, DISK), (Aio, DISK), (Threads, DISK / 2)] {
            let has_room = |before, counted| new().disk_has_room(engine, before, counted);
            assert!(has_room(4096, most - 4096) && !has_room(4096, most - 4095), "{engine}");
            assert!(has_room(0, 2 * DISK) && has_room(2 * DISK, 0), "{engine}");
        }
    }

    #[test]
    fn disks_are_busy_with_the_bytes_of_100_microseconds() {
        let mut bytes = new();
        bytes.charge((512 << 10) - 1);
        assert!(!bytes.is_busy());
        bytes.charge(1);
        bytes.begin();
        assert!(bytes.is_busy(), "a new round changes nothing");
        bytes.release(1);
        assert!(!bytes.is_busy());
    }
}
