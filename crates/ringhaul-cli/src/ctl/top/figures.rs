//! Rates and percentiles of an interval, from the counters at its two ends.

use std::time::Duration;

use device::{LATENCY_BOUNDS, latency_bound_ns};
use ringhaul::spec::command::{DiskState, ExportState, ExportStatus};
use ringhaul::spec::stats::{DaemonStats, ExportStats, LoopStats, Operation};
use serde::Serialize;

/// The figures of all exports and threads.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Figures {
    /// The length of the interval.
    pub(super) seconds: f64,
    pub(super) exports: Vec<ExportFigures>,
    pub(super) iothreads: Vec<ThreadFigures>,
}

/// The figures of one export.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ExportFigures {
    pub(super) name: String,
    /// The state of its worst disk, or of the export if that is not served.
    pub(super) state: String,
    pub(super) connected: bool,
    pub(super) requests_per_second: f64,
    pub(super) reads_per_second: f64,
    pub(super) writes_per_second: f64,
    pub(super) bytes_per_second: f64,
    pub(super) errors_per_second: f64,
    /// Latencies in microseconds; `None` without a request.
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    pub(super) max_us: Option<f64>,
    /// Unanswered requests.
    pub(super) depth: u64,
    pub(super) depth_peak: u64,
    /// The number of requests that wait for limits, on average.
    pub(super) throttled: f64,
    /// Requests by latency, of all operations.
    pub(super) buckets: Vec<u64>,
}

/// The figures of one IoThread, as shares of the interval.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ThreadFigures {
    pub(super) name: String,
    pub(super) cpu: f64,
    /// Busy-polling that found nothing.
    pub(super) poll_useless: f64,
    /// Waiting for a CPU.
    pub(super) run_delay: f64,
}

impl Figures {
    /// The figures of the time between two readings of the counters. A daemon that was restarted
    /// in between counts from its start.
    pub(super) fn new(
        before: &DaemonStats,
        after: &DaemonStats,
        exports: &[ExportStatus],
        time: Duration,
    ) -> Self {
        let is_same = before.start_time_seconds == after.start_time_seconds;
        let of = |export: &ExportStats| {
            let earlier = before.exports.iter().find(|other| other.name == export.name);
            let status = exports.iter().find(|status| status.name() == export.name);
            ExportFigures::new(earlier.filter(|_| is_same), export, status, time)
        };
        let threads = after.iothreads.iter().map(|thread| {
            let earlier = before.iothreads.iter().find(|other| other.name == thread.name);
            ThreadFigures::new(earlier.filter(|_| is_same), thread, time)
        });
        Self {
            seconds: time.as_secs_f64(),
            exports: after.exports.iter().map(of).collect(),
            iothreads: threads.collect(),
        }
    }
}

/// The growth of a counter, which may have restarted at 0.
fn growth(before: u64, after: u64) -> u64 {
    after.checked_sub(before).unwrap_or(after)
}

#[expect(clippy::cast_precision_loss, reason = "a rate is approximate")]
fn rate(growth: u64, time: Duration) -> f64 {
    growth as f64 / time.as_secs_f64().max(1e-9)
}

impl ExportFigures {
    fn new(
        before: Option<&ExportStats>,
        after: &ExportStats,
        status: Option<&ExportStatus>,
        time: Duration,
    ) -> Self {
        let (mut buckets, mut sums) = (vec![0; LATENCY_BOUNDS + 1], [0; 6]);
        let (mut bytes, mut errors) = (0, 0);
        for (place, operation) in after.operations.iter().enumerate() {
            let earlier = before.and_then(|before| before.operations.get(place));
            let from = |value: fn(&_) -> u64| earlier.map_or(0, value);
            sums[place] = growth(from(|it| it.requests), operation.requests);
            bytes += growth(from(|it| it.bytes), operation.bytes);
            errors += growth(from(|it| it.errors.total()), operation.errors.total());
            for (index, bucket) in buckets.iter_mut().enumerate() {
                let count = |buckets: &[u64]| buckets.get(index).copied().unwrap_or(0);
                let earlier = earlier.map_or(0, |it| count(&it.latency_buckets));
                *bucket += growth(earlier, count(&operation.latency_buckets));
            }
        }
        let of = |wanted: Operation| {
            let place = after.operations.iter().position(|it| it.operation == wanted);
            rate(place.map_or(0, |place| sums[place]), time)
        };
        let total: u64 = sums.iter().sum();
        let max = after.operations.iter().map(|it| it.latency_max_ns).max().filter(|_| total > 0);
        let throttled = growth(before.map_or(0, |it| it.throttled_ns), after.throttled_ns);
        Self {
            name: after.name.clone(),
            state: status.map_or_else(String::new, state_of),
            connected: status.is_some_and(|status| status.connected),
            requests_per_second: rate(total, time),
            reads_per_second: of(Operation::Read),
            writes_per_second: of(Operation::Write),
            bytes_per_second: rate(bytes, time),
            errors_per_second: rate(errors, time),
            p50_us: percentile_us(&buckets, 50.0),
            p99_us: percentile_us(&buckets, 99.0),
            max_us: max.map(us),
            depth: after.depth,
            depth_peak: after.depth_peak,
            throttled: rate(throttled, time) / 1e9,
            buckets,
        }
    }
}

/// The state that a reader should see first.
fn state_of(status: &ExportStatus) -> String {
    match (status.state, status.disk_state) {
        (ExportState::Serving, DiskState::Ready) if status.lacks_memory => "no memory".to_owned(),
        (ExportState::Serving, DiskState::Ready) if status.connected => "serving".to_owned(),
        (ExportState::Serving, DiskState::Ready) => "waiting".to_owned(),
        (ExportState::Serving, state) => format!("{state:?}").to_lowercase(),
        (state, _) => state.to_string(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a latency is approximate")]
fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// The latency that `percent` of the requests do not exceed, interpolated within its bucket.
#[expect(clippy::cast_precision_loss, reason = "a percentile is approximate")]
pub(super) fn percentile_us(buckets: &[u64], percent: f64) -> Option<f64> {
    let total: u64 = buckets.iter().sum();
    let wanted = total as f64 * percent / 100.0;
    let mut seen = 0.0;
    for (index, count) in buckets.iter().enumerate().filter(|(_, count)| **count > 0) {
        let hits = *count as f64;
        if seen + hits >= wanted {
            let low = if index == 0 { 0.0 } else { us(latency_bound_ns(index - 1)) };
            // The last bucket has no bound.
            let high = if index < LATENCY_BOUNDS { us(latency_bound_ns(index)) } else { low };
            return Some(low + (high - low) * (wanted - seen) / hits);
        }
        seen += hits;
    }
    None
}

impl ThreadFigures {
    fn new(before: Option<&LoopStats>, after: &LoopStats, time: Duration) -> Self {
        let share = |value: fn(&LoopStats) -> u64| {
            rate(growth(before.map_or(0, value), value(after)), time) / 1e9
        };
        Self {
            name: after.name.clone(),
            cpu: share(|thread| thread.cpu_ns),
            poll_useless: share(|thread| thread.poll_useless_ns),
            run_delay: share(|thread| thread.run_delay_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;

    #[test]
    fn a_percentile_lies_in_its_bucket() {
        let mut buckets = vec![0; LATENCY_BOUNDS + 1];
        assert_eq!(percentile_us(&buckets, 50.0), None);
        buckets[0] = 50;
        buckets[3] = 49;
        buckets[LATENCY_BOUNDS] = 1;
        assert_eq!(percentile_us(&buckets, 25.0), Some(2.048));
        assert_eq!(percentile_us(&buckets, 50.0), Some(4.096));
        // From 16.384 to 32.768.
        assert_eq!(percentile_us(&buckets, 99.0), Some(32.768));
        assert_eq!(percentile_us(&buckets, 100.0), Some(17_179_869.184), "the last bound");
    }

    /// The counters of an export and of a thread, which are multiples of `count`.
    fn stats(start_time_seconds: u64, count: u64) -> DaemonStats {
        let counts = json!({ "requests": 0, "bytes": 0, "errors": 0 });
        let kinds = ["reads", "writes", "flushes", "discards", "write-zeroes", "others"];
        let served: Map<_, _> =
            kinds.into_iter().map(|kind| (kind.to_owned(), counts.clone())).collect();
        let errors = json!({ "disk": count, "no-space": 0, "invalid": 0, "reserved": 0,
                             "aborted": 0, "unavailable": 0 });
        let operation = |operation: Operation, times: u64| {
            json!({ "operation": operation, "requests": times * count, "bytes": 512 * count,
                    "errors": errors, "latency-buckets": [times * count],
                    "latency-sum-ns": 0, "latency-max-ns": 3_000 * times })
        };
        let export = json!({
            "name": "vm", "served": served, "depth": 5, "depth-peak": 6,
            "throttled-ns": 3_000_000_000 * count, "retried-ns": 0, "held-ns": 0, "queues": [],
            "operations": [operation(Operation::Write, 2), operation(Operation::Read, 1)],
        });
        let thread = json!({
            "name": "iothread-0", "cpu-ns": 500_000_000 * count,
            "run-delay-ns": 200_000_000 * count, "poll-useless-ns": 100_000_000 * count,
        });
        let mut stats: DaemonStats = serde_json::from_value(json!({
            "start-time-seconds": start_time_seconds, "failed-takeovers": 0, "exports": [export],
            "iothreads": [],
        }))
        .unwrap();
        stats.iothreads.push(thread_of(thread));
        stats
    }

    /// A thread with these counters; the rest is 0.
    fn thread_of(counters: Value) -> LoopStats {
        let spread = || json!({ "median": 0, "p99": 0, "p999": 0, "max": 0 });
        let operations = || json!({ "count": 0, "errors": 0, "bytes": 0, "latency-ns": spread() });
        let memory = || json!({ "bytes": 0, "bytes-most": 0, "waits": 0, "failed": 0 });
        let mut all = json!({
            "turns": 0, "rounds": 0, "reads": operations(), "writes": operations(),
            "flushes": operations(), "deallocations": operations(), "late": 0,
            "poll-useful-ns": 0, "polled": 0, "submits-refused": 0, "submits": 0, "submitted": 0,
            "harvests": 0, "harvested": 0, "harvested-at-once": spread(), "foreign": 0,
            "foreign-at-once": spread(), "woken": 0, "submitted-at-once": spread(), "bounced": 0,
            "bounce-memory": memory(), "list-memory": memory(),
            "system-calls": { "io_submit": 0, "io_getevents": 0, "io_uring_enter": 0,
                              "epoll_wait": 0, "eventfd_write": 0 },
        });
        all.as_object_mut().unwrap().extend(counters.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
    }

    /// The growth of the counters in two seconds. A daemon that has started again has new ones.
    #[test]
    fn figures_are_rates_of_the_time_between_two_readings() {
        let time = Duration::from_secs(2);
        for (start, count) in [(1, 1.0), (2, 4.0)] {
            let figures = Figures::new(&stats(1, 3), &stats(start, 4), &[], time);
            let [export] = &figures.exports[..] else { panic!("{figures:?}") };
            for (figure, expected) in [
                (export.requests_per_second, 1.5 * count),
                (export.reads_per_second, 0.5 * count),
                (export.writes_per_second, count),
                (export.bytes_per_second, 512.0 * count),
                (export.errors_per_second, count),
                (export.throttled, 1.5 * count),
                (export.max_us.unwrap(), 6.0),
                (figures.iothreads[0].cpu, 0.25 * count),
                (figures.iothreads[0].run_delay, 0.1 * count),
                (figures.iothreads[0].poll_useless, 0.05 * count),
            ] {
                assert!((figure - expected).abs() < 1e-6, "{expected}: {figures:?}");
            }
            assert_eq!((export.depth, export.depth_peak), (5, 6));
        }
        let idle = Figures::new(&stats(1, 3), &stats(1, 3), &[], time);
        assert_eq!((idle.exports[0].p50_us, idle.exports[0].max_us), (None, None));
    }

    #[test]
    fn the_worst_part_of_an_export_is_its_state() {
        let counts = json!({ "requests": 0, "bytes": 0, "errors": 0 });
        let status = |state: &str, disk: &str, connected: bool, lacks_memory: bool| {
            let status: ExportStatus = serde_json::from_value(json!({
                "name": "vm", "endpoint": { "path": "/vm" }, "device": { "scsi": [] },
                "state": state, "size-bytes": 0, "disk-state": disk, "connected": connected,
                "lacks-memory": lacks_memory, "sessions": 0, "unfinished": 0,
                "served": { "reads": counts, "writes": counts, "flushes": counts,
                            "discards": counts, "write-zeroes": counts, "others": counts },
            }))
            .unwrap();
            state_of(&status)
        };
        for (state, disk, connected, lacks_memory, expected) in [
            ("serving", "ready", true, false, "serving"),
            ("serving", "ready", false, false, "waiting"),
            ("serving", "ready", true, true, "no memory"),
            ("serving", "late", true, true, "late"),
            ("serving", "lost", false, false, "lost"),
            ("opening", "ready", false, false, "opening"),
            ("stopping", "held", true, false, "stopping"),
        ] {
            let shown = status(state, disk, connected, lacks_memory);
            assert_eq!(shown, expected, "{state} {disk} {connected} {lacks_memory}");
        }
    }

    #[test]
    fn a_counter_that_began_again_counts_from_its_start() {
        assert_eq!((growth(3, 5), growth(5, 3)), (2, 3));
    }
}
