//! Changes of the size of a disk.

use anyhow::{Result, bail, ensure};
use blockio::DiskSource;

use super::Daemon;
use crate::control::ResizingDisk;
use crate::control::guest_turns::{GuestTurns, access_of};
use crate::spec::UnitPlace;
use crate::spec::command::{CommandError, NewSize, Reply};

/// The lock of the disk, which is taken late, is free for other programs.
#[derive(Debug, thiserror::Error)]
#[error(
    "no guest uses it, so it is not locked, and another host may use it; resize it with its own \
     tool, or while a guest runs"
)]
struct NotLocked;

impl Daemon {
    pub(super) fn resize(
        &self,
        export: String,
        place: Option<UnitPlace>,
        wanted: NewSize,
    ) -> Result<Reply, CommandError> {
        let (resizing, lock) = self.control.begin_resize(export.clone(), place)?;
        let ResizingDisk { log_name, device, disk, turns, .. } = resizing;
        let what = place.map_or("the disk".to_owned(), |place| format!("logical unit {place}"));
        let before = disk.announced_bytes();
        let _resizing = self.shared_disks.begin_resize(&disk);
        // Other exports may have opened the same disk separately.
        let (access, mut is_cut_off) = (access_of(&device, place), false);
        let held = access.as_ref().map(|access| access.hold_size());
        let cut_off = |size| {
            is_cut_off = true;
            access.iter().for_each(|access| access.cut_off(size));
        };
        let resized = resize_while_locked(turns.as_deref(), &disk, wanted, cut_off);
        let has_changed = disk.info().size_bytes != before;
        drop(disk);
        if is_cut_off || has_changed {
            access.iter().for_each(|access| access.refresh());
            self.shared_disks.record_resize();
        }
        drop(held);
        let size = resized.map_err(|error| {
            let is_refused = error.is::<NotLocked>();
            let error = error.context(format!("cannot resize {what} of {export}"));
            if is_refused { CommandError::Invalid(error) } else { CommandError::Failed(error) }
        })?;
        if !has_changed {
            return Ok(Reply::Resized(size));
        }
        lock.report_resized();
        // A caller that waits for the end of the export may use the disk once these are dropped.
        drop((device, access, turns));
        drop(lock);
        tracing::info!(export = log_name, "{what} has {size} bytes, not {before}");
        Ok(Reply::Resized(size))
    }
}

/// Like [`resize_disk`], for a disk that may be locked during the `turns` of guests alone. A turn
/// does not end before the file has its size.
///
/// # Errors
///
/// [`NotLocked`] if no guest has its turn, and the file would change.
fn resize_while_locked(
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
    use blockio::testing::RemoteStub;
    use clap::{Args, FromArgMatches};
    use vhost_user::RunLock;

    use super::*;
    use crate::control::guest_turns::tests::host;
    use crate::control::subscribers::{EventDetails, ExportEvent};
    use crate::options::ServeArgs;
    use crate::socket::inherited::InheritedSockets;
    use crate::spec::command::Command;
    use crate::testing::LogCapture;

    /// Another program may have enlarged the disk, and written to its end.
    #[test]
    fn no_size_cuts_off_data_without_permission() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let local = DiskSource::file(file.path(), &DiskOptions::default()).unwrap();
        let remote = RemoteStub::new(&[0; 4096]);
        file.as_file().set_len(16384).unwrap();
        remote.have_size(16384);
        for disk in [local, remote.clone().source()] {
            let resize = |size, shrink| {
                let mut cut = None;
                let wanted = NewSize { size_bytes: Some(size), shrink };
                resize_disk(&disk, wanted, |size| cut = Some(size)).map(|size| (size, cut))
            };
            for size in [512, 8192, 15872] {
                let refused = resize(size, false).unwrap_err().to_string();
                assert!(refused.contains("it has 16384 bytes"), "{size}: {refused}");
            }
            assert_eq!(resize(16384, false).unwrap().0, 16384);
            assert_eq!(resize(8192, true).unwrap(), (8192, Some(8192)));
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), 8192);
        assert_eq!(remote.size_bytes(), 8192);
    }

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

    /// Guests learn of each new size, and of no other.
    #[test]
    fn a_new_size_is_told_and_logged_once() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = serve.get_matches_from(["serve", "--engine", "threads"]);
        let args = ServeArgs::from_arg_matches(&args).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("disk"), [0; 4096]).unwrap();
        let export = |name: &str| {
            let spec = serde_json::json!({
                "name": name, "endpoint": { "path": path(name) }, "no-lock": true,
                "device": { "blk": { "file": path("disk") } },
            });
            serde_json::from_value(spec).unwrap()
        };
        daemon.handle(Command::Add(vec![export("one"), export("two")])).unwrap();
        let (_subscription, queue) = daemon.subscribers().subscribe();
        let resize = |size_bytes, shrink| {
            let wanted = NewSize { size_bytes, shrink };
            let lines = LogCapture::lines_of(|| {
                daemon.handle(Command::Resize("one".to_owned(), None, wanted)).map(drop).unwrap();
            });
            let told = |event: &ExportEvent| matches!(event.details, EventDetails::Resized { .. });
            (lines, queue.events.try_iter().filter(|event| told(event)).count())
        };
        let (lines, told) = resize(Some(8192), false);
        assert!(lines.iter().any(|line| line.contains("8192 bytes, not 4096")), "{lines:?}");
        assert_eq!(told, 2, "both exports have the disk");
        assert_eq!(resize(Some(8192), false), (Vec::new(), 0));
        let file = std::fs::File::options().write(true).open(path("disk")).unwrap();
        file.set_len(16384).unwrap();
        assert_eq!(resize(None, false).1, 2, "another program has enlarged it");
        assert_eq!(resize(Some(4096), true).1, 2);
        let exports = daemon.exports().unwrap();
        assert!(exports.iter().all(|export| export.size_bytes == 4096), "{exports:?}");
    }
}
