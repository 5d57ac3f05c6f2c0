//! `cargo lab compare --base BINARY`: compares Ringhaul before and after a change.
//!
//! The two builds alternate on the same disk, each freshly started, and the first one changes with
//! each round. Both are driven by the load generator that is built here.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringhaul_tools::process::{self, Interrupt};
use ringhaul_tools::workspace;

use super::Args;
use super::measure::{RAMP_S, Sample, bench_options, parse};
use super::plan::{Workload, depths};
use super::servers::{Device, Engine, ringhaul_options};
use crate::rig::progress::Progress;
use crate::rig::spread::{Spread, number, show};
use crate::rig::targets::{self, Disk, Prepared, Target};
use crate::rig::{Lab, Times, machine};

/// A workload on a disk with an engine.
#[derive(Clone, Copy)]
struct Cell {
    target: Target,
    workload: Workload,
    engine: Engine,
}

impl fmt::Display for Cell {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}/{}", self.target, self.workload, self.engine.name())
    }
}

/// All rounds of a cell.
struct Row {
    cell: Cell,
    before: Vec<Sample>,
    after: Vec<Sample>,
}

impl Row {
    fn spread(samples: &[Sample]) -> Option<Spread> {
        Spread::from_values(samples.iter().map(|sample| sample.iops))
    }

    /// Divides a figure after the change by that before the change in the same round.
    fn ratio(&self, value: fn(&Sample) -> Option<f64>) -> Option<Spread> {
        let rounds = self.after.iter().zip(&self.before);
        Spread::from_values(rounds.filter_map(|(after, before)| {
            let before = value(before).filter(|before| *before > 0.0)?;
            Some(value(after)? / before)
        }))
    }

    fn iops_ratio(&self) -> Option<Spread> {
        self.ratio(|sample| Some(sample.iops))
    }

    /// Formats a row of the table.
    fn markdown(&self) -> String {
        let Cell { target, workload, engine } = self.cell;
        let columns = [
            show(Self::spread(&self.before)),
            show(Self::spread(&self.after)),
            show(self.iops_ratio()),
            show(self.ratio(|sample| sample.p50_us)),
            show(self.ratio(|sample| sample.p99_us)),
            show(self.ratio(|sample| sample.server_cpu_us_per_io)),
        ];
        let columns = columns.join(" | ");
        format!("| {target} | {} | {} | {columns} |", workload.depth, engine.name())
    }
}

/// The cells on `target` with `pattern` in their name.
fn cells(target: Target, pattern: &str) -> Vec<Cell> {
    let engines: &[Engine] = match target {
        // A null disk has no operations, so no engine matters.
        Target::Null => &[Engine::Auto],
        _ => &[Engine::Aio, Engine::IoUring, Engine::Threads],
    };
    let all = depths().into_iter().flat_map(|workload| {
        engines.iter().map(move |engine| Cell { target, workload, engine: *engine })
    });
    all.filter(|cell| cell.to_string().contains(pattern)).collect()
}

/// Measures, and writes before-after.md.
pub(super) fn run(args: &Args, base: &Path) -> Result<()> {
    let count: usize = Target::ALL.iter().map(|target| cells(*target, &args.only).len()).sum();
    ensure!(count > 0, "nothing has {:?} in its name; --list shows the names", args.only);
    if args.list {
        let all = Target::ALL.into_iter().flat_map(|target| cells(target, &args.only));
        all.for_each(|cell| println!("{cell}"));
        return Ok(());
    }
    let base = std::path::absolute(base).context("the path of --base")?;
    let interrupt = Interrupt::install()?;
    let lab = Lab::new((args.server_cpu, args.client_cpu), &interrupt)?;
    let version = process::output(Command::new(&base).arg("--version"))
        .with_context(|| format!("asking --base {} for its version", base.display()))?;
    let mut text = "# Before and after\n\n".to_owned();
    for (name, value) in machine::facts(&lab.binary)? {
        _ = writeln!(text, "- {name}: {value}");
    }
    let file = base.file_name().unwrap_or_default().to_string_lossy();
    _ = writeln!(text, "- before: {version}, {file}");
    let (server, client) = (args.server_cpu, args.client_cpu);
    _ = writeln!(text, "- pinned: server to CPU {server}, load generator to CPU {client}");
    _ = writeln!(text, "- rounds: {} of {} s for each of both", args.rounds, args.runtime);
    let mut progress = Progress::new(count * args.rounds * 2, args.runtime);
    let (mut rows, mut notes) = (Vec::new(), Vec::new());
    let pair = Pair { lab: &lab, base: &base, args };
    let result = pair.measure_all(&interrupt, &mut progress, &mut rows, &mut notes);
    progress.finish();
    for note in notes {
        _ = writeln!(text, "- {note}");
    }
    if let Err(error) = &result {
        _ = writeln!(text, "\n**Not complete**: {error:#}");
    }
    table(&mut text, &rows);
    let folder = match &args.output {
        Some(folder) => folder.clone(),
        None => workspace::target_dir()?.join("compare"),
    };
    std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let path = folder.join("before-after.md");
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    println!("wrote {}", path.display());
    result
}

fn table(text: &mut String, rows: &[Row]) {
    text.push_str(
        "\nMedians of the rounds, with the least and the greatest in brackets. Ratios are those of \
         after to\nbefore within a round: more is better for IOPS, less for the others.\n\n\
         | disk | depth | engine | IOPS before | IOPS after | IOPS | p50 | p99 | CPU/I/O |\n\
         |---|--:|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        _ = writeln!(text, "{}", row.markdown());
    }
    let ratios = rows.iter().filter_map(|row| Some(row.iops_ratio()?.median));
    if let Some(spread) = Spread::from_values(ratios) {
        _ = writeln!(text, "\nOf the medians of all rows, IOPS: {}.", spread.show());
    }
}

struct Pair<'a> {
    lab: &'a Lab,
    base: &'a Path,
    args: &'a Args,
}

impl Pair<'_> {
    fn measure_all(
        &self,
        interrupt: &Interrupt,
        progress: &mut Progress,
        rows: &mut Vec<Row>,
        notes: &mut Vec<String>,
    ) -> Result<()> {
        for target in Target::ALL {
            let cells = cells(target, &self.args.only);
            if cells.is_empty() {
                continue;
            }
            match targets::prepare(target, self.args.size, interrupt)? {
                Prepared::Ready(disk) => {
                    notes.push(format!("{target}: {}", disk.description));
                    for cell in cells {
                        rows.push(self.measure(cell, &disk, progress)?);
                    }
                    disk.restore()?;
                }
                Prepared::Skipped(reason) => {
                    progress.skip(cells.len() * self.args.rounds * 2);
                    progress.print(&format!("{target}: skipped, {reason}"));
                    notes.push(format!("{target}: skipped, {reason}"));
                }
            }
        }
        Ok(())
    }

    fn measure(&self, cell: Cell, disk: &Disk, progress: &mut Progress) -> Result<Row> {
        let mut row = Row { cell, before: Vec::new(), after: Vec::new() };
        for round in 0..self.args.rounds {
            for turn in 0..2 {
                let is_base = (round + turn) % 2 == 0;
                let name = if is_base { "before" } else { "after" };
                progress.step(&format!("{cell} round {} {name}", round + 1));
                let sample = self.sample(cell, disk, round, is_base)?;
                if is_base { &mut row.before } else { &mut row.after }.push(sample);
            }
        }
        let iops = |samples| Row::spread(samples).map_or(0.0, |spread| spread.median);
        let (before, after) = (number(iops(&row.before)), number(iops(&row.after)));
        progress.print(&format!("{cell}: {before}, {after}; {}", show(row.iops_ratio())));
        Ok(row)
    }

    /// Measures one build. The same `round` gives the same sequence of I/O.
    fn sample(&self, cell: Cell, disk: &Disk, round: usize, is_base: bool) -> Result<Sample> {
        let path = disk.path.as_deref().unwrap_or(Path::new("")).to_string_lossy();
        let socket = self.lab.socket();
        let options = ringhaul_options(Device::Blk, cell.engine, cell.target, &path, &socket);
        let mut server = self.lab.ringhaul(options);
        if is_base {
            server.words[0] = self.base.to_string_lossy().into_owned();
            server.name = "the ringhaul of --base".to_owned();
        }
        let times = Times { runtime: self.args.runtime, ramp: RAMP_S };
        let mut load =
            bench_options(Device::Blk, cell.workload, &socket, Some(self.lab.client_cpu));
        load.extend(times.options());
        load.extend(["--randseed".to_owned(), round.to_string()]);
        let drive = |_| parse(&self.lab.bench(&load, times.limit())?);
        Ok(self.lab.serve(&server, drive)?.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_ratios_within_a_round() {
        let sample = |iops: f64| Sample {
            iops,
            p50_us: Some(1e6 / iops),
            p99_us: None,
            server_cpu_us_per_io: Some(2.0),
            completions_per_call: None,
            completions_per_wake: None,
            written_bytes_per_io: None,
        };
        let cell = cells(Target::Zram, "depth-64/aio")[0];
        let before = [100.0, 200.0, 400.0].map(sample).to_vec();
        let after = [200.0, 200.0, 200.0].map(sample).to_vec();
        let mut text = String::new();
        table(&mut text, &[Row { cell, before, after }]);
        let row = "| zram | 64 | aio | 200 (100–400) | 200 | 1.00 (0.50–2.00) |";
        assert!(text.contains(row), "{text}");
    }

    #[test]
    fn a_null_disk_has_one_engine() {
        assert_eq!(cells(Target::Null, "").len(), 3);
        assert_eq!(cells(Target::File, "").len(), 9);
        assert_eq!(cells(Target::File, "file/randread-4k-depth-1/").len(), 3);
    }
}
