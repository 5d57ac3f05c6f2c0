//! Orders to the control thread.

use std::io::IoSlice;
use std::sync::Arc;
use std::task::Wake;
use std::time::Instant;

use blockio::disk::{DiskState, SizeProbe};
use blockio::{DiskSource, Remote};
use device::scsi::ScsiDevice;
use device::{Device, oneshot};
use rustix::fd::OwnedFd;
use vhost_user::PassedFds;

use super::hand_over_state::{Described, ExportProgress, Paused};
use super::stages::ReadyExport;
use crate::control::export_log::ExportLog;
use crate::open::cancellation::CancelToken;
use crate::process::memory_limits::MemoryLimits;
use crate::socket::endpoint::Endpoint;
use crate::spec::command::{CommandError, ExportStatus};
use crate::spec::qos::{FullQosSpec, LimitGroups, QosChange};
use crate::spec::stats::ExportStats;
use crate::spec::status::ExportDetails;
use crate::spec::{EndpointSpec, ExportSettings, UnitPlace, UnitSpec};

/// One device and the source of its front-ends.
pub struct ExportSetup {
    /// Its place in the log.
    pub log: Arc<ExportLog>,
    /// The disks behind the device.
    pub disks: Vec<DiskSource>,
    /// The device.
    pub device: Device,
    /// The source of front-ends. `None`: the only one has connected.
    pub endpoint: Option<Endpoint>,
    /// Queue `i` is served by IoThread `i` modulo their number, which is not 0.
    pub threads: Vec<Remote>,
    /// The limits on memory that front-ends share.
    pub limits: MemoryLimits,
    /// The groups that its disks may be in.
    pub groups: Arc<LimitGroups>,
    /// The log line that announces the export.
    pub line: String,
    /// The export. Dropped last, because its end frees the name.
    pub export: ReadyExport,
}

/// The change of a logical unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitChange {
    Add,
    Remove,
}

/// A logical unit that is changing.
pub(crate) struct ChangingUnit {
    /// The number of the export, because its name may be reused before the end.
    pub(crate) id: u64,
    /// The name of the export, even if the request has called it by its socket.
    pub(crate) name: String,
    /// The name of the export in the log.
    pub(crate) log_name: String,
    pub(crate) device: ScsiDevice,
    pub(crate) settings: ExportSettings,
    pub(crate) endpoint: EndpointSpec,
    /// The cancellation token of a unit that is being added.
    pub(crate) cancel_token: CancelToken,
    /// The disk of a unit that is being removed, which is no longer listed.
    pub(crate) removed: Option<DiskSource>,
}

/// A disk whose size is changing.
pub(crate) struct ResizingDisk {
    /// The number of the export, because its name may be reused before the end.
    pub(crate) id: u64,
    /// The name of the export in the log.
    pub(crate) log_name: String,
    pub(crate) device: Device,
    pub(crate) disk: DiskSource,
}

/// A disk of an export that is watched for its state and for a change of its size from outside.
pub(crate) struct WatchedDisk {
    pub(crate) export: String,
    /// The unit. `None`: the disk of a virtio-blk device.
    pub(crate) place: Option<UnitPlace>,
    /// `None`: its size changes by commands only.
    pub(crate) size_probe: Option<Arc<SizeProbe>>,
    /// The size that drivers know.
    pub(crate) size_bytes: u64,
    pub(crate) state: DiskState,
    /// The reason that failed requests wait, in any state.
    pub(crate) waiting: Option<DiskState>,
    /// The errno of the loss of data, if there was one.
    pub(crate) loss: Option<i32>,
    /// The number of requests that have waited because the disk had failed them.
    pub(crate) waited: u64,
    /// The errno of the last such request.
    pub(crate) trouble: Option<i32>,
}

/// The result of a change.
pub(super) enum Changed {
    /// A unit was added, which was requested at this time.
    Unit(Box<UnitSpec>, DiskSource, Instant),
    /// A unit was removed.
    Removed,
    /// The disk has another size.
    Size,
}

pub(super) type Answered<T> = std::result::Result<T, CommandError>;

/// An order to the control thread.
pub(super) enum Order {
    /// Serves exports that are ready.
    Serve(Vec<ExportSetup>, oneshot::Sender<Answered<()>>),
    /// Ends an export, and answers when it has ended. If true, disconnects its front-end at once.
    Remove(String, bool, oneshot::Sender<Answered<ExportStatus>>),
    Show(oneshot::Sender<Vec<ExportStatus>>),
    Details(String, oneshot::Sender<Answered<ExportDetails>>),
    Stats(oneshot::Sender<Vec<ExportStats>>),
    /// Begins to change a unit of an export. No other change of this place begins until the end of
    /// this one.
    BeginUnit(String, UnitPlace, UnitChange, oneshot::Sender<Answered<ChangingUnit>>),
    /// Blocks (true) or allows hand-overs during the change at this place of this export. The
    /// answer is false if the export has ended, or the change was cancelled.
    BlockHandOver(u64, Option<UnitPlace>, bool, oneshot::Sender<bool>),
    /// Begins to change the size of a disk: of a unit or, without a place, of virtio-blk.
    BeginResize(String, Option<UnitPlace>, oneshot::Sender<Answered<ResizingDisk>>),
    /// Reports that the change at this place of this export was made. If the export has ended, the
    /// answer is the disk of a unit that was to be added, for the caller to close.
    ApplyChange(u64, Option<UnitPlace>, Changed, oneshot::Sender<Option<DiskSource>>),
    /// Reports the end of the change at this place of this export: its thread has no disk open.
    EndChange(u64, Option<UnitPlace>, oneshot::Sender<()>),
    /// Changes the limits and the error policy of a disk. The answer also has the export's name in
    /// the log.
    SetDisk(
        String,
        Option<UnitPlace>,
        Box<QosChange>,
        oneshot::Sender<Answered<(FullQosSpec, String)>>,
    ),
    /// Retries the requests that a disk, or any disk of the export, has failed.
    ResumeDisks(String, Option<UnitPlace>, oneshot::Sender<Answered<()>>),
    /// Lists the disks of all exports, to be watched.
    ListDisks(oneshot::Sender<Vec<WatchedDisk>>),
    Stop,
    /// Abandons all unfinished exports. The answer is true if there were any.
    Abandon(oneshot::Sender<bool>),
    HandOver(HandOverOrder),
}

impl Order {
    /// Returns true if the order changes no export.
    pub(super) fn changes_nothing(&self) -> bool {
        match self {
            Self::SetDisk(_, _, change, _) => change.is_empty(),
            Self::Show(_)
            | Self::ListDisks(_)
            | Self::Details(..)
            | Self::Stats(_)
            | Self::ResumeDisks(..) => true,
            _ => false,
        }
    }
}

/// An order of a hand-over between processes.
pub(super) enum HandOverOrder {
    /// Describes the exports.
    Describe(oneshot::Sender<Answered<Described>>),
    /// Stops all queues, if the exports are the described ones.
    Pause(u64, oneshot::Sender<Answered<Paused>>),
    /// Leaves the exports to the new process. An error: they end.
    Commit(oneshot::Sender<Answered<Vec<DiskSource>>>),
    /// Resumes the exports. The answer comes when they have resumed.
    Resume(oneshot::Sender<()>),
    /// Takes over the exports of another process, paused.
    TakeOver(Vec<(ExportSetup, ExportProgress)>, PassedFds, oneshot::Sender<anyhow::Result<()>>),
    /// Ends the control thread without ending the exports, which the process with this id serves.
    Release(u32),
}

/// The eventfd that wakes the control thread.
pub(super) struct Alarm(pub(super) OwnedFd);

impl Alarm {
    pub(super) fn ring(&self) {
        // By `writev`, to distinguish it from a call to a driver in a trace of system calls. A full
        // counter means that the thread is awake already.
        let _ = rustix::io::writev(&self.0, &[IoSlice::new(&1_u64.to_ne_bytes())]);
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}
