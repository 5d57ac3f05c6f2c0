//! `cargo lab runs`: compares the adaptive setting of `ringhaul serve` with fixed ones, at each
//! depth, with each kind of driver, on each disk.
//!
//! `plan` lists the measurements, `measure` runs them, `verdict` compares, `report` writes the
//! tables and `heatmap` draws the picture.

mod heatmap;
mod measure;
mod plan;
mod report;
mod verdict;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use ringhaul_tools::process::Interrupt;
use ringhaul_tools::workspace;

use crate::rig::machine::{self, Machine};
use crate::rig::progress::Progress;
use crate::rig::targets::{self, Prepared, Target};
use crate::rig::{Lab, Times};
use measure::{OPEN_LOOP_TIMES, Runner};
use plan::Plan;
use report::Runs;

/// The rounds, seconds and MiB of --quick.
const QUICK: (usize, f64, u64) = (1, 0.02, 64);

/// The seconds before measuring, in which caches and the adaptive setting begin to settle. The
/// setting starts over in each measurement, so a longer settling time counts against it.
const RAMP_S: f64 = 0.03;

/// The seconds that a measurement takes beyond its time. The servers run already.
const OVERHEAD_S: f64 = 0.03;

/// Options of `cargo lab runs`.
#[derive(Clone, clap::Args)]
pub(crate) struct Args {
    /// Rounds; each measures every setting once in every cell
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of one measurement; five times as long in the open loop
    #[arg(long, default_value_t = 0.15)]
    runtime: f64,
    /// Size of the disks, in MiB
    #[arg(long, default_value_t = 512)]
    size: u64,
    /// Only measurements with this in their name, such as `zram/`, `randread-depth-8-`, `polling`,
    /// `open-loop`
    #[arg(long, value_name = "PATTERN", default_value = "")]
    only: String,
    /// Engine of the servers
    #[arg(long, value_name = "ENGINE", default_value = "aio")]
    engine: String,
    /// Try everything out: one short round on small disks, no figures to rely on
    #[arg(long, conflicts_with_all = ["rounds", "runtime", "size"])]
    quick: bool,
    /// Folder for runs.md, runs.json and runs.svg [default: runs/ in the target directory]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// CPU that the servers are pinned to
    #[arg(long, default_value_t = 0)]
    server_cpu: usize,
    /// CPU that the load generator is pinned to
    #[arg(long, default_value_t = 1)]
    client_cpu: usize,
    /// List the measurements and end
    #[arg(long)]
    list: bool,
}

/// Measures, and writes runs.md, runs.json and runs.svg.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    if args.quick {
        (args.rounds, args.runtime, args.size) = QUICK;
    }
    let plans = Target::ALL.map(|target| Plan::of(target, &args.only));
    let plans: Vec<_> = plans.into_iter().filter(|plan| !plan.is_empty()).collect();
    ensure!(!plans.is_empty(), "nothing has {:?} in its name; --list shows the names", args.only);
    if args.list {
        plans.iter().flat_map(Plan::names).for_each(|name| println!("{name}"));
        return Ok(());
    }
    ensure!(args.rounds > 0 && args.runtime > 0.0 && args.size > 0, "a zero leaves nothing to do");

    let interrupt = Interrupt::install()?;
    let lab = Lab::new((args.server_cpu, args.client_cpu), &interrupt)?;
    let times = Times { runtime: args.runtime, ramp: RAMP_S };
    let runner = Runner { lab: &lab, times, rounds: args.rounds, engine: &args.engine };
    let mut runs = Runs::new(describe(&args, &lab)?, runner.command_lines());
    let result = measure_all(args.size, &plans, &runner, &interrupt, &mut runs);
    // A failure near the end does not lose the earlier measurements.
    runs.ended = result.as_ref().err().map(|error| format!("{error:#}"));
    let folder = match args.output {
        Some(folder) => folder,
        None => workspace::target_dir()?.join("runs"),
    };
    std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    for (name, text) in runs.files()? {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    result
}

fn describe(args: &Args, lab: &Lab) -> Result<Machine> {
    let mut facts = machine::facts(&lab.binary)?;
    let Args { rounds, runtime, engine, .. } = args;
    facts.extend([
        machine::pinned(lab),
        ("engine", engine.clone()),
        ("rounds", format!("{rounds} of {runtime} s for each setting in each cell, in turn")),
    ]);
    Ok(Machine { facts })
}

fn measure_all(
    size: u64,
    plans: &[Plan],
    runner: &Runner<'_>,
    interrupt: &Interrupt,
    runs: &mut Runs,
) -> Result<()> {
    let counts: Vec<_> = plans.iter().map(|plan| plan.measurements(runner.rounds)).collect();
    let total = counts.iter().map(|(closed, open)| closed + open).sum();
    let mut progress = Progress::expecting(total, seconds_each(&counts, runner.times));
    let result = (|| {
        for (plan, (closed, open)) in plans.iter().zip(counts) {
            let target = plan.target;
            match targets::prepare(target, size, interrupt)? {
                Prepared::Ready(disk) => {
                    runs.note(target, disk.description.clone());
                    let results = (&mut runs.outcomes, &mut runs.open);
                    runner.measure(plan, &disk, &mut progress, results)?;
                    disk.restore()?;
                }
                Prepared::Skipped(why) => {
                    progress.skip(closed + open);
                    progress.say(&format!("{target}: skipped, {why}"));
                    runs.note(target, format!("skipped, {why}"));
                }
            }
        }
        Ok(())
    })();
    progress.finish();
    result
}

/// Returns the average seconds of a measurement. `counts` holds, for each disk, the measurements
/// with requests in flight and in the open loop.
fn seconds_each(counts: &[(usize, usize)], times: Times) -> f64 {
    let sum = |pick: fn(&(usize, usize)) -> usize| counts.iter().map(pick).sum::<usize>();
    let (closed, open) = (sum(|count| count.0), sum(|count| count.1));
    let number = |count| f64::from(u32::try_from(count).expect("a count of measurements fits"));
    let longer = times.runtime * (OPEN_LOOP_TIMES - 1.0) * number(open) / number(closed + open);
    times.runtime + times.ramp + OVERHEAD_S + longer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_run_takes_less_than_70_minutes() {
        let counts = Target::ALL.map(|target| Plan::of(target, "").measurements(5));
        let total = counts.iter().map(|(closed, open)| closed + open).sum::<usize>();
        assert_eq!(total, 11_640);
        let times = Times { runtime: 0.15, ramp: RAMP_S };
        let minutes =
            f64::from(u32::try_from(total).unwrap()) * seconds_each(&counts, times) / 60.0;
        assert!((40.0..60.0).contains(&minutes), "{minutes}");
    }
}
