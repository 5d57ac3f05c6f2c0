//! The mark of an image that is written to: the bit of its header by which the format says that it
//! is dirty.
//!
//! Its counts rise before anything points to what they count, so a process that is killed may
//! leave clusters that nothing uses. The mark is stable before the first count rises, and goes when
//! the image comes to rest. Whoever opens a marked image to write to it looks at all of it first
//! (`leaks.rs`), as QEMU does. Leaked clusters are freed before the first write: a start that
//! fails changes nothing.
//!
//! imago refuses marked images, and rewrites their headers as it has read them. So it does not see
//! the mark, and what it writes gets it. It also takes the autoclear features away when it opens an
//! image, though nothing may ever change; so it does not see these either, and they go with the
//! first change.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Where the mark is in a header of version 3.
const BYTE: usize = 79;
const BIT: u8 = 1;
/// The bit beside it, by which an image is marked as corrupt.
const CORRUPT: u8 = 2;

/// The features of a header that a program which does not know them takes away before its first
/// change, such as the validity of bitmaps. All of them are unknown here.
const AUTOCLEAR: std::ops::Range<usize> = 88..96;

/// What is known of the mark of an image that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MarkState {
    /// The header is not read yet, or there is nothing to be marked: it is only read.
    Unknown,
    /// It is not ours to mark. Others could write to it, or nobody could look at it.
    Never,
    Clear,
    Set,
    /// An earlier process has set it; its leaks are freed before the first write.
    Found,
    /// It was set by somebody else, and what he has left was not freed. It stays, for whoever opens
    /// the image next.
    Inherited,
}

#[derive(Debug)]
pub(super) struct Mark {
    state: Mutex<MarkState>,
    is_in_doubt: AtomicBool,
    has_autoclear: AtomicBool,
}

impl Default for Mark {
    fn default() -> Self {
        let [is_in_doubt, has_autoclear] = [false; 2].map(AtomicBool::new);
        Self { state: Mutex::new(MarkState::Unknown), is_in_doubt, has_autoclear }
    }
}

impl Mark {
    pub(super) fn state(&self) -> MarkState {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_state(&self, state: MarkState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// A table was not read or written, so that imago may have left clusters behind. The mark stays
    /// from now on.
    pub(super) fn doubt(&self) {
        self.is_in_doubt.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        self.is_in_doubt.load(Ordering::Relaxed)
    }

    /// The header has features that are to go before the first change.
    pub(super) fn has_autoclear(&self) -> bool {
        self.has_autoclear.load(Ordering::Relaxed)
    }

    /// Whether something is done before any write, also to data that has its place.
    pub(super) fn delays_writes(&self) -> bool {
        self.has_autoclear() || self.state() == MarkState::Found
    }

    pub(super) fn set_autoclear(&self, has_autoclear: bool) {
        self.has_autoclear.store(has_autoclear, Ordering::Relaxed);
    }

    /// Gives a header that imago writes the mark that the image has.
    pub(super) fn put(&self, header: &mut [u8]) {
        match self.state() {
            MarkState::Unknown | MarkState::Never => {}
            MarkState::Clear => set(header, false),
            MarkState::Set | MarkState::Found | MarkState::Inherited => set(header, true),
        }
    }
}

/// Whether a header of version 3 has the mark.
pub(super) fn is_set(header: &[u8]) -> bool {
    header.get(BYTE).is_some_and(|byte| byte & BIT != 0)
}

/// Whether a header of version 3 has features that a change takes away.
pub(super) fn has_autoclear(header: &[u8]) -> bool {
    header.get(AUTOCLEAR).is_some_and(|bytes| bytes.iter().any(|byte| *byte != 0))
}

/// Makes a header look as if the image were neither marked nor corrupt, and had no autoclear
/// features.
pub(super) fn hide(header: &mut [u8]) {
    if let Some(byte) = header.get_mut(BYTE) {
        *byte &= !(BIT | CORRUPT);
    }
    clear_autoclear(header);
}

/// Takes these features away.
pub(super) fn clear_autoclear(header: &mut [u8]) {
    if let Some(bytes) = header.get_mut(AUTOCLEAR) {
        bytes.fill(0);
    }
}

pub(super) fn set(header: &mut [u8], is_set: bool) {
    if let Some(byte) = header.get_mut(BYTE) {
        *byte = if is_set { *byte | BIT } else { *byte & !BIT };
    }
}
