//! The result as text for people.

#![forbid(unsafe_code)]

use std::fmt::Write;

use blockio::stats::SIZE_PERCENTILES;
use ringhaul_options::redact::escape_controls;

use crate::engine_stats::EngineReport;
use crate::quantities::{show_amount, show_bytes, show_count};
use crate::report::{DirectionReport, LatencyReport, PERCENTILES, Report};

/// Percentiles per line.
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
    match &report.engine {
        Some(engine) => write_engine(out, engine)?,
        None => write_notifications(out, report)?,
    }
    write_server(out, report)?;
    write_checks(out, report)
}

fn write_headline(out: &mut String, report: &Report) -> std::fmt::Result {
    let mix = report.rwmixread_percent.map(|percent| format!(" ({percent}% reads)"));
    let process = report.rate_process.unwrap_or_default();
    let open_loop = report.rate_iops.map(|rate| format!(", {rate} IOPS for each job ({process})"));
    writeln!(
        out,
        "{}{}: bs={}, iodepth={}, numjobs={}{}{}{}{}{}, {:.3} s{}",
        report.rw,
        mix.unwrap_or_default(),
        report.block_size,
        report.iodepth,
        report.numjobs,
        report.queue_size.map(|size| format!(", queue size {size}")).unwrap_or_default(),
        if report.threads { ", a thread for each job" } else { "" },
        open_loop.unwrap_or_default(),
        if report.busy_poll { ", busy-polling" } else { "" },
        match report.wake_delay_us {
            0 => String::new(),
            delay => format!(", {delay} µs late when called"),
        },
        report.runtime_s,
        if report.interrupted { " (interrupted)" } else { "" },
    )?;
    let name = report.socket_path.as_ref().or(report.filename.as_ref());
    writeln!(
        out,
        "  {}: {} of {}, logical blocks of {} bytes, region of {} at {}",
        escape_controls(name.map_or("", String::as_str)),
        describe_disk(report),
        show_amount(report.disk_size_bytes as f64),
        report.logical_block_size_bytes,
        show_amount(report.region_size_bytes as f64),
        show_bytes(report.region_offset_bytes),
    )
}

/// The kind of the disk, and its unit.
fn describe_disk(report: &Report) -> String {
    match (report.device, &report.unit, report.units) {
        (_, Some(unit), Some(units)) if unit == "all" => format!("all SCSI units ({units})"),
        (_, Some(unit), _) => format!("SCSI unit {unit}"),
        (Some(device), ..) => format!("virtio-{device} disk"),
        (None, ..) => "disk".to_owned(),
    }
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
    for (what, latency) in
        [("latency", &direction.latency), ("completion latency", &direction.completion_latency)]
    {
        latency.as_ref().map_or(Ok(()), |latency| write_latency(out, what, latency))?;
    }
    Ok(())
}

fn write_latency(out: &mut String, what: &str, latency: &LatencyReport) -> std::fmt::Result {
    writeln!(
        out,
        "    {what} (us): min={}, mean={}, max={}, stddev={}",
        microseconds(latency.min_us),
        microseconds(latency.mean_us),
        microseconds(latency.max_us),
        microseconds(latency.stddev_us),
    )?;
    writeln!(out, "    {what} percentiles (us):")?;
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

fn write_engine(out: &mut String, engine: &EngineReport) -> std::fmt::Result {
    let setup = &engine.setup;
    let together =
        setup.iodepth_batch.map_or_else(|| "up to 16".to_owned(), |batch| batch.to_string());
    let usual =
        format!("{together} I/Os queued together, busy-poll up to {} us", setup.poll_max_us);
    let Some(name) = &setup.engine else {
        writeln!(out, "  no engine: {usual}")?;
        return write_system_calls(out, engine);
    };
    writeln!(
        out,
        "  engine {name}: {}, {usual}{}{}{}{}",
        if setup.direct { "direct I/O" } else { "page cache" },
        if setup.completion_ring == "getevents" { ", completions by io_getevents" } else { "" },
        if setup.sqpoll { ", a submission thread" } else { "" },
        if setup.harvest_on_submit { "" } else { ", no harvest on submit" },
        if setup.submit_batch { "" } else { ", ops submitted one by one" },
    )?;
    if setup.iopoll {
        writeln!(out, "    completions that were polled for: {}", engine.polled)?;
    }
    let heads = SIZE_PERCENTILES.map(|percent| format!("{:>7}", format!("{percent}%")));
    writeln!(out, "    {:20}{}", "at once", heads.join(""))?;
    let rows = [
        ("completions harvested", &engine.harvested_at_once),
        ("ops submitted", &engine.submitted_at_once),
    ];
    for (name, sizes) in rows {
        let cells = sizes.percentiles.map(|size| format!("{size:>7}"));
        let mean = optional(sizes.mean, 1);
        writeln!(out, "    {name:20}{} mean {mean}, {} times", cells.join(""), sizes.count)?;
    }
    write_system_calls(out, engine)
}

fn write_system_calls(out: &mut String, engine: &EngineReport) -> std::fmt::Result {
    let calls = engine.system_calls.iter().filter(|(_, count)| *count > 0);
    let calls: Vec<_> = calls.map(|(name, count)| format!("{count} {name}")).collect();
    writeln!(
        out,
        "    system calls: {} per I/O ({})",
        optional(engine.system_calls_per_io, 4),
        calls.join(", "),
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
        "  {} (pid {pid}): {} us of CPU per I/O (user {}, system {}), {}% of a CPU",
        if report.engine.is_some() { "this process" } else { "server" },
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
    use crate::report::tests::{engine_sample, sample, scsi_sample};

    #[test]
    fn the_text_has_all_measurements() {
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
        assert!(!text.contains("harvested"), "there is no engine:\n{text}");
        assert!(!text.contains("write:"), "a direction without I/O is left out:\n{text}");
    }

    #[test]
    fn the_text_names_the_kind_of_device() {
        let text = render(&sample());
        assert!(text.contains("  s: virtio-blk disk of 1.00 GiB, logical blocks of 512"), "{text}");
        let text = render(&scsi_sample());
        assert!(text.contains("  s: all SCSI units (2) of 2.00 GiB,"), "{text}");
    }

    #[test]
    fn the_text_of_a_disk_without_an_engine_names_no_engine() {
        let mut report = engine_sample();
        report.engine.as_mut().unwrap().setup.engine = None;
        let text = render(&report);
        assert!(text.contains("  no engine: up to 16 I/Os queued together"), "{text}");
        assert!(text.contains("    system calls: "), "{text}");
        assert!(!text.contains("direct I/O") && !text.contains("harvested"), "{text}");
    }

    #[test]
    fn the_text_of_an_engine_has_its_batches_and_system_calls() {
        let text = render(&engine_sample());
        for part in [
            "completion latency (us): min=16.1, mean=72.0",
            "engine aio: direct I/O, up to 16 I/Os queued together, busy-poll up to 64 us, ops \
             submitted one by one\n",
            "completions that were polled for: 14\n",
            "    128    128 mean 72.0, 2 times",
            "0.0020 per I/O (2 io_submit)",
            "this process (pid 17)",
        ] {
            assert!(text.contains(part), "no '{part}' in:\n{text}");
        }
        assert!(!text.contains("kicks"), "there is no driver:\n{text}");
    }
}
