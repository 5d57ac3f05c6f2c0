//! The watch over ops that take long, and its log lines.

pub(crate) mod rate_limit;
pub(crate) mod stall_log;
pub(crate) mod stalled_ops;
