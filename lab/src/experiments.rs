//! `cargo lab experiments`: switches each step of the loop off and on, in turn, and reports the
//! worth of the step on this machine.
//!
//! `plan` lists the measurements, `run` measures, `verdict` interprets the figures, and `report`
//! puts the result into words. `document` writes it as one HTML page, with the pictures from
//! `plot`, and as Markdown.

mod document;
mod page;
mod plan;
mod plot;
mod report;
mod run;
mod sample;
mod verdict;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use ringhaul_tools::process::Interrupt;
use ringhaul_tools::workspace;

use crate::rig::machine::{self, Machine};
use crate::rig::progress::Progress;
use crate::rig::targets::{self, Prepared, Target};
use crate::rig::{Lab, Times};
use plan::Cell;
use report::{Experiments, TargetNote};
use run::Runner;

/// The rounds, seconds and MiB of --quick.
const QUICK: (usize, f64, u64) = (1, 0.1, 64);

/// Seconds of load before measuring.
const RAMP_S: f64 = 0.1;

/// Options of `cargo lab experiments`.
#[derive(Clone, clap::Args)]
pub(crate) struct Args {
    /// Rounds; each measures every cell once with the step off and once with it on
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Seconds of one measurement
    #[arg(long, default_value_t = 0.5)]
    runtime: f64,
    /// Size of the disks, in MiB
    #[arg(long, default_value_t = 512)]
    size: u64,
    /// Only measurements with this in their name, such as `2/`, `zram`, `5/null/`
    #[arg(long, value_name = "PATTERN", default_value = "")]
    only: String,
    /// Try everything out: one short round on small disks, no figures to rely on
    #[arg(long, conflicts_with_all = ["rounds", "runtime", "size"])]
    quick: bool,
    /// Folder for report.html, experiments.md and experiments.json
    /// [default: experiments/ in the target directory]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// CPU of the servers, and of an engine that is measured alone
    #[arg(long, default_value_t = 0)]
    server_cpu: usize,
    /// CPU that the load generator is pinned to
    #[arg(long, default_value_t = 1)]
    client_cpu: usize,
    /// List the measurements and end
    #[arg(long)]
    list: bool,
}

/// Measures, and writes report.html, experiments.md and experiments.json.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    if args.quick {
        (args.rounds, args.runtime, args.size) = QUICK;
    }
    let cells = plan::wanted(&args.only);
    ensure!(!cells.is_empty(), "nothing has {:?} in its name; --list shows the names", args.only);
    if args.list {
        cells.iter().for_each(|cell| println!("{}", cell.name()));
        return Ok(());
    }
    ensure!(args.rounds > 0 && args.runtime > 0.0 && args.size > 0, "a zero leaves nothing to do");

    let interrupt = Interrupt::install()?;
    let lab = Lab::new((args.server_cpu, args.client_cpu), &interrupt)?;
    let mut experiments = Experiments::new(describe(&args, &lab)?);
    let result = measure_all(&args, cells, &lab, &interrupt, &mut experiments);
    // A failure near the end does not lose the earlier measurements.
    experiments.ended = result.as_ref().err().map(|error| format!("{error:#}"));
    let folder = match args.output {
        Some(folder) => folder,
        None => workspace::target_dir()?.join("experiments"),
    };
    std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    for (name, text) in experiments.files()? {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    result
}

fn describe(args: &Args, lab: &Lab) -> Result<Machine> {
    let mut machine = machine::describe(lab)?;
    machine.facts.push((
        "rounds",
        format!("{} of {} s each way, off and on in turn", args.rounds, args.runtime),
    ));
    Ok(machine)
}

fn measure_all(
    args: &Args,
    cells: Vec<Cell>,
    lab: &Lab,
    interrupt: &Interrupt,
    experiments: &mut Experiments,
) -> Result<()> {
    let times = Times { runtime: args.runtime, ramp: RAMP_S };
    let runner = Runner { lab, times };
    let each = 2 * (args.rounds + 1);
    let mut progress = Progress::new(cells.len() * each, args.runtime + RAMP_S);
    let result = (|| {
        for target in Target::ALL {
            let cells: Vec<_> = cells.iter().filter(|cell| cell.target == target).collect();
            if cells.is_empty() {
                continue;
            }
            let (disk, description) = match targets::prepare(target, args.size, interrupt)? {
                Prepared::Ready(disk) => {
                    let description = disk.description.clone();
                    (Some(disk), description)
                }
                Prepared::Skipped(reason) => (None, format!("skipped, {reason}")),
            };
            experiments.targets.push(TargetNote { target, description: description.clone() });
            let Some(disk) = disk else {
                progress.skip(cells.len() * each);
                progress.print(&format!("{target}: {description}"));
                continue;
            };
            for cell in cells {
                let outcome = runner.measure(cell, &disk, args.rounds, &mut progress)?;
                progress.print(&outcome.line());
                experiments.outcomes.push(outcome);
            }
            disk.restore()?;
        }
        Ok(())
    })();
    progress.finish();
    result
}
