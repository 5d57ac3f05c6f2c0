//! Tests of exports that are added, and of disks that are opened for them.

use std::io::IoSlice;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;

use blockio::{DiskOptions, DiskSource};
use clap::{Args, FromArgMatches};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;
use crate::control::Control;
use crate::control::subscribers::Subscription;
use crate::daemon::Shutdown;
use crate::options::ServeArgs;
use crate::socket::inherited::InheritedSockets;
use crate::spec::command::{Command, EndCause, ExportState, NewSize, Removal};
use crate::threads::shutdown::Outcome;

pub(in super::super) fn export(name: &str, disk: &Path) -> ExportSpec {
    let disk = disk.display();
    let text = format!(
        r#"{{"endpoint": {{"path": "{name}"}}, "device": {{"blk": {{"file": "{disk}"}}}}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

/// Lets a socket hold the disk open and locked, without a process, like the operations of a
/// killed process.
fn leave(disk: DiskSource) -> (UnixStream, UnixStream) {
    let pair = UnixStream::pair().unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    let descriptors = [disk.hand_over().descriptor().unwrap()];
    assert!(message.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(&pair.0, &[IoSlice::new(b"x")], &mut message, SendFlags::empty()).unwrap();
    pair
}

/// A slow disk holds up no later export, and its failure does not end them.
#[test]
fn exports_that_cannot_be_served_end_no_others() {
    [false, true].into_iter().for_each(fail_beside_others);
}

/// A daemon in a folder with disks.
struct Scene {
    folder: tempfile::TempDir,
    daemon: Arc<Daemon>,
    ending: Shutdown,
    events: Receiver<Arc<ExportEvent>>,
    _subscription: Subscription,
}

impl Scene {
    fn new() -> Self {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = serve.get_matches_from(["serve"]);
        let args = ServeArgs::from_arg_matches(&args).unwrap();
        let (daemon, ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let (_subscription, queued) = daemon.subscribers().subscribe();
        let events = queued.events;
        let folder = tempfile::tempdir().unwrap();
        Self { folder, daemon: Arc::new(daemon), ending, events, _subscription }
    }

    /// Makes a disk, and returns its path.
    fn disk(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, [0; 512]).unwrap();
        path
    }

    /// Makes an export with this socket.
    fn export(&self, socket: &str, disk: &Path) -> ExportSpec {
        export(&self.folder.path().join(socket).display().to_string(), disk)
    }

    /// Opens an export up to its last step, which cannot be cancelled.
    fn bound(&self, export: ExportSpec) -> BoundExport {
        let opening = self.daemon.begin_exports(vec![export], false).unwrap();
        let opened =
            all(ExportOpener::begin(opening, false, &PassedFiles::default()).take_ready(None))
                .unwrap();
        self.daemon.bind(opened).remove(0).map_err(FailedExport::release).unwrap()
    }

    /// Waits for an event, long enough for a slow machine.
    fn wait_for(&self, wanted: impl Fn(&ExportEvent) -> bool) {
        while !wanted(&self.events.recv_timeout(Duration::from_secs(60)).unwrap()) {}
    }

    fn wait_for_error(&self, text: &str) {
        self.wait_for(|event| match &event.details {
            EventDetails::Error { message, .. } => message.contains(text),
            _ => false,
        });
    }

    fn end(self) {
        self.daemon.handle(Command::End(EndCause::Control)).unwrap();
        assert_eq!(self.ending.wait(&self.daemon).unwrap(), Outcome::Clean);
    }
}

fn fail_beside_others(is_late: bool) {
    let scene = Scene::new();
    let [left, other] = ["left", "other"].map(|name| scene.disk(name));
    let held = leave(DiskSource::file(&left, &DiskOptions::default()).unwrap());
    let opening = scene.daemon.begin_add(vec![scene.export("vm1", &left)]).unwrap();
    scene.daemon.handle(Command::Add(vec![scene.export("vm2", &other)])).unwrap();
    if is_late {
        scene.wait_for_error("the daemon waits");
    }
    std::fs::remove_file(&left).unwrap();
    scene.wait_for_error("cannot be served");
    // Without this lock, an attempt that had opened the file would serve it after its removal.
    drop(held);
    opening.settle();
    scene.end();
}

/// A subscriber may use its name again, or its disk.
#[test]
fn the_end_of_an_export_is_reported_when_its_name_is_free() {
    let scene = Scene::new();
    let disk = scene.disk("disk");
    let export = scene.export("vm1", &disk);
    for _ in 0..2 {
        scene.daemon.handle(Command::Add(vec![export.clone()])).unwrap();
        scene.daemon.handle(Command::Remove(Removal::new(export.name()))).unwrap();
        for expected in [EventDetails::Added, EventDetails::Removed] {
            let event = scene.events.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!((&event.export, &event.details), (&export.name(), &expected));
        }
    }
    scene.end();
}

#[test]
fn an_export_that_is_waited_for_can_be_removed() {
    let scene = Scene::new();
    let left = scene.disk("left");
    let held = leave(DiskSource::file(&left, &DiskOptions::default()).unwrap());
    let export = scene.export("vm1", &left);
    let begun = Instant::now();
    let opening = scene.daemon.begin_add(vec![export.clone()]).unwrap();
    scene.wait_for_error("not visible here; the daemon waits");
    assert!(begun.elapsed() >= LEFT_MAX, "such a disk is free soon, as a rule");
    let removed = scene.daemon.handle(Command::Remove(Removal::new(export.name()))).unwrap();
    assert!(matches!(removed, Reply::Removed(status) if status.name() == export.name()));
    // The wait has ended, and the daemon continues.
    let OpeningThread(done) = opening;
    assert_eq!(done.recv(), Err(mpsc::RecvError));
    drop(held);
    scene.daemon.handle(Command::Add(vec![export])).unwrap();
    scene.end();
}

/// Otherwise the guest would write beyond the new end, and the disk would grow again.
#[test]
fn a_disk_that_is_cut_while_another_export_of_it_is_opened_is_cut_for_that_too() {
    let scene = Scene::new();
    let disk = scene.disk("disk");
    std::fs::File::options().write(true).open(&disk).unwrap().set_len(8192).unwrap();
    let [served, late] = ["vm1", "vm2"].map(|name| {
        let mut export = scene.export(name, &disk);
        export.settings.no_lock = true;
        export
    });
    let daemon = &scene.daemon;
    daemon.handle(Command::Add(vec![served.clone()])).unwrap();
    let BoundExport { disks, endpoint, export } = scene.bound(late);
    let size = NewSize { size_bytes: Some(512), shrink: true };
    daemon.handle(Command::Resize(served.name(), None, size)).unwrap();
    let setup = daemon.set_up(export, disks, endpoint).map_err(FailedExport::release).unwrap();
    assert_eq!(setup.disks[0].info().size_bytes, 512);
    daemon.serve(vec![setup]).unwrap();
    scene.end();
}

#[test]
fn an_export_that_is_removed_in_its_last_step_is_served_and_ends() {
    let scene = Scene::new();
    let export = scene.export("vm1", &scene.disk("disk"));
    let BoundExport { disks, endpoint, export } = scene.bound(export);
    let name = export.spec().name();
    let daemon = &scene.daemon;
    std::thread::scope(|scope| {
        // The deadline only ends a hopeless wait.
        let removal = Removal { deadline_ms: Some(60_000), ..Removal::new(name) };
        let removed = scope.spawn(|| daemon.handle(Command::Remove(removal)));
        while daemon.exports().unwrap()[0].state != ExportState::Stopping {
            std::thread::yield_now();
        }
        let setup = daemon.set_up(export, disks, endpoint).map_err(FailedExport::release).unwrap();
        daemon.serve(vec![setup]).unwrap();
        assert!(matches!(removed.join().unwrap(), Ok(Reply::Removed(_))));
    });
    scene.end();
}

/// The error of its disk would hide that.
#[test]
fn an_export_that_is_removed_while_it_is_added_was_cancelled() {
    let scene = Scene::new();
    for is_removed in [false, true] {
        let export = scene.export("vm1", &scene.disk("disk"));
        let opening = scene.daemon.begin_exports(vec![export.clone()], false).unwrap().remove(0);
        let (name, failed) = (export.name(), CommandError::DiskBusy("why".to_owned()));
        if is_removed {
            let removal = Removal { deadline_ms: Some(1), ..Removal::new(&name) };
            scene.daemon.handle(Command::Remove(removal)).unwrap_err();
        }
        let error = scene.daemon.handle_failure(opening.fail(failed), &OnFailure::FailAll);
        match error.unwrap_err() {
            CommandError::Cancelled(cancelled) => assert!(is_removed && cancelled == name),
            error => assert!(!is_removed && matches!(error, CommandError::DiskBusy(_))),
        }
    }
    scene.end();
}

/// The user mends the first disk first.
#[test]
fn errors_have_the_order_of_the_disks() {
    let scene = Scene::new();
    let missing = |name: &str| scene.export(name, &scene.folder.path().join(name));
    let exports = ["a", "b", "c", "d"].map(missing).to_vec();
    let error = scene.daemon.handle(Command::Add(exports)).unwrap_err().to_string();
    assert!(error.contains("/a"), "{error}");
}

#[test]
fn a_socket_that_cannot_be_made_keeps_no_other_export_from_being_served() {
    let scene = Scene::new();
    let [first, good, bad] = ["first", "good", "bad"].map(|name| scene.disk(name));
    scene.daemon.handle(Command::Add(vec![scene.export("vm1", &first)])).unwrap();
    let exports = vec![scene.export("vm2", &good), scene.export(&"x".repeat(100), &bad)];
    let good = exports[0].name();
    let _opening = scene.daemon.begin_add(exports).unwrap();
    scene.wait_for_error("the path is too long for a socket");
    scene.wait_for(|event| event.export == good && matches!(event.details, EventDetails::Added));
    scene.end();
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
    assert!(text.contains("earlier process of this user"), "{text}");
    drop(held);
    open(&own).unwrap();
}

fn begin(specs: Vec<ExportSpec>, waits_for_stale_locks: bool) -> ExportOpener {
    let control = Control::start(|| {}).unwrap();
    ExportOpener::begin(
        control.begin(specs, false).unwrap(),
        waits_for_stale_locks,
        &PassedFiles::default(),
    )
}

fn all(taken: Vec<Result<OpenedExport, FailedExport>>) -> Result<Vec<OpenedExport>, CommandError> {
    taken.into_iter().map(|export| export.map_err(|failed| failed.release().1)).collect()
}

fn names(ready: &[OpenedExport]) -> Vec<String> {
    ready.iter().map(|OpenedExport { export, .. }| export.spec().name()).collect()
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
    assert!(text.contains("operations of a killed program"), "{text}");
    let both = vec![export("/left", left), export("/free", free)];
    let mut opening = begin(both, true);
    // The disk is known to be left in use, so it is not waited for.
    let ready = all(opening.take_ready(None)).unwrap();
    assert_eq!(names(&ready), ["/free"]);
    assert_eq!(opening.left().map(ExportSpec::name).collect::<Vec<_>>(), ["/left"]);
    drop(held);
    let late = all(opening.next(None).into_iter().collect()).unwrap();
    assert_eq!(names(&late), ["/left"]);
    // A disk in use by a visible process is not waited for.
    drop(ready);
    let mut twice = begin(vec![export("/a", free), export("/b", free)], true);
    assert!(all(twice.take_ready(None)).is_err());
}
