//! What a process needs to go on with the exports of another: first what each is, while it is
//! served, then how far it has come, when its queues do not run.

use std::time::{Duration, Instant};

use blockio::DiskSource;
use device::DeviceState;
use serde::{Deserialize, Serialize};

use crate::export::EndpointState;
use crate::handed_fds::{HandedFds, Place};
use crate::spec::ExportSpec;
use crate::vhost_user::SessionState;

/// An export, as far as it can be opened while it is still served.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct HandedExport {
    pub(crate) spec: ExportSpec,
    /// In the order of [`ExportSpec::disks`].
    pub(crate) disks: Vec<HandedDisk>,
    /// None: its one connection has come.
    pub(crate) endpoint: Option<EndpointState>,
}

/// A disk that is open.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct HandedDisk {
    /// None: a null disk.
    pub(crate) file: Option<Place>,
    pub(crate) size_bytes: u64,
    /// The name of its engine.
    pub(crate) engine: Option<String>,
}

/// An export whose disks are being opened.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct HandedOpening {
    pub(crate) spec: ExportSpec,
    /// None: a socket is to be made.
    pub(crate) endpoint: Option<EndpointState>,
}

/// How far an export has come.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct ExportProgress {
    pub(super) session: Option<SessionState>,
    /// How long the front-end has been connected.
    pub(super) connected: Duration,
    /// How many front-ends there were.
    pub(super) sessions: u64,
    /// For each disk the errno of the loss of data, if there was one.
    pub(super) losses: Vec<Option<i32>>,
    /// For each disk whether all that was answered is known to be flushed.
    pub(super) flushed: Vec<bool>,
    /// The debts of the limits of each disk, in nanoseconds. Empty: no disk has limits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) debts: Vec<Vec<u64>>,
    pub(super) device: DeviceState,
    /// The files with reservations that belong to it.
    pub(super) reservations: Vec<Option<Place>>,
}

impl ExportProgress {
    /// For a process that does not understand them.
    pub(crate) fn forget_debts(&mut self) {
        self.debts.clear();
    }
}

/// The exports that there are, as long as `generation` is theirs.
pub(crate) struct Described {
    pub(crate) exports: Vec<HandedExport>,
    /// Those that another process opens too, and when they were asked for.
    pub(crate) opening: Vec<(ExportSpec, Instant)>,
    pub(crate) fds: HandedFds,
    pub(crate) generation: u64,
}

/// The exports while none of their queues runs.
pub(crate) struct Paused {
    pub(crate) exports: Vec<ExportProgress>,
    pub(crate) fds: HandedFds,
    /// Disks that are to be [written back](DiskSource::write_back).
    pub(crate) disks: Vec<DiskSource>,
    /// When the first queue was told to stop.
    pub(crate) since: Instant,
}
