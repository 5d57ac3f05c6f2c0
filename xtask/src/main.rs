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

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::CommandFactory;
    use ringhaul_tools::workspace;

    use super::*;

    /// The first words after `before` in a text.
    fn words_after<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
        let rests = text.split(before).skip(1);
        rests.filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next()).collect()
    }

    /// Nothing runs the workflows of the forge here.
    #[test]
    fn the_workflows_of_the_forge_name_commands_that_exist() {
        let root = workspace::root();
        let makefile = fs::read_to_string(root.join("Makefile")).unwrap();
        let mut all = String::new();
        for entry in fs::read_dir(root.join(".github/workflows")).unwrap() {
            all += &fs::read_to_string(entry.unwrap().path()).unwrap();
        }
        let commands = words_after(&all, "cargo xtask ");
        let targets = words_after(&all, " make ");
        assert!(!commands.is_empty() && targets.len() > 3, "{commands:?} {targets:?}");
        for command in commands {
            assert!(Cli::command().find_subcommand(command).is_some(), "cargo xtask {command}");
        }
        for target in targets {
            assert!(makefile.contains(&format!("\n{target}:")), "make {target}");
        }
    }

    /// Members take the oldest toolchain of the workspace, with which a workflow tests all of them.
    #[test]
    fn each_member_has_the_oldest_toolchain_of_the_workspace() {
        let mut cargo = workspace::cargo();
        let output = cargo.args(["metadata", "--no-deps", "--format-version=1"]).output().unwrap();
        let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let versions: std::collections::BTreeSet<_> =
            packages.iter().map(|package| package["rust_version"].to_string()).collect();
        assert_eq!(versions.len(), 1, "{versions:?}");
        assert!(!versions.contains("null"));
    }
}
