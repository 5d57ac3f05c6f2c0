//! Detects front-ends that start queues and share no memory. The guest then waits for its disk, and
//! the front-end does not report it.

use std::time::{Duration, Instant};

use crate::spec::status::HOW_TO_SHARE_MEMORY;

/// The time within which a front-end may still share memory after it has started a queue.
const PATIENCE: Duration = Duration::from_secs(5);

/// Watches the current front-end.
#[derive(Debug, Default)]
pub(super) struct MemoryWatch {
    /// The time at which a queue was first seen to wait for memory.
    since: Option<Instant>,
    is_logged: bool,
}

impl MemoryWatch {
    /// Returns true if a queue waits for memory.
    pub(super) fn is_lacking(&self) -> bool {
        self.since.is_some()
    }

    /// Returns the time of the next check that is due without an event.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.since.filter(|_| !self.is_logged).map(|since| since + PATIENCE)
    }

    /// Records that `queue` waits for memory, or that no queue does. Returns a message for the log,
    /// once for each front-end.
    pub(super) fn update(&mut self, queue: Option<usize>, now: Instant) -> Option<String> {
        let Some(queue) = queue else {
            self.since = None;
            return None;
        };
        let since = *self.since.get_or_insert(now);
        if self.is_logged || now < since + PATIENCE {
            return None;
        }
        self.is_logged = true;
        Some(format!(
            "the front-end has started queue {queue} but shares no memory, so the guest waits for \
             its disk; {HOW_TO_SHARE_MEMORY}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_front_end_has_some_seconds_to_share_memory() {
        let mut watch = MemoryWatch::default();
        let start = Instant::now();
        assert_eq!((watch.update(None, start), watch.deadline()), (None, None));
        assert_eq!(watch.update(Some(1), start), None);
        assert!(watch.is_lacking());
        assert_eq!(watch.deadline(), Some(start + PATIENCE));
        // Memory came, and went.
        assert_eq!(watch.update(None, start + PATIENCE), None);
        assert!(!watch.is_lacking() && watch.deadline().is_none());
        let start = start + 2 * PATIENCE;
        assert_eq!(watch.update(Some(1), start), None);
        let message = watch.update(Some(1), start + PATIENCE).unwrap();
        for part in ["queue 1", "share=on", "<memoryBacking>"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(watch.update(Some(1), start + 2 * PATIENCE), None, "once");
        assert!(watch.is_lacking() && watch.deadline().is_none());
    }
}
