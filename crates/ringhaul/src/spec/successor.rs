//! The start of a process that takes over, and its progress, as data.

use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
