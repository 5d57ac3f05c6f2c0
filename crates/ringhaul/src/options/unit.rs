//! Logical units: `--lun`, and `lun=` in `--export`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use device::unit_address::LUN_MAX;
use disks::DiskSpec;
use disks::spec::redact_spec;
use ringhaul_options::key_value::{Parts, Size, split_at_commas};
use serde::Deserialize;

use crate::spec::qos::QosChange;
use crate::spec::{UnitPlace, UnitSettings, UnitSpec, check_apart};

/// The values of `--lun`.
pub(super) fn parse_all(texts: &[String]) -> Result<Vec<UnitSpec>> {
    let parse = |text: &String| {
        parse_unit(text).with_context(|| format!("cannot understand --lun {}", redact_spec(text)))
    };
    apart(texts.iter().map(parse).collect::<Result<_>>()?)
}

/// A value of `--lun`.
///
/// # Errors
///
/// When it makes no sense.
pub fn parse_lun(text: &str) -> Result<UnitSpec> {
    parse_unit(text).with_context(|| format!("cannot understand the unit {}", redact_spec(text)))
}

/// Reads the address of a unit, with its target or without.
///
/// # Errors
///
/// When it is no address.
pub fn parse_place(text: &str) -> Result<UnitPlace> {
    let (target, lun) = text.split_once(':').unwrap_or(("0", text));
    let target = target.parse().context("the target must be a number from 0 to 255")?;
    match lun.parse() {
        Ok(lun @ 0..=LUN_MAX) => Ok(UnitPlace { target, lun }),
        _ => bail!("a unit begins with a LUN, a number from 0 to {LUN_MAX}, or TARGET:LUN"),
    }
}

fn parse_unit(text: &str) -> Result<UnitSpec> {
    let parts = split_at_commas(text);
    let Some((address, keys)) = parts.split_first() else { bail!("it is empty") };
    parse(address, keys)
}

/// The units of an export. The parts begin with the address of the first unit, without its `lun=`;
/// each further unit begins with `lun=`.
pub(super) fn parse_units(parts: &[String]) -> Result<Vec<UnitSpec>> {
    let starts = |part: &String| part.starts_with("lun=");
    let mut units = Vec::new();
    let mut rest = parts;
    while let Some((address, behind)) = rest.split_first() {
        let end = behind.iter().position(starts).unwrap_or(behind.len());
        let (keys, next) = behind.split_at(end);
        let address = address.strip_prefix("lun=").unwrap_or(address);
        units.push(parse(address, keys).with_context(|| format!("in lun={address}"))?);
        rest = next;
    }
    apart(units)
}

/// Keys of a unit with another form than in its settings.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct UnitKeys {
    disk: Option<Vec<String>>,
    blk_file: Option<PathBuf>,
    null: Option<Size>,
    lock: Option<bool>,
    logical_block_size: Option<u32>,
}

/// Settings whose keys `UnitKeys` and the rules have.
const OTHER_FORM: [&str; 5] = ["no-lock", "logical-block-bytes", "limits", "rerror", "werror"];

fn parse(address: &str, parts: &[String]) -> Result<UnitSpec> {
    let UnitPlace { target, lun } = parse_place(address)?;
    let mut parts = Parts::new(parts);
    let keys: UnitKeys = parts.take(&[])?;
    let own: UnitSettings = parts.take(&OTHER_FORM)?;
    own.check_texts()?;
    let QosChange { limits, rerror, werror } = QosChange::from_parts(parts)?;
    let settings = UnitSettings {
        no_lock: keys.lock.map(|is_on| !is_on),
        logical_block_bytes: keys.logical_block_size,
        limits,
        rerror,
        werror,
        ..own
    };
    let disk = one_disk(keys.disk, keys.blk_file, keys.null)?;
    let disk = disk.context("it has no disk; add disk=DISK, blk-file=PATH or null=SIZE")?;
    Ok(UnitSpec { target, lun, disk, settings })
}

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

/// Checks that each unit of a device has its own address.
fn apart(units: Vec<UnitSpec>) -> Result<Vec<UnitSpec>> {
    check_apart(&units)?;
    Ok(units)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{LikeDisk, StopRule, UnitNames};

    #[test]
    fn units_have_addresses_disks_and_settings_of_their_own() {
        let unit =
            parse_unit("3:7,blk-file=/a,,b.img,read-only=on,wwn=0x3000000000000001").unwrap();
        assert_eq!((unit.target, unit.lun), (3, 7));
        assert_eq!(unit.disk, DiskSpec::File("/a,b.img".into()));
        assert_eq!(unit.settings.read_only, Some(true));
        assert_eq!(unit.settings.wwn.map(|wwn| wwn.0), Some([0x30, 0, 0, 0, 0, 0, 0, 1]));
        assert_eq!(unit.settings.discard, None);
        let unit = parse_unit("0,null=1M,like=qemu,names=wwn,stop=obey").unwrap();
        assert_eq!(unit.settings.like, Some(LikeDisk::Qemu));
        assert_eq!(unit.settings.names, Some(UnitNames::Wwn));
        assert_eq!(unit.settings.stop, Some(StopRule::Obey));
        let unit = parse_unit("0,vendor=a,disk=raw,offset=1M,over=/a,,b").unwrap();
        assert_eq!(unit.disk, DiskSpec::parse("raw,offset=1M,over=/a,,b").unwrap());
        let parts = ["0", "null=1M", "lun=1:5", "blk-file=/x", "rotational=off"];
        let units = parse_units(&parts.map(str::to_owned)).unwrap();
        assert_eq!(units.len(), 2);
        assert_eq!((units[1].target, units[1].lun), (1, 5));
        assert_eq!(units[1].settings.rotational, Some(false));
    }

    #[test]
    fn units_that_make_no_sense_are_refused() {
        for bad in [
            "",
            "0",
            "blk-file=/x",
            "16384,null=1M",
            "256:0,null=1M",
            "0,null=1M,null=1M",
            "0,null=1M,blk-file=/x",
            "0,null=1M,wwn=12",
            "0,null=1M,wwn=f000000000000001",
            "0,null=1M,discard=maybe",
            "0,null=1M,size=3",
            "0,null=1M,disk=null:1M",
            "0,disk=null:1M,read-only=on",
            "0,disk=",
            "0,null=1X",
            "0,null=1M,like=vmware",
            "0,null=1M,names=serials",
            "0,null=1M,stop=on",
        ] {
            assert!(parse_unit(bad).is_err(), "{bad} was taken");
        }
    }
}
