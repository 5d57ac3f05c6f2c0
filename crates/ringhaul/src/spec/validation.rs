//! Invalid names of exports and invalid sizes of disks, as far as they show before a disk is
//! opened.

use anyhow::{Context, Result, bail};
use blockio::disk::check_logical_block;
use blockio::{DiskOptions, DiskSource};

use super::{DeviceSpec, DiskSpec, EndpointSpec, ExportSpec, check_name};

impl ExportSpec {
    /// Checks the name and the socket of the export, the logical blocks of all disks, and the sizes
    /// of null disks.
    ///
    /// # Errors
    ///
    /// When one is invalid.
    pub(super) fn check_names_and_sizes(&self) -> Result<()> {
        if let Some(name) = &self.name {
            check_name(name).context("the name of an export")?;
        }
        if matches!(&self.endpoint, EndpointSpec::Path(path) if path.as_os_str().is_empty()) {
            bail!("the path of its socket is empty; give the path of a new socket");
        }
        let usual = self.settings.logical_block_bytes;
        let units = match &self.device {
            DeviceSpec::Blk(disk) => return check(disk, usual),
            DeviceSpec::Scsi(units) => units,
        };
        units.iter().try_for_each(|unit| {
            let checked = check(&unit.disk, unit.settings.logical_block_bytes.or(usual));
            checked.with_context(|| format!("unit {}", unit.place()))
        })
    }
}

fn check(disk: &DiskSpec, logical_block_bytes: Option<u32>) -> Result<()> {
    if let Some(bytes) = logical_block_bytes {
        check_logical_block(bytes)?;
    }
    if let DiskSpec::Null { size_bytes } = disk {
        let options = DiskOptions { logical_block_bytes, ..DiskOptions::default() };
        DiskSource::null(*size_bytes, &options)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_disks_of_impossible_sizes_are_refused() {
        for (device, expected) in [
            (r#"{"blk": {"null": {"size-bytes": 4096}}}"#, None),
            (r#"{"blk": {"null": {"size-bytes": 512}}}"#, Some("a disk of 512 bytes")),
            (r#"{"scsi": [{"lun": 1, "disk": "null:0"}]}"#, Some("unit 0:1: a disk of 0 bytes")),
            (
                r#"{"scsi": [{"lun": 1, "disk": "/a", "settings": {"logical-block-bytes": 3}}]}"#,
                Some("unit 0:1: a logical block of 3 bytes"),
            ),
        ] {
            let rest = r#""endpoint": {"path": "/s"}, "logical-block-bytes": 4096"#;
            let text = format!(r#"{{"device": {device}, {rest}}}"#);
            let export: ExportSpec = serde_json::from_str(&text).unwrap();
            let error = export.check(1).err().map(|error| format!("{error:#}"));
            let is_right = match (&error, expected) {
                (Some(error), Some(expected)) => error.contains(expected),
                (error, expected) => error.is_none() && expected.is_none(),
            };
            assert!(is_right, "{device}: {error:?}");
        }
    }
}
