//! One measurement: a fresh server, the load generator, and what they say.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;
use tempfile::TempDir;

use super::Args;
use super::plan::Workload;
use super::servers::Server;
use super::targets::{Disk, Target};
use super::trace::Tracer;
use crate::process::{Interrupt, Running, describe};
use crate::workspace;

/// Seconds before measuring, in which caches and clocks of the CPU settle.
const RAMP_S: f64 = 0.2;

/// How long a server has to listen.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How long the load generator may take on top of its run time.
const BENCH_MARGIN: Duration = Duration::from_secs(60);

/// Seconds that a run with system calls counted should take without the tracer.
const TRACED_S: f64 = 0.5;

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
    pub(super) binary: PathBuf,
    pub(super) qsd: PathBuf,
    pub(super) tracer: Option<Tracer>,
    engine: String,
    runtime: f64,
    server_cpu: usize,
    client_cpu: usize,
    interrupt: Interrupt,
    /// For the socket, the servers' messages and counts.
    folder: TempDir,
}

impl Bench {
    /// Builds Ringhaul and looks for everything else that is needed.
    pub(super) fn new(args: &Args, interrupt: &Interrupt) -> Result<Self> {
        for program in ["taskset", "losetup"] {
            let found = workspace::find_program(program);
            ensure!(found.is_some(), "{program} is missing; install the package util-linux");
        }
        let qsd = workspace::find_program("qemu-storage-daemon")
            .context("qemu-storage-daemon is missing; `make setup` installs it")?;
        for cpu in [args.server_cpu, args.client_cpu] {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}");
            ensure!(Path::new(&path).exists(), "there is no CPU {cpu} to pin to");
        }
        let folder = tempfile::Builder::new()
            .prefix("ringhaul-compare-")
            .tempdir()
            .context("making a temporary folder (TMPDIR chooses where)")?;
        Ok(Self {
            binary: workspace::ringhaul_binary()?,
            qsd,
            tracer: Tracer::find(folder.path()),
            engine: args.engine.clone(),
            runtime: args.runtime,
            server_cpu: args.server_cpu,
            client_cpu: args.client_cpu,
            interrupt: interrupt.clone(),
            folder,
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
        let mut running = self.start(server, disk, &[])?;
        let seed = ["--randseed".to_owned(), round.to_string()];
        let bounds = self.time_options().into_iter().chain(seed).collect::<Vec<_>>();
        let report = self.drive(workload, &bounds);
        let sample = self.explain(report.and_then(|report| parse(&report)), server)?;
        self.end(server, &mut running)?;
        Ok(sample)
    }

    /// Counts the system calls of `server` for each I/O; None if nothing here can count them.
    ///
    /// `iops` is what it does without a tracer. Runs of different length have the same start
    /// and end, so what these cost is in the difference no more.
    pub(super) fn count_system_calls(
        &self,
        server: Server,
        disk: &Disk,
        workload: Workload,
        iops: f64,
    ) -> Result<Option<f64>> {
        let Some(tracer) = &self.tracer else {
            return Ok(None);
        };
        let few = f64::from(workload.depth);
        let many = few + (iops * TRACED_S / tracer.slowdown()).ceil().max(100.0);
        let base = self.count_once(tracer, server, disk, workload, few)?;
        let count = self.count_once(tracer, server, disk, workload, many)?;
        // A server that makes none for an I/O may need one more or less to start or end.
        Ok(Some(((count - base) / (many - few)).max(0.0)))
    }

    fn count_once(
        &self,
        tracer: &Tracer,
        server: Server,
        disk: &Disk,
        workload: Workload,
        ios: f64,
    ) -> Result<f64> {
        let output = self.folder.path().join("system-calls");
        let mut running = self.start(server, disk, &tracer.prefix(&output))?;
        let bounds = ["--number_ios".to_owned(), format!("{ios:.0}")];
        self.explain(self.drive(workload, &bounds), server)?;
        self.end(server, &mut running)?;
        tracer.read(&output)
    }

    /// Starts `server` on `disk`, behind a tracer if `prefix` is not empty.
    fn start(&self, server: Server, disk: &Disk, prefix: &[String]) -> Result<Running> {
        let program = if server == Server::Ringhaul { &self.binary } else { &self.qsd };
        let socket = self.socket();
        let path = disk.path.as_deref().unwrap_or(Path::new("")).to_string_lossy();
        let options = server.options(disk.target, &self.engine, &path, &socket.to_string_lossy());
        let program = [program.to_string_lossy().into_owned()];
        let pinned = pinning(self.server_cpu);
        let words = prefix.iter().chain(&pinned).chain(&program).chain(&options);
        let words: Vec<&String> = words.collect();
        let messages = File::create(self.messages()).context("making a file for messages")?;
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(messages);
        let name = server.program();
        let mut running = match prefix.is_empty() {
            true => Running::start(name, &mut command, &self.interrupt)?,
            false => Running::start_traced(name, &mut command, &self.interrupt)?,
        };
        self.explain(running.wait_for_socket(&socket, START_LIMIT), server)?;
        Ok(running)
    }

    /// Runs the load generator and returns its report.
    fn drive(&self, workload: Workload, bounds: &[String]) -> Result<Value> {
        let report = self.folder.path().join("report.json");
        let mut command = Command::new(&self.binary);
        command.args(bench_options(workload, &self.socket().to_string_lossy(), self.client_cpu));
        command.args(bounds).arg("--output").arg(&report);
        let mut running = Running::start("ringhaul bench", &mut command, &self.interrupt)?;
        let status = running.wait(Duration::from_secs_f64(self.runtime) + BENCH_MARGIN)?;
        if !status.success() {
            bail!("ringhaul bench ended with {}", describe(status));
        }
        let text = std::fs::read_to_string(&report)
            .with_context(|| format!("reading {}", report.display()))?;
        serde_json::from_str(&text).context("reading the report of ringhaul bench")
    }

    fn end(&self, server: Server, running: &mut Running) -> Result<()> {
        let status = running.stop()?;
        let result = match status.success() {
            true => Ok(()),
            false => Err(anyhow::anyhow!("{} ended with {}", server.program(), describe(status))),
        };
        self.explain(result, server)?;
        match std::fs::remove_file(self.socket()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).context("removing the socket")
            }
            _ => Ok(()),
        }
    }

    /// Adds what the server said on stderr to an error.
    fn explain<T>(&self, result: Result<T>, server: Server) -> Result<T> {
        if result.is_err() {
            // After Ctrl-C nobody is interested in what the server said.
            self.interrupt.check()?;
        }
        result.with_context(|| {
            let messages = std::fs::read_to_string(self.messages()).unwrap_or_default();
            match messages.trim() {
                "" => format!("measuring {server}, which said nothing"),
                said => format!("measuring {server}, which said: {said}"),
            }
        })
    }

    /// How the servers on `target` and the load generator are started, without paths.
    pub(super) fn command_lines(&self, target: Target) -> Vec<String> {
        let pinned = pinning(self.server_cpu).join(" ");
        let servers = Server::on(target).iter().map(|server| {
            let options = server.options(target, &self.engine, "DISK", "SOCKET").join(" ");
            format!("{pinned} {} {options}", server.program())
        });
        let example = Workload { rw: "randread", bs: "4k", depth: 64 };
        let options = bench_options(example, "SOCKET", self.client_cpu).join(" ");
        let load = format!("ringhaul {options} {} --randseed ROUND", self.time_options().join(" "));
        servers.chain([load]).collect()
    }

    fn time_options(&self) -> Vec<String> {
        let milliseconds = |seconds| {
            let time = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
            format!("{}ms", time.as_millis())
        };
        let times = [("--runtime", self.runtime), ("--ramp_time", RAMP_S)];
        times.iter().flat_map(|(name, time)| [(*name).to_owned(), milliseconds(*time)]).collect()
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn messages(&self) -> PathBuf {
        self.folder.path().join("messages")
    }
}

/// The options of the load generator that do not depend on the kind of run.
fn bench_options(workload: Workload, socket: &str, cpu: usize) -> Vec<String> {
    let depth = workload.depth.to_string();
    let cpu = cpu.to_string();
    let options = ["bench", "--socket-path", socket, "--rw", workload.rw, "--bs", workload.bs];
    let more = ["--iodepth", &depth, "--numjobs", "1", "--cpus_allowed", &cpu];
    let output = ["--eta", "never", "--output-format", "json"];
    options.iter().chain(&more).chain(&output).map(|word| (*word).to_owned()).collect()
}

/// The words that pin the program after them to a CPU.
fn pinning(cpu: usize) -> [String; 3] {
    ["taskset".to_owned(), "-c".to_owned(), cpu.to_string()]
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
