//! Exports are added: their disks are opened, and those that hang hold up no others.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, Result};

use super::Daemon;
use super::opening::{LateError, OPEN_MAX, OpeningExports, Taken};
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
    /// can be asked to end meanwhile. If the exports cannot be served, it ends with that error,
    /// unless it has others by then. Those whose disks hang are served when they do not any more,
    /// and hold up no others.
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
            let names: Vec<String> = specs.iter().map(ExportSpec::name).collect();
            match daemon.add_as_they_open(specs) {
                Ok(()) | Err(CommandError::Ending | CommandError::HandedOver(_)) => {}
                Err(error) if daemon.control.give_up_start(&[]) => {
                    drop(daemon.events.send(Event::NotStarted(error.into_error())));
                }
                Err(error) => daemon.report_failure(&names, error),
            }
        };
        let thread = std::thread::Builder::new().name("ringhaul-open".into()).spawn(open);
        thread.context("cannot start the thread that opens the disks")?;
        Ok(Opening(opening))
    }

    /// An error concerns all of them.
    fn add_as_they_open(&self, specs: Vec<ExportSpec>) -> Result<(), CommandError> {
        let mut names = self.reserve(&specs)?;
        check_sockets(&specs)?;
        let mut opening = OpeningExports::begin(specs, true);
        let Taken { ready, mut failed } = opening.take_ready(Some(OPEN_MAX));
        if !failed.is_empty() && names.give_up_start() {
            return Err(failed.swap_remove(0).error.into());
        }
        for LateError { spec, error } in failed {
            drop(names.split(std::slice::from_ref(&spec)));
            self.report_failure(&[spec.name()], error.into());
        }
        for export in opening.left() {
            let export = export.name();
            let message = if opening.only_left_behind() {
                "its disk is in use by no program that is visible; it is waited for".to_owned()
            } else {
                format!("its disk is not open after {} s; it is waited for", OPEN_MAX.as_secs())
            };
            tracing::warn!(export, "{message}");
            self.report_error(export, message);
        }
        self.serve_late(&mut names, ready)?;
        while let Some(opened) = opening.next() {
            match opened {
                Ok(ready) => self.serve_late(&mut names, vec![ready])?,
                Err(LateError { spec, error }) => {
                    drop(names.split(std::slice::from_ref(&spec)));
                    self.fail(&[spec.name()], error.into())?;
                }
            }
        }
        Ok(())
    }

    /// Serves exports that are ready together.
    fn serve_late(
        &self,
        names: &mut Reservation<'_>,
        ready: Vec<(ExportSpec, Vec<OpenDisk>)>,
    ) -> Result<(), CommandError> {
        let specs: Vec<ExportSpec> = ready.iter().map(|(spec, _)| spec.clone()).collect();
        let served = self.serve_opened(names.split(&specs), ready);
        let exports: Vec<String> = specs.iter().map(ExportSpec::name).collect();
        served.or_else(|error| self.fail(&exports, error))
    }

    /// Reports that exports cannot be served, if there are others.
    ///
    /// # Errors
    ///
    /// If there are none, or the daemon ends anyway.
    fn fail(&self, exports: &[String], error: CommandError) -> Result<(), CommandError> {
        let is_over = matches!(error, CommandError::Ending | CommandError::HandedOver(_));
        if is_over || self.control.give_up_start(&[]) {
            return Err(error);
        }
        self.report_failure(exports, error);
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
        self.subscribers.report(ExportEvent { export, what: What::Error { message, left_out: 0 } });
    }

    pub(super) fn add(&self, specs: Vec<ExportSpec>) -> Result<Reply, CommandError> {
        let names = self.reserve(&specs)?;
        check_sockets(&specs)?;
        let opened = OpeningExports::begin(specs, false).take_ready(None).all()?;
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
            Ok(opened.into_setup(Some(endpoint), self))
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

#[cfg(test)]
mod tests {
    use blockio::{DiskOptions, DiskSource};
    use clap::{Args, FromArgMatches};

    use super::super::opening::tests::{export, leave};
    use super::*;
    use crate::command::{Command, EndCause};
    use crate::ending::Outcome;
    use crate::options::ServeArgs;

    /// However late: somebody may have added others meanwhile.
    #[test]
    fn exports_that_cannot_be_served_end_no_others() {
        [false, true].into_iter().for_each(fail_beside_others);
    }

    fn fail_beside_others(is_late: bool) {
        let folder = tempfile::tempdir().unwrap();
        let [left, other] = ["left", "other"].map(|name| folder.path().join(name));
        [&left, &other].into_iter().for_each(|path| std::fs::write(path, [0; 512]).unwrap());
        let held = leave(DiskSource::file(&left, &DiskOptions::default()).unwrap());
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = serve.get_matches_from(["serve"]);
        let (daemon, ending) =
            Daemon::start(ServeArgs::from_arg_matches(&args).unwrap(), None).unwrap();
        let daemon = Arc::new(daemon);
        let (_subscription, events) = daemon.subscribers().subscribe();
        let socket = |name: &str| folder.path().join(name).display().to_string();
        let opening = daemon.begin_add(vec![export(&socket("vm1"), &left)]).unwrap();
        daemon.handle(Command::Add(vec![export(&socket("vm2"), &other)])).unwrap();
        let wait_for = |text: &str| {
            loop {
                // However slow the machine is.
                let event = events.recv_timeout(Duration::from_secs(60)).unwrap();
                match &event.what {
                    What::Error { message, .. } if message.contains(text) => break,
                    _ => {}
                }
            }
        };
        if is_late {
            wait_for("it is waited for");
        }
        std::fs::remove_file(&left).unwrap();
        drop(held);
        wait_for("cannot be served");
        opening.settle();
        daemon.handle(Command::End(EndCause::Control)).unwrap();
        assert_eq!(ending.wait(&daemon).unwrap(), Outcome::Clean);
    }
}
