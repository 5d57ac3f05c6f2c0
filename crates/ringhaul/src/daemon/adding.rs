//! Adds exports: their disks are opened side by side, and one that hangs delays no other. A start
//! and a command differ in the consequences of a failure.

#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::executor::start_thread;
use blockio::file::FileTable;
use disks::open::CancelToken;
use tracing::Span;

use super::Daemon;
use crate::control::subscribers::{EventDetails, ExportEvent};
use crate::control::{ExportSetup, FailedExport, OpeningExport, ReadyExport};
use crate::log::export_span;
use crate::open::disk::{OpenDisk, PassedFiles};
use crate::open::parallel::{ParallelCalls, Yield};
use crate::process::service_manager;
use crate::socket::Endpoint;
use crate::spec::command::{CommandError, Reply};
use crate::spec::{DiskSpec, EndpointSpec, ExportSettings, ExportSpec, UnitPlace};
use crate::threads::engines::{EngineChoice, choose};
use crate::threads::shutdown::Event;

/// The time without a newly opened disk after which the remaining disks are taken to hang.
const OPEN_MAX: Duration = Duration::from_secs(5);

/// The time for which disks may be in use by no visible process before the log reports the wait.
const LEFT_MAX: Duration = Duration::from_secs(2);

/// The time that the opening thread of an ending daemon takes unless its disk hangs.
const CLEAN_UP_MAX: Duration = Duration::from_secs(1);

/// Exports that are being opened.
pub(crate) struct OpeningThread(mpsc::Receiver<()>);

impl OpeningThread {
    /// Waits until sockets are removed that will not be served, unless a disk hangs.
    pub(crate) fn settle(self) {
        let _ = self.0.recv_timeout(CLEAN_UP_MAX);
    }
}

/// Exports and units that a control command had added. The daemon continues without the ones that
/// cannot be restored.
pub(super) struct Restoring {
    pub(super) added: BTreeSet<String>,
    pub(super) units: Vec<(String, UnitPlace)>,
    /// Takes exports that have failed, to be served without the faulty units.
    pub(super) again: mpsc::Sender<(ExportSpec, CommandError)>,
}

impl Restoring {
    /// Returns true if the export may be served in part, or not at all.
    fn is_about(&self, export: &ExportSpec) -> bool {
        let name = export.name();
        self.added.contains(&name) || self.units.iter().any(|(of, _)| *of == name)
    }
}

/// The consequences of a failed export.
enum OnFailure<'a> {
    /// No export of the command is served.
    FailAll,
    /// Other exports are served, and the failed one is reported. If no export was served so far and
    /// none is being opened except `own`, the daemon ends.
    Continue { own: Vec<u64>, restoring: Option<&'a Restoring> },
}

/// An export with open disks.
struct OpenedExport {
    /// Closed before the name is free.
    disks: Vec<OpenDisk>,
    export: OpeningExport,
}

/// An export with engines for its disks, and its socket. `None`: the inherited one.
struct BoundExport {
    disks: Vec<(OpenDisk, EngineChoice)>,
    endpoint: Option<Endpoint>,
    export: ReadyExport,
}

impl Daemon {
    /// Adds exports like `Command::Add`, on a thread: a disk may take long to open, and the daemon
    /// may be asked to end in the meantime. If they cannot be served, and no other exports exist,
    /// the daemon ends with the error. Exports with disks that hang are served once these answer,
    /// and delay no other. An export that is restored never ends the daemon by its failure.
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
        let thread = start_thread("ringhaul-open", open);
        thread.context("cannot start the thread that opens the disks")?;
        Ok(OpeningThread(opening))
    }

    /// Warns of sockets of the service manager that no export uses.
    pub(super) fn warn_of_unused_sockets(&self, specs: &[ExportSpec]) {
        let with_path = specs.iter().filter_map(|spec| match &spec.endpoint {
            EndpointSpec::Path(path) => Some((spec.name(), path.as_path())),
            EndpointSpec::Fd(_) => None,
        });
        self.inherited.warn_of_unused(&with_path.collect::<Vec<_>>());
    }

    /// Calls [`begin_start`](Self::begin_start) for exports that are not restored.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread left.
    pub(crate) fn begin_add(self: &Arc<Self>, specs: Vec<ExportSpec>) -> Result<OpeningThread> {
        self.begin_start(specs, None)
    }

    /// Adds exports as their disks are opened. An error concerns all of them.
    pub(super) fn add_as_they_open(
        &self,
        specs: Vec<ExportSpec>,
        restoring: Option<&Restoring>,
    ) -> Result<(), CommandError> {
        let opening = self.begin_exports(specs, true)?;
        let own = opening.iter().map(OpeningExport::id).collect();
        let at_start = OnFailure::Continue { own, restoring };
        let opening = self.check_sockets(opening, &at_start)?;
        let mut opener = ExportOpener::begin(opening, true, &PassedFiles::default());
        let ready = self.without_failed(opener.take_ready(Some(OPEN_MAX)), &at_start)?;
        // A disk that a killed process has left in use is free soon, as a rule.
        let mut log_at = opener.only_stale_locks().then(|| Instant::now() + LEFT_MAX);
        if log_at.is_none() {
            self.log_waiting(&opener);
        }
        self.serve_opened(ready, &at_start)?;
        // The manager shows this state as soon as the unit has started.
        let _ = self.report_state();
        service_manager::ready();
        let later = OnFailure::Continue { own: Vec::new(), restoring };
        loop {
            match opener.next(log_at) {
                Some(Ok(ready)) => self.serve_opened(vec![ready], &later)?,
                Some(Err(failed)) => self.handle_failure(failed, &later)?,
                None if log_at.take().is_some() => self.log_waiting(&opener),
                None => return Ok(()),
            }
        }
    }

    /// Adds an export of the configuration file. A process that takes over opens it too.
    pub(crate) fn add_from_config(&self, spec: ExportSpec) -> Result<(), CommandError> {
        self.add(vec![spec], true, &PassedFiles::default()).map(drop)
    }

    /// Adds exports, all or none, with files that came with the command. `follows_hand_over` is as
    /// in [`Control::begin`](crate::control::Control::begin).
    pub(super) fn add(
        &self,
        specs: Vec<ExportSpec>,
        follows_hand_over: bool,
        passed: &PassedFiles,
    ) -> Result<Reply, CommandError> {
        let all = OnFailure::FailAll;
        let opening = self.begin_exports(specs, follows_hand_over)?;
        let opening = self.check_sockets(opening, &all)?;
        let ready = ExportOpener::begin(opening, false, passed).take_ready(None);
        self.serve_opened(self.without_failed(ready, &all)?, &all)?;
        Ok(Reply::Done)
    }

    /// Takes the names and the sockets of exports.
    fn begin_exports(
        &self,
        specs: Vec<ExportSpec>,
        follows_hand_over: bool,
    ) -> Result<Vec<OpeningExport>, CommandError> {
        let checked = specs.iter().try_for_each(|spec| spec.check(self.args.iothreads));
        checked.map_err(CommandError::Invalid)?;
        self.control.begin(specs, follows_hand_over)
    }

    /// Returns the exports whose sockets no other program serves. Such a program may also have the
    /// disks, and the start would wait for them.
    fn check_sockets(
        &self,
        opening: Vec<OpeningExport>,
        on_failure: &OnFailure<'_>,
    ) -> Result<Vec<OpeningExport>, CommandError> {
        let patience = Endpoint::patience();
        let checked = opening.into_iter().map(|export| match &export.spec().endpoint {
            EndpointSpec::Path(path)
                if !self.inherited.has_listener(&export.spec().name(), path) =>
            {
                match Endpoint::check_free(path, "--socket-path", patience) {
                    Ok(()) => Ok(export),
                    Err(error) => Err(export.fail(error.into())),
                }
            }
            EndpointSpec::Path(_) | EndpointSpec::Fd(_) => Ok(export),
        });
        self.without_failed(checked, on_failure)
    }

    /// Serves exports whose disks are open.
    fn serve_opened(
        &self,
        opened: Vec<OpenedExport>,
        on_failure: &OnFailure<'_>,
    ) -> Result<(), CommandError> {
        // Sockets are made after all steps in which disks may hang, so that a hang leaves no socket
        // behind. They are made before the threads log their choice: a refusal is one line.
        let bound = self.without_failed(self.bind(opened), on_failure)?;
        let set_up = bound
            .into_iter()
            .map(|BoundExport { disks, endpoint, export }| self.set_up(export, disks, endpoint));
        self.serve(self.without_failed(set_up, on_failure)?)
    }

    /// Chooses engines for exports with open disks, and makes their sockets. From here on no other
    /// process takes over before they are served.
    fn bind(&self, opened: Vec<OpenedExport>) -> Vec<Result<BoundExport, FailedExport>> {
        let split = |OpenedExport { disks, export }| (export, disks);
        let (exports, disks): (Vec<_>, Vec<_>) = opened.into_iter().map(split).unzip();
        let disks: Vec<OpenDisk> = disks.into_iter().flatten().collect();
        let choices = choose(&self.args, &disks, &[]);
        let mut disks = disks.into_iter().zip(choices);
        let bind = |export: OpeningExport| {
            let disks = disks.by_ref().take(export.spec().disks().len()).collect();
            let export = export.claim()?;
            let span = export_span(&export.spec().name());
            match span.in_scope(|| self.endpoint(export.spec())) {
                Ok(endpoint) => Ok(BoundExport { disks, endpoint, export }),
                Err(error) => Err(export.fail(error.into())),
            }
        };
        exports.into_iter().map(bind).collect()
    }

    /// Marks the first export as about to be served.
    pub(super) fn begin_to_serve(&self) -> Result<(), CommandError> {
        self.pool.lock().threads.as_mut().ok_or(CommandError::Ending)?.begin_to_serve();
        Ok(())
    }

    fn serve(&self, mut setups: Vec<ExportSetup>) -> Result<(), CommandError> {
        if setups.is_empty() {
            return Ok(());
        }
        self.begin_to_serve()?;
        for setup in setups.iter_mut().filter(|setup| setup.endpoint.is_none()) {
            setup.endpoint = self.inherited.take();
            // The name is taken, so no other export can have taken the descriptor.
            let endpoint = setup.endpoint.as_ref();
            endpoint.context("the inherited descriptor serves another export")?;
        }
        self.control.serve(setups)
    }

    /// Returns the results of the exports that have not failed.
    ///
    /// # Errors
    ///
    /// When the failure of one ends the whole start.
    fn without_failed<T>(
        &self,
        results: impl IntoIterator<Item = Result<T, FailedExport>>,
        on_failure: &OnFailure<'_>,
    ) -> Result<Vec<T>, CommandError> {
        let mut good = Vec::new();
        for result in results {
            match result {
                Ok(result) => good.push(result),
                Err(failed) => self.handle_failure(failed, on_failure)?,
            }
        }
        Ok(good)
    }

    /// Reports an export that cannot be served, unless it was removed.
    ///
    /// # Errors
    ///
    /// When the failure ends other exports, too, or the daemon.
    fn handle_failure(
        &self,
        failed: FailedExport,
        on_failure: &OnFailure<'_>,
    ) -> Result<(), CommandError> {
        let is_active = failed.is_active();
        let (spec, error) = failed.release();
        let is_end = matches!(error, CommandError::Ending | CommandError::HandedOver(_));
        let (own, restoring) = match on_failure {
            _ if is_end => return Err(error),
            OnFailure::FailAll if is_active => return Err(error),
            OnFailure::FailAll => return Err(CommandError::Cancelled(spec.name())),
            OnFailure::Continue { own, restoring } => (own, restoring),
        };
        if !is_active {
            tracing::info!(export = spec.name(), "removed before it was served");
            return Ok(());
        }
        if let Some(restoring) = restoring.filter(|all| all.is_about(&spec)) {
            // The receiver ends with the daemon.
            let _ = restoring.again.send((spec, error));
            return Ok(());
        }
        if self.control.cancel_start(own) {
            return Err(error);
        }
        self.report_failure(&[spec.name()], error);
        Ok(())
    }

    /// Logs and reports the exports that are waited for, with the reason.
    fn log_waiting(&self, opener: &ExportOpener) {
        for export in opener.left() {
            let export = export.name();
            let message = if opener.only_stale_locks() {
                "its disk is in use by a program that is not visible here; the daemon waits until \
                 the disk is free"
                    .to_owned()
            } else {
                format!(
                    "its disk is not open after {} s; the daemon waits for it",
                    OPEN_MAX.as_secs()
                )
            };
            tracing::warn!(export, "{message}");
            self.report_error(export, message);
        }
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
}

/// An export, and its disks that are open so far.
struct PendingDisks {
    disks: Vec<Option<OpenDisk>>,
    export: OpeningExport,
}

/// A disk, the settings of its export, its lease id, its cancellation token, and the span of its
/// export.
type WantedDisk =
    ((DiskSpec, ExportSettings), Option<u64>, CancelToken, Span, Option<Arc<FileTable>>);

/// All disks of some exports, which are opened side by side.
struct ExportOpener {
    /// `None`: the export was taken out.
    exports: Vec<Option<PendingDisks>>,
    /// For each disk, its export and its place there.
    places: Vec<(usize, usize)>,
    jobs: ParallelCalls<WantedDisk, Result<OpenDisk>>,
}

impl ExportOpener {
    /// Begins to open the disks of exports. If `waits_for_stale_locks`, disks that a killed process
    /// seems to have left in use are waited for.
    fn begin(
        opening: Vec<OpeningExport>,
        waits_for_stale_locks: bool,
        passed: &PassedFiles,
    ) -> Self {
        let (mut exports, mut places, mut to_open) = (Vec::new(), Vec::new(), Vec::new());
        for (index, export) in opening.into_iter().enumerate() {
            let (disks, lease_ids) = (export.spec().disks(), export.spec().lease_ids());
            places.extend((0..disks.len()).map(|place| (index, place)));
            let files = export.spec().device.places();
            let files = files.into_iter().map(|place| passed.get(&place).cloned());
            let disks = disks.into_iter().zip(lease_ids).zip(files);
            let span = export_span(&export.spec().name());
            let wanted = disks
                .map(|((disk, id), files)| (disk, id, export.cancel_token(), span.clone(), files));
            let before = to_open.len();
            to_open.extend(wanted);
            let disks = to_open[before..].iter().map(|_| None).collect();
            exports.push(Some(PendingDisks { disks, export }));
        }
        let open = move |(disk, lease_id, token, span, files): WantedDisk, give_way: Yield<'_>| {
            let _span = span.enter();
            if waits_for_stale_locks {
                OpenDisk::open_waiting(&disk, lease_id, &token, give_way)
            } else {
                anyhow::ensure!(token.is_active(), "its opening was cancelled");
                OpenDisk::open(&disk, lease_id, &token, files.as_ref())
            }
        };
        // An image has a thread with a ring of its own.
        Self { exports, places, jobs: ParallelCalls::begin_with_rings(to_open, open) }
    }

    /// Takes out exports that have failed, and exports with all disks open. Waits for all disks
    /// except the ones that a killed process has left in use, until no disk has come for
    /// `patience`.
    fn take_ready(
        &mut self,
        mut patience: Option<Duration>,
    ) -> Vec<Result<OpenedExport, FailedExport>> {
        let mut errors = Vec::new();
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
        let fail = |(number, error)| self.fail(number, error);
        let failed: Vec<FailedExport> = errors.into_iter().filter_map(fail).collect();
        let ready = self.exports.iter_mut().filter_map(take_if_ready);
        failed.into_iter().map(Err).chain(ready.map(Ok)).collect()
    }

    /// Returns true if none of the remaining disks hangs: a killed process has left all of them in
    /// use.
    fn only_stale_locks(&self) -> bool {
        self.jobs.all_yielded()
    }

    /// The exports that have not been taken out.
    fn left(&self) -> impl Iterator<Item = &ExportSpec> {
        self.exports.iter().flatten().map(|waiting| waiting.export.spec())
    }

    /// Waits until the next export is open, or has failed. `None`: none is left, or none came in
    /// time.
    fn next(&mut self, until: Option<Instant>) -> Option<Result<OpenedExport, FailedExport>> {
        loop {
            let (number, disk) = self.jobs.next(until)?;
            match disk.map_err(Into::into).and_then(|disk| disk) {
                Ok(disk) => {
                    self.put(number, disk);
                    if let Some(ready) = take_if_ready(&mut self.exports[self.places[number].0]) {
                        return Some(Ok(ready));
                    }
                }
                Err(error) => {
                    if let Some(failed) = self.fail(number, error) {
                        return Some(Err(failed));
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

    /// Takes out the export of a disk. `None`: it has failed already because of another disk.
    fn fail(&mut self, number: usize, error: anyhow::Error) -> Option<FailedExport> {
        let PendingDisks { export, .. } = self.exports[self.places[number].0].take()?;
        Some(export.fail(error.into()))
    }
}

fn take_if_ready(export: &mut Option<PendingDisks>) -> Option<OpenedExport> {
    if export.as_ref()?.disks.iter().any(Option::is_none) {
        return None;
    }
    let PendingDisks { disks, export } = export.take()?;
    Some(OpenedExport { disks: disks.into_iter().flatten().collect(), export })
}
