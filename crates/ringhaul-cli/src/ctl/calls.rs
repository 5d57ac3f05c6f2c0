//! The words of a command line, as calls of methods.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use device::unit_address::LUN_MAX;
use ringhaul::options::ExportArgs;
use ringhaul::options::unit::{parse_lun, parse_place};
use ringhaul::spec::qos::QosChange;
use ringhaul::spec::settings::SettingsChange;
use ringhaul::spec::{DeviceSpec, DiskSpec, EndpointSpec, ExportSpec, UnitSpec};
use ringhaul_options::key_value::Parts;
use ringhaul_options::parse_size;
use serde_json::{Value, json};

use super::args::{CtlCommand, Direction};

/// A parameter that the daemon does not have: the bytes by which a disk is to grow.
pub(super) const MORE_BYTES: &str = "more-bytes";

/// The most bytes of a state: a request has no more.
const STATE_BYTES_MAX: u64 = 1 << 20;

/// The calls for a request, in order: methods with their parameters.
pub(super) fn calls_of(what: &CtlCommand) -> Result<Vec<(&str, Value)>> {
    let call = match what {
        CtlCommand::Ping => ("ping", json!({})),
        CtlCommand::List => ("export.list", json!({})),
        CtlCommand::Show { export } => ("export.show", json!({ "export": export })),
        CtlCommand::Add(args) => return add(args),
        CtlCommand::Remove { export, force, deadline } => {
            let mut params = json!({ "export": export, "force": force });
            if let Some(deadline) = deadline {
                params["deadline-ms"] = json!(deadline);
            }
            ("export.remove", params)
        }
        CtlCommand::AddLun { export, unit } => {
            let mut unit = parse_lun(unit)?;
            make_absolute(&mut unit)?;
            ("lun.add", json!({ "export": export, "unit": unit }))
        }
        CtlCommand::RemoveLun { export, unit } => {
            let place = parse_place(unit)?;
            let params = json!({ "export": export, "target": place.target, "lun": place.lun });
            ("lun.remove", params)
        }
        CtlCommand::Resize { export, words, shrink } => {
            ("disk.resize", resize(export, words, *shrink)?)
        }
        CtlCommand::SetDisk { export, words } => ("disk.set", set_disk(export, words)?),
        CtlCommand::Resume { export, unit } => ("disk.resume", at(export, unit.as_deref())?),
        CtlCommand::State { direction: Direction::Save, export } => {
            ("state.save", json!({ "export": export }))
        }
        CtlCommand::State { direction: Direction::Load, export } => {
            let state = read_state(std::io::stdin().lock())?;
            ("state.load", json!({ "export": export, "state": state }))
        }
        CtlCommand::Set { changes } => ("set", set(changes)?),
        CtlCommand::Stats => ("stats", json!({})),
        CtlCommand::Metrics => ("metrics", json!({})),
        CtlCommand::Events { kinds } if kinds.is_empty() => ("subscribe", json!({})),
        CtlCommand::Events { kinds } => ("subscribe", json!({ "events": kinds })),
        CtlCommand::Schema
        | CtlCommand::Top(_)
        | CtlCommand::Doctor(_)
        | CtlCommand::Upgrade { .. } => return Ok(Vec::new()),
        CtlCommand::Shutdown { .. } => ("shutdown", json!({})),
        CtlCommand::Call { method, params } => {
            let params = serde_json::from_str(params).context("the parameters are not JSON")?;
            (&**method, params)
        }
    };
    Ok(vec![call])
}

fn add(args: &ExportArgs) -> Result<Vec<(&'static str, Value)>> {
    let mut specs = args.specs(None)?;
    specs.iter_mut().try_for_each(make_spec_absolute)?;
    let calls = specs.iter().map(|spec| Ok(("export.add", serde_json::to_value(spec)?)));
    calls.collect()
}

/// Reads a state that `ctl state save` has printed.
fn read_state(input: impl Read) -> Result<Value> {
    let mut text = String::new();
    input
        .take(STATE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .context("cannot read the state from standard input")?;
    if text.trim().is_empty() {
        bail!("standard input is empty; `ringhaul ctl state save` prints a state");
    }
    if text.len() as u64 > STATE_BYTES_MAX {
        bail!("the state has more than 1 MiB, the most that a request may have");
    }
    serde_json::from_str(&text).context("standard input has no state in JSON")
}

/// The name of the export in the parameters of a call.
pub(super) fn export_name(params: &Value) -> String {
    let name = params["name"].as_str().or_else(|| params["endpoint"]["path"].as_str());
    let name = name.or_else(|| params["export"].as_str());
    name.unwrap_or_default().to_owned()
}

/// Makes relative paths absolute: a user means the working directory of this command.
fn make_spec_absolute(spec: &mut ExportSpec) -> Result<()> {
    if let EndpointSpec::Path(path) = &mut spec.endpoint {
        *path = absolute(path)?;
    }
    match &mut spec.device {
        DeviceSpec::Blk(disk) => make_disk_absolute(disk)?,
        DeviceSpec::Scsi(units) => units.iter_mut().try_for_each(make_absolute)?,
    }
    Ok(())
}

fn make_absolute(unit: &mut UnitSpec) -> Result<()> {
    make_disk_absolute(&mut unit.disk)?;
    if let Some(path) = &mut unit.settings.reservations {
        *path = absolute(path)?;
    }
    Ok(())
}

fn make_disk_absolute(disk: &mut DiskSpec) -> Result<()> {
    disk.change_paths(&mut |path| {
        *path = absolute(path)?;
        Ok(())
    })
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot make the path {path:?} absolute"))
}

fn resize(export: &str, words: &[String], shrink: bool) -> Result<Value> {
    let is_size = |word: &str| {
        let is_beyond_units = || word.parse().is_ok_and(|number: u64| number > LUN_MAX.into());
        word.starts_with('+') || word.ends_with(|c: char| c.is_alphabetic()) || is_beyond_units()
    };
    let (unit, size) = match words {
        [] => (None, None),
        [size] if is_size(size) => (None, Some(size)),
        [unit] => (Some(unit), None),
        [unit, size] => (Some(unit), Some(size)),
        _ => bail!("give at most a unit and a size"),
    };
    let mut params = at(export, unit.map(String::as_str)).with_context(|| {
        let word = unit.map_or("", String::as_str);
        format!("'{word}' is not a unit; for a size below 16K, write a suffix, as in 8K")
    })?;
    if let Some(size) = size {
        let (key, text) = match size.strip_prefix('+') {
            Some(more) => (MORE_BYTES, more),
            None => ("size-bytes", &**size),
        };
        params[key] = json!(parse_size(text).map_err(anyhow::Error::msg)?);
    }
    if shrink {
        params["shrink"] = json!(true);
    }
    Ok(params)
}

/// The size of the disk that `params` name, plus `more`. `shown` describes its export. `None`: the
/// export has no such disk, and the daemon has a better error.
pub(super) fn grown(shown: &Value, params: &Value, more: &Value) -> Result<Option<Value>> {
    let disks = shown["disks"].as_array().context("the daemon lists no disks")?;
    let is_meant = |disk: &&Value| {
        let same = |key: &str| disk.get(key) == params.get(key);
        same("lun") && same("target")
    };
    let Some(disk) = disks.iter().find(is_meant) else { return Ok(None) };
    let sum = disk["size-bytes"].as_u64().zip(more.as_u64());
    let sum = sum.and_then(|(size, more)| size.checked_add(more));
    Ok(Some(json!(sum.context("the new size is too large")?)))
}

/// The parameters that name a disk.
fn at(export: &str, unit: Option<&str>) -> Result<Value> {
    let mut params = json!({ "export": export });
    if let Some(unit) = unit {
        let place = parse_place(unit)?;
        (params["target"], params["lun"]) = (json!(place.target), json!(place.lun));
    }
    Ok(params)
}

fn set_disk(export: &str, words: &[String]) -> Result<Value> {
    let (unit, changes) = match words.split_first() {
        Some((unit, changes)) if !unit.contains('=') => (Some(&**unit), changes),
        _ => (None, words),
    };
    let mut params = at(export, unit).with_context(|| {
        let word = unit.unwrap_or_default();
        format!("'{word}' is not a unit; to change it, write {word}=VALUE")
    })?;
    let rules = QosChange::from_parts(Parts::from_words(changes))?;
    if let (Value::Object(params), Value::Object(rules)) =
        (&mut params, serde_json::to_value(&rules)?)
    {
        params.extend(rules);
    }
    Ok(params)
}

fn set(changes: &[String]) -> Result<Value> {
    let change: SettingsChange = Parts::from_words(changes).finish()?;
    let mut params = serde_json::to_value(change)?;
    if let Some(params) = params.as_object_mut() {
        params.retain(|_, value| !value.is_null());
    }
    Ok(params)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(subcommand)]
        what: CtlCommand,
    }

    fn calls(words: &str) -> Result<Vec<(String, Value)>> {
        let words = ["ctl"].into_iter().chain(words.split_whitespace());
        let what = Program::try_parse_from(words)?.what;
        let calls = calls_of(&what)?;
        Ok(calls.into_iter().map(|(method, params)| (method.to_owned(), params)).collect())
    }

    #[test]
    fn words_become_calls() {
        for (words, method, params) in [
            ("ping", "ping", json!({})),
            ("show vm", "export.show", json!({ "export": "vm" })),
            ("remove vm", "export.remove", json!({ "export": "vm", "force": false })),
            (
                "remove vm --force --deadline 1.5",
                "export.remove",
                json!({ "export": "vm", "force": true, "deadline-ms": 1500 }),
            ),
            ("remove-lun vm 7", "lun.remove", json!({ "export": "vm", "target": 0, "lun": 7 })),
            ("resize vm", "disk.resize", json!({ "export": "vm" })),
            (
                "resize vm +10G",
                "disk.resize",
                json!({ "export": "vm", "more-bytes": 10_u64 << 30 }),
            ),
            (
                "resize vm 7340032",
                "disk.resize",
                json!({ "export": "vm", "size-bytes": 7_340_032 }),
            ),
            ("resize vm 1M", "disk.resize", json!({ "export": "vm", "size-bytes": 1 << 20 })),
            (
                "resize vm 2:7 +512",
                "disk.resize",
                json!({ "export": "vm", "target": 2, "lun": 7, "more-bytes": 512 }),
            ),
            (
                "resize v 7 4096 --shrink",
                "disk.resize",
                json!({ "export": "v", "target": 0, "lun": 7, "size-bytes": 4096, "shrink": true }),
            ),
            (
                "set-disk vm 2:7 iops-total=0 bps-read=1M werror=hold",
                "disk.set",
                json!({
                    "export": "vm", "target": 2, "lun": 7, "werror": "hold",
                    "limits": { "iops-total": 0, "bps-read": 1 << 20 },
                }),
            ),
            ("set-disk vm", "disk.set", json!({ "export": "vm" })),
            ("resume vm", "disk.resume", json!({ "export": "vm" })),
            ("resume vm 7", "disk.resume", json!({ "export": "vm", "target": 0, "lun": 7 })),
            ("state save vm", "state.save", json!({ "export": "vm" })),
            ("set", "set", json!({})),
            ("set poll-max-us=7 log=3", "set", json!({ "poll-max-us": 7, "log": "3" })),
            ("events gone", "subscribe", json!({ "events": ["gone"] })),
            ("call stats", "stats", json!({})),
        ] {
            assert_eq!(calls(words).unwrap(), [(method.to_owned(), params)], "{words}");
        }
        for bad in [
            "resize vm 7 8 9",
            "resize vm 7 +x",
            "resize vm -1G",
            "resize vm 7 -1G --shrink",
            "remove vm --deadline x",
            "remove vm --deadline 1.2345",
            "set log",
            "set log=a log=b",
            "remove-lun vm x",
            "add --socket-path /a",
            "add --blk-file /a",
            "call ping {",
        ] {
            assert!(calls(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_invalid_change_of_a_disk_is_refused_with_its_fault() {
        for (words, expected) in [
            (
                "iops=1",
                "unknown key 'iops' (expected: rerror, werror, group, iops-total, iops-total-max,",
            ),
            ("iops-total", "'iops-total' is not a unit; to change it, write iops-t"),
            ("7 iops-total", "'iops-total' is not of the form KEY=VALUE"),
            ("iops-total=x", "iops-total: it must be a whole number"),
            ("iops-total=1 iops-total=1", "iops-total is given twice"),
            ("bps-total=1.5M", "bps-total: '1.5M' is not a size"),
            ("werror=stop", "werror is 'stop' (expected: report, retry, hold, hold-briefly)"),
            ("rerror=ignore", "rerror is 'ignore' (expected: report, retry)"),
        ] {
            let error = format!("{:#}", calls(&format!("set-disk vm {words}")).unwrap_err());
            assert!(error.contains(expected), "{words}: {error}");
        }
    }

    #[test]
    fn an_export_is_added_with_the_words_of_serve() {
        let words = "add --name vm --socket-path vm.sock --blk-file /a.img --cache directsync \
                     --export socket-path=/b.sock,device=scsi,lun=0,blk-file=b.img";
        let calls = calls(words).unwrap();
        let here = std::env::current_dir().unwrap();
        let paths = [here.join("vm.sock"), here.join("b.img")].map(|path| json!(path));
        let [(_, blk), (_, scsi)] = &calls[..] else { panic!("{calls:?}") };
        assert_eq!((&blk["name"], &blk["cache"]), (&json!("vm"), &json!("directsync")));
        assert_eq!(
            (&blk["endpoint"]["path"], &blk["device"]["blk"]["file"]),
            (&paths[0], &json!("/a.img"))
        );
        assert_eq!(scsi["device"]["scsi"][0]["disk"]["file"], paths[1]);
        for (method, params) in calls {
            assert_eq!(method, "export.add");
            assert!(serde_json::from_value::<ExportSpec>(params).is_ok());
        }
    }

    /// The daemon works in another folder.
    #[test]
    fn the_paths_of_a_unit_are_of_the_folder_of_the_command() {
        let words = "add-lun vm 1,blk-file=b.img,reservations=keys";
        let calls = calls(words).unwrap();
        let [(_, params)] = &calls[..] else { panic!("{calls:?}") };
        let unit: UnitSpec = serde_json::from_value(params["unit"].clone()).unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(unit.disk, DiskSpec::File(here.join("b.img")));
        assert_eq!(unit.settings.reservations, Some(here.join("keys")));
    }

    #[test]
    fn a_grown_disk_is_found_among_the_disks() {
        let blk = json!({ "disks": [{ "size-bytes": 512 }] });
        let scsi = json!({ "disks": [
            { "target": 0, "lun": 1, "size-bytes": 512 },
            { "target": 0, "lun": 2, "size-bytes": 1024 },
            { "target": 1, "lun": 2, "size-bytes": 2048 },
            { "target": 1, "lun": 0, "size-bytes": 8192 },
        ] });
        let of_target =
            |target: u8, lun: u16| json!({ "export": "vm", "target": target, "lun": lun });
        let unit = |lun| of_target(0, lun);
        let more = json!(4096);
        let of_blk = json!({ "export": "vm" });
        for (shown, params, size) in [
            (&blk, &of_blk, Some(json!(4608))),
            (&scsi, &unit(2), Some(json!(5120))),
            (&scsi, &of_target(1, 2), Some(json!(6144))),
            (&scsi, &of_target(1, 0), Some(json!(12288))),
            (&scsi, &unit(0), None),
            (&scsi, &of_target(1, 1), None),
            (&scsi, &unit(3), None),
            (&scsi, &of_blk, None),
            (&blk, &unit(1), None),
        ] {
            assert_eq!(grown(shown, params, &more).unwrap(), size, "{params}");
        }
        assert!(grown(&blk, &json!({ "export": "vm" }), &json!(u64::MAX)).is_err());
    }
}
