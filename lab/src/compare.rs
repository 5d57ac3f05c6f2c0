//! `cargo lab compare`: compares Ringhaul with qemu-storage-daemon on the same disks, driven by the
//! same load generator, and with fio on the disks themselves as the limit.
//!
//! Machines drift during measurements. So the servers alternate within each round of a workload, in
//! an order that gives a server another predecessor in each round, and ratios are taken within a
//! round.

mod base;
mod measure;
mod overview;
mod plan;
mod report;
mod servers;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};
use ringhaul_tools::process::{self, Interrupt};
use ringhaul_tools::workspace;

use crate::rig::Times;
use crate::rig::machine::{self, Machine};
use crate::rig::progress::Progress;
use crate::rig::targets::{self, Disk, Prepared, Target};
use measure::{Bench, times_on};
use plan::Workload;
use report::{Cell, Comparison, Series};
use servers::Server;

/// The rounds, seconds and MiB of --quick.
const QUICK: (usize, f64, u64) = (1, 0.2, 64);

/// Options of `cargo lab compare`.
#[derive(Clone, clap::Args)]
pub(crate) struct Args {
    /// Rounds; each measures every server once on every workload
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of one measurement; four times as long for an image in a cluster
    #[arg(long, default_value_t = 1.0)]
    runtime: f64,
    /// Size of the disks, in MiB
    #[arg(long, default_value_t = 1024)]
    size: u64,
    /// Only names with each of these words and without the words after a `!`, such as `zram`,
    /// `loop/randread`, `file !beside`
    #[arg(long, value_name = "PATTERN", default_value = "")]
    only: String,
    /// Try everything out: one short round on small disks, no figures to rely on
    #[arg(long, conflicts_with_all = ["rounds", "runtime", "size"])]
    quick: bool,
    /// Compare with this other build of Ringhaul alone: random reads at each depth on each disk
    /// with each engine; before-after.md has the table
    #[arg(long, value_name = "BINARY")]
    base: Option<PathBuf>,
    /// Folder for compare.md and compare.json [default: compare/ in the target directory]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// CPU that the servers are pinned to
    #[arg(long, default_value_t = 0)]
    server_cpu: usize,
    /// CPU that the load generator is pinned to
    #[arg(long, default_value_t = 1)]
    client_cpu: usize,
    /// Nice value of the session of each server, ours and QSD's; -10 is about CPUWeight=1000
    #[arg(long, value_name = "NICE", default_value_t = 0, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i8).range(-20..=19))]
    server_nice: i8,
    /// List the measurements and end
    #[arg(long)]
    list: bool,
}

/// Measures, and writes compare.md and compare.json.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    if args.quick {
        (args.rounds, args.runtime, args.size) = QUICK;
    }
    ensure!(args.rounds > 0 && args.runtime > 0.0 && args.size > 0, "a zero leaves nothing to do");
    if let Some(base) = args.base.clone() {
        return base::run(&args, &base);
    }
    let workloads = |target| plan::wanted(target, &args.only);
    let series = series(&args.only);
    let count: usize = series.iter().map(|(_, count)| count).sum();
    ensure!(count > 0, "nothing has {:?} in its name; --list shows the names", args.only);
    if args.list {
        for target in Target::COMPARED {
            workloads(target).iter().for_each(|workload| println!("{target}/{workload}"));
        }
        return Ok(());
    }

    let interrupt = Interrupt::install()?;
    let bench = Bench::new(&args, &interrupt)?;
    let each = seconds_each(&series, args.rounds, args.runtime);
    let mut progress = Progress::new(count * (args.rounds + 1), each);
    let mut comparison = Comparison::new(describe(&args, &bench)?);
    let result = measure_all(&args, &bench, &interrupt, &mut progress, &mut comparison);
    progress.finish();
    // A failure near the end does not lose the earlier measurements.
    comparison.ended = result.as_ref().err().map(|error| format!("{error:#}"));
    let folder = match args.output {
        Some(folder) => folder,
        None => workspace::target_dir()?.join("compare"),
    };
    comparison.write(&folder)?;
    result
}

/// Returns the number of programs on each disk, summed over workloads.
fn series(only: &str) -> Vec<(Target, usize)> {
    let count = |target| {
        let workloads = plan::wanted(target, only);
        workloads.iter().map(|workload| Server::under(target, *workload).len()).sum()
    };
    Target::COMPARED.into_iter().map(|target| (target, count(target))).collect()
}

/// Returns the average seconds of a measurement. Each series ends with a count of system calls,
/// which takes about `runtime`.
fn seconds_each(series: &[(Target, usize)], rounds: usize, runtime: f64) -> f64 {
    let number = |count: usize| f64::from(u32::try_from(count).expect("it is a small count"));
    let seconds_of = |(target, count): &(Target, usize)| {
        let Times { runtime: measured, ramp } = times_on(*target, runtime);
        number(*count) * (number(rounds) * (measured + ramp) + runtime)
    };
    let count: usize = series.iter().map(|(_, count)| count).sum();
    series.iter().map(seconds_of).sum::<f64>() / number(count * (rounds + 1))
}

/// Describes the rounds and their length.
fn rounds(args: &Args) -> String {
    let cluster = times_on(Target::Rbd, args.runtime).runtime;
    let usual = format!("{} of {} s for each program and workload", args.rounds, args.runtime);
    match plan::wanted(Target::Rbd, &args.only).is_empty() {
        true => usual,
        false => format!("{usual}, of {cluster} s for images in a cluster"),
    }
}

/// Describes the machine, the programs and the rounds.
fn describe(args: &Args, bench: &Bench) -> Result<Machine> {
    let mut machine = machine::describe(&bench.lab)?;
    let qsd = process::output(Command::new(&bench.qsd).arg("--version"))?;
    let mut rounds = rounds(args);
    if args.server_nice != 0 {
        rounds += &format!("; the session of each server has the nice value {}", args.server_nice);
    }
    let qsd = qsd.lines().next().unwrap_or_default().to_owned();
    let fio = process::output(Command::new(&bench.fio).arg("--version"))?;
    machine.facts.extend([("qemu-storage-daemon", qsd), ("fio", fio), ("rounds", rounds)]);
    Ok(machine)
}

fn measure_all(
    args: &Args,
    bench: &Bench,
    interrupt: &Interrupt,
    progress: &mut Progress,
    comparison: &mut Comparison,
) -> Result<()> {
    for target in Target::COMPARED {
        let workloads = plan::wanted(target, &args.only);
        if workloads.is_empty() {
            continue;
        }
        match targets::prepare(target, args.size, interrupt)? {
            Prepared::Ready(disk) => {
                let commands = bench.command_lines(target);
                let mut description = disk.description.clone();
                for reason in bench.skipped_servers(target) {
                    progress.print(&format!("{target}/{reason}"));
                    description += &format!("; {reason}");
                }
                comparison.add_target(target, &description, commands);
                for workload in workloads {
                    let cell = measure_cell(args.rounds, bench, &disk, workload, progress)?;
                    comparison.cells.push(cell);
                }
                disk.restore()?;
            }
            Prepared::Skipped(reason) => {
                let programs = workloads.iter().map(|one| Server::under(target, *one).len());
                progress.skip(programs.sum::<usize>() * (args.rounds + 1));
                progress.print(&format!("{target}: skipped, {reason}"));
                comparison.add_target(target, &format!("skipped, {reason}"), Vec::new());
            }
        }
    }
    Ok(())
}

/// Measures all rounds of one workload on one disk, then counts system calls in separate runs.
fn measure_cell(
    rounds: usize,
    bench: &Bench,
    disk: &Disk,
    workload: Workload,
    progress: &mut Progress,
) -> Result<Cell> {
    let target = disk.target;
    let servers = bench.servers(target, workload);
    let _load = bench.lab.load(workload.beside)?;
    progress.skip((Server::under(target, workload).len() - servers.len()) * (rounds + 1));
    let mut series: Vec<Series> = servers.iter().map(|server| Series::new(*server)).collect();
    for round in 0..rounds {
        for index in order(servers.len(), round) {
            progress.step(&format!("{target}/{workload} round {} {}", round + 1, servers[index]));
            series[index].samples.push(bench.sample(servers[index], disk, workload, round)?);
        }
    }
    for one in &mut series {
        progress.step(&format!("{target}/{workload} system calls {}", one.server));
        one.system_calls_per_io =
            bench.count_system_calls(one.server, disk, workload, one.iops())?;
    }
    let cell = Cell { target, workload, series };
    progress.print(&cell.line());
    Ok(cell)
}

/// The order of `count` programs in a round: the program with the round's number, then its
/// neighbours in turn, from the nearest to the farthest.
///
/// In `count` rounds each program has each place once. A disk with a budget of bytes is slower
/// after a fast program, so no program may always follow the same one.
fn order(count: usize, round: usize) -> impl Iterator<Item = usize> {
    let distances = (0..count).map(move |place| match place % 2 {
        0 => count - place / 2,
        _ => place.div_ceil(2),
    });
    distances.map(move |distance| (round + distance) % count)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn each_round_gives_a_program_another_place_and_predecessor() {
        for count in 1..=12_usize {
            let mut places = vec![vec![0; count]; count];
            let mut pairs = vec![vec![0; count]; count];
            for round in 0..count {
                let order: Vec<_> = order(count, round).collect();
                for (place, program) in order.iter().enumerate() {
                    places[*program][place] += 1;
                }
                for pair in order.windows(2) {
                    pairs[pair[0]][pair[1]] += 1;
                }
            }
            assert!(places.iter().flatten().all(|times| *times == 1), "{places:?}");
            // An odd number of programs has fewer rounds than its pairs need.
            let most = 1 + count % 2;
            assert!(pairs.iter().flatten().all(|times| *times <= most), "{count}: {pairs:?}");
        }
    }

    #[test]
    fn estimates_of_time_include_images_in_a_cluster() {
        let each = |series: &[_]| seconds_each(series, 3, 1.0);
        // Three rounds and the count of system calls.
        let (usual, cluster) = ((3.0 * 1.1 + 1.0) / 4.0, (3.0 * 4.5 + 1.0) / 4.0);
        for (series, seconds) in [
            (&[(Target::Zram, 2)][..], usual),
            (&[(Target::Rbd, 5), (Target::Zram, 0)], cluster),
            (&[(Target::Rbd, 1), (Target::Zram, 3)], (cluster + 3.0 * usual) / 4.0),
        ] {
            assert!((each(series) - seconds).abs() < 1e-9, "{series:?}: {}", each(series));
        }
        let describe_rounds = |only| {
            rounds(&Program::parse_from(["compare", "--only", only, "--runtime", "0.5"]).args)
        };
        assert_eq!(describe_rounds("zram"), "5 of 0.5 s for each program and workload");
        assert!(
            describe_rounds("").ends_with("workload, of 2 s for images in a cluster"),
            "{}",
            describe_rounds("")
        );
    }
}
