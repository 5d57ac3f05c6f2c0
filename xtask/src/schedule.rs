//! The order of the steps of a check run. Two run at a time, because compilers and linkers often
//! leave a processor idle, and a third that mostly waits.

use crate::steps::{Folder, Step};

/// The number of steps that run at a time: of busy ones, and of those that mostly wait.
const BUSY: usize = 2;
const WAITING: usize = 1;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Passed,
    Failed,
}

/// The steps of a run and their states. A step is named by its index.
pub(crate) struct Schedule<'a> {
    steps: &'a [&'a Step],
    states: Vec<State>,
}

/// The next action of a run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Begin(usize),
    /// The step cannot run, because the other step has failed.
    Skip(usize, &'static str),
}

impl<'a> Schedule<'a> {
    pub(crate) fn new(steps: &'a [&'a Step]) -> Self {
        Self { steps, states: vec![State::Waiting; steps.len()] }
    }

    /// Chooses the first step that can begin now, and counts it as running; or the first that will
    /// never begin. `None` until a running step ends, or at the end of the run.
    pub(crate) fn next(&mut self) -> Option<Next> {
        for index in 0..self.steps.len() {
            if self.states[index] != State::Waiting {
                continue;
            }
            let step = self.steps[index];
            if let Some(failed) = step.needs.iter().find(|name| self.is(name, State::Failed)) {
                self.states[index] = State::Failed;
                return Some(Next::Skip(index, failed));
            }
            if self.can_begin(step) {
                self.states[index] = State::Running;
                return Some(Next::Begin(index));
            }
        }
        None
    }

    pub(crate) fn end(&mut self, index: usize, passed: bool) {
        self.states[index] = if passed { State::Passed } else { State::Failed };
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running().next().is_some()
    }

    fn can_begin(&self, step: &Step) -> bool {
        let lanes = if step.waits { WAITING } else { BUSY };
        let is_unfinished =
            |name: &&str| self.is(name, State::Waiting) || self.is(name, State::Running);
        let is_beside = |other: &Step| {
            !other.is_alone && (step.folder == Folder::None || other.folder != step.folder)
        };
        self.running().filter(|other| other.waits == step.waits).count() < lanes
            && !(step.is_alone && self.is_running())
            && self.running().all(is_beside)
            && !step.needs.iter().any(is_unfinished)
    }

    fn running(&self) -> impl Iterator<Item = &'a Step> {
        let all = self.steps.iter().zip(&self.states);
        all.filter(|(_, state)| **state == State::Running).map(|(step, _)| *step)
    }

    /// True if a step of this name is in the run and in this state.
    fn is(&self, name: &str, state: State) -> bool {
        let mut all = self.steps.iter().zip(&self.states);
        all.any(|(step, its_state)| step.name == name && *its_state == state)
    }
}

/// The seconds that these steps take, if each takes its usual time.
pub(crate) fn usual_seconds(steps: &[&Step]) -> u64 {
    let mut schedule = Schedule::new(steps);
    let mut running = Vec::new();
    let mut now = 0;
    loop {
        while let Some(Next::Begin(index)) = schedule.next() {
            running.push((now + steps[index].usual, index));
        }
        running.sort_unstable_by(|one, other| other.cmp(one));
        let Some((end, index)) = running.pop() else { return now };
        now = end;
        schedule.end(index, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::STEP;

    const STEPS: &[&Step] = &[
        &Step { name: "a", folder: Folder::Debug, usual: 5, ..STEP },
        &Step { name: "b", folder: Folder::Debug, usual: 2, ..STEP },
        &Step { name: "alone", is_alone: true, usual: 3, ..STEP },
        &Step { name: "c", folder: Folder::Release, usual: 4, ..STEP },
        &Step { name: "d", needs: &["c", "absent"], usual: 10, ..STEP },
        &Step { name: "e", needs: &["d"], usual: 1, ..STEP },
        &Step { name: "f", waits: true, usual: 15, ..STEP },
        &Step { name: "g", waits: true, usual: 1, ..STEP },
    ];

    #[test]
    fn two_busy_steps_and_one_that_waits_run_at_a_time_each_in_its_own_folder() {
        let mut schedule = Schedule::new(STEPS);
        assert_eq!(schedule.next(), Some(Next::Begin(0)));
        assert_eq!(schedule.next(), Some(Next::Begin(3)));
        assert_eq!(schedule.next(), Some(Next::Begin(6)));
        assert_eq!(schedule.next(), None);
        schedule.end(6, true);
        assert_eq!(schedule.next(), Some(Next::Begin(7)));
        schedule.end(7, true);
        schedule.end(0, true);
        assert_eq!(schedule.next(), Some(Next::Begin(1)));
        schedule.end(1, true);
        assert_eq!(schedule.next(), None);
        schedule.end(3, true);
        assert_eq!(schedule.next(), Some(Next::Begin(2)));
        assert_eq!(schedule.next(), None);
        assert!(schedule.is_running());
        schedule.end(2, false);
        assert!(!schedule.is_running());
        assert_eq!(schedule.next(), Some(Next::Begin(4)));
    }

    #[test]
    fn a_step_is_skipped_after_a_failure_of_a_step_that_it_needs() {
        let mut schedule = Schedule::new(STEPS);
        while schedule.next() != Some(Next::Begin(3)) {}
        schedule.end(0, false);
        schedule.end(3, false);
        assert_eq!(schedule.next(), Some(Next::Begin(1)));
        assert_eq!(schedule.next(), Some(Next::Skip(4, "c")));
        assert_eq!(schedule.next(), Some(Next::Skip(5, "d")));
    }

    #[test]
    fn the_usual_time_is_that_of_steps_beside_each_other() {
        // c from 0 to 4, a to 5; d to 14, b to 7; e to 15; f to 15, g to 16; the one alone to 19.
        assert_eq!(usual_seconds(STEPS), 19);
        assert_eq!(usual_seconds(&[]), 0);
    }
}
