//! The parts that every measurement needs: disks, pinned servers, the load generator, counts of
//! system calls, the machine, progress, medians.

pub(crate) mod elsewhere;
pub(crate) mod load;
pub(crate) mod machine;
pub(crate) mod progress;
mod runner;
pub(crate) mod spread;
pub(crate) mod targets;
pub(crate) mod thin;
pub(crate) mod trace;
mod wakeup;

pub(crate) use runner::{Lab, Program, Times, pinning};
