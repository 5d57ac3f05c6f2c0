//! Counters of a run: one writer each, merged at the end of the run.

#![forbid(unsafe_code)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use iomem::fits;

use crate::pattern::{Io, Op};

/// I/O of one kind that completed without error in the measured window.
#[derive(Debug, Clone)]
pub(crate) struct OpStats {
    pub(crate) ios: u64,
    pub(crate) bytes: u64,
    /// In nanoseconds.
    pub(crate) latency: Histogram<u64>,
}

impl OpStats {
    /// Longer latencies are counted as this one.
    const LONGEST: Duration = Duration::from_secs(60 * 60);
    /// Significant decimal digits of latencies.
    const DIGITS: u8 = 3;

    pub(crate) fn new() -> Self {
        let longest = fits(Self::LONGEST.as_nanos(), "the longest latency in nanoseconds");
        let latency = Histogram::new_with_bounds(1, longest, Self::DIGITS)
            .expect("the bounds are constants that the histogram takes");
        Self { ios: 0, bytes: 0, latency }
    }

    pub(crate) fn record(&mut self, bytes: u32, latency_ns: u64) {
        self.ios += 1;
        self.bytes += u64::from(bytes);
        self.latency.saturating_record(latency_ns);
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        // Only different bounds would make this fail, and all histograms have the same.
        let _ = self.latency.add(&other.latency);
    }
}

/// The counters of one job.
#[derive(Debug, Clone)]
pub(crate) struct Counters {
    /// Indexed by [`Op::index`], in the measured window.
    pub(crate) ops: [OpStats; Op::ALL.len()],
    /// In the measured window.
    pub(crate) kicks: u64,
    /// In the measured window.
    pub(crate) calls: u64,
    /// Indexed by [`Op::index`], in the whole run.
    pub(crate) errors: [u64; Op::ALL.len()],
    /// Blocks compared, in the whole run.
    pub(crate) verified: u64,
    /// Reads with an unexpected block, in the whole run.
    pub(crate) mismatches: u64,
}

impl Counters {
    pub(crate) fn new() -> Self {
        Self {
            ops: std::array::from_fn(|_| OpStats::new()),
            kicks: 0,
            calls: 0,
            errors: [0; Op::ALL.len()],
            verified: 0,
            mismatches: 0,
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.ops.iter_mut().zip(&other.ops) {
            mine.merge(theirs);
        }
        for (mine, theirs) in self.errors.iter_mut().zip(&other.errors) {
            *mine += theirs;
        }
        self.kicks += other.kicks;
        self.calls += other.calls;
        self.verified += other.verified;
        self.mismatches += other.mismatches;
    }
}

/// The progress of a job in the current phase, for the display. Cache lines of its own keep the
/// display from slowing the job down.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct JobProgress {
    ios: AtomicU64,
    bytes: AtomicU64,
    in_flight: AtomicU64,
}

impl JobProgress {
    /// Sets the totals; only the job does this.
    pub(crate) fn publish(&self, (ios, bytes): (u64, u64)) {
        self.ios.store(ios, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// Sets the number of requests in flight after the last one was made; only the job does this.
    pub(crate) fn publish_left(&self, in_flight: u64) {
        self.in_flight.store(in_flight, Ordering::Relaxed);
    }

    /// Returns the last published number of requests in flight of a stopping job; 0 before.
    pub(crate) fn left(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns I/Os and bytes.
    pub(crate) fn read(&self) -> (u64, u64) {
        (self.ios.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

/// Messages about failed I/O and wrong data, on their way to standard error.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    waiting: Mutex<Vec<String>>,
    seen: AtomicU64,
}

impl Notices {
    /// The number of messages to show; the rest are only counted.
    const SHOWN: u64 = 8;

    /// Adds a message, made only if it will be shown.
    pub(crate) fn add(&self, message: impl FnOnce() -> String) {
        if self.seen.fetch_add(1, Ordering::Relaxed) < Self::SHOWN {
            // A panic elsewhere leaves the messages intact.
            let mut waiting = self.waiting.lock().unwrap_or_else(|poison| poison.into_inner());
            waiting.push(message());
        }
    }

    /// Takes the messages that arrived since the last call.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.waiting.lock().unwrap_or_else(|poison| poison.into_inner()))
    }
}

/// Describes a failed I/O, with the description of its `error`.
pub(crate) fn describe_failure(io: &Io, unit: Option<String>, error: &str) -> String {
    let unit = unit.map(|unit| format!(" of unit {unit}")).unwrap_or_default();
    match io.op {
        Op::Flush => format!("flush{unit} failed: {error}"),
        op => {
            let (name, len, offset) = (op.name(), io.len, io.offset);
            format!("{name} of {len} bytes at offset {offset}{unit} failed: {error}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_match_the_recorded_latencies() {
        let mut stats = OpStats::new();
        for latency in 1..=1000 {
            stats.record(512, latency * 1000);
        }
        let mut other = OpStats::new();
        other.record(512, u64::MAX);
        stats.merge(&other);
        let at = |percent| stats.latency.value_at_percentile(percent) as f64;
        assert!((at(50.0) / 500_500.0 - 1.0).abs() < 0.01, "{}", at(50.0));
        assert!((at(99.0) / 990_000.0 - 1.0).abs() < 0.01, "{}", at(99.0));
        assert_eq!((stats.ios, stats.bytes), (1001, 1001 * 512));
        assert!(at(100.0) >= 3.6e12, "a latency out of bounds must count as the longest");
    }

    #[test]
    fn only_the_first_notices_are_kept() {
        let notices = Notices::default();
        for index in 0..20 {
            notices.add(|| index.to_string());
        }
        assert_eq!(notices.take(), (0..8).map(|i| i.to_string()).collect::<Vec<_>>());
        assert!(notices.take().is_empty());
    }

    #[test]
    fn a_failure_names_its_offset() {
        let io = Io { op: Op::Read, unit: 0, offset: 4096, len: 512 };
        let text = describe_failure(&io, None, "status 1");
        assert!(text.contains("read of 512 bytes at offset 4096 failed: status 1"), "{text}");
        let text = describe_failure(&io, Some("0:3".to_owned()), "BUSY");
        assert!(text.contains("at offset 4096 of unit 0:3 failed: BUSY"), "{text}");
    }
}
