//! The parts of options that describe disks.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use ringhaul_options::key_value::{Parts, Size, split_at_commas};

use crate::spec::disk::{DiskSpec, redact_spec};
use crate::spec::qos::LimitSpec;

/// The disk of an export or a unit: `disk=DISK`, which includes all keys behind it, or one of the
/// short forms `blk-file=PATH` and `null=SIZE`.
pub(super) fn one_disk(
    disk: Option<Vec<String>>,
    blk_file: Option<PathBuf>,
    null: Option<Size>,
) -> Result<Option<DiskSpec>> {
    let named = disk.map(|parts| {
        DiskSpec::from_parts(&parts).with_context(|| {
            let text = redact_spec(&format!("disk={}", parts.join(",")));
            format!("in {text} (all keys after disk= belong to the disk)")
        })
    });
    let null = null.map(|size| DiskSpec::Null { size_bytes: size.0 });
    let mut disks = [named.transpose()?, blk_file.map(DiskSpec::File), null].into_iter().flatten();
    match (disks.next(), disks.next()) {
        (disk, None) => Ok(disk),
        _ => bail!("it names more than one disk (with disk, blk-file or null); name one"),
    }
}

/// Reads limits in the form of `--limits`.
///
/// # Errors
///
/// When a key is unknown, or a value makes no sense.
pub(super) fn parse_limits(text: &str) -> Result<LimitSpec> {
    let limits: LimitSpec = Parts::new(&split_at_commas(text)).finish()?;
    limits.limits()?;
    Ok(limits)
}
