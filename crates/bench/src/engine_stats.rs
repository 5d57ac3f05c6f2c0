//! The engine's activity in the measured window, and its report.

#![forbid(unsafe_code)]

use blockio::stats::{Distribution, SIZE_PERCENTILES, Stats};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::pattern::Op;

/// The name of a system call, and its counter.
type SystemCall = (&'static str, fn(&Stats) -> u64);

/// The system calls that are counted.
const SYSTEM_CALLS: [SystemCall; 5] = [
    ("io_submit", |stats| stats.syscalls.io_submit.get()),
    ("io_getevents", |stats| stats.syscalls.io_getevents.get()),
    ("io_uring_enter", |stats| stats.syscalls.io_uring_enter.get()),
    ("epoll_wait", |stats| stats.syscalls.epoll_wait.get()),
    ("eventfd_write", |stats| stats.syscalls.eventfd_write.get()),
];

/// The counters of IoThreads over the measured window.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineCounters {
    /// Nanoseconds from submit to harvest, by [`Op::index`].
    pub(crate) latency_ns: [Distribution; Op::ALL.len()],
    /// Completions found by one harvest.
    harvested_at_once: Distribution,
    /// Ops handed to the kernel by one submit.
    submitted_at_once: Distribution,
    /// Completions found by polling.
    polled: u64,
    system_calls: [u64; SYSTEM_CALLS.len()],
}

/// The counters of an IoThread at one moment.
#[derive(Debug)]
pub(crate) struct EngineSample(EngineCounters);

impl EngineSample {
    pub(crate) fn take(stats: &Stats) -> Self {
        let latencies = [&stats.read, &stats.write, &stats.flush];
        Self(EngineCounters {
            latency_ns: latencies.map(|op| op.latency_ns.values()),
            harvested_at_once: stats.harvested_at_once.values(),
            submitted_at_once: stats.submitted_at_once.values(),
            polled: stats.polled.get(),
            system_calls: SYSTEM_CALLS.map(|(_, count)| count(stats)),
        })
    }

    /// Returns the difference since `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> EngineCounters {
        let (now, then) = (&self.0, &earlier.0);
        let index = |i: usize| now.latency_ns[i].since(&then.latency_ns[i]);
        EngineCounters {
            latency_ns: std::array::from_fn(index),
            harvested_at_once: now.harvested_at_once.since(&then.harvested_at_once),
            submitted_at_once: now.submitted_at_once.since(&then.submitted_at_once),
            polled: now.polled.saturating_sub(then.polled),
            system_calls: std::array::from_fn(|i| {
                now.system_calls[i].saturating_sub(then.system_calls[i])
            }),
        }
    }
}

impl EngineCounters {
    /// Adds the figures of another IoThread.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.latency_ns.iter_mut().zip(&other.latency_ns) {
            mine.add(theirs);
        }
        self.harvested_at_once.add(&other.harvested_at_once);
        self.submitted_at_once.add(&other.submitted_at_once);
        self.polled += other.polled;
        for (mine, theirs) in self.system_calls.iter_mut().zip(&other.system_calls) {
            *mine += theirs;
        }
    }
}

/// The engine's activity, with `--filename` only.
///
/// In JSON its fields are keys of the report:
///
/// - `engine` (`null`: the disk uses none), `direct`, `iodepth_batch` (`null`: up to 16),
///   `poll_max_us`, `sqpoll`, `iopoll`, `completion_ring`, `harvest_on_submit`, `submit_batch`
/// - `polled` (completions found by polling)
/// - `harvests` that found anything, `harvested_at_once_mean` and `harvested_at_once_pN`
///   (completions found at once, at N = 1, 10, 20 … 90, 99_99 percent of these harvests)
/// - `submits`, `ops_per_submit`, `submitted_at_once_pN`
/// - `syscalls`, `syscalls_per_io`, and `syscalls_NAME` for each kind
#[derive(Debug, Clone, PartialEq)]
pub struct EngineReport {
    /// The configuration of the engine.
    pub setup: Setup,
    /// Completions found at once, over harvests that found any.
    pub harvested_at_once: SizeReport,
    /// Ops submitted at once.
    pub submitted_at_once: SizeReport,
    /// Reads and writes with completions that were found by polling.
    pub polled: u64,
    /// The counted system calls by name.
    pub system_calls: Vec<(&'static str, u64)>,
    /// All counted system calls for each I/O; `None` without I/O.
    pub system_calls_per_io: Option<f64>,
}

/// A distribution of sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct SizeReport {
    /// The number of values.
    pub count: u64,
    /// Arithmetic mean; `None` without values.
    pub mean: Option<f64>,
    /// At 1, 10, 20 … 90 and 99.99 percent.
    pub percentiles: [u64; SIZE_PERCENTILES.len()],
}

impl SizeReport {
    fn new(values: &Distribution) -> Self {
        let count = values.count();
        Self {
            count,
            mean: (count > 0).then(|| values.sum() as f64 / count as f64),
            percentiles: SIZE_PERCENTILES.map(|percent| values.percentile(percent)),
        }
    }
}

/// The configuration of an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct Setup {
    /// Name of the engine; `None` if the disk uses none.
    pub engine: Option<String>,
    /// True if the page cache was bypassed.
    pub direct: bool,
    /// I/Os queued together by a job; `None` for up to 16.
    pub iodepth_batch: Option<u32>,
    /// The longest time to busy-poll, in microseconds.
    pub poll_max_us: u16,
    /// True with `--sqpoll`: a kernel thread picks up submissions, if the engine is io_uring.
    pub sqpoll: bool,
    /// True with `--iopoll`: completions are polled for, if the engine is io_uring.
    pub iopoll: bool,
    /// The place of Linux AIO's completions, as given to `--completion-ring`.
    pub completion_ring: &'static str,
    /// True if each submit was followed by a harvest.
    pub harvest_on_submit: bool,
    /// True if operations were submitted together.
    pub submit_batch: bool,
}

impl EngineReport {
    pub(crate) fn new(setup: &Setup, figures: &EngineCounters, ios: u64) -> Self {
        let total: u64 = figures.system_calls.iter().sum();
        let names = SYSTEM_CALLS.iter().map(|(name, _)| *name);
        Self {
            setup: setup.clone(),
            harvested_at_once: SizeReport::new(&figures.harvested_at_once),
            submitted_at_once: SizeReport::new(&figures.submitted_at_once),
            polled: figures.polled,
            system_calls: names.zip(figures.system_calls).collect(),
            system_calls_per_io: (ios > 0).then(|| total as f64 / ios as f64),
        }
    }
}

impl Serialize for EngineReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        let setup = &self.setup;
        map.serialize_entry("engine", &setup.engine)?;
        map.serialize_entry("direct", &setup.direct)?;
        map.serialize_entry("iodepth_batch", &setup.iodepth_batch)?;
        map.serialize_entry("poll_max_us", &setup.poll_max_us)?;
        map.serialize_entry("sqpoll", &setup.sqpoll)?;
        map.serialize_entry("iopoll", &setup.iopoll)?;
        map.serialize_entry("completion_ring", setup.completion_ring)?;
        map.serialize_entry("harvest_on_submit", &setup.harvest_on_submit)?;
        map.serialize_entry("submit_batch", &setup.submit_batch)?;
        map.serialize_entry("polled", &self.polled)?;
        map.serialize_entry("harvests", &self.harvested_at_once.count)?;
        map.serialize_entry("harvested_at_once_mean", &self.harvested_at_once.mean)?;
        map.serialize_entry("submits", &self.submitted_at_once.count)?;
        map.serialize_entry("ops_per_submit", &self.submitted_at_once.mean)?;
        let sizes =
            [("harvested", &self.harvested_at_once), ("submitted", &self.submitted_at_once)];
        for (name, report) in sizes {
            for (percent, size) in SIZE_PERCENTILES.iter().zip(report.percentiles) {
                let percent = percent.to_string().replace('.', "_");
                map.serialize_entry(&format!("{name}_at_once_p{percent}"), &size)?;
            }
        }
        let total: u64 = self.system_calls.iter().map(|(_, count)| count).sum();
        map.serialize_entry("syscalls", &total)?;
        map.serialize_entry("syscalls_per_io", &self.system_calls_per_io)?;
        for (name, count) in &self.system_calls {
            map.serialize_entry(&format!("syscalls_{name}"), count)?;
        }
        map.end()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two IoThreads with harvests of 16 and 128 completions, after some from before the window.
    pub(crate) fn figures() -> EngineCounters {
        let mut sum = EngineCounters::default();
        for size in [16, 128] {
            let stats = Stats::default();
            stats.harvested_at_once.record(1);
            stats.syscalls.io_submit.add(5);
            stats.polled.add(3);
            let opened = EngineSample::take(&stats);
            stats.harvested_at_once.record(size);
            stats.submitted_at_once.record(size);
            stats.read.latency_ns.record(size * 1000);
            stats.syscalls.io_submit.add(1);
            stats.polled.add(7);
            sum.merge(&EngineSample::take(&stats).since(&opened));
        }
        sum
    }

    pub(crate) fn setup() -> Setup {
        Setup {
            engine: Some("aio".to_owned()),
            direct: true,
            iodepth_batch: None,
            poll_max_us: 64,
            sqpoll: false,
            iopoll: true,
            completion_ring: "userspace",
            harvest_on_submit: true,
            submit_batch: false,
        }
    }

    #[test]
    fn a_report_is_of_the_measured_window_and_of_all_iothreads() {
        let report = EngineReport::new(&setup(), &figures(), 144);
        assert_eq!(report.harvested_at_once.count, 2);
        assert_eq!(report.harvested_at_once.mean, Some(72.0));
        assert_eq!(report.harvested_at_once.percentiles[..6], [16; 6]);
        assert_eq!(report.harvested_at_once.percentiles[6..], [128; 5]);
        assert_eq!(report.system_calls_per_io, Some(2.0 / 144.0));
        let json = serde_json::to_value(&report).unwrap();
        for (key, value) in [
            ("harvested_at_once_p50", 16),
            ("harvested_at_once_p99_99", 128),
            ("polled", 14),
            ("submits", 2),
            ("syscalls", 2),
            ("syscalls_io_submit", 2),
            ("syscalls_io_getevents", 0),
        ] {
            assert_eq!(json[key], value, "{key}");
        }
    }
}
