//! The keeper of a session's state, for the process that follows a killed one.

use std::io;

use super::passed_fds::FdSink;
use super::session_state::SessionState;

/// Keeps the state of a session, and the descriptors in it, outside of this process.
///
/// A session keeps its state before it carries out a message, before it sends the answer, and when
/// it has sent it. A process that is killed in between leaves a state with which the next one
/// repeats the message, or sends the answer.
pub trait StateKeeper: FdSink + Send {
    /// Begins a state: its descriptors follow.
    fn begin(&mut self);

    /// Keeps the state, or an error: one of its descriptors was not kept. Descriptors that were not
    /// put since [`begin`](Self::begin) belong to no state any longer.
    fn keep(&mut self, state: io::Result<SessionState>);

    /// Notes that the front-end has the answer in the last state.
    fn note_sent(&mut self);
}
