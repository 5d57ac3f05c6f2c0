//! The process of a daemon with the limits that the system sets it, and the process that takes
//! over, as data.

use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::log::LogLine;

/// The process of a daemon at one moment.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ProcessStatus {
    /// Its process id.
    pub process: u32,
    /// Its options, without secrets.
    pub options: Vec<String>,
    /// The release of the kernel.
    pub kernel: String,
    /// Descriptors that are open.
    pub open_files: u64,
    /// The limit on open descriptors. `None`: no limit.
    pub open_files_max: Option<u64>,
    /// The limit on locked memory in bytes. `None`: no limit, or a process that may exceed it.
    pub locked_memory_max_bytes: Option<u64>,
    /// Operations for which the whole system has Linux AIO contexts. `None`: the kernel has no
    /// Linux AIO.
    pub aio_operations: Option<u64>,
    /// The limit on these operations: `fs.aio-max-nr`.
    pub aio_operations_max: Option<u64>,
    /// The memory in bytes that front-ends share.
    pub mapped_memory_bytes: u64,
    /// The lowest limit in bytes on the memory of its cgroup. `None`: no limit.
    pub cgroup_memory_max_bytes: Option<u64>,
    /// Log lines that were dropped because standard error was not read in time.
    pub dropped_log_lines: u64,
    /// The mode of its sandbox: `on`, `log`, `off` or `strict`.
    pub sandbox: String,
    /// The parts of the sandbox that the kernel lacks.
    pub sandbox_lacks: Vec<String>,
    /// The CPUs of the IoThreads, in the order of their numbers.
    pub thread_cpus: Vec<ThreadCpus>,
}

/// The CPUs of an IoThread.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ThreadCpus {
    /// The name of the thread.
    pub name: String,
    /// The CPUs that the thread may run on, such as `0-3,8`; empty if the kernel does not list
    /// them.
    pub cpus: String,
}

/// The last lines of the log.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogLines {
    /// The lines, the oldest first.
    pub lines: Vec<LogLine>,
}

/// The start of a process that takes over: `PROGRAM LOG-OPTIONS serve --takeover CONTROL`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct SuccessorStart {
    /// The id of the daemon's process.
    pub process: u32,
    /// The control socket, as the daemon names it.
    pub control: PathBuf,
    /// The working directory of the daemon, at which relative paths begin.
    pub directory: PathBuf,
    /// Options on the log, for the part of the start before the takeover.
    pub log_options: Vec<String>,
    /// The environment of the daemon. Variables that are no UTF-8 are left out.
    pub environment: BTreeMap<String, String>,
}

/// The progress of a process that is to take over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct SuccessorProgress {
    /// True once the process has asked to take over.
    pub has_asked: bool,
    /// True once the process has taken over.
    pub has_taken_over: bool,
}
