//! One measurement of a server.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use super::Args;
use super::plan::Workload;
use super::servers::Server;
use crate::lab::targets::{Disk, Target};
use crate::lab::{Lab, Program, Times, pinning};
use crate::process::Interrupt;
use crate::workspace;

/// Seconds before measuring.
const RAMP_S: f64 = 0.2;

/// What the load generator says of one run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Sample {
    /// I/O operations for each second.
    pub(super) iops: f64,
    /// Latencies in microseconds; None when nothing was completed.
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    /// CPU time of the server for each I/O, in microseconds.
    pub(super) server_cpu_us_per_io: Option<f64>,
    /// How many I/Os one call announced, on average.
    pub(super) completions_per_call: Option<f64>,
}

/// Everything that stays the same over all measurements.
pub(super) struct Bench {
    pub(super) lab: Lab,
    pub(super) qsd: PathBuf,
    engine: String,
    times: Times,
}

impl Bench {
    /// Builds Ringhaul and looks for everything else that is needed.
    pub(super) fn new(args: &Args, interrupt: &Interrupt) -> Result<Self> {
        let qsd = workspace::find_program("qemu-storage-daemon")
            .context("qemu-storage-daemon is missing; `make setup` installs it")?;
        Ok(Self {
            lab: Lab::new((args.server_cpu, args.client_cpu), interrupt)?,
            qsd,
            engine: args.engine.clone(),
            times: Times { runtime: args.runtime, ramp: RAMP_S },
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
        let seed = ["--randseed".to_owned(), round.to_string()];
        let options = self.bench_options(workload).into_iter().chain(self.times.options());
        let options: Vec<_> = options.chain(seed).collect();
        let drive = |_| parse(&self.lab.bench(&options, self.times.limit())?);
        Ok(self.lab.serve(&self.program(server, disk), drive)?.value)
    }

    /// Counts the system calls of `server` for each I/O; None if nothing here can count them.
    /// `iops` is what it does without a tracer.
    pub(super) fn count_system_calls(
        &self,
        server: Server,
        disk: &Disk,
        workload: Workload,
        iops: f64,
    ) -> Result<Option<f64>> {
        let (server, options) = (self.program(server, disk), self.bench_options(workload));
        self.lab.count_system_calls(&server, &options, (workload.depth, 1), iops)
    }

    fn program(&self, server: Server, disk: &Disk) -> Program {
        let path = disk.path.as_deref().unwrap_or(Path::new("")).to_string_lossy();
        let options = server.options(disk.target, &self.engine, &path, &self.lab.socket());
        let mut program = self.lab.ringhaul(options);
        if server != Server::Ringhaul {
            program.words[0] = self.qsd.to_string_lossy().into_owned();
        }
        Program { name: server.to_string(), ..program }
    }

    /// The options of the load generator that do not depend on the kind of run.
    fn bench_options(&self, workload: Workload) -> Vec<String> {
        bench_options(workload, &self.lab.socket(), self.lab.client_cpu)
    }

    /// How the servers on `target` and the load generator are started, without paths.
    pub(super) fn command_lines(&self, target: Target) -> Vec<String> {
        let pinned = pinning(self.lab.server_cpu).join(" ");
        let servers = Server::on(target).iter().map(|server| {
            let options = server.options(target, &self.engine, "DISK", "SOCKET").join(" ");
            format!("{pinned} {} {options}", server.program())
        });
        let example = Workload { rw: "randread", bs: "4k", depth: 64 };
        let options = bench_options(example, "SOCKET", self.lab.client_cpu).join(" ");
        let times = self.times.options().join(" ");
        let load = format!("ringhaul bench {options} {times} --randseed ROUND");
        servers.chain([load]).collect()
    }
}

fn bench_options(workload: Workload, socket: &str, cpu: usize) -> Vec<String> {
    let depth = workload.depth.to_string();
    let cpu = cpu.to_string();
    let options = ["--socket-path", socket, "--rw", workload.rw, "--bs", workload.bs];
    let more = ["--iodepth", &depth, "--numjobs", "1", "--cpus_allowed", &cpu];
    options.iter().chain(&more).map(|word| (*word).to_owned()).collect()
}

/// Finds our figures in the load generator's report.
fn parse(report: &Value) -> Result<Sample> {
    let number = |key: &str| report.get(key).and_then(Value::as_f64);
    Ok(Sample {
        iops: number("iops").context("no IOPS in the report of ringhaul bench")?,
        p50_us: number("latency_p50_us"),
        p99_us: number("latency_p99_us"),
        server_cpu_us_per_io: number("server_cpu_us_per_io"),
        completions_per_call: number("completions_per_call"),
    })
}
