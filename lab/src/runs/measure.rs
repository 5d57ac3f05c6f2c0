//! Measures a disk: a server for each setting, all cells, then the open loop.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use super::plan::{ADAPTIVE, ALONE, Cell, OpenCell, Plan, SETTINGS, Setting, order};
use super::verdict::{OpenOutcome, Outcome};
use crate::rig::progress::Progress;
use crate::rig::spread::Spread;
use crate::rig::targets::{Disk, Target};
use crate::rig::{Lab, Program, Servers, Times, pinning};

/// The null disk with its size.
const NULL_DISK: &str = "null,size=64G";

/// The factor by which measurements in the open loop are longer. They are few, and complete few
/// requests from which to take the 99th percentile.
pub(super) const OPEN_LOOP_TIMES: f64 = 5.0;

/// The figures of one run of the load generator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Sample {
    pub(super) iops: f64,
    /// CPU time of the server for each I/O, in microseconds. `None` if nothing was completed.
    pub(super) server_cpu_us_per_io: Option<f64>,
    /// `None` if the driver was never called.
    pub(super) completions_per_call: Option<f64>,
    /// Latencies in microseconds. `None` if nothing was completed.
    pub(super) latency_mean_us: Option<f64>,
    pub(super) latency_p99_us: Option<f64>,
}

impl Sample {
    /// Finds the figures in the load generator's report.
    fn parse(report: &Value) -> Result<Self> {
        let number = |key: &str| report.get(key).and_then(Value::as_f64);
        Ok(Self {
            iops: number("iops").context("no IOPS in the report of ringhaul bench")?,
            server_cpu_us_per_io: number("server_cpu_us_per_io"),
            completions_per_call: number("completions_per_call"),
            latency_mean_us: number("latency_mean_us"),
            latency_p99_us: number("latency_p99_us"),
        })
    }
}

/// The parameters of all measurements.
pub(super) struct Runner<'a> {
    pub(super) lab: &'a Lab,
    pub(super) times: Times,
    pub(super) rounds: usize,
    pub(super) engine: &'a str,
}

impl Runner<'_> {
    /// Measures all cells on one disk. Each result goes to `outcomes` or `open` at once.
    pub(super) fn measure(
        &self,
        plan: &Plan,
        disk: &Disk,
        progress: &mut Progress,
        (outcomes, open): (&mut Vec<Outcome>, &mut Vec<OpenOutcome>),
    ) -> Result<()> {
        let programs: Vec<_> = (0..SETTINGS.len()).map(|place| self.server(place, disk)).collect();
        let servers = self.lab.serve_all(&programs)?;
        let (reference, mut highest) = (Cell::reference(plan.target), None);
        for cell in &plan.cells {
            let outcome = Outcome { cell: *cell, series: self.cell(cell, &servers, progress)? };
            progress.say(&outcome.line());
            if *cell == reference {
                highest = rate(&outcome.series[ADAPTIVE]);
            }
            outcomes.push(outcome);
        }
        if plan.lacks_reference() {
            highest = rate(&self.alone(&reference, &servers, progress)?);
        }
        for cell in &plan.open {
            let rate = cell.rate(highest.with_context(|| format!("{reference} has no rate"))?);
            let outcome = self.open(*cell, rate, &servers, progress)?;
            progress.say(&outcome.line());
            open.push(outcome);
        }
        servers.stop()
    }

    /// Measures all rounds of all settings. The result is in the order of the settings.
    fn cell(
        &self,
        cell: &Cell,
        servers: &Servers<'_>,
        progress: &mut Progress,
    ) -> Result<Vec<Vec<Sample>>> {
        let mut series = vec![Vec::new(); SETTINGS.len()];
        for round in 0..self.rounds {
            for place in order(round, SETTINGS.len()) {
                let what = format!("{cell} round {} {}", round + 1, SETTINGS[place]);
                progress.step(&what);
                let sample = self.sample(cell.options(), place, round, self.times, servers);
                series[place].push(sample.with_context(|| what)?);
            }
        }
        Ok(series)
    }

    /// Measures all rounds of the adaptive setting alone.
    fn alone(
        &self,
        cell: &Cell,
        servers: &Servers<'_>,
        progress: &mut Progress,
    ) -> Result<Vec<Sample>> {
        let sample = |round| {
            progress.step(&format!("{cell} round {}, for the rate of the open loop", round + 1));
            self.sample(cell.options(), ADAPTIVE, round, self.times, servers)
        };
        (0..self.rounds).map(sample).collect()
    }

    fn open(
        &self,
        cell: OpenCell,
        rate: f64,
        servers: &Servers<'_>,
        progress: &mut Progress,
    ) -> Result<OpenOutcome> {
        let times = Times { runtime: self.times.runtime * OPEN_LOOP_TIMES, ..self.times };
        let (places, mut series) = ([ADAPTIVE, ALONE], [Vec::new(), Vec::new()]);
        for round in 0..self.rounds {
            for index in order(round, places.len()) {
                let what = format!("{cell} round {} {}", round + 1, SETTINGS[places[index]]);
                progress.step(&what);
                let load = OpenCell::options(rate);
                let sample = self.sample(load, places[index], round, times, servers);
                series[index].push(sample.with_context(|| what)?);
            }
        }
        let [adaptive, alone] = series;
        Ok(OpenOutcome { cell, rate, adaptive, alone })
    }

    /// Runs one measurement. The same `round` gives the same sequence of I/O.
    fn sample(
        &self,
        load: Vec<String>,
        place: usize,
        round: usize,
        times: Times,
        servers: &Servers<'_>,
    ) -> Result<Sample> {
        let mut options = load;
        options.extend(client_options(self.lab.client_cpu));
        options.extend(times.options());
        options.extend(["--randseed".to_owned(), round.to_string()]);
        Sample::parse(&servers.bench(place, &options, times.limit())?)
    }

    fn server(&self, place: usize, disk: &Disk) -> Program {
        let setting = SETTINGS[place];
        let path = disk.path.as_deref().map(Path::to_string_lossy);
        let socket = self.lab.socket_of(place);
        let options = server_options(self.engine, path.as_deref(), &socket, setting);
        Program { name: format!("ringhaul, {setting}"), ..self.lab.ringhaul(options) }
    }

    /// Returns the command lines of servers and load generator, as one would type them.
    pub(super) fn command_lines(&self) -> Vec<String> {
        let pinned = pinning(self.lab.server_cpu).join(" ");
        let server = |disk, setting| {
            let options = server_options(self.engine, disk, "SOCKET", setting).join(" ");
            format!("{pinned} ringhaul {options}")
        };
        let client = client_options(self.lab.client_cpu).join(" ");
        let load = |load: Vec<String>, times: Times| {
            let (load, times) = (load.join(" "), times.options().join(" "));
            let start = "ringhaul bench --socket-path SOCKET";
            format!("{start} {load} {client} {times} --randseed ROUND")
        };
        let open = Times { runtime: self.times.runtime * OPEN_LOOP_TIMES, ..self.times };
        let disk = Some("DISK");
        let lines = SETTINGS.iter().map(|setting| server(disk, *setting));
        let null = server(None, Setting::Adaptive);
        let cell = Cell::reference(Target::Null);
        let open = load(OpenCell::options(1000.0), open).replace("1000", "RATE");
        lines.chain([null, load(cell.options(), self.times), open]).collect()
    }
}

/// Returns the median IOPS. `None` if it is 0.
fn rate(samples: &[Sample]) -> Option<f64> {
    let spread = Spread::of(samples.iter().map(|sample| sample.iops))?;
    Some(spread.median).filter(|rate| *rate > 0.0)
}

fn client_options(cpu: usize) -> [String; 2] {
    ["--cpus_allowed".to_owned(), cpu.to_string()]
}

/// Options of `ringhaul serve`, without a lock, as all servers have the disk at the same time.
fn server_options(engine: &str, disk: Option<&str>, socket: &str, setting: Setting) -> Vec<String> {
    let disk = disk.map_or(["--disk", NULL_DISK], |path| ["--blk-file", path]);
    let start = ["serve", "--socket-path", socket, "--cache", "none", "--lock", "off"];
    let words = start.into_iter().chain(["--engine", engine]).chain(disk);
    words.map(str::to_owned).chain(setting.options()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_our_figures() {
        let report = serde_json::json!({
            "iops": 1000.5, "server_cpu_us_per_io": 2.5, "completions_per_call": null,
            "latency_mean_us": 30.0, "latency_p99_us": 90.0,
        });
        let expected = Sample {
            iops: 1000.5,
            server_cpu_us_per_io: Some(2.5),
            completions_per_call: None,
            latency_mean_us: Some(30.0),
            latency_p99_us: Some(90.0),
        };
        assert_eq!(Sample::parse(&report).unwrap(), expected);
        assert!(Sample::parse(&serde_json::json!({})).is_err());
        assert_eq!(rate(&[expected.clone(), expected]), Some(1000.5));
        assert_eq!(rate(&[]), None);
    }

    #[test]
    fn servers_share_a_disk_and_differ_in_their_setting() {
        let words = server_options("aio", Some("/dev/x"), "s", SETTINGS[ALONE]).join(" ");
        let expected = "serve --socket-path s --cache none --lock off --engine aio --blk-file \
                        /dev/x --run-max 1 --notify-batch off";
        assert_eq!(words, expected);
        let words = server_options("aio", None, "s", SETTINGS[ADAPTIVE]).join(" ");
        assert!(words.ends_with("--engine aio --disk null,size=64G"), "{words}");
    }
}
