//! `ringhaul ctl doctor`: faults of exports and host, and causes of slow requests.

mod disk;
mod facts;
mod finding;
mod front_end;
mod host;
mod system;

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap_complete::ArgValueCandidates;
use ringhaul::process::FEATURES;
use ringhaul::spec::process::LogLines;
use ringhaul_options::redact::{printable, redact};
use serde_json::{Value, json};

use super::connection::{Connection, export_names};
use super::show::{self, Form, print};
use facts::{Facts, ask};
use finding::Finding;

/// There is a finding that needs action.
const EXIT_FOUND: u8 = 1;

/// Options of `ringhaul ctl doctor`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Examine the host and this export alone.
    #[arg(add = ArgValueCandidates::new(export_names))]
    pub(super) export: Option<String>,
    /// The seconds for which rates are measured.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_time)]
    pub(super) time: Duration,
    /// Write a new file for a bug report: the findings, versions, features, kernel, options without
    /// secrets, exports, counters, and the last 200 lines of the log.
    #[arg(long, value_name = "FILE")]
    pub(super) bundle: Option<PathBuf>,
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=60.0).contains(seconds));
    let seconds = seconds.ok_or_else(|| format!("'{text}' is not 0.1 to 60 seconds"))?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Prints the findings. The exit code is 1 if one of them needs action.
///
/// # Errors
///
/// When the daemon has gone, or has no such export.
pub(super) fn run(args: &DoctorArgs, daemon: &mut Connection, form: Form) -> Result<ExitCode> {
    let facts = Facts::collect(daemon, args.export.as_deref(), args.time)?;
    let findings = examine(&facts);
    match form {
        Form::Table => print(&finding::text(&findings))?,
        Form::Lines => print(&finding::lines(&findings))?,
        Form::Json => {
            let findings = serde_json::to_value(&findings).context("cannot write findings")?;
            print(&show::json(&json!({ "findings": findings })))?;
        }
    }
    if let Some(path) = &args.bundle {
        write_bundle(path, daemon, &facts, &findings)?;
    }
    let is_found = findings.iter().any(Finding::needs_action);
    Ok(if is_found { ExitCode::from(EXIT_FOUND) } else { ExitCode::SUCCESS })
}

/// Writes a new file that only its owner may read: names of disks and guests are in it.
///
/// # Errors
///
/// When the file exists or cannot be written, or the daemon has gone.
fn write_bundle(
    path: &Path,
    daemon: &mut Connection,
    facts: &Facts,
    findings: &[Finding],
) -> Result<()> {
    let log: LogLines = ask(daemon, "log", &json!({}))?;
    let mut ask = |method| ask::<Value>(daemon, method, &json!({}));
    let exports = facts.exports.iter().map(|export| serde_json::to_value(&export.details));
    let mut bundle = json!({
        "ctl": {
            "version": env!("CARGO_PKG_VERSION"),
            "commit": option_env!("RINGHAUL_COMMIT"),
            "features": FEATURES,
        },
        "daemon": ask("ping")?,
        "process": facts.process,
        "settings": facts.settings,
        "findings": findings,
        "exports": exports.collect::<Result<Vec<_>, _>>().context("cannot write exports")?,
        "stats": facts.first_stats,
        "log": log.lines,
    });
    leave_secrets_out(&mut bundle);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(show::json(&bundle).as_bytes()))
        .with_context(|| format!("cannot write {}; give the path of a new file", path.display()))?;
    let path = printable(&path.display().to_string());
    eprintln!("ringhaul: wrote {path}; read it before you send it");
    Ok(())
}

/// Replaces secrets in all texts, for example the password of a URI in a name.
fn leave_secrets_out(value: &mut Value) {
    match value {
        Value::String(text) => *text = redact(text).into_owned(),
        Value::Array(all) => all.iter_mut().for_each(leave_secrets_out),
        Value::Object(all) => all.values_mut().for_each(leave_secrets_out),
        _ => {}
    }
}

/// All findings, the most harmful first.
fn examine(facts: &Facts) -> Vec<Finding> {
    let ms = u64::try_from(facts.time.as_millis()).unwrap_or(u64::MAX);
    let mut findings = host::findings(facts, ms);
    for export in &facts.exports {
        let found = front_end::findings(export).into_iter().chain(disk::findings(export, ms));
        let name = export.details.status.name();
        findings.extend(found.map(|finding| finding.for_export(&name)));
    }
    finding::sort(&mut findings);
    findings
}

#[cfg(test)]
mod tests;
