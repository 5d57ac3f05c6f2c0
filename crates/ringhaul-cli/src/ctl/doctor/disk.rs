//! Findings about the disks of an export.

use ringhaul::spec::command::{DiskState, ExportDetails};
use ringhaul::spec::stats::{Errors, ExportStats};
use ringhaul::spec::status::DiskDetails;
use ringhaul::spec::{CacheMode, DeviceSpec};
use serde_json::Value;

use super::facts::ExportFacts;
use super::finding::{Finding, Level};
use super::system::BlockDevice;

/// The share of the time for which a saturated disk is busy.
const BUSY_PERCENT: u64 = 95;

/// The latency in microseconds from which a busy disk delays guests.
const SLOW_US: u64 = 1000;

/// The number of requests that wait for limits on average, in percent of one request.
const THROTTLED_PERCENT: u64 = 10;

/// Findings about the disks of an export. `ms` is the time between the two looks.
pub(super) fn findings(export: &ExportFacts, ms: u64) -> Vec<Finding> {
    let details = &export.details;
    let mut found: Vec<Finding> = Vec::new();
    for (index, disk) in details.disks.iter().enumerate() {
        found.extend(not_ready(disk));
        found.extend(warning(disk));
        found.extend(engine_fallback(disk));
        found.extend(page_cache(disk, wanted_cache(details, index)));
        let device = export.devices.get(index).copied().flatten();
        found.extend(device.and_then(|device| saturated(export, disk, device, ms)));
    }
    found.extend(missing_units(details));
    found.extend(failed_requests(export));
    found.extend(throttled(export, ms));
    found
}

/// The name of a disk in a sentence.
fn name_of(disk: &DiskDetails) -> String {
    let made_of = disk.chain.join(" over ");
    match disk.place {
        Some(place) => format!("the unit {place} ({made_of})"),
        None => format!("the disk ({made_of})"),
    }
}

fn not_ready(disk: &DiskDetails) -> Option<Finding> {
    let (fact, remedy) = match disk.state {
        DiskState::Ready => return None,
        DiskState::Retried => {
            ("has failed requests, which wait", "mend the disk; `ringhaul ctl resume` retries now")
        }
        DiskState::Held => ("has no space left, and writes wait", "make space on its file system"),
        DiskState::Away => ("cannot be reached, and requests wait", "start its server or cluster"),
        DiskState::Late => ("has not answered for 5 s or more", "see dmesg and the device itself"),
        DiskState::Lost => {
            ("may have lost written data, and flushes fail", "check the disk, restart the export")
        }
    };
    let since = disk.state_seconds.map_or_else(String::new, |seconds| format!(", for {seconds} s"));
    let remark = disk.remark.as_ref().map_or_else(String::new, |remark| format!(" ({remark})"));
    let figure = format!("{} {fact}{since}{remark}", name_of(disk));
    Some(Finding::new(Level::Harmful, "disk-state", figure, remedy))
}

fn warning(disk: &DiskDetails) -> Option<Finding> {
    let warning = disk.warning.as_ref()?;
    let figure = format!("{}: {warning}", name_of(disk));
    let remedy = "name the format of the disk, or write raw,over=PATH (docs/guide/disks.md)";
    Some(Finding::new(Level::Warning, "disk-content", figure, remedy))
}

/// A fallback: the preferred engine failed with the error in `engine_reason`.
fn engine_fallback(disk: &DiskDetails) -> Option<Finding> {
    let (engine, reason) = (disk.engine.as_ref()?, disk.engine_reason.as_ref()?);
    let is_fallback = reason.contains("cannot set up") || reason.contains(" failed: ");
    if !is_fallback {
        return None;
    }
    // io_uring is the better engine of most disks, but its rival could not be tried.
    let level = if engine == "io_uring" { Level::Note } else { Level::Warning };
    let figure = format!("{} has the engine {engine}: {reason}", name_of(disk));
    let remedy = "remove the cause, then restart the daemon (docs/guide/service.md, limits)";
    Some(Finding::new(level, "engine-fallback", figure, remedy))
}

/// The cache mode of a disk as the user has asked for it.
fn wanted_cache(details: &ExportDetails, index: usize) -> Option<CacheMode> {
    let spec = &details.status.spec;
    let of_unit = match &spec.device {
        DeviceSpec::Blk(_) => None,
        DeviceSpec::Scsi(units) => units.get(index).and_then(|unit| unit.settings.cache),
    };
    of_unit.or(spec.settings.cache)
}

/// The page cache, because the file system refuses direct I/O or because the user wants it.
fn page_cache(disk: &DiskDetails, wanted: Option<CacheMode>) -> Option<Finding> {
    // A disk without an engine has no page cache here.
    if disk.direct || disk.engine.is_none() {
        return None;
    }
    let name = name_of(disk);
    Some(match wanted {
        None | Some(CacheMode::None | CacheMode::Directsync) => Finding::new(
            Level::Warning,
            "direct-io-refused",
            format!(
                "the file system of {name} refuses direct I/O (O_DIRECT): the page cache is used"
            ),
            "move the disk to a file system with direct I/O, such as ext4 or XFS",
        ),
        Some(mode) => Finding::new(
            Level::Note,
            "page-cache",
            format!("{name} uses the page cache of the host (cache={mode})"),
            "cache=none, if the guest has a page cache of its own",
        ),
    })
}

/// A device without a pause, with its latency and that of the export.
fn saturated(
    export: &ExportFacts,
    disk: &DiskDetails,
    [before, after]: [BlockDevice; 2],
    ms: u64,
) -> Option<Finding> {
    let busy_percent = (after.busy_ms.saturating_sub(before.busy_ms)) * 100 / ms.max(1);
    let requests = after.requests.saturating_sub(before.requests);
    let request_ms = after.request_ms.saturating_sub(before.request_ms);
    let device_us = (request_ms * 1000).checked_div(requests)?;
    if busy_percent < BUSY_PERCENT || device_us < SLOW_US {
        return None;
    }
    let own_us = latency_us(export)?;
    Some(Finding::new(
        Level::Warning,
        "disk-saturated",
        format!(
            "the device {} of {} was busy for {}% of the time: {requests} requests took {} ms \
             each, and requests of the export {} ms",
            disk.device_number.as_deref().unwrap_or_default(),
            name_of(disk),
            busy_percent.min(100),
            milliseconds(device_us),
            milliseconds(own_us)
        ),
        "find the program with the most I/O (iotop, `ringhaul ctl top`), set limits, or use \
         another disk",
    ))
}

/// The mean latency of the export's requests between the looks. `None` without requests.
fn latency_us(export: &ExportFacts) -> Option<u64> {
    let [before, after] = export.stats.as_ref()?;
    let growth = |value: fn(&_) -> u64| {
        let sum = |stats: &ExportStats| stats.operations.iter().map(value).sum::<u64>();
        sum(after).saturating_sub(sum(before))
    };
    (growth(|it| it.latency_sum_ns) / 1000).checked_div(growth(|it| it.requests))
}

/// Microseconds in milliseconds, with one digit after the point.
fn milliseconds(us: u64) -> String {
    format!("{}.{}", us / 1000, us % 1000 / 100)
}

fn missing_units(details: &ExportDetails) -> Option<Finding> {
    let requests: usize = details.missing_units.iter().map(|unit| unit.waiting_requests).sum();
    let first = details.missing_units.first()?;
    Some(Finding::new(
        Level::Harmful,
        "missing-unit",
        format!("{requests} requests of a killed process wait for units such as {}", first.unit),
        "add the units again: `ringhaul ctl add-lun`",
    ))
}

/// Requests that the disk has failed since the start. Only new failures are harmful.
fn failed_requests(export: &ExportFacts) -> Option<Finding> {
    let [before, after] = export.stats.as_ref()?;
    let sum = |stats: &ExportStats, of: fn(&Errors) -> u64| {
        stats.operations.iter().map(|it| of(&it.errors)).sum::<u64>()
    };
    let both = |stats| [sum(stats, |errors| errors.disk), sum(stats, |errors| errors.no_space)];
    let [disk, space] = both(after);
    if disk + space == 0 {
        return None;
    }
    let new = (disk + space).saturating_sub(both(before).iter().sum());
    Some(Finding::new(
        if new > 0 { Level::Harmful } else { Level::Note },
        "failed-requests",
        format!(
            "the disk has failed {disk} requests, and {space} for lack of space; {new} of them \
             failed between the two looks"
        ),
        "the log names the first ones with their errors; check the device",
    ))
}

/// Requests that wait for limits.
fn throttled(export: &ExportFacts, ms: u64) -> Option<Finding> {
    let [before, after] = export.stats.as_ref()?;
    let waited_ms = after.throttled_ns.saturating_sub(before.throttled_ns) / 1_000_000;
    let percent = waited_ms * 100 / ms.max(1);
    if percent < THROTTLED_PERCENT {
        return None;
    }
    let limits: Vec<String> = export.details.disks.iter().map(limits_of).collect();
    Some(Finding::new(
        Level::Warning,
        "throttled",
        format!(
            "{}.{:02} requests waited for limits on average; limits: {}",
            percent / 100,
            percent % 100,
            limits.join("; ")
        ),
        "if that is not meant, raise the limits: `ringhaul ctl set-disk`",
    ))
}

/// The limits of a disk in the words of the command line.
fn limits_of(disk: &DiskDetails) -> String {
    let limits = serde_json::to_value(&disk.rules.limits).unwrap_or_default();
    let limits = limits.as_object().into_iter().flatten();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let limits: Vec<String> = limits.map(|(key, value)| format!("{key}={}", text(value))).collect();
    if limits.is_empty() { "none".to_owned() } else { limits.join(" ") }
}
