//! The machine and the programs of a measurement, as the report describes them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use ringhaul_tools::process;
use ringhaul_tools::workspace;

use super::{Lab, wakeup};

/// A load of the last minute above this means that other programs are running.
const QUIET_LOAD: f64 = 0.5;

/// The machine and the programs; each line is a name and a value.
pub(crate) struct Machine {
    pub(crate) facts: Vec<(&'static str, String)>,
}

/// Describes this machine and the programs that measure on it.
pub(crate) fn describe(lab: &Lab) -> Result<Machine> {
    let mut facts = facts(&lab.binary)?;
    facts.extend([
        pinned(lab),
        (
            "system calls",
            match &lab.tracer {
                Some(tracer) => format!("counted in runs of their own by {tracer}"),
                None => "not counted: neither perf nor strace works here".to_owned(),
            },
        ),
    ]);
    Ok(Machine { facts })
}

/// The CPUs to which server and load generator are pinned.
pub(crate) fn pinned(lab: &Lab) -> (&'static str, String) {
    let Lab { server_cpu, client_cpu, .. } = lab;
    ("pinned", format!("server to CPU {server_cpu}, load generator to CPU {client_cpu}"))
}

/// Describes this machine and the measured Ringhaul, as names and values.
pub(crate) fn facts(binary: &Path) -> Result<Vec<(&'static str, String)>> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = format!("Linux {} {}", release.trim(), std::env::consts::ARCH);
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    Ok(vec![
        ("date", process::output(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"]))?),
        ("CPU", format!("{} × {}", cpus, processor())),
        ("virtualization", virtualization()),
        ("memory", memory()),
        ("kernel", kernel),
        ("load average at the start", load_average()),
        ("wake-up", wakeup::describe()?),
        ("Ringhaul", ringhaul_version(binary)?),
    ])
}

fn processor() -> String {
    field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned())
}

fn memory() -> String {
    let kib = field("/proc/meminfo", "MemTotal")
        .and_then(|value| value.strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok()));
    kib.map_or_else(|| "unknown".to_owned(), |kib| format!("{} MiB", kib >> 10))
}

/// The value of the first line `name: value`.
fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim().to_owned())
}

fn virtualization() -> String {
    let flags = field("/proc/cpuinfo", "flags").unwrap_or_default();
    match flags.split(' ').any(|flag| flag == "hypervisor") {
        true => "a virtual machine".to_owned(),
        false => "none that shows".to_owned(),
    }
}

/// The load averages of 1, 5 and 15 minutes. Prints a warning if other programs are running.
fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let averages: Vec<_> = text.split(' ').take(3).collect();
    let last_minute = averages.first().and_then(|average| average.parse::<f64>().ok());
    if last_minute.is_some_and(|average| average > QUIET_LOAD) {
        eprintln!("The machine is not idle (load {}); figures will vary.", averages.join(" "));
    }
    averages.join(" ")
}

fn ringhaul_version(binary: &Path) -> Result<String> {
    let version = process::output(Command::new(binary).arg("--version"))
        .context("asking Ringhaul for its version")?;
    let commit = ["describe", "--always", "--dirty"];
    let commit = process::output(Command::new("git").current_dir(workspace::root()).args(commit));
    Ok(match commit {
        Ok(commit) => format!("{version}, commit {commit}"),
        // A tarball has no commit.
        Err(_) => version,
    })
}
