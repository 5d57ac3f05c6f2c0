//! The consistency of an image after a crash: the order of its writes, its marks, its leaks, and
//! the tables that are known. This folder imports nothing from the rest of the kind: only the disk
//! below, and imago's types.

pub(crate) mod ahead_clusters;
pub(crate) mod bitmaps;
pub(crate) mod cache_limit;
pub(crate) mod counts;
pub(crate) mod header;
pub(crate) mod leaks;
pub(crate) mod mark;
pub(crate) mod metadata_map;
pub(crate) mod table_cache;
pub(crate) mod write_order;

use blockio::{DiskSource, Error};

/// The error of an image that cannot be used, with the reason.
pub(super) fn refused(source: &DiskSource, reason: String) -> Error {
    source.refused("", &reason)
}
