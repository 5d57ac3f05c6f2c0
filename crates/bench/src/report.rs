//! The result of a run, and its JSON form.

#![forbid(unsafe_code)]

pub(crate) mod fio_json;
pub(crate) mod text;

use std::time::Duration;

use blockio::stats::Distribution;
use hdrhistogram::Histogram;
use iomem::fits;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::engine_stats::{EngineCounters, EngineReport, Setup};
use crate::pattern::Op;
use crate::plan::{DeviceInfo, Plan};
use crate::server::ServerUsage;
use crate::stats::{Counters, OpStats};

/// Version of the JSON form. Increases when a key changes its meaning or disappears; new keys do
/// not change it.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// The reported percentiles of latency: fio's.
pub const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// The result of a run.
///
/// As JSON it is one flat object with the fields of this structure as keys. Each
/// [`DirectionReport`] becomes keys with a prefix, as described there: none for `total`, and
/// `read_`, `write_`, `flush_`. Unknown values and divisions by zero are `null`. "Per I/O" means
/// per completed read, write or flush. Counts are for the measured window unless their description
/// differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Version of this program.
    pub tool_version: &'static str,
    /// Socket of the server; `null` with `--filename`.
    pub socket_path: Option<String>,
    /// File or device that was driven directly; `null` with `--socket-path`.
    pub filename: Option<String>,
    /// Kind of the device, as given to `--device`; `null` with `--filename`.
    pub device: Option<&'static str>,
    /// Driven logical unit, as TARGET:LUN, or `all`; `null` but for SCSI devices.
    pub unit: Option<String>,
    /// Number of driven logical units; `null` but for SCSI devices.
    pub units: Option<usize>,
    /// Pattern, as given to `--rw`.
    pub rw: &'static str,
    /// Share of reads asked for in a mixed pattern; `null` for other patterns.
    pub rwmixread_percent: Option<u8>,
    /// Block size or mix of them, as given to `--bs` or `--bssplit`.
    pub block_size: String,
    /// Requests kept in flight by each job.
    pub iodepth: u32,
    /// Number of jobs, and of virtqueues with requests.
    pub numjobs: u32,
    /// Descriptors in each virtqueue; `null` with `--filename`.
    pub queue_size: Option<u16>,
    /// Largest number of bytes in one descriptor.
    pub segment_size_bytes: u64,
    /// True if each job had a thread of its own.
    pub threads: bool,
    /// Reads and writes due for each job in a second; `null` for a closed loop.
    pub rate_iops: Option<u32>,
    /// Distribution of their start times, as given to `--rate_process`; `null` without a rate.
    pub rate_process: Option<&'static str>,
    /// True if the driver spun instead of sleeping.
    pub busy_poll: bool,
    /// True if the server marked its requests in an inflight region.
    pub inflight: bool,
    /// True if the rings were packed.
    pub packed: bool,
    /// True if each request was in an indirect table.
    pub indirect: bool,
    /// Microseconds of spinning added between a call and the check of the used rings.
    pub wake_delay_us: u64,
    /// Writes between two flushes; 0 without flushes.
    pub fsync_every_writes: u64,
    /// Seed of the random numbers.
    pub randseed: u64,
    /// First byte of the region, in each unit.
    pub region_offset_bytes: u64,
    /// Length of the region, in all units together.
    pub region_size_bytes: u64,
    /// Size of the disk, or of all units together.
    pub disk_size_bytes: u64,
    /// Logical block size of the disk; the largest of all units.
    pub logical_block_size_bytes: u32,
    /// Ramp time before the measured window.
    pub ramp_time_s: f64,
    /// Length of the measured window.
    pub runtime_s: f64,
    /// True if a signal ended the run early.
    pub interrupted: bool,
    /// Reads and writes together.
    #[serde(flatten)]
    pub total: DirectionReport,
    /// Reads.
    #[serde(flatten)]
    pub read: DirectionReport,
    /// Writes.
    #[serde(flatten)]
    pub write: DirectionReport,
    /// Flushes.
    #[serde(flatten)]
    pub flush: DirectionReport,
    /// True if data was verified.
    pub verify: bool,
    /// Size of a verified block; `null` without `--verify`.
    pub verify_block_size_bytes: Option<u32>,
    /// Blocks that were compared with the expected data, in the whole run.
    pub verified_blocks: u64,
    /// Reads that returned an unexpected block, in the whole run.
    pub verify_mismatches: u64,
    /// Calls from the server: the sum of the counters of the call eventfds.
    pub calls: u64,
    /// Calls per second.
    pub calls_per_s: f64,
    /// Completed requests per call.
    pub completions_per_call: Option<f64>,
    /// Kicks to the server.
    pub kicks: u64,
    /// Kicks per second.
    pub kicks_per_s: f64,
    /// Kicks per I/O.
    pub kicks_per_io: Option<f64>,
    /// Process of the server, or with `--filename` this process. `null` if it is not visible, and
    /// so are the next nine.
    pub server_pid: Option<u32>,
    /// Threads of the server at the end.
    pub server_threads: Option<usize>,
    /// CPU time of all threads of the server.
    pub server_cpu_us: Option<f64>,
    /// CPU time of the server as a share of one CPU.
    pub server_cpu_percent: Option<f64>,
    /// CPU time of the server per I/O.
    pub server_cpu_us_per_io: Option<f64>,
    /// Part of it in user mode, by the share of the kernel's ticks.
    pub server_cpu_user_us_per_io: Option<f64>,
    /// Part of it in the kernel, by the share of the kernel's ticks.
    pub server_cpu_system_us_per_io: Option<f64>,
    /// Context switches of the server because it slept, per I/O.
    pub server_voluntary_switches_per_io: Option<f64>,
    /// Context switches of the server by preemption, per I/O.
    pub server_involuntary_switches_per_io: Option<f64>,
    /// The engine's activity; its keys exist with `--filename` only.
    #[serde(flatten)]
    pub engine: Option<EngineReport>,
}

/// I/O of one kind.
///
/// In JSON every key has the direction's prefix:
///
/// - `ios`, `iops`, `bytes`, `bandwidth_bytes_per_s`
/// - `errors` (requests that the server failed, in the whole run)
/// - the latency as `latency_min_us`, `latency_max_us`, `latency_mean_us`, `latency_stddev_us` and
///   `latency_pN_us` for each of [`PERCENTILES`], with an underscore for the decimal point, as in
///   `read_latency_p99_9_us`
/// - with `--filename`, the same keys with `completion_latency` in place of `latency`: the time of
///   the ops from their submit to the harvest that found them
#[derive(Debug, Clone, PartialEq)]
pub struct DirectionReport {
    /// `""`, `"read_"`, `"write_"` or `"flush_"`.
    pub prefix: &'static str,
    /// Requests completed without error in the measured window.
    pub ios: u64,
    /// These requests per second.
    pub iops: f64,
    /// Bytes that they moved.
    pub bytes: u64,
    /// Bytes per second.
    pub bandwidth_bytes_per_s: f64,
    /// Requests that the server failed, in the whole run.
    pub errors: u64,
    /// Time from the queueing of a request to the pass that found it completed; `None` without I/O.
    pub latency: Option<LatencyReport>,
    /// Time from submit to harvest; `None` without `--filename`.
    pub completion_latency: Option<LatencyReport>,
}

/// Latency in microseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct LatencyReport {
    /// Shortest.
    pub min_us: f64,
    /// Longest.
    pub max_us: f64,
    /// Arithmetic mean.
    pub mean_us: f64,
    /// Standard deviation.
    pub stddev_us: f64,
    /// Values in the order of [`PERCENTILES`].
    pub percentiles_us: [f64; PERCENTILES.len()],
}

/// The input of a report.
pub(crate) struct Measured<'a> {
    pub(crate) plan: &'a Plan<'a>,
    pub(crate) info: &'a DeviceInfo,
    pub(crate) counters: &'a Counters,
    pub(crate) engine: Option<(&'a Setup, &'a EngineCounters)>,
    pub(crate) elapsed: Duration,
    pub(crate) server_pid: Option<u32>,
    pub(crate) usage: Option<&'a ServerUsage>,
    pub(crate) verify_block_bytes: Option<u32>,
    pub(crate) interrupted: bool,
}

impl Report {
    pub(crate) fn new(measured: &Measured<'_>) -> Self {
        let Measured { plan, info, counters, usage, .. } = *measured;
        let (args, seconds) = (plan.args, measured.elapsed.as_secs_f64());
        let [total, read, write, flush] = DirectionReport::all(measured, seconds);
        let ios = total.ios + flush.ios;
        let server_per_io = |pick: fn(&ServerUsage) -> f64| ratio(usage.map(pick)?, ios as f64);
        let cpu_us = usage.map(|usage| usage.cpu_us);
        let by_mode = |share: fn(f64) -> f64| {
            let user_share = usage?.user_share?;
            ratio(usage?.cpu_us * share(user_share), ios as f64)
        };
        Self {
            format_version: FORMAT_VERSION,
            tool_version: env!("CARGO_PKG_VERSION"),
            socket_path: args.socket_path.as_ref().map(|path| path.display().to_string()),
            filename: args.filename.as_ref().map(|path| path.display().to_string()),
            device: args.filename.is_none().then(|| args.device.name()),
            unit: args.unit().map(|unit| unit.to_string()),
            units: args.unit().map(|_| info.units.len()),
            rw: args.pattern().name(),
            rwmixread_percent: args.pattern().is_mixed().then_some(args.percent_reads()),
            block_size: plan.sizes.to_string(),
            iodepth: plan.depth,
            numjobs: args.numjobs.get(),
            queue_size: Some(plan.shape.size).filter(|size| *size > 0),
            segment_size_bytes: fits(plan.shape.segment_bytes, "the size of a segment"),
            threads: args.threads,
            rate_iops: args.rate_iops,
            rate_process: args.rate_iops.map(|_| args.rate_process.name()),
            busy_poll: args.busy_poll,
            inflight: args.inflight,
            packed: args.packed,
            indirect: args.indirect,
            wake_delay_us: args.wake_delay,
            fsync_every_writes: args.fsync,
            randseed: args.randseed,
            region_offset_bytes: args.offset,
            region_size_bytes: plan.region_bytes(),
            disk_size_bytes: info.disk_bytes(),
            logical_block_size_bytes: info.logical_block_bytes(),
            ramp_time_s: args.ramp_time.as_secs_f64(),
            runtime_s: seconds,
            interrupted: measured.interrupted,
            total,
            read,
            write,
            flush,
            verify: args.verify,
            verify_block_size_bytes: measured.verify_block_bytes,
            verified_blocks: counters.verified,
            verify_mismatches: counters.mismatches,
            calls: counters.calls,
            calls_per_s: ratio(counters.calls as f64, seconds).unwrap_or(0.0),
            completions_per_call: ratio(ios as f64, counters.calls as f64),
            kicks: counters.kicks,
            kicks_per_s: ratio(counters.kicks as f64, seconds).unwrap_or(0.0),
            kicks_per_io: ratio(counters.kicks as f64, ios as f64),
            server_pid: measured.server_pid,
            server_threads: usage.map(|usage| usage.threads),
            server_cpu_us: cpu_us,
            server_cpu_percent: cpu_us.and_then(|us| ratio(us / 10_000.0, seconds)),
            server_cpu_us_per_io: server_per_io(|usage| usage.cpu_us),
            server_cpu_user_us_per_io: by_mode(|user| user),
            server_cpu_system_us_per_io: by_mode(|user| 1.0 - user),
            server_voluntary_switches_per_io: server_per_io(|u| u.voluntary_switches as f64),
            server_involuntary_switches_per_io: server_per_io(|u| u.involuntary_switches as f64),
            engine: measured.engine.map(|(setup, figures)| EngineReport::new(setup, figures, ios)),
        }
    }

    /// Returns true if I/O failed or blocks did not verify.
    pub fn failed(&self) -> bool {
        self.total.errors > 0 || self.flush.errors > 0 || self.verify_mismatches > 0
    }
}

/// Divides; `None` for a division by zero.
fn ratio(numerator: f64, denominator: f64) -> Option<f64> {
    (denominator > 0.0).then(|| numerator / denominator)
}

impl DirectionReport {
    fn all(measured: &Measured<'_>, seconds: f64) -> [Self; 4] {
        let directions: [(_, &[Op]); 4] = [
            ("", &[Op::Read, Op::Write]),
            ("read_", &[Op::Read]),
            ("write_", &[Op::Write]),
            ("flush_", &[Op::Flush]),
        ];
        directions.map(|(prefix, ops)| Self::new(prefix, ops, measured, seconds))
    }

    fn new(prefix: &'static str, ops: &[Op], measured: &Measured<'_>, seconds: f64) -> Self {
        let counters = measured.counters;
        let mut stats = OpStats::new();
        ops.iter().for_each(|op| stats.merge(&counters.ops[op.index()]));
        let completion_latency = measured.engine.and_then(|(_, figures)| {
            let mut sum = Distribution::default();
            ops.iter().for_each(|op| sum.add(&figures.latency_ns[op.index()]));
            LatencyReport::from_distribution(&sum)
        });
        Self {
            prefix,
            ios: stats.ios,
            iops: ratio(stats.ios as f64, seconds).unwrap_or(0.0),
            bytes: stats.bytes,
            bandwidth_bytes_per_s: ratio(stats.bytes as f64, seconds).unwrap_or(0.0),
            errors: ops.iter().map(|op| counters.errors[op.index()]).sum(),
            latency: (stats.ios > 0).then(|| LatencyReport::new(&stats.latency)),
            completion_latency,
        }
    }
}

const NS_PER_US: f64 = 1000.0;

impl LatencyReport {
    fn new(latency_ns: &Histogram<u64>) -> Self {
        let at = |percent| latency_ns.value_at_percentile(percent) as f64 / NS_PER_US;
        Self {
            min_us: latency_ns.min() as f64 / NS_PER_US,
            max_us: latency_ns.max() as f64 / NS_PER_US,
            mean_us: latency_ns.mean() / NS_PER_US,
            stddev_us: latency_ns.stdev() / NS_PER_US,
            percentiles_us: PERCENTILES.map(at),
        }
    }

    /// Makes a report from values that are known to within a few percent; the mean is exact.
    fn from_distribution(latency_ns: &Distribution) -> Option<Self> {
        let (min, max) = latency_ns.bounds()?;
        let count = latency_ns.count() as f64;
        let mean = latency_ns.sum() as f64 / count;
        let squares = |(value, count): (u64, u64)| (value as f64 - mean).powi(2) * count as f64;
        let variance = latency_ns.counts().map(squares).sum::<f64>() / count;
        Some(Self {
            min_us: (min as f64).min(mean) / NS_PER_US,
            max_us: max as f64 / NS_PER_US,
            mean_us: mean / NS_PER_US,
            stddev_us: variance.sqrt() / NS_PER_US,
            percentiles_us: PERCENTILES
                .map(|percent| latency_ns.percentile(percent) as f64 / NS_PER_US),
        })
    }
}

impl Serialize for DirectionReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let prefix = self.prefix;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(&format!("{prefix}ios"), &self.ios)?;
        map.serialize_entry(&format!("{prefix}iops"), &self.iops)?;
        map.serialize_entry(&format!("{prefix}bytes"), &self.bytes)?;
        let bandwidth = self.bandwidth_bytes_per_s;
        map.serialize_entry(&format!("{prefix}bandwidth_bytes_per_s"), &bandwidth)?;
        map.serialize_entry(&format!("{prefix}errors"), &self.errors)?;
        serialize_latency(&mut map, &format!("{prefix}latency"), self.latency.as_ref())?;
        if let Some(latency) = &self.completion_latency {
            serialize_latency(&mut map, &format!("{prefix}completion_latency"), Some(latency))?;
        }
        map.end()
    }
}

fn serialize_latency<M: SerializeMap>(
    map: &mut M,
    prefix: &str,
    latency: Option<&LatencyReport>,
) -> Result<(), M::Error> {
    for (name, value) in [
        ("min", latency.map(|latency| latency.min_us)),
        ("max", latency.map(|latency| latency.max_us)),
        ("mean", latency.map(|latency| latency.mean_us)),
        ("stddev", latency.map(|latency| latency.stddev_us)),
    ] {
        map.serialize_entry(&format!("{prefix}_{name}_us"), &value)?;
    }
    for (index, percent) in PERCENTILES.iter().enumerate() {
        let name = percent.to_string().replace('.', "_");
        let value = latency.map(|latency| latency.percentiles_us[index]);
        map.serialize_entry(&format!("{prefix}_p{name}_us"), &value)?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::args::tests::parse;
    use crate::engine_stats;
    use crate::plan::{TargetKind, UnitInfo};

    /// A thousand reads of 4 KiB with latencies of 1 to 1000 µs, and one flush, in two seconds.
    pub(crate) fn sample() -> Report {
        sample_of("", None)
    }

    /// Like [`sample`], from two units of a SCSI device.
    pub(crate) fn scsi_sample() -> Report {
        sample_of("--device=scsi --lun=all", None)
    }

    /// Like [`sample`], through an engine, with the figures of that engine.
    pub(crate) fn engine_sample() -> Report {
        let setup = engine_stats::tests::setup();
        sample_of("", Some((&setup, &engine_stats::tests::figures())))
    }

    fn sample_of(options: &str, engine: Option<(&Setup, &EngineCounters)>) -> Report {
        let args = parse(&format!("--rw=randread --iodepth=8 --fsync=1 {options}")).unwrap();
        let unit = UnitInfo {
            name: "the disk".to_owned(),
            disk_bytes: 1 << 30,
            logical_block_bytes: 512,
            read_only: false,
        };
        let count = if args.unit().is_some() { 2 } else { 1 };
        let info = DeviceInfo {
            kind: TargetKind::Blk,
            units: vec![unit; count],
            max_queues: 1,
            can_flush: true,
            size_max: None,
            seg_max: None,
        };
        let plan = Plan::new(&args, &info).unwrap();
        let mut counters = Counters::new();
        for us in 1..=1000 {
            counters.ops[Op::Read.index()].record(4096, us * 1000);
        }
        counters.ops[Op::Flush.index()].record(0, 5000);
        (counters.calls, counters.kicks) = (7, 91);
        let usage = ServerUsage {
            cpu_us: 2002.0,
            user_share: Some(0.25),
            voluntary_switches: 1001,
            involuntary_switches: 0,
            threads: 3,
        };
        Report::new(&Measured {
            plan: &plan,
            info: &info,
            counters: &counters,
            engine,
            elapsed: Duration::from_secs(2),
            server_pid: Some(17),
            usage: Some(&usage),
            verify_block_bytes: None,
            interrupted: false,
        })
    }

    #[test]
    fn json_is_flat_and_has_units() {
        let json = serde_json::to_value(sample()).unwrap();
        let number = |key: &str| {
            json.get(key).and_then(serde_json::Value::as_f64).unwrap_or_else(|| panic!("{key}"))
        };
        for (key, expected) in [
            ("format_version", 1.0),
            ("iops", 500.0),
            ("read_iops", 500.0),
            ("write_iops", 0.0),
            ("read_bandwidth_bytes_per_s", 2_048_000.0),
            ("completions_per_call", 143.0),
            ("calls_per_s", 3.5),
            ("kicks_per_io", 91.0 / 1001.0),
            ("server_cpu_us_per_io", 2.0),
            ("server_cpu_user_us_per_io", 0.5),
            ("server_cpu_system_us_per_io", 1.5),
            ("server_voluntary_switches_per_io", 1.0),
        ] {
            assert!((number(key) - expected).abs() < 1e-9, "{key}: {}", number(key));
        }
        for (key, expected) in [
            ("latency_mean_us", 500.5),
            ("read_latency_p50_us", 500.0),
            ("read_latency_p99_us", 990.0),
            ("read_latency_p99_9_us", 999.0),
            ("flush_latency_max_us", 5.0),
        ] {
            assert!((number(key) / expected - 1.0).abs() < 0.002, "{key}: {}", number(key));
        }
        assert!(json["write_latency_p50_us"].is_null());
        let object = json.as_object().unwrap();
        assert!(object.values().all(|value| !value.is_object() && !value.is_array()));
    }

    #[test]
    fn json_names_the_kind_of_device() {
        let json = serde_json::to_value(sample()).unwrap();
        assert_eq!(json["device"], "blk");
        assert!(json["unit"].is_null() && json["units"].is_null());
        let json = serde_json::to_value(scsi_sample()).unwrap();
        assert_eq!((&json["device"], &json["unit"]), (&"scsi".into(), &"all".into()));
        assert_eq!((&json["units"], &json["disk_size_bytes"]), (&2.into(), &(2_u64 << 30).into()));
    }

    #[test]
    fn json_of_an_engine_has_engine_keys() {
        let json = serde_json::to_value(engine_sample()).unwrap();
        assert_eq!(json["engine"], "aio");
        assert_eq!(json["harvested_at_once_p99_99"], 128);
        let mean = json["read_completion_latency_mean_us"].as_f64().unwrap();
        assert!((mean - 72.0).abs() < 1e-9, "{mean}");
        let p50 = json["completion_latency_p50_us"].as_f64().unwrap();
        assert!((p50 / 16.0 - 1.0).abs() < 0.04, "{p50}");
        assert!(json.get("write_completion_latency_mean_us").is_none());
        let plain = serde_json::to_value(sample()).unwrap();
        assert!(plain.get("engine").is_none());
        assert!(plain.as_object().unwrap().keys().all(|key| !key.contains("completion_latency")));
        let object = json.as_object().unwrap();
        assert!(object.values().all(|value| !value.is_object() && !value.is_array()));
    }

    #[test]
    fn errors_and_mismatches_fail_the_run() {
        assert!(!sample().failed());
        let mut report = sample();
        report.flush.errors = 1;
        assert!(report.failed());
        let report = Report { verify_mismatches: 1, ..sample() };
        assert!(report.failed());
    }
}
