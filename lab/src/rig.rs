//! The parts that every measurement needs: a fresh server, the load generator and their reports;
//! disks, counts of system calls, the machine, progress, medians.

pub(crate) mod elsewhere;
pub(crate) mod load;
pub(crate) mod machine;
pub(crate) mod progress;
pub(crate) mod spread;
pub(crate) mod targets;
pub(crate) mod thin;
pub(crate) mod trace;
mod wakeup;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ringhaul_tools::process::{Interrupt, ManagedChild, describe};
use ringhaul_tools::workspace;
use serde_json::Value;
use tempfile::TempDir;

use load::Load;
use trace::Tracer;

/// The most time that a server may take until it listens.
const START_LIMIT: Duration = Duration::from_secs(30);

/// The most time that the load generator may take beyond its run time.
const BENCH_MARGIN: Duration = Duration::from_secs(60);

/// The seconds that a run with counted system calls should take without the tracer.
const TRACED_S: f64 = 0.5;

/// The parts that all measurements share.
pub(crate) struct Lab {
    pub(crate) binary: PathBuf,
    pub(crate) tracer: Option<Tracer>,
    pub(crate) server_cpu: usize,
    pub(crate) client_cpu: usize,
    /// The nice value of each server's session: -10 gives it ten times the share of another one.
    /// 0 leaves it.
    server_nice: i8,
    interrupt: Interrupt,
    /// Holds sockets, the messages of servers and counts of system calls.
    folder: TempDir,
}

/// A program with its options, and its name in errors.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) name: String,
    /// The program and its arguments.
    pub(crate) words: Vec<String>,
    /// True if the program may run on any CPU. Other servers are pinned.
    pub(crate) is_free: bool,
}

/// The results of a server's life.
pub(crate) struct Served<T> {
    pub(crate) value: T,
    /// The stderr of the server.
    pub(crate) messages: String,
    /// System calls from start to end. `None` if they were not counted.
    system_calls: Option<f64>,
}

/// The lengths of a measurement's phases, in seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) runtime: f64,
    /// The phase before measuring, in which caches and CPU clocks settle.
    pub(crate) ramp: f64,
}

impl Times {
    /// Returns the times as options of the load generator.
    pub(crate) fn options(&self) -> Vec<String> {
        let milliseconds = |seconds| {
            let time = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
            format!("{}ms", time.as_millis())
        };
        let times = [("--runtime", self.runtime), ("--ramp_time", self.ramp)];
        times.iter().flat_map(|(name, time)| [(*name).to_owned(), milliseconds(*time)]).collect()
    }

    /// The most time that a run may take.
    pub(crate) fn limit(&self) -> Duration {
        Duration::from_secs_f64(self.runtime + self.ramp) + BENCH_MARGIN
    }
}

impl Lab {
    /// Builds Ringhaul and finds all other programs that are needed.
    pub(crate) fn new(
        (server_cpu, client_cpu): (usize, usize),
        interrupt: &Interrupt,
    ) -> Result<Self> {
        for program in ["taskset", "losetup", "setsid"] {
            let found = workspace::find_program(program);
            ensure!(found.is_some(), "{program} is missing; install the package util-linux");
        }
        for cpu in [server_cpu, client_cpu] {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}");
            ensure!(Path::new(&path).exists(), "there is no CPU {cpu} to pin to");
        }
        let folder = tempfile::Builder::new()
            .prefix("ringhaul-lab-")
            .tempdir()
            .context("making a temporary folder (TMPDIR chooses where)")?;
        Ok(Self {
            binary: workspace::ringhaul_binary()?,
            tracer: Tracer::find(folder.path()),
            server_cpu,
            client_cpu,
            server_nice: 0,
            interrupt: interrupt.clone(),
            folder,
        })
    }

    /// Sets the nice value of the session of each server that starts from now on.
    pub(crate) fn with_server_nice(self, server_nice: i8) -> Self {
        Self { server_nice, ..self }
    }

    /// Returns Ringhaul with `options`.
    pub(crate) fn ringhaul(&self, options: impl IntoIterator<Item = String>) -> Program {
        let program = self.binary.to_string_lossy().into_owned();
        Program {
            name: "ringhaul".to_owned(),
            words: [program].into_iter().chain(options).collect(),
            is_free: false,
        }
    }

    /// Starts a background load, which ends when the result is dropped.
    pub(crate) fn load(&self, load: Load) -> Result<load::RunningLoad> {
        load.start(self.folder.path())
    }

    /// The path of the socket of a server that runs alone.
    pub(crate) fn socket(&self) -> String {
        self.folder.path().join("socket").to_string_lossy().into_owned()
    }

    /// Starts `server` on its CPU, calls `action` with its process id, and stops it.
    pub(crate) fn serve<T>(
        &self,
        server: &Program,
        action: impl FnOnce(u32) -> Result<T>,
    ) -> Result<Served<T>> {
        self.serve_traced(server, None, action)
    }

    fn serve_traced<T>(
        &self,
        server: &Program,
        tracer: Option<&Tracer>,
        action: impl FnOnce(u32) -> Result<T>,
    ) -> Result<Served<T>> {
        let counts = self.folder.path().join("system-calls");
        let prefix = tracer.map_or(Vec::new(), |tracer| tracer.prefix(&counts));
        let result = self.start(server, &prefix).and_then(|mut running| {
            let value = action(running.id())?;
            self.stop(&mut running, &server.name)?;
            Ok(value)
        });
        let value = self.explain(result, &server.name)?;
        let messages = std::fs::read_to_string(self.messages()).unwrap_or_default();
        let system_calls = tracer.map(|tracer| tracer.read(&counts)).transpose()?;
        Ok(Served { value, messages, system_calls })
    }

    /// Starts `server` behind the words of a tracer in `prefix`, which may be empty, and waits
    /// until it listens.
    pub(super) fn start(&self, server: &Program, prefix: &[String]) -> Result<ManagedChild> {
        let pinned = match server.is_free {
            true => Vec::new(),
            false => pinning(self.server_cpu).to_vec(),
        };
        let words: Vec<&String> = prefix.iter().chain(&pinned).chain(&server.words).collect();
        let messages = File::create(self.messages()).context("making a file for messages")?;
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(messages);
        let mut running = match prefix.is_empty() {
            true => ManagedChild::start(&server.name, &mut command, &self.interrupt)?,
            false => ManagedChild::start_traced(&server.name, &mut command, &self.interrupt)?,
        };
        running.wait_for_socket(Path::new(&self.socket()), START_LIMIT)?;
        if self.server_nice != 0 {
            let file = format!("/proc/{}/autogroup", running.id());
            std::fs::write(&file, self.server_nice.to_string())
                .with_context(|| format!("writing the nice value of a session to {file}"))?;
        }
        Ok(running)
    }

    /// Ends a server, which must exit successfully, and removes its socket.
    pub(super) fn stop(&self, running: &mut ManagedChild, name: &str) -> Result<()> {
        let status = running.stop()?;
        ensure!(status.success(), "{name} ended with {}", describe(status));
        match std::fs::remove_file(self.socket()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).context("removing the socket")
            }
            _ => Ok(()),
        }
    }

    /// Runs the load generator and returns its report. `options` must not name an output file.
    pub(crate) fn bench(&self, options: &[String], limit: Duration) -> Result<Value> {
        let mut command = Command::new(&self.binary);
        command.arg("bench").args(options);
        command.args(["--eta", "never", "--output-format", "json"]);
        self.report_of("ringhaul bench", &mut command, limit)
    }

    /// Runs a program that writes JSON to the file named with `--output`, and returns this report.
    pub(crate) fn report_of(
        &self,
        name: &str,
        command: &mut Command,
        limit: Duration,
    ) -> Result<Value> {
        let report = self.folder.path().join("report.json");
        let mut running =
            ManagedChild::start(name, command.arg("--output").arg(&report), &self.interrupt)?;
        let status = running.wait(limit)?;
        if !status.success() {
            bail!("{name} ended with {}", describe(status));
        }
        let text = std::fs::read_to_string(&report)
            .with_context(|| format!("reading {}", report.display()))?;
        serde_json::from_str(&text).with_context(|| format!("reading the report of {name}"))
    }

    /// Counts the system calls of `server` for each I/O. `None` if no tracer works here.
    ///
    /// `bench` are the load generator's options without a bound, `depth` its I/Os in flight and
    /// `jobs` its jobs. `iops` is the rate of the server without a tracer. Runs of different length
    /// have the same start and end, so the difference is free of their cost.
    pub(crate) fn count_system_calls(
        &self,
        server: &Program,
        bench: &[String],
        (depth, jobs): (u32, u32),
        iops: f64,
    ) -> Result<Option<f64>> {
        let Some(tracer) = &self.tracer else {
            return Ok(None);
        };
        let (few, jobs) = (f64::from(depth), f64::from(jobs));
        let many = few + (iops / jobs * TRACED_S / tracer.slowdown()).ceil().max(100.0);
        let count = |ios: f64| -> Result<f64> {
            let bound = ["--number_ios".to_owned(), format!("{ios:.0}")];
            let options: Vec<_> = bench.iter().cloned().chain(bound).collect();
            let drive = |_| self.bench(&options, BENCH_MARGIN);
            let counted = self.serve_traced(server, Some(tracer), drive)?.system_calls;
            counted.context("the tracer has counted nothing")
        };
        let base = count(few)?;
        // Start and end vary by a call or so, which could make the result of a server without calls
        // for I/O negative.
        Ok(Some(((count(many)? - base) / (jobs * (many - few))).max(0.0)))
    }

    /// Adds the stderr of the server to an error.
    pub(super) fn explain<T>(&self, result: Result<T>, name: &str) -> Result<T> {
        if result.is_err() {
            // After Ctrl-C the messages of the server are of no interest.
            self.interrupt.check()?;
        }
        result.with_context(|| {
            let messages = std::fs::read_to_string(self.messages()).unwrap_or_default();
            match messages.trim() {
                "" => format!("measuring {name}, which said nothing"),
                said => format!("measuring {name}, which said: {said}"),
            }
        })
    }

    fn messages(&self) -> PathBuf {
        self.folder.path().join("messages")
    }
}

/// Returns the words that run the program after them on one CPU, in its own session. A service has
/// its own session too, and Linux divides CPUs between sessions first.
pub(crate) fn pinning(cpu: usize) -> [String; 4] {
    ["setsid", "taskset", "-c", &cpu.to_string()].map(str::to_owned)
}
