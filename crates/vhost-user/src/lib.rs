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
mod details;
mod examiner;
mod inflight;
mod load;
pub mod message;
mod outcome;
mod passed_fds;
mod peer_fds;
mod ring;
mod session;
mod session_state;
mod setup;
mod shared_memory;
mod undo;

pub use config::PROTOCOL_FEATURES;
pub use details::{MemoryDetails, QueueDetails, QueueRole, QueueState, SessionDetails};
pub use examiner::Examiner;
pub use load::Load;
pub use passed_fds::{FdIndex, PassedFds};
pub use session::{End, Session, SessionProgress};
pub use session_state::SessionState;
pub use setup::SessionSetup;
