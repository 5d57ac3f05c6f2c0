//! The file for a bug report.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use ringhaul::process::FEATURES;
use ringhaul::spec::process::LogLines;
use serde_json::{Value, json};

use super::facts::{Facts, ask};
use super::finding::Finding;
use crate::ctl::connection::Connection;

/// Writes a new file that only its owner may read: names of disks and guests are in it.
///
/// # Errors
///
/// When the file exists or cannot be written, or the daemon has gone.
pub(super) fn write(
    path: &Path,
    daemon: &mut Connection,
    facts: &Facts,
    findings: &[Finding],
) -> Result<()> {
    let log: LogLines = ask(daemon, "log", &json!({}))?;
    let mut ask = |method| ask::<Value>(daemon, method, &json!({}));
    let exports = facts.exports.iter().map(|export| serde_json::to_value(&export.details));
    let bundle = json!({
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
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| writeln!(file, "{bundle:#}"))
        .with_context(|| format!("cannot write {}; give the path of a new file", path.display()))?;
    eprintln!("ringhaul: wrote {}; read it before you send it", path.display());
    Ok(())
}
