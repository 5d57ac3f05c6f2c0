//! The daemon: named exports, and the commands that add, change and remove them.

pub(crate) mod adding;
pub(crate) mod arguments;
pub(crate) mod disk_monitor;
pub(crate) mod format;
pub(crate) mod hand_over;
mod keeping;
mod moving;
pub(crate) mod process_status;
pub(crate) mod reload;
mod resizing;
pub(crate) mod saved_state;
mod size_check;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use blockio::executor::Lock;
use device::{CallWatch, Device};

use crate::control::export_log::ExportLog;
use crate::control::subscribers::Subscribers;
use crate::control::{ChangingUnit, Control, ExportSetup, FailedExport, ReadyExport, UnitChange};
use crate::daemon::format::ProcessOptions;
use crate::daemon::saved_state::{ChangedPart, SavedState};
use crate::fd_store::FdStore;
use crate::log::export_span;
use crate::open::disk::{OpenDisk, PassedFiles};
use crate::open::shared_disks::SharedDisks;
use crate::options::ServeArgs;
use crate::process::limits::MemoryLimits;
use crate::socket::Endpoint;
use crate::socket::inherited::InheritedSockets;
use crate::spec::command::{Command, CommandError, ExportStatus, Reply, StatsReader};
use crate::spec::lease_id::lease_id;
use crate::spec::qos::{LimitGroups, QosChange};
use crate::spec::settings::{Settings, SettingsChange};
use crate::spec::stats::DaemonStats;
use crate::spec::status::ExportDetails;
use crate::spec::{EndpointSpec, ExportSettings, ExportSpec, UnitPlace, UnitSpec};
use crate::threads::engines::{EngineChoice, Thread, Threads, choose, set_up};
use crate::threads::ownership::{Ownership, PassedOn};
use crate::threads::shutdown::{Event, Outcome, wait_for_shutdown};
use crate::threads::thread_watch::ThreadWatch;

/// A daemon that serves disks on any number of named exports.
///
/// Each command runs on its caller's thread and blocks only that thread: opening a disk or ending
/// an export may take long.
pub struct Daemon {
    args: Arc<ServeArgs>,
    control: Control,
    limits: MemoryLimits,
    inherited: InheritedSockets,
    /// `None`: no service manager keeps descriptors.
    fd_store: Option<Arc<FdStore>>,
    shared_disks: SharedDisks,
    groups: Arc<LimitGroups>,
    pool: Lock<Pool>,
    thread_watch: Arc<Lock<ThreadWatch>>,
    events: mpsc::Sender<Event>,
    /// The start parameters of this process and its control socket, which a takeover needs.
    process_options: OnceLock<(ProcessOptions, Option<Weak<Endpoint>>)>,
    subscribers: Subscribers,
    /// The settings that were changed since the start.
    changes: Lock<SettingsChange>,
    /// Reads the exports of the configuration file.
    of_file: OnceLock<ConfigExports>,
    ownership: Arc<Ownership>,
    /// The start of the counters, in seconds since 1970.
    start_time: AtomicU64,
    /// Takeovers by another process that have failed.
    pub(crate) failed_takeovers: AtomicU64,
    /// Stores the changes of commands for the next start, if they are to be kept.
    saved_state: OnceLock<SavedState>,
}

fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the exports of the configuration file as they are served. The reader of the file sets
/// it.
type ConfigExports = Box<dyn Fn() -> Vec<ExportSpec> + Send + Sync>;

/// The threads that serve exports.
struct Pool {
    /// `None` after the end of the daemon.
    threads: Option<Threads>,
    /// The number of exports that were given threads.
    exports: usize,
}

/// Receives the end of a daemon.
pub struct Shutdown(mpsc::Receiver<Event>);

impl Daemon {
    /// Starts a daemon without exports, which may be given inherited sockets.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread or descriptor left.
    pub fn start(args: ServeArgs, inherited: InheritedSockets) -> Result<(Self, Shutdown)> {
        let fd_store = FdStore::open(args.keep_connections, inherited.take_stored())?;
        let thread_watch = Arc::new(Lock::new(ThreadWatch::new()));
        let (events, received) = mpsc::channel();
        let ended = events.clone();
        // The receiver is dropped only when the daemon ends anyway.
        let control = Control::start(move || drop(ended.send(Event::Ended)))?;
        let args = Arc::new(args);
        let threads =
            Some(Threads::new(Arc::clone(&args), events.clone(), Arc::clone(&thread_watch)));
        let sizes = (args.max_guest_memory, args.max_mapped_memory);
        let limits = MemoryLimits::new(sizes.0, sizes.1, args.memory_files.into());
        let daemon = Self {
            args,
            control,
            limits,
            inherited,
            fd_store,
            shared_disks: SharedDisks::default(),
            groups: Arc::default(),
            pool: Lock::new(Pool { threads, exports: 0 }),
            thread_watch,
            events,
            process_options: OnceLock::new(),
            subscribers: Subscribers::default(),
            changes: Lock::default(),
            of_file: OnceLock::new(),
            ownership: Arc::default(),
            start_time: AtomicU64::new(seconds_since_1970()),
            failed_takeovers: AtomicU64::new(0),
            saved_state: OnceLock::new(),
        };
        Ok((daemon, Shutdown(received)))
    }

    /// Carries out a command and waits until it is done. Any thread may call this at any time.
    ///
    /// # Errors
    ///
    /// When the command cannot be carried out. Nothing has changed then, unless the error says so.
    pub fn handle(&self, command: Command) -> Result<Reply, CommandError> {
        self.handle_with(command, &PassedFiles::default())
    }

    /// Like [`handle`](Self::handle), with files that came with the command.
    ///
    /// # Errors
    ///
    /// Like [`handle`](Self::handle).
    pub(crate) fn handle_with(
        &self,
        command: Command,
        passed: &PassedFiles,
    ) -> Result<Reply, CommandError> {
        let part = ChangedPart::from_command(&command);
        // A hand-over does not include changes of exports after its description.
        let changes_exports = match &part {
            Some(ChangedPart::Exports(_) | ChangedPart::Disk(..)) => true,
            Some(ChangedPart::Settings(_)) => false,
            None => matches!(command, Command::Resize(..) | Command::LoadState(..)),
        };
        let _running = changes_exports.then(|| self.ownership.begin_command()).transpose()?;
        let done = self.carry_out(command, passed);
        self.keep(part.as_ref(), done)
    }

    fn carry_out(&self, command: Command, passed: &PassedFiles) -> Result<Reply, CommandError> {
        match command {
            Command::Add(specs) => self.add(specs, false, passed),
            Command::Remove(removal) => Ok(Reply::Removed(Box::new(self.control.remove(removal)?))),
            Command::Set(change) => self.set(&change).map(Reply::Settings),
            Command::AddUnit(export, unit) => self.add_unit(export, *unit, passed),
            Command::RemoveUnit(export, place) => self.remove_unit(export, place),
            Command::Resize(export, place, size) => self.resize(export, place, size),
            Command::SetDisk(export, place, change) => self.set_disk(export, place, change),
            Command::Resume(export, place) => {
                self.control.resume_disks(export, place).map(|()| Reply::Done)
            }
            Command::SaveState(export) => self.save_state(export),
            Command::LoadState(export, state) => self.load_state(export, &state),
            Command::End(cause) => {
                // A failed send means that the daemon has ended.
                let end = || drop(self.events.send(Event::Requested(cause)));
                self.ownership.run_or_pass_on(PassedOn::End, end);
                Ok(Reply::Done)
            }
        }
    }

    /// Watches for hanging calls and IoThreads until the returned watch is dropped. A process has
    /// one watch. It must outlive the queues, because a hanging call keeps them from stopping.
    ///
    /// # Errors
    ///
    /// When the kernel refuses a signal handler or a thread.
    pub fn watch(&self) -> Result<CallWatch> {
        let threads = Arc::clone(&self.thread_watch);
        let check = move |now| threads.lock().check(now);
        Ok(CallWatch::start(check)?)
    }

    /// Asks every IoThread for a turn. The receiver is disconnected when all have turned.
    pub(crate) fn ask_for_turns(&self) -> mpsc::Receiver<()> {
        let pool = self.pool.lock();
        pool.threads.as_ref().map_or_else(|| mpsc::channel().1, Threads::ask_for_turns)
    }

    /// The record of which process owns the exports.
    pub(crate) fn ownership(&self) -> &Arc<Ownership> {
        &self.ownership
    }

    /// The subscribers to events of exports.
    pub(crate) fn subscribers(&self) -> &Subscribers {
        &self.subscribers
    }

    /// Makes the device of an export on its disks, and selects its threads.
    fn set_up(
        &self,
        export: ReadyExport,
        disks: Vec<(OpenDisk, EngineChoice)>,
        endpoint: Option<Endpoint>,
    ) -> Result<ExportSetup, FailedExport> {
        let spec = export.spec();
        let log = ExportLog::new(spec.name()).with_subscribers(self.subscribers.clone());
        let log = Arc::new(log.with_slow_requests(self.args.slow_request));
        let (disks, device, threads) = match self.make_device(spec, disks, &log) {
            Ok(made) => made,
            Err(error) => return Err(export.fail(error)),
        };
        let line = spec.serving_line(&disks);
        let disks = disks.into_iter().map(|disk| disk.source).collect();
        let threads = threads.into_iter().map(|thread| thread.remote).collect();
        let (limits, groups) = (self.limits.clone(), Arc::clone(&self.groups));
        let fd_store = self.fd_store.clone();
        Ok(ExportSetup {
            log,
            disks,
            device,
            endpoint,
            threads,
            limits,
            groups,
            fd_store,
            line,
            export,
        })
    }

    fn make_device(
        &self,
        spec: &ExportSpec,
        opened: Vec<(OpenDisk, EngineChoice)>,
        log: &Arc<ExportLog>,
    ) -> Result<(Vec<OpenDisk>, Device, Vec<Thread>), CommandError> {
        let threads = self.threads_for(spec)?;
        let mut disks = Vec::new();
        for (mut disk, choice) in opened {
            // Without the lock of the pool, because one of the threads may be stuck.
            set_up(&self.args, &threads, (&spec.name(), &mut disk), choice)?;
            disks.push(disk);
        }
        let events = Arc::<ExportLog>::clone(log);
        let device = spec.make_device(&disks, events, &self.shared_disks, &self.groups)?;
        Ok((disks, device, threads))
    }

    /// The start of the counters, in seconds since 1970.
    pub(crate) fn start_time(&self) -> u64 {
        self.start_time.load(Ordering::Relaxed)
    }

    /// All exports, in the order in which they were added.
    ///
    /// # Errors
    ///
    /// When the daemon is ending.
    pub fn exports(&self) -> Result<Vec<ExportStatus>, CommandError> {
        self.control.show()
    }

    /// The details of an export.
    ///
    /// # Errors
    ///
    /// When there is no such export, or the daemon is ending.
    pub fn details(&self, export: String) -> Result<ExportDetails, CommandError> {
        self.control.details(export)
    }

    /// All counters.
    ///
    /// # Errors
    ///
    /// When the daemon is ending.
    pub fn stats(&self, reader: StatsReader) -> Result<DaemonStats, CommandError> {
        Ok(DaemonStats {
            start_time_seconds: self.start_time(),
            failed_takeovers: self.failed_takeovers.load(Ordering::Relaxed),
            exports: self.control.stats(reader)?,
            iothreads: self.pool.lock().threads.as_ref().ok_or(CommandError::Ending)?.stats(),
        })
    }

    /// Changes settings, and returns them. An empty change returns the current settings.
    fn set(&self, change: &SettingsChange) -> Result<Settings, CommandError> {
        let _ours = self.ownership.await_ours()?;
        let mut pool = self.pool.lock();
        let threads = pool.threads.as_mut().ok_or(CommandError::Ending)?;
        let mut limits = threads.poll_limits();
        change.apply(&mut limits).map_err(CommandError::Invalid)?;
        threads.set_poll_limits(limits);
        let settings = Settings::from_limits(limits);
        if *change != SettingsChange::default() {
            self.changes.lock().add(change);
            let Settings { log, poll_max_us, poll_budget } = &settings;
            let log = log.as_deref().unwrap_or("not known");
            tracing::info!(
                "settings: poll-max-us {poll_max_us}, poll-budget {poll_budget}, log {log}"
            );
        }
        Ok(settings)
    }

    fn add_unit(
        &self,
        export: String,
        unit: UnitSpec,
        passed: &PassedFiles,
    ) -> Result<Reply, CommandError> {
        let (place, asked) = (unit.place(), Instant::now());
        let (changing, lock) = self.control.begin_unit(export.clone(), place, UnitChange::Add)?;
        let ChangingUnit { name, log_name, device, settings, endpoint, cancel_token, .. } =
            changing;
        let turns = changing.turns;
        let locks = turns.as_ref().map(|turns| Arc::clone(turns.locks()));
        let disk_locks = locks.filter(|_| unit.is_locked_late(&settings));
        unit.check(&settings.rules).map_err(CommandError::Invalid)?;
        let named = unit.disk(&settings);
        let unless_given_up = |error| match cancel_token.is_active() {
            true => error,
            false => CommandError::UnitCancelled(export.clone(), place),
        };
        let lease_id = lease_id(&endpoint, Some(place));
        let files = passed.get(&Some(place));
        let opened = export_span(&log_name)
            .in_scope(|| OpenDisk::open(&named, lease_id, &cancel_token, files));
        let mut disk = opened.map_err(|error| unless_given_up(error.into()))?;
        self.groups.join(&disk.source, &named.1.rules)?;
        let choice = choose(&self.args, std::slice::from_ref(&disk), &[]).pop();
        let choice = choice.expect("one choice for each disk");
        if !lock.claim()? {
            return Err(unless_given_up(CommandError::Unknown(export.clone())));
        }
        let threads = self.all_threads(&settings)?;
        set_up(&self.args, &threads, (&log_name, &mut disk), choice)?;
        let access = self.shared_disks.access(&disk.source)?;
        // A resize also holds the size before the turn.
        let held = self.shared_disks.hold_size(&access, &disk.source, disk.opened)?;
        let locked = disk_locks.iter().try_for_each(|locks| locks.add(place, &disk.source));
        locked.map_err(anyhow::Error::from)?;
        // Nothing has been written.
        let unlock = || {
            turns.iter().for_each(|turns| turns.end_use(&access));
            disk_locks.iter().for_each(|locks| drop(locks.remove(place)));
        };
        let add = |turn| unit.add_to(&device, &name, (&disk, turn), &access);
        let added = turns.as_ref().map_or_else(|| add(None), |turns| turns.with_turn(add));
        drop(held);
        added.inspect_err(|_| unlock())?;
        let line = format!("{}: {}; logical unit {place}", disk.name, disk.summary);
        if !lock.add_unit(unit, disk.source, asked) {
            if let Some(unit) = device.remove_unit(place.address()) {
                unit.close();
            }
            unlock();
            return Err(unless_given_up(CommandError::Unknown(export.clone())));
        }
        drop(device);
        tracing::info!(export = log_name, "{line}");
        Ok(Reply::Done)
    }

    fn remove_unit(&self, export: String, place: UnitPlace) -> Result<Reply, CommandError> {
        let (changing, lock) =
            self.control.begin_unit(export.clone(), place, UnitChange::Remove)?;
        let ChangingUnit { log_name, device, removed, turns, .. } = changing;
        let access = device.access(place.address());
        let unit = device.remove_unit(place.address());
        // The caller waits, without a time limit, for the end of the unit's requests and for the
        // file system. Afterwards the disk can be opened again.
        drop((device, removed));
        if let Some(unit) = unit {
            lock.close_unit(|| unit.close());
        }
        if let (Some(turns), Some(access)) = (&turns, access) {
            turns.end_use(&access);
        }
        let unlocked = turns.iter().try_for_each(|turns| turns.locks().remove(place));
        lock.report_removed();
        tracing::info!(export = log_name, "logical unit {place} is removed");
        unlocked.with_context(|| {
            format!(
                "logical unit {place} of {export} is removed, but its disk is in use until \
                     the export ends"
            )
        })?;
        Ok(Reply::Done)
    }

    fn set_disk(
        &self,
        export: String,
        place: Option<UnitPlace>,
        change: Box<QosChange>,
    ) -> Result<Reply, CommandError> {
        let is_asked = change.is_empty();
        let (rules, log_name) = self.control.set_disk(export, place, change)?;
        let what = place.map_or("the disk".to_owned(), |place| format!("logical unit {place}"));
        let text =
            serde_json::to_string(&rules).context("cannot encode the rules of the disk as JSON")?;
        if !is_asked {
            tracing::info!(export = log_name, "{what} has new rules: {text}");
        }
        Ok(Reply::Rules(Box::new(rules)))
    }

    /// Binds the socket of an export, or uses the one that a service manager passes. `None`: the
    /// inherited socket, which is taken only after every step that can fail.
    fn endpoint(&self, spec: &ExportSpec) -> Result<Option<Endpoint>> {
        match &spec.endpoint {
            EndpointSpec::Path(path) => match self.inherited.listener(&spec.name(), path)? {
                Some(passed) => Ok(Some(passed)),
                None => Endpoint::bind(path, "--socket-path").map(Some),
            },
            EndpointSpec::Fd(fd) if self.inherited.has(*fd) => Ok(None),
            EndpointSpec::Fd(fd) => {
                bail!("descriptor {fd} was not inherited, or an export has taken it")
            }
        }
    }

    /// Returns the IoThreads of an export, beginning with that of its first queue.
    fn threads_for(&self, spec: &ExportSpec) -> Result<Vec<Thread>, CommandError> {
        let mut threads = self.all_threads(&spec.settings)?;
        let mut pool = self.pool.lock();
        // Rotated, because the first queues of all exports would otherwise share the first thread.
        let first = pool.exports % threads.len();
        pool.exports += 1;
        threads.rotate_left(first);
        Ok(threads)
    }

    /// Returns the IoThreads of an export, in no particular order.
    fn all_threads(&self, settings: &ExportSettings) -> Result<Vec<Thread>, CommandError> {
        let mut threads = self.pool.lock().threads.as_mut().ok_or(CommandError::Ending)?.all()?;
        match settings.iothread {
            Some(only) => Ok(vec![threads.swap_remove(only.into())]),
            None => Ok(threads),
        }
    }
}

impl Shutdown {
    /// Waits until all exports of `daemon` have ended or were abandoned. The summaries of its
    /// IoThreads are logged afterwards.
    ///
    /// # Errors
    ///
    /// The reason that the exports of the start cannot be served.
    pub fn wait(self, daemon: &Daemon) -> Result<Outcome> {
        let outcome = wait_for_shutdown(&self.0, &daemon.control)?;
        if outcome == Outcome::Clean {
            daemon.control.join();
        }
        // The opener of a hanging disk keeps the daemon alive, so the socket is closed here.
        drop(daemon.inherited.take());
        let threads = daemon.pool.lock().threads.take();
        threads.iter().for_each(Threads::log_summaries);
        if outcome != Outcome::Clean {
            // Ending IoThreads would wait for their ops; ending the process does not.
            std::mem::forget(threads);
        }
        Ok(outcome)
    }
}
