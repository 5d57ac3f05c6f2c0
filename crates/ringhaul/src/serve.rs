//! `ringhaul serve`: a daemon from its options to its end.

use std::process::ExitCode;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::command::{Command, EndCause};
use crate::control_socket::ControlSocket;
use crate::daemon::Daemon;
use crate::ending::Outcome;
use crate::export::Endpoint;
use crate::options::ServeArgs;
use crate::size_watch::SizeWatch;
use crate::takeover::format::Life;
use crate::takeover::take::Predecessor;

/// A second signal has ended the daemon before its requests were finished.
const EXIT_ABANDONED: u8 = 3;

/// An IoThread has ended by an error.
const EXIT_THREAD_FAILED: u8 = 4;

/// Serves disks until a signal comes or the last export has ended, as that of an inherited
/// connection does when the front-end goes.
///
/// # Errors
///
/// When the daemon cannot start: the caller exits with status 2.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    match &args.takeover {
        None => begin(args),
        Some(socket) => go_on(Predecessor::ask(socket)?),
    }
}

/// Serves what the options say.
fn begin(args: &ServeArgs) -> Result<ExitCode> {
    // Before this process has opened anything that could be taken for it.
    let inherited = args.fd.map(|fd| Endpoint::inherit(fd).map(|socket| (fd, socket)));
    let inherited = inherited.transpose()?;
    // Early, so that no signal is lost.
    let signals = Signals::new(signals_to_take()).context("cannot take over signals")?;
    set_up_process(args)?;
    let exports = args.exports()?;
    let (daemon, ending) = Daemon::start(args.clone(), inherited)?;
    let _watch = daemon.watch()?;
    let daemon = Arc::new(daemon);
    let _signals = SignalThread::start(signals, Arc::downgrade(&daemon))?;
    let control = args.control.as_deref().map(ControlSocket::bind).transpose()?;
    let control = listen(control, &daemon, Life::own()?)?;
    let _sizes = SizeWatch::start(Arc::downgrade(&daemon))?;
    let opening = daemon.begin_add(exports)?;
    let outcome = ending.wait(&daemon)?;
    opening.settle();
    Ok(end(outcome, control))
}

/// Serves what another process has served so far. A signal that comes before ends this process
/// alone.
fn go_on(mut predecessor: Predecessor) -> Result<ExitCode> {
    let own = Life::own()?;
    let life = predecessor.life.clone().continued_by(&own);
    let args = life.options()?;
    std::env::set_current_dir(&life.directory)
        .with_context(|| format!("cannot work in {}", life.directory.display()))?;
    set_up_process(&args)?;
    let mut control = predecessor.control.take();
    let (daemon, ending) = Daemon::start(args, None)?;
    let _watch = daemon.watch()?;
    let signals = || Signals::new(signals_to_take()).context("cannot take over signals");
    let (taken, signals) = predecessor.take(&daemon, signals)?;
    taken.go_on(&daemon);
    let daemon = Arc::new(daemon);
    let _signals = SignalThread::start(signals, Arc::downgrade(&daemon))?;
    control.iter_mut().for_each(Endpoint::keep);
    let control = listen(control, &daemon, life)?;
    let _sizes = SizeWatch::start(Arc::downgrade(&daemon))?;
    let outcome = ending.wait(&daemon)?;
    Ok(end(outcome, control))
}

/// Sets up what a process has once.
fn set_up_process(args: &ServeArgs) -> Result<()> {
    // Before any front-end shares memory, which it may take away again.
    crate::heap::limit_arenas();
    virtqueue::install_sigbus_handler().context("cannot take over SIGBUS")?;
    crate::descriptor_limit::raise();
    args.engine.check_io_uring_options(&args.io_uring_options()).map_err(anyhow::Error::msg)
}

/// Listens on the control socket, if there is one.
fn listen(
    control: Option<Endpoint>,
    daemon: &Arc<Daemon>,
    life: Life,
) -> Result<Option<ControlSocket>> {
    let control = control.map(Arc::new);
    daemon.set_life(life, control.as_ref().map(Arc::downgrade));
    control.map(|socket| ControlSocket::start(socket, Arc::downgrade(daemon))).transpose()
}

fn end(outcome: Outcome, control: Option<ControlSocket>) -> ExitCode {
    let lost = virtqueue::lost_regions();
    if lost > 0 {
        tracing::warn!("front-ends truncated the files of {lost} memory regions in use");
    }
    match outcome {
        Outcome::Clean => ExitCode::SUCCESS,
        Outcome::HandedOver => {
            // The socket is the other process's now, and to drop this would remove it.
            std::mem::forget(control);
            ExitCode::SUCCESS
        }
        Outcome::Abandoned => ExitCode::from(EXIT_ABANDONED),
        Outcome::ThreadFailed => ExitCode::from(EXIT_THREAD_FAILED),
    }
}

/// The thread that has the daemon end at a signal. It ends when this is dropped.
struct SignalThread {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalThread {
    fn start(mut signals: Signals, daemon: Weak<Daemon>) -> Result<Self> {
        let handle = signals.handle();
        let pass_on = move || {
            for signal in &mut signals {
                let cause = match signal {
                    SIGHUP => EndCause::Sighup,
                    SIGINT => EndCause::Sigint,
                    _ => EndCause::Sigterm,
                };
                if let Some(daemon) = daemon.upgrade() {
                    let _ = daemon.handle(Command::End(cause));
                }
            }
        };
        let thread = std::thread::Builder::new().name("ringhaul-signal".into()).spawn(pass_on);
        Ok(Self { handle, thread: Some(thread.context("cannot start the thread for signals")?) })
    }
}

impl Drop for SignalThread {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Signals that end the daemon. One that was ignored from the start, as by `nohup`, stays so.
fn signals_to_take() -> Vec<i32> {
    let mut signals = vec![SIGTERM, SIGINT];
    if !is_ignored(SIGHUP) {
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
