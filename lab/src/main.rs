//! The lab: measurements of Ringhaul, and the pages that they produce.
//!
//! A workspace of its own, called by `cargo lab` in the root of the tree. `cargo lab --help` lists
//! the measurements. `rig` holds the parts that all of them need.

mod charts;
mod compare;
mod dashboard;
mod experiments;
mod instructions;
mod neighbours;
mod rig;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo lab", about = "Measurements of Ringhaul")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure Ringhaul against qemu-storage-daemon, and against fio on the bare disk
    Compare(compare::Args),
    /// Draw the pictures of docs/internals/performance.md from its table
    Charts(charts::Args),
    /// Draw panels of the Grafana dashboard from a run under a changing load
    Dashboard(dashboard::Args),
    /// Measure the worth of each step of the loop
    Experiments(experiments::Args),
    /// Count the instructions that a request takes, here and in an earlier revision
    Instructions(instructions::Args),
    /// Play a part of the background load beside which servers are compared
    #[command(hide = true)]
    Load(rig::load::Args),
    /// Measure the speed of an export while another one misbehaves
    Neighbours(neighbours::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Compare(args) => compare::run(&args),
        Command::Charts(args) => charts::run(&args),
        Command::Dashboard(args) => dashboard::run(&args),
        Command::Experiments(args) => experiments::run(&args),
        Command::Instructions(args) => instructions::run(&args),
        Command::Load(args) => rig::load::play(&args),
        Command::Neighbours(args) => neighbours::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
