//! The pages of the manual: section 1 has one per command, from the help texts; sections 5 and 7
//! have the documents that the build has converted.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Command;
use clap_mangen::Man;

/// The name of each page from a document, and its text.
const DOCUMENTS: [(&str, &str); 3] = [
    ("ringhaul-disks.7", include_str!(concat!(env!("OUT_DIR"), "/ringhaul-disks.7"))),
    ("ringhaul-control.7", include_str!(concat!(env!("OUT_DIR"), "/ringhaul-control.7"))),
    ("ringhaul.toml.5", include_str!(concat!(env!("OUT_DIR"), "/ringhaul.toml.5"))),
];

/// Writes a page for `command`, each of its commands, and each document into `folder`.
pub(crate) fn write(mut command: Command, folder: &Path) -> Result<ExitCode> {
    command = command.disable_help_subcommand(true);
    command.build();
    write_pages(&command, folder)?;
    // The program for discovery of virtio-scsi has the options of `serve`.
    write_file(&folder.join("ringhaul-scsi.1"), ".so man1/ringhaul-serve.1\n")?;
    for (name, text) in DOCUMENTS {
        write_file(&folder.join(name), text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a page for `command` and each of its commands.
fn write_pages(command: &Command, folder: &Path) -> Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_pages(below, folder)?;
    }
    let page = Man::new(command.clone());
    let mut text = Vec::new();
    page.render(&mut text).context("cannot write a page of the manual into memory")?;
    let text = String::from_utf8(text).context("a page of the manual is no text")?;
    let name = page.get_filename();
    // The crate leaves an empty date out, and the next words would take its place.
    let title = name.trim_end_matches(".1").to_uppercase().replace('-', "\\-");
    let version = env!("CARGO_PKG_VERSION");
    let title = format!(".TH {title} 1 \"\" \"ringhaul {version}\" \"Ringhaul\"");
    let lines = text.lines().map(|line| if line.starts_with(".TH ") { &title } else { line });
    let mut lines: Vec<&str> = lines.collect();
    // A break beside an empty line has no effect.
    lines.dedup_by(|line, before| *line == ".br" && before.is_empty());
    let text = lines.join("\n") + "\n";
    write_file(&folder.join(&name), &text)
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
