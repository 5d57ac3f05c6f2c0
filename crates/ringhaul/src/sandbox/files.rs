//! Files and TCP ports, restricted by Landlock (landlock(7)).

use std::path::Path;

use anyhow::{Context, Result};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort,
    PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, Scope,
};

use super::rules::{Rules, Use};

/// The version of Landlock with every right that is restricted here (Linux 6.12).
const VERSION: ABI = ABI::V6;

/// Files of the system that every daemon reads: its own threads and limits, block devices, random
/// numbers.
const ALWAYS: [(&str, Use); 5] = [
    ("/proc", Use::ReadFolder),
    ("/sys", Use::ReadFolder),
    ("/dev/null", Use::Write),
    ("/dev/urandom", Use::Read),
    ("/dev/zero", Use::Read),
];

/// The parts of Landlock by the version that brought them.
const PARTS: [(ABI, &str); 5] = [
    (ABI::V2, "renames between folders (Linux 5.19)"),
    (ABI::V3, "the length of files (Linux 6.2)"),
    (ABI::V4, "TCP (Linux 6.7)"),
    (ABI::V5, "commands to devices (Linux 6.10)"),
    (ABI::V6, "signals and abstract sockets (Linux 6.12)"),
];

/// Restricts this thread, and all that it starts, to the files of the rules. Returns true if the
/// kernel restricts files, and the parts that it does not restrict.
///
/// # Errors
///
/// When the kernel refuses.
pub(super) fn restrict(rules: &Rules) -> Result<(bool, Vec<String>)> {
    let mut ruleset = begin(rules).context("cannot set up Landlock")?;
    for (path, used) in ALWAYS {
        ruleset = add(ruleset, Path::new(path), used)?;
    }
    for (path, used) in &rules.places {
        ruleset = add(ruleset, path, *used)?;
    }
    if !rules.has_any_server {
        let ports = rules.ports.iter().map(|port| (*port, AccessNet::ConnectTcp));
        let listens = rules.listen_port.into_iter().map(|port| (port, AccessNet::BindTcp));
        for (port, access) in ports.chain(listens) {
            ruleset = ruleset.add_rule(NetPort::new(port, access))?;
        }
    }
    let status = ruleset.restrict_self().context("cannot enter the sandbox of Landlock")?;
    Ok(match status.landlock {
        LandlockStatus::Available { effective_abi, .. } => (true, lacks_of(effective_abi)),
        LandlockStatus::NotEnabled => {
            let text = "Landlock is not enabled (lsm=landlock on the command line of the kernel)";
            (false, vec![text.to_owned()])
        }
        LandlockStatus::NotImplemented => (
            false,
            vec!["this kernel has no Landlock (Linux 5.13, CONFIG_SECURITY_LANDLOCK)".to_owned()],
        ),
    })
}

/// The parts that this version of Landlock lacks.
fn lacks_of(version: ABI) -> Vec<String> {
    let lacks = PARTS.iter().filter(|(since, _)| *since > version);
    lacks.map(|(_, part)| format!("this kernel does not restrict {part}")).collect()
}

fn begin(rules: &Rules) -> Result<RulesetCreated> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(VERSION))?;
    if !rules.has_any_server {
        ruleset = ruleset.handle_access(AccessNet::from_all(VERSION))?;
    }
    ruleset = ruleset.scope(Scope::Signal)?;
    // The service manager may listen on such a socket.
    if !std::env::var("NOTIFY_SOCKET").is_ok_and(|path| path.starts_with('@')) {
        ruleset = ruleset.scope(Scope::AbstractUnixSocket)?;
    }
    Ok(ruleset.create()?)
}

/// Permits the use of a file or a folder. One that does not exist, or cannot be looked up, cannot
/// be used later either.
fn add(ruleset: RulesetCreated, path: &Path, used: Use) -> Result<RulesetCreated> {
    let Ok(place) = PathFd::new(path) else { return Ok(ruleset) };
    let mut rights = rights(used);
    let is_folder = rustix::fs::fstat(&place)
        .is_ok_and(|status| rustix::fs::FileType::from_raw_mode(status.st_mode).is_dir());
    if !is_folder {
        rights &= AccessFs::from_file(VERSION);
    }
    let added = ruleset.add_rule(PathBeneath::new(place, rights));
    added.with_context(|| format!("cannot permit the use of {}", path.display()))
}

fn rights(used: Use) -> BitFlags<AccessFs> {
    use AccessFs::{
        IoctlDev, MakeReg, MakeSock, ReadDir, ReadFile, RemoveFile, Truncate, WriteFile,
    };
    match used {
        Use::Read => ReadFile | IoctlDev,
        Use::ReadFolder => ReadFile | ReadDir,
        Use::Write => ReadFile | WriteFile | Truncate | IoctlDev,
        Use::WriteFolder => {
            ReadFile | ReadDir | WriteFile | Truncate | IoctlDev | MakeReg | RemoveFile
        }
        Use::Sockets => MakeSock | RemoveFile,
        Use::Replace => ReadFile | ReadDir | WriteFile | Truncate | MakeReg | RemoveFile,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_lacks_the_parts_of_later_versions() {
        for (version, lacks) in
            [(ABI::V1, 5), (ABI::V2, 4), (ABI::V3, 3), (ABI::V4, 2), (ABI::V5, 1), (ABI::V6, 0)]
        {
            let found = lacks_of(version);
            assert_eq!(found.len(), lacks, "{version:?}: {found:?}");
        }
        assert!(lacks_of(ABI::V5)[0].contains("signals"));
    }
}
