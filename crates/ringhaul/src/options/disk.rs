//! The parts of options that describe disks.

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use ringhaul_options::parse_size;

use crate::spec::CacheMode;
use crate::spec::disk::{DiskSpec, Keys, redact_spec, split_at_commas};
use crate::spec::qos::{LIMIT_KEYS, LimitSpec};

/// Takes the disk of an export or a unit out of its keys: `disk=DISK`, which includes all keys
/// after it, or one of the short forms `blk-file=PATH` and `null=SIZE`.
pub(super) fn take_disk(parts: &mut Vec<String>) -> Result<DiskSpec> {
    let mut disks = Vec::new();
    if let Some(at) = parts.iter().position(|part| part.starts_with("disk=")) {
        let mut words = parts.split_off(at);
        let text = words.join(",");
        words[0].drain(.."disk=".len());
        let disk = DiskSpec::of_parts(&words);
        disks.push(disk.with_context(|| {
            format!("in {}, to whose disk all keys belong that stand behind it", redact_spec(&text))
        })?);
    }
    let mut others = Vec::new();
    for part in parts.drain(..) {
        match part.split_once('=') {
            Some(("blk-file", path)) if !path.is_empty() => disks.push(DiskSpec::File(path.into())),
            Some(("null", size)) => {
                let size_bytes = parse_size(size).map_err(anyhow::Error::msg)?;
                disks.push(DiskSpec::Null { size_bytes });
            }
            _ => others.push(part),
        }
    }
    *parts = others;
    match <[DiskSpec; 1]>::try_from(disks) {
        Ok([disk]) => Ok(disk),
        Err(none) if none.is_empty() => bail!("it lacks disk=DISK, blk-file=PATH or null=SIZE"),
        Err(_) => bail!("it names more than one disk (with disk, blk-file or null); it has one"),
    }
}

/// Returns true if the parts have keys of a disk.
pub(super) fn has_disk_keys(parts: &[String]) -> bool {
    ["disk=", "blk-file=", "null="].iter().any(|key| parts.iter().any(|part| part.starts_with(key)))
}

/// Reads limits in the form of `--limits`.
///
/// # Errors
///
/// When a key is unknown, or a value makes no sense.
pub(super) fn parse_limits(text: &str) -> Result<LimitSpec> {
    let (mut limits, mut keys) = (LimitSpec::default(), Keys::default());
    for part in split_at_commas(text) {
        let (key, value) = part
            .split_once('=')
            .filter(|(_, value)| !value.is_empty())
            .with_context(|| format!("'{part}' is not of the form KEY=VALUE"))?;
        keys.check(&part)?;
        if !limits.set(key, value)? {
            bail!("unknown key '{key}' (expected: {LIMIT_KEYS})");
        }
    }
    limits.limits()?;
    Ok(limits)
}

pub(super) fn parse_cache(value: &str) -> Result<CacheMode> {
    let mode = CacheMode::from_str(value, false).map_err(anyhow::Error::msg);
    mode.context("it must be none, directsync, writeback or writethrough")
}
