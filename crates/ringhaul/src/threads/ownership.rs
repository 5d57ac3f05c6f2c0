//! The owner of the exports: this process or, after a takeover, its successor.

mod gate;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, MutexGuard};
use std::time::Duration;

use blockio::executor::Lock;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::spec::command::CommandError;
use gate::Gate;
pub(crate) use gate::Refusal;

/// The method by which a process passes requests on after its hand-over.
pub(crate) const PASS_ON: &str = "takeover.pass-on";

/// The record of which process owns the exports.
#[derive(Default)]
pub(crate) struct Ownership {
    state: Lock<Owner>,
    changed: Condvar,
    gate: Gate<(PassedOn, Begin)>,
}

#[derive(Default)]
enum Owner {
    /// The exports belong to this process.
    #[default]
    Ours,
    /// Queues are paused, and another process may take over.
    Undecided,
    /// The exports belong to another process.
    Theirs(Arc<Successor>),
}

/// Begins a change.
type Begin = Box<dyn FnOnce(ChangeGuard) + Send>;

/// A change in progress, which ends when this is dropped. No takeover begins before.
pub(crate) struct ChangeGuard(Arc<Ownership>);

impl Drop for ChangeGuard {
    fn drop(&mut self) {
        self.0.gate.end_change();
    }
}

/// A command in progress, which ends when this is dropped.
pub(crate) struct Running<'a>(&'a Ownership);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.gate.end_command();
    }
}

/// A hand-over in progress, which ends when this is dropped. Changes that waited for it begin then,
/// if this process still owns the exports.
pub(crate) struct HandingOver<'a>(&'a Arc<Ownership>);

impl Drop for HandingOver<'_> {
    fn drop(&mut self) {
        let ownership = self.0;
        let state = ownership.state.lock();
        let queued = ownership.gate.end_hand_over();
        drop(state);
        queued.into_iter().for_each(|(_, begin)| begin(ChangeGuard(Arc::clone(ownership))));
    }
}

/// The process that has taken over.
pub(crate) struct Successor {
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
pub(crate) struct OursGuard<'a>(#[expect(dead_code, reason = "it is held")] MutexGuard<'a, Owner>);

impl Ownership {
    /// Begins a command that changes exports or settings. Waits for a hand-over in progress, which
    /// would be refused otherwise.
    ///
    /// # Errors
    ///
    /// When another process has taken over.
    pub(crate) fn begin_command(&self) -> Result<Running<'_>, CommandError> {
        self.gate.begin_command();
        let running = Running(self);
        match &*self.state.lock() {
            Owner::Theirs(successor) => Err(CommandError::HandedOver(successor.process)),
            Owner::Ours | Owner::Undecided => Ok(running),
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

    /// Notes that a process does not take over.
    pub(crate) fn refuse(&self, process: u32, refusal: Refusal) {
        self.gate.refuse(process, refusal);
    }

    /// The refusal of a process that has asked to take over, or `None` while it may still take
    /// over. `None` around that: it has not asked.
    pub(crate) fn asked(&self, process: u32) -> Option<Option<Refusal>> {
        self.gate.asked(process)
    }

    /// Waits while the owner is undecided, and keeps the exports with this process.
    ///
    /// # Errors
    ///
    /// When another process has taken over.
    pub(crate) fn await_ours(&self) -> Result<OursGuard<'_>, CommandError> {
        let is_undecided = |state: &mut Owner| matches!(state, Owner::Undecided);
        let state = self.state.wait_while(&self.changed, is_undecided);
        match &*state {
            Owner::Theirs(successor) => Err(CommandError::HandedOver(successor.process)),
            Owner::Ours | Owner::Undecided => Ok(OursGuard(state)),
        }
    }

    /// Permits a takeover until [`close`](Self::close).
    ///
    /// # Errors
    ///
    /// When it is permitted already, another process has taken over, or something is changing.
    pub(crate) fn open(&self) -> Result<(), CommandError> {
        let mut state = self.state.lock();
        match &*state {
            Owner::Ours if self.gate.has_changes() => return Err(CommandError::Changed),
            Owner::Ours => *state = Owner::Undecided,
            Owner::Undecided => return Err(CommandError::HandingOver),
            Owner::Theirs(successor) => return Err(CommandError::HandedOver(successor.process)),
        }
        Ok(())
    }

    /// Ends the permission, unless another process has taken over.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        if matches!(*state, Owner::Undecided) {
            *state = Owner::Ours;
            self.changed.notify_all();
        }
    }

    /// Records that `process`, the peer of `stream`, has taken over. Passes on the requests so far,
    /// then calls `on_transferred`, before any later request is passed on.
    pub(crate) fn transfer(
        &self,
        process: u32,
        stream: UnixStream,
        on_transferred: impl FnOnce(Arc<Successor>),
    ) {
        let successor = Arc::new(Successor { process, stream });
        let mut state = self.state.lock();
        self.gate.take_queued().iter().for_each(|(what, _)| successor.pass_on(*what));
        // This process may end at any moment after the call.
        on_transferred(Arc::clone(&successor));
        *state = Owner::Theirs(successor);
        self.changed.notify_all();
    }

    /// Waits at most `wait` for another process to take over, and returns its id.
    pub(crate) fn wait_transferred(&self, wait: Duration) -> Option<u32> {
        let has_not = |state: &mut Owner| !matches!(state, Owner::Theirs(_));
        match &*self.state.wait_timeout_while(&self.changed, wait, has_not) {
            Owner::Theirs(successor) => Some(successor.process),
            Owner::Ours | Owner::Undecided => None,
        }
    }

    /// Calls `run` if this process owns the exports, and otherwise passes the request on. No
    /// takeover happens during the call.
    pub(crate) fn run_or_pass_on(&self, what: PassedOn, run: impl FnOnce()) {
        match &*self.state.lock() {
            Owner::Theirs(successor) => successor.pass_on(what),
            Owner::Ours | Owner::Undecided => run(),
        }
    }

    /// Calls `begin` at once, or after a hand-over in progress. If another process owns the exports
    /// by that time, the request is passed on.
    pub(crate) fn change(
        self: &Arc<Self>,
        what: PassedOn,
        begin: impl FnOnce(ChangeGuard) + Send + 'static,
    ) {
        let state = self.state.lock();
        if let Owner::Theirs(successor) = &*state {
            return successor.pass_on(what);
        }
        let begin: Begin = Box::new(begin);
        let begun = self.gate.begin_change((what, begin));
        drop(state);
        match begun {
            Some((_, begin)) => begin(ChangeGuard(Arc::clone(self))),
            None => tracing::info!("a request waits for the result of a takeover"),
        }
    }
}

impl Successor {
    /// Sends a request to the process that has taken over.
    pub(crate) fn pass_on(&self, what: PassedOn) {
        let Self { process, stream } = self;
        let line = json!({ "jsonrpc": "2.0", "method": PASS_ON, "params": what });
        match (&*stream).write_all(format!("{line}\n").as_bytes()) {
            Ok(()) => {
                tracing::info!("passed on a request to process {process}, which has taken over")
            }
            Err(error) => tracing::warn!(
                "cannot pass on a request to process {process}, which has taken over: {error}; \
                 send it to that process"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::sync::mpsc;

    use super::*;
    use crate::testing::spawn_asleep;

    #[test]
    fn waiting_requests_learn_which_process_resumes() {
        let ownership = Arc::new(Ownership::default());
        let (asked, begun) = mpsc::channel();
        let ask = |number: u32| {
            let asked = asked.clone();
            let begin = move |changing| asked.send((number, changing)).unwrap();
            ownership.change(PassedOn::Reload, begin);
        };
        ask(1);
        let (number, changing) = begun.try_recv().unwrap();
        assert!(number == 1 && matches!(ownership.open(), Err(CommandError::Changed)));
        drop(changing);
        let handing_over = ownership.begin_hand_over(7).unwrap();
        ask(2);
        ownership.open().expect("what is asked between two steps refuses no hand-over");
        assert!(matches!(ownership.open(), Err(CommandError::HandingOver)));
        ask(3);
        std::thread::scope(|scope| {
            let waits = spawn_asleep(scope, || ownership.await_ours().is_ok());
            ownership.close();
            assert!(waits.join().unwrap(), "it was given up");
        });
        assert!(begun.try_recv().is_err(), "the hand-over has not ended");
        drop(handing_over);
        for expected in [2, 3] {
            let (number, changing) = begun.try_recv().unwrap();
            assert!(number == expected && matches!(ownership.open(), Err(CommandError::Changed)));
            drop(changing);
        }

        let (ours, theirs) = UnixStream::pair().unwrap();
        let handing_over = ownership.begin_hand_over(7).unwrap();
        ask(4);
        ownership.open().unwrap();
        std::thread::scope(|scope| {
            let waits = spawn_asleep(scope, || ownership.await_ours().is_ok());
            assert_eq!(ownership.wait_transferred(Duration::ZERO), None);
            ownership.transfer(7, ours, |successor| assert_eq!(successor.process, 7));
            assert!(!waits.join().unwrap(), "another process has taken over");
        });
        drop(handing_over);
        assert_eq!(ownership.wait_transferred(Duration::ZERO), Some(7));
        // Too late to prevent the takeover.
        ownership.close();
        assert!(matches!(ownership.open(), Err(CommandError::HandedOver(7))));
        assert!(matches!(ownership.begin_command(), Err(CommandError::HandedOver(7))));
        ask(5);
        ownership.run_or_pass_on(PassedOn::End, || panic!("it is passed on"));
        // A begun change would keep the stream open.
        assert!(begun.try_recv().is_err(), "the other process was to carry it out");
        drop(ownership);
        let lines: Vec<String> = BufReader::new(theirs).lines().map(Result::unwrap).collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        for (line, what) in lines.iter().zip(["reload", "reload", "end"]) {
            assert!(line.contains(&format!(r#""params":"{what}""#)), "{line}");
        }
    }
}
