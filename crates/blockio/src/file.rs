//! Open files and block devices: their descriptors, their loss of data, their queues.

pub(crate) mod ab_test;
pub(crate) mod device_queue;
pub(crate) mod io_file;
pub(crate) mod op_kind;
pub(crate) mod open_file;
pub(crate) mod pacing;
pub(crate) mod regular_file;
pub(crate) mod write_loss;

pub use regular_file::{check_regular, open_regular};
