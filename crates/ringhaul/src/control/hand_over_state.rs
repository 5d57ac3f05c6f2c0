//! The state with which a process takes over exports: first the description of each, while the old
//! process serves it, then its progress, when its queues do not run.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use blockio::DiskSource;
use device::{DeviceState, RequestTotals};
use serde::{Deserialize, Serialize};
use vhost_user::{FdIndex, PassedFds, SessionState};

use super::guest_turns::TurnStates;
use crate::fd_store::StashState;
use crate::socket::EndpointState;
use crate::spec::ExportSpec;
use crate::spec::stats::QueueServed;

/// An export, as far as it can be opened while the old process serves it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct HandedExport {
    pub(crate) spec: ExportSpec,
    /// In the order of [`ExportSpec::disks`].
    pub(crate) disks: Vec<HandedDisk>,
    /// `None`: its one connection has come.
    pub(crate) endpoint: Option<EndpointState>,
}

/// A disk that is open.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct HandedDisk {
    /// `None`: the disk has no open file to be handed over, such as a null disk.
    pub(crate) file: Option<FdIndex>,
    pub(crate) size_bytes: u64,
    /// The name of its engine.
    pub(crate) engine: Option<String>,
    /// The reason for that engine. `None`: the old process does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) engine_reason: Option<String>,
    /// Files that a third program has opened for the disk, with their paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) files: Vec<(PathBuf, FdIndex)>,
}

/// An export with disks that are being opened.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct HandedOpening {
    pub(crate) spec: ExportSpec,
    /// `None`: the socket is to be made.
    pub(crate) endpoint: Option<EndpointState>,
}

/// The progress of an export.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct ExportProgress {
    pub(super) session: Option<SessionState>,
    /// The time since the front-end connected.
    pub(super) connected: Duration,
    /// The number of sessions so far.
    pub(super) sessions: u64,
    /// For each disk the errno of the loss of data, if there was one.
    pub(super) losses: Vec<Option<i32>>,
    /// For each disk, true if all answered writes are known to be flushed.
    pub(super) flushed: Vec<bool>,
    /// The debts of the limits of each disk, in nanoseconds. Empty: no disk has limits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) debts: Vec<Vec<u64>>,
    /// The counters of requests. `None`: the old process has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) totals: Option<RequestTotals>,
    /// The other counters. `None`: the old process hands none over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) counters: Option<ExportCounters>,
    /// The states between two turns of guests. `None`: its guests have no turns, or the old process
    /// hands none over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) turns: Option<TurnStates>,
    pub(super) device: DeviceState,
    /// The device's files with reservations.
    pub(super) reservations: Vec<Option<FdIndex>>,
    /// The descriptors that the service manager keeps. `None`: it keeps none, or the new process
    /// stores them again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stash: Option<StashState>,
}

/// The counters of an export, except the totals of its requests.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct ExportCounters {
    /// The time in nanoseconds that requests have waited for limits, all of them together.
    pub(super) throttled_ns: u64,
    /// Like that, for a retry after the disk failed them.
    pub(super) retried_ns: u64,
    /// Like that, for space on the disk.
    pub(super) held_ns: u64,
    /// The queues that were started at least once.
    pub(super) queues: Vec<QueueServed>,
}

impl HandedExport {
    /// Drops the reasons for engines, for a process that does not understand them.
    pub(crate) fn forget_engine_reasons(&mut self) {
        self.disks.iter_mut().for_each(|disk| disk.engine_reason = None);
    }
}

impl ExportProgress {
    /// Drops the stored descriptors, for a process that does not understand them.
    pub(crate) fn forget_stash(&mut self) {
        self.stash = None;
    }

    /// Drops the totals of requests, for a process that does not understand them.
    pub(crate) fn forget_totals(&mut self) {
        self.totals = None;
    }

    /// Drops the other counters and the states of guests, for a process that does not understand
    /// them.
    pub(crate) fn forget_counters(&mut self) {
        self.counters = None;
        if self.turns.take().is_some_and(|turns| turns != TurnStates::default()) {
            tracing::warn!(
                "the new process does not understand the states that `ctl state` has saved or \
                 loaded; load them again before their guests continue"
            );
        }
    }
}

/// The present exports. They are current as long as the generation is `generation`.
pub(crate) struct Described {
    pub(crate) exports: Vec<HandedExport>,
    /// Exports that another process opens too, with the times of their requests.
    pub(crate) opening: Vec<(ExportSpec, Instant)>,
    pub(crate) fds: PassedFds,
    pub(crate) generation: u64,
}

/// The exports while none of their queues runs.
pub(crate) struct Paused {
    pub(crate) exports: Vec<ExportProgress>,
    pub(crate) fds: PassedFds,
    /// Disks that are to be [written back](blockio::disk::hand_over::DiskHandOver::write_back).
    pub(crate) disks: Vec<DiskSource>,
    /// The time at which the first queue was told to stop.
    pub(crate) since: Instant,
}
