//! Exports with disks that are being opened.

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::open::cancellation::CancelToken;
use crate::open::disk::OpenDisk;
use crate::open::parallel::{ParallelCalls, Yield};
use crate::spec::command::CommandError;
use crate::spec::{DiskSpec, ExportSettings, ExportSpec, UnitPlace};

/// The time without a newly opened disk after which the remaining disks are taken to hang.
pub(super) const OPEN_MAX: Duration = Duration::from_secs(5);

/// An export, and its disks that are open so far.
struct PendingDisks {
    spec: ExportSpec,
    disks: Vec<Option<OpenDisk>>,
}

/// A disk, the settings of its export, its lease id, and its cancellation token.
type WantedDisk = ((DiskSpec, ExportSettings), Option<u64>, CancelToken);

/// All disks of some exports, which are opened side by side.
pub(super) struct ExportOpener {
    /// `None`: the export was taken out.
    exports: Vec<Option<PendingDisks>>,
    /// For each disk, its export and its place there.
    places: Vec<(usize, usize)>,
    jobs: ParallelCalls<WantedDisk, Result<OpenDisk>>,
}

impl ExportOpener {
    /// Begins to open the disks of exports. If `waits_for_stale_locks`, disks that a killed process
    /// seems to have left in use are waited for.
    pub(super) fn begin(
        specs: Vec<(ExportSpec, CancelToken)>,
        waits_for_stale_locks: bool,
    ) -> Self {
        let (mut exports, mut places, mut to_open) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (spec, token)) in specs.into_iter().enumerate() {
            let (disks, lease_ids) = (spec.disks(), spec.lease_ids());
            places.extend((0..disks.len()).map(|place| (index, place)));
            let of_export = PendingDisks { spec, disks: disks.iter().map(|_| None).collect() };
            exports.push(Some(of_export));
            let disks = disks.into_iter().zip(lease_ids);
            to_open.extend(disks.map(|(disk, lease_id)| (disk, lease_id, token.clone())));
        }
        let open = move |(disk, lease_id, token): WantedDisk, give_way: Yield<'_>| {
            if waits_for_stale_locks {
                OpenDisk::open_waiting(&disk, lease_id, &token, give_way)
            } else {
                anyhow::ensure!(token.is_active(), "it is not wanted any more");
                OpenDisk::open(&disk, lease_id, &token)
            }
        };
        Self { exports, places, jobs: ParallelCalls::begin(to_open, open) }
    }

    /// Takes out exports with all disks open, and exports that have failed. Waits for all disks
    /// except the ones that a killed process has left in use, until no disk has come for
    /// `patience`.
    pub(super) fn take_ready(&mut self, patience: Option<Duration>) -> Taken {
        let mut errors = Vec::new();
        let mut patience = patience;
        while let Some((number, disk)) =
            self.jobs.next_running(patience.map(|max| Instant::now() + max))
        {
            match disk.map_err(Into::into).and_then(|disk| disk) {
                Ok(disk) => self.put(number, disk),
                Err(error) => {
                    errors.push((number, error));
                    patience = Some(OPEN_MAX);
                }
            }
        }
        // Errors have the order of the disks, not of their arrival.
        errors.sort_by_key(|(number, _)| *number);
        let fail = |(number, error): (usize, anyhow::Error)| {
            let export = self.places[number].0;
            Some(LateError { spec: self.exports[export].take()?.spec, error: error.into() })
        };
        let failed = errors.into_iter().filter_map(fail).collect();
        Taken { ready: self.exports.iter_mut().filter_map(take_if_ready).collect(), failed }
    }

    /// Returns true if none of the remaining disks hangs: a killed process has left all of them in
    /// use.
    pub(super) fn only_stale_locks(&self) -> bool {
        self.jobs.all_yielded()
    }

    /// The exports that have not been taken out.
    pub(super) fn left(&self) -> impl Iterator<Item = &ExportSpec> {
        self.exports.iter().flatten().map(|waiting| &waiting.spec)
    }

    /// Waits until the next export is open, or has failed. `None`: none is left, or none came in
    /// time.
    pub(super) fn next(
        &mut self,
        until: Option<Instant>,
    ) -> Option<Result<(ExportSpec, Vec<OpenDisk>), LateError>> {
        loop {
            let (number, disk) = self.jobs.next(until)?;
            let (export, _) = self.places[number];
            match disk.map_err(Into::into).and_then(|disk| disk) {
                Ok(disk) => {
                    self.put(number, disk);
                    if let Some(ready) = take_if_ready(&mut self.exports[export]) {
                        return Some(Ok(ready));
                    }
                }
                Err(error) => {
                    // The export may have failed already because of another disk.
                    if let Some(waiting) = self.exports[export].take() {
                        let error = error.into();
                        return Some(Err(LateError { spec: waiting.spec, error }));
                    }
                }
            }
        }
    }

    fn put(&mut self, number: usize, disk: OpenDisk) {
        let (export, place) = self.places[number];
        if let Some(waiting) = &mut self.exports[export] {
            waiting.disks[place] = Some(disk);
        }
    }
}

/// Exports that are ready, and exports that have failed.
pub(super) struct Taken {
    pub(super) ready: Vec<(ExportSpec, Vec<OpenDisk>)>,
    pub(super) failed: Vec<LateError>,
}

/// The error of an export that is not served.
pub(super) struct LateError {
    pub(super) spec: ExportSpec,
    pub(super) error: CommandError,
}

/// Exports and units that a control command had added. The daemon continues without the ones that
/// cannot be restored.
pub(crate) struct Restoring {
    added: BTreeSet<String>,
    units: Vec<(String, UnitPlace)>,
    /// Takes exports that have failed, to be served without the faulty units.
    again: mpsc::Sender<LateError>,
}

impl Restoring {
    pub(super) fn new(
        added: BTreeSet<String>,
        units: Vec<(String, UnitPlace)>,
        again: mpsc::Sender<LateError>,
    ) -> Self {
        Self { added, units, again }
    }

    /// Returns true if the export may be served in part, or not at all.
    pub(super) fn is_about(&self, export: &ExportSpec) -> bool {
        let name = export.name();
        self.added.contains(&name) || self.units.iter().any(|(of, _)| *of == name)
    }

    pub(super) fn retry_in_part(&self, late: LateError) {
        // The receiver ends with the daemon.
        let _ = self.again.send(late);
    }
}

fn take_if_ready(export: &mut Option<PendingDisks>) -> Option<(ExportSpec, Vec<OpenDisk>)> {
    if export.as_ref()?.disks.iter().any(Option::is_none) {
        return None;
    }
    let PendingDisks { spec, disks } = export.take()?;
    Some((spec, disks.into_iter().flatten().collect()))
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::IoSlice;
    use std::os::unix::net::UnixStream;
    use std::path::Path;

    use blockio::{DiskOptions, DiskSource};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    pub(in super::super) fn export(name: &str, disk: &Path) -> ExportSpec {
        let disk = disk.display();
        let text = format!(
            r#"{{"endpoint": {{"path": "{name}"}}, "device": {{"blk": {{"file": "{disk}"}}}}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    /// Lets a socket hold the disk open and locked, without a process, like the operations of a
    /// killed process.
    pub(in super::super) fn leave(disk: DiskSource) -> (UnixStream, UnixStream) {
        let pair = UnixStream::pair().unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        let descriptors = [disk.descriptor().unwrap()];
        assert!(message.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&pair.0, &[IoSlice::new(b"x")], &mut message, SendFlags::empty()).unwrap();
        pair
    }

    /// Other exports may have the same image read-only, or without locks.
    #[test]
    fn reads_that_a_killed_process_has_left_keep_away_its_own_export_alone() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        std::fs::write(&disk, [0; 512]).unwrap();
        let [own, other] = ["own", "other"].map(|name| {
            let mut export = export(&folder.path().join(name).display().to_string(), &disk);
            (export.settings.read_only, export.settings.no_lock) = (true, true);
            export
        });
        let lease_id = own.lease_ids()[0];
        let options = DiskOptions { read_only: true, user: lease_id, ..DiskOptions::default() };
        let held = leave(DiskSource::file(&disk, &options).unwrap());
        let open = |export: &ExportSpec| all(begin(vec![export.clone()], false).take_ready(None));
        let _other = open(&other).unwrap();
        let text = open(&own).err().unwrap().to_string();
        assert!(text.contains("earlier process of this very user"), "{text}");
        drop(held);
        open(&own).unwrap();
    }

    fn begin(specs: Vec<ExportSpec>, waits_for_stale_locks: bool) -> ExportOpener {
        let specs = specs.into_iter().map(|spec| (spec, CancelToken::default())).collect();
        ExportOpener::begin(specs, waits_for_stale_locks)
    }

    fn all(taken: Taken) -> Result<Vec<(ExportSpec, Vec<OpenDisk>)>, CommandError> {
        match taken.failed.into_iter().next() {
            Some(first) => Err(first.error),
            None => Ok(taken.ready),
        }
    }

    fn names(ready: &[(ExportSpec, Vec<OpenDisk>)]) -> Vec<String> {
        ready.iter().map(|(spec, _)| spec.name()).collect()
    }

    #[test]
    fn a_disk_that_a_killed_process_has_is_waited_for_at_the_start_alone() {
        let folder = tempfile::tempdir().unwrap();
        let [left, free] = &["left", "free"].map(|name| folder.path().join(name));
        [left, free].into_iter().for_each(|path| std::fs::write(path, [0; 512]).unwrap());
        let held = leave(DiskSource::file(left, &DiskOptions::default()).unwrap());
        // Another reader has the disk open too, without a lock.
        let _reader = std::fs::File::open(left).unwrap();
        let refused = begin(vec![export("/added", left)], false).take_ready(None);
        let text = all(refused).err().unwrap().to_string();
        assert!(text.contains("operations of one that was killed"), "{text}");
        let both = vec![export("/left", left), export("/free", free)];
        let mut opening = begin(both, true);
        // The disk is known to be left in use, so it is not waited for.
        let ready = all(opening.take_ready(None)).unwrap();
        assert_eq!(names(&ready), ["/free"]);
        assert_eq!(opening.left().map(ExportSpec::name).collect::<Vec<_>>(), ["/left"]);
        drop(held);
        let late = opening.next(None).unwrap().map_err(|late| late.error).unwrap();
        assert_eq!(names(&[late]), ["/left"]);
        // A disk in use by a visible process is not waited for.
        drop(ready);
        let mut twice = begin(vec![export("/a", free), export("/b", free)], true);
        assert!(all(twice.take_ready(None)).is_err());
    }
}
