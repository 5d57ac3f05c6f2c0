//! Names of exports, for the completion of a command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap_complete::CompletionCandidate;
use serde_json::json;

use super::connection::{Connection, find_control_socket};

/// The limit on the wait for the names, because the shell waits.
const NAMES_LIMIT: Duration = Duration::from_secs(1);

/// Names of the daemon's exports. Empty if the daemon does not answer.
pub(super) fn export_names() -> Vec<CompletionCandidate> {
    let words: Vec<OsString> = std::env::args_os().collect();
    let exports = find_control_socket(control_of(&words)).ok().and_then(|control| {
        let mut daemon = Connection::new(&control).ok()?;
        daemon.set_limit(NAMES_LIMIT).ok()?;
        daemon.call("export.list", &json!({})).ok()?.ok()
    });
    let exports = exports.as_ref().and_then(|exports| exports.as_array());
    let names = exports.into_iter().flatten().filter_map(|export| export["name"].as_str());
    names.map(CompletionCandidate::new).collect()
}

/// The control socket that a command line names.
fn control_of(words: &[OsString]) -> Option<PathBuf> {
    let of = |pair: &[OsString]| match pair {
        [option, path] if option == "--control" => Some(PathBuf::from(path)),
        _ => None,
    };
    let joined = words.iter().find_map(|word| word.to_str()?.strip_prefix("--control="));
    joined.map(PathBuf::from).or_else(|| words.windows(2).find_map(of))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_names_a_daemon() {
        let of = |words: &str| {
            let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
            control_of(&words)
        };
        assert_eq!(of("ringhaul ctl --control /c show"), Some("/c".into()));
        assert_eq!(of("ringhaul ctl --control=/c show"), Some("/c".into()));
        assert_eq!(of("ringhaul ctl show --control"), None);
    }
}
