//! The sandbox of the daemon (docs/internals/security.md).
//!
//! The main thread enters it before any other thread exists, and all later threads inherit it: no
//! new privileges, few capabilities, and the files of [`Rules`] alone (`files.rs`). They make no
//! system call that a daemon never needs (`calls.rs`), and each makes the calls of its own table
//! alone (`tables.rs`, `threads.rs`, `unlisted.rs`). Two tasks need more rights than the daemon
//! has. A helper process outside the sandbox carries them out (`helper.rs`).

mod calls;
mod capabilities;
mod files;
pub(crate) mod helper;
pub(crate) mod options;
mod rules;
mod tables;
mod threads;
mod unlisted;

use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Result, bail};

use crate::process::folder_of;
use options::SandboxMode;
pub(crate) use rules::Rules;
pub(crate) use threads::enter as enter_thread;
use unlisted::Reaction;

/// The sandbox of this process.
struct State {
    mode: SandboxMode,
    missing: Vec<String>,
    /// `None`: the kernel does not restrict files.
    rules: Option<Rules>,
}

static STATE: OnceLock<State> = OnceLock::new();

/// Confines this process. Must be called once, while it has one thread. `config` is a file that is
/// read again later, even if another file replaces it.
///
/// # Errors
///
/// With mode `strict`, when the kernel lacks a part. In every mode, when the kernel refuses a part
/// that it has.
pub(crate) fn confine(mode: SandboxMode, rules: Rules, config: Option<&Path>) -> Result<()> {
    let (mut missing, mut enforced) = (Vec::new(), None);
    match mode {
        SandboxMode::Off => {}
        SandboxMode::Log => {
            calls::log_denied(&rules)?;
            missing.extend(threads::begin(&rules, Reaction::KernelLog)?);
        }
        SandboxMode::On | SandboxMode::Strict => {
            // First, because it must remain outside.
            helper::start(config, &rules)?;
            capabilities::drop_unused(&rules)?;
            let (is_enforced, lacks) = files::restrict(&rules)?;
            missing.extend(lacks);
            // A kernel without seccomp, or a service manager that denies the call.
            if let Err(error) = calls::deny(&rules) {
                missing.push(format!("{error:#}"));
            } else {
                let ends = mode == SandboxMode::Strict;
                let reaction = if ends { Reaction::End } else { Reaction::Deny };
                missing.extend(threads::begin(&rules, reaction)?);
                missing.extend(calls::deny_rings().err().map(|error| format!("{error:#}")));
            }
            enforced = is_enforced.then_some(rules);
        }
    }
    if !missing.is_empty() && mode == SandboxMode::Strict {
        bail!(
            "cannot confine the daemon as --sandbox strict demands: {}; use a newer kernel, or \
             --sandbox on",
            missing.join("; ")
        );
    }
    if !missing.is_empty() {
        tracing::warn!("the sandbox is incomplete: {}", missing.join("; "));
    }
    if STATE.set(State { mode, missing, rules: enforced }).is_err() {
        bail!("this process is confined already");
    }
    Ok(())
}

/// Denies this thread, and all that it starts, further rings of io_uring: operations of a ring pass
/// no filter of system calls. Does nothing without a sandbox.
pub(crate) fn deny_rings() {
    if let Err(error) = if threads::are_denied() { calls::deny_rings() } else { Ok(()) } {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed").to_owned();
        tracing::warn!("the sandbox of the thread {name} is incomplete: {error:#}");
    }
}

/// The mode of this process.
pub(crate) fn mode() -> SandboxMode {
    STATE.get().map_or(SandboxMode::Off, |state| state.mode)
}

/// The parts that the kernel lacks.
pub(crate) fn missing() -> &'static [String] {
    STATE.get().map_or(&[], |state| &state.missing)
}

/// Returns advice about a disk at this path, if the sandbox is the reason that it cannot be opened.
pub(crate) fn advice_on_disk(path: &Path) -> Option<String> {
    let folder = denied_folder(path)?;
    Some(format!(
        "the sandbox permits only disks that were named at the start; add it with `ringhaul ctl \
         add`, which passes the open file, restart the daemon, or start it with --allow-disk-dir \
         {folder}"
    ))
}

/// Returns advice about a socket at this path, if the sandbox is the reason that it cannot be made.
pub(crate) fn advice_on_socket(path: &Path) -> Option<String> {
    let folder = denied_folder(path)?;
    Some(format!(
        "the sandbox permits sockets only in folders that were named at the start; choose one of \
         these, or start the daemon with --allow-socket-dir {folder}"
    ))
}

/// Returns advice about a server, if the sandbox is the reason that it cannot be reached.
pub(crate) fn advice_on_server() -> Option<&'static str> {
    let rules = STATE.get()?.rules.as_ref()?;
    (!rules.may_connect()).then_some(
        "the sandbox permits no connections, because no network disk was named at the start; \
         restart the daemon with --allow-network",
    )
}

/// The folder of a path that the rules do not permit.
fn denied_folder(path: &Path) -> Option<String> {
    let rules = STATE.get()?.rules.as_ref()?;
    if rules.permits(path) {
        return None;
    }
    Some(folder_of(path).display().to_string())
}

#[cfg(test)]
mod tests {
    use iomem::fits;
    use seccompiler::SeccompAction;

    use super::*;

    /// Runs in a process of its own for each mode, which the sandbox confines.
    #[test]
    fn parts_that_the_kernel_lacks_are_told() {
        const CHILD: &str = "RINGHAUL_TEST_CONFINED";
        let Ok(wanted) = std::env::var(CHILD) else {
            for mode in ["on", "strict"] {
                let mut child = std::process::Command::new(std::env::current_exe().unwrap());
                let name = "sandbox::tests::parts_that_the_kernel_lacks_are_told";
                child.args(["--exact", name, "--test-threads", "1"]).env(CHILD, mode);
                let output = child.output().unwrap();
                let shown = String::from_utf8_lossy(&output.stdout);
                assert!(output.status.success() && shown.contains("1 passed"), "{mode}: {shown}");
            }
            return;
        };
        assert!(missing().is_empty() && mode() == SandboxMode::Off);
        let absent = SeccompAction::Errno(fits(libc::ENOSYS, "an errno"));
        calls::apply([(libc::SYS_landlock_create_ruleset, Vec::new())].into(), absent).unwrap();
        if wanted == "strict" {
            let refused = confine(SandboxMode::Strict, Rules::default(), None).unwrap_err();
            let refused = format!("{refused:#}");
            for words in ["as --sandbox strict demands", "has no Landlock", "--sandbox on"] {
                assert!(refused.contains(words), "no {words:?}: {refused}");
            }
            return;
        }
        confine(SandboxMode::On, Rules::default(), None).unwrap();
        let told = missing();
        assert!(told.iter().any(|part| part.contains("has no Landlock")), "{told:?}");
        assert!(mode() == SandboxMode::On);
        assert_eq!(advice_on_disk(Path::new("/any")), None, "the kernel restricts no file");
    }
}
