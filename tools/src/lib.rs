//! What `xtask`, the lab and the end-to-end tests share, so that none of them depends on another.

pub mod group;
pub mod process;
pub mod workspace;
