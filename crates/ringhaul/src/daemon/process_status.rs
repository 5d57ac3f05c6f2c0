//! The process of the daemon, with the limits that the system sets it.

use std::fs;

use blockio::executor::Lock;
use disks::spec::redact_spec;
use rustix::process::{Resource, getrlimit};

use super::Daemon;
use crate::log;
use crate::process::limits::cgroup_limit;
use crate::process::service_manager;
use crate::sandbox;
use crate::spec::command::CommandError;
use crate::spec::process::ProcessStatus;
use crate::spec::status::count_states;

/// The bit of `CAP_IPC_LOCK` (capabilities(7)), with which no limit on locked memory applies.
const CAP_IPC_LOCK: u32 = 14;

/// Held while a state is asked for and reported. No earlier state follows a later one.
static REPORTING: Lock<()> = Lock::new(());

impl Daemon {
    /// Describes the process.
    pub(crate) fn process_status(&self) -> Result<ProcessStatus, CommandError> {
        let thread_cpus = self.pool.lock().threads.as_ref().ok_or(CommandError::Ending)?.cpus();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let locked_max = getrlimit(Resource::Memlock).current;
        Ok(ProcessStatus {
            process: std::process::id(),
            options: self.options_without_secrets(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .map_or_else(|_| "not known".to_owned(), |release| release.trim().to_owned()),
            // The folder itself is open during the count.
            open_files: fs::read_dir("/proc/self/fd").map_or(0, |all| all.count() as u64 - 1),
            open_files_max: getrlimit(Resource::Nofile).current,
            locked_memory_max_bytes: locked_max.filter(|_| !has_capability(&status, CAP_IPC_LOCK)),
            aio_operations: number("/proc/sys/fs/aio-nr"),
            aio_operations_max: number("/proc/sys/fs/aio-max-nr"),
            mapped_memory_bytes: self.limits.mapped_bytes(),
            cgroup_memory_max_bytes: cgroup_limit(),
            dropped_log_lines: log::dropped_lines(),
            sandbox: sandbox::mode().to_string(),
            sandbox_lacks: sandbox::missing().to_vec(),
            thread_cpus,
        })
    }

    /// Reports the states of all exports to the service manager.
    pub(crate) fn report_state(&self) -> Result<(), CommandError> {
        let _alone = REPORTING.lock();
        service_manager::status(&count_states(&self.exports()?));
        Ok(())
    }

    /// The options of the process. A secret that stands where none belongs is covered.
    fn options_without_secrets(&self) -> Vec<String> {
        let options = self.process_options.get().map(|(options, _)| &options.arguments);
        options.into_iter().flatten().map(|option| redact_spec(option)).collect()
    }
}

/// The number in a file.
fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns true if a process with this `/proc/PID/status` has the capability.
fn has_capability(status: &str, bit: u32) -> bool {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set & (1 << bit) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_capabilities_count() {
        let of = |set: &str| format!("CapPrm:\tffffffffffffffff\nCapEff:\t{set}\nThreads:\t1\n");
        assert!(has_capability(&of("0000000000004000"), CAP_IPC_LOCK));
        assert!(!has_capability(&of("ffffffffffffbfff"), CAP_IPC_LOCK));
        assert!(!has_capability("", CAP_IPC_LOCK));
    }
}
