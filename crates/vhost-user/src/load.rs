//! The unanswered requests of a front-end, and their description as text.

use std::fmt::{self, Display, Formatter};

use device::{QueueView, SMALL_REQUEST_BYTES};

/// The most queues that a text names.
const NAMED_MAX: usize = 4;

/// The requests that a session has taken and not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// Queues with such requests, in order.
    pub(super) queues: Vec<QueueLoad>,
    /// True if IoThreads have seen all their commands.
    pub has_taken_commands: bool,
}

/// Unanswered requests of one queue, as of its last run.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueLoad {
    pub(super) index: u16,
    pub(super) requests: u32,
    /// Bytes of the large requests.
    large_bytes: u64,
}

impl QueueLoad {
    pub(super) fn from_view(watch: &QueueView) -> Self {
        Self { index: 0, requests: watch.requests(), large_bytes: watch.large_bytes() }
    }
}

impl Load {
    /// Collects the loads of a device's rings. The flag is true if the IoThread of the ring has
    /// seen all its commands.
    pub(super) fn from_rings(rings: impl Iterator<Item = (QueueLoad, bool)>) -> Self {
        let (mut queues, mut has_taken_commands) = (Vec::new(), true);
        for (index, (queue, has_taken)) in (0..).zip(rings) {
            has_taken_commands &= has_taken;
            if queue.requests > 0 {
                queues.push(QueueLoad { index, ..queue });
            }
        }
        Self { queues, has_taken_commands }
    }

    /// The number of requests.
    pub fn requests(&self) -> u32 {
        self.queues.iter().map(|queue| queue.requests).sum()
    }

    /// The requests of the queue with the most requests.
    pub fn deepest(&self) -> u32 {
        self.queues.iter().map(|queue| queue.requests).max().unwrap_or(0)
    }
}

impl Display for Load {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (named, others) = self.queues.split_at(NAMED_MAX.min(self.queues.len()));
        for (number, queue) in named.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            write!(f, "{separator}{queue}")?;
        }
        if !others.is_empty() {
            let requests: u32 = others.iter().map(|queue| queue.requests).sum();
            let bytes: u64 = others.iter().map(|queue| queue.large_bytes).sum();
            let (number, noun) = (others.len(), if others.len() == 1 { "queue" } else { "queues" });
            write!(f, ", {number} more {noun}: {}", Amount { requests, bytes })?;
        }
        if named.is_empty() {
            write!(f, "all requests are answered")?;
        }
        Ok(())
    }
}

impl Display for QueueLoad {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { index, requests, large_bytes: bytes } = *self;
        write!(f, "queue {index}: {}", Amount { requests, bytes })
    }
}

/// Requests, with the bytes of the large ones.
struct Amount {
    requests: u32,
    bytes: u64,
}

impl Display for Amount {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (small, mib) = (SMALL_REQUEST_BYTES >> 10, self.bytes.div_ceil(1 << 20));
        match self.requests {
            1 => write!(f, "1 request is not answered")?,
            count => write!(f, "{count} requests are not answered")?,
        }
        match (self.bytes, self.requests) {
            (0, 1) => write!(f, ", of at most {small} KiB"),
            (0, _) => write!(f, ", each of at most {small} KiB"),
            (_, 1) => write!(f, ", of {mib} MiB"),
            (_, _) => write!(f, ", {mib} MiB in those above {small} KiB"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(rings: &[(u32, u64)]) -> Load {
        let ring = |(requests, large_bytes)| QueueLoad { index: 0, requests, large_bytes };
        Load::from_rings(rings.iter().map(|ring_load| (ring(*ring_load), true)))
    }

    #[test]
    fn a_text_has_queues_requests_and_bytes() {
        const MIB: u64 = 1 << 20;
        for (rings, expected) in [
            (&[(0, 0)][..], "all requests are answered"),
            (&[(1, 0)], "queue 0: 1 request is not answered, of at most 128 KiB"),
            (&[(0, 0), (1, 2016 * MIB)], "queue 1: 1 request is not answered, of 2016 MiB"),
            (
                &[(3, 0), (0, 0), (30, 63 * MIB + 1)],
                "queue 0: 3 requests are not answered, each of at most 128 KiB, queue 2: 30 \
                 requests are not answered, 64 MiB in those above 128 KiB",
            ),
        ] {
            assert_eq!(load(rings).to_string(), expected);
        }
        let some = load(&[(3, 0), (0, 0), (30, 0), (4, 0)]);
        assert_eq!((some.requests(), some.deepest(), load(&[]).deepest()), (37, 30, 0));
        let many = load(&[(1, 0); 9]);
        let text = many.to_string();
        assert_eq!((many.requests(), text.matches("queue ").count()), (9, 4), "{text}");
        let end = ", 5 more queues: 5 requests are not answered, each of at most 128 KiB";
        assert!(text.ends_with(end), "{text}");
        let has_taken_commands = |has_taken: [bool; 2]| {
            Load::from_rings(has_taken.map(|it| (QueueLoad::default(), it)).into_iter())
        };
        assert!(
            has_taken_commands([true; 2]).has_taken_commands
                && !has_taken_commands([true, false]).has_taken_commands
                && !has_taken_commands([false, true]).has_taken_commands
        );
    }
}
