//! Adds exports: their disks are opened side by side, and one that hangs delays no other.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::opening::{ExportOpener, LateError, OPEN_MAX, Restoring, Taken};
use super::{Daemon, OpenedExport};
use crate::control::Reservation;
use crate::control::subscribers::{EventDetails, ExportEvent};
use crate::open::disk::OpenDisk;
use crate::process::service_manager;
use crate::socket::endpoint::Endpoint;
use crate::spec::command::{CommandError, Reply};
use crate::spec::{EndpointSpec, ExportSpec};
use crate::threads::engines::{EngineChoice, choose};
use crate::threads::shutdown::Event;

/// Exports that are being opened.
pub(crate) struct OpeningThread(mpsc::Receiver<()>);

/// The time for which disks may be in use by no visible process before the log reports the wait.
const LEFT_MAX: Duration = Duration::from_secs(2);

/// The time that the opening thread of an ending daemon takes unless its disk hangs.
const CLEAN_UP_MAX: Duration = Duration::from_secs(1);

impl OpeningThread {
    /// Waits until sockets are removed that will not be served, unless a disk hangs.
    pub(crate) fn settle(self) {
        let _ = self.0.recv_timeout(CLEAN_UP_MAX);
    }
}

impl Daemon {
    /// Adds exports like `Command::Add`, on a thread: a disk may take long to open, and the daemon
    /// may be asked to end in the meantime. If they cannot be served, and no other exports exist,
    /// the daemon ends with the error. Exports with disks that hang are served once these answer,
    /// and delay no other.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread left.
    pub(crate) fn begin_add(self: &Arc<Self>, specs: Vec<ExportSpec>) -> Result<OpeningThread> {
        self.begin_start(specs, None)
    }

    /// Like [`begin_add`](Self::begin_add). An export that is restored never ends the daemon by its
    /// failure.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread left.
    pub(super) fn begin_start(
        self: &Arc<Self>,
        specs: Vec<ExportSpec>,
        restoring: Option<Restoring>,
    ) -> Result<OpeningThread> {
        let (daemon, (done, opening)) = (Arc::clone(self), mpsc::channel());
        let open = move || {
            let _done: mpsc::Sender<()> = done;
            // Dropped before `_done`, with everything that it holds.
            let daemon = daemon;
            let names: Vec<String> = specs.iter().map(ExportSpec::name).collect();
            match daemon.add_as_they_open(specs, restoring.as_ref()) {
                Ok(()) | Err(CommandError::Ending | CommandError::HandedOver(_)) => {}
                Err(error) if daemon.control.cancel_start(&[]) => {
                    drop(daemon.events.send(Event::NotStarted(error.into_error())));
                }
                Err(error) => daemon.report_failure(&names, error),
            }
        };
        let thread = std::thread::Builder::new().name("ringhaul-open".into()).spawn(open);
        thread.context("cannot start the thread that opens the disks")?;
        Ok(OpeningThread(opening))
    }

    /// Adds exports as their disks are opened. An error concerns all of them.
    pub(super) fn add_as_they_open(
        &self,
        specs: Vec<ExportSpec>,
        restoring: Option<&Restoring>,
    ) -> Result<(), CommandError> {
        let mut names = self.reserve(&specs, true)?;
        let (specs, taken) = with_free_sockets(specs);
        self.skip_at_start(&mut names, taken, restoring)?;
        let specs = specs.into_iter().map(|spec| (names.cancel_token(&spec), spec));
        let specs = specs.map(|(token, spec)| (spec, token)).collect();
        let mut opening = ExportOpener::begin(specs, true);
        let Taken { ready, failed } = opening.take_ready(Some(OPEN_MAX));
        self.skip_at_start(&mut names, failed, restoring)?;
        // A disk that a killed process has left in use is free soon, as a rule.
        let mut log_at = opening.only_stale_locks().then(|| Instant::now() + LEFT_MAX);
        if log_at.is_none() {
            self.log_waiting(&opening);
        }
        let (bound, failed) = self.bind(&names, ready)?;
        self.skip_at_start(&mut names, failed, restoring)?;
        let (serves, failed) = self.set_up_all(bound)?;
        self.skip_at_start(&mut names, failed, restoring)?;
        self.serve(&mut names, serves)?;
        service_manager::ready();
        loop {
            match opening.next(log_at) {
                Some(Ok(ready)) => self.serve_late(&mut names, ready, restoring)?,
                Some(Err(late)) => self.skip(&mut names, late, restoring)?,
                None if log_at.take().is_some() => self.log_waiting(&opening),
                None => return Ok(()),
            }
        }
    }

    fn serve_late(
        &self,
        names: &mut Reservation<'_>,
        ready: (ExportSpec, Vec<OpenDisk>),
        restoring: Option<&Restoring>,
    ) -> Result<(), CommandError> {
        let (bound, mut failed) = self.bind(names, vec![ready])?;
        let (serves, not_set_up) = self.set_up_all(bound)?;
        failed.extend(not_set_up);
        for late in failed {
            self.skip(names, late, restoring)?;
        }
        self.serve(names, serves)
    }

    /// Logs and reports the exports that are waited for, with the reason.
    fn log_waiting(&self, opening: &ExportOpener) {
        for export in opening.left() {
            let export = export.name();
            let message = if opening.only_stale_locks() {
                "its disk is in use by no program that is visible; it is waited for".to_owned()
            } else {
                format!("its disk is not open after {} s; it is waited for", OPEN_MAX.as_secs())
            };
            tracing::warn!(export, "{message}");
            self.report_error(export, message);
        }
    }

    /// Reports exports that cannot be served.
    ///
    /// # Errors
    ///
    /// When the daemon was started for nothing else, and is to end.
    fn skip_at_start(
        &self,
        names: &mut Reservation<'_>,
        failed: Vec<LateError>,
        restoring: Option<&Restoring>,
    ) -> Result<(), CommandError> {
        let (failed, unwanted): (Vec<_>, Vec<_>) =
            failed.into_iter().partition(|late| names.cancel_token(&late.spec).is_active());
        let is_restored = |late: &LateError| restoring.is_some_and(|all| all.is_about(&late.spec));
        let (restored, failed): (Vec<_>, Vec<_>) = failed.into_iter().partition(is_restored);
        for late in unwanted.into_iter().chain(restored) {
            self.skip(names, late, restoring)?;
        }
        if !failed.is_empty() && names.cancel_start() {
            return Err(failed.into_iter().next().expect("it is not empty").error);
        }
        for LateError { spec, error } in failed {
            drop(names.split([&spec]));
            self.report_failure(&[spec.name()], error);
        }
        Ok(())
    }

    /// Reports an export that cannot be served, if other exports exist or it was cancelled.
    ///
    /// # Errors
    ///
    /// When no other exports exist, or the daemon ends anyway.
    fn skip(
        &self,
        names: &mut Reservation<'_>,
        LateError { spec, error }: LateError,
        restoring: Option<&Restoring>,
    ) -> Result<(), CommandError> {
        let is_active = names.cancel_token(&spec).is_active();
        drop(names.split([&spec]));
        if !is_active {
            tracing::info!(export = spec.name(), "removed before it was served");
            return Ok(());
        }
        if let Some(restoring) = restoring.filter(|all| all.is_about(&spec)) {
            restoring.retry_in_part(LateError { spec, error });
            return Ok(());
        }
        if self.control.cancel_start(&[]) {
            return Err(error);
        }
        self.report_failure(&[spec.name()], error);
        Ok(())
    }

    fn report_failure(&self, exports: &[String], error: CommandError) {
        let message = format!("cannot be served: {:#}", error.into_error());
        for export in exports {
            tracing::error!(export, "{message}");
            self.report_error(export.clone(), message.clone());
        }
    }

    fn report_error(&self, export: String, message: String) {
        self.subscribers
            .report(ExportEvent { export, details: EventDetails::Error { message, left_out: 0 } });
    }

    /// Adds an export of the configuration file. A process that takes over opens it too.
    pub(crate) fn add_from_config(&self, spec: ExportSpec) -> Result<(), CommandError> {
        self.add(vec![spec], true).map(drop)
    }

    /// Adds exports, all or none. `follows_hand_over` is as in
    /// [`Control::reserve`](crate::control::Control).
    pub(super) fn add(
        &self,
        specs: Vec<ExportSpec>,
        follows_hand_over: bool,
    ) -> Result<Reply, CommandError> {
        let mut names = self.reserve(&specs, follows_hand_over)?;
        let patience = Endpoint::patience();
        specs.iter().try_for_each(|spec| check_socket(spec, patience))?;
        let tokens: Vec<_> = specs.iter().map(|spec| names.cancel_token(spec)).collect();
        let specs = specs.into_iter().zip(tokens).collect();
        let Taken { ready, failed } = ExportOpener::begin(specs, false).take_ready(None);
        let failed = failed.into_iter().next();
        if let Some(LateError { spec, error }) = failed {
            let is_active = names.cancel_token(&spec).is_active();
            return Err(if is_active { error } else { CommandError::Cancelled(spec.name()) });
        }
        let all = |failed: Vec<LateError>| match failed.into_iter().next() {
            Some(first) => Err(first.error),
            None => Ok(()),
        };
        let (bound, failed) = self.bind(&names, ready)?;
        all(failed)?;
        let (serves, failed) = self.set_up_all(bound)?;
        all(failed)?;
        self.serve(&mut names, serves).map(|()| Reply::Added)
    }

    fn reserve(
        &self,
        specs: &[ExportSpec],
        follows_hand_over: bool,
    ) -> Result<Reservation<'_>, CommandError> {
        let checked = specs.iter().try_for_each(|spec| spec.check(self.args.iothreads));
        checked.map_err(CommandError::Invalid)?;
        self.control.reserve(specs, follows_hand_over)
    }

    /// Chooses engines for exports with open disks, and makes their sockets. A failure affects only
    /// its own export.
    ///
    /// # Errors
    ///
    /// When the daemon ends.
    fn bind(
        &self,
        names: &Reservation<'_>,
        opened: Vec<(ExportSpec, Vec<OpenDisk>)>,
    ) -> Result<(Vec<Bound>, Vec<LateError>), CommandError> {
        let (specs, disks): (Vec<ExportSpec>, Vec<_>) = opened.into_iter().unzip();
        let disks: Vec<OpenDisk> = disks.into_iter().flatten().collect();
        let choices = choose(&self.args, &disks, &[]);
        let mut disks = disks.into_iter().zip(choices);
        let (mut bound, mut failed) = (Vec::new(), Vec::new());
        // Made after all steps in which disks may hang, so that a hang leaves no socket behind.
        // Made before the threads, which log their choice: a refusal is one line.
        for spec in specs {
            let disks = disks.by_ref().take(spec.disks().len()).collect();
            match names.claim(&spec).and_then(|()| Ok(self.endpoint(&spec)?)) {
                Ok(endpoint) => bound.push(Bound { spec, disks, endpoint }),
                Err(error) => failed.push(LateError { spec, error }),
            }
        }
        Ok((bound, split_end(failed)?))
    }

    /// Makes the devices of exports. A failure affects only its own export.
    ///
    /// # Errors
    ///
    /// When the daemon ends.
    fn set_up_all(&self, bound: Vec<Bound>) -> Result<(Vec<Serves>, Vec<LateError>), CommandError> {
        let (mut serves, mut failed) = (Vec::new(), Vec::new());
        for Bound { spec, disks, endpoint } in bound {
            match self.set_up(spec.clone(), disks) {
                Ok(opened) => serves.push((opened, endpoint)),
                Err(error) => failed.push(LateError { spec, error }),
            }
        }
        Ok((serves, split_end(failed)?))
    }

    fn serve(&self, names: &mut Reservation<'_>, serves: Vec<Serves>) -> Result<(), CommandError> {
        if serves.is_empty() {
            return Ok(());
        }
        self.begin_to_serve()?;
        let names = names.split(serves.iter().map(|(opened, _)| &opened.spec));
        let mut lines = Vec::new();
        let set_up = serves.into_iter().map(|(opened, endpoint)| {
            let endpoint = endpoint.or_else(|| self.inherited().take().map(|(_, socket)| socket));
            // The name is reserved, so no other export can have taken the descriptor.
            let endpoint = endpoint.context("the inherited descriptor serves another export")?;
            lines.push((opened.log.name().to_owned(), opened.line.clone()));
            Ok(opened.into_setup(Some(endpoint), self))
        });
        names.serve(set_up.collect::<Result<Vec<_>>>()?)?;
        for (export, line) in lines {
            tracing::info!(export, "{line}");
        }
        Ok(())
    }
}

/// An export with engines for its disks, and its socket. `None`: the inherited one.
struct Bound {
    spec: ExportSpec,
    disks: Vec<(OpenDisk, EngineChoice)>,
    endpoint: Option<Endpoint>,
}

/// An export that is ready to be served.
type Serves = (OpenedExport, Option<Endpoint>);

/// Returns the failures, or an error if one of them is the end of the daemon.
fn split_end(mut failed: Vec<LateError>) -> Result<Vec<LateError>, CommandError> {
    let is_over =
        |late: &LateError| matches!(late.error, CommandError::Ending | CommandError::HandedOver(_));
    match failed.iter().position(is_over) {
        Some(place) => Err(failed.swap_remove(place).error),
        None => Ok(failed),
    }
}

/// Separates exports with free sockets from exports that cannot be served.
fn with_free_sockets(specs: Vec<ExportSpec>) -> (Vec<ExportSpec>, Vec<LateError>) {
    let (mut free, mut taken) = (Vec::new(), Vec::new());
    let patience = Endpoint::patience();
    for spec in specs {
        match check_socket(&spec, patience) {
            Ok(()) => free.push(spec),
            Err(error) => taken.push(LateError { spec, error: error.into() }),
        }
    }
    (free, taken)
}

/// Checks that no other program serves the socket of an export. Such a program may also have the
/// disks, and the start would wait for them.
fn check_socket(spec: &ExportSpec, patience: Instant) -> Result<()> {
    match &spec.endpoint {
        EndpointSpec::Path(path) => Endpoint::check_free(path, "--socket-path", patience),
        EndpointSpec::Fd(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::mpsc::Receiver;

    use blockio::{DiskOptions, DiskSource};
    use clap::{Args, FromArgMatches};

    use super::super::opening::tests::{export, leave};
    use super::*;
    use crate::control::subscribers::Subscription;
    use crate::daemon::Shutdown;
    use crate::options::ServeArgs;
    use crate::spec::command::{Command, EndCause, NewSize, Removal};
    use crate::threads::shutdown::Outcome;

    /// Exports may be added while another one is waited for. Its late failure does not end them.
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
            let (daemon, ending) = Daemon::start(args, None).unwrap();
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
            scene.wait_for_error("it is waited for");
        }
        std::fs::remove_file(&left).unwrap();
        drop(held);
        scene.wait_for_error("cannot be served");
        opening.settle();
        scene.end();
    }

    #[test]
    fn an_export_that_is_waited_for_can_be_removed() {
        let scene = Scene::new();
        let left = scene.disk("left");
        let held = leave(DiskSource::file(&left, &DiskOptions::default()).unwrap());
        let export = scene.export("vm1", &left);
        let opening = scene.daemon.begin_add(vec![export.clone()]).unwrap();
        scene.wait_for_error("it is waited for");
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
        let mut names = daemon.reserve(std::slice::from_ref(&late), false).unwrap();
        let token = names.cancel_token(&late);
        let opened = ExportOpener::begin(vec![(late, token)], false).take_ready(None);
        let (bound, failed) = daemon.bind(&names, opened.ready).unwrap();
        assert!(opened.failed.is_empty() && failed.is_empty());
        let size = NewSize { size_bytes: Some(512), shrink: true };
        daemon.handle(Command::Resize(served.name(), None, size)).unwrap();
        let (serves, failed) = daemon.set_up_all(bound).unwrap();
        assert!(failed.is_empty());
        assert_eq!(serves[0].0.disks[0].source.info().size_bytes, 512);
        daemon.serve(&mut names, serves).unwrap();
        drop(names);
        scene.end();
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
        scene
            .wait_for(|event| event.export == good && matches!(event.details, EventDetails::Added));
        scene.end();
    }
}
