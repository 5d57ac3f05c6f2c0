//! Code shared by `xtask`, the lab and the end-to-end tests, so that none of them depends on
//! another.

pub mod group;
pub mod process;
pub mod workspace;
