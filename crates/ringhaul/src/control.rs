//! The control thread: one for all exports. It takes front-ends in and drives their sessions.
//!
//! It sleeps in `poll` and never waits for anything else, so that a slow disk behind one export
//! delays the front-ends of no other.

mod export;

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::Remote;
use device::Device;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;

use crate::descriptor_limit;
use crate::export::Endpoint;
use crate::export_log::ExportLog;
use crate::log_limit::LogLimit;
use crate::memory_limits::MemoryLimits;
use export::{ACCEPT_PAUSE, Export};

/// How often the log says what keeps exports from ending.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// One device and where its front-ends come from.
pub struct ExportSetup {
    /// Its place in the log.
    pub log: Arc<ExportLog>,
    /// The device.
    pub device: Device,
    /// Where front-ends come from.
    pub endpoint: Endpoint,
    /// Queue `i` is served by IoThread `i` modulo their number, which is not 0.
    pub threads: Vec<Remote>,
    /// What front-ends may have mapped.
    pub limits: MemoryLimits,
}

/// All exports and the thread that controls them.
pub struct Control {
    orders: Arc<Orders>,
    thread: Option<JoinHandle<()>>,
}

/// The commands of the control thread.
struct Orders {
    wake: OwnedFd,
    stop: AtomicBool,
    abandon: AtomicBool,
}

impl Orders {
    fn wake_thread(&self) {
        // By `writev`, to distinguish it from a call to a driver in a trace of system calls. A full
        // counter means that the thread is awake already.
        let _ = rustix::io::writev(&self.wake, &[IoSlice::new(&1_u64.to_ne_bytes())]);
    }
}

impl Wake for Orders {
    fn wake(self: Arc<Self>) {
        self.wake_thread();
    }
}

impl Control {
    /// Starts serving. `ended` is called when the last export has ended.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread or descriptor left.
    pub fn start(exports: Vec<ExportSetup>, ended: impl FnOnce() + Send + 'static) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .context("cannot create an eventfd")?;
        let (stop, abandon) = (AtomicBool::new(false), AtomicBool::new(false));
        let orders = Arc::new(Orders { wake, stop, abandon });
        let waker = Waker::from(Arc::clone(&orders));
        let share = descriptor_limit::share(exports.len());
        let exports = exports.into_iter().map(|setup| Export::new(setup, &waker, share)).collect();
        let mut exports = Exports {
            list: exports,
            orders: Arc::clone(&orders),
            stopping: None,
            reported: None,
            poll_errors: LogLimit::default(),
        };
        let ended = OnDrop(Some(ended));
        let thread = std::thread::Builder::new()
            .name("ringhaul-control".into())
            .spawn(move || {
                // However the thread ends.
                let _ended = ended;
                exports.run();
                drop(exports);
            })
            .context("cannot start the control thread")?;
        Ok(Self { orders, thread: Some(thread) })
    }

    /// Begins to disconnect all front-ends, each of which sees the end when its requests are
    /// answered, and accepts no more.
    pub fn begin_stop(&self) {
        self.orders.stop.store(true, Ordering::SeqCst);
        self.orders.wake_thread();
    }

    /// Gives up what has not ended: logs what that is, removes the sockets and lets the thread end
    /// while queues run. The process must end then.
    pub fn abandon(&self) {
        self.orders.abandon.store(true, Ordering::SeqCst);
        self.orders.wake_thread();
    }

    /// Waits until the last export has ended.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Calls what it holds when it is dropped.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

/// The exports, on the control thread.
struct Exports {
    list: Vec<Export>,
    orders: Arc<Orders>,
    /// Since when all of them have been stopping.
    stopping: Option<Instant>,
    reported: Option<Instant>,
    poll_errors: LogLimit,
}

/// What a descriptor in a call of `poll` belongs to.
#[derive(Clone, Copy)]
enum Polled {
    Orders,
    Listener(usize),
    Session(usize),
}

impl Exports {
    fn run(&mut self) {
        loop {
            let now = Instant::now();
            if self.orders.abandon.load(Ordering::SeqCst) {
                self.leave();
                return;
            }
            if self.orders.stop.load(Ordering::SeqCst) && self.stopping.is_none() {
                (self.stopping, self.reported) = (Some(now), Some(now));
                self.list.iter_mut().for_each(Export::begin_stop);
            }
            self.list.iter_mut().filter(|export| export.is_due(now)).for_each(|e| e.run(now));
            if self.list.iter().all(Export::has_ended) {
                return;
            }
            self.report(now);
            self.wait(now);
        }
    }

    /// Sleeps until something happens, and notes for whom.
    fn wait(&mut self, now: Instant) {
        let deadlines = self.list.iter().filter_map(Export::deadline);
        let report = self.reported.map(|reported| reported + REPORT_INTERVAL);
        let at_once = self.list.iter().any(|export| export.session_is_ready).then_some(now);
        let timeout = deadlines.chain(report).chain(at_once).min().map(|deadline| {
            let left = deadline.saturating_duration_since(now);
            Timespec::try_from(left).unwrap_or_default()
        });
        let mut whose = vec![Polled::Orders];
        let mut fds = vec![PollFd::new(&self.orders.wake, PollFlags::IN)];
        for (index, export) in self.list.iter().enumerate() {
            export.add_polls(index, now, &mut fds, &mut whose);
        }
        let polled = poll(&mut fds, timeout.as_ref());
        let ready: Vec<(Polled, bool)> =
            whose.into_iter().zip(fds.iter().map(|fd| !fd.revents().is_empty())).collect();
        match polled {
            Ok(_) => {}
            Err(Errno::INTR) => return,
            Err(error) => {
                if let Some(left_out) = self.poll_errors.permit() {
                    tracing::error!(left_out, "cannot wait for front-ends: {error}");
                }
                std::thread::sleep(ACCEPT_PAUSE);
                return;
            }
        }
        for (whose, _) in ready.into_iter().filter(|(_, is_ready)| *is_ready) {
            match whose {
                Polled::Orders => {
                    let _ = rustix::io::read(&self.orders.wake, &mut [0; 8]);
                    self.list.iter_mut().for_each(Export::woken);
                }
                Polled::Listener(index) => self.list[index].listener_is_ready = true,
                Polled::Session(index) => self.list[index].session_is_ready = true,
            }
        }
    }

    /// Logs every few seconds what keeps exports from ending.
    fn report(&mut self, now: Instant) {
        let (Some(since), Some(reported)) = (self.stopping, self.reported) else { return };
        if now < reported + REPORT_INTERVAL {
            return;
        }
        self.reported = Some(now);
        let seconds = (now - since).as_secs();
        for export in self.list.iter().filter(|export| !export.has_ended()) {
            tracing::warn!(
                export = export.name(),
                "still stopping after {seconds} s: {}; a second signal ends the daemon at once",
                export.what_is_left()
            );
        }
    }

    /// Gives up what has not ended, and logs what that is.
    fn leave(&mut self) {
        self.tell_what_is_left();
        self.list.iter_mut().for_each(Export::leave);
    }

    fn tell_what_is_left(&self) {
        let left: Vec<String> = self
            .list
            .iter()
            .filter(|export| !export.has_ended())
            .map(|export| format!("{}: {}", export.name(), export.what_is_left()))
            .collect();
        tracing::error!("ended without waiting any longer; unfinished: {}", left.join(", "));
    }
}
