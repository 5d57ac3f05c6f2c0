//! Development tasks of the workspace; `cargo xtask` lists them.

mod checks;
mod compare;
mod demo;
mod experiments;
mod fuzz;
mod instructions;
mod lab;
mod models;
mod mutants;
mod neighbours;
mod process;
mod sanitize;
#[cfg(test)]
mod setup;
mod sim;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::guest;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Development tasks of Ringhaul")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the checks of the tree and summarize them
    Check(checks::Args),
    /// Check the style that rustfmt and clippy do not know
    Tidy(tidy::Args),
    /// Serve a sample disk and drive it for ten seconds
    Demo(demo::Args),
    /// Measure Ringhaul against qemu-storage-daemon, and against fio on the bare disk
    Compare(compare::Args),
    /// Measure what each step of the loop is worth
    Experiments(experiments::Args),
    /// Count the instructions that a request takes, here and in an earlier revision
    Instructions(instructions::Args),
    /// Measure how fast an export is while another one misbehaves
    Neighbours(neighbours::Args),
    /// Run the data path against a simulated kernel and a model guest
    Sim(sim::Args),
    /// Break the code on purpose and demand that a test notices
    Mutants(mutants::Args),
    /// Run the fuzz targets, each for a while
    Fuzz(fuzz::Args),
    /// Run unit tests and the simulation under AddressSanitizer, and unit tests under valgrind
    Sanitize(sanitize::Args),
    /// Run the models of what threads share, in loom and shuttle
    Loom,
    /// Boot real guests with vhost-user disks
    Guest(guest::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Check(args) => checks::run(&args),
        Command::Tidy(args) => tidy::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Experiments(args) => experiments::run(&args),
        Command::Instructions(args) => instructions::run(&args),
        Command::Neighbours(args) => neighbours::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Mutants(args) => mutants::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Sanitize(args) => sanitize::run(&args),
        Command::Loom => models::run(),
        Command::Guest(args) => match guest::run(&args) {
            Ok(status) => return status,
            Err(error) => Err(error),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
