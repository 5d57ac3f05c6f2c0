//! A run: IoThreads, guests and the controller take steps on this thread, in an order that the seed
//! chooses.
//!
//! An IoThread takes a turn only when it would have woken: its last turn reported more to do, its
//! descriptor is readable, or its deadline has come. So a lost wake-up shows as a run without a
//! possible step while requests are out.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use anyhow::{Context, Result};
use blockio::IoThread;
use blockio::engine::kernel::sim::{self, is_readable};
use iomem::fits;
use virtqueue::death;

use crate::control::Control;
use crate::disk::Disk;
use crate::export::{Change, Export};
use crate::failure::{self, Failure};
use crate::guest::Guest;
use crate::plan::Plan;
use crate::rng::Rng;
use crate::stack::Stack;
use crate::world::{Actor, Polls, World};

/// A run that takes more steps than this for each request does not end.
const STEPS_FOR_REQUEST: u64 = 4000;

/// A possible next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// An IoThread takes a turn.
    Turn(usize),
    /// The CPU of a device's guest acts for a queue.
    Guest(usize, usize),
    /// A device's front-end sends a message or reads an answer.
    FrontEnd(usize),
    /// A device's session works.
    Session(usize),
    /// Time passes.
    Time,
    /// A stopped queue of a device starts.
    Start(usize, usize),
    Change(Change),
    /// A new daemon starts after one was killed.
    Revive,
}

struct Run {
    plan: Plan,
    rng: Rng,
    world: Rc<World>,
    guests: Vec<Rc<Guest>>,
    stack: Stack,
}

/// Totals of a run that did not fail.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Report {
    pub(crate) ops: u64,
    pub(crate) turns: u64,
    pub(crate) polls: Polls,
}

impl Report {
    pub(crate) fn add(&mut self, other: &Self) {
        self.ops += other.ops;
        self.turns += other.turns;
        self.polls.found += other.polls.found;
        self.polls.missed += other.polls.missed;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ops, turns, polls: Polls { found, missed } } = self;
        write!(f, "{ops} ops in {turns} turns, {found} of {} polls found work", found + missed)
    }
}

/// Runs a plan. The inner result is the outcome of the run; the outer one fails if it could not
/// start.
pub(crate) fn run(plan: &Plan, traced: bool) -> Result<Result<Report, Failure>> {
    let count = fits(plan.disks(), "a number of disks");
    let plans: Vec<Plan> = (0..count).map(|disk| plan.for_device(disk)).collect();
    let mut files = Vec::new();
    for _ in &plans {
        let file = File::options().read(true).write(true).open("/dev/null");
        files.push(OwnedFd::from(file.context("opening /dev/null, which stands for a disk")?));
    }
    let known = plans.iter().cloned().zip(files.iter().map(AsRawFd::as_raw_fd));
    let world = Rc::new(World::new(plan, &known.collect::<Vec<_>>(), traced));
    let installed = sim::install(Rc::<World>::clone(&world));
    let disks = plans.iter().zip(files).enumerate();
    let disks: Vec<Rc<Disk>> =
        disks.map(|(index, (plan, file))| Rc::new(Disk::new(plan, &world, index, file))).collect();
    let exports = (0..fits(plan.devices, "a number of devices")).map(|device| {
        let own = if plan.scsi > 0 { &disks[..] } else { &disks[device..=device] };
        Export::new(&plan.for_device(device), &world, device, own)
    });
    let exports: Vec<Export> = exports.collect();
    let guests: Vec<Rc<Guest>> = exports.iter().map(|export| Rc::clone(&export.guest)).collect();
    for guest in &guests {
        let _ = guest.peers.set(guests.iter().map(Rc::downgrade).collect());
    }
    let stack = Stack::new(plan, &world, Control::new(plan, exports, disks))?;
    let rng = Rng::new(plan.seed ^ plan.schedule << 40, 4);
    let mut run = Run { plan: plan.clone(), rng, world: Rc::clone(&world), guests, stack };
    run.begin_interleaving();
    let result = catch_unwind(AssertUnwindSafe(|| run.go()))
        .unwrap_or_else(|_| Err(Failure::new("panic", failure::panic_message())));
    if result.is_err() {
        // The fault may keep the IoThreads from ending.
        run.stack.forget();
    }
    drop(run);
    death::before_stores(None);
    world.clear();
    drop(installed);
    Ok(result)
}

impl Run {
    /// Lets guests, events and control act within the turns of IoThreads, and the daemon die there.
    fn begin_interleaving(&self) {
        let control = Rc::clone(&self.stack.control);
        let guests = self.guests.clone();
        let world = Rc::clone(&self.world);
        self.world.set_interleaver(Some(Rc::new(move |actor| {
            if actor == Actor::Death {
                return guests.iter().for_each(|guest| guest.take_snapshot());
            }
            // The control may already be in use.
            let Ok(mut control) = control.try_borrow_mut() else { return };
            match actor {
                Actor::Rush => control.rush(),
                _ => {
                    if let Err(failure) = control.act() {
                        world.fail(failure);
                    }
                }
            }
        })));
        let (world, guests) = (Rc::clone(&self.world), self.guests.clone());
        death::before_stores(Some(Rc::new(move || {
            world.pass();
            if world.is_in_turn() && !world.is_dead() {
                guests.iter().for_each(|guest| guest.may_act());
                guests.iter().for_each(|guest| guest.may_copy());
            }
        })));
    }

    fn go(&mut self) -> Result<Report, Failure> {
        let mut turns = 0;
        let limit = STEPS_FOR_REQUEST * (self.plan.requests + self.plan.rush + 10);
        for _ in 0..limit {
            self.stack.advance()?;
            self.check_failures()?;
            self.guests.iter().for_each(|guest| guest.may_copy());
            self.release_hung();
            let steps = self.steps();
            if self.stack.is_done() {
                if self.stack.is_stopped() {
                    return self.finish(turns);
                }
                self.stack.stop_all();
                continue;
            }
            let Some(step) = self.choose(&steps) else {
                let hung = if self.holds_ops() { " beside a disk that hangs" } else { "" };
                let text = format!("nothing can continue{hung}{}", self.stack.describe());
                return Err(Failure::new("lost wake", text));
            };
            turns += u64::from(matches!(step, Step::Turn(_)));
            self.take(step)?;
        }
        Err(Failure::new("no end", format!("{limit} steps{}", self.stack.describe())))
    }

    fn holds_ops(&self) -> bool {
        self.world.holds_ops()
    }

    /// Releases a hung disk once the guests of all healthy disks have their answers. So healthy
    /// disks may not need anything of it, however many ops it has.
    fn release_hung(&self) {
        if !self.holds_ops() {
            return;
        }
        let others = |device: &usize| !self.world.hangs(*device);
        let mut healthy = (0..self.guests.len()).filter(others);
        if healthy.all(|device| self.guests[device].is_done()) {
            self.world.trace(|| "kernel: the disk that hung continues".to_owned());
            self.world.release();
        }
    }

    fn check_failures(&self) -> Result<(), Failure> {
        let mut failures = self.guests.iter().filter_map(|guest| guest.failure());
        failures.next().or_else(|| self.world.failure()).map_or(Ok(()), Err)
    }

    /// All steps that are possible now.
    fn steps(&self) -> Vec<(Step, u64)> {
        let mut steps = Vec::new();
        for (index, thread) in self.stack.threads.iter().enumerate() {
            if thread.ready
                || is_readable(thread.io_thread.as_fd())
                || self.is_due(&thread.io_thread)
            {
                steps.push((Step::Turn(index), 20));
            }
        }
        for (device, guest) in self.guests.iter().enumerate() {
            let queues = (0..guest.queues()).filter(|queue| guest.can_step(*queue));
            steps.extend(queues.map(|queue| (Step::Guest(device, queue), 20)));
        }
        if self.next_time().is_some() {
            steps.push((Step::Time, 20));
        }
        if self.stack.is_dead() {
            // Ops of the dead daemon keep the disks locked.
            if !self.world.has_orphans() {
                steps.push((Step::Revive, 20));
            }
            let control = self.stack.control.borrow();
            let changes = control.possible().filter(|change| *change == Change::Crash);
            steps.extend(changes.map(|change| (Step::Change(change), 1)));
            return steps;
        }
        let control = self.stack.control.borrow();
        for (device, export) in control.exports.iter().enumerate() {
            let Some(front_end) = &export.front_end else { continue };
            if front_end.can_step() {
                steps.push((Step::FrontEnd(device), 20));
            }
            if front_end.session_can_step() {
                steps.push((Step::Session(device), 20));
            }
        }
        steps.extend(control.startable().map(|(device, queue)| (Step::Start(device, queue), 10)));
        if !steps.is_empty() {
            steps.extend(control.possible().map(|change| (Step::Change(change), 1)));
        }
        steps
    }

    fn is_due(&self, thread: &IoThread) -> bool {
        let now = self.world.now_nanoseconds();
        thread.work_deadline().is_some_and(|when| self.world.nanoseconds(when) <= now)
    }

    /// The time of the next event that needs no step: an event of the kernel, or a deadline.
    fn next_time(&self) -> Option<u64> {
        let now = self.world.now_nanoseconds();
        let deadlines = self.stack.threads.iter().filter_map(|t| t.io_thread.work_deadline());
        let deadlines = deadlines.map(|when| self.world.nanoseconds(when)).filter(|&w| w > now);
        deadlines.chain(self.world.next_event()).min()
    }

    fn choose(&mut self, steps: &[(Step, u64)]) -> Option<Step> {
        let mut left = self.rng.below(steps.iter().map(|(_, weight)| weight).sum());
        for (step, weight) in steps {
            if left < *weight {
                return Some(*step);
            }
            left -= weight;
        }
        None
    }

    fn take(&mut self, step: Step) -> Result<(), Failure> {
        match step {
            Step::Turn(index) => {
                self.world.tick();
                self.world.trace(|| format!("IoThread {index}: turn"));
                self.stack.turn(index)?;
            }
            Step::Guest(device, queue) => self.guests[device].step(queue),
            Step::FrontEnd(device) => {
                let Control { exports, threads, .. } = &mut *self.stack.control.borrow_mut();
                let front_end = exports[device].front_end.as_mut();
                front_end.map_or(Ok(()), |front_end| front_end.step(threads))?;
            }
            Step::Session(device) => {
                let front_end = &mut self.stack.control.borrow_mut().exports[device].front_end;
                front_end.as_mut().map_or(Ok(()), |front_end| front_end.step_session())?;
            }
            Step::Time => match (self.next_time(), self.world.next_event()) {
                (Some(time), Some(event)) if event <= time => {
                    self.world.run_event();
                }
                (Some(time), _) => self.world.advance_to(time),
                _ => {}
            },
            Step::Start(device, queue) => {
                self.stack.control.borrow_mut().start(device, queue);
            }
            Step::Change(change) => {
                self.stack.control.borrow_mut().change(change)?;
                match change {
                    Change::Die => {
                        let most = self.rng.pick(&[0, 0, 10, 100, 1000]);
                        let moments = self.rng.below(most + 1);
                        self.world.trace(|| format!("control: {change:?} after {moments}"));
                        self.world.begin_death(moments);
                    }
                    _ if change.is_of_all() => {
                        self.world.trace(|| format!("control: {change:?}"));
                        self.stack.restart(change == Change::Crash)?;
                    }
                    _ => {}
                }
            }
            Step::Revive => {
                self.world.trace(|| "control: another daemon begins".to_owned());
                self.stack.revive()?;
            }
        }
        if self.world.is_dead() && !self.stack.is_dead() {
            self.stack.die()?;
        }
        Ok(())
    }

    /// Checks the state at the end, when all requests are answered and all queues stopped.
    fn finish(&mut self, turns: u64) -> Result<Report, Failure> {
        self.stack.check_end()?;
        Ok(Report { ops: self.world.counts().started, turns, polls: self.world.polls() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_pass_and_follow_from_their_seeds() {
        for seed in 0..30 {
            let plan = Plan::new(seed);
            let runs = [run(&plan, false), run(&plan, false)];
            let [first, second] = runs.map(|result| match result.unwrap() {
                Ok(report) => report.to_string(),
                Err(failure) => panic!("seed {seed}: {failure}"),
            });
            assert_eq!(first, second, "seed {seed}");
        }
    }

    #[test]
    fn busy_polling_finds_work_in_many_seeds_and_none_in_many() {
        // Disks are tried only now and then, and runs are short.
        let (mut found, mut missed) = (0, 0);
        for seed in 0..100 {
            let polls = run(&Plan::new(seed), false).unwrap().unwrap().polls;
            found += u32::from(polls.found > 5);
            missed += u32::from(polls.missed > 5);
        }
        assert!(found > 8 && missed > 20, "{found} seeds with work, {missed} without");
    }

    #[test]
    fn a_disk_that_fails_fails_requests_and_nothing_else() {
        let mut plan = Plan::new(1);
        for setting in ["eio=1000", "crashes=0", "kills=0", "odd_shorts=0", "writes=5"] {
            plan.set(setting).unwrap();
        }
        let report = run(&plan, false).unwrap().unwrap();
        assert!(report.ops > 0);
    }

    #[test]
    fn a_full_submission_ring_beside_a_disk_that_hangs_delays_no_disk() {
        for seed in 0..150 {
            let mut plan = Plan::new(seed);
            for setting in ["scsi=0", "engine=2", "sqpoll=1", "sq_entries=1", "troubled=1"] {
                plan.set(setting).unwrap();
            }
            let rest =
                ["devices=4", "depth=64", "requests=60", "rush=0", "odd_shorts=0", "stuck=0"];
            for setting in rest {
                plan.set(setting).unwrap();
            }
            if let Err(failure) = run(&plan, false).unwrap() {
                panic!("seed {seed}: {failure}");
            }
        }
    }

    #[test]
    fn a_ring_that_rejects_every_entry_fails_requests_and_nothing_else() {
        for submit_all in ["no_submit_all=0", "no_submit_all=1"] {
            let mut plan = Plan::new(1);
            for setting in ["engine=2", "entry_reject=1000", "sound_disks=0", submit_all] {
                plan.set(setting).unwrap();
            }
            for setting in ["crashes=0", "kills=0", "odd_shorts=0", "writes=5"] {
                plan.set(setting).unwrap();
            }
            assert!(run(&plan, false).unwrap().unwrap().ops > 0);
        }
    }

    #[test]
    fn a_disk_that_fails_harms_no_other_device_of_its_io_thread() {
        for (engine, mix) in (0..3).flat_map(|engine| [(engine, 0), (engine, 1)]) {
            let mut plan = Plan::new(2);
            for setting in [format!("engine={engine}"), format!("mix_engines={mix}")] {
                plan.set(&setting).unwrap();
            }
            for setting in ["scsi=0", "devices=3", "sound_disks=2", "io_threads=1", "eio=1000"] {
                plan.set(setting).unwrap();
            }
            for setting in ["crashes=0", "kills=0", "odd_shorts=0", "writes=5", "no_overlap=0"] {
                plan.set(setting).unwrap();
            }
            assert_eq!((plan.for_device(0).eio, plan.for_device(1).eio), (1000, 0));
            assert!(run(&plan, false).unwrap().unwrap().ops > 0);
        }
    }
}
