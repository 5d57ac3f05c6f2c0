//! Changes of the size of a disk.

use anyhow::{Result, bail, ensure};
use blockio::DiskSource;

use crate::control::guest_turns::GuestTurns;
use crate::spec::command::NewSize;

/// The lock of the disk, which is taken late, is free for other programs.
#[derive(Debug, thiserror::Error)]
#[error(
    "no guest uses it, so it is not locked, and another host may use it; resize it with its own \
     tool, or while a guest runs"
)]
pub(super) struct NotLocked;

/// Like [`resize_disk`], for a disk that may be locked during the `turns` of guests alone. A turn
/// does not end before the file has its size.
///
/// # Errors
///
/// [`NotLocked`] if no guest has its turn, and the file would change.
pub(super) fn resize_while_locked(
    turns: Option<&GuestTurns>,
    disk: &DiskSource,
    wanted: NewSize,
    cut_off: impl FnOnce(u64),
) -> Result<u64> {
    let resize = |is_locked: bool| {
        ensure!(is_locked || wanted.size_bytes.is_none(), NotLocked);
        resize_disk(disk, wanted, cut_off)
    };
    match turns {
        Some(turns) => turns.with_turn(|turn| resize(turn.is_some())),
        None => resize(true),
    }
}

/// Resizes a disk, unless that would cut off data without permission. `cut_off` stops the use of
/// data beyond the new size.
fn resize_disk(disk: &DiskSource, wanted: NewSize, cut_off: impl FnOnce(u64)) -> Result<u64> {
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use blockio::DiskOptions;
    use vhost_user::RunLock;

    use super::*;
    use crate::control::guest_turns::tests::host;

    /// Another host would use the disk while this one changes its size.
    #[test]
    fn a_turn_does_not_end_during_a_resize() {
        let folder = tempfile::tempdir().unwrap();
        let [path, file] = ["disk", "file"].map(|name| folder.path().join(name));
        std::fs::write(&path, [0; 8192]).unwrap();
        let turns = host(&path, &file, "a");
        let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let disk = DiskSource::file(&path, &options).unwrap();
        let wanted = NewSize { size_bytes: Some(4096), shrink: true };
        let refused = resize_while_locked(Some(&turns), &disk, wanted, |_| panic!("it is cut"));
        assert!(refused.unwrap_err().is::<NotLocked>());
        turns.take(1).unwrap();
        std::thread::scope(|scope| {
            let (ended, end) = mpsc::channel();
            let turns = &turns;
            let resized = resize_while_locked(Some(turns), &disk, wanted, |_| {
                scope.spawn(move || ended.send(turns.release(1)));
                assert!(end.recv_timeout(Duration::from_millis(300)).is_err(), "it is unlocked");
            });
            assert_eq!(resized.unwrap(), 4096);
        });
        assert!(!turns.locks().are_held());
        assert_eq!(path.metadata().unwrap().len(), 4096);
    }
}
