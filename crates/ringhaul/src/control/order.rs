//! What the control thread is asked to do.

use std::io::IoSlice;
use std::sync::Arc;
use std::task::Wake;
use std::time::Instant;

use blockio::disk::{DiskState, Outside};
use blockio::{DiskSource, Remote};
use device::scsi::ScsiDevice;
use device::{Answer, Device};
use rustix::fd::OwnedFd;

use super::handed::{Described, ExportProgress, Paused};
use crate::command::{CommandError, ExportStatus};
use crate::disk_rules::{LimitGroups, RulesChange, ShownRules};
use crate::export::Endpoint;
use crate::export_log::ExportLog;
use crate::handed_fds::HandedFds;
use crate::memory_limits::MemoryLimits;
use crate::spec::{EndpointSpec, ExportSettings, ExportSpec, UnitPlace, UnitSpec};
use crate::stats::ExportStats;
use crate::status::ExportDetails;
use crate::wanted::Wanted;

/// One device and where its front-ends come from.
pub struct ExportSetup {
    /// What it was asked to be. Its name must be nobody else's.
    pub spec: ExportSpec,
    /// Its place in the log.
    pub log: Arc<ExportLog>,
    /// The disks behind the device.
    pub disks: Vec<DiskSource>,
    /// The device.
    pub device: Device,
    /// Where front-ends come from. None: the only one is there.
    pub endpoint: Option<Endpoint>,
    /// Queue `i` is served by IoThread `i` modulo their number, which is not 0.
    pub threads: Vec<Remote>,
    /// What front-ends may have mapped.
    pub limits: MemoryLimits,
    /// The groups that its disks may be in.
    pub groups: Arc<LimitGroups>,
}

/// How a logical unit is to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitChange {
    Add,
    Remove,
}

/// A logical unit that is changing.
pub(crate) struct ChangingUnit {
    /// Of the export: its name may be another's by the end.
    pub(crate) id: u64,
    /// However it was called.
    pub(crate) name: String,
    /// What the log calls it.
    pub(crate) log_name: String,
    pub(crate) device: ScsiDevice,
    pub(crate) settings: ExportSettings,
    pub(crate) endpoint: EndpointSpec,
    /// Whether a unit that is being added is wanted any more.
    pub(crate) wanted: Wanted,
    /// The disk of a unit that is being removed, which is no longer listed.
    pub(crate) removed: Option<DiskSource>,
}

/// A disk whose size is changing.
pub(crate) struct ResizingDisk {
    /// Of the export: its name may be another's by the end.
    pub(crate) id: u64,
    /// What the log calls the export.
    pub(crate) log_name: String,
    pub(crate) device: Device,
    pub(crate) disk: DiskSource,
}

/// A disk of an export, whose state may change, and whose size from outside.
pub(crate) struct WatchedDisk {
    pub(crate) export: String,
    /// `None`: that of a virtio-blk device.
    pub(crate) place: Option<UnitPlace>,
    /// `None`: its size changes by commands only.
    pub(crate) outside: Option<Arc<Outside>>,
    /// What its drivers know.
    pub(crate) size_bytes: u64,
    pub(crate) state: DiskState,
    /// Why requests wait that it has failed, whatever its state is besides.
    pub(crate) waiting: Option<DiskState>,
    /// The errno of the loss of data, if there was one.
    pub(crate) loss: Option<i32>,
    /// How many requests have waited because it had failed them.
    pub(crate) waited: u64,
    /// The errno of the last of those.
    pub(crate) trouble: Option<i32>,
}

/// What a change has come to.
pub(super) enum Changed {
    /// There is one more unit, which was asked for at this time.
    Unit(Box<UnitSpec>, DiskSource, Instant),
    /// There is one unit less.
    Removed,
    /// The disk has another size.
    Size,
}

pub(super) type Answered<T> = std::result::Result<T, CommandError>;

/// What the control thread is asked to do.
pub(super) enum Order {
    /// To keep the names of exports while these are opened, by a process that takes over too if
    /// this is so.
    Reserve(Vec<ExportSpec>, bool, Answer<Answered<Vec<Wanted>>>),
    /// To serve the one of this name soon, if it is still wanted. No other process takes over
    /// before.
    Claim(String, Answer<Answered<()>>),
    /// To forget them: they will not be served.
    Release(Vec<String>),
    /// To add no more exports if there are none but these, which are being opened.
    GiveUpStart(Vec<String>, Answer<bool>),
    Serve(Vec<ExportSetup>, Answer<Answered<()>>),
    /// To end an export, and answer when it has ended; to disconnect its front-end at once if this
    /// is so.
    Remove(String, bool, Answer<Answered<ExportStatus>>),
    Show(Answer<Vec<ExportStatus>>),
    Details(String, Answer<Answered<ExportDetails>>),
    Stats(Answer<Vec<ExportStats>>),
    /// To begin to change a unit of an export. Nobody else does with its place until that ends.
    BeginUnit(String, UnitPlace, UnitChange, Answer<Answered<ChangingUnit>>),
    /// Whether other processes take over before what was begun at the place of this export has
    /// ended: none does if this is so. False: the export has ended, or nobody wants any more what
    /// was begun.
    KeepHere(u64, Option<UnitPlace>, bool, Answer<bool>),
    /// To begin to give a disk another size: that of a unit or, without a place, of virtio-blk.
    BeginResize(String, Option<UnitPlace>, Answer<Answered<ResizingDisk>>),
    /// What was begun at a place of this export is done. The answer is the disk of a unit that was
    /// to be added, for whoever closes it, if the export has ended meanwhile.
    Changed(u64, Option<UnitPlace>, Changed, Answer<Option<DiskSource>>),
    /// What was begun at a place of this export has ended, and whoever did it has no disk open.
    EndChange(u64, Option<UnitPlace>, Answer<()>),
    /// To change what a disk may do, and what becomes of requests that it fails.
    /// The answer has what the log calls the export, too.
    SetDisk(String, Option<UnitPlace>, Box<RulesChange>, Answer<Answered<(ShownRules, String)>>),
    /// To have requests tried again that a disk, or any of the export, has failed.
    ResumeDisks(String, Option<UnitPlace>, Answer<Answered<()>>),
    /// To list the disks of all exports, to be watched.
    Watch(Answer<Vec<WatchedDisk>>),
    Stop,
    /// To end whatever is left. The answer is whether anything was.
    Abandon(Answer<bool>),
    HandOver(HandOverOrder),
}

impl Order {
    /// Whether it only asks.
    pub(super) fn changes_nothing(&self) -> bool {
        match self {
            Self::SetDisk(_, _, change, _) => change.is_empty(),
            Self::Show(_)
            | Self::Watch(_)
            | Self::Details(..)
            | Self::Stats(_)
            | Self::ResumeDisks(..) => true,
            _ => false,
        }
    }
}

/// An order of a hand-over between processes.
pub(super) enum HandOverOrder {
    /// To describe the exports.
    Describe(Answer<Answered<Described>>),
    /// To have all queues stop, if the exports are those that were described.
    Pause(u64, Answer<Answered<Paused>>),
    /// To leave them to the other process when it hears that. An error: they end.
    Commit(Answer<Answered<Vec<DiskSource>>>),
    /// To have them start again. The answer comes when they have.
    Resume(Answer<()>),
    /// To go on with the exports of another process, paused.
    TakeOver(Vec<(ExportSetup, ExportProgress)>, HandedFds, Answer<anyhow::Result<()>>),
    /// To leave them to another process.
    Leave,
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
