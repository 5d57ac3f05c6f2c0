//! Sockets of exports and of control: their owners, their peers, their locks.

pub mod endpoint;
pub mod peer;
pub(crate) mod permissions;
