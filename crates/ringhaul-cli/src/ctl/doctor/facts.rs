//! The facts that findings are drawn from: answers of the daemon, and files of the system.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use ringhaul::spec::command::{ExportDetails, ExportStatus};
use ringhaul::spec::process::ProcessStatus;
use ringhaul::spec::settings::Settings;
use ringhaul::spec::stats::{DaemonStats, ExportStats, LoopStats};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::connection::{Connection, Refusal, UNKNOWN};
use super::system::{
    BlockDevice, VcpuThread, block_device, command_line, online_cpus, vcpu_threads,
};

/// A daemon and its host at two moments.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) process: ProcessStatus,
    pub(super) settings: Settings,
    pub(super) exports: Vec<ExportFacts>,
    pub(super) threads: Vec<ThreadFacts>,
    /// The CPUs of the host.
    pub(super) online_cpus: BTreeSet<u32>,
    /// The time between the looks.
    pub(super) time: Duration,
    /// The statistics at the first look, with the peaks until then.
    pub(super) first_stats: DaemonStats,
}

/// An export.
#[derive(Debug)]
pub(super) struct ExportFacts {
    pub(super) details: ExportDetails,
    /// The counters at the two looks. `None`: the export was added or removed in between.
    pub(super) stats: Option<[ExportStats; 2]>,
    /// The process of the front-end, if it is known.
    pub(super) peer: Option<u32>,
    /// The words of the front-end's command line; empty if it cannot be read.
    pub(super) command_line: Vec<String>,
    /// The vCPUs of the front-end.
    pub(super) vcpus: Vec<VcpuThread>,
    /// The block devices at the two looks, in the order of the disks. `None`: a disk is on none.
    pub(super) devices: Vec<Option<[BlockDevice; 2]>>,
}

/// An IoThread.
#[derive(Debug)]
pub(super) struct ThreadFacts {
    pub(super) stats: [LoopStats; 2],
    /// The CPUs that it may run on.
    pub(super) cpus: String,
}

/// The counters at one time.
struct Reading {
    stats: DaemonStats,
    devices: BTreeMap<String, BlockDevice>,
    time: Instant,
}

impl Facts {
    /// Watches a daemon for `time`: the export with this name, or all.
    ///
    /// # Errors
    ///
    /// When the daemon has gone, or has no such export.
    pub(super) fn collect(
        daemon: &mut Connection,
        export: Option<&str>,
        time: Duration,
    ) -> Result<Self> {
        let details = details(daemon, export)?;
        let before = Reading::new(daemon, &details)?;
        std::thread::sleep(time);
        let after = Reading::new(daemon, &details)?;
        let process: ProcessStatus = ask(daemon, "process", &json!({}))?;
        let mut threads = Vec::new();
        for (old, new) in before.stats.iothreads.iter().zip(&after.stats.iothreads) {
            let cpus = process.thread_cpus.iter().find(|cpus| cpus.name == new.name);
            let cpus = cpus.map_or_else(String::new, |cpus| cpus.cpus.clone());
            threads.push(ThreadFacts { stats: [old.clone(), new.clone()], cpus });
        }
        Ok(Self {
            settings: ask(daemon, "set", &json!({}))?,
            exports: details.into_iter().map(|it| ExportFacts::new(it, &before, &after)).collect(),
            threads,
            online_cpus: online_cpus(Path::new("/sys/devices/system/cpu")),
            time: after.time.saturating_duration_since(before.time),
            process,
            first_stats: before.stats,
        })
    }
}

impl ExportFacts {
    fn new(details: ExportDetails, before: &Reading, after: &Reading) -> Self {
        let name = details.status.name();
        let stats = |look: &Reading| {
            let mut exports = look.stats.exports.iter();
            exports.find(|stats| stats.name == name).cloned()
        };
        let device = |number: &Option<String>| {
            let of = |look: &Reading| look.devices.get(number.as_ref()?).copied();
            Some([of(before)?, of(after)?])
        };
        let devices = details.disks.iter().map(|disk| device(&disk.device_number)).collect();
        let peer = details.front_end.as_ref().and_then(|front_end| front_end.peer.as_ref()?.pid);
        let of_peer = peer.map(|pid| Path::new("/proc").join(pid.to_string()));
        Self {
            stats: stats(before).zip(stats(after)).map(|(before, after)| [before, after]),
            command_line: of_peer.as_deref().map(command_line).unwrap_or_default(),
            vcpus: of_peer.as_deref().map(vcpu_threads).unwrap_or_default(),
            peer,
            devices,
            details,
        }
    }
}

impl Reading {
    fn new(daemon: &mut Connection, exports: &[ExportDetails]) -> Result<Self> {
        let stats = ask(daemon, "stats", &json!({}))?;
        let disks = exports.iter().flat_map(|export| &export.disks);
        let numbers = disks.filter_map(|disk| disk.device_number.as_ref());
        let device = |number: &String| {
            Some((number.clone(), block_device(Path::new("/sys/dev/block"), number)?))
        };
        Ok(Self { stats, devices: numbers.filter_map(device).collect(), time: Instant::now() })
    }
}

/// Describes one export or all.
fn details(daemon: &mut Connection, export: Option<&str>) -> Result<Vec<ExportDetails>> {
    let names = match export {
        Some(export) => vec![export.to_owned()],
        None => {
            let exports: Vec<ExportStatus> = ask(daemon, "export.list", &json!({}))?;
            exports.iter().map(ExportStatus::name).collect()
        }
    };
    let mut all = Vec::new();
    for name in names {
        let answer = daemon.call("export.show", &json!({ "export": name }))?;
        all.extend(shown(answer, export.is_some())?);
    }
    Ok(all)
}

/// The details in an answer. `None`: an export of the list has been removed since. An export that
/// the user has named must exist.
fn shown(answer: Result<Value, Refusal>, is_named: bool) -> Result<Option<ExportDetails>> {
    match answer {
        Err(Refusal { code: UNKNOWN, .. }) if !is_named => Ok(None),
        answer => read("export.show", answer).map(Some),
    }
}

/// Calls a method of the daemon.
pub(super) fn ask<T: DeserializeOwned>(
    daemon: &mut Connection,
    method: &str,
    params: &Value,
) -> Result<T> {
    read(method, daemon.call(method, params)?)
}

fn read<T: DeserializeOwned>(method: &str, answer: Result<Value, Refusal>) -> Result<T> {
    let answer = answer.map_err(|refusal| anyhow!(refusal.message))?;
    serde_json::from_value(answer)
        .with_context(|| format!("the daemon is of another version: its answer to {method}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_export_that_was_removed_meanwhile_is_skipped() {
        let refusal = |code| Err(Refusal { code, message: "no".to_owned() });
        assert!(shown(refusal(UNKNOWN), false).unwrap().is_none());
        assert!(shown(refusal(UNKNOWN), true).is_err());
        assert!(shown(refusal(UNKNOWN + 1), false).is_err());
        assert!(shown(Ok(json!({ "name": "vm1" })), false).is_err());
    }
}
