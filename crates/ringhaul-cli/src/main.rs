//! The program `ringhaul`: its command line, `ctl`, and the commands about disks.

mod ctl;
mod demo;
mod disk_command;
mod examples;
mod heap;
mod manual;

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use clap_complete::env::{CompleteEnv, Shells};
use ringhaul::log::{self, LogFormat};
use ringhaul::options::config::{Config, ConfigFile};
use ringhaul::options::{DeviceKind, ServeArgs, capabilities, one_line};
use ringhaul_bench::{BenchError, DiskBenchArgs};
use ringhaul_options::OnOff;
use ringhaul_options::redact::printable;

use ctl::CtlArgs;
use demo::DemoArgs;
use disk_command::{DiskArgs, InfoArgs};

/// The daemon cannot start, or the command line is invalid.
const EXIT_USAGE: u8 = 2;

/// Advice for a negative size.
const SMALLER: &str = "to make a disk smaller, give its new size and --shrink";

/// The options that the summary has.
const SERVE_COMMON: [&str; 15] = [
    "socket_path",
    "name",
    "export",
    "config",
    "control",
    "blk_file",
    "disk",
    "read_only",
    "cache",
    "limits",
    "device",
    "lun",
    "iothreads",
    "engine",
    "help",
];

/// Serves disks to virtual machines over vhost-user.
#[derive(Debug, Parser)]
#[command(name = "ringhaul", version, about, max_term_width = 100, propagate_version = true,
          after_help = examples::PROGRAM)]
struct Cli {
    /// The command to run.
    #[command(subcommand)]
    command: Command,
    /// The format of the log on standard error.
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "text",
        global = true,
        help_heading = "Log",
        display_order = 900
    )]
    log_format: LogFormat,
    /// The lines to log: a level, or levels of parts, such as `warn,blockio=debug`.
    ///
    /// Levels are `error`, `warn`, `info`, `debug`, `trace` and `off`. Parts that no level names
    /// stay at `info`. Overrides the environment variable RUST_LOG (same syntax). Default: `info`.
    #[arg(long, value_name = "FILTER", global = true, value_parser = check_filter,
          help_heading = "Log", display_order = 901)]
    log: Option<String>,
}

/// The commands.
#[derive(Debug, Subcommand)]
enum Command {
    /// Export disks as virtio-blk or virtio-scsi devices on vhost-user sockets, in the foreground.
    ///
    /// Stops cleanly on SIGTERM and SIGINT, after answering the requests that it has taken. `serve`
    /// may be left out before its options: management programs start vhost-user back-ends without a
    /// command.
    #[command(after_help = examples::SERVE_SUMMARY, after_long_help = examples::SERVE,
              mut_args(only_long_help_unless_common))]
    Serve(Box<ServeArgs>),
    /// Check a configuration file of `serve --config`, and list its exports.
    #[command(after_help = examples::CHECK)]
    Check {
        /// The file.
        file: PathBuf,
        /// Further options of `serve`, if any.
        #[arg(value_name = "OPTIONS", trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Drive a vhost-user-blk or vhost-user-scsi socket and report how fast it is. Options have
    /// fio's names.
    #[command(after_help = examples::BENCH)]
    Bench(Box<ringhaul_bench::BenchArgs>),
    /// Query or change a daemon that was started with `--control`.
    Ctl(CtlArgs),
    /// Report the properties or the speed of a disk without serving it.
    #[command(subcommand, after_long_help = disk_keys())]
    Disk(DiskCommand),
    /// Serve a sample disk, drive it for some seconds, and remove everything.
    #[command(after_help = examples::DEMO)]
    Demo(DemoArgs),
    /// Print a shell script that completes commands, names of exports and keys of disks.
    #[command(after_help = examples::COMPLETIONS)]
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the pages of the manual into a folder, for packages.
    #[command(hide = true)]
    Manual {
        /// The folder, which exists.
        folder: PathBuf,
    },
    /// Become a program that takes over from a daemon, in the place of that daemon.
    #[command(name = ctl::upgrade::successor::COMMAND, hide = true)]
    BecomeSuccessor {
        /// Start that program as a process without a parent, and print its id.
        #[arg(long)]
        orphan: bool,
    },
    /// Print the version, the commit, the features, and the engines of this machine; so does
    /// --version.
    #[command(after_help = examples::VERSION)]
    Version,
}

/// The commands about a disk.
#[derive(Debug, Subcommand)]
enum DiskCommand {
    /// Print the size, the layers and the capabilities of a disk. It may be in use.
    #[command(after_help = examples::DISK_INFO)]
    Info(InfoArgs),
    /// Read a disk, or write to it, for some time, and report how fast it is.
    #[command(after_help = examples::DISK_BENCH)]
    Bench {
        /// The disk to drive.
        #[command(flatten)]
        disk: DiskArgs,
        /// Lock the disk as `serve` does. With `off`, a disk in use can be read; make sure
        /// yourself that no other program writes to one that is written to.
        #[arg(long, value_name = "ON|OFF", default_value = "on")]
        lock: OnOff,
        /// The load.
        #[command(flatten)]
        bench: DiskBenchArgs,
    },
}

/// Leaves an option out of the summary of `serve`, unless it is common.
fn only_long_help_unless_common(option: Arg) -> Arg {
    let is_common = SERVE_COMMON.contains(&option.get_id().as_str());
    option.hide_short_help(!is_common)
}

/// The kinds of disks with their keys, for a help text.
fn disk_keys() -> String {
    let mut text = format!("{}\n\nKinds of disks with their keys:\n", examples::DISK);
    for kind in disks::spec::completions("") {
        let keys = disks::spec::completions(&kind);
        let keys: Vec<&str> =
            keys.iter().map(|key| key[kind.len()..].trim_end_matches('=')).collect();
        text += &format!("  {:<7}{}\n", kind.trim_end_matches(','), keys.join(", "));
    }
    text + "\nA DISK is KIND,KEY=VALUE,...; the key over is the last one, and its value a DISK."
}

fn check_filter(text: &str) -> Result<String, String> {
    log::check_filter(text).map(|()| text.to_owned())
}

fn main() -> ExitCode {
    // A shell that completes words sets an environment variable; in that case the program ends
    // here.
    CompleteEnv::with_factory(Cli::command).complete();
    let line = command_line();
    if let Some(device) = line.capabilities {
        return print_capabilities(device);
    }
    let (cli, config) = match Cli::try_parse_from(&line.arguments) {
        Ok(cli) => match with_config(cli, line) {
            Ok(both) => both,
            Err(error) => {
                eprintln!("ringhaul: {}", printable(&format!("{error:#}")));
                return ExitCode::from(EXIT_USAGE);
            }
        },
        Err(error) if is_long_version(&error, &line.arguments) => {
            return print_version().unwrap_or(ExitCode::from(EXIT_USAGE));
        }
        Err(error) if is_answer(&error) => error.exit(),
        Err(error) => {
            let advice = if is_negative(&error) { SMALLER } else { "see --help" };
            eprintln!("ringhaul: {}; {advice}", printable(&one_line(&error)));
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if let Command::BecomeSuccessor { orphan } = cli.command {
        // The log has a thread, and a process with threads cannot enter namespaces.
        return ctl::upgrade::successor::become_successor(orphan);
    }
    log::start(cli.log_format, cli.log.as_deref());
    // A daemon starts it in its sandbox.
    let is_daemon = matches!(cli.command, Command::Serve(_));
    if let Err(error) = if is_daemon { Ok(()) } else { log::start_writing() } {
        eprintln!("ringhaul: {error:#}");
        return ExitCode::from(EXIT_USAGE);
    }
    // A guest or a benchmark may exceed the limit on the size of files.
    let survives = ringhaul::process::limits::survive_size_limit().context("cannot ignore SIGXFSZ");
    let result = survives.and_then(|()| match cli.command {
        Command::Serve(args) => ringhaul::serve::run(&args, config),
        Command::Check { file, options } => check(&file, options),
        Command::Bench(args) => ringhaul_bench::run(&args),
        Command::Ctl(args) => ctl::run(&args),
        Command::Disk(DiskCommand::Info(args)) => disk_command::info(&args),
        Command::Disk(DiskCommand::Bench { disk, lock, bench }) => {
            bench_disk(&disk, lock.is_on(), &bench)
        }
        Command::Demo(args) => demo::run(&args),
        Command::Completions { shell } => print_completions(shell),
        Command::Manual { folder } => manual::write(Cli::command(), &folder),
        Command::Version | Command::BecomeSuccessor { .. } => print_version(),
    });
    let code = result.unwrap_or_else(|error| {
        if is_unread(&error) {
            return ExitCode::SUCCESS;
        }
        log::report_failure(&with_advice(&error));
        let bench = error.downcast_ref::<BenchError>();
        ExitCode::from(bench.map_or(EXIT_USAGE, BenchError::exit_code))
    });
    log::flush();
    code
}

/// Merges the configuration file, if the command line names one, into the command line.
fn with_config(cli: Cli, line: CommandLine) -> Result<(Cli, Option<(ConfigFile, Config)>)> {
    let path = match &cli.command {
        Command::Serve(args) => args.config.as_deref(),
        _ => None,
    };
    let Some(path) = path else { return Ok((cli, None)) };
    let file = ConfigFile::new(path, Cli::command(), line.arguments, line.options_at);
    let config = file.read()?;
    let cli = Cli::from_arg_matches(&config.matches)?;
    Ok((cli, Some((file, config))))
}

/// Opens a disk and drives it. Unless the pattern writes, the disk is opened read-only and other
/// readers may have it open too.
fn bench_disk(disk: &DiskArgs, lock: bool, bench: &DiskBenchArgs) -> Result<ExitCode> {
    let writes = bench.check_writes()?;
    bench.run(disk.name(), disk.open(!writes, !lock)?)
}

fn print_version() -> Result<ExitCode> {
    let text = ringhaul::version::describe(option_env!("RINGHAUL_COMMIT"));
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}

/// Prints a shell script that calls this program for completions.
fn print_completions(shell: Shell) -> Result<ExitCode> {
    let shells = Shells::builtins();
    let completer = shells.completer(&shell.to_string());
    let completer = completer.with_context(|| format!("no completions for {shell}"))?;
    let mut script = Vec::new();
    let name = "ringhaul";
    completer.write_registration("COMPLETE", name, name, name, &mut script)?;
    if shell == Shell::Zsh {
        // Zsh runs a file `_ringhaul` of its function path at the first completion.
        let call = format!("_clap_dynamic_completer_{name} \"$@\"");
        writeln!(script, "if [[ $funcstack[1] = _{name} ]]; then {call}; fi")?;
    }
    std::io::stdout().write_all(&script).context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}

/// Reads a configuration file as `serve --config` does, and prints the exports that it would serve.
fn check(path: &Path, options: Vec<OsString>) -> Result<ExitCode> {
    let arguments = ["ringhaul".into(), "serve".into(), "--config".into(), path.into()];
    let arguments: Vec<OsString> = arguments.into_iter().chain(options).collect();
    let given = Cli::try_parse_from(&arguments);
    given.map_err(|error| anyhow!("{}; see serve --help", one_line(&error)))?;
    let config = ConfigFile::new(path, Cli::command(), arguments, 2).read()?;
    config.check_here()?;
    let printed = std::io::stdout().write_all(config.summary().as_bytes());
    printed.context("cannot write to standard output")?;
    Ok(ExitCode::SUCCESS)
}

/// Formats the error, and adds advice if any of its causes is a lack of descriptors.
fn with_advice(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    let advice = "raise the limit on open files (ulimit -n)";
    let out_of_descriptors = error
        .chain()
        .filter_map(errno_of)
        .any(|errno| [libc::EMFILE, libc::ENFILE].contains(&errno));
    if out_of_descriptors && !text.contains(advice) { format!("{text}; {advice}") } else { text }
}

/// Returns true if the reader of standard output has closed it, as `head` does. That is no failure.
fn is_unread(error: &anyhow::Error) -> bool {
    let is_closed = |cause: &(dyn std::error::Error + 'static)| {
        let error = cause.downcast_ref::<std::io::Error>();
        error.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    };
    error.to_string().ends_with("to standard output") && error.chain().any(is_closed)
}

fn errno_of(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    if let Some(errno) = error.downcast_ref::<rustix::io::Errno>() {
        return Some(errno.raw_os_error());
    }
    let of_disk = error.downcast_ref::<blockio::Error>().and_then(blockio::Error::system_error);
    of_disk.or_else(|| error.downcast_ref::<std::io::Error>())?.raw_os_error()
}

/// Returns true for requested help or version, and for help in place of a missing command.
fn is_answer(error: &clap::Error) -> bool {
    !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
}

/// Returns true for `--version`, which also describes the machine. `-V` gives the number alone.
fn is_long_version(error: &clap::Error, arguments: &[OsString]) -> bool {
    error.kind() == ErrorKind::DisplayVersion && arguments.iter().any(|word| word == "--version")
}

/// Returns true if a negative number was taken for an option.
fn is_negative(error: &clap::Error) -> bool {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return false;
    };
    option.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn print_capabilities(device: DeviceKind) -> ExitCode {
    match writeln!(std::io::stdout(), "{}", capabilities(device)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ringhaul: cannot write the capabilities to standard output: {error}");
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// The command line of the program.
struct CommandLine {
    arguments: Vec<OsString>,
    /// The number of arguments before the options of `serve`, if that is the command.
    options_at: usize,
    /// The device whose capabilities are to be printed. The conventions for vhost-user back-ends
    /// demand that all other options are ignored in this case.
    capabilities: Option<DeviceKind>,
}

/// Reads the command line, and inserts `serve` where it is left out: management programs start a
/// vhost-user back-end with options alone.
fn command_line() -> CommandLine {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let mut index = 1;
    // Options of the log may stand before the command.
    while let Some(option) = arguments.get(index).and_then(|argument| argument.to_str()) {
        let of_log = |name: &str| option == name || option.starts_with(&format!("{name}="));
        if !of_log("--log") && !of_log("--log-format") {
            break;
        }
        index += if option.contains('=') { 1 } else { 2 };
    }
    let first = arguments.get(index).and_then(|argument| argument.to_str()).unwrap_or_default();
    if first.starts_with("--") && !["--help", "--version"].contains(&first) {
        arguments.insert(index, "serve".into());
    }
    let is_serve = arguments.get(index).is_some_and(|first| first == "serve");
    let asked = arguments.iter().any(|argument| argument == "--print-capabilities");
    let capabilities = (is_serve && asked).then(|| device_kind(&arguments));
    CommandLine { arguments, options_at: index + 1, capabilities }
}

/// Finds the value of `--device` on a command line that may be invalid otherwise.
fn device_kind(arguments: &[OsString]) -> DeviceKind {
    let is_scsi = arguments.iter().any(|argument| argument == "--device=scsi")
        || arguments.windows(2).any(|pair| pair[0] == "--device" && pair[1] == "scsi");
    if is_scsi { DeviceKind::Scsi } else { DeviceKind::Blk }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The command and all commands below it, with the words that lead there.
    fn commands(command: &clap::Command, words: &str) -> Vec<(String, clap::Command)> {
        let mut found = vec![(words.to_owned(), command.clone())];
        let below = command.get_subcommands();
        for below in below.filter(|below| !below.is_hide_set() && below.get_name() != "help") {
            found.extend(commands(below, &format!("{words} {}", below.get_name())));
        }
        found
    }

    /// The words of an example without the parts for a shell.
    fn words(example: &str) -> Vec<String> {
        let command = example.trim_start_matches("source <(").trim_end_matches(')');
        let command = command.split(" > ").next().unwrap_or_default();
        let command = command.split(" < ").next().unwrap_or_default();
        let command = command.split(" | ").next().unwrap_or_default();
        let quoted = command.split('\'').enumerate();
        let words = quoted.flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        words.collect()
    }

    #[test]
    fn each_command_has_two_examples_that_it_understands() {
        let mut program = Cli::command();
        program.build();
        let commands = commands(&program, "ringhaul");
        assert!(commands.len() > 30, "{}", commands.len());
        for (name, mut command) in commands {
            let help = command.render_long_help().to_string();
            let (_, after) = help.split_once("\nExamples:\n").unwrap_or_else(|| panic!("{name}"));
            let examples = after.split("\n\n").next().unwrap().replace("\\\n", "");
            let examples: Vec<&str> = examples.lines().map(str::trim).collect();
            assert!(examples.len() >= 2, "{name}: {examples:?}");
            for example in examples {
                let words = words(example);
                let parsed = Cli::try_parse_from(&words);
                assert!(parsed.is_ok(), "{example}: {}", parsed.unwrap_err());
                assert!(words.join(" ").contains("ringhaul"), "{example}");
            }
        }
    }

    #[test]
    fn options_of_the_log_come_last() {
        let mut program = Cli::command();
        program.build();
        for (name, mut command) in commands(&program, "ringhaul") {
            let help = command.render_long_help().to_string();
            let is_heading = |line: &&str| line.ends_with(':') && !line.starts_with(' ');
            let ends = |line: &&str| *line != "Examples:" && !line.starts_with("Kinds of disks");
            let mut headings = help.lines().filter(is_heading).filter(ends);
            assert_eq!(headings.next_back(), Some("Log:"), "{name}: {help}");
        }
    }
}
