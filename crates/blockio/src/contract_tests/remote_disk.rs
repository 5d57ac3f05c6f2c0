//! A disk of another thread.

use crate::disk::DiskSource;
use crate::testing::RemoteStub;

/// Returns a disk with this content.
pub(super) fn disk(content: &[u8]) -> DiskSource {
    RemoteStub::new(content).source()
}
