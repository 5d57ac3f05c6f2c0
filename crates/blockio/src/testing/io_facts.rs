//! The time, the timers and the remote ops of an IoThread.

use std::time::Instant;

use crate::thread::io::Io;

/// Sets the time that [`Io::recently`] returns until the next round.
pub fn set_recently(io: &Io, now: Instant) {
    io.state.clock.set(now);
}

/// The number of timers of the IoThread.
pub fn timers(io: &Io) -> usize {
    io.reactor.borrow().timers()
}

/// The number of [remote ops](Io::begin_remote_op) that have not ended.
pub fn remote_ops(io: &Io) -> usize {
    io.poll_window.remote_ops()
}
