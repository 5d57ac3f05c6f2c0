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
mod inflight;
mod load;
pub mod message;
mod outcome;
mod peer_fds;
mod ring;
mod session;
mod session_state;
mod setup;
mod shared_memory;
mod undo;

pub use config::PROTOCOL_FEATURES;
pub use examiner::Examiner;
pub use load::Load;
pub use session::{End, Session, SessionProgress};
pub(crate) use session_state::SessionState;
pub use setup::SessionSetup;
