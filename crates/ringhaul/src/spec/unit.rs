//! Logical units of a virtio-scsi device.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use device::scsi::unit::{PRODUCT_BYTES, REVISION_BYTES, SERIAL_BYTES, VENDOR_BYTES};
use device::unit_address::LUN_MAX;
use disks::DiskSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::file_record::FileRecord;
use super::qos::{LimitSpec, OnError, QosSpec};
use super::values::{CacheMode, Wwn, check_text};

/// A logical unit of a virtio-scsi device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct UnitSpec {
    /// 0 to 255.
    #[serde(default)]
    pub target: u8,
    /// 0 to 16,383.
    pub lun: u16,
    /// The disk behind the unit.
    pub disk: DiskSpec,
    /// The settings of the unit; a key that is left out has the value of the export.
    #[serde(default)]
    pub settings: UnitSettings,
}

/// The place of a logical unit in its device.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct UnitPlace {
    /// 0 to 255.
    #[serde(default)]
    pub target: u8,
    /// 0 to 16,383.
    pub lun: u16,
}

impl std::fmt::Display for UnitPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

impl UnitSpec {
    /// The place of the unit.
    pub fn place(&self) -> UnitPlace {
        UnitPlace { target: self.target, lun: self.lun }
    }

    /// Checks the values beyond their types, in an export with these usual rules.
    ///
    /// # Errors
    ///
    /// When its number or a text is out of its range.
    pub(crate) fn check(&self, usual: &QosSpec) -> Result<()> {
        let place = self.place();
        let rules = self.settings.rules(usual);
        rules.check().with_context(|| format!("unit {place}"))?;
        if self.lun > LUN_MAX {
            bail!("invalid unit {place}: a LUN is a number from 0 to {LUN_MAX}");
        }
        self.settings.check_texts().with_context(|| format!("unit {place}"))
    }
}

/// A disk of another program, with names that a guest keeps when it moves from there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LikeDisk {
    /// The disk of QEMU's `scsi-hd`.
    Qemu,
}

/// The identifiers of a unit that udev names its disk after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UnitNames {
    /// `scsi-3` and the NAA identifier.
    Wwn,
    /// `scsi-0VENDOR_PRODUCT_SERIAL`, unless an NAA identifier is given.
    Serial,
}

/// The effect of START STOP UNIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StopRule {
    /// A stop has the effect of a flush.
    Ignore,
    /// A stop takes the disk away from all its users, until a start.
    Obey,
}

/// The settings of a logical unit that differ from the defaults.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct UnitSettings {
    /// Writes are refused. `None`: like the export; the same for the next three keys.
    pub read_only: Option<bool>,
    /// The disk is not locked.
    pub no_lock: Option<bool>,
    /// The cache mode.
    pub cache: Option<CacheMode>,
    /// The smallest unit of a request, a power of two from 512 to 65,536.
    pub logical_block_bytes: Option<u32>,
    /// Up to 36 bytes. `None`: derived from the identity of the disk.
    pub serial: Option<String>,
    /// An NAA identifier of 16 hexadecimal digits. `None`: derived from the identity of the disk.
    pub wwn: Option<Wwn>,
    /// `None`: no, or as the block device reports.
    pub rotational: Option<bool>,
    /// The guest may discard blocks. `None`: if the disk takes discards.
    pub discard: Option<bool>,
    /// The file that keeps persistent reservations. `None`: one beside the disk, if that is a
    /// regular file.
    pub reservations: Option<PathBuf>,
    /// Up to 8 bytes.
    pub vendor: Option<String>,
    /// Up to 16 bytes.
    pub product: Option<String>,
    /// Up to 4 bytes.
    pub revision: Option<String>,
    /// The disk whose names and strings the unit has by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub like: Option<LikeDisk>,
    /// The identifiers that udev names the disk after. `None`: as `like` has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub names: Option<UnitNames>,
    /// The effect of START STOP UNIT. `None`: a stop is ignored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop: Option<StopRule>,
    /// The limits of the disk. Left out: like the export; the same for the next two keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSpec>,
    /// The handling of reads that the disk fails.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rerror: Option<OnError>,
    /// The handling of writes, discards and zeroes that the disk fails.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub werror: Option<OnError>,
    /// The files that a member of the group has named; no other file is opened for the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<FileRecord>>,
}

impl UnitSettings {
    /// Checks the texts that the guest sees.
    pub(crate) fn check_texts(&self) -> Result<()> {
        for (name, text, bytes) in [
            ("serial", &self.serial, SERIAL_BYTES),
            ("vendor", &self.vendor, VENDOR_BYTES),
            ("product", &self.product, PRODUCT_BYTES),
            ("revision", &self.revision, REVISION_BYTES),
        ] {
            if let Some(text) = text {
                check_text(text, bytes).context(name)?;
            }
        }
        Ok(())
    }
}

/// Checks that each unit of a device has its own address.
pub(crate) fn check_apart(units: &[UnitSpec]) -> Result<()> {
    let mut seen = BTreeSet::new();
    match units.iter().map(UnitSpec::place).find(|place| !seen.insert(*place)) {
        Some(place) => bail!("two units have the address {place}; give one of them another number"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A longer text would be cut, or run into the next field of the INQUIRY data.
    #[test]
    fn texts_for_the_guest_fit_in_their_fields() {
        for (key, bytes) in [("serial", 36), ("vendor", 8), ("product", 16), ("revision", 4)] {
            let check = |bytes: usize| {
                let settings = serde_json::json!({ key: "x".repeat(bytes) });
                serde_json::from_value::<UnitSettings>(settings).unwrap().check_texts()
            };
            check(bytes).unwrap();
            let error = format!("{:#}", check(bytes + 1).unwrap_err());
            assert!(error.starts_with(key), "{error}");
        }
    }
}
