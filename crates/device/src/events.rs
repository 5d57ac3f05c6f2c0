//! Failures and notable events of a device, for a log with limits or for counters.

use std::error::Error;
use std::time::Duration;
use std::{fmt, io};

use virtqueue::{ChainFault, QueueError, Recovery};

use crate::stats::RequestKind;
use crate::unit_address::UnitAddress;

/// Receives failures and notable events of a device. Guests can cause most of them at will, so an
/// implementation that logs them should limit the rate.
///
/// The methods run on IoThreads, and [`call_cut_short`](Self::call_cut_short) on the thread of the
/// [`CallWatch`](crate::CallWatch). They must not wait.
pub trait Events: Send + Sync {
    /// A request was answered with an error status because of `error`.
    fn request_failed(&self, error: &dyn Error);

    /// The time from which a request is slow. `None`: no request is slow. Read when a queue starts.
    fn slow_from(&self) -> Option<Duration> {
        None
    }

    /// A slow request is about to be answered.
    fn request_slow(&self, _request: &SlowRequest) {}

    /// A queue takes no chains until it is stopped and started again.
    fn queue_stopped(&self, queue: u16, fault: &QueueFault);

    /// The kick of a queue cannot be watched: a limit of the kernel is reached, or it is no
    /// eventfd. The queue is checked every few milliseconds instead, until it starts again.
    fn kick_not_watched(&self, queue: u16, error: &dyn Error);

    /// A request queue starts with an inflight region. `recovery` describes the requests that the
    /// previous process left.
    fn queue_recovered(&self, queue: u16, recovery: Recovery);

    /// A queue starts at this entry of its ring, for the first time here, and neither marks
    /// requests in an inflight region nor answers them in order. If the previous process was
    /// killed, requests may be lost.
    fn queue_continued(&self, queue: u16, next_avail: u16);

    /// Requests that an earlier process had taken wait until this logical unit is added. Reported
    /// once for each queue and unit.
    fn requests_held(&self, _unit: UnitAddress) {}

    /// The driver's memory cannot be registered with the engine of a queue's IoThread. The queue
    /// works without.
    fn memory_not_registered(&self, error: &io::Error);

    /// A call did not return and was interrupted. From now on all calls of the device are made in a
    /// way that cannot wait.
    fn call_cut_short(&self);
}

/// A request that took long from the device's sight of it to its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowRequest {
    /// The kind of the request.
    pub kind: RequestKind,
    /// The sector of 512 bytes at which it begins, if it names one.
    pub sector: Option<u64>,
    /// The time that it took.
    pub took: Duration,
    /// The last long wait of the IoThread for limits or for a retry that ended in this time.
    pub waited: Duration,
    /// The last long operation of the kernel for the IoThread that ended in this time.
    pub in_kernel: Duration,
}

/// Formats the request with the phase that took most of the time.
impl fmt::Display for SlowRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, sector, took, waited, in_kernel } = self;
        write!(f, "slow request: {}", kind.name())?;
        if let Some(sector) = sector {
            write!(f, " at sector {sector}")?;
        }
        let (phase, part) = if *waited * 2 >= *took {
            ("a wait for limits or for a retry", waited)
        } else if *in_kernel * 2 >= *took {
            ("an operation of the kernel on the disk", in_kernel)
        } else {
            // Disks of drivers, such as RBD, have no operations of the kernel.
            let phase = "the disk's server or image, other requests before it, or a busy CPU";
            return write!(f, " took {took:.1?}, mainly for {phase}");
        };
        write!(f, " took {took:.1?}, {part:.1?} of it for {phase}")
    }
}

/// Log text for [`Events::queue_continued`].
pub const QUEUE_CONTINUED_TEXT: &str = "the queue begins in the middle of its ring, without an \
                                        inflight region: if the previous process was killed, its \
                                        unanswered requests may be lost, and the guest waits for \
                                        them";

/// Log text for [`Events::kick_not_watched`].
pub const KICK_NOT_WATCHED_TEXT: &str = "the kick of a queue cannot be watched, so the queue is \
                                         checked every few milliseconds until it starts again";

/// Log text for [`Events::requests_held`], to be followed by the unit.
pub const REQUESTS_HELD_TEXT: &str =
    "unanswered requests of an earlier process wait for logical unit";

/// A fault after which a queue takes no chains.
#[derive(Debug, thiserror::Error)]
pub enum QueueFault {
    /// The ring is bad.
    #[error("a queue stops because its ring is bad: {0}")]
    Ring(#[source] QueueError),
    /// A chain has no room for the status of its request.
    #[error("chain {head} has no room for a status; its queue stops")]
    NoStatus {
        /// The head of the chain.
        head: u16,
    },
    /// A chain has a fault, and the place of its status is not memory.
    #[error("chain {head} has no room for a status ({fault}); its queue stops")]
    Chain {
        /// The head of the chain.
        head: u16,
        /// The fault.
        fault: ChainFault,
    },
}

/// Logs every event through `tracing`, under the name of the device. Sets no limit: it is for
/// programs with guests that do not flood the log.
pub struct LogEvents {
    name: String,
}

impl LogEvents {
    /// A logger for the device that the log calls `name`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }
}

impl Events for LogEvents {
    fn request_failed(&self, error: &dyn Error) {
        tracing::warn!(device = self.name, "a request failed: {error}");
    }

    fn queue_stopped(&self, queue: u16, fault: &QueueFault) {
        tracing::error!(device = self.name, queue, "{fault}");
    }

    fn kick_not_watched(&self, queue: u16, error: &dyn Error) {
        tracing::warn!(device = self.name, queue, "{KICK_NOT_WATCHED_TEXT}: {error}");
    }

    fn queue_recovered(&self, queue: u16, recovery: Recovery) {
        if let Some(text) = recovery.describe() {
            tracing::info!(device = self.name, queue, "{text}");
        }
    }

    fn queue_continued(&self, queue: u16, next_avail: u16) {
        tracing::warn!(device = self.name, queue, next_avail, "{QUEUE_CONTINUED_TEXT}");
    }

    fn requests_held(&self, unit: UnitAddress) {
        tracing::warn!(
            device = self.name,
            "{REQUESTS_HELD_TEXT} {unit}, which does not exist; add it"
        );
    }

    fn memory_not_registered(&self, error: &io::Error) {
        tracing::warn!(device = self.name, "cannot register the guest's memory: {error}");
    }

    fn call_cut_short(&self) {
        tracing::warn!(device = self.name, "a call did not return and was interrupted");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_request_names_the_phase_that_took_the_time() {
        let ms = Duration::from_millis;
        let text = |waited, in_kernel, sector| {
            let (kind, took) = (RequestKind::Read, ms(900));
            let (waited, in_kernel) = (ms(waited), ms(in_kernel));
            SlowRequest { kind, sector, took, waited, in_kernel }.to_string()
        };
        let wait = "slow request: a read at sector 8 took 900.0ms, 700.0ms of it for a wait";
        assert!(text(700, 900, Some(8)).starts_with(wait), "{}", text(700, 900, Some(8)));
        assert!(text(400, 500, Some(8)).contains("500.0ms of it for an operation of the kernel"));
        let text = text(400, 0, None);
        assert!(text.contains("a read took 900.0ms, mainly for the disk's server"), "{text}");
    }
}
