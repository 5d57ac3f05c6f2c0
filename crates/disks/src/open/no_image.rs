//! The stand-in for images in builds without the feature `qcow2`.

use std::path::Path;

use anyhow::{Result, bail};
use blockio::DiskSource;
use blockio::disk::Folder;

use crate::spec::BackingFiles;

/// Fails: this program was built without images.
pub(super) fn is_image(_: &DiskSource) -> Result<bool> {
    bail!("cannot open an image: this program was built without images (feature qcow2)")
}

/// Fails like [`is_image`].
pub(super) fn open_qcow2(
    source: DiskSource,
    _: Option<&Path>,
    _: &BackingFiles,
    _: impl FnMut(&Path, Option<&Folder>) -> Result<DiskSource>,
    _: bool,
) -> Result<DiskSource> {
    is_image(&source).map(|_| source)
}
