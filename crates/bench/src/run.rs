//! The command: options, signals, the measurement, the printed result.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use blockio::DiskSource;
use ringhaul_options::redact::escape_json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};

use crate::args::{BenchArgs, OutputFormat};
use crate::error::BenchError;
use crate::phases;
use crate::report::{fio_json, text};

/// Runs the command: drives the server according to `args` and prints the result.
///
/// The result goes to standard output or to `--output`, progress and errors to standard error. The
/// exit code is 0 after success, 1 if blocks did not verify, I/O failed or the server went away,
/// and 2 if the options cannot work or the server cannot be reached.
///
/// SIGINT and SIGTERM end the run early. The result until then is printed, marked as interrupted,
/// and decides the exit code. A second signal ends the process at once.
///
/// # Errors
///
/// A [`BenchError`], whose [`exit_code`](BenchError::exit_code) is the exit status, or a failure to
/// write the result.
pub fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    run_on(args, None)
}

/// Like [`run`], but drives `disk`, if there is one.
pub(crate) fn run_on(args: &BenchArgs, disk: Option<DiskSource>) -> anyhow::Result<ExitCode> {
    let args = &args.with_fio_names()?;
    let unneeded = args.ignored_options();
    if !unneeded.is_empty() {
        eprintln!("ringhaul: not needed here: {}", unneeded.join(", "));
    }
    let mut output = args.output.as_deref().map(create_output).transpose()?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order, so that the first signal ends the run and the second the process.
        register_conditional_shutdown(signal, BenchError::RUN_EXIT.into(), interrupted.clone())
            .and_then(|_| register(signal, interrupted.clone()))
            .context("cannot set up a signal handler")?;
    }
    let report = phases::measure_until(args, disk, &interrupted)?;
    let text = match args.output_format {
        OutputFormat::Json => serde_json::to_string_pretty(&report)
            .map(|json| escape_json(json + "\n"))
            .context("cannot encode the result as JSON")?,
        OutputFormat::FioJson => fio_json::render(&report, args.fio.name.as_deref())
            .map(escape_json)
            .context("cannot encode the result as JSON")?,
        OutputFormat::Normal => text::render(&report),
    };
    match (&mut output, &args.output) {
        (Some(file), Some(path)) => file
            .write_all(text.as_bytes())
            .with_context(|| format!("cannot write the result to {}", path.display()))?,
        _ => std::io::stdout()
            .write_all(text.as_bytes())
            .context("cannot write the result to standard output")?,
    }
    Ok(if report.failed() { ExitCode::from(BenchError::RUN_EXIT) } else { ExitCode::SUCCESS })
}

fn create_output(path: &Path) -> Result<File, BenchError> {
    File::create(path).map_err(|error| {
        let path = path.display();
        BenchError::Usage(format!("cannot create the --output file {path}: {error}"))
    })
}
