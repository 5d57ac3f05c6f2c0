//! The program `ringhaul`.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use ringhaul::options::{CAPABILITIES, Cli, Command};
use tracing_subscriber::EnvFilter;

/// The daemon cannot start, or the command line makes no sense.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    let arguments = arguments();
    if asks_for_capabilities(&arguments) {
        return print_capabilities();
    }
    let result = match Cli::try_parse_from(arguments) {
        Ok(Cli { command: Command::Serve(args) }) => ringhaul::serve::run(&args),
        Ok(Cli { command: Command::Bench(args) }) => ringhaul_bench::run(&args),
        Err(error) if is_answer(&error) => error.exit(),
        Err(error) => Err(anyhow::Error::msg(one_line(&error))),
    };
    result.unwrap_or_else(|error| {
        eprintln!("ringhaul: {}", with_advice(&error));
        ExitCode::from(EXIT_USAGE)
    })
}

/// The error, with what to do when it is that no descriptor is left, wherever that shows.
fn with_advice(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    let advice = "raise the limit on open files (ulimit -n)";
    let out_of_descriptors = error
        .chain()
        .filter_map(errno_of)
        .any(|errno| [libc::EMFILE, libc::ENFILE].contains(&errno));
    if out_of_descriptors && !text.contains(advice) { format!("{text}; {advice}") } else { text }
}

fn errno_of(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    if let Some(errno) = error.downcast_ref::<rustix::io::Errno>() {
        return Some(errno.raw_os_error());
    }
    let of_disk = error.downcast_ref::<blockio::Error>().and_then(blockio::Error::system_error);
    of_disk.or_else(|| error.downcast_ref::<std::io::Error>())?.raw_os_error()
}

/// Whether this is help or a version that was asked for, or help in place of a command.
fn is_answer(error: &clap::Error) -> bool {
    !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}

/// What is wrong with the command line, without the usage that clap adds.
fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let said: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    let said = said.join(" ");
    let said = said.trim_end_matches("For more information, try '--help'.").trim_end();
    format!("{}; see --help", said.trim_start_matches("error: "))
}

/// The conventions for vhost-user back-ends ask to ignore all other options then.
fn asks_for_capabilities(arguments: &[OsString]) -> bool {
    let is_serve = arguments.get(1).is_some_and(|first| first == "serve");
    is_serve && arguments.iter().any(|argument| argument == "--print-capabilities")
}

fn print_capabilities() -> ExitCode {
    match writeln!(std::io::stdout(), "{CAPABILITIES}") {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ringhaul: cannot write the capabilities to standard output: {error}");
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// The command line, with `serve` put in where it is left out: management programs start a
/// vhost-user back-end with options alone.
fn arguments() -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let first = arguments.get(1).and_then(|argument| argument.to_str()).unwrap_or_default();
    if first.starts_with("--") && !["--help", "--version"].contains(&first) {
        arguments.insert(1, "serve".into());
    }
    arguments
}
