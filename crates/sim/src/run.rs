//! One run: IoThreads, the guest and whoever controls them take steps in an order that the seed
//! chooses, all on this thread.
//!
//! An IoThread takes a turn only when it would have woken: when its last turn said that there is
//! more to do, when its descriptor is readable, or when its deadline has come. So a wake that gets
//! lost shows as a run in which nobody can take a step, and requests are out.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use anyhow::{Context, Result};
use blockio::IoThread;
use blockio::engine::sim::{self, is_readable};

use crate::control::{Change, Stack};
use crate::failure::Failure;
use crate::guest::Guest;
use crate::plan::Plan;
use crate::rng::Rng;
use crate::world::World;

/// A run that takes more steps than this for each request does not come to an end.
const STEPS_FOR_REQUEST: u64 = 4000;

/// What can happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// An IoThread takes a turn.
    Turn(usize),
    /// The guest's CPU does something for a queue.
    Guest(usize),
    /// Time passes.
    Time,
    /// A queue that was stopped is started.
    Start(usize),
    Change(Change),
}

struct Run {
    plan: Plan,
    rng: Rng,
    world: Rc<World>,
    guest: Rc<Guest>,
    stack: Stack,
    /// How often each change may still be made.
    changes: Vec<(Change, u64)>,
}

/// What a run that did not fail has done.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Report {
    pub(crate) ops: u64,
    pub(crate) turns: u64,
}

/// Runs a plan. The inner result is that of the run, the outer one whether there could be one.
pub(crate) fn run(plan: &Plan, traced: bool) -> Result<Result<Report, Failure>> {
    let disk = File::options().read(true).write(true).open("/dev/null");
    let disk = OwnedFd::from(disk.context("opening /dev/null, which stands for the disk")?);
    let world = Rc::new(World::new(plan, disk.as_raw_fd(), traced));
    let installed = sim::install(Rc::<World>::clone(&world));
    let guest = Rc::new(Guest::new(plan, &world));
    let stack = Stack::new(plan, &world, &guest, disk)?;
    let changes = vec![
        (Change::Stop, plan.stops),
        (Change::Remap, plan.remaps),
        (Change::Reset, plan.resets),
        (Change::SetCall, plan.set_calls),
        (Change::Writeback, plan.writebacks),
        (Change::Crash, plan.crashes),
        (Change::Kill, plan.kills),
    ];
    let rng = Rng::new(plan.seed ^ plan.schedule << 40, 4);
    let mut run = Run { plan: plan.clone(), rng, world: Rc::clone(&world), guest, stack, changes };
    let others = Rc::clone(&run.guest);
    world.set_others(Some(Rc::new(move || others.act())));
    let result = catch_unwind(AssertUnwindSafe(|| run.go()))
        .unwrap_or_else(|_| Err(Failure::new("panic", crate::panic_message())));
    if result.is_err() {
        // Whatever is wrong may keep the IoThreads from ending.
        run.stack.forget();
    }
    drop(run);
    world.clear();
    drop(installed);
    Ok(result)
}

impl Run {
    fn go(&mut self) -> Result<Report, Failure> {
        let mut turns = 0;
        let limit = STEPS_FOR_REQUEST * (self.plan.requests + 10);
        for _ in 0..limit {
            self.stack.advance()?;
            self.check_failures()?;
            let steps = self.steps();
            if self.guest.is_done() && self.stack.is_settled() {
                if self.stack.is_stopped() {
                    return self.finish(turns);
                }
                self.stack.stop_all();
                continue;
            }
            let Some(step) = self.choose(&steps) else {
                let text = self.guest.describe_outstanding();
                let stack = self.stack.describe();
                return Err(Failure::new("lost wake", format!("nobody can go on{text}{stack}")));
            };
            turns += u64::from(matches!(step, Step::Turn(_)));
            self.take(step)?;
        }
        Err(Failure::new("no end", format!("{limit} steps{}", self.guest.describe_outstanding())))
    }

    fn check_failures(&self) -> Result<(), Failure> {
        let failure = self.guest.failure().or_else(|| self.world.failure());
        failure.map_or(Ok(()), Err)
    }

    /// Everything that can happen now.
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
        for queue in 0..self.guest.queues() {
            if self.guest.can_step(queue) {
                steps.push((Step::Guest(queue), 20));
            }
        }
        if self.next_time().is_some() {
            steps.push((Step::Time, 20));
        }
        for queue in self.stack.startable() {
            steps.push((Step::Start(queue), 10));
        }
        if !self.guest.is_done() && !steps.is_empty() {
            let changes = self.changes.iter().filter(|(_, left)| *left > 0);
            let possible = changes.filter(|(change, _)| self.stack.can_change(*change));
            steps.extend(possible.map(|(change, _)| (Step::Change(*change), 1)));
        }
        steps
    }

    fn is_due(&self, thread: &IoThread) -> bool {
        let now = self.world.now_nanoseconds();
        thread.deadline().is_some_and(|when| self.world.nanoseconds(when) <= now)
    }

    /// When something happens that nobody has to do: an event of the kernel, or a deadline.
    fn next_time(&self) -> Option<u64> {
        let now = self.world.now_nanoseconds();
        let deadlines = self.stack.threads.iter().filter_map(|t| t.io_thread.deadline());
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
                self.stack.threads[index].turn()?;
            }
            Step::Guest(queue) => self.guest.step(queue),
            Step::Time => match (self.next_time(), self.world.next_event()) {
                (Some(time), Some(event)) if event <= time => {
                    self.world.run_event();
                }
                (Some(time), _) => self.world.advance_to(time),
                _ => {}
            },
            Step::Start(queue) => self.stack.start(queue),
            Step::Change(change) => {
                if let Some((_, left)) = self.changes.iter_mut().find(|(c, _)| *c == change) {
                    *left -= 1;
                }
                self.world.trace(|| format!("control: {change:?}"));
                self.stack.change(change, &mut self.rng)?;
            }
        }
        Ok(())
    }

    /// Everything is answered and stopped: whether all is in order.
    fn finish(&mut self, turns: u64) -> Result<Report, Failure> {
        self.guest.check()?;
        self.stack.check_balance()?;
        Ok(Report { ops: self.world.counts().started, turns })
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
                Ok(Report { ops, turns }) => (ops, turns),
                Err(failure) => panic!("seed {seed}: {failure}"),
            });
            assert_eq!(first, second, "seed {seed}");
        }
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
}
