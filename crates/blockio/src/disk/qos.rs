//! Limits of speed, error policies, and requests that wait.

pub(crate) mod bulk_turns;
pub(crate) mod error_policy;
pub(crate) mod limits;
pub(crate) mod shared;
pub(crate) mod throttle;
