//! Changes of the size of a disk.

use anyhow::{Result, bail, ensure};
use blockio::DiskSource;

use crate::spec::command::NewSize;

/// Refuses to change a disk while its lock, which is taken late, is free for other programs.
pub(super) fn check_lock(is_locked: bool, wanted: NewSize) -> Result<()> {
    ensure!(
        is_locked || wanted.size_bytes.is_none(),
        "no guest uses it, so it is not locked, and another host may use it; resize it with its \
         own tool, or while a guest runs"
    );
    Ok(())
}

/// Resizes a disk, unless that would cut off data without permission. `cut_off` stops the use of
/// data beyond the new size.
pub(super) fn resize_disk(
    disk: &DiskSource,
    wanted: NewSize,
    cut_off: impl FnOnce(u64),
) -> Result<u64> {
    let Some(size) = wanted.size_bytes else {
        disk.probe_space()?;
        return Ok(disk.refresh()?);
    };
    // Another program may have enlarged the disk a moment ago.
    let outside = disk.size_probe().map(|outside| outside.size_bytes()).transpose()?.flatten();
    let covered = disk.covered_bytes()?.max(outside.unwrap_or(0));
    if size < covered && !wanted.shrink {
        bail!(
            "it has {covered} bytes, and data beyond byte {size} would be lost; to truncate it, \
             repeat the command with `--shrink` (`shrink` in a request)"
        );
    }
    disk.set_size(size, || cut_off(size))?;
    Ok(size)
}
