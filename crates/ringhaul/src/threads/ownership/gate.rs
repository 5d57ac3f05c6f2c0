//! Commands, changes and hand-overs, which wait for each other.

use std::collections::VecDeque;
use std::sync::Condvar;
use std::time::Duration;

use blockio::executor::Lock;

use crate::spec::command::CommandError;

/// The longest waits at the gate.
struct Limits {
    /// The wait of a hand-over for commands that run. Some wait for a disk or a guest.
    commands: Duration,
    /// The wait of a command for a hand-over. A process that takes over may hang.
    hand_over: Duration,
}

/// The number of processes that have asked to take over and are remembered.
const REMEMBERED: usize = 64;

impl Default for Limits {
    fn default() -> Self {
        Self { commands: Duration::from_secs(2), hand_over: Duration::from_secs(30) }
    }
}

/// The gate between commands and changes on one side and hand-overs on the other. A change is `T`
/// until it begins.
pub(super) struct Gate<T> {
    state: Lock<State<T>>,
    changed: Condvar,
    limits: Limits,
}

struct State<T> {
    /// The number of commands that run.
    commands: usize,
    /// The number of changes that are made.
    changes: usize,
    /// True while a hand-over runs.
    is_closed: bool,
    /// Changes that wait for the end of the hand-over.
    queued: Vec<T>,
    /// The last processes that have asked to take over, with the refusals of their takeovers.
    asked: VecDeque<(u32, Option<Refusal>)>,
}

/// The reason that a process has not taken over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) why: String,
    /// True if the process may take over in a moment.
    pub(crate) is_transient: bool,
}

impl<T> Default for Gate<T> {
    fn default() -> Self {
        let (asked, queued) = (VecDeque::new(), Vec::new());
        let state = State { commands: 0, changes: 0, is_closed: false, queued, asked };
        Self { state: Lock::new(state), changed: Condvar::new(), limits: Limits::default() }
    }
}

impl<T> Gate<T> {
    /// Begins a command, when no hand-over runs, or after a long wait for one.
    pub(super) fn begin_command(&self) {
        let is_closed = |state: &mut State<T>| state.is_closed;
        let limit = self.limits.hand_over;
        self.state.wait_timeout_while(&self.changed, limit, is_closed).commands += 1;
    }

    pub(super) fn end_command(&self) {
        self.state.lock().commands -= 1;
        self.changed.notify_all();
    }

    /// Returns a change that begins now. The [end](Self::end_hand_over) of a hand-over returns the
    /// changes that came while it ran.
    pub(super) fn begin_change(&self, change: T) -> Option<T> {
        let mut state = self.state.lock();
        if state.is_closed {
            state.queued.push(change);
            return None;
        }
        state.changes += 1;
        Some(change)
    }

    pub(super) fn end_change(&self) {
        self.state.lock().changes -= 1;
        self.changed.notify_all();
    }

    /// Returns true if a change is being made.
    pub(super) fn has_changes(&self) -> bool {
        self.state.lock().changes > 0
    }

    /// Changes that wait for the end of the hand-over, and for which another process is asked.
    pub(super) fn take_queued(&self) -> Vec<T> {
        std::mem::take(&mut self.state.lock().queued)
    }

    /// Begins a hand-over by this process, when no command runs and nothing is changed, or after a
    /// wait for that.
    ///
    /// # Errors
    ///
    /// When a hand-over runs.
    pub(super) fn begin_hand_over(&self, process: u32) -> Result<(), CommandError> {
        let mut state = self.state.lock();
        // The id may have belonged to an earlier process.
        state.asked.retain(|(asked, _)| *asked != process);
        state.asked.push_back((process, None));
        if state.asked.len() > REMEMBERED {
            state.asked.pop_front();
        }
        if std::mem::replace(&mut state.is_closed, true) {
            return Err(CommandError::HandingOver);
        }
        let is_busy = |state: &mut State<T>| state.commands > 0 || state.changes > 0;
        drop(self.changed.wait_timeout_while(state, self.limits.commands, is_busy));
        Ok(())
    }

    /// Ends a hand-over. Returns the changes that begin now.
    pub(super) fn end_hand_over(&self) -> Vec<T> {
        let mut state = self.state.lock();
        state.is_closed = false;
        state.changes += state.queued.len();
        let queued = std::mem::take(&mut state.queued);
        drop(state);
        self.changed.notify_all();
        queued
    }

    /// Notes that a process does not take over.
    pub(super) fn refuse(&self, process: u32, refusal: Refusal) {
        let mut state = self.state.lock();
        let asked = state.asked.iter_mut().find(|(asked, _)| *asked == process);
        asked.into_iter().for_each(|(_, noted)| *noted = Some(refusal.clone()));
    }

    /// The refusal of a process that has asked to take over, or `None` while it may still take
    /// over. `None` around that: it has not asked.
    pub(super) fn asked(&self, process: u32) -> Option<Option<Refusal>> {
        let state = self.state.lock();
        let asked = state.asked.iter().find(|(asked, _)| *asked == process);
        asked.map(|(_, refusal)| refusal.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use super::*;
    use crate::testing::spawn_asleep;

    /// Longer than a test takes: a wait that ends by its limit has missed its wake.
    const HOPELESS: Duration = Duration::from_secs(60);

    /// Runs a test with a gate whose waits end by wakes alone.
    fn with_gate(test: impl FnOnce(&Gate<u32>)) {
        let limits = Limits { commands: HOPELESS, hand_over: HOPELESS };
        let (gate, start) = (Gate { limits, ..Gate::default() }, Instant::now());
        test(&gate);
        assert!(start.elapsed() < HOPELESS, "a wake was lost");
    }

    #[test]
    fn commands_and_hand_overs_wait_for_each_other() {
        with_gate(wait_for_commands);
    }

    fn wait_for_commands(gate: &Gate<u32>) {
        gate.begin_command();
        std::thread::scope(|threads| {
            let (begun, begins) = mpsc::channel();
            let hand_over = spawn_asleep(threads, {
                let begun = begun.clone();
                move || {
                    gate.begin_hand_over(7).unwrap();
                    begun.send("hand-over").unwrap();
                }
            });
            assert!(matches!(gate.begin_hand_over(8), Err(CommandError::HandingOver)));
            spawn_asleep(threads, move || {
                gate.begin_command();
                begun.send("command").unwrap();
            });
            assert!(begins.try_recv().is_err(), "a command runs");
            gate.end_command();
            hand_over.join().unwrap();
            assert_eq!(begins.recv().unwrap(), "hand-over");
            assert!(begins.try_recv().is_err(), "a hand-over runs");
            gate.end_hand_over();
            assert_eq!(begins.recv().unwrap(), "command");
        });
    }

    #[test]
    fn changes_and_hand_overs_wait_for_each_other() {
        with_gate(wait_for_changes);
    }

    fn wait_for_changes(gate: &Gate<u32>) {
        assert_eq!(gate.begin_change(1), Some(1));
        assert!(gate.has_changes());
        std::thread::scope(|threads| {
            let (begun, begins) = mpsc::channel();
            let hand_over = spawn_asleep(threads, move || {
                gate.begin_hand_over(7).unwrap();
                begun.send(()).unwrap();
            });
            assert_eq!(gate.begin_change(2), None, "a hand-over is about to run");
            assert!(begins.try_recv().is_err(), "something is changed");
            gate.end_change();
            hand_over.join().unwrap();
        });
        assert_eq!(gate.begin_change(3), None);
        assert!(!gate.has_changes());
        assert_eq!(gate.end_hand_over(), [2, 3]);
        assert!(gate.has_changes());
        (0..2).for_each(|_| gate.end_change());
        assert!(!gate.has_changes());
    }

    #[test]
    fn a_process_that_has_asked_has_its_refusal() {
        with_gate(remember_processes);
    }

    fn remember_processes(gate: &Gate<u32>) {
        let refusal = Refusal { why: "it is early".to_owned(), is_transient: true };
        gate.refuse(5, refusal.clone());
        assert_eq!(gate.asked(5), None, "it has not asked");
        gate.begin_hand_over(5).unwrap();
        assert_eq!(gate.asked(5), Some(None), "it may take over");
        assert!(gate.begin_hand_over(6).is_err());
        gate.refuse(6, refusal.clone());
        assert_eq!((gate.asked(5), gate.asked(6)), (Some(None), Some(Some(refusal.clone()))));
        // Another process has the same id.
        gate.begin_hand_over(6).unwrap_err();
        assert_eq!(gate.asked(6), Some(None));
        for process in 7..7 + u32::try_from(REMEMBERED).unwrap() {
            assert!(gate.asked(6).is_some(), "process {process} has not asked yet");
            gate.begin_hand_over(process).unwrap_err();
        }
        assert_eq!((gate.asked(6), gate.state.lock().asked.len()), (None, REMEMBERED));
    }
}
