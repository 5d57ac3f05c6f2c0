//! The text format of Prometheus
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>).

use std::fmt::{self, Display, Write};

use device::{BATCH_BOUNDS, LATENCY_BOUNDS, batch_bound, latency_bound_ns};
use serde::Serialize;

use crate::spec::command::{DiskState, ExportStatus};
use crate::spec::stats::{
    Batches, DaemonStats, Errors, ExportStats, LoopStats, OperationStats, QueueServed,
};

/// Writes all metrics of a daemon.
pub(crate) fn exposition(stats: &DaemonStats, exports: &[ExportStatus]) -> String {
    let mut text = Text::default();
    text.family("ringhaul_build_info", Kind::Gauge, "The version of the daemon.");
    text.sample("", &[("version", &env!("CARGO_PKG_VERSION"))], 1);
    text.family(
        "ringhaul_start_time_seconds",
        Kind::Gauge,
        "The start of the counters since 1970; an upgrade keeps it.",
    );
    text.sample("", &[], stats.start_time_seconds);
    text.family(
        "ringhaul_failed_takeovers_total",
        Kind::Counter,
        "Takeovers by another process, as in an upgrade, that have failed.",
    );
    text.sample("", &[], stats.failed_takeovers);
    write_states(&mut text, exports);
    write_requests(&mut text, &stats.exports);
    write_queues(&mut text, &stats.exports);
    write_threads(&mut text, &stats.iothreads);
    text.0
}

/// The type of a family.
#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// Families with their samples.
#[derive(Default)]
struct Text(String, &'static str);

impl Text {
    /// Begins a family.
    fn family(&mut self, name: &'static str, kind: Kind, help: &str) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        self.1 = name;
        // Writing to a string does not fail.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// Adds a sample to the family, whose name is followed by `suffix` here.
    fn sample(&mut self, suffix: &str, labels: &[(&str, &dyn Display)], value: impl Display) {
        self.0.push_str(self.1);
        self.0.push_str(suffix);
        for (index, (name, value)) in labels.iter().enumerate() {
            let _ = write!(self.0, "{}{name}=\"{value}\"", if index == 0 { '{' } else { ',' });
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{end} {value}");
    }

    /// A family of one sample for each export.
    fn each<T: Display>(
        &mut self,
        (name, kind, help): (&'static str, Kind, &str),
        values: impl Iterator<Item = (String, T)>,
    ) {
        self.family(name, kind, help);
        values.for_each(|(export, value)| self.sample("", &[("export", &Label(&export))], value));
    }
}

/// The value of a label, escaped.
struct Label<'a>(&'a str);

impl Display for Label<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for char in self.0.chars() {
            match char {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                _ => f.write_char(char)?,
            }
        }
        Ok(())
    }
}

/// The word for a value in JSON.
struct Word<T>(T);

impl<T: Serialize> Display for Word<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.serialize(f)
    }
}

/// Nanoseconds, shown in seconds.
struct Seconds(u64);

impl Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / 1_000_000_000, self.0 % 1_000_000_000);
        if part == 0 {
            return write!(f, "{whole}");
        }
        let digits = format!("{part:09}");
        write!(f, "{whole}.{}", digits.trim_end_matches('0'))
    }
}

fn write_states(text: &mut Text, exports: &[ExportStatus]) {
    let of = |value: fn(&ExportStatus) -> u64| {
        exports.iter().map(move |export| (export.name(), value(export)))
    };
    text.each(
        ("ringhaul_export_connected", Kind::Gauge, "1 while a front-end is connected."),
        of(|export| export.connected.into()),
    );
    text.each(
        (
            "ringhaul_export_lacks_memory",
            Kind::Gauge,
            "1 while the front-end shares no memory, so that the guest waits.",
        ),
        of(|export| export.lacks_memory.into()),
    );
    text.each(
        ("ringhaul_export_sessions_total", Kind::Counter, "Front-ends that have connected."),
        of(|export| export.sessions),
    );
    text.family(
        "ringhaul_disk_state",
        Kind::Gauge,
        "1 for the state of the worst disk of the export.",
    );
    for export in exports {
        let name = export.name();
        for state in DiskState::ALL {
            let labels: [(&str, &dyn Display); 2] =
                [("export", &Label(&name)), ("state", &Word(state))];
            text.sample("", &labels, u8::from(state == export.disk_state));
        }
    }
}

fn write_requests(text: &mut Text, exports: &[ExportStats]) {
    text.family(
        "ringhaul_request_duration_seconds",
        Kind::Histogram,
        "The time from a device's sight of a request to its answer.",
    );
    each_operation(exports, |labels, stats| write_latency(text, labels, stats));
    text.family(
        "ringhaul_request_duration_max_seconds",
        Kind::Gauge,
        "The longest request since the last reading.",
    );
    each_operation(exports, |labels, stats| {
        text.sample("", labels, Seconds(stats.latency_max_ns));
    });
    text.family("ringhaul_request_bytes_total", Kind::Counter, "Bytes of successful requests.");
    each_operation(exports, |labels, stats| text.sample("", labels, stats.bytes));
    text.family("ringhaul_request_errors_total", Kind::Counter, "Failed requests by cause.");
    each_operation(exports, |labels, stats| {
        for (cause, count) in causes(&stats.errors) {
            text.sample("", &[labels[0], labels[1], ("cause", &cause)], count);
        }
    });
}

/// Calls `write` for each operation of each export, with the labels of both.
fn each_operation(
    exports: &[ExportStats],
    mut write: impl FnMut(&[(&str, &dyn Display); 2], &OperationStats),
) {
    for export in exports {
        for stats in &export.operations {
            let operation = Word(stats.operation).to_string().replace('-', "_");
            write(&[("export", &Label(&export.name)), ("op", &operation)], stats);
        }
    }
}

fn causes(errors: &Errors) -> [(&'static str, u64); 6] {
    let Errors { disk, no_space, invalid, reserved, aborted, unavailable } = *errors;
    [
        ("disk", disk),
        ("no_space", no_space),
        ("invalid", invalid),
        ("reserved", reserved),
        ("aborted", aborted),
        ("unavailable", unavailable),
    ]
}

fn write_latency(text: &mut Text, labels: &[(&str, &dyn Display); 2], stats: &OperationStats) {
    let mut count = 0;
    for (index, hits) in stats.latency_buckets.iter().enumerate() {
        count += hits;
        if index < LATENCY_BOUNDS {
            let bound = Seconds(latency_bound_ns(index));
            text.sample("_bucket", &[labels[0], labels[1], ("le", &bound)], count);
        }
    }
    text.sample("_bucket", &[labels[0], labels[1], ("le", &"+Inf")], count);
    text.sample("_sum", labels, Seconds(stats.latency_sum_ns));
    text.sample("_count", labels, count);
}

fn write_queues(text: &mut Text, exports: &[ExportStats]) {
    let of = |value: fn(&ExportStats) -> u64| {
        exports.iter().map(move |export| (export.name.clone(), value(export)))
    };
    text.each(
        ("ringhaul_requests_in_flight", Kind::Gauge, "Unanswered requests."),
        of(|export| export.depth),
    );
    text.each(
        (
            "ringhaul_requests_in_flight_max",
            Kind::Gauge,
            "The most unanswered requests of a queue since the last reading.",
        ),
        of(|export| export.depth_peak),
    );
    write_waits(text, exports);
    text.each(
        ("ringhaul_kicks_total", Kind::Counter, "Kicks of drivers."),
        of(|export| export.queues.iter().map(|queue| queue.kicks).sum()),
    );
    text.each(
        ("ringhaul_calls_total", Kind::Counter, "Calls to drivers."),
        of(|export| export.queues.iter().map(|queue| queue.calls).sum()),
    );
    text.each(
        (
            "ringhaul_calls_suppressed_total",
            Kind::Counter,
            "Answers for which the driver wanted no call.",
        ),
        of(|export| export.queues.iter().map(|queue| queue.calls_suppressed).sum()),
    );
    write_batches(text, exports);
}

/// Writes the sizes of batches, with the queues of an export added up.
fn write_batches(text: &mut Text, exports: &[ExportStats]) {
    /// Name, help and value of a histogram.
    type Row = (&'static str, &'static str, fn(&QueueServed) -> &Batches);
    let rows: [Row; 3] = [
        (
            "ringhaul_queue_submit_batch_size",
            "Requests of a queue that began together, for one submit.",
            |queue| &queue.submit_batches,
        ),
        (
            "ringhaul_queue_harvest_batch_size",
            "Requests of a queue whose answers became visible together.",
            |queue| &queue.harvest_batches,
        ),
        (
            "ringhaul_queue_call_batch_size",
            "Requests of a queue whose answers one call announced.",
            |queue| &queue.call_batches,
        ),
    ];
    for (name, help, batches) in rows {
        text.family(name, Kind::Histogram, help);
        for export in exports {
            let label = Label(&export.name);
            let labels: &[(&str, &dyn Display)] = &[("export", &label)];
            let all = || export.queues.iter().map(batches);
            let mut count = 0;
            for index in 0..=BATCH_BOUNDS {
                count += all().filter_map(|batches| batches.buckets.get(index)).sum::<u64>();
                if index < BATCH_BOUNDS {
                    let bound = batch_bound(index);
                    text.sample("_bucket", &[labels[0], ("le", &bound)], count);
                }
            }
            text.sample("_bucket", &[labels[0], ("le", &"+Inf")], count);
            text.sample("_sum", labels, all().map(|batches| batches.sum).sum::<u64>());
            text.sample("_count", labels, count);
        }
    }
}

fn write_waits(text: &mut Text, exports: &[ExportStats]) {
    /// Name, help and value of a counter.
    type Row = (&'static str, &'static str, fn(&ExportStats) -> u64);
    let rows: [Row; 3] = [
        (
            "ringhaul_throttled_seconds_total",
            "Time that requests have waited for limits, all together.",
            |export| export.throttled_ns,
        ),
        (
            "ringhaul_retried_seconds_total",
            "Time that failed requests have waited for a retry, all together.",
            |export| export.retried_ns,
        ),
        (
            "ringhaul_held_seconds_total",
            "Time that requests have waited for space on the disk, all together.",
            |export| export.held_ns,
        ),
    ];
    for (name, help, value) in rows {
        let values = exports.iter().map(|export| (export.name.clone(), Seconds(value(export))));
        text.each((name, Kind::Counter, help), values);
    }
}

fn write_threads(text: &mut Text, threads: &[LoopStats]) {
    /// Name, help and value of a counter.
    type Row = (&'static str, &'static str, fn(&LoopStats) -> String);
    let rows: [Row; 12] = [
        ("ringhaul_iothread_cpu_seconds_total", "CPU time, busy-polling included.", |t| {
            Seconds(t.cpu_ns).to_string()
        }),
        (
            "ringhaul_iothread_run_delay_seconds_total",
            "Time for which the thread was ready and other threads had its CPU.",
            |t| Seconds(t.run_delay_ns).to_string(),
        ),
        (
            "ringhaul_iothread_poll_useful_seconds_total",
            "Busy-polling that ended with an event.",
            |t| Seconds(t.poll_useful_ns).to_string(),
        ),
        (
            "ringhaul_iothread_poll_useless_seconds_total",
            "Busy-polling that ended with a sleep.",
            |t| Seconds(t.poll_useless_ns).to_string(),
        ),
        ("ringhaul_iothread_turns_total", "Turns of the loop.", |t| t.turns.to_string()),
        ("ringhaul_iothread_submits_total", "Submits.", |t| t.submits.to_string()),
        (
            "ringhaul_iothread_submitted_operations_total",
            "Operations that submits have given to the kernel.",
            |t| t.submitted.to_string(),
        ),
        ("ringhaul_iothread_harvests_total", "Harvests that found completions.", |t| {
            t.harvests.to_string()
        }),
        (
            "ringhaul_iothread_harvested_operations_total",
            "Completions that harvests have found.",
            |t| t.harvested.to_string(),
        ),
        (
            "ringhaul_iothread_bounced_requests_total",
            "Requests with memory that the disk cannot take as it is.",
            |t| t.bounced.to_string(),
        ),
        (
            "ringhaul_iothread_late_operations_total",
            "Operations that went unanswered for 5 seconds.",
            |t| t.late.to_string(),
        ),
        (
            "ringhaul_iothread_submits_refused_total",
            "Submits that the kernel refused because it lacked resources.",
            |t| t.submits_refused.to_string(),
        ),
    ];
    for (name, help, value) in rows {
        text.family(name, Kind::Counter, help);
        for thread in threads {
            text.sample("", &[("iothread", &thread.name)], value(thread));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::stats::Operation;

    #[test]
    fn seconds_have_no_more_digits_than_they_need() {
        for (ns, text) in [
            (0, "0"),
            (4_000, "0.000004"),
            (16_777_216_000, "16.777216"),
            (3_000_000_000, "3"),
            (1, "0.000000001"),
        ] {
            assert_eq!(Seconds(ns).to_string(), text);
        }
    }

    #[test]
    fn values_of_labels_are_escaped() {
        assert_eq!(Label("a\"b\\c\nd").to_string(), "a\\\"b\\\\c\\nd");
    }

    fn stats_of(name: &str) -> ExportStats {
        let operation = OperationStats {
            operation: Operation::WriteZeroes,
            requests: 3,
            bytes: 512,
            errors: Errors { no_space: 1, ..Errors::default() },
            latency_buckets: [2, 0, 1].into_iter().chain([0; LATENCY_BOUNDS - 2]).collect(),
            latency_sum_ns: 18_000,
            latency_max_ns: 15_000,
        };
        ExportStats {
            name: name.to_owned(),
            served: Default::default(),
            operations: vec![operation],
            depth: 4,
            depth_peak: 9,
            throttled_ns: 1,
            retried_ns: 2,
            held_ns: 3,
            queues: Vec::new(),
        }
    }

    #[test]
    fn each_failure_and_each_operation_has_its_label() {
        let mut export = stats_of("vm");
        let (no_space, invalid, unavailable) = (2, 3, 6);
        let errors = Errors { disk: 1, no_space, invalid, reserved: 4, aborted: 5, unavailable };
        export.operations[0].errors = errors;
        let operations = [
            (Operation::Read, "read"),
            (Operation::Write, "write"),
            (Operation::Flush, "flush"),
            (Operation::Discard, "discard"),
            (Operation::WriteZeroes, "write_zeroes"),
            (Operation::Other, "other"),
        ];
        for (operation, word) in operations {
            export.operations[0].operation = operation;
            let mut text = Text::default();
            write_requests(&mut text, std::slice::from_ref(&export));
            let causes = ["disk", "no_space", "invalid", "reserved", "aborted", "unavailable"];
            for (count, cause) in (1..).zip(causes) {
                let labels = format!("export=\"vm\",op=\"{word}\",cause=\"{cause}\"");
                let line = format!("ringhaul_request_errors_total{{{labels}}} {count}");
                assert!(text.0.lines().any(|found| found == line), "{line} is not in {}", text.0);
            }
        }
    }

    #[test]
    fn each_family_has_the_counter_of_its_name() {
        let mut text = Text::default();
        let mut export = stats_of("vm");
        (export.depth, export.depth_peak) = (4, 9);
        export.queues = (0..2)
            .map(|index| QueueServed {
                index,
                served: Default::default(),
                kicks: 10,
                calls: 20,
                calls_suppressed: 30,
                submit_batches: Batches { buckets: vec![1, 2, 0, 0, 0, 0, 0, 0, 3], sum: 1_000 },
                harvest_batches: Batches { buckets: vec![4; 9], sum: 2_000 },
                call_batches: Batches { buckets: vec![5; 9], sum: 3_000 },
            })
            .collect();
        write_queues(&mut text, &[export]);
        for (name, value) in [
            ("requests_in_flight", "4"),
            ("requests_in_flight_max", "9"),
            ("throttled_seconds_total", "0.000000001"),
            ("retried_seconds_total", "0.000000002"),
            ("held_seconds_total", "0.000000003"),
            ("kicks_total", "20"),
            ("calls_total", "40"),
            ("calls_suppressed_total", "60"),
            ("queue_submit_batch_size_sum", "2000"),
            ("queue_submit_batch_size_count", "12"),
            ("queue_harvest_batch_size_sum", "4000"),
            ("queue_harvest_batch_size_count", "72"),
            ("queue_call_batch_size_sum", "6000"),
            ("queue_call_batch_size_count", "90"),
        ] {
            let line = format!("ringhaul_{name}{{export=\"vm\"}} {value}");
            assert!(text.0.lines().any(|found| found == line), "{line} is not in {}", text.0);
        }
        for (bound, count) in [("1", 2), ("2", 6), ("128", 6), ("+Inf", 12)] {
            let bucket = "ringhaul_queue_submit_batch_size_bucket";
            let line = format!("{bucket}{{export=\"vm\",le=\"{bound}\"}} {count}");
            assert!(text.0.lines().any(|found| found == line), "{line} is not in {}", text.0);
        }
    }

    #[test]
    fn each_family_of_threads_has_the_counter_of_its_name() {
        let stats = blockio::stats::Stats::default();
        let mut thread = LoopStats::new("iothread-0".to_owned(), &stats);
        let counters: [(&str, &mut u64); 12] = [
            ("cpu_seconds", &mut thread.cpu_ns),
            ("run_delay_seconds", &mut thread.run_delay_ns),
            ("poll_useful_seconds", &mut thread.poll_useful_ns),
            ("poll_useless_seconds", &mut thread.poll_useless_ns),
            ("turns", &mut thread.turns),
            ("submits", &mut thread.submits),
            ("submitted_operations", &mut thread.submitted),
            ("harvests", &mut thread.harvests),
            ("harvested_operations", &mut thread.harvested),
            ("bounced_requests", &mut thread.bounced),
            ("late_operations", &mut thread.late),
            ("submits_refused", &mut thread.submits_refused),
        ];
        let mut expected = Vec::new();
        for (number, (name, counter)) in (1..).zip(counters) {
            let is_time = name.ends_with("seconds");
            *counter = if is_time { number * 1_000_000_000 } else { number };
            let labels = r#"{iothread="iothread-0"}"#;
            expected.push(format!("ringhaul_iothread_{name}_total{labels} {number}"));
        }
        let mut text = Text::default();
        write_threads(&mut text, &[thread]);
        let samples: Vec<&str> = text.0.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(samples, expected);
    }

    #[test]
    fn the_state_of_an_export_is_shown_by_gauges() {
        let spec = serde_json::json!({
            "name": "vm", "endpoint": { "path": "/vm" }, "device": { "scsi": [] },
        });
        let status = ExportStatus {
            connected: true,
            lacks_memory: false,
            sessions: 7,
            disk_state: DiskState::Late,
            ..ExportStatus::opening(serde_json::from_value(spec).unwrap())
        };
        let lacking = ExportStatus { connected: false, lacks_memory: true, ..status.clone() };
        for (status, connected, lacks_memory) in [(status, 1, 0), (lacking, 0, 1)] {
            let mut text = Text::default();
            write_states(&mut text, &[status]);
            for (sample, value) in [
                (r#"export_connected{export="vm"}"#, connected),
                (r#"export_lacks_memory{export="vm"}"#, lacks_memory),
                (r#"export_sessions_total{export="vm"}"#, 7),
                (r#"disk_state{export="vm",state="late"}"#, 1),
                (r#"disk_state{export="vm",state="ready"}"#, 0),
            ] {
                let line = format!("ringhaul_{sample} {value}");
                assert!(text.0.lines().any(|found| found == line), "{line} is not in {}", text.0);
            }
        }
    }

    #[test]
    fn buckets_are_cumulative_and_end_with_the_count() {
        let mut text = Text::default();
        write_requests(&mut text, &[stats_of("vm\"1")]);
        let of = r#"{export="vm\"1",op="write_zeroes""#;
        for line in [
            "# TYPE ringhaul_request_duration_seconds histogram".to_owned(),
            format!("ringhaul_request_duration_seconds_bucket{of},le=\"0.000004096\"}} 2"),
            format!("ringhaul_request_duration_seconds_bucket{of},le=\"0.000008192\"}} 2"),
            format!("ringhaul_request_duration_seconds_bucket{of},le=\"0.000016384\"}} 3"),
            format!("ringhaul_request_duration_seconds_bucket{of},le=\"17.179869184\"}} 3"),
            format!("ringhaul_request_duration_seconds_bucket{of},le=\"+Inf\"}} 3"),
            format!("ringhaul_request_duration_seconds_sum{of}}} 0.000018"),
            format!("ringhaul_request_duration_seconds_count{of}}} 3"),
            format!("ringhaul_request_duration_max_seconds{of}}} 0.000015"),
            format!("ringhaul_request_bytes_total{of}}} 512"),
            format!("ringhaul_request_errors_total{of},cause=\"no_space\"}} 1"),
            format!("ringhaul_request_errors_total{of},cause=\"disk\"}} 0"),
        ] {
            assert!(text.0.lines().any(|found| found == line), "{line} is not in {}", text.0);
        }
        let buckets = text.0.lines().filter(|line| line.contains("_bucket{")).count();
        assert_eq!(buckets, LATENCY_BOUNDS + 1);
    }
}
