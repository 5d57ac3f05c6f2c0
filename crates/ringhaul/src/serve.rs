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
    // Before this process has opened anything that could be taken for it.
    let inherited = args.fd.map(|fd| Endpoint::inherit(fd).map(|socket| (fd, socket)));
    let inherited = inherited.transpose()?;
    // Early, so that no signal is lost.
    let signals = Signals::new(signals_to_take()).context("cannot take over signals")?;
    // Before any front-end shares memory, which it may take away again.
    crate::heap::limit_arenas();
    virtqueue::install_sigbus_handler().context("cannot take over SIGBUS")?;
    crate::descriptor_limit::raise();
    args.engine.check_io_uring_options(&args.io_uring_options()).map_err(anyhow::Error::msg)?;
    let exports = args.exports()?;
    let (daemon, ending) = Daemon::start(args.clone(), inherited)?;
    let _watch = daemon.watch()?;
    let daemon = Arc::new(daemon);
    let _signals = SignalThread::start(signals, Arc::downgrade(&daemon))?;
    let control = args.control.as_deref();
    let _control =
        control.map(|path| ControlSocket::start(path, Arc::downgrade(&daemon))).transpose()?;
    let _sizes = SizeWatch::start(Arc::downgrade(&daemon))?;
    let opening = daemon.begin_add(exports)?;
    let outcome = ending.wait(&daemon)?;
    opening.settle();
    let lost = virtqueue::lost_regions();
    if lost > 0 {
        tracing::warn!("front-ends truncated the files of {lost} memory regions in use");
    }
    Ok(match outcome {
        Outcome::Clean => ExitCode::SUCCESS,
        Outcome::Abandoned => ExitCode::from(EXIT_ABANDONED),
        Outcome::ThreadFailed => ExitCode::from(EXIT_THREAD_FAILED),
    })
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
