//! The options of the sandbox.

use std::fmt;

use clap::{Args, ValueEnum};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

/// Values of `--sandbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SandboxMode {
    /// As far as the kernel has the means, with a warning about each that is missing.
    On,
    /// Nothing is denied; system calls that the sandbox would deny go to the kernel's log.
    Log,
    /// None.
    Off,
    /// Like `on`, but the daemon does not start if the kernel lacks a part, and ends with status 5
    /// at a system call that a thread does not need.
    Strict,
}

impl SandboxMode {
    /// Returns true if the daemon is confined.
    pub fn confines(self) -> bool {
        matches!(self, Self::On | Self::Strict)
    }
}

impl fmt::Display for SandboxMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The options of the sandbox.
#[derive(Debug, Clone, Args)]
pub struct SandboxOptions {
    /// Confine the daemon to the files, sockets and servers that its options and exports name, and
    /// to the system calls that it needs.
    ///
    /// `on`: as far as the kernel has the means. `strict`: do not start if it lacks one. `log`:
    /// deny nothing, and let the kernel log the system calls that `on` would deny. `off`: no
    /// sandbox.
    #[arg(help_heading = "Sandbox", long, value_name = "MODE", default_value = "on")]
    pub sandbox: SandboxMode,
    /// Let disks that are added later be on any server. Without this option the sandbox permits
    /// the servers of disks that are named at the start.
    #[arg(help_heading = "Sandbox", long)]
    pub allow_network: bool,
    /// Keep a capability of capabilities(7) that the daemon was started with, such as sys_admin;
    /// may be repeated. The sandbox drops all but dac_override, ipc_lock and, for a metrics port
    /// below 1024, net_bind_service.
    #[arg(help_heading = "Sandbox", long, value_name = "NAME", value_parser = parse_capability)]
    pub keep_capability: Vec<CapabilitySet>,
}

/// A capability by its name: `sys_admin`, `CAP_SYS_ADMIN`.
fn parse_capability(name: &str) -> Result<CapabilitySet, String> {
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
    let found = CapabilitySet::from_name(short).filter(|set| set.bits().count_ones() == 1);
    found.ok_or_else(|| {
        format!("'{name}' is no capability; capabilities(7) has their names, such as sys_admin")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capability_has_the_name_of_its_manual_page() {
        for name in ["sys_admin", "SYS_ADMIN", "CAP_SYS_ADMIN", "cap_sys_admin"] {
            assert_eq!(parse_capability(name), Ok(CapabilitySet::SYS_ADMIN), "{name}");
        }
        for name in ["", "cap_", "sys", "admin", "CAP_CAP_SYS_ADMIN", "sys_admin,chown"] {
            assert!(parse_capability(name).unwrap_err().contains("capabilities(7)"), "{name}");
        }
    }
}
