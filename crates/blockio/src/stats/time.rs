//! Times as numbers.

use std::time::Duration;

/// Nanoseconds of `duration`, saturating.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
