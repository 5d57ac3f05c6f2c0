//! Closing a removed unit, which may block takeovers for a second.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::control::DiskLock;

/// The time that closing a unit may block takeovers.
const CLOSE_MAX: Duration = Duration::from_secs(1);

/// Calls `close` to close a removed unit. If its requests or its file system take longer than
/// [`CLOSE_MAX`], another process may take over in the meantime. It does not have the unit.
pub(super) fn close_unit(close: impl FnOnce(), lock: &DiskLock<'_>) {
    let (closing, closes) = mpsc::channel::<()>();
    let watch = move || {
        if closes.recv_timeout(CLOSE_MAX) == Err(RecvTimeoutError::Timeout) {
            lock.unblock_take_over();
        }
    };
    std::thread::scope(|scope| {
        // Without the thread, takeovers stay blocked until the unit is closed.
        let watch_close = std::thread::Builder::new().name("ringhaul-unit".into());
        let _ = watch_close.spawn_scoped(scope, watch);
        close();
        drop(closing);
    });
}
