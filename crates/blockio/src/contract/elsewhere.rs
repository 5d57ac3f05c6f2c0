//! A disk that another thread has.

use crate::disk::DiskSource;
use crate::disk::elsewhere::Elsewhere;

/// One with this content.
pub(super) fn disk(content: &[u8]) -> DiskSource {
    Elsewhere::new(content).source()
}
