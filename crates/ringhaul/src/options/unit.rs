//! Logical units: `--lun`, and `lun=` in `--export`.

use anyhow::{Context, Result, bail};
use device::scsi::unit::{PRODUCT_BYTES, REVISION_BYTES, SERIAL_BYTES, VENDOR_BYTES};
use device::unit_address::LUN_MAX;

use super::disk::{parse_cache, take_disk};
use super::parse_on_off;
use crate::spec::disk::{Keys, redact_spec, split_at_commas};
use crate::spec::qos::QosChange;
use crate::spec::{
    LikeDisk, StopRule, UnitNames, UnitPlace, UnitSettings, UnitSpec, check_apart, check_text,
};

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

/// The units of an export, each of which begins with `lun=`.
pub(super) fn parse_units(parts: &[String]) -> Result<Vec<UnitSpec>> {
    let mut units: Vec<(&str, Vec<String>)> = Vec::new();
    for part in parts {
        match (part.strip_prefix("lun="), units.last_mut()) {
            (Some(address), _) => units.push((address, Vec::new())),
            (None, Some((_, keys))) => keys.push(part.clone()),
            (None, None) => bail!("'{part}' stands before the first lun=LUN"),
        }
    }
    let unit = |(address, keys): (&str, Vec<String>)| {
        parse(address, &keys).with_context(|| format!("in lun={address}"))
    };
    apart(units.into_iter().map(unit).collect::<Result<_>>()?)
}

fn parse(address: &str, parts: &[String]) -> Result<UnitSpec> {
    let UnitPlace { target, lun } = parse_place(address)?;
    let (mut settings, mut keys) = (UnitSettings::default(), Keys::default());
    let mut rules = QosChange::default();
    let mut parts = parts.to_vec();
    let disk = take_disk(&mut parts)?;
    for part in &parts {
        let (key, value) = part
            .split_once('=')
            .filter(|(_, value)| !value.is_empty())
            .with_context(|| format!("'{part}' is not of the form KEY=VALUE"))?;
        keys.check(part)?;
        let within = || format!("in '{part}'");
        if !rules.set(key, value).with_context(within)? {
            settings.set(key, value).with_context(within)?;
        }
    }
    let QosChange { limits, rerror, werror } = rules;
    (settings.limits, settings.rerror, settings.werror) = (limits, rerror, werror);
    Ok(UnitSpec { target, lun, disk, settings })
}

/// A text that the guest sees, if it is valid.
fn text(value: &str, bytes: usize) -> Result<String> {
    check_text(value, bytes)?;
    Ok(value.to_owned())
}

/// The meaning of a word, from the list of all words.
fn one_of<T: Copy>(word: &str, all: &[(&str, T)]) -> Result<T> {
    if let Some((_, meaning)) = all.iter().find(|(name, _)| *name == word) {
        return Ok(*meaning);
    }
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    bail!("it must be {}", names.join(" or "))
}

/// Checks that each unit of a device has its own address.
fn apart(units: Vec<UnitSpec>) -> Result<Vec<UnitSpec>> {
    check_apart(&units)?;
    Ok(units)
}

impl UnitSettings {
    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "read-only" => self.read_only = Some(parse_on_off(value)?),
            "lock" => self.no_lock = Some(!parse_on_off(value)?),
            "cache" => self.cache = Some(parse_cache(value)?),
            "logical-block-size" => {
                self.logical_block_bytes = Some(value.parse().context("it must be a number")?);
            }
            "serial" => self.serial = Some(text(value, SERIAL_BYTES)?),
            "wwn" => self.wwn = Some(value.to_owned().try_into()?),
            "rotational" => self.rotational = Some(parse_on_off(value)?),
            "discard" => self.discard = Some(parse_on_off(value)?),
            "reservations" => self.reservations = Some(value.into()),
            "vendor" => self.vendor = Some(text(value, VENDOR_BYTES)?),
            "product" => self.product = Some(text(value, PRODUCT_BYTES)?),
            "revision" => self.revision = Some(text(value, REVISION_BYTES)?),
            "like" => self.like = Some(one_of(value, &[("qemu", LikeDisk::Qemu)])?),
            "names" => {
                let all = [("wwn", UnitNames::Wwn), ("serial", UnitNames::Serial)];
                self.names = Some(one_of(value, &all)?);
            }
            "stop" => {
                let all = [("ignore", StopRule::Ignore), ("obey", StopRule::Obey)];
                self.stop = Some(one_of(value, &all)?);
            }
            _ => bail!(
                "unknown key '{key}' (expected: disk, blk-file, null, read-only, lock, cache, \
                 logical-block-size, serial, wwn, rotational, discard, reservations, vendor, \
                 product, revision, like, names, stop, rerror, werror, and those of --limits)"
            ),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::disk::DiskSpec;

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
        let parts = ["lun=0", "null=1M", "lun=1:5", "blk-file=/x", "rotational=off"];
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
