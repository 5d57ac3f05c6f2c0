//! Commands, changes and hand-overs, which wait for each other.

use std::collections::BTreeMap;
use std::sync::{Condvar, PoisonError};
use std::time::Duration;

use blockio::executor::Lock;

use crate::spec::command::CommandError;

/// The longest waits at the gate.
struct Limits {
    /// The wait of a hand-over for commands that run. Some wait for a disk or a guest.
    commands: Duration,
    /// The wait of a command for a hand-over. A process that takes over may hang.
    hand_over: Duration,
    /// The wait for the reason of a process that has ended.
    reason: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let (commands, hand_over) = (Duration::from_secs(2), Duration::from_secs(30));
        Self { commands, hand_over, reason: Duration::from_secs(2) }
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
    /// Processes that were started to take over, with the refusals of their takeovers.
    started: BTreeMap<u32, Start>,
}

/// A process that was started to take over.
#[derive(Default)]
struct Start {
    /// True if the process has asked to take over.
    has_asked: bool,
    refusal: Option<Refusal>,
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
        let (started, queued) = (BTreeMap::new(), Vec::new());
        let state = State { commands: 0, changes: 0, is_closed: false, queued, started };
        Self { state: Lock::new(state), changed: Condvar::new(), limits: Limits::default() }
    }
}

impl<T> Gate<T> {
    /// Begins a command, when no hand-over runs, or after a long wait for one.
    pub(super) fn begin_command(&self) {
        let is_closed = |state: &mut State<T>| state.is_closed;
        let limit = self.limits.hand_over;
        let waited = self.changed.wait_timeout_while(self.state.lock(), limit, is_closed);
        waited.unwrap_or_else(PoisonError::into_inner).0.commands += 1;
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
        if let Some(start) = state.started.get_mut(&process) {
            start.has_asked = true;
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

    /// Starts a process that is to take over. Returns it with its id.
    pub(super) fn start<S>(&self, start: impl FnOnce() -> (u32, S)) -> (u32, S) {
        let mut state = self.state.lock();
        let (process, started) = start();
        state.started.insert(process, Start::default());
        (process, started)
    }

    /// Notes that a process does not take over.
    pub(super) fn refuse(&self, process: u32, refusal: Refusal) {
        if let Some(start) = self.state.lock().started.get_mut(&process) {
            start.refusal = Some(refusal);
        }
        self.changed.notify_all();
    }

    /// The reason that a process has not taken over, if it was started for that and has ended.
    /// `None`: it has not asked.
    pub(super) fn reason(&self, process: u32) -> Option<Refusal> {
        let is_awaited = |state: &mut State<T>| {
            let start = state.started.get(&process);
            start.is_some_and(|start| start.has_asked && start.refusal.is_none())
        };
        let limit = self.limits.reason;
        let waited = self.changed.wait_timeout_while(self.state.lock(), limit, is_awaited);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.started.remove(&process)?.refusal
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
        let limits = Limits { commands: HOPELESS, hand_over: HOPELESS, reason: HOPELESS };
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
    fn a_process_that_was_started_has_its_reason() {
        with_gate(wait_for_reasons);
    }

    fn wait_for_reasons(gate: &Gate<u32>) {
        let refusal = Refusal { why: "it is early".to_owned(), is_transient: true };
        gate.refuse(5, refusal.clone());
        assert_eq!(gate.reason(5), None, "it was not started");
        assert_eq!(gate.start(|| (6, ())), (6, ()));
        assert_eq!(gate.reason(6), None, "it has not asked");
        gate.start(|| (7, ()));
        gate.begin_hand_over(7).unwrap();
        std::thread::scope(|threads| {
            let reason = spawn_asleep(threads, || gate.reason(7));
            gate.refuse(7, refusal.clone());
            assert_eq!(reason.join().unwrap(), Some(refusal));
        });
    }
}
