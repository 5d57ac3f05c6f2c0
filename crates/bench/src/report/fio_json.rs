//! A report in the form of fio's JSON, for programs that draw fio's reports.

#![forbid(unsafe_code)]

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::report::{DirectionReport, LatencyReport, PERCENTILES, Report};

/// Renders a report as fio's output for one job.
pub(crate) fn render(report: &Report, name: Option<&str>) -> serde_json::Result<String> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let job = json!({
        "jobname": name.unwrap_or("ringhaul"),
        "groupid": 0,
        "error": i32::from(report.failed()),
        "elapsed": (report.ramp_time_s + report.runtime_s).ceil(),
        "job options": {
            "rw": report.rw,
            "bs": report.block_size,
            "iodepth": report.iodepth.to_string(),
            "numjobs": report.numjobs.to_string(),
        },
        "read": direction(&report.read, report.runtime_s),
        "write": direction(&report.write, report.runtime_s),
        "sync": { "total_ios": report.flush.ios, "lat_ns": latency(report.flush.latency.as_ref()) },
    });
    let whole = json!({
        "fio version": format!("ringhaul-{}", report.tool_version),
        "timestamp": since.as_secs(),
        "timestamp_ms": since.as_secs() * 1000 + u64::from(since.subsec_millis()),
        "jobs": [job],
    });
    serde_json::to_string_pretty(&whole).map(|text| text + "\n")
}

fn direction(report: &DirectionReport, runtime_s: f64) -> Value {
    json!({
        "io_bytes": report.bytes,
        "io_kbytes": report.bytes >> 10,
        "bw_bytes": report.bandwidth_bytes_per_s.round(),
        "bw": (report.bandwidth_bytes_per_s / 1024.0).round(),
        "iops": report.iops,
        "runtime": (runtime_s * 1000.0).round(),
        "total_ios": report.ios,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": latency(None),
        "clat_ns": latency(report.completion_latency.as_ref().or(report.latency.as_ref())),
        "lat_ns": latency(report.latency.as_ref()),
    })
}

fn latency(report: Option<&LatencyReport>) -> Value {
    let ns = |us: f64| (us * 1000.0).round();
    let Some(report) = report else {
        return json!({ "min": 0, "max": 0, "mean": 0.0, "stddev": 0.0, "N": 0 });
    };
    let percentiles = PERCENTILES.iter().zip(report.percentiles_us);
    let percentiles: Map<String, Value> =
        percentiles.map(|(percent, us)| (format!("{percent:.6}"), ns(us).into())).collect();
    json!({
        "min": ns(report.min_us),
        "max": ns(report.max_us),
        "mean": report.mean_us * 1000.0,
        "stddev": report.stddev_us * 1000.0,
        "percentile": percentiles,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::sample;

    #[test]
    fn json_has_the_keys_of_fio() {
        let text = render(&sample(), Some("boot")).unwrap();
        let report: Value = serde_json::from_str(&text).unwrap();
        let job = &report["jobs"][0];
        assert_eq!((&job["jobname"], &job["error"]), (&json!("boot"), &json!(0)));
        assert_eq!(job["read"]["total_ios"], 1000);
        assert_eq!(job["read"]["io_kbytes"], 4000);
        assert_eq!(job["read"]["runtime"], 2000.0);
        assert!(job["read"]["clat_ns"]["percentile"]["99.000000"].as_f64().unwrap() > 900_000.0);
        assert_eq!(job["write"]["total_ios"], 0);
    }
}
