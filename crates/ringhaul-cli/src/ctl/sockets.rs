//! The choice of a daemon.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// The environment variable with the path of a control socket.
const VARIABLE: &str = "RINGHAUL_CONTROL";

/// The control socket of the chosen daemon: by the option, by the environment, or the only one at
/// the usual places.
pub(super) fn find_control_socket(control: Option<PathBuf>) -> Result<PathBuf> {
    let named = || std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(path) = control.or_else(named) {
        return Ok(path);
    }
    let found = default_sockets(Path::new("/run"));
    match &found[..] {
        [only] => Ok(only.clone()),
        [] => bail!(
            "which daemon is meant? use --control PATH or set {VARIABLE}; there is no socket \
             /run/ringhaul/control or /run/ringhaul-*/control"
        ),
        several => {
            let several = several.iter().map(|path| path.display().to_string());
            bail!(
                "which daemon is meant? use --control PATH or set {VARIABLE}; found {}",
                several.collect::<Vec<_>>().join(", ")
            )
        }
    }
}

/// The control sockets at the paths that docs/guide/service.md gives them.
fn default_sockets(run: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(run).into_iter().flatten().flatten();
    let is_ours = |name: &OsString| {
        let name = name.to_string_lossy();
        name == "ringhaul" || name.starts_with("ringhaul-")
    };
    let folders = entries.map(|entry| entry.file_name()).filter(is_ours);
    let mut found: Vec<PathBuf> =
        folders.map(|name| run.join(name).join("control")).filter(|path| path.exists()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_sockets_are_found_at_their_usual_places() {
        let run = tempfile::tempdir().unwrap();
        let path = |name: &str| run.path().join(name).join("control");
        assert!(default_sockets(run.path()).is_empty());
        for name in ["ringhaul-b", "ringhaul", "other", "ringhaulx"] {
            std::fs::create_dir(run.path().join(name)).unwrap();
            std::fs::write(path(name), "").unwrap();
        }
        std::fs::create_dir(run.path().join("ringhaul-empty")).unwrap();
        assert_eq!(default_sockets(run.path()), [path("ringhaul"), path("ringhaul-b")]);
    }
}
