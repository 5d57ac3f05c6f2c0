//! The figures of one run.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

/// The percentiles of latency, as names in the load generator's report and as numbers.
pub(super) const LATENCY_PERCENTILES: [(&str, f64); 17] = [
    ("1", 1.0),
    ("5", 5.0),
    ("10", 10.0),
    ("20", 20.0),
    ("30", 30.0),
    ("40", 40.0),
    ("50", 50.0),
    ("60", 60.0),
    ("70", 70.0),
    ("80", 80.0),
    ("90", 90.0),
    ("95", 95.0),
    ("99", 99.0),
    ("99_5", 99.5),
    ("99_9", 99.9),
    ("99_95", 99.95),
    ("99_99", 99.99),
];

/// The percentiles for numbers of completions.
pub(super) const SIZE_PERCENTILES: [&str; 11] =
    ["1", "10", "20", "30", "40", "50", "60", "70", "80", "90", "99_99"];

/// Latencies in microseconds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Latency {
    pub(super) mean_us: f64,
    /// Latencies at each of [`LATENCY_PERCENTILES`].
    pub(super) percentiles_us: Vec<f64>,
}

/// The definition of an I/O's latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clock {
    /// From the submit of an op to the harvest that found it. Only for an engine alone.
    SubmitToHarvest,
    /// From queueing a request until its maker finds it done.
    QueuedToFound,
}

/// The figures of one run. Figures that do not apply, or were not counted, are missing.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Sample {
    pub(super) iops: f64,
    /// Latencies of `all`, `read` and `write`, as [`Clock`] defines them.
    pub(super) latency: BTreeMap<&'static str, Latency>,
    /// CPU time of the process that does the I/O.
    pub(super) cpu_us_per_io: Option<f64>,
    /// Calls to the driver.
    pub(super) calls_per_io: Option<f64>,
    pub(super) ops_per_submit: Option<f64>,
    /// System calls of the process that does the I/O, by the engine's count.
    pub(super) system_calls_per_io: Option<f64>,
    /// Completions that one harvest found, in the order of [`SIZE_PERCENTILES`].
    pub(super) harvested_at_once: Option<Vec<f64>>,
    /// The share of a CPU that a daemon without load has used.
    pub(super) idle_cpu_percent: Option<f64>,
}

impl Sample {
    /// Finds the figures in a report of the load generator. `messages` come from the daemon.
    pub(super) fn parse(report: &Value, clock: Clock, messages: &str) -> Result<Self> {
        let number = |key: &str| report.get(key).and_then(Value::as_f64);
        let alone = report.get("engine").is_some();
        let kind = match clock {
            Clock::SubmitToHarvest => "completion_latency",
            Clock::QueuedToFound => "latency",
        };
        let directions = [("all", ""), ("read", "read_"), ("write", "write_")];
        let latency = directions.iter().filter_map(|(name, prefix)| {
            let of = |key: String| number(&format!("{prefix}{kind}_{key}_us"));
            let at = |(name, _): &(&str, f64)| of(format!("p{name}"));
            let percentiles_us: Option<Vec<_>> = LATENCY_PERCENTILES.iter().map(at).collect();
            let latency =
                Latency { mean_us: of("mean".to_owned())?, percentiles_us: percentiles_us? };
            Some((*name, latency))
        });
        let sizes = SIZE_PERCENTILES.iter().map(|at| number(&format!("harvested_at_once_p{at}")));
        let ios = number("ios").context("no I/Os in the report of ringhaul bench")?;
        Ok(Self {
            iops: number("iops").context("no IOPS in the report of ringhaul bench")?,
            latency: latency.collect(),
            cpu_us_per_io: number("server_cpu_us_per_io"),
            calls_per_io: number("calls").filter(|_| !alone && ios > 0.0).map(|calls| calls / ios),
            ops_per_submit: number("ops_per_submit"),
            system_calls_per_io: number("syscalls_per_io"),
            harvested_at_once: if alone { sizes.collect() } else { daemon_sizes(messages) },
            idle_cpu_percent: None,
        })
    }
}

/// Parses the completions harvested at once from the daemon's last messages. `None` if it harvested
/// nothing, as with a null disk.
fn daemon_sizes(messages: &str) -> Option<Vec<f64>> {
    let (_, rest) = messages.rsplit_once("harvested at once ")?;
    let (sizes, _) = rest.split_once(';')?;
    let sizes: Option<Vec<f64>> =
        sizes.split_ascii_whitespace().map(|size| size.parse().ok()).collect();
    sizes.filter(|sizes| sizes.len() == SIZE_PERCENTILES.len() && sizes.iter().any(|n| *n > 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(latency: &str) -> serde_json::Map<String, Value> {
        let mut report = serde_json::Map::new();
        for (key, value) in [("ios", 100.0), ("iops", 50.0), ("calls", 25.0)] {
            report.insert(key.to_owned(), value.into());
        }
        for (name, percent) in LATENCY_PERCENTILES {
            report.insert(format!("{latency}_p{name}_us"), percent.into());
        }
        report.insert(format!("{latency}_mean_us"), 42.0.into());
        report
    }

    #[test]
    fn a_daemon_s_batches_come_from_its_messages() {
        let log = "INFO iothread-0: at 1, 10, 20 ... 90, 99.99%: harvested at once 1 2 3 4 5 6 7 \
                    8 9 10 128; submitted at once 0 0";
        let sample = Sample::parse(&report("latency").into(), Clock::QueuedToFound, log).unwrap();
        assert_eq!(sample.latency["all"].mean_us, 42.0);
        assert_eq!(sample.latency["all"].percentiles_us[6], 50.0);
        assert!(!sample.latency.contains_key("read"));
        assert_eq!(sample.calls_per_io, Some(0.25));
        assert_eq!(sample.harvested_at_once.unwrap()[10], 128.0);
        let none = "harvested at once 0 0 0 0 0 0 0 0 0 0 0; submitted";
        assert_eq!(daemon_sizes(none), None);
        assert_eq!(daemon_sizes(""), None);
    }

    #[test]
    fn an_engine_s_latency_is_that_of_its_ops() {
        let mut report = report("completion_latency");
        report.insert("engine".to_owned(), "aio".into());
        for at in SIZE_PERCENTILES {
            report.insert(format!("harvested_at_once_p{at}"), 16.into());
        }
        let sample = Sample::parse(&report.into(), Clock::SubmitToHarvest, "").unwrap();
        assert_eq!(sample.latency["all"].percentiles_us.last(), Some(&99.99));
        assert_eq!(sample.harvested_at_once, Some(vec![16.0; 11]));
        assert_eq!(sample.calls_per_io, None);
    }
}
