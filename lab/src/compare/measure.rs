//! One measurement of a server.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use ringhaul_tools::process::{self, Interrupt};
use ringhaul_tools::workspace;
use serde::Serialize;
use serde_json::Value;

use super::Args;
use super::plan::Workload;
use super::servers::{Device, Server, fio_options};
use crate::rig::load::Load;
use crate::rig::targets::{Disk, Target};
use crate::rig::thin;
use crate::rig::{Lab, Program, Times, pinning};

/// Seconds of load before measuring.
pub(super) const RAMP_S: f64 = 0.1;

/// The factor by which an image in a cluster is measured longer: its operations are slow.
const CLUSTER_TIMES: f64 = 4.0;

/// Seconds of load before measuring a cluster, which needs a while to get up to speed.
const CLUSTER_RAMP_S: f64 = 0.5;

/// The figures of one run of the load generator.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Sample {
    /// I/O operations per second.
    pub(super) iops: f64,
    /// Latencies in microseconds. `None` if nothing was completed.
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    /// CPU time of the server for each I/O, in microseconds.
    pub(super) server_cpu_us_per_io: Option<f64>,
    /// The average number of I/Os that one call announced.
    pub(super) completions_per_call: Option<f64>,
    /// Completions of a library for each wake-up of Ringhaul by another thread. `None` if no
    /// library does the work.
    pub(super) completions_per_wake: Option<f64>,
    /// Bytes that the server has written to its disk for each I/O, tables of an image included.
    /// Flushes and the end of the server come later. `None` if another program owns the disk.
    pub(super) written_bytes_per_io: Option<f64>,
}

/// The times for a disk of `target`, if most disks are measured for `runtime` seconds.
pub(super) fn times_on(target: Target, runtime: f64) -> Times {
    match target {
        Target::Rbd => Times { runtime: runtime * CLUSTER_TIMES, ramp: CLUSTER_RAMP_S },
        _ => Times { runtime, ramp: RAMP_S },
    }
}

/// The parts that all measurements share.
pub(super) struct Bench {
    pub(super) lab: Lab,
    pub(super) qsd: PathBuf,
    pub(super) fio: PathBuf,
    /// Seconds of a measurement on most disks.
    runtime: f64,
    /// Servers that cannot be measured here, with the reason.
    lacks: Vec<(Server, String)>,
}

impl Bench {
    /// Builds Ringhaul and finds all other programs that are needed.
    pub(super) fn new(args: &Args, interrupt: &Interrupt) -> Result<Self> {
        let qsd = workspace::find_program("qemu-storage-daemon")
            .context("qemu-storage-daemon is missing; `make setup` installs it")?;
        let fio =
            workspace::find_program("fio").context("fio is missing; `make setup` installs it")?;
        Ok(Self {
            lab: Lab::new((args.server_cpu, args.client_cpu), interrupt)?
                .with_server_nice(args.server_nice),
            lacks: lacks(&qsd, &fio)?,
            qsd,
            fio,
            runtime: args.runtime,
        })
    }

    /// Measures `server` once. The same `round` gives the same sequence of I/O.
    pub(super) fn sample(
        &self,
        server: Server,
        disk: &Disk,
        workload: Workload,
        round: usize,
    ) -> Result<Sample> {
        if let Server::Fio(ioengine) = server {
            return self.fio(ioengine, disk, workload, round);
        }
        let seed = ["--randseed".to_owned(), round.to_string()];
        let own = self.bench_options(server, disk.target, workload);
        let times = times_on(disk.target, self.runtime);
        let options: Vec<_> = own.into_iter().chain(times.options()).chain(seed).collect();
        if let Some(path) = disk.path.as_deref().filter(|_| disk.target.is_thin()) {
            thin::renew(path)?;
        }
        let drive = |server: u32| {
            let sample = parse(&self.lab.bench(&options, times.limit())?)?;
            // The bytes include the ramp, and the load generator's rate covers only the measured
            // time.
            let ios = sample.iops * (times.runtime + times.ramp);
            let bytes = written_bytes(server).filter(|_| !disk.target.is_elsewhere() && ios > 0.0);
            Ok(Sample { written_bytes_per_io: bytes.map(|bytes| bytes / ios), ..sample })
        };
        let served = self.lab.serve(&self.program(server, disk), drive)?;
        let completions_per_wake = completions_per_wake(&served.messages);
        Ok(Sample { completions_per_wake, ..served.value })
    }

    /// The servers on `target` that can be measured under `workload` here.
    pub(super) fn servers(&self, target: Target, workload: Workload) -> Vec<Server> {
        let is_there = |server: &Server| !self.lacks.iter().any(|(lacking, _)| lacking == server);
        Server::under(target, workload).into_iter().filter(is_there).collect()
    }

    /// The servers on `target` that are left out, each with the reason.
    pub(super) fn skipped_servers(&self, target: Target) -> impl Iterator<Item = String> {
        let lacks =
            self.lacks.iter().filter(move |(server, _)| Server::on(target).contains(server));
        lacks.map(|(server, reason)| format!("{server}: skipped, {reason}"))
    }

    /// Counts the system calls of `server` for each I/O. `None` if no tracer works here. `iops` is
    /// the rate without a tracer.
    pub(super) fn count_system_calls(
        &self,
        server: Server,
        disk: &Disk,
        workload: Workload,
        iops: f64,
    ) -> Result<Option<f64>> {
        if !server.is_server() || workload.beside != Load::Nothing {
            return Ok(None);
        }
        if let Some(path) = disk.path.as_deref().filter(|_| disk.target.is_thin()) {
            thin::renew(path)?;
        }
        let options = self.bench_options(server, disk.target, workload);
        let server = self.program(server, disk);
        self.lab.count_system_calls(&server, &options, (workload.depth, 1), iops)
    }

    /// Measures fio on the disk itself, on the CPU of servers.
    fn fio(&self, ioengine: &str, disk: &Disk, workload: Workload, round: usize) -> Result<Sample> {
        let path = disk.path.as_deref().unwrap_or(Path::new("")).to_string_lossy();
        let mut command = Command::new(&self.fio);
        command.args(fio_options(ioengine, &path, workload, self.lab.server_cpu));
        let times = times_on(disk.target, self.runtime);
        command.args(times.options()).arg(format!("--randseed={}", round + 1));
        if !workload.rw.contains("write") {
            command.arg("--readonly");
        }
        if disk.target == Target::Rbd {
            command.env("CEPH_CONF", &*path);
        }
        let name = Server::Fio("").program();
        let report =
            self.lab.report_of(name, command.arg("--output-format=json"), times.limit())?;
        let sample = parse_fio(&report, workload)?;
        // fio's figure lacks the CPU time of the library's threads.
        let is_all = disk.target != Target::Rbd;
        let server_cpu_us_per_io = sample.server_cpu_us_per_io.filter(|_| is_all);
        Ok(Sample { server_cpu_us_per_io, ..sample })
    }

    fn program(&self, server: Server, disk: &Disk) -> Program {
        let path = disk.path.as_deref().unwrap_or(Path::new("")).to_string_lossy();
        let options = server.options(disk.target, &path, &self.lab.socket());
        let mut program = self.lab.ringhaul(options);
        if !server.is_ours() {
            program.words[0] = self.qsd.to_string_lossy().into_owned();
        }
        Program { name: server.to_string(), is_free: disk.target.is_elsewhere(), ..program }
    }

    /// Returns the options of the load generator that do not depend on the kind of run.
    fn bench_options(&self, server: Server, target: Target, workload: Workload) -> Vec<String> {
        let cpu = (!target.is_elsewhere()).then_some(self.lab.client_cpu);
        bench_options(server.device(), workload, &self.lab.socket(), cpu)
    }

    /// Returns the command lines of the servers on `target` and of the load generator, without
    /// paths.
    pub(super) fn command_lines(&self, target: Target) -> Vec<String> {
        let pinned = match target.is_elsewhere() {
            true => String::new(),
            false => pinning(self.lab.server_cpu).join(" ") + " ",
        };
        let cpu = self.lab.server_cpu;
        let servers = Server::on(target).iter().map(|server| {
            let program = server.program();
            if let Server::Fio(ioengine) = server {
                let options = fio_options(ioengine, "DISK", EXAMPLE, cpu).join(" ");
                return format!("{program} {options} --randseed=ROUND");
            }
            let options = server.options(target, "DISK", "SOCKET").join(" ");
            format!("{pinned}{program} {options}")
        });
        let times = times_on(target, self.runtime).options().join(" ");
        let cpu = (!target.is_elsewhere()).then_some(self.lab.client_cpu);
        let devices = [Device::Blk, Device::Inflight, Device::Scsi].into_iter();
        let is_driven = |device: &Device| Server::on(target).iter().any(|s| s.device() == *device);
        let loads = devices.filter(is_driven).map(|device| {
            let options = bench_options(device, EXAMPLE, "SOCKET", cpu).join(" ");
            format!("ringhaul bench {options} {times} --randseed ROUND")
        });
        servers.chain(loads).collect()
    }
}

/// The workload in the commands of the report.
const EXAMPLE: Workload =
    Workload { rw: "randread", bs: "4k", depth: 64, driver_polls: false, beside: Load::Nothing };

/// Returns the options of the load generator that do not depend on the kind of run.
pub(super) fn bench_options(
    device: Device,
    workload: Workload,
    socket: &str,
    cpu: Option<usize>,
) -> Vec<String> {
    let depth = workload.depth.to_string();
    let cpu = cpu.map(|cpu| cpu.to_string());
    let pinned = cpu.iter().flat_map(|cpu| ["--cpus_allowed", cpu]);
    let options = ["--socket-path", socket, "--rw", workload.rw, "--bs", workload.bs];
    let more = ["--iodepth", &depth, "--numjobs", "1"];
    let poll: &[&str] = if workload.driver_polls { &["--busy-poll"] } else { &[] };
    let words = options.into_iter().chain(more).chain(pinned);
    let words = words.chain(poll.iter().chain(device.bench_options()).copied());
    words.map(str::to_owned).collect()
}

/// Returns the bytes that a process has sent to disks so far, without zeroes that a device writes
/// by itself.
fn written_bytes(process: u32) -> Option<f64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/io")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: "))?;
    line.parse().ok()
}

/// Finds the figures in the load generator's report.
pub(super) fn parse(report: &Value) -> Result<Sample> {
    let number = |key: &str| report.get(key).and_then(Value::as_f64);
    Ok(Sample {
        iops: number("iops").context("no IOPS in the report of ringhaul bench")?,
        p50_us: number("latency_p50_us"),
        p99_us: number("latency_p99_us"),
        server_cpu_us_per_io: number("server_cpu_us_per_io"),
        completions_per_call: number("completions_per_call"),
        completions_per_wake: None,
        written_bytes_per_io: None,
    })
}

/// Parses completions from outside the kernel, and wake-ups by other threads, from the daemon's
/// last messages. `None` if either count is 0.
fn completions_per_wake(messages: &str) -> Option<f64> {
    // Older builds have the second text.
    let (before, after) = messages
        .rsplit_once(" completed by other threads, which woke it ")
        .or_else(|| messages.rsplit_once(" completed by others, who woke it "))?;
    let completions: f64 = before.rsplit(' ').next()?.parse().ok()?;
    let wakes: f64 = after.split(' ').next()?.parse().ok()?;
    (completions > 0.0 && wakes > 0.0).then(|| completions / wakes)
}

/// Finds programs that lack a part from a separate package.
fn lacks(qsd: &Path, fio: &Path) -> Result<Vec<(Server, String)>> {
    let mut lacks = Vec::new();
    // With the module, the error is about the missing configuration.
    let blockdev = "driver=rbd,pool=rbd,image=none,conf=/nonexistent,node-name=disk";
    let answer = Command::new(qsd).args(["--blockdev", blockdev]).stdin(Stdio::null()).output();
    let answer = answer.context("asking qemu-storage-daemon for its driver rbd")?;
    if String::from_utf8_lossy(&answer.stderr).contains("Unknown driver") {
        let reason = "install qemu-block-extra of the version of qemu-storage-daemon".to_owned();
        lacks.push((Server::QsdDriver("rbd"), reason));
    }
    let engines = process::output(Command::new(fio).arg("--enghelp"))?;
    if !engines.split_ascii_whitespace().any(|engine| engine == "rbd") {
        lacks.push((Server::Fio("rbd"), "this fio has no engine rbd".to_owned()));
    }
    Ok(lacks)
}

/// Finds the figures in fio's report.
fn parse_fio(report: &Value, workload: Workload) -> Result<Sample> {
    let job = &report["jobs"][0];
    let io = &job[if workload.rw.contains("write") { "write" } else { "read" }];
    let number = |value: &Value| value.as_f64();
    let percentile = |name: &str| Some(number(&io["clat_ns"]["percentile"][name])? / 1e3);
    let cpu_percent = number(&job["usr_cpu"]).zip(number(&job["sys_cpu"]));
    let cpu_us_per_io = cpu_percent.and_then(|(user, system)| {
        let milliseconds = number(&job["job_runtime"])?;
        let ios = number(&io["total_ios"]).filter(|ios| *ios > 0.0)?;
        Some((user + system) / 100.0 * milliseconds * 1e3 / ios)
    });
    Ok(Sample {
        iops: number(&io["iops"]).context("no IOPS in the report of fio")?,
        p50_us: percentile("50.000000"),
        p99_us: percentile("99.000000"),
        server_cpu_us_per_io: cpu_us_per_io,
        completions_per_call: None,
        completions_per_wake: None,
        written_bytes_per_io: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_fio_is_parsed() {
        let io = serde_json::json!({
            "iops": 162_000.5,
            "total_ios": 80_000,
            "clat_ns": { "percentile": { "50.000000": 382_976, "99.000000": 500_000 } },
        });
        let report = serde_json::json!({
            "jobs": [{ "usr_cpu": 10.0, "sys_cpu": 30.0, "job_runtime": 500, "read": io }],
        });
        let sample = parse_fio(&report, EXAMPLE).unwrap();
        assert_eq!((sample.iops, sample.p50_us), (162_000.5, Some(382.976)));
        assert_eq!(sample.server_cpu_us_per_io, Some(2.5));
        assert!(parse_fio(&report, Workload { rw: "randwrite", ..EXAMPLE }).is_err());
    }

    #[test]
    fn completions_per_wake_are_parsed_from_the_log() {
        let log_line =
            |counts: &str| format!("iothread-0: 12 reads; 3 waits; {counts} times; 4 calls");
        let log_line = |[of, wakes]: [u32; 2]| {
            log_line(&format!("{of} completed by other threads, which woke it {wakes}"))
        };
        assert_eq!(completions_per_wake(&log_line([300, 40])), Some(7.5));
        assert_eq!(completions_per_wake(&log_line([0, 3])), None);
        assert_eq!(completions_per_wake("nothing"), None);
    }

    #[test]
    fn a_program_without_its_module_is_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str| {
            let path = folder.path().join(name);
            // Written by a shell: children of other tests must not inherit a writable descriptor of
            // a program.
            let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\"";
            let path = path.to_str().unwrap().to_owned();
            process::output(Command::new("sh").args(["-c", write, &path, text])).unwrap();
            PathBuf::from(path)
        };
        let with = script("with", "echo error reading conf file >&2; echo rbd; exit 1");
        let engines = script("engines", "echo libaio rbd");
        let without = script("without", "echo \"Unknown driver 'rbd'\" >&2; exit 1");
        let few = script("few", "echo libaio");
        assert!(lacks(&with, &engines).unwrap().is_empty());
        let lacking = lacks(&without, &few).unwrap();
        let lacking: Vec<_> = lacking.into_iter().map(|(server, _)| server).collect();
        assert_eq!(lacking, [Server::QsdDriver("rbd"), Server::Fio("rbd")]);
    }
}
