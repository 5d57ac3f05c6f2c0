//! The hand-over of exports from the daemon of one process to another.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::DiskSource;
use blockio::file::FileTable;
use vhost_user::{FdIndex, PassedFds};

use super::Daemon;
use crate::control::hand_over_state::{
    Described, ExportProgress, HandedDisk, HandedExport, HandedOpening, Paused,
};
use crate::control::{ExportSetup, FailedExport};
use crate::daemon::format::{HandedSocket, ProcessOptions};
use crate::log::export_span;
use crate::open::disk::OpenDisk;
use crate::open::parallel::ParallelCalls;
use crate::socket::{Endpoint, EndpointState};
use crate::spec::command::CommandError;
use crate::spec::settings::{PollLimits, SettingsChange};
use crate::spec::stats::LoopStats;
use crate::spec::{DiskSpec, EndpointSpec, ExportSettings, ExportSpec};
use crate::threads::engines::{Threads, choose};
use crate::threads::shutdown::Event;

/// The time that the release of all disks may take. The new process serves them already. Its
/// requests wait if they need a lock that is released late.
const LEAVE_MAX: Duration = Duration::from_secs(20);

/// The time that all disks may take to write their caches back: guests wait.
const WRITE_BACK_MAX: Duration = Duration::from_secs(2);

/// Exports that another process still serves.
pub(crate) struct ExpectedExports(Vec<ExportSetup>);

/// Queues that stand still, until this is dropped.
pub(crate) struct PausedQueues<'a> {
    daemon: &'a Daemon,
}

impl Daemon {
    /// Allows another process to take over from this one, which was started in this way.
    pub(crate) fn set_process_options(
        &self,
        options: ProcessOptions,
        control: Option<Weak<Endpoint>>,
    ) {
        assert!(self.process_options.set((options, control)).is_ok(), "a process is started once");
    }

    /// The options and the control socket with which this process was started.
    fn recorded_start(&self) -> Result<(&ProcessOptions, Option<Arc<Endpoint>>)> {
        let text = "the start of the daemon is not complete; try again";
        let (options, control) = self.process_options.get().context(text)?;
        Ok((options, control.as_ref().and_then(Weak::upgrade)))
    }

    /// The start of this process, and its control socket.
    ///
    /// # Errors
    ///
    /// When the start is not complete, or no descriptor is left.
    pub(crate) fn process_options(
        &self,
        fds: &mut PassedFds,
    ) -> Result<(ProcessOptions, Option<EndpointState>)> {
        let (options, control) = self.recorded_start()?;
        let control = control.map(|endpoint| endpoint.hand_over(fds)).transpose();
        let options = ProcessOptions { changes: self.changes(), ..options.clone() };
        Ok((options, control.context("cannot hand over the control socket")?))
    }

    /// The limits of busy-polling that the options set.
    pub(crate) fn poll_limits(&self) -> PollLimits {
        self.args.poll_limits()
    }

    /// The settings that have changed since the start.
    pub(crate) fn changes(&self) -> SettingsChange {
        self.changes.lock().clone()
    }

    /// The start of this process, and the path of its control socket.
    ///
    /// # Errors
    ///
    /// When the start is not complete, or there is no control socket.
    pub(crate) fn started(&self) -> Result<(ProcessOptions, PathBuf)> {
        let (options, control) = self.recorded_start()?;
        let path = control.as_ref().and_then(|control| control.path());
        Ok((
            options.clone(),
            path.context("the daemon has no control socket for a takeover")?.to_owned(),
        ))
    }

    /// Sets the source of the exports of the configuration file, for another process.
    pub(crate) fn set_config_exports(
        &self,
        list: impl Fn() -> Vec<ExportSpec> + Send + Sync + 'static,
    ) {
        assert!(self.of_file.set(Box::new(list)).is_ok(), "a process has one file");
    }

    /// The exports as the configuration file has made them, if there is one.
    pub(crate) fn config_exports(&self) -> Option<Vec<ExportSpec>> {
        self.of_file.get().map(|list| list())
    }

    /// Describes the exports for another process.
    ///
    /// # Errors
    ///
    /// When they cannot be handed over now.
    pub(crate) fn describe(&self) -> Result<Described, CommandError> {
        self.control.describe()
    }

    /// Hands over exports whose disks are being opened, with the times of their requests. The other
    /// process opens them too, and does not know the limits that have changed since then.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn hand_over_opening(
        &self,
        specs: Vec<(ExportSpec, Instant)>,
        fds: &mut PassedFds,
    ) -> Result<Vec<HandedOpening>> {
        let hand_over = |(mut spec, asked): (ExportSpec, Instant)| {
            spec.fill_newer_limits(&self.groups, asked);
            let endpoint = match &spec.endpoint {
                EndpointSpec::Fd(fd) => self.inherited.hand_over(*fd, fds),
                EndpointSpec::Path(path) => {
                    let passed = self.inherited.listener(&spec.name(), path)?;
                    passed.map(|socket| socket.hand_over(fds)).transpose()
                }
            };
            let endpoint = endpoint.context("cannot hand over an inherited socket")?;
            Ok(HandedOpening { spec, endpoint })
        };
        specs.into_iter().map(hand_over).collect()
    }

    /// Stops all queues, and writes all disks back to where the new process sees the data.
    ///
    /// # Errors
    ///
    /// When the exports are not the described ones, or do not stop, or a disk is not written back.
    /// The exports resume in that case.
    pub(crate) fn pause(
        &self,
        generation: u64,
    ) -> Result<(PausedQueues<'_>, Paused), CommandError> {
        // Clients that connect to the control socket from now on are served by the process that
        // continues.
        self.ownership.open()?;
        let paused_queues = PausedQueues { daemon: self };
        let mut paused = self.control.pause(generation)?;
        let write = |disk: &DiskSource| disk.hand_over().write_back();
        let written = write_back(std::mem::take(&mut paused.disks), write);
        written.map_err(CommandError::NotNow)?;
        Ok((paused_queues, paused))
    }

    /// Sets the start of the counters of the process from which this one takes over.
    pub(crate) fn set_start_time(&self, seconds: u64) {
        self.start_time.store(seconds, Ordering::Relaxed);
    }

    /// The counters of the IoThreads. None if the daemon has ended.
    pub(crate) fn iothread_stats(&self) -> Vec<LoopStats> {
        self.pool.lock().threads.as_ref().map(Threads::stats_to_hand_over).unwrap_or_default()
    }

    /// Continues the counters of another process, except the counters of its exports.
    pub(crate) fn continue_counters(&self, failed_takeovers: u64, iothreads: Vec<LoopStats>) {
        self.failed_takeovers.fetch_add(failed_takeovers, Ordering::Relaxed);
        if let Some(threads) = &mut self.pool.lock().threads {
            threads.set_earlier(iothreads);
        }
    }

    /// The debts of the limits of groups, by their names.
    pub(crate) fn group_debts(&self) -> BTreeMap<String, Vec<u64>> {
        self.groups.debts()
    }

    /// Takes over the debts of groups. Must be called before queues run.
    pub(crate) fn add_group_debts(&self, debts: &BTreeMap<String, Vec<u64>>) {
        self.groups.add_debts(debts);
    }

    /// Opens the exports that another process still serves.
    ///
    /// # Errors
    ///
    /// When one cannot be served here.
    pub(crate) fn expect(
        &self,
        exports: Vec<HandedExport>,
        fds: &mut PassedFds,
    ) -> Result<ExpectedExports, CommandError> {
        let (mut specs, mut endpoints) = (Vec::new(), Vec::new());
        let (mut wanted, mut engines) = (Vec::new(), Vec::new());
        for HandedExport { spec, disks: handed, endpoint } in exports {
            spec.settings.check(self.args.iothreads)?;
            let endpoint = endpoint.map(|endpoint| Endpoint::take_over(endpoint, fds));
            let endpoint = endpoint.transpose().context("cannot take over a socket")?;
            if let (EndpointSpec::Path(_), Some(endpoint)) = (&spec.endpoint, &endpoint) {
                self.inherited.remember(&spec.name(), endpoint)?;
            }
            endpoints.push(endpoint);
            let name = spec.name();
            for (disk, HandedDisk { file, size_bytes, files, .. }) in
                spec.disks().into_iter().zip(&handed)
            {
                let file = fds.take_some(*file).context("cannot take over a disk")?;
                let take = |(path, index): &(PathBuf, FdIndex)| {
                    Ok((path.clone(), File::from(fds.take(*index)?)))
                };
                let files: std::io::Result<Vec<_>> = files.iter().map(take).collect();
                let files = files.context("cannot take over the files of a disk")?;
                let is_complete = disk.1.files.is_some();
                let files = (is_complete || !files.is_empty())
                    .then(|| Arc::new(FileTable::new(files, is_complete)));
                let file = (file.map(File::from), files);
                wanted.push((disk, file, *size_bytes, name.clone()));
            }
            engines.extend(handed.into_iter().map(|disk| (disk.engine, disk.engine_reason)));
            specs.push(spec);
        }
        let disks = take_disks(wanted)?;
        let choices = choose(&self.args, &disks, &engines);
        let mut disks = disks.into_iter().zip(choices);
        let exports = self.control.begin(specs, false)?.into_iter().zip(endpoints);
        self.shared_disks.set_expects_hand_over(true);
        let set_up = exports.map(|(export, endpoint)| {
            let of_export = disks.by_ref().take(export.spec().disks().len()).collect();
            self.set_up(export.claim()?, of_export, endpoint)
        });
        let set_up: Result<Vec<ExportSetup>, FailedExport> = set_up.collect();
        self.shared_disks.set_expects_hand_over(false);
        let set_up = set_up.map_err(|failed| failed.release().1)?;
        self.begin_to_serve()?;
        Ok(ExpectedExports(set_up))
    }

    /// Hands over the passed sockets, for exports that may be added later.
    pub(crate) fn hand_over_sockets(&self, fds: &mut PassedFds) -> Result<Vec<HandedSocket>> {
        let sockets = self.inherited.hand_over_named(fds);
        let sockets = sockets.context("cannot hand over an inherited socket")?;
        Ok(sockets.into_iter().map(|(name, socket)| HandedSocket { name, socket }).collect())
    }

    /// Takes passed sockets over.
    pub(crate) fn expect_sockets(
        &self,
        sockets: Vec<HandedSocket>,
        fds: &mut PassedFds,
    ) -> Result<()> {
        for HandedSocket { name, socket } in sockets {
            let endpoint = Endpoint::take_over(socket, fds);
            self.inherited.remember(&name, &endpoint.context("cannot take over a socket")?)?;
        }
        Ok(())
    }

    /// Takes the sockets of exports whose disks another process has been opening. This process is
    /// to [open](Self::begin_add) the disks when it [continues](Self::resume).
    ///
    /// # Errors
    ///
    /// When one cannot be served here.
    pub(crate) fn expect_opening(
        &self,
        opening: Vec<HandedOpening>,
        fds: &mut PassedFds,
    ) -> Result<Vec<ExportSpec>> {
        let mut specs = Vec::new();
        for HandedOpening { spec, endpoint } in opening {
            spec.settings.check(self.args.iothreads)?;
            let endpoint = endpoint.map(|endpoint| Endpoint::take_over(endpoint, fds)).transpose();
            let endpoint = endpoint.context("cannot take over a socket")?;
            match (&spec.endpoint, endpoint) {
                (EndpointSpec::Fd(fd), Some(endpoint)) => self.inherited.put(*fd, endpoint),
                (EndpointSpec::Path(_), Some(endpoint)) => {
                    self.inherited.remember(&spec.name(), &endpoint)?;
                }
                (_, None) => {}
            }
            specs.push(spec);
        }
        Ok(specs)
    }

    /// Takes over these exports, which stay paused until [`resume`](Self::resume).
    ///
    /// # Errors
    ///
    /// When that is not possible. The old process has lost nothing.
    pub(crate) fn take_over(
        &self,
        ExpectedExports(exports): ExpectedExports,
        progress: Vec<ExportProgress>,
        fds: PassedFds,
    ) -> Result<()> {
        anyhow::ensure!(
            exports.len() == progress.len(),
            "the exports differ from their description"
        );
        for setup in &exports {
            tracing::info!(export = setup.log.name(), "{}", setup.line);
        }
        self.control.take_over(exports.into_iter().zip(progress).collect(), fds)
    }

    /// Resumes the exports that were taken over. Returns when all their queues run.
    pub(crate) fn resume(&self) {
        self.inherited.keep();
        self.control.resume();
    }
}

impl PausedQueues<'_> {
    /// Commits to the hand-over: the new process owns everything once it receives the answer. It
    /// owns stored descriptors of front-ends only if `leaves_stashes`. Returns the disks, which
    /// must be [released](Self::release) then.
    ///
    /// # Errors
    ///
    /// When this process is to end the exports itself.
    pub(crate) fn commit(&self, leaves_stashes: bool) -> Result<Vec<DiskSource>, CommandError> {
        let disks = self.daemon.control.commit(leaves_stashes)?;
        self.daemon.forget_killed();
        Ok(disks)
    }

    /// Leaves everything to `process`, which has received the answer over `stream`. Releases the
    /// disks last, which may take long. This process ends.
    pub(crate) fn release(self, process: u32, stream: UnixStream, disks: Vec<DiskSource>) {
        let Daemon { ownership, events, control, .. } = self.daemon;
        // The new process has to restore the inherited socket, so this one must not. The end of
        // this process closes the descriptor.
        std::mem::forget(self.daemon.inherited.take());
        let (leaving, left) = mpsc::channel();
        // Comes before the control thread reports that nothing is left, and before the disks:
        // requests to this process in the meantime must reach the new one in time.
        ownership.transfer(process, stream, |successor| {
            drop(events.send(Event::HandedOver(successor, left)))
        });
        control.release(process);
        // Dropping it would resume the exports.
        std::mem::forget(self);
        release_disks(disks);
        drop(leaving);
    }
}

impl Drop for PausedQueues<'_> {
    fn drop(&mut self) {
        self.daemon.control.resume();
        self.daemon.ownership.close();
    }
}

/// Writes disks back, each by `write`.
fn write_back<T: Send + 'static>(
    disks: Vec<T>,
    write: impl Fn(&T) -> Result<(), blockio::Error> + Send + Sync + 'static,
) -> Result<()> {
    let (count, until) = (disks.len(), Instant::now() + WRITE_BACK_MAX);
    let mut writing = ParallelCalls::begin(disks, move |disk: T, give_way| {
        give_way();
        write(&disk)
    });
    for _ in 0..count {
        let (_, written) = writing.next(Some(until)).with_context(|| {
            let seconds = WRITE_BACK_MAX.as_secs();
            format!(
                "the cache of a disk is not flushed after {seconds} s; try again when the disk \
                 answers (`ringhaul ctl show`)"
            )
        })?;
        written??;
    }
    Ok(())
}

/// Releases disks that another process continues to use.
fn release_disks(mut disks: Vec<DiskSource>) {
    // An open file was handed over as it is.
    disks.retain(|disk| disk.hand_over().descriptor().is_none());
    let until = Instant::now() + LEAVE_MAX;
    let mut leaving = ParallelCalls::begin(disks, |disk: DiskSource, give_way| {
        give_way();
        disk.hand_over().release_lock();
    });
    while leaving.next(Some(until)).is_some() {}
}

/// A disk of the old process, its file, files that were passed for it, its size, and the name of
/// its export.
type WantedDisk = ((DiskSpec, ExportSettings), (Option<File>, Option<Arc<FileTable>>), u64, String);

/// Opens disks side by side, because a key or a server may take long.
fn take_disks(wanted: Vec<WantedDisk>) -> Result<Vec<OpenDisk>> {
    let mut disks: Vec<Option<OpenDisk>> = wanted.iter().map(|_| None).collect();
    // An image has a thread with a ring of its own.
    let mut opening = ParallelCalls::begin_with_rings(wanted, |wanted: WantedDisk, _| {
        let (disk, file, size_bytes, name) = wanted;
        let taken = export_span(&name).in_scope(|| OpenDisk::take_over(&disk, file, size_bytes));
        taken.with_context(|| {
            format!(
                "the new process cannot serve the export {name}, so the old one keeps all; mend \
                 that disk, or end this export alone (`ringhaul ctl remove {name}`), and try again"
            )
        })
    });
    while let Some((number, disk)) = opening.next(None) {
        disks[number] = Some(disk??);
    }
    Ok(disks.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use blockio::DiskOptions;
    use blockio::testing::{Call, HandOverFacts, RemoteStub};
    use clap::{Args, FromArgMatches};

    use super::super::adding::tests::export;
    use super::*;
    use crate::control::{Control, Scene};
    use crate::options::ServeArgs;
    use crate::socket::inherited::InheritedSockets;
    use crate::spec::command::Command;
    use crate::spec::qos::{LimitSpec, QosChange, QosSpec};
    use crate::testing::{spawn_asleep, wait_until};

    /// The new process opens its disk with them, and does not know of the change.
    #[test]
    fn an_export_that_is_being_opened_has_the_limits_that_its_group_got_since() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let limits = |iops_total| LimitSpec {
            group: Some("a".to_owned()),
            iops_total: Some(iops_total),
            ..LimitSpec::default()
        };
        let mut spec = export("opening", Path::new("disk"));
        spec.settings.rules.limits = limits(5);
        let served = DiskSource::null(512, &DiskOptions::default()).unwrap();
        let rules = QosSpec { limits: limits(9), ..QosSpec::default() };
        let change = QosChange { limits: Some(limits(9)), ..QosChange::default() };
        daemon.groups.apply_change(&served, &rules, &change).unwrap();
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        for (asked, iops_total) in [(now.checked_sub(minute).unwrap(), 9), (now + minute, 5)] {
            let opening = vec![(spec.clone(), asked)];
            let handed = daemon.hand_over_opening(opening, &mut PassedFds::default()).unwrap();
            assert_eq!(handed[0].spec.settings.rules.limits, limits(iops_total));
        }
    }

    /// A daemon with an export on this disk, and the front-end.
    fn serving(disk: &RemoteStub) -> (Daemon, Scene, UnixStream) {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut scene = Scene::on(disk.clone().source(), Endpoint::Connection(ours));
        daemon.control.serve(vec![scene.setup.take().unwrap()]).unwrap();
        (daemon, scene, theirs)
    }

    /// The new process would read old data.
    #[test]
    fn a_disk_that_cannot_be_written_back_keeps_its_process() {
        let disk = RemoteStub::new(&[0; 4096]);
        let (daemon, _scene, _front_end) = serving(&disk);
        let pause = || daemon.pause(daemon.describe().unwrap().generation);
        pause().map(drop).unwrap();
        assert_eq!(disk.take_calls(), [Call::WriteBack]);
        disk.fail_write_back();
        let refused = pause().map(drop).unwrap_err();
        let CommandError::NotNow(why) = refused else { panic!("{refused:?}") };
        assert!(format!("{why:#}").contains("its cache cannot be written"), "{why:#}");
        assert!(daemon.ownership.await_ours().is_ok());
        assert!(daemon.describe().is_ok(), "it has not resumed");
    }

    /// A process may run fewer threads, or none until it has an export.
    #[test]
    fn counters_of_threads_that_do_not_run_are_handed_over() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let sample: serde_json::Value =
            serde_json::from_str(include_str!("format/sample.json")).unwrap();
        let earlier: Vec<LoopStats> =
            serde_json::from_value(sample["standstill"]["iothreads"].clone()).unwrap();
        assert!(!earlier.is_empty());
        daemon.continue_counters(0, earlier.clone());
        assert_eq!(daemon.iothread_stats(), earlier);
    }

    /// A request may be abandoned while queues stop.
    #[test]
    fn a_disk_that_may_still_change_keeps_its_process() {
        let disk = RemoteStub::new(&[0; 4096]);
        let (daemon, _scene, _front_end) = serving(&disk);
        let generation = daemon.describe().unwrap().generation;
        disk.set_hand_over(HandOverFacts { may_still_change: true, ..HandOverFacts::default() });
        let refused = daemon.pause(generation).map(drop).unwrap_err();
        assert!(refused.to_string().contains("may still execute"), "{refused}");
        disk.set_hand_over(HandOverFacts::default());
        // The exports resume on their own.
        wait_until(|| daemon.describe().is_ok());
        let generation = daemon.describe().unwrap().generation;
        daemon.pause(generation).map(drop).unwrap();
    }

    /// Service managers send SIGHUP together with SIGTERM.
    #[test]
    fn a_hang_up_after_a_request_to_end_abandons_no_export() {
        use crate::spec::command::EndCause::{Sighup, Sigint, Sigterm};
        use crate::threads::shutdown::{Outcome, wait_for_shutdown};
        for (second, outcome) in [(Sighup, Outcome::Clean), (Sigint, Outcome::Abandoned)] {
            let (sender, events) = mpsc::channel();
            let ended = sender.clone();
            let control = Control::start(move || drop(ended.send(Event::Ended))).unwrap();
            let disk = DiskSource::null(512, &DiskOptions::default()).unwrap();
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let mut scene = Scene::on(disk, Endpoint::Connection(ours));
            control.serve(vec![scene.setup.take().unwrap()]).unwrap();
            // The export ends after its disk has another size.
            let name = control.show().unwrap()[0].name();
            let (_, resizing) = control.begin_resize(name, None).unwrap();
            for cause in [Sigterm, second] {
                sender.send(Event::Requested(cause)).unwrap();
            }
            std::thread::scope(|scope| {
                let control = &control;
                let end = move || wait_for_shutdown(&events, control).unwrap();
                let ends = spawn_asleep(scope, end);
                if second == Sigint {
                    wait_until(|| ends.is_finished());
                }
                drop(resizing);
                assert_eq!(ends.join().unwrap(), outcome);
            });
        }
    }

    /// The new process waits for the lock of a cluster, and so do its guests.
    #[test]
    fn disks_are_released_once_they_belong_to_the_new_process() {
        let disk = RemoteStub::new(&[0; 4096]);
        let (daemon, _scene, _front_end) = serving(&disk);
        let generation = daemon.describe().unwrap().generation;
        let (socket, endpoint) = blocking_socket();
        daemon.inherited.put(7, Endpoint::take_over(endpoint.0, &mut { endpoint.1 }).unwrap());
        daemon.inherited.keep();
        let (paused, _) = daemon.pause(generation).unwrap();
        let released = paused.commit(true).unwrap();
        assert_eq!(disk.take_calls(), [Call::WriteBack]);
        paused.release(7, UnixStream::pair().unwrap().0, released);
        assert_eq!(disk.take_calls(), [Call::ReleaseLock]);
        assert_eq!(daemon.ownership.wait_transferred(Duration::ZERO), Some(7));
        drop(daemon);
        assert!(!is_blocking(&socket), "the new process would hang in it");
    }

    /// A listening socket that blocks when no process has it, and its state for a takeover.
    fn blocking_socket() -> (UnixListener, (EndpointState, PassedFds)) {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut fds = PassedFds::default();
        let socket = fds.put("socket", listener.try_clone().unwrap()).unwrap();
        (listener, (EndpointState::Inherited { socket, was_blocking: true }, fds))
    }

    fn is_blocking(socket: &UnixListener) -> bool {
        let flags = rustix::fs::fcntl_getfl(socket).unwrap();
        !flags.contains(rustix::fs::OFlags::NONBLOCK)
    }

    /// The parent may use its socket again after the last process.
    #[test]
    fn the_process_that_continues_restores_the_inherited_socket() {
        for continues in [false, true] {
            let serve = ServeArgs::augment_args(clap::Command::new("serve"));
            let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
            let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
            let (socket, (endpoint, mut fds)) = blocking_socket();
            let spec = export("vm", Path::new("disk"));
            let spec = ExportSpec { endpoint: EndpointSpec::Fd(7), ..spec };
            let opening = vec![HandedOpening { spec, endpoint: Some(endpoint) }];
            daemon.expect_opening(opening, &mut fds).unwrap();
            if continues {
                daemon.resume();
            }
            drop(daemon);
            assert_eq!(is_blocking(&socket), continues);
        }
    }

    /// The old process hands over the reservations of its own exports alone.
    #[test]
    fn an_export_that_is_added_after_a_takeover_loads_its_reservations() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        daemon.expect(Vec::new(), &mut PassedFds::default()).map(drop).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let [disk, broken] = ["disk", "broken"].map(|name| folder.path().join(name));
        std::fs::write(&disk, [0; 512]).unwrap();
        std::fs::write(&broken, "text").unwrap();
        let unit = serde_json::json!({
            "lun": 0, "disk": { "file": disk }, "settings": { "reservations": broken },
        });
        let spec = serde_json::from_value(serde_json::json!({
            "endpoint": { "path": folder.path().join("vm") }, "device": { "scsi": [unit] },
        }));
        let refused = daemon.handle(Command::Add(vec![spec.unwrap()])).unwrap_err();
        assert!(refused.to_string().contains("persistent reservations"), "{refused}");
    }

    /// The export may end and be added again. A process of an earlier version hands over no other
    /// sockets.
    #[test]
    fn a_served_export_of_a_service_manager_keeps_its_socket() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let (daemon, _ending) = Daemon::start(args, InheritedSockets::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vm");
        let mut fds = PassedFds::default();
        let socket = fds.put("socket", UnixListener::bind(&path).unwrap()).unwrap();
        let spec: ExportSpec = serde_json::from_value(serde_json::json!({
            "name": "vm", "endpoint": { "path": path },
            "device": { "blk": { "null": { "size-bytes": 512 } } },
        }))
        .unwrap();
        let disk = HandedDisk {
            file: None,
            size_bytes: 512,
            engine: None,
            engine_reason: None,
            files: Vec::new(),
        };
        let endpoint = Some(EndpointState::Inherited { socket, was_blocking: false });
        let handed = HandedExport { spec, disks: vec![disk], endpoint };
        drop(daemon.expect(vec![handed], &mut fds).map_err(CommandError::into_error).unwrap());
        let endpoint = daemon.inherited.listener("vm", &path).unwrap().expect("it is lost");
        let _front_end = UnixStream::connect(&path).unwrap();
        assert!(endpoint.accept().unwrap().is_ok(), "it is another socket");
    }

    /// The new process cannot open the socket of a service manager, or that of `--fd`, by itself.
    #[test]
    fn an_export_that_is_being_opened_keeps_its_inherited_socket() {
        let start = || {
            let serve = ServeArgs::augment_args(clap::Command::new("serve"));
            let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
            Daemon::start(args, InheritedSockets::default()).unwrap()
        };
        let ((old, _old_ending), (new, _new_ending)) = (start(), start());
        let folder = tempfile::tempdir().unwrap();
        let [by_name, by_number, own] = ["a", "b", "c"].map(|name| folder.path().join(name));
        let passed = |path: &Path| {
            let mut fds = PassedFds::default();
            let socket = fds.put("socket", UnixListener::bind(path).unwrap()).unwrap();
            let state = EndpointState::Inherited { socket, was_blocking: false };
            Endpoint::take_over(state, &mut fds).unwrap()
        };
        let spec = |path: &Path| export(&path.display().to_string(), Path::new("disk"));
        old.inherited.remember(&spec(&by_name).name(), &passed(&by_name)).unwrap();
        old.inherited.put(7, passed(&by_number));
        let numbered = ExportSpec { endpoint: EndpointSpec::Fd(7), ..spec(&by_number) };
        let specs = [spec(&by_name), numbered, spec(&own)];

        let (mut fds, now) = (PassedFds::default(), Instant::now());
        let opening = specs.iter().map(|spec| (spec.clone(), now)).collect();
        let handed = old.hand_over_opening(opening, &mut fds).unwrap();
        assert_eq!(new.expect_opening(handed, &mut fds).unwrap(), specs);
        assert_eq!(fds.all().count(), 0, "a descriptor has no user");
        assert!(!new.inherited.has_listener(&spec(&own).name(), &own));
        let taken = [
            new.inherited.listener(&spec(&by_name).name(), &by_name).unwrap(),
            new.inherited.take(),
        ];
        for (endpoint, path) in taken.into_iter().zip([by_name, by_number]) {
            let endpoint = endpoint.expect("the socket is lost");
            let _front_end = UnixStream::connect(&path).unwrap();
            assert!(endpoint.accept().unwrap().is_ok(), "it is another socket");
        }
    }

    /// An export may be added later. Repeated upgrades do not multiply the sockets.
    #[test]
    fn a_passed_socket_without_an_export_goes_along() {
        let start = || {
            let serve = ServeArgs::augment_args(clap::Command::new("serve"));
            let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
            Daemon::start(args, InheritedSockets::default()).unwrap()
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("later");
        let listener = UnixListener::bind(&path).unwrap();
        let mut fds = PassedFds::default();
        let socket = fds.put("socket", listener).unwrap();
        let socket = EndpointState::Inherited { socket, was_blocking: false };
        let mut handed = vec![HandedSocket { name: "vm.socket".to_owned(), socket }];
        for upgrade in 0..3 {
            let (daemon, _ending) = start();
            daemon.expect_sockets(handed, &mut fds).unwrap();
            let endpoint = daemon.inherited.listener("later", &path).unwrap().unwrap();
            let _front_end = UnixStream::connect(&path).unwrap();
            assert!(endpoint.accept().unwrap().is_ok(), "it is another socket");
            // An export with the socket comes with it, too.
            daemon.inherited.remember("later", &endpoint).unwrap();
            fds = PassedFds::default();
            handed = daemon.hand_over_sockets(&mut fds).unwrap();
            assert_eq!(handed.len(), 1, "upgrade {upgrade}");
            assert_eq!(handed[0].name, "vm.socket");
        }
    }

    #[test]
    fn disks_are_written_back_when_each_of_them_is() {
        let write = |disk: &u32| match disk {
            2 => Err(blockio::Error::Options("disk 2 is not written".to_owned())),
            _ => Ok(()),
        };
        write_back(vec![0, 1, 3], write).unwrap();
        for disks in [vec![2], vec![0, 2, 3], vec![2, 0], vec![1, 2]] {
            let error = write_back(disks, write).unwrap_err().to_string();
            assert_eq!(error, "disk 2 is not written");
        }
    }

    /// A guest or a member of the control group may have broken the header of its own image.
    #[test]
    fn the_export_that_cannot_be_taken_over_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let image = DiskSpec::File(file.path().to_owned());
        let wanted = |file| {
            ((image.clone(), ExportSettings::default()), (file, None), 4096, "vm7".to_owned())
        };
        take_disks(vec![wanted(Some(file.reopen().unwrap()))]).map(drop).unwrap();
        let error = take_disks(vec![wanted(None)]).map(drop).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("export vm7") && text.contains("ctl remove vm7"), "{text}");
        assert!(text.contains("without a descriptor"), "{text}");
    }
}
