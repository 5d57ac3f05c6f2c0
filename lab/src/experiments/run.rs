//! Measures one cell: off and on in turn, then system calls in separate runs.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;

use super::plan::{Cell, Through};
use super::sample::Sample;
use crate::rig::progress::Progress;
use crate::rig::spread::{Spread, number};
use crate::rig::targets::{Disk, Target};
use crate::rig::{Lab, Program, Times};

/// The null disk with its size.
const NULL_DISK: &str = "null,size=64G";

/// All rounds of a cell.
pub(super) struct Outcome {
    pub(super) cell: Cell,
    pub(super) off: Side,
    pub(super) on: Side,
}

/// All rounds of one side.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Side {
    pub(super) samples: Vec<Sample>,
    /// System calls of the server, counted in a run of its own.
    pub(super) traced_system_calls_per_io: Option<f64>,
}

impl Side {
    /// The median of a figure over the rounds.
    pub(super) fn spread(&self, value: impl Fn(&Sample) -> Option<f64>) -> Option<Spread> {
        Spread::from_values(self.samples.iter().filter_map(value))
    }

    /// The median IOPS. 0 without samples.
    pub(super) fn iops(&self) -> f64 {
        self.spread(|sample| Some(sample.iops)).map_or(0.0, |spread| spread.median)
    }

    /// Mean latency of reads and writes.
    pub(super) fn mean_us(&self) -> Option<Spread> {
        self.spread(|sample| Some(sample.latency.get("all")?.mean_us))
    }

    /// The median of a latency percentile. `index` is that of `LATENCY_PERCENTILES`.
    pub(super) fn latency_us(&self, direction: &str, index: usize) -> Option<f64> {
        let at =
            |sample: &Sample| sample.latency.get(direction)?.percentiles_us.get(index).copied();
        self.spread(at).map(|spread| spread.median)
    }

    /// The median of completions harvested at once. `index` is that of `SIZE_PERCENTILES`.
    pub(super) fn harvested(&self, index: usize) -> Option<f64> {
        let at = |sample: &Sample| sample.harvested_at_once.as_ref()?.get(index).copied();
        self.spread(at).map(|spread| spread.median)
    }

    /// System calls by the tracer if there is a server, otherwise by the engine's count.
    pub(super) fn system_calls_per_io(&self) -> Option<f64> {
        let counted = self.spread(|sample| sample.system_calls_per_io);
        self.traced_system_calls_per_io.or(counted.map(|spread| spread.median))
    }
}

impl Outcome {
    /// A line for the terminal.
    pub(super) fn line(&self) -> String {
        let idle = |side: &Side| side.spread(|sample| sample.idle_cpu_percent);
        match (idle(&self.off), idle(&self.on)) {
            (Some(off), Some(on)) => {
                format!("{}: CPU % off {}, on {}", self.cell.name(), off.show(), on.show())
            }
            _ => {
                let [off, on] = [&self.off, &self.on].map(|side| number(side.iops()));
                format!("{}: IOPS off {off}, on {on}", self.cell.name())
            }
        }
    }
}

/// The parameters of all measurements.
pub(super) struct Runner<'a> {
    pub(super) lab: &'a Lab,
    pub(super) times: Times,
}

impl Runner<'_> {
    pub(super) fn measure(
        &self,
        cell: &Cell,
        disk: &Disk,
        rounds: usize,
        progress: &mut Progress,
    ) -> Result<Outcome> {
        let mut sides = [Side::default(), Side::default()];
        let switches = [cell.off, cell.on];
        let names = ["off", "on"];
        for round in 0..rounds {
            for turn in 0..2 {
                // The first side changes with each round.
                let index = (turn + round) % 2;
                let what = format!("{} round {} {}", cell.name(), round + 1, names[index]);
                progress.step(&what);
                let sample = self.sample(cell, switches[index], disk, round);
                sides[index].samples.push(sample.with_context(|| what)?);
            }
        }
        for (index, side) in sides.iter_mut().enumerate() {
            progress.step(&format!("{} system calls {}", cell.name(), names[index]));
            if cell.through == Through::Daemon {
                let server = self.server(cell, switches[index], disk);
                let (load, iops) = (self.load(cell), side.iops());
                let size = (cell.load.depth, cell.load.jobs);
                side.traced_system_calls_per_io =
                    self.lab.count_system_calls(&server, &load, size, iops)?;
            }
        }
        let [off, on] = sides;
        Ok(Outcome { cell: *cell, off, on })
    }

    fn sample(&self, cell: &Cell, switches: &[&str], disk: &Disk, round: usize) -> Result<Sample> {
        let limit = self.times.limit();
        if cell.through == Through::IdleDaemon {
            let server = self.server(cell, switches, disk);
            return Ok(self.lab.serve(&server, |pid| self.idle(pid))?.value);
        }
        let mut options = self.times.options();
        options.extend(["--randseed".to_owned(), round.to_string()]);
        if cell.through == Through::Engine {
            let clock = cell.clock();
            let all: Vec<_> =
                self.engine(cell, switches, disk).into_iter().chain(options).collect();
            return Sample::parse(&self.lab.bench(&all, limit)?, clock, "");
        }
        let all: Vec<_> = self.load(cell).into_iter().chain(options).collect();
        let server = self.server(cell, switches, disk);
        let served = self.lab.serve(&server, |_| self.lab.bench(&all, limit))?;
        Sample::parse(&served.value, cell.clock(), &served.messages)
    }

    /// Measures the share of a CPU that a daemon uses after a load has ended.
    fn idle(&self, pid: u32) -> Result<Sample> {
        let load = ["--socket-path", &self.lab.socket(), "--number_ios", "1000"];
        self.lab.bench(&load.map(str::to_owned), self.times.limit())?;
        let (before, start) = (cpu_time(pid)?, Instant::now());
        std::thread::sleep(Duration::from_secs_f64(self.times.runtime));
        let used = cpu_time(pid)?.saturating_sub(before);
        let percent = 100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64();
        Ok(Sample { idle_cpu_percent: Some(percent), ..Sample::default() })
    }

    fn server(&self, cell: &Cell, switches: &[&str], disk: &Disk) -> Program {
        let path = disk.path.as_deref().map(Path::to_string_lossy);
        let socket = self.lab.socket();
        self.lab.ringhaul(words(&server_options(cell, path.as_deref(), &socket, switches)))
    }

    fn load(&self, cell: &Cell) -> Vec<String> {
        let (socket, cpu) = (self.lab.socket(), self.lab.client_cpu.to_string());
        let start = ["--socket-path", &socket, "--cpus_allowed", &cpu];
        words(&start).into_iter().chain(load_options(cell)).collect()
    }

    fn engine(&self, cell: &Cell, switches: &[&str], disk: &Disk) -> Vec<String> {
        let path = disk.path.as_deref().unwrap_or(Path::new("")).to_string_lossy();
        let cpu = self.lab.server_cpu.to_string();
        let start = ["--filename", &path, "--engine", cell.engine, "--cpus_allowed", &cpu];
        let start = words(&start).into_iter().chain(words(switches));
        start.chain(load_options(cell)).collect()
    }
}

/// Returns the command lines of a cell with the switches of one side, as one would type them.
pub(super) fn commands(cell: &Cell, switches: &[&str]) -> Vec<String> {
    let load = load_options(cell).join(" ");
    if cell.through == Through::Engine {
        let switches = switches.join(" ");
        let engine = cell.engine;
        return vec![format!("ringhaul bench --filename DISK --engine {engine} {switches} {load}")];
    }
    let disk = if cell.target == Target::Null { None } else { Some("DISK") };
    let server = server_options(cell, disk, "SOCKET", switches).join(" ");
    let mut lines = vec![format!("ringhaul {server}")];
    if cell.through == Through::Daemon {
        lines.push(format!("ringhaul bench --socket-path SOCKET {load}"));
    }
    lines
}

fn server_options<'a>(
    cell: &'a Cell,
    disk: Option<&'a str>,
    socket: &'a str,
    switches: &[&'a str],
) -> Vec<&'a str> {
    let disk = disk.map_or(["--disk", NULL_DISK], |path| ["--blk-file", path]);
    let start = ["serve", "--socket-path", socket, "--cache", "none", "--engine", cell.engine];
    // The log provides the sizes of batches.
    let counters = ["--log", "info,ringhaul::threads::engines=debug"];
    start.into_iter().chain(counters).chain(disk).chain(switches.iter().copied()).collect()
}

fn load_options(cell: &Cell) -> Vec<String> {
    let (depth, jobs) = (cell.load.depth.to_string(), cell.load.jobs.to_string());
    let size = ["--iodepth", &depth, "--numjobs", &jobs];
    cell.load.options.iter().chain(&size).map(|word| (*word).to_owned()).collect()
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Returns the CPU time of all threads of a process.
fn cpu_time(pid: u32) -> Result<Duration> {
    let folder = format!("/proc/{pid}/task");
    let mut total = Duration::ZERO;
    for entry in std::fs::read_dir(&folder).with_context(|| format!("reading {folder}"))? {
        let path = entry.with_context(|| format!("reading {folder}"))?.path().join("schedstat");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let on_cpu = text.split(' ').next().and_then(|ns| ns.parse().ok());
        total += Duration::from_nanos(on_cpu.unwrap_or(0));
    }
    Ok(total)
}
