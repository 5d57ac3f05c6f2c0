//! The parameters and results of orders to the control thread.

use std::io;
use std::sync::Arc;
use std::task::Wake;

use blockio::disk::{DiskState, SizeProbe};
use blockio::stats::Counter;
use blockio::{DiskSource, Remote};
use device::Device;
use device::scsi::ScsiDevice;
use disks::open::CancelToken;

use super::guest_turns::GuestTurns;
use super::stages::ReadyExport;
use crate::control::export_log::ExportLog;
use crate::fd_store::FdStore;
use crate::process::limits::MemoryLimits;
use crate::process::wake_fd::WakeFd;
use crate::socket::Endpoint;
use crate::spec::command::CommandError;
use crate::spec::qos::LimitGroups;
use crate::spec::{EndpointSpec, ExportSettings, UnitPlace};

/// A device and the source of its front-ends.
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
    /// Keeps front-ends for the process that follows a killed one.
    pub fd_store: Option<Arc<FdStore>>,
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
    /// The turns of guests, if its disks are locked late.
    pub(crate) turns: Option<Arc<GuestTurns>>,
}

/// A disk whose size is changing.
pub(crate) struct ResizingDisk {
    /// The number of the export, because its name may be reused before the end.
    pub(crate) id: u64,
    /// The name of the export in the log.
    pub(crate) log_name: String,
    pub(crate) device: Device,
    pub(crate) disk: DiskSource,
    /// The turns of guests, if its lock is free for other programs between them.
    pub(crate) turns: Option<Arc<GuestTurns>>,
}

/// The disks of all exports. They stay the same until the control thread wakes again.
pub(crate) struct WatchedDisks {
    pub(crate) disks: Vec<WatchedDisk>,
    /// The number of times that the control thread had woken.
    pub(crate) wakes: u64,
}

/// A disk of an export that is watched for its state and for a change of its size from outside.
#[derive(Clone)]
pub(crate) struct WatchedDisk {
    pub(crate) export: String,
    /// The unit. `None`: the disk of a virtio-blk device.
    pub(crate) place: Option<UnitPlace>,
    /// `None`: its size changes by commands only.
    pub(crate) size_probe: Option<Arc<SizeProbe>>,
    /// The size that drivers know.
    pub(crate) size_bytes: u64,
    /// True if a server has it, so that its state can change while no IoThread turns.
    pub(crate) is_remote: bool,
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

#[cfg(test)]
impl WatchedDisk {
    /// The disk of the export `vm` in this file, of which drivers know this size.
    pub(crate) fn for_file(path: &std::path::Path, size_bytes: u64) -> Self {
        let disk = DiskSource::file(path, &blockio::DiskOptions::default()).unwrap();
        Self {
            export: "vm".to_owned(),
            place: None,
            size_probe: disk.size_probe(),
            size_bytes,
            is_remote: false,
            state: disk.state(),
            waiting: None,
            loss: None,
            waited: 0,
            trouble: None,
        }
    }
}

pub(super) type Answered<T> = std::result::Result<T, CommandError>;

/// The kind of an order, which decides when a hand-over holds it up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OrderKind {
    /// Changes no export.
    Query,
    Change,
    /// Ends all exports.
    End,
    /// A step of a hand-over.
    HandOver,
}

/// The eventfd that wakes the control thread.
pub(super) struct Alarm {
    pub(super) wake: WakeFd,
    /// The number of times that the thread has woken, for any reason.
    pub(super) wakes: Counter,
    /// Wakes the watch of disks.
    pub(super) monitor: Arc<WakeFd>,
}

impl Alarm {
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(super) fn new() -> io::Result<Self> {
        let (wake, monitor) = (WakeFd::new()?, Arc::new(WakeFd::new()?));
        Ok(Self { wake, wakes: Counter::default(), monitor })
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake.wake();
    }
}
