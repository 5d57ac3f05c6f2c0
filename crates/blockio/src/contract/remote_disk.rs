//! A disk of another thread.

use crate::disk::DiskSource;
use crate::disk::elsewhere::Elsewhere;

/// Returns a disk with this content.
pub(super) fn disk(content: &[u8]) -> DiskSource {
    Elsewhere::new(content).source()
}
