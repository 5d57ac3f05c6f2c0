//! The pages of the manual, section 1: one per command, from the help texts.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Command;

/// Writes a page for `command` and each of its commands into `folder`.
pub(crate) fn write(command: Command, folder: &Path) -> Result<ExitCode> {
    let command = command.disable_help_subcommand(true);
    let writing = || format!("writing the manual into {}", folder.display());
    clap_mangen::generate_to(command, folder).with_context(writing)?;
    Ok(ExitCode::SUCCESS)
}
