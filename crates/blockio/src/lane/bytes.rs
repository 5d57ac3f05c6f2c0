//! Bounds on the bytes that disks give to their engines: in a round, and at a time.
//!
//! The kernel does its part of a submit on the IoThread: with the page cache the copy, with direct
//! I/O the look-up of the memory. So the bytes of a round are bounded, and the loop looks at its
//! sources between rounds.

use std::cell::Cell;

use crate::config::{ByteLimits, EngineKind};

/// A round's bytes in ops that are not counted: with 1,024 of them in an engine, two rounds' worth.
const SMALL_PART: usize = 512;

/// A disk that moves 5 GB a second works on so many bytes for 100 µs.
const MANY: usize = 512 << 10;

/// The bounds of an IoThread, and its part of them in this round.
pub(super) struct RoundBytes {
    limits: ByteLimits,
    /// The size up to which an op counts as nothing.
    small: usize,
    given: usize,
    /// Counted bytes in all engines.
    in_engines: usize,
    is_full: Cell<bool>,
}

impl RoundBytes {
    pub(super) fn new(limits: ByteLimits) -> Self {
        let small = limits.round / SMALL_PART;
        Self { limits, small, given: 0, in_engines: 0, is_full: Cell::new(false) }
    }

    /// True for an op that counts.
    #[inline]
    pub(super) fn counts(&self, bytes: usize) -> bool {
        bytes > self.small
    }

    /// The bytes of an op as they count.
    #[inline]
    pub(super) fn counted(&self, bytes: usize) -> usize {
        if self.counts(bytes) { bytes } else { 0 }
    }

    /// True where a round takes an op of so many counted bytes. An op alone always has room.
    pub(super) fn has_room(&self, counted: usize) -> bool {
        let fits = counted == 0 || self.given == 0 || self.given + counted <= self.limits.round;
        self.is_full.set(self.is_full.get() || !fits);
        fits
    }

    /// True where a disk with `before` counted bytes in this engine may have `counted` more.
    pub(super) fn disk_has_room(&self, engine: EngineKind, before: usize, counted: usize) -> bool {
        let most = match engine {
            // Each op has a thread, and these compete with the loop for CPUs.
            EngineKind::Threads => self.limits.disk / 2,
            EngineKind::IoUring | EngineKind::Aio => self.limits.disk,
        };
        counted == 0 || before == 0 || before + counted <= most
    }

    /// Counts an op that goes to an engine.
    pub(super) fn give(&mut self, counted: usize) {
        self.given += counted;
        self.in_engines += counted;
    }

    /// Takes back the counted bytes of an op that has completed.
    #[inline]
    pub(super) fn take_back(&mut self, counted: usize) {
        self.in_engines -= counted;
    }

    /// True while disks have work for longer than a wake-up takes.
    pub(super) fn are_many(&self) -> bool {
        self.in_engines >= MANY
    }

    /// True once an op was kept for the next round.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.is_full.get()
    }

    /// Begins a round. Returns the counted bytes of the last one.
    #[inline]
    pub(super) fn begin(&mut self) -> usize {
        self.is_full.set(false);
        std::mem::take(&mut self.given)
    }
}
