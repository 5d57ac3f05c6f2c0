//! The loop of an IoThread: the turn, the API for tasks, busy-polling, fairness.

mod drain;
pub(crate) mod fairness;
pub(crate) mod foreign_op;
pub(crate) mod io;
pub(crate) mod io_state;
pub(crate) mod io_thread;
pub(crate) mod poll_window;
pub(crate) mod reactor;
pub(crate) mod registered;
pub(crate) mod remote;
pub(crate) mod task_set;
pub(crate) mod time_slice;
pub(crate) mod turn;

pub use fairness::{ROUND_BYTES_UNTIL_SERVED, ROUNDS_UNTIL_SERVED};
pub use reactor::{Armed, Source, SourceId};
pub use registered::RegisteredMemory;
