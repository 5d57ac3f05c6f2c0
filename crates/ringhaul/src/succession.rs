//! The owner of the exports: this process or, after a takeover, another one.

mod gate;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::command::CommandError;
use gate::Gate;
pub(crate) use gate::Refusal;

/// The method by which a process passes requests on after its hand-over.
pub(crate) const PASS_ON: &str = "takeover.pass-on";

/// The record of which process owns the exports.
#[derive(Default)]
pub(crate) struct Succession {
    state: Mutex<State>,
    changed: Condvar,
    gate: Gate<(PassedOn, Begin)>,
}

#[derive(Default)]
enum State {
    /// The exports belong to this process.
    #[default]
    Ours,
    /// Queues are paused, and another process may take over.
    Open,
    /// The exports belong to another process.
    Theirs(Arc<Heir>),
}

/// Begins a change.
type Begin = Box<dyn FnOnce(Changing) + Send>;

/// A change in progress, which ends when this is dropped. No takeover begins before.
pub(crate) struct Changing(Arc<Succession>);

impl Drop for Changing {
    fn drop(&mut self) {
        self.0.gate.end_change();
    }
}

/// A command in progress, which ends when this is dropped.
pub(crate) struct Running<'a>(&'a Succession);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.gate.end_command();
    }
}

/// A hand-over in progress, which ends when this is dropped. Changes that waited for it begin then,
/// if this process still owns the exports.
pub(crate) struct HandingOver<'a>(&'a Arc<Succession>);

impl Drop for HandingOver<'_> {
    fn drop(&mut self) {
        let succession = self.0;
        let state = succession.lock();
        let asked = succession.gate.end_hand_over();
        drop(state);
        asked.into_iter().for_each(|(_, begin)| begin(Changing(Arc::clone(succession))));
    }
}

/// The process that has taken over.
pub(crate) struct Heir {
    pub(crate) process: u32,
    stream: UnixStream,
}

/// A request that a process passes on after its hand-over, because its sender was not informed that
/// another process is responsible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PassedOn {
    /// End the daemon.
    End,
    /// Read the configuration file again.
    Reload,
}

/// Keeps the exports with this process until dropped.
pub(crate) struct GoesOn<'a>(#[expect(dead_code, reason = "it is held")] MutexGuard<'a, State>);

impl Succession {
    /// Begins a command that changes exports or settings. Waits for a hand-over in progress, which
    /// would be refused otherwise.
    ///
    /// # Errors
    ///
    /// When another process has taken over.
    pub(crate) fn begin_command(&self) -> Result<Running<'_>, CommandError> {
        self.gate.begin_command();
        let running = Running(self);
        match &*self.lock() {
            State::Theirs(heir) => Err(CommandError::HandedOver(heir.process)),
            State::Ours | State::Open => Ok(running),
        }
    }

    /// Begins a hand-over to `process` once no command runs and nothing is being changed, or after
    /// a bounded wait for that.
    ///
    /// # Errors
    ///
    /// When a hand-over is in progress.
    pub(crate) fn begin_hand_over(
        self: &Arc<Self>,
        process: u32,
    ) -> Result<HandingOver<'_>, CommandError> {
        self.gate.begin_hand_over(process)?;
        Ok(HandingOver(self))
    }

    /// Starts a process that is to take over. Returns it with its id.
    pub(crate) fn start<T>(&self, start: impl FnOnce() -> (u32, T)) -> (u32, T) {
        self.gate.start(start)
    }

    /// Notes that a process does not take over.
    pub(crate) fn refuse(&self, process: u32, refusal: Refusal) {
        self.gate.refuse(process, refusal);
    }

    /// The reason why a process that was started to take over has ended without doing so. `None`:
    /// it never asked.
    pub(crate) fn reason(&self, process: u32) -> Option<Refusal> {
        self.gate.reason(process)
    }

    /// Waits while the owner is undecided, and keeps the exports with this process.
    ///
    /// # Errors
    ///
    /// When another process has taken over.
    pub(crate) fn goes_on(&self) -> Result<GoesOn<'_>, CommandError> {
        let is_open = |state: &mut State| matches!(state, State::Open);
        let state = self.changed.wait_while(self.lock(), is_open);
        let state = state.unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::Theirs(heir) => Err(CommandError::HandedOver(heir.process)),
            State::Ours | State::Open => Ok(GoesOn(state)),
        }
    }

    /// Permits a takeover until [`close`](Self::close).
    ///
    /// # Errors
    ///
    /// When it is permitted already, another process has taken over, or something is changing.
    pub(crate) fn open(&self) -> Result<(), CommandError> {
        let mut state = self.lock();
        match &*state {
            State::Ours if self.gate.has_changes() => return Err(CommandError::Changed),
            State::Ours => *state = State::Open,
            State::Open => return Err(CommandError::HandingOver),
            State::Theirs(heir) => return Err(CommandError::HandedOver(heir.process)),
        }
        Ok(())
    }

    /// Ends the permission, unless another process has taken over.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        if matches!(*state, State::Open) {
            *state = State::Ours;
            self.changed.notify_all();
        }
    }

    /// Records that `process`, the peer of `stream`, has taken over. Passes on the requests so far,
    /// then calls `tell`, before any later request is passed on.
    pub(crate) fn leave(&self, process: u32, stream: UnixStream, tell: impl FnOnce(Arc<Heir>)) {
        let heir = Arc::new(Heir { process, stream });
        let mut state = self.lock();
        self.gate.take_asked().iter().for_each(|(what, _)| heir.pass_on(*what));
        // This process may end at any moment after the call.
        tell(Arc::clone(&heir));
        *state = State::Theirs(heir);
        self.changed.notify_all();
    }

    /// Waits at most `wait` for another process to take over, and returns its id.
    pub(crate) fn wait_left(&self, wait: Duration) -> Option<u32> {
        let has_not = |state: &mut State| !matches!(state, State::Theirs(_));
        let waited = self.changed.wait_timeout_while(self.lock(), wait, has_not);
        match &*waited.unwrap_or_else(PoisonError::into_inner).0 {
            State::Theirs(heir) => Some(heir.process),
            State::Ours | State::Open => None,
        }
    }

    /// Calls `here` if this process owns the exports, and otherwise passes the request on. No
    /// takeover happens during the call.
    pub(crate) fn here_or_there(&self, what: PassedOn, here: impl FnOnce()) {
        match &*self.lock() {
            State::Theirs(heir) => heir.pass_on(what),
            State::Ours | State::Open => here(),
        }
    }

    /// Calls `begin` at once, or after a hand-over in progress. If another process owns the exports
    /// by that time, the request is passed on.
    pub(crate) fn change(
        self: &Arc<Self>,
        what: PassedOn,
        begin: impl FnOnce(Changing) + Send + 'static,
    ) {
        let state = self.lock();
        if let State::Theirs(heir) = &*state {
            return heir.pass_on(what);
        }
        let begin: Begin = Box::new(begin);
        let begun = self.gate.begin_change((what, begin));
        drop(state);
        match begun {
            Some((_, begin)) => begin(Changing(Arc::clone(self))),
            None => tracing::info!("what is asked waits until it is certain which process goes on"),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Heir {
    /// Sends a request to the process that has taken over.
    pub(crate) fn pass_on(&self, what: PassedOn) {
        let Self { process, stream } = self;
        let line = json!({ "jsonrpc": "2.0", "method": PASS_ON, "params": what });
        match (&*stream).write_all(format!("{line}\n").as_bytes()) {
            Ok(()) => tracing::info!("passed on to process {process}, which has taken over"),
            Err(error) => tracing::warn!(
                "cannot pass it on to process {process}, which has taken over: {error}; ask that \
                 one"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_waits_learns_who_goes_on() {
        let succession = Arc::new(Succession::default());
        let (asked, begun) = mpsc::channel();
        let ask = |number: u32| {
            let asked = asked.clone();
            let begin = move |changing| asked.send((number, changing)).unwrap();
            succession.change(PassedOn::Reload, begin);
        };
        ask(1);
        let (number, changing) = begun.try_recv().unwrap();
        assert!(number == 1 && matches!(succession.open(), Err(CommandError::Changed)));
        drop(changing);
        let handing_over = succession.begin_hand_over(7).unwrap();
        ask(2);
        succession.open().expect("what is asked between two steps refuses no hand-over");
        assert!(matches!(succession.open(), Err(CommandError::HandingOver)));
        ask(3);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| succession.goes_on().is_ok());
            succession.close();
            assert!(waits.join().unwrap(), "it was given up");
        });
        assert!(begun.try_recv().is_err(), "the hand-over has not ended");
        drop(handing_over);
        for expected in [2, 3] {
            let (number, changing) = begun.try_recv().unwrap();
            assert!(number == expected && matches!(succession.open(), Err(CommandError::Changed)));
            drop(changing);
        }

        let (ours, theirs) = UnixStream::pair().unwrap();
        let handing_over = succession.begin_hand_over(7).unwrap();
        ask(4);
        succession.open().unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| succession.goes_on().is_ok());
            assert_eq!(succession.wait_left(Duration::ZERO), None);
            succession.leave(7, ours, |heir| assert_eq!(heir.process, 7));
            assert!(!waits.join().unwrap(), "another process has taken over");
        });
        drop(handing_over);
        assert_eq!(succession.wait_left(Duration::ZERO), Some(7));
        // Too late to prevent the takeover.
        succession.close();
        assert!(matches!(succession.open(), Err(CommandError::HandedOver(7))));
        ask(5);
        succession.here_or_there(PassedOn::End, || panic!("it is passed on"));
        drop(succession);
        let lines: Vec<String> = BufReader::new(theirs).lines().map(Result::unwrap).collect();
        assert!(begun.try_recv().is_err() && lines.len() == 3, "{lines:?}");
        for (line, what) in lines.iter().zip(["reload", "reload", "end"]) {
            assert!(line.contains(&format!(r#""params":"{what}""#)), "{line}");
        }
    }
}
