//! Commands and hand-overs, which wait for each other.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::command::CommandError;

/// The longest wait of a hand-over for commands that run. Some wait for a disk or a guest.
const COMMANDS_MAX: Duration = Duration::from_secs(2);

/// The longest wait of a command for a hand-over. A process that takes over may hang.
const HAND_OVER_MAX: Duration = Duration::from_secs(30);

/// The longest wait for the reason of a process that has ended.
const REASON_MAX: Duration = Duration::from_secs(2);

/// The gate between commands and hand-overs.
#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The number of commands that run.
    commands: usize,
    /// A hand-over runs.
    is_closed: bool,
    /// Processes that were started to take over, with the refusals of their takeovers.
    started: BTreeMap<u32, Start>,
}

/// A process that was started to take over.
#[derive(Default)]
struct Start {
    /// It has asked.
    has_asked: bool,
    refusal: Option<Refusal>,
}

/// The reason why a process has not taken over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) why: String,
    /// It may take over in a moment.
    pub(crate) is_of_the_moment: bool,
}

/// A command that runs until this is dropped.
pub(crate) struct Running<'a>(&'a Gate);

/// A hand-over that runs until this is dropped.
pub(crate) struct HandingOver<'a>(&'a Gate);

impl Gate {
    /// Begins a command, when no hand-over runs, or after a long wait for one.
    pub(super) fn begin_command(&self) -> Running<'_> {
        let is_closed = |state: &mut State| state.is_closed;
        let waited = self.changed.wait_timeout_while(self.lock(), HAND_OVER_MAX, is_closed);
        waited.unwrap_or_else(PoisonError::into_inner).0.commands += 1;
        Running(self)
    }

    /// Begins a hand-over by this process, when no command runs, or after a wait for those.
    ///
    /// # Errors
    ///
    /// When a hand-over runs.
    pub(super) fn begin_hand_over(&self, process: u32) -> Result<HandingOver<'_>, CommandError> {
        let mut state = self.lock();
        if let Some(start) = state.started.get_mut(&process) {
            start.has_asked = true;
        }
        if std::mem::replace(&mut state.is_closed, true) {
            return Err(CommandError::HandingOver);
        }
        let has_commands = |state: &mut State| state.commands > 0;
        let waited = self.changed.wait_timeout_while(state, COMMANDS_MAX, has_commands);
        drop(waited);
        Ok(HandingOver(self))
    }

    /// Starts a process that is to take over. Returns it with its id.
    pub(super) fn start<T>(&self, start: impl FnOnce() -> (u32, T)) -> (u32, T) {
        let mut state = self.lock();
        let (process, started) = start();
        state.started.insert(process, Start::default());
        (process, started)
    }

    /// Notes that a process does not take over.
    pub(super) fn refuse(&self, process: u32, refusal: Refusal) {
        if let Some(start) = self.lock().started.get_mut(&process) {
            start.refusal = Some(refusal);
        }
        self.changed.notify_all();
    }

    /// The reason why a process has not taken over that was started for it and has ended. `None`:
    /// it has not asked.
    pub(super) fn reason(&self, process: u32) -> Option<Refusal> {
        let is_awaited = |state: &mut State| {
            let start = state.started.get(&process);
            start.is_some_and(|start| start.has_asked && start.refusal.is_none())
        };
        let waited = self.changed.wait_timeout_while(self.lock(), REASON_MAX, is_awaited);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.started.remove(&process)?.refusal
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().commands -= 1;
        self.0.changed.notify_all();
    }
}

impl Drop for HandingOver<'_> {
    fn drop(&mut self) {
        self.0.lock().is_closed = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn commands_and_hand_overs_wait_for_each_other() {
        let gate = Gate::default();
        let running = gate.begin_command();
        std::thread::scope(|threads| {
            let (begun, begins) = mpsc::channel();
            let hand_over = threads.spawn({
                let (gate, begun) = (&gate, begun.clone());
                move || {
                    let handing_over = gate.begin_hand_over(7).unwrap();
                    begun.send("hand-over").unwrap();
                    handing_over
                }
            });
            while !gate.lock().is_closed {
                std::thread::yield_now();
            }
            assert!(matches!(gate.begin_hand_over(8), Err(CommandError::HandingOver)));
            threads.spawn({
                let gate = &gate;
                move || {
                    let _running = gate.begin_command();
                    begun.send("command").unwrap();
                }
            });
            assert!(begins.try_recv().is_err(), "a command runs");
            drop(running);
            let handing_over = hand_over.join().unwrap();
            assert_eq!(begins.recv().unwrap(), "hand-over");
            assert!(begins.try_recv().is_err(), "a hand-over runs");
            drop(handing_over);
            assert_eq!(begins.recv().unwrap(), "command");
        });
    }

    #[test]
    fn a_process_that_was_started_has_its_reason() {
        let gate = Gate::default();
        let refusal = Refusal { why: "it is early".to_owned(), is_of_the_moment: true };
        gate.refuse(5, refusal.clone());
        assert_eq!(gate.reason(5), None, "it was not started");
        assert_eq!(gate.start(|| (6, ())), (6, ()));
        assert_eq!(gate.reason(6), None, "it has not asked");
        gate.start(|| (7, ()));
        drop(gate.begin_hand_over(7).unwrap());
        std::thread::scope(|threads| {
            let reason = threads.spawn(|| gate.reason(7));
            gate.refuse(7, refusal.clone());
            assert_eq!(reason.join().unwrap(), Some(refusal));
        });
    }
}
