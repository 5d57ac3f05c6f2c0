//! The result, as Markdown for people and as JSON for programs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use super::measure::Sample;
use super::overview;
use super::plan::Workload;
use super::servers::{Device, Server};
use crate::rig::machine::Machine;
use crate::rig::spread::{Spread, number, show};
use crate::rig::targets::Target;

/// All rounds of one server in one cell.
pub(super) struct Series {
    pub(super) server: Server,
    pub(super) samples: Vec<Sample>,
    pub(super) system_calls_per_io: Option<f64>,
}

impl Series {
    pub(super) fn new(server: Server) -> Self {
        Self { server, samples: Vec::new(), system_calls_per_io: None }
    }

    /// The median of the IOPS.
    pub(super) fn iops(&self) -> f64 {
        self.spread(|sample| Some(sample.iops)).map_or(0.0, |spread| spread.median)
    }

    pub(super) fn spread(&self, value: impl Fn(&Sample) -> Option<f64>) -> Option<Spread> {
        Spread::from_values(self.samples.iter().filter_map(value))
    }
}

/// One workload on one disk.
pub(super) struct Cell {
    pub(super) target: Target,
    pub(super) workload: Workload,
    pub(super) series: Vec<Series>,
}

/// Ringhaul's figures, divided by a rival's.
#[derive(Serialize)]
struct Ratios {
    ours: Server,
    rival: Server,
    iops: Option<Spread>,
    p50: Option<Spread>,
    p99: Option<Spread>,
    server_cpu_per_io: Option<Spread>,
    system_calls_per_io: Option<f64>,
    written_bytes_per_io: Option<Spread>,
}

impl Ratios {
    /// Formats a row of a table, without its first column.
    fn markdown(&self) -> String {
        let columns = [
            self.ours.to_string(),
            self.rival.to_string(),
            show(self.iops),
            show(self.p50),
            show(self.p99),
            show(self.server_cpu_per_io),
            self.system_calls_per_io.map_or_else(|| "–".to_owned(), number),
            show(self.written_bytes_per_io),
        ];
        columns.join(" | ")
    }
}

/// The head of a table of ratios.
const RATIOS_HEAD: &str = "
| workload | engine | to | IOPS | p50 | p99 | CPU/I/O | system calls/I/O | bytes written/I/O |
|---|---|---|---|---|---|---|---|---|";

impl Cell {
    /// A line for the terminal.
    pub(super) fn line(&self) -> String {
        let servers: Vec<_> = self
            .series
            .iter()
            .map(|one| format!("{} {}", one.server, number(one.iops())))
            .collect();
        format!("{}/{}: IOPS {}", self.target, self.workload, servers.join(", "))
    }

    pub(super) fn ours(&self) -> impl Iterator<Item = &Series> {
        self.series.iter().filter(|one| one.server.is_ours())
    }

    /// The best setting of qemu-storage-daemon, by its IOPS.
    pub(super) fn best_rival(&self) -> Option<&Series> {
        let rivals = self.series.iter().filter(|one| !one.server.is_ours());
        let servers = rivals.filter(|one| one.server.is_server());
        servers.max_by(|one, other| one.iops().total_cmp(&other.iops()))
    }

    /// The ratios of the IOPS within each round.
    pub(super) fn by_rounds(&self, ours: &Series, rival: &Series) -> Option<Spread> {
        ratios(ours, rival).iops
    }

    /// The ratios of the 99th percentile within each round.
    pub(super) fn p99_by_rounds(&self, ours: &Series, rival: &Series) -> Option<Spread> {
        ratios(ours, rival).p99
    }

    /// The ratios of each virtio-blk engine of Ringhaul to the rival's best setting and to the
    /// limits, then the ratios of Ringhaul to itself.
    fn ratios(&self) -> Vec<Ratios> {
        let limits = self.series.iter().filter(|one| !one.server.is_server());
        let others: Vec<_> = self.best_rival().into_iter().chain(limits).collect();
        let blk = self.ours().filter(|ours| ours.server.device() == Device::Blk);
        let to_others = blk.flat_map(|ours| others.iter().map(move |other| ratios(ours, other)));
        to_others.chain(self.to_own()).collect()
    }

    /// The ratios of virtio-scsi, and of virtio-blk with an inflight region, to plain virtio-blk
    /// with the same engine, and of an image to its raw bytes.
    fn to_own(&self) -> impl Iterator<Item = Ratios> {
        let pair = |other: &Series| {
            let blk = other.server.own_rival()?;
            let blk = self.series.iter().find(|one| one.server == blk)?;
            Some(ratios(other, blk))
        };
        self.series.iter().filter_map(pair)
    }
}

/// The median of the ratios within each round.
fn ratios(ours: &Series, rival: &Series) -> Ratios {
    let by_round = |value: fn(&Sample) -> Option<f64>| {
        let pairs = ours.samples.iter().zip(&rival.samples);
        Spread::from_values(pairs.filter_map(|(our, their)| divide(value(our)?, value(their)?)))
    };
    Ratios {
        ours: ours.server,
        rival: rival.server,
        iops: by_round(|sample| Some(sample.iops)),
        p50: by_round(|sample| sample.p50_us),
        p99: by_round(|sample| sample.p99_us),
        server_cpu_per_io: by_round(|sample| sample.server_cpu_us_per_io),
        system_calls_per_io: ours
            .system_calls_per_io
            .zip(rival.system_calls_per_io)
            .and_then(|(our, their)| divide(our, their)),
        written_bytes_per_io: by_round(|sample| sample.written_bytes_per_io),
    }
}

fn divide(ours: f64, theirs: f64) -> Option<f64> {
    (theirs > 0.0).then(|| ours / theirs)
}

/// The complete result.
pub(super) struct Comparison {
    machine: Machine,
    targets: Vec<TargetNote>,
    pub(super) cells: Vec<Cell>,
    /// The reason why the result is not complete.
    pub(super) ended: Option<String>,
}

#[derive(Serialize)]
struct TargetNote {
    target: Target,
    description: String,
    commands: Vec<String>,
}

impl Comparison {
    pub(super) fn new(machine: Machine) -> Self {
        Self { machine, targets: Vec::new(), cells: Vec::new(), ended: None }
    }

    /// Adds the description of a disk and the commands that served it.
    pub(super) fn add_target(&mut self, target: Target, description: &str, commands: Vec<String>) {
        self.targets.push(TargetNote { target, description: description.to_owned(), commands });
    }

    /// Writes compare.md and compare.json into `folder`.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let json = serde_json::to_string_pretty(&self.json()).context("encoding the result")?;
        for (name, text) in [("compare.md", self.markdown()), ("compare.json", json + "\n")] {
            let path = folder.join(name);
            std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
            println!("wrote {}", path.display());
        }
        Ok(())
    }

    fn json(&self) -> serde_json::Value {
        let cells: Vec<_> = self.cells.iter().map(cell_json).collect();
        serde_json::json!({
            "machine": self.machine.facts.iter().cloned().collect::<BTreeMap<_, _>>(),
            "ended_early": self.ended,
            "targets": self.targets,
            "cells": cells,
        })
    }

    fn markdown(&self) -> String {
        let mut text = "# Ringhaul, qemu-storage-daemon and the limit\n\n".to_owned();
        for (name, value) in &self.machine.facts {
            line(&mut text, &format!("- {name}: {value}"));
        }
        if let Some(reason) = &self.ended {
            line(&mut text, &format!("\n**Not complete**: {reason}"));
        }
        text.push_str(EXPLANATION);
        line(&mut text, "\n## Overview, for docs/internals/performance.md\n");
        text.push_str(&overview::table(&self.cells));
        let busy = overview::busy_table(&self.cells);
        if !busy.is_empty() {
            line(&mut text, "\n## Beside other work\n");
            text.push_str(&busy);
        }
        line(&mut text, "\n## virtio-scsi, and an inflight region, to virtio-blk");
        line(&mut text, RATIOS_HEAD);
        for cell in &self.cells {
            for ratios in cell.to_own() {
                let start = format!("| {}/{}", cell.target, cell.workload);
                line(&mut text, &format!("{start} | {} |", ratios.markdown()));
            }
        }
        for note in &self.targets {
            line(&mut text, &format!("\n## {}\n\n{}.", note.target, note.description));
            if note.commands.is_empty() {
                continue;
            }
            let cells: Vec<_> =
                self.cells.iter().filter(|cell| cell.target == note.target).collect();
            figures(&mut text, &cells);
            quotients(&mut text, &cells);
            line(&mut text, "\nCommands:\n\n```");
            note.commands.iter().for_each(|command| line(&mut text, command));
            line(&mut text, "```");
        }
        text
    }
}

const EXPLANATION: &str = "
Figures are medians of the rounds, with the least and the greatest in brackets. In each round
the programs take turns in a new order, each freshly started; the load generator is the same. fio
drives the disk itself, without a server or a virtqueue in between, and is the limit. Ratios are
Ringhaul's figure divided by the other's in the same round, median of the rounds: more is better for
IOPS, less for the others; the rival is that setting of qemu-storage-daemon which has most IOPS
under the same workload, and of our virtio-scsi (SCSI), and of a driver that keeps an inflight
region, it is our virtio-blk with the same engine; of an image also its bytes without the format
(raw). A wake is that of an IoThread by another thread, such as one of librbd. All bypass the page
cache, the servers offer a write cache, and none gets a flush, so writes are equally durable. A
server has a session of its own, as a service has; busy loops have one each, and the mixed load
(compilers, a writer that flushes, threads that sleep and wake) has one. Latencies are the load
generator's, from the driver's side, and fio's from submit to completion. The kernel's workers, to
whom io_uring hands requests that may block, run on any CPU, for all alike, and their time is not in
fio's.
";

/// `push_str` with a line break.
fn line(text: &mut String, words: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{words}");
}

fn figures(text: &mut String, cells: &[&Cell]) {
    line(
        text,
        "\n| workload | program | IOPS | p50 µs | p99 µs | server CPU µs/I/O \
         | system calls/I/O | completions/call | completions/wake | bytes written/I/O |\n\
         |---|---|---|---|---|---|---|---|---|---|",
    );
    for cell in cells {
        for one in &cell.series {
            let columns = [
                show(one.spread(|sample| Some(sample.iops))),
                show(one.spread(|sample| sample.p50_us)),
                show(one.spread(|sample| sample.p99_us)),
                show(one.spread(|sample| sample.server_cpu_us_per_io)),
                one.system_calls_per_io.map_or_else(|| "–".to_owned(), number),
                show(one.spread(|sample| sample.completions_per_call)),
                show(one.spread(|sample| sample.completions_per_wake)),
                show(one.spread(|sample| sample.written_bytes_per_io)),
            ];
            let columns = columns.join(" | ");
            line(text, &format!("| {} | {} | {columns} |", cell.workload, one.server));
        }
    }
}

fn quotients(text: &mut String, cells: &[&Cell]) {
    line(text, RATIOS_HEAD);
    for cell in cells {
        for ratios in cell.ratios() {
            line(text, &format!("| {} | {} |", cell.workload, ratios.markdown()));
        }
    }
}

fn cell_json(cell: &Cell) -> serde_json::Value {
    let series: Vec<_> = cell
        .series
        .iter()
        .map(|one| {
            serde_json::json!({
                "server": one.server,
                "iops": one.spread(|sample| Some(sample.iops)),
                "p50_us": one.spread(|sample| sample.p50_us),
                "p99_us": one.spread(|sample| sample.p99_us),
                "server_cpu_us_per_io": one.spread(|sample| sample.server_cpu_us_per_io),
                "system_calls_per_io": one.system_calls_per_io,
                "completions_per_call": one.spread(|sample| sample.completions_per_call),
                "completions_per_wake": one.spread(|sample| sample.completions_per_wake),
                "written_bytes_per_io": one.spread(|sample| sample.written_bytes_per_io),
                "samples": one.samples,
            })
        })
        .collect();
    serde_json::json!({
        "target": cell.target,
        "workload": cell.workload,
        "servers": series,
        "ratios": cell.ratios(),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::servers::{Device, Engine};
    use super::*;

    fn series(server: Server, iops: &[f64]) -> Series {
        let sample = |iops: &f64| Sample {
            iops: *iops,
            p50_us: Some(1e6 / iops),
            p99_us: Some(2e6 / iops),
            server_cpu_us_per_io: Some(2.0),
            completions_per_call: None,
            completions_per_wake: None,
            written_bytes_per_io: None,
        };
        Series {
            server,
            samples: iops.iter().map(sample).collect(),
            system_calls_per_io: Some(0.5),
        }
    }

    pub(in super::super) fn comparison() -> Comparison {
        let mut result = Comparison::new(Machine { facts: vec![("CPU", "fast".to_owned())] });
        result.add_target(Target::Zram, "zram of 1 MiB", vec!["serve it".to_owned()]);
        result.add_target(Target::Loop, "skipped, it needs root", Vec::new());
        let all = vec![
            series(Server::Ringhaul(Device::Blk, Engine::Auto), &[200.0, 300.0, 400.0]),
            series(Server::Ringhaul(Device::Scsi, Engine::Auto), &[180.0, 300.0, 380.0]),
            series(Server::Qsd("threads"), &[50.0, 50.0, 50.0]),
            series(Server::Qsd("native"), &[100.0, 100.0, 400.0]),
            series(Server::Fio("libaio"), &[400.0, 400.0, 400.0]),
        ];
        let workload = super::super::plan::wanted(Target::Zram, "randread-4k-depth-64")[0];
        result.cells.push(Cell { target: Target::Zram, workload, series: all });
        result
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let ratios = &comparison().cells[0].ratios()[0];
        assert_eq!(ratios.iops, Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(ratios.server_cpu_per_io.unwrap().median, 1.0);
        assert_eq!(ratios.system_calls_per_io, Some(1.0));
    }

    #[test]
    fn the_tables_have_a_row_for_each_server_and_rival() {
        let text = comparison().markdown();
        let row = "| randread-4k-depth-64 | Ringhaul auto | 300 (200–400) |";
        assert!(text.contains(row), "{text}");
        let row = "| randread-4k-depth-64 | Ringhaul auto | QSD aio=native | 2.00 (1.00–3.00) |";
        assert!(text.contains(row), "{text}");
        let row = "| randread-4k-depth-64 | Ringhaul auto | fio libaio | 0.75 (0.50–1.00) |";
        assert!(text.contains(row), "{text}");
        assert!(!text.contains("auto | QSD aio=threads"), "only the best setting counts");
        let ratio = "Ringhaul SCSI auto | Ringhaul auto | 0.95 (0.90–1.00) | 1.05 (1.00–1.11)";
        assert_eq!(text.matches(ratio).count(), 2, "for all disks, and for one: {text}");
        assert!(!text.contains("SCSI auto | QSD"), "no rival has it: {text}");
        assert!(text.contains("## loop\n\nskipped, it needs root."), "{text}");
    }

    #[test]
    fn json_has_every_sample() {
        let json = comparison().json();
        assert_eq!(json["cells"][0]["servers"][3]["samples"][2]["iops"], 400.0);
        assert_eq!(json["cells"][0]["ratios"][0]["iops"]["median"], 2.0);
        assert_eq!(json["machine"]["CPU"], "fast");
    }
}
