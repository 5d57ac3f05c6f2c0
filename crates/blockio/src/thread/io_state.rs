//! The parts of an IoThread, for the files that turn it and for the handle of tasks.
//!
//! Code that borrows more than one of the parts borrows `ops` before `reactor`, and `reactor`
//! before `executor`. No borrow lasts while code of a task or a waker runs.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use iomem::Buffers;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

use crate::clock::{self, LoopClock};
use crate::config::{EngineKind, IoThreadConfig};
use crate::engine::Engine;
use crate::error::Error;
use crate::executor::mailbox::{Mailbox, TaskKey};
use crate::executor::task::{Executor, LoopRegistration, Running};
use crate::op::Slots;
use crate::op::bounce::BounceBudget;
use crate::stats::Stats;
use crate::thread::fairness::Checks;
use crate::thread::poll_window::PollWindow;
use crate::thread::reactor::Reactor;
use crate::watchdog::stalled_ops::StalledOps;

/// The state that tasks and disks of one IoThread share.
pub struct Io {
    pub(crate) tasks: Tasks,
    pub(crate) ops: RefCell<Ops>,
    pub(crate) reactor: RefCell<Reactor>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) shared: SharedResources,
    pub(crate) settings: Settings,
    pub(crate) state: LoopState,
    pub(crate) checks: Checks,
    pub(crate) poll_window: PollWindow,
    pub(crate) stalled: StalledOps,
}

/// The tasks of an IoThread, and the ways to wake them.
pub(crate) struct Tasks {
    pub(crate) executor: RefCell<Executor>,
    pub(crate) running: Rc<Running>,
    _registration: LoopRegistration,
    pub(crate) mailbox: Arc<Mailbox>,
}

/// Resources that disks and queues of an IoThread share.
pub(crate) struct SharedResources {
    pub(crate) bounce_budget: BounceBudget,
    /// Objects by their keys: see [`Io::share`].
    pub(crate) objects: RefCell<Vec<(usize, Weak<dyn Any>)>>,
}

/// The parts of the configuration that the loop and the disks read.
pub(crate) struct Settings {
    /// The engine of disks without a preference.
    pub(crate) engine_kind: EngineKind,
    pub(crate) submit_max: usize,
    /// The most bytes of an op.
    pub(crate) op_bytes_max: usize,
    pub(crate) harvest_on_submit: bool,
    pub(crate) watches_itself: bool,
}

/// The state of the loop.
pub(crate) struct LoopState {
    /// Without `harvest_on_submit`: the kernel has announced completions.
    pub(crate) harvest_is_due: Cell<bool>,
    pub(crate) in_turn: Cell<bool>,
    pub(crate) stopped: Cell<bool>,
    /// True if a bound on bytes has kept queued ops back for the next round.
    pub(crate) has_kept_ops: Cell<bool>,
    pub(crate) clock: Rc<LoopClock>,
    /// Tasks of sources that have work. Empty between waits; kept so that waits allocate nothing.
    pub(crate) found: RefCell<Vec<TaskKey>>,
}

/// The ops of an IoThread, and their way to the kernel.
pub(crate) struct Ops {
    /// Declared before the slots: the kernel uses their memory until the engine is gone.
    pub(crate) engine: Engine,
    pub(crate) slots: Slots,
    pub(crate) woken: Vec<TaskKey>,
    /// Tokens of eventfds that were written; empty except on the way to the reactor.
    pub(crate) events: Vec<u64>,
    pub(crate) mailbox: Arc<Mailbox>,
}

impl Ops {
    /// True if the wait submits as much as a submit would, and every op that has room now.
    #[inline]
    pub(crate) fn may_submit_in_wait(&self) -> bool {
        self.engine.may_submit_in_wait() && !self.slots.lanes.keeps_for_next_round()
    }

    /// Asserts that the loop does not sleep on ops that nothing will submit. With `only_checks` the
    /// loop submits right after this, kept ops included.
    pub(crate) fn assert_may_sleep(&self, only_checks: bool) {
        if only_checks {
            return;
        }
        let Self { engine, slots, .. } = self;
        assert!(
            !slots.lanes.has_backlog() || engine.queued() + engine.in_kernel() > 0,
            "invariant 5: the loop sleeps with ops in lanes that nothing will take out"
        );
        assert!(
            engine.may_sleep(),
            "invariant 5: {} ops are queued, some for an engine that has none in the kernel",
            engine.queued()
        );
    }

    /// Takes in results that came after the end of the IoThread. Returns the memory of abandoned
    /// ops, to be dropped when nothing is borrowed.
    #[cold]
    #[must_use]
    pub(crate) fn take_late_results(&mut self) -> Vec<Buffers> {
        let mut results = Vec::new();
        self.mailbox.take_results(&mut results);
        for (slot, result) in results {
            // There is no task to wake, and no reader of the counters.
            let _ = self.slots.complete(slot, result, clock::now(), &Stats::default());
        }
        std::mem::take(&mut self.slots.unwanted)
    }
}

impl Drop for Ops {
    fn drop(&mut self) {
        // An IoThread waits for its ops before it ends, unless the wait fails. Then the memory that
        // the kernel may still write to must stay as long as the program runs. So must the memory
        // of foreign ops that are not complete.
        if self.slots.foreign() > 0 {
            drop(self.take_late_results());
        }
        let pending = self.engine.in_kernel() + self.slots.foreign();
        if pending > 0 {
            tracing::error!(
                "an IoThread ended before {pending} operations completed; their memory stays \
                 allocated"
            );
            let none = Slots::new(1);
            std::mem::forget(std::mem::replace(&mut self.slots, none));
        }
    }
}

impl Io {
    /// Sets up all parts. Also returns the descriptor that is readable when a turn has something to
    /// do.
    pub(crate) fn new(config: &IoThreadConfig) -> Result<(Self, OwnedFd), Error> {
        // Never read: it is watched edge-triggered, so each write is a new event. Taking the event
        // clears it, before the loop checks the mailbox.
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::system("create an eventfd for wakes"))?;
        let mailbox = Arc::new(Mailbox::new(wake));
        let engine = Engine::new(config, &mailbox)?;
        let descriptor = rustix::io::fcntl_dupfd_cloexec(engine.descriptor(), 0)
            .map_err(Error::system("duplicate a descriptor"))?;
        let mut slots = Slots::new(config.depth);
        slots.lanes.set_pacing(config.pacing);
        slots.lanes.set_bytes(config.bytes);
        let (woken, events) = (Vec::new(), Vec::new());
        let now = clock::now();
        let stats = Arc::<Stats>::default();
        let running = Rc::<Running>::default();
        let io = Self {
            tasks: Tasks {
                executor: RefCell::new(Executor::new(&running)),
                _registration: LoopRegistration::new(&mailbox, &running),
                running,
                mailbox: Arc::clone(&mailbox),
            },
            ops: RefCell::new(Ops { slots, engine, woken, events, mailbox }),
            reactor: RefCell::default(),
            shared: SharedResources {
                bounce_budget: BounceBudget::new(config.bounce, &stats),
                objects: RefCell::default(),
            },
            stats,
            settings: Settings {
                engine_kind: config.engine.kind(),
                submit_max: config.submit_max.max(1) as usize,
                op_bytes_max: config.bytes.op,
                harvest_on_submit: config.harvest_on_submit,
                watches_itself: config.watches_itself,
            },
            state: LoopState {
                harvest_is_due: Cell::new(false),
                in_turn: Cell::new(false),
                stopped: Cell::new(false),
                has_kept_ops: Cell::new(false),
                clock: Rc::new(LoopClock::new(now)),
                found: RefCell::default(),
            },
            checks: Checks::new(config.bytes.round),
            poll_window: PollWindow::new(config.poll_max, config.poll_budget_percent, now),
            stalled: StalledOps::new(now),
        };
        Ok((io, descriptor))
    }
}
