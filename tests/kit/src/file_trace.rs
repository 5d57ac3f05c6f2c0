//! The order in which files of a unit test reach stable storage, as strace shows it.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Names the folder to the traced process.
const FOLDER: &str = "RINGHAUL_TRACED_FOLDER";

const CALLS: &str = "trace=openat,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat";

/// Runs the test called `name` once more, in a process under strace, where it calls `write` with a
/// folder. Returns the calls on files of this folder that have succeeded: `open FILE`, `sync FILE`,
/// `unlink FILE`, `rename FILE`. The folder itself is `.`.
///
/// `None` in the traced process, and if strace is not installed.
///
/// # Errors
/// If the test fails there.
pub fn trace_writes(name: &str, write: impl FnOnce(&Path)) -> Result<Option<Vec<String>>> {
    if let Some(folder) = std::env::var_os(FOLDER) {
        write(Path::new(&folder));
        return Ok(None);
    }
    if Command::new("strace").arg("-V").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: strace is not installed");
        return Ok(None);
    }
    let (folder, trace) = (tempfile::tempdir()?, tempfile::NamedTempFile::new()?);
    let mut command = Command::new("strace");
    command.args(["-f", "-e", CALLS, "-o"]).arg(trace.path());
    command.arg(std::env::current_exe()?).args(["--exact", name]).env(FOLDER, folder.path());
    let output = command.output().context("starting strace")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let text = fs::read_to_string(trace.path())?;
    Ok(Some(calls_in(&text, &folder.path().display().to_string())))
}

fn calls_in(trace: &str, folder: &str) -> Vec<String> {
    let name = |path: &str| {
        let rest = path.strip_prefix(folder)?;
        if rest.is_empty() {
            Some(".".to_owned())
        } else {
            rest.strip_prefix('/').map(str::to_owned)
        }
    };
    let (mut open, mut calls) = (HashMap::new(), Vec::new());
    for line in trace.lines().filter(|line| !line.contains(" = -1 ")) {
        let Some((start, result)) = line.rsplit_once(" = ") else { continue };
        let Some((call, arguments)) = start.split_once('(') else { continue };
        let call = call.rsplit(' ').next().unwrap_or_default();
        if call.ends_with("sync") {
            let number = arguments.trim_end().trim_end_matches(')').to_owned();
            calls.extend(open.get(&number).map(|name| format!("sync {name}")));
            continue;
        }
        let Some(name) = arguments.split('"').nth(1).and_then(name) else { continue };
        let word = ["open", "rename", "unlink"].into_iter().find(|word| call.starts_with(word));
        calls.extend(word.map(|word| format!("{word} {name}")));
        if word == Some("open") {
            open.insert(result.to_owned(), name);
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_on_other_files_and_calls_that_fail_are_left_out() {
        let trace = r#"7 openat(AT_FDCWD, "/f/a.new", O_WRONLY|O_CREAT, 0600) = 5
7 openat(AT_FDCWD, "/lib/b", O_RDONLY|O_CLOEXEC) = 6
7 unlink("/f/b") = -1 ENOENT (No such file or directory)
7 fsync(6)                      = 0
7 fsync(5)                      = 0
7 renameat2(AT_FDCWD, "/f/a.new", AT_FDCWD, "/f/a", RENAME_NOREPLACE) = 0
7 openat(AT_FDCWD, "/f", O_RDONLY|O_CLOEXEC) = 6
7 fdatasync(6) = 0
7 unlink("/f/a") = 0
7 +++ exited with 0 +++"#;
        let expected = ["open a.new", "sync a.new", "rename a.new", "open .", "sync .", "unlink a"];
        assert_eq!(calls_in(trace, "/f"), expected);
    }
}
