//! Runs the whole data path against a simulated kernel and a model guest, many times.
//!
//! Each run follows from its seed, and so do its faults. `run.rs` describes the course of a run,
//! `plan.rs` its parameters, `world.rs` the kernel, and `guest.rs` the guest with its checks. See
//! docs/internals/testing.md for how to use it. A seed repeats its run, with every step:
//!
//! ```console
//! $ cargo xtask sim --seed 7 --trace
//! ```
//!
//! The crate is for builds with `--cfg ringhaul_sim`, in which the product has a simulated kernel.

#![cfg(ringhaul_sim)]

mod attribution;
mod chain_request;
mod content;
mod control;
mod converted_disk;
mod device;
mod disk;
mod export;
mod failure;
mod faults;
mod front_end;
mod guest;
mod history;
mod inflight;
mod layout;
mod log;
mod message;
mod plan;
mod ram;
mod request;
mod rng;
mod run;
mod scsi;
mod shrink;
mod stack;
mod timeline;
mod workers;
mod world;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Parser;

use failure::Failure;
use plan::Plan;
use workers::Ending;

/// Runs the data path against a simulated kernel and a model guest.
#[derive(Parser)]
#[command(name = "cargo xtask sim")]
struct Args {
    /// Seeds to run
    #[arg(long, default_value_t = 2000)]
    seeds: u64,

    /// First seed
    #[arg(long, default_value_t = 0)]
    first_seed: u64,

    /// Run this seed alone
    #[arg(long, conflicts_with_all = ["seeds", "first_seed"])]
    seed: Option<u64>,

    /// Change a number of each plan: name=value
    #[arg(long)]
    set: Vec<String>,

    /// Print the plan and every step
    #[arg(long, requires = "seed", conflicts_with_all = ["seeds", "first_seed"])]
    trace: bool,

    /// Report a failing seed without looking for a shorter run
    #[arg(long)]
    no_shrink: bool,

    /// Processes that share the seeds [default: one for each processor]
    #[arg(long)]
    jobs: Option<u64>,

    /// Run every STRIDE-th seed only, and report progress: for the processes that share the seeds
    #[arg(long, hide = true)]
    stride: Option<u64>,
}

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    failure::keep_panics();
    match execute(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn execute(args: &Args) -> Result<()> {
    if let Some(seed) = args.seed {
        return run_one(seed, args);
    }
    if let Some(stride) = args.stride {
        return workers::work(args.first_seed, args.seeds, stride, &args.set);
    }
    let jobs = args.jobs.unwrap_or_else(processors).clamp(1, args.seeds.max(1));
    Plan::with_settings(args.first_seed, &args.set)?;
    let start = Instant::now();
    let ending = workers::share(args.first_seed, args.seeds, jobs, &args.set)?;
    let seconds = start.elapsed().as_secs_f64();
    match ending {
        Ending::Passed(report) => {
            println!(
                "sim: {} seeds from {}, {report}, {seconds:.1} s: no failure",
                args.seeds, args.first_seed
            );
            Ok(())
        }
        Ending::Failed(seed) if args.no_shrink => bail!("seed {seed} fails"),
        Ending::Failed(seed) => show_failure(seed, &args.set),
        Ending::SimulatedDeath(seed, how) => {
            let settings = options(&args.set);
            println!("repeat it with: cargo xtask sim --seed {seed} --trace{settings}");
            bail!("seed {seed} ends its process: {how}");
        }
    }
}

fn processors() -> u64 {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u64)
}

fn run_one(seed: u64, args: &Args) -> Result<()> {
    let plan = Plan::with_settings(seed, &args.set)?;
    if args.trace {
        println!("plan: {plan}");
    }
    match run::run(&plan, args.trace)? {
        Ok(report) => println!("seed {seed}: {report}, passed"),
        Err(failure) => bail!("seed {seed} fails: {failure}"),
    }
    Ok(())
}

/// The options that repeat these changes of a plan.
fn options(settings: &[String]) -> String {
    settings.iter().map(|setting| format!(" --set {setting}")).collect()
}

/// Shows the shortest run found that fails like the run of `seed` with these changes of its plan.
fn show_failure(seed: u64, changes: &[String]) -> Result<()> {
    let plan = Plan::with_settings(seed, changes)?;
    let Err(failure) = run::run(&plan, false)? else {
        bail!("seed {seed} failed once and passes now: something does not follow from the seed");
    };
    println!("seed {seed} fails: {failure}\nits plan: {plan}\nlooking for a shorter run ...");
    let (plan, failure): (Plan, Failure) = shrink::shrink(plan, failure)?;
    println!("the shortest run that fails in the same way: {plan}");
    // The failure was shown already; this run prints the trace.
    let _ = run::run(&plan, true)?;
    println!("repeat it with: cargo xtask sim --seed {seed} --trace{}", options(&plan.settings()));
    println!("the whole run:  cargo xtask sim --seed {seed} --trace{}", options(changes));
    bail!("seed {seed} fails: {failure}")
}
