//! Development tasks of the workspace; `cargo xtask` lists them. Measurements are in `lab/`.

mod aarch64;
mod checks;
mod failures;
mod fuzz;
mod limited_run;
mod lines;
mod long_tests;
mod mutants;
mod sanitize;
mod schedule;
#[cfg(test)]
mod setup;
mod steps;
mod tidy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Development tasks of Ringhaul; cargo lab measures it")]
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
    /// Count the lines of product, proof and tools
    Lines(lines::Args),
    /// Run the data path against a simulated kernel and a model guest
    Sim(long_tests::SimArgs),
    /// Break the code on purpose and demand that a test notices
    Mutants(mutants::Args),
    /// Run the fuzz targets, each for a limited time
    Fuzz(fuzz::Args),
    /// Run unit tests and the simulation under AddressSanitizer, and unit tests under valgrind
    Sanitize(sanitize::Args),
    /// Kill the daemon many times under a driver that keeps its inflight region
    Crash(long_tests::CrashArgs),
    /// Run the models of shared state, in loom and shuttle
    Loom,
    /// Run unit tests for aarch64 in QEMU's user mode
    Aarch64,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Check(args) => checks::run(&args),
        Command::Tidy(args) => tidy::run(&args),
        Command::Lines(args) => lines::run(&args),
        Command::Sim(args) => long_tests::sim(&args),
        Command::Mutants(args) => mutants::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Sanitize(args) => sanitize::run(&args),
        Command::Crash(args) => long_tests::crash(&args),
        Command::Loom => long_tests::models(),
        Command::Aarch64 => aarch64::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
