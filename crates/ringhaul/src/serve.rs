//! `ringhaul serve`: runs a daemon from its options to its end.

mod confinement;
mod service_status;
mod start;

use std::process::ExitCode;
use std::sync::{Arc, Weak};

use anyhow::{Context, Result, bail};
use blockio::executor::start_thread;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::control_socket::ControlSocket;
use crate::control_socket::access::Access;
use crate::daemon::adding::OpeningThread;
use crate::daemon::arguments::ParsedOptions;
use crate::daemon::disk_monitor;
use crate::daemon::format::ProcessOptions;
use crate::daemon::reload::Reload;
use crate::daemon::saved_state::SavedState;
use crate::daemon::{Daemon, Shutdown};
use crate::log;
use crate::monitoring::server as metrics_server;
use crate::options::ServeArgs;
use crate::options::config::{Config, ConfigFile};
use crate::process::service_manager;
use crate::process::thread_guard::ThreadGuard;
use crate::sandbox;
use crate::socket::Endpoint;
use crate::socket::inherited::InheritedSockets;
use crate::spec::command::{Command, CommandError, EndCause};
use crate::spec::settings::Settings;
use crate::spec::values::MetricsAddress;
use crate::spec::{EndpointSpec, ExportSpec};
use crate::takeover::new_process::{self, Predecessor};
use crate::threads::ownership::PassedOn;
use crate::threads::shutdown::Outcome;
pub use confinement::enter_sandbox;
use start::{PreviousState, Start};

/// A second signal has ended the daemon before its requests were finished.
const EXIT_ABANDONED: u8 = 3;

/// An IoThread has ended with an error.
const EXIT_THREAD_FAILED: u8 = 4;

/// Serves disks until a signal comes or the last export has ended. (The export of an inherited
/// connection ends when its front-end disconnects.) `config` is the file that the options name,
/// with its content, which is already merged into `args`.
///
/// # Errors
///
/// When the daemon cannot start: the caller exits with status 2.
pub fn run(args: &ServeArgs, config: Option<(ConfigFile, Config)>) -> Result<ExitCode> {
    // Before another process hands over more descriptors than the present limit allows.
    crate::process::limits::raise_file_limit();
    match &args.takeover {
        None => {
            begin(args, config).inspect_err(|error| service_manager::status(&format!("{error:#}")))
        }
        Some(socket) => {
            let predecessor = Predecessor::ask(socket)?;
            let refusal_sender = predecessor.refusal_sender()?;
            take_over(predecessor).inspect_err(|error| refusal_sender.send(error))
        }
    }
}

/// Serves the exports of the options and files.
fn begin(args: &ServeArgs, config: Option<(ConfigFile, Config)>) -> Result<ExitCode> {
    // Before this process opens a descriptor that could get the same number.
    let inherited = InheritedSockets::take_over(args.fd)?;
    // Early, so that no signal is lost.
    let signals = take_signals(config.is_some())?;
    set_up_process(args)?;
    let access = Access::new(args)?;
    let sockets = args.exports()?.into_iter().map(|export| export.endpoint);
    if let Some(path) = &args.control
        && sockets.into_iter().any(|endpoint| endpoint == EndpointSpec::Path(path.clone()))
    {
        bail!("--control and --socket-path name one socket, {}; choose another", path.display());
    }
    // Before the state is read: a daemon that listens there usually owns the state, too.
    let control = match (inherited.control(args.control.as_deref())?, &args.control) {
        (None, Some(path)) => Some(ControlSocket::bind(path, access.groups)?),
        (passed, _) => passed,
    };
    let mut start = Start::read(args, config)?;
    start.args.check()?;
    enter_sandbox(&start.args, start.config.as_ref(), &start.all_exports())?;
    let metrics = start.args.metrics.clone();
    let (daemon, ending) = Daemon::start(start.args.clone(), inherited)?;
    let _watch = daemon.watch()?;
    let (daemon, config, options) = (Arc::new(daemon), start.config.take(), start.options.clone());
    let (base, state) = start.into_base();
    let exports = Start::begin(base, state, &daemon)?;
    if let Some(path) = control.as_ref().and_then(Endpoint::path) {
        tracing::info!("control socket {}", path.display());
    }
    let reload = config.map(|(file, config)| {
        Reload::start(file, &config, &config.exports, Arc::downgrade(&daemon))
    });
    let _signals = handle_signals(signals, Arc::downgrade(&daemon), reload.transpose()?)?;
    let control = match control {
        Some(endpoint) => listen(Some(endpoint), access, &daemon, options)?,
        None => None,
    };
    let _sizes = disk_monitor::start(&daemon)?;
    let _metrics = start_metrics(metrics.as_ref(), &daemon)?;
    let _reports = service_status::start(&daemon)?;
    let opening = daemon.begin_restore(exports)?;
    end(ending, &daemon, Some(opening), control)
}

/// Takes over the exports of another process. A signal before the takeover ends this process only.
fn take_over(mut predecessor: Predecessor) -> Result<ExitCode> {
    let own = ProcessOptions::current()?;
    let before = predecessor.options.clone();
    let options = before.clone().overridden_by(&own);
    let ParsedOptions { args, log, log_format, config } = options.parse()?;
    own.check_sandbox(args.confinement.sandbox)?;
    log::adopt(log.as_deref(), log_format)?;
    std::env::set_current_dir(&options.directory)
        .with_context(|| format!("cannot work in {}", options.directory.display()))?;
    set_up_process(&args)?;
    let access = Access::new(&args)?;
    let mut control = predecessor.control.take();
    let previous_state = PreviousState::read(before, options, &args)?;
    enter_sandbox(&args, config.as_ref(), &predecessor.exports())?;
    let base_settings = Settings::from_limits(args.poll_limits());
    let metrics = args.metrics.clone();
    let (daemon, ending) = Daemon::start(args, InheritedSockets::default())?;
    let _watch = daemon.watch()?;
    let has_config = config.is_some();
    new_process::set(&daemon, &previous_state.options.changes)?;
    let (mut taken, signals) = predecessor.take(&daemon, || take_signals(has_config))?;
    let served = taken.of_file.take();
    let opening = std::mem::take(&mut taken.opening);
    let passed_on = taken.resume(&daemon);
    let daemon = Arc::new(daemon);
    let begin = (!opening.is_empty()).then(|| daemon.begin_add(opening));
    let opening = begin.and_then(|begun| ok_or_log(begun, "exports that were being opened"));
    let kept = previous_state.resume(served.as_deref(), base_settings, &daemon);
    ok_or_log(kept, "the saved state");
    let options = previous_state.options;
    let reload = config.map(|(file, config)| reload_served(file, &config, served, &daemon));
    let reload = reload.and_then(|reload| ok_or_log(reload, "the configuration file"));
    let carry_out = carry_out_passed_on(&daemon, reload.clone());
    let _heir = ok_or_log(passed_on.listen(carry_out), "requests to the old process");
    let _signals = ok_or_log(handle_signals(signals, Arc::downgrade(&daemon), reload), "signals");
    control.iter_mut().for_each(Endpoint::keep);
    let control =
        ok_or_log(listen(control, access, &daemon, options), "the control socket").flatten();
    let _sizes = ok_or_log(disk_monitor::start(&daemon), "the watch of disk sizes");
    service_manager::ready();
    let _reports = ok_or_log(service_status::start(&daemon), "reports to the service manager");
    // The old process may have the address for some seconds.
    let _metrics = ok_or_log(start_metrics(metrics.as_ref(), &daemon), "metrics");
    end(ending, &daemon, opening, control)
}

/// Sets up per-process state.
fn set_up_process(args: &ServeArgs) -> Result<()> {
    // Before any front-end shares memory, because it may truncate that memory later.
    virtqueue::install_sigbus_handler().context("cannot take over SIGBUS")?;
    args.check()
}

/// Returns the result, or logs its error: a partial failure must not stop guests that were taken
/// over.
fn ok_or_log<T>(result: Result<T>, what: &str) -> Option<T> {
    result
        .inspect_err(|error| tracing::error!("the takeover continues without {what}: {error:#}"))
        .ok()
}

/// Carries out requests that the predecessor received after its hand-over.
fn carry_out_passed_on(
    daemon: &Arc<Daemon>,
    reload: Option<Reload>,
) -> impl Fn(PassedOn) + Send + use<> + 'static {
    let daemon = Arc::downgrade(daemon);
    move |what| {
        let Some(daemon) = daemon.upgrade() else { return };
        match (what, &reload) {
            (PassedOn::End, _) => drop(daemon.handle(Command::End(EndCause::Predecessor))),
            (PassedOn::Reload, Some(reload)) => reload.begin(daemon.ownership()),
            (PassedOn::Reload, None) => tracing::warn!(
                "cannot reload the configuration: the daemon has no configuration file"
            ),
        }
    }
}

/// Starts reloads for a daemon that has taken over. `served` are the exports of the file that the
/// predecessor served; without a report, they are the file's exports that the daemon has.
/// Differences are applied at the next SIGHUP.
fn reload_served(
    file: ConfigFile,
    config: &Config,
    served: Option<Vec<ExportSpec>>,
    daemon: &Arc<Daemon>,
) -> Result<Reload> {
    if let Some(served) = served {
        return Reload::start(file, config, &served, Arc::downgrade(daemon));
    }
    let shown = daemon.exports().map_err(CommandError::into_error)?;
    let is_served =
        |export: &&ExportSpec| shown.iter().any(|status| status.spec.endpoint == export.endpoint);
    let served: Vec<ExportSpec> = config.exports.iter().filter(is_served).cloned().collect();
    Reload::start(file, config, &served, Arc::downgrade(daemon))
}

/// Listens on the control socket, if there is one.
fn listen(
    control: Option<Endpoint>,
    access: Access,
    daemon: &Arc<Daemon>,
    options: ProcessOptions,
) -> Result<Option<ControlSocket>> {
    let control = control.map(Arc::new);
    daemon.set_process_options(options, control.as_ref().map(Arc::downgrade));
    let start = |socket| ControlSocket::start(socket, access, Arc::downgrade(daemon));
    control.map(start).transpose()
}

/// Serves metrics, if an address is given.
fn start_metrics(
    address: Option<&MetricsAddress>,
    daemon: &Arc<Daemon>,
) -> Result<Option<ThreadGuard>> {
    address.map(|address| metrics_server::start(address, Arc::downgrade(daemon))).transpose()
}

/// Waits for the end of the daemon, and returns the status with which the process exits.
fn end(
    ending: Shutdown,
    daemon: &Daemon,
    opening: Option<OpeningThread>,
    control: Option<ControlSocket>,
) -> Result<ExitCode> {
    sandbox::enter_thread("ringhaul");
    let outcome = ending.wait(daemon)?;
    opening.into_iter().for_each(OpeningThread::settle);
    if outcome == Outcome::Clean {
        daemon.saved_state().into_iter().for_each(SavedState::end);
        daemon.forget_killed();
    }
    service_manager::finish();
    let lost = virtqueue::lost_regions();
    if lost > 0 {
        tracing::warn!("front-ends truncated the files of {lost} memory regions in use");
    }
    Ok(match outcome {
        Outcome::Clean => ExitCode::SUCCESS,
        Outcome::HandedOver => {
            control.into_iter().for_each(ControlSocket::hand_over);
            ExitCode::SUCCESS
        }
        Outcome::Abandoned => ExitCode::from(EXIT_ABANDONED),
        Outcome::ThreadFailed => ExitCode::from(EXIT_THREAD_FAILED),
    })
}

/// Starts the thread that ends the daemon, or reloads its configuration, on a signal.
fn handle_signals(
    mut signals: Signals,
    daemon: Weak<Daemon>,
    reload: Option<Reload>,
) -> Result<ThreadGuard> {
    let handle = signals.handle();
    let pass_on = move || {
        for signal in &mut signals {
            let Some(daemon) = daemon.upgrade() else { return };
            let cause = match (signal, &reload) {
                (SIGHUP, Some(reload)) => {
                    reload.begin(daemon.ownership());
                    continue;
                }
                (SIGHUP, None) => EndCause::Sighup,
                (SIGINT, _) => EndCause::Sigint,
                _ => EndCause::Sigterm,
            };
            let _ = daemon.handle(Command::End(cause));
        }
    };
    let thread = start_thread("ringhaul-signal", pass_on);
    let thread = thread.context("cannot start the thread for signals")?;
    Ok(ThreadGuard::new(thread, move || handle.close()))
}

fn take_signals(has_config: bool) -> Result<Signals> {
    Signals::new(signals_to_take(has_config)).context("cannot take over signals")
}

/// The signals to handle. If SIGHUP was ignored from the start, as by `nohup`, the end of the
/// terminal must not end the daemon. With a configuration file SIGHUP always reloads it.
fn signals_to_take(has_config: bool) -> Vec<i32> {
    let mut signals = vec![SIGTERM, SIGINT];
    if has_config || !is_ignored(SIGHUP) {
        signals.push(SIGHUP);
    }
    signals
}

fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
}
