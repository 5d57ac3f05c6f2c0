//! The result as text for people.

#![forbid(unsafe_code)]

use std::fmt::Write;

use crate::report::{DirectionReport, LatencyReport, PERCENTILES, Report};
use crate::units::{show_amount, show_bytes, show_count};

/// Percentiles in one line.
const PER_LINE: usize = 6;

/// Writes a report out. Ends with a line feed.
pub(crate) fn render(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_all(&mut text, report);
    text
}

fn write_all(out: &mut String, report: &Report) -> std::fmt::Result {
    write_headline(out, report)?;
    for (name, direction) in
        [("read", &report.read), ("write", &report.write), ("flush", &report.flush)]
    {
        if direction.ios > 0 || direction.errors > 0 {
            write_direction(out, name, direction)?;
        }
    }
    write_notifications(out, report)?;
    write_server(out, report)?;
    write_checks(out, report)
}

fn write_headline(out: &mut String, report: &Report) -> std::fmt::Result {
    let mix = report.rwmixread_percent.map(|percent| format!(" ({percent}% reads)"));
    writeln!(
        out,
        "{}{}: bs={}, iodepth={}, numjobs={}, queue size {}{}{}, {:.3} s{}",
        report.rw,
        mix.unwrap_or_default(),
        report.block_size,
        report.iodepth,
        report.numjobs,
        report.queue_size,
        if report.threads { ", a thread for each job" } else { "" },
        if report.busy_poll { ", busy-polling" } else { "" },
        report.runtime_s,
        if report.interrupted { " (interrupted)" } else { "" },
    )?;
    writeln!(
        out,
        "  {}: disk of {}, logical blocks of {} bytes, region of {} at {}",
        report.socket_path,
        show_amount(report.disk_size_bytes as f64),
        report.logical_block_size_bytes,
        show_amount(report.region_size_bytes as f64),
        show_bytes(report.region_offset_bytes),
    )
}

fn write_direction(out: &mut String, name: &str, direction: &DirectionReport) -> std::fmt::Result {
    writeln!(
        out,
        "  {name}: IOPS={}, bandwidth={}/s, {} I/Os, {}",
        show_count(direction.iops),
        show_amount(direction.bandwidth_bytes_per_s),
        direction.ios,
        show_amount(direction.bytes as f64),
    )?;
    direction.latency.as_ref().map_or(Ok(()), |latency| write_latency(out, latency))
}

fn write_latency(out: &mut String, latency: &LatencyReport) -> std::fmt::Result {
    writeln!(
        out,
        "    latency (us): min={}, mean={}, max={}, stddev={}",
        microseconds(latency.min_us),
        microseconds(latency.mean_us),
        microseconds(latency.max_us),
        microseconds(latency.stddev_us),
    )?;
    writeln!(out, "    latency percentiles (us):")?;
    let pairs: Vec<_> = PERCENTILES.iter().zip(&latency.percentiles_us).collect();
    for line in pairs.chunks(PER_LINE) {
        let cells =
            line.iter().map(|(percent, us)| format!("{percent:5.2}th=[{:>7}]", microseconds(**us)));
        writeln!(out, "      {}", cells.collect::<Vec<_>>().join(" "))?;
    }
    Ok(())
}

fn microseconds(us: f64) -> String {
    let decimals = match us {
        us if us < 10.0 => 2,
        us if us < 1000.0 => 1,
        _ => 0,
    };
    format!("{us:.decimals$}")
}

fn write_notifications(out: &mut String, report: &Report) -> std::fmt::Result {
    writeln!(
        out,
        "  calls: {}/s, {} completions per call; kicks: {}/s, {} per I/O",
        show_count(report.calls_per_s),
        optional(report.completions_per_call, 2),
        show_count(report.kicks_per_s),
        optional(report.kicks_per_io, 4),
    )
}

fn optional(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
}

fn write_server(out: &mut String, report: &Report) -> std::fmt::Result {
    let (Some(pid), Some(_)) = (report.server_pid, report.server_cpu_us) else {
        return writeln!(out, "  server: its CPU time is not known");
    };
    writeln!(
        out,
        "  server (pid {pid}): {} us of CPU per I/O (user {}, system {}), {}% of a CPU",
        optional(report.server_cpu_us_per_io, 3),
        optional(report.server_cpu_user_us_per_io, 3),
        optional(report.server_cpu_system_us_per_io, 3),
        optional(report.server_cpu_percent, 1),
    )?;
    writeln!(
        out,
        "    context switches per I/O: voluntary {}, involuntary {}; threads: {}",
        optional(report.server_voluntary_switches_per_io, 4),
        optional(report.server_involuntary_switches_per_io, 4),
        report.server_threads.unwrap_or(0),
    )
}

fn write_checks(out: &mut String, report: &Report) -> std::fmt::Result {
    let errors = report.total.errors + report.flush.errors;
    write!(out, "  errors: {errors}")?;
    if report.verify {
        write!(
            out,
            "; verify: {} blocks checked, {} reads with wrong data",
            report.verified_blocks, report.verify_mismatches
        )?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::sample;

    #[test]
    fn the_text_has_what_was_measured() {
        let text = render(&sample());
        for part in [
            "randread: bs=4k, iodepth=8, numjobs=1",
            "read: IOPS=500, bandwidth=1.95 MiB/s, 1000 I/Os",
            "99.00th=[  990.2]",
            "143.00 completions per call",
            "server (pid 17): 2.000 us of CPU per I/O (user 0.500, system 1.500)",
            "errors: 0\n",
        ] {
            assert!(text.contains(part), "no '{part}' in:\n{text}");
        }
        assert!(!text.contains("write:"), "a direction without I/O is left out:\n{text}");
    }
}
