//! Which programs have a file in use, for the error text. The kernel does not tell whose a lock of
//! an open file description is, but each process shows what its descriptors are.

use std::fs;
use std::path::Path;

/// Which programs are in the way.
pub(super) enum Holders {
    ThisProcess,
    /// Programs and their processes, in words.
    Others(String),
    Unknown,
}

/// The most that are named.
const NAMED_MAX: usize = 3;

/// Whether this process has `path` open.
pub(super) fn is_this_process(path: &Path) -> bool {
    fs::canonicalize(path).is_ok_and(|path| has_open("self", &path))
}

/// Which programs have `path` open, as far as this process may see it.
pub(super) fn holders(path: &Path) -> Holders {
    let Ok(path) = fs::canonicalize(path) else { return Holders::Unknown };
    if has_open("self", &path) {
        return Holders::ThisProcess;
    }
    let mut names = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(process) = name.to_str().filter(|name| name.parse::<u32>().is_ok()) else {
            continue;
        };
        if has_open(process, &path) {
            let program = fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
            let program = program.file_name().unwrap_or_default().to_string_lossy();
            names.push(format!("{program} (process {process})"));
        }
    }
    names.truncate(NAMED_MAX);
    if names.is_empty() { Holders::Unknown } else { Holders::Others(names.join(", ")) }
}

/// The links are read, not followed: a file system that hangs cannot hold this up.
fn has_open(process: &str, path: &Path) -> bool {
    let folder = fs::read_dir(format!("/proc/{process}/fd"));
    folder
        .into_iter()
        .flatten()
        .flatten()
        .any(|entry| fs::read_link(entry.path()).is_ok_and(|target| target == path))
}
