//! The mark of an image that is written to: the bit of its header by which the format says that it
//! is dirty.
//!
//! Its counts rise before anything points to what they count, so a process that is killed may
//! leave clusters that nothing uses. The mark is stable before the first count rises, and goes when
//! the image comes to rest. Whoever opens a marked image to write to it looks at all of it first
//! (`leaks.rs`), as QEMU does.
//!
//! imago refuses marked images, and rewrites their headers as it has read them. So it does not see
//! the mark, and what it writes gets it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Where the mark is in a header of version 3.
const BYTE: usize = 79;
const BIT: u8 = 1;

/// What is known of the mark of an image that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MarkState {
    /// The header is not read yet, or there is nothing to be marked: it is only read.
    Unknown,
    /// It is not ours to mark. Others could write to it, or nobody could look at it.
    Never,
    Clear,
    Set,
    /// It was set by somebody else, and what he has left was not freed. It stays, for whoever opens
    /// the image next.
    Inherited,
}

#[derive(Debug)]
pub(super) struct Mark {
    state: Mutex<MarkState>,
    is_in_doubt: AtomicBool,
}

impl Default for Mark {
    fn default() -> Self {
        Self { state: Mutex::new(MarkState::Unknown), is_in_doubt: AtomicBool::new(false) }
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

    /// Gives a header that imago writes the mark that the image has.
    pub(super) fn put(&self, header: &mut [u8]) {
        match self.state() {
            MarkState::Unknown | MarkState::Never => {}
            MarkState::Clear => set(header, false),
            MarkState::Set | MarkState::Inherited => set(header, true),
        }
    }
}

/// Whether a header of version 3 has the mark.
pub(super) fn is_set(header: &[u8]) -> bool {
    header.get(BYTE).is_some_and(|byte| byte & BIT != 0)
}

pub(super) fn set(header: &mut [u8], is_set: bool) {
    if let Some(byte) = header.get_mut(BYTE) {
        *byte = if is_set { *byte | BIT } else { *byte & !BIT };
    }
}
