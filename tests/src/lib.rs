//! What the end-to-end tests share: servers under test and what attaches to them.

pub mod cli;
pub mod daemon;
pub mod frontend;
pub mod fuse;
pub mod guest;
pub mod kernel_trace;
pub mod system;
