//! vhost-user: the messages of one front-end.
//!
//! The specification is "Vhost-user Protocol" of the QEMU project; names in quotes are its
//! sections. [`message`] is the encoding, `channel` the socket, `connection` the state that a
//! front-end sets up through messages, and [`Session`] puts them together. Nothing here ever waits:
//! one thread can drive the sessions of all exports, and a simulation can drive one by hand.

mod body;
mod call;
mod channel;
mod config;
mod connection;
mod describe;
mod examiner;
mod foreign;
mod hand_over;
mod inflight;
mod load;
pub mod message;
mod outcome;
mod ring;
mod session;
mod setup;
mod shared_memory;
mod undo;

pub use config::PROTOCOL_FEATURES;
pub use examiner::Examiner;
pub(crate) use hand_over::SessionState;
pub use load::Load;
pub use session::{End, Progress, Session};
pub use setup::SessionSetup;
