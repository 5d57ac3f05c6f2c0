//! Exports are added: their disks are opened, and those that hang hold up no others.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, Result};

use super::Daemon;
use super::opening::{LateError, OPEN_MAX, OpeningExports};
use crate::command::{CommandError, Reply};
use crate::control::Reservation;
use crate::ending::Event;
use crate::engines::choose;
use crate::export::Endpoint;
use crate::open_disk::OpenDisk;
use crate::spec::{EndpointSpec, ExportSpec};
use crate::subscribers::{ExportEvent, What};

/// Exports that are being opened.
pub(crate) struct Opening(mpsc::Receiver<()>);

/// How long a thread takes, unless its disk hangs, that has opened exports for a daemon which ends.
const CLEAN_UP_MAX: Duration = Duration::from_secs(1);

impl Opening {
    /// Waits until sockets are removed that will not be served, unless a disk hangs.
    pub(crate) fn settle(self) {
        let _ = self.0.recv_timeout(CLEAN_UP_MAX);
    }
}

impl Daemon {
    /// As `Command::Add`, on a thread of its own: a disk may take long to open, and the daemon
    /// can be asked to end meanwhile. If the exports cannot be served, it ends with that error.
    /// Those whose disks hang are served when they do not any more, and hold up no others.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread left.
    pub(crate) fn begin_add(self: &Arc<Self>, specs: Vec<ExportSpec>) -> Result<Opening> {
        let (daemon, (done, opening)) = (Arc::clone(self), mpsc::channel());
        let open = move || {
            let _done: mpsc::Sender<()> = done;
            // It is dropped first, with all that it holds.
            let daemon = daemon;
            match daemon.add_as_they_open(specs) {
                Ok(()) | Err(CommandError::Ending) => {}
                Err(error) => drop(daemon.events.send(Event::NotStarted(error.into_error()))),
            }
        };
        let thread = std::thread::Builder::new().name("ringhaul-open".into()).spawn(open);
        thread.context("cannot start the thread that opens the disks")?;
        Ok(Opening(opening))
    }

    fn add_as_they_open(&self, specs: Vec<ExportSpec>) -> Result<(), CommandError> {
        let mut names = self.reserve(&specs)?;
        check_sockets(&specs)?;
        let mut opening = OpeningExports::begin(specs, true);
        let ready = opening.take_ready(Some(OPEN_MAX))?;
        let mut serves_any = !ready.is_empty();
        for export in opening.left() {
            let (export, seconds) = (export.name(), OPEN_MAX.as_secs());
            let message = format!("its disk is not open after {seconds} s; it is waited for");
            tracing::warn!(export, "{message}");
            self.report_error(export, message);
        }
        let of_ready: Vec<ExportSpec> = ready.iter().map(|(spec, _)| spec.clone()).collect();
        self.serve_opened(names.split(&of_ready), ready)?;
        while let Some(opened) = opening.next() {
            let served = match opened {
                Ok((spec, disks)) => {
                    let names = names.split(std::slice::from_ref(&spec));
                    self.serve_opened(names, vec![(spec.clone(), disks)]).map_err(|e| (spec, e))
                }
                Err(LateError { spec, error }) => {
                    drop(names.split(std::slice::from_ref(&spec)));
                    Err((spec, error.into()))
                }
            };
            match served {
                Ok(()) => serves_any = true,
                Err((_, CommandError::Ending)) => return Err(CommandError::Ending),
                // Others have guests by now.
                Err((spec, error)) if serves_any => {
                    let message = format!("cannot be served: {:#}", error.into_error());
                    tracing::error!(export = spec.name(), "{message}");
                    self.report_error(spec.name(), message);
                }
                Err((_, error)) => return Err(error),
            }
        }
        Ok(())
    }

    fn report_error(&self, export: String, message: String) {
        self.subscribers.report(ExportEvent { export, what: What::Error { message, left_out: 0 } });
    }

    pub(super) fn add(&self, specs: Vec<ExportSpec>) -> Result<Reply, CommandError> {
        let names = self.reserve(&specs)?;
        check_sockets(&specs)?;
        let opened = OpeningExports::begin(specs, false).take_ready(None)?;
        self.serve_opened(names, opened)?;
        Ok(Reply::Added)
    }

    fn reserve(&self, specs: &[ExportSpec]) -> Result<Reservation<'_>, CommandError> {
        specs.iter().try_for_each(|spec| spec.check(self.args.iothreads))?;
        self.control.reserve(specs)
    }

    /// Serves exports whose disks are open: all of them or, where one fails, none.
    fn serve_opened(
        &self,
        names: Reservation<'_>,
        opened: Vec<(ExportSpec, Vec<OpenDisk>)>,
    ) -> Result<(), CommandError> {
        let (specs, disks): (Vec<ExportSpec>, Vec<_>) = opened.into_iter().unzip();
        let disks: Vec<OpenDisk> = disks.into_iter().flatten().collect();
        let choices = choose(&self.args, &disks, &[]);
        // Behind what disks may hang in, so that no socket is left behind then, and before the
        // threads, which say what they chose: what is refused is refused in one line.
        let endpoints = specs.iter().map(|spec| self.endpoint(spec)).collect::<Result<Vec<_>>>()?;
        let opened = self.set_up(specs, disks, choices)?;
        let mut ready = Vec::new();
        let set_up = opened.into_iter().zip(endpoints).map(|(opened, endpoint)| {
            let endpoint = endpoint.or_else(|| self.inherited().take().map(|(_, socket)| socket));
            // Its name is reserved, so nobody else has taken it.
            let endpoint = endpoint.context("the inherited descriptor serves another export")?;
            ready.push((opened.log.name().to_owned(), opened.line.clone()));
            Ok(opened.into_setup(Some(endpoint), self.limits.clone()))
        });
        let exports = set_up.collect::<Result<Vec<_>>>()?;
        names.serve(exports)?;
        for (export, line) in ready {
            tracing::info!(export, "{line}");
        }
        Ok(())
    }
}

/// Checks that no other program serves the sockets: it may have the disks too, which would be
/// waited for.
fn check_sockets(specs: &[ExportSpec]) -> Result<()> {
    specs.iter().try_for_each(|spec| match &spec.endpoint {
        EndpointSpec::Path(path) => Endpoint::check_free(path, "--socket-path"),
        EndpointSpec::Fd(_) => Ok(()),
    })
}
