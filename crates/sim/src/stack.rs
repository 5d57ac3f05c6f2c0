//! The IoThreads and their work.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use blockio::config::{BounceConfig, CompletionRing, PacingConfig};
use blockio::stats::{OpStats, Stats};
use blockio::{Activity, EngineConfig, IoThread, IoThreadConfig, Wait};
use iomem::fits;

use crate::control::Control;
use crate::export::Export;
use crate::export::waits::ThreadProgress;
use crate::failure::Failure;
use crate::plan::Plan;
use crate::world::{Counts, TurnEnd, World};

/// Pacing for a run of a few hundred ops: a disk gets paced, and forgets the outcome of a trial.
const SHORT_PACING: PacingConfig =
    PacingConfig { convoy_min: 2, convoys: 2, span_ops: 8, period_ops: 32, limit_min: 1 };

/// Bounce memory for small requests, so that they are bounced in pieces.
const SMALL_BOUNCE: BounceConfig =
    BounceConfig { budget_bytes: 0, share_bytes_min: 4 << 10, piece_bytes_max: 4 << 10 };

pub(crate) struct Thread {
    pub(crate) io_thread: IoThread,
    /// Its last turn reported more to do.
    pub(crate) ready: bool,
    /// The work done up to the last turn, and the number of turns without any since.
    done: u64,
    empty_turns: u32,
    /// The end of its last turn, and the time that it had used up to then.
    ended_ns: u64,
    run_ns: u64,
    /// Nanoseconds for which ops have held it up.
    held_ns: u64,
    /// The kernel has refused a submit in its last turn.
    was_refused: bool,
}

/// The most time between two turns of an IoThread that counts as its own. Turns of other threads
/// used up the rest, which on a real machine would not have kept it waiting.
const BETWEEN_TURNS_NS: u64 = 1_000_000;

/// A loop spins if it takes more turns than this in a row that only ask for another turn, while no
/// time passes. A submit that the kernel refuses is tried again a few times at most.
const EMPTY_TURNS_MAX: u32 = 40;

impl Thread {
    /// Takes a turn. Fails if the loop spins.
    fn turn(
        &mut self,
        wait: Wait,
        world: &World,
        control: &RefCell<Control>,
    ) -> Result<(), Failure> {
        let begin = world.now_nanoseconds();
        let refused = self.io_thread.io().stats().submit_again.get();
        let rounds = self.io_thread.io().stats().rounds.get();
        world.begin_turn();
        let activity = self.io_thread.turn(wait);
        let end = world.end_turn();
        let (held, rounds) =
            (world.held_in_turn(), self.io_thread.io().stats().rounds.get() - rounds);
        self.held_ns += held;
        // The wait at the end of a turn submits twice: in the sleep, and behind it.
        if held > world.plan().held_ns_max(rounds + 2) {
            let text = format!("invariant 14: ops held a turn of {rounds} rounds for {held} ns");
            return Err(Failure::new("held", text));
        }
        // The pieces of each round, of a round before and behind them that the turn has in part,
        // and pieces that got their turn before and move now.
        let copied = world.copied_in_turn();
        let bounds: usize = fits(rounds + 3, "a number of rounds");
        if copied > bounds * world.plan().copied_max() {
            let text = format!("invariant 14: a turn of {rounds} rounds has copied {copied} bytes");
            return Err(Failure::new("copies", text));
        }
        self.was_refused = self.io_thread.io().stats().submit_again.get() > refused;
        let now = world.now_nanoseconds();
        self.run_ns += (begin - self.ended_ns).min(BETWEEN_TURNS_NS) + (now - begin);
        self.ended_ns = now;
        let activity = activity.map_err(|error| Failure::new("turn", error.to_string()))?;
        // A loop of its own continues, unless the world has let it sleep.
        let goes_on = wait == Wait::ForEvent && end != TurnEnd::Asleep;
        self.ready = goes_on || activity == Activity::Ready;
        let (io, stats) = (self.io_thread.io(), self.io_thread.io().stats());
        let ops = [&stats.read, &stats.write, &stats.flush, &stats.deallocate];
        let done = ops.iter().map(|kind| kind.ops.get()).sum::<u64>()
            + stats.submitted_at_once.sum()
            + stats.syscalls.eventfd_write.get()
            + control.borrow().exports.iter().map(|export| export.answered()).sum::<u64>()
            + io.tasks() as u64
            + io.ops() as u64;
        let is_empty =
            std::mem::replace(&mut self.done, done) == done && self.ready && now == begin;
        self.empty_turns = if is_empty { self.empty_turns + 1 } else { 0 };
        if self.empty_turns > EMPTY_TURNS_MAX {
            let text = format!("an IoThread did nothing in {EMPTY_TURNS_MAX} turns, but is busy");
            return Err(Failure::new("busy loop", text));
        }
        Ok(())
    }
}

pub(crate) struct Stack {
    plan: Plan,
    world: Rc<World>,
    pub(crate) threads: Vec<Thread>,
    /// Guests and the world act on it too, within turns.
    pub(crate) control: Rc<RefCell<Control>>,
    /// The counters of earlier IoThreads are gone.
    restarted: bool,
    /// The daemon was killed, and the next has not started.
    is_dead: bool,
}

impl Stack {
    pub(crate) fn new(plan: &Plan, world: &Rc<World>, control: Control) -> Result<Self> {
        let mut stack = Self {
            plan: plan.clone(),
            world: Rc::clone(world),
            threads: Vec::new(),
            control: Rc::new(RefCell::new(control)),
            restarted: false,
            is_dead: false,
        };
        stack.start_threads()?;
        Ok(stack)
    }

    fn start_threads(&mut self) -> Result<()> {
        let completion_ring = match self.plan.getevents {
            0 => CompletionRing::Userspace,
            _ => CompletionRing::Getevents,
        };
        let aio = EngineConfig::Aio { completion_ring };
        // With a ring, the thread's descriptor must be the descriptor of the ring from the start.
        let engine = if self.plan.has_engine(2) {
            EngineConfig::IoUring { sqpoll: self.plan.sqpoll > 0, iopoll: false }
        } else {
            EngineConfig::Threads
        };
        let depth = fits(self.plan.depth, "a depth");
        let config = IoThreadConfig {
            engine,
            depth,
            poll_max: Duration::from_micros(self.plan.poll_us),
            poll_budget_percent: match self.plan.poll_percent {
                0 => 100,
                percent => fits(percent, "a percentage"),
            },
            harvest_on_submit: self.plan.no_harvest_on_submit == 0,
            submit_max: u32::try_from(self.plan.submit_max)
                .ok()
                .filter(|m| *m > 0)
                .unwrap_or(u32::MAX),
            bytes: self.plan.byte_limits(),
            bounce: BounceConfig {
                // At least two pieces.
                budget_bytes: fits::<_, usize>(self.plan.bounce_kib.max(8), "a budget in KiB")
                    << 10,
                ..SMALL_BOUNCE
            },
            pacing: match self.plan.real_pacing {
                0 => SHORT_PACING,
                _ => PacingConfig::default(),
            },
            ..IoThreadConfig::default()
        };
        for _ in 0..self.plan.io_threads {
            let io_thread = IoThread::new(&config)?;
            if self.plan.has_engine(0) {
                io_thread.io().add_engine(aio)?;
            }
            // Engine io_uring gives its watches to the kernel in the first turn.
            self.threads.push(Thread {
                io_thread,
                ready: true,
                done: 0,
                empty_turns: 0,
                ended_ns: self.world.now_nanoseconds(),
                run_ns: 0,
                held_ns: 0,
                was_refused: false,
            });
        }
        let remotes = self.threads.iter().map(|thread| thread.io_thread.remote());
        self.control.borrow_mut().threads = remotes.collect();
        Ok(())
    }

    /// Takes a turn of IoThread `index`.
    pub(crate) fn turn(&mut self, index: usize) -> Result<(), Failure> {
        let wait = if self.plan.own_loop > 0 { Wait::ForEvent } else { Wait::Never };
        let taken = self.threads[index].turn(wait, &self.world, &self.control);
        if self.world.is_dead() {
            return Ok(());
        }
        taken?;
        let Thread { io_thread, run_ns, held_ns, was_refused, .. } = &self.threads[index];
        let rounds = io_thread.io().stats().rounds.get();
        let (time_ns, held_ns, was_refused) = (*run_ns, *held_ns, *was_refused);
        let progress = ThreadProgress { rounds, time_ns, held_ns, was_refused };
        let exports = &mut self.control.borrow_mut().exports;
        exports.iter_mut().try_for_each(|export| export.check_waits(index, &progress))
    }

    /// Takes the answers that IoThreads have given since the last call.
    pub(crate) fn advance(&mut self) -> Result<(), Failure> {
        self.control.borrow_mut().exports.iter_mut().try_for_each(|export| export.advance())
    }

    /// True if all requests are made and answered, and no queue is between two states.
    pub(crate) fn is_done(&self) -> bool {
        let control = self.control.borrow();
        control.is_done() && control.exports.iter().all(|export| export.is_settled())
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.control.borrow().exports.iter().all(|export| export.is_stopped())
    }

    /// Stops all queues for good.
    pub(crate) fn stop_all(&mut self) {
        self.control.borrow_mut().exports.iter_mut().for_each(|export| export.stop_all());
    }

    /// Ends the IoThreads with any requests out, and starts new ones with the content of the disks:
    /// all of it or, if the power is lost, the content of stable storage.
    pub(crate) fn restart(&mut self, power_lost: bool) -> Result<(), Failure> {
        self.world.release();
        if power_lost {
            self.world.power_off();
        }
        {
            let mut control = self.control.borrow_mut();
            control.threads.clear();
            control.exports.iter_mut().for_each(|export| export.clear_queues());
        }
        self.threads.clear();
        self.check_answers()?;
        if power_lost {
            self.world.power_on();
        } else {
            // A later loss of power must then leave the content that is found now.
            self.world.settle();
        }
        {
            let Control { exports, disks, .. } = &mut *self.control.borrow_mut();
            disks.iter().try_for_each(|disk| disk.restart(power_lost))?;
            exports.iter_mut().for_each(Export::restart);
        }
        self.world.revive();
        (self.restarted, self.is_dead) = (true, false);
        self.start_threads().map_err(|e| Failure::new("no start", e.to_string()))
    }

    /// Kills the daemon with everything that it has.
    pub(crate) fn die(&mut self) -> Result<(), Failure> {
        {
            let mut control = self.control.borrow_mut();
            control.threads.clear();
            control.exports.iter_mut().for_each(Export::clear_queues);
        }
        self.threads.clear();
        self.world.bury();
        let Control { exports, disks, .. } = &mut *self.control.borrow_mut();
        exports.iter().for_each(|export| export.guest.restore_snapshot());
        for export in &mut *exports {
            export.check_memory()?;
            export.died();
        }
        let unanswered = exports.iter().flat_map(|export| export.guest.unanswered());
        let unanswered: Vec<u64> = unanswered.collect();
        let now = self.world.tick();
        for disk in disks {
            disk.died(&unanswered, now)?;
        }
        (self.restarted, self.is_dead) = (true, true);
        Ok(())
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.is_dead
    }

    /// Starts another daemon with the same guests.
    pub(crate) fn revive(&mut self) -> Result<(), Failure> {
        self.world.revive();
        {
            let Control { exports, disks, .. } = &mut *self.control.borrow_mut();
            disks.iter().for_each(|disk| disk.reopen());
            exports.iter_mut().for_each(Export::revived);
        }
        self.is_dead = false;
        self.start_threads().map_err(|e| Failure::new("no start", e.to_string()))
    }

    /// Checks that the answers can be explained, and that the memory of guests is unused.
    fn check_answers(&self) -> Result<(), Failure> {
        let control = self.control.borrow();
        control.disks.iter().try_for_each(|disk| disk.check())?;
        control.exports.iter().try_for_each(Export::check_memory)
    }

    /// Checks after all queues have stopped that nothing is left of them and all answers can be
    /// explained.
    pub(crate) fn check_end(&self) -> Result<(), Failure> {
        self.check_answers()?;
        let control = self.control.borrow();
        control.disks.iter().try_for_each(|disk| disk.check_end())?;
        control.exports.iter().try_for_each(Export::check_removed)?;
        control.guests().try_for_each(|guest| guest.check_logs())?;
        for (index, thread) in self.threads.iter().enumerate() {
            let io = thread.io_thread.io();
            let lists = io.stats().lists.bytes.get();
            if io.ops() != 0 || io.tasks() != 0 || lists != 0 {
                let (ops, tasks) = (io.ops(), io.tasks());
                let text =
                    format!("IoThread {index}: {ops} ops, {tasks} tasks, {lists} bytes of lists");
                return Err(Failure::new("leak", text));
            }
        }
        if self.restarted {
            return Ok(());
        }
        let all: Vec<_> =
            self.threads.iter().map(|t| Arc::clone(t.io_thread.io().stats())).collect();
        check_counts(&all, self.world.counts())
    }

    pub(crate) fn describe(&self) -> String {
        let mut text = String::new();
        for (index, thread) in self.threads.iter().enumerate() {
            let io = thread.io_thread.io();
            text += &format!("\n  IoThread {index}: {} ops, {} tasks", io.ops(), io.tasks());
        }
        let exports = self.control.borrow();
        exports.exports.iter().fold(text, |text, export| text + &export.describe())
    }

    /// Abandons the IoThreads, because they might not end.
    pub(crate) fn forget(&mut self) {
        std::mem::take(&mut self.threads).into_iter().for_each(std::mem::forget);
    }
}

/// Checks that the counters of the IoThreads agree with the kernel's.
fn check_counts(all: &[Arc<Stats>], counts: Counts) -> Result<(), Failure> {
    let sum = |of: &dyn Fn(&Stats) -> u64| all.iter().map(|stats| of(stats)).sum::<u64>();
    let kinds: [fn(&Stats) -> &OpStats; 4] =
        [|s| &s.read, |s| &s.write, |s| &s.flush, |s| &s.deallocate];
    let ops = kinds.iter().map(|kind| sum(&|stats| kind(stats).ops.get())).sum::<u64>();
    // A discard that io_uring cannot do goes to the kernel once more, and is one op.
    let once = counts.started - counts.discards_twice;
    let harvested = counts.started + counts.threads;
    let checks = [
        ("ops", ops, once + counts.rejected),
        ("submitted ops", sum(&|stats| stats.submitted_at_once.sum()), counts.started),
        ("harvested ops", sum(&|stats| stats.harvested_at_once.sum()), harvested),
        ("bytes read", sum(&|stats| stats.read.bytes.get()), counts.read_bytes),
        ("bytes written", sum(&|stats| stats.write.bytes.get()), counts.written_bytes),
    ];
    for (what, counted, expected) in checks {
        if counted != expected {
            let text = format!("{what}: {counted} were counted, {expected} were there");
            return Err(Failure::new("bad count", text));
        }
    }
    Ok(())
}
