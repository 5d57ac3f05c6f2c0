//! What end-to-end tests are made of: servers under test, and what attaches to them.
//!
//! [`daemon`] and [`cli`] start Ringhaul, [`server`] starts it or another server for a guest,
//! [`frontend`] is a front-end that can misbehave, [`guest`] boots real guests, [`nbd`] and
//! [`ceph`] are servers of others that have disks, and [`fuse`], [`system`] and [`kernel_trace`]
//! change or watch the machine. A [`journal`] has all changes of a disk, as [`fuse`] and
//! [`nbd_recorder`] note them.

pub mod ceph;
pub mod cli;
pub mod daemon;
pub mod frontend;
pub mod fuse;
pub mod guest;
pub mod journal;
pub mod kernel_trace;
pub mod nbd;
pub mod nbd_recorder;
pub mod random;
pub mod server;
pub mod system;
