//! The mark of an image that is written to: the dirty bit of its header.
//!
//! Counts rise before anything points to their clusters, so a process that is killed may leave
//! leaked clusters. The mark is stable before the first count rises, and is removed when the image
//! comes to rest. A process that opens a marked image for writing checks all of it first
//! (`leaks.rs`), as QEMU does. Leaked clusters are freed before the first write: a start that fails
//! changes nothing.
//!
//! imago refuses marked images, and rewrites their headers as it has read them. So the mark is
//! hidden from imago and added to each header that it writes. imago also clears the autoclear
//! features when it opens an image, even if nothing ever changes. So these are hidden too, and the
//! first change clears them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The place of the mark in a header of version 3.
const BYTE: usize = 79;
const BIT: u8 = 1;
/// The bit beside it, which marks an image as corrupt.
const CORRUPT: u8 = 2;

/// The autoclear features of a header, such as the validity of bitmaps. A program clears the ones
/// that it does not know before its first change. All of them are unknown here.
const AUTOCLEAR: std::ops::Range<usize> = 88..96;

/// The state of the mark of an open image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MarkState {
    /// The header is not read yet, or the image is only read and needs no mark.
    Unknown,
    /// The image must not be marked: other processes could write to it, or no later process could
    /// check it.
    NotAllowed,
    Clear,
    Set,
    /// Set by an earlier process. Its leaks are freed before the first write.
    LeaksToFree,
    /// Set by an earlier process, with leaks that were not freed. The mark stays for the next
    /// opening.
    Inherited,
}

#[derive(Debug)]
pub(crate) struct Mark {
    state: Mutex<MarkState>,
    must_stay_set: AtomicBool,
    has_autoclear: AtomicBool,
}

impl Default for Mark {
    fn default() -> Self {
        let [must_stay_set, has_autoclear] = [false; 2].map(AtomicBool::new);
        Self { state: Mutex::new(MarkState::Unknown), must_stay_set, has_autoclear }
    }
}

impl Mark {
    pub(crate) fn state(&self) -> MarkState {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_state(&self, state: MarkState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Keeps the mark from now on, since imago may have leaked clusters: a table was not read or
    /// written.
    pub(crate) fn keep_set(&self) {
        self.must_stay_set.store(true, Ordering::Relaxed);
    }

    pub(crate) fn must_stay_set(&self) -> bool {
        self.must_stay_set.load(Ordering::Relaxed)
    }

    /// True if the header has features that must be cleared before the first change.
    pub(crate) fn has_autoclear(&self) -> bool {
        self.has_autoclear.load(Ordering::Relaxed)
    }

    /// True if any write must wait for the leaks or features to be cleared, even to data that has
    /// its place.
    pub(crate) fn delays_writes(&self) -> bool {
        self.has_autoclear() || self.state() == MarkState::LeaksToFree
    }

    pub(crate) fn set_autoclear(&self, has_autoclear: bool) {
        self.has_autoclear.store(has_autoclear, Ordering::Relaxed);
    }

    /// Puts the mark of the image into a header that imago writes.
    pub(crate) fn restore(&self, header: &mut [u8]) {
        match self.state() {
            MarkState::Unknown | MarkState::NotAllowed => {}
            MarkState::Clear => set(header, false),
            MarkState::Set | MarkState::LeaksToFree | MarkState::Inherited => set(header, true),
        }
    }
}

/// Returns true if a header of version 3 has the mark.
pub(crate) fn is_set(header: &[u8]) -> bool {
    header.get(BYTE).is_some_and(|byte| byte & BIT != 0)
}

/// Returns true if a header of version 3 has features that a change clears.
pub(crate) fn has_autoclear(header: &[u8]) -> bool {
    header.get(AUTOCLEAR).is_some_and(|bytes| bytes.iter().any(|byte| *byte != 0))
}

/// Makes a header look as if the image were neither marked nor corrupt, and had no autoclear
/// features.
pub(crate) fn mask(header: &mut [u8]) {
    if let Some(byte) = header.get_mut(BYTE) {
        *byte &= !(BIT | CORRUPT);
    }
    clear_autoclear(header);
}

/// Clears the autoclear features.
pub(crate) fn clear_autoclear(header: &mut [u8]) {
    if let Some(bytes) = header.get_mut(AUTOCLEAR) {
        bytes.fill(0);
    }
}

pub(crate) fn set(header: &mut [u8], is_set: bool) {
    if let Some(byte) = header.get_mut(BYTE) {
        *byte = if is_set { *byte | BIT } else { *byte & !BIT };
    }
}
