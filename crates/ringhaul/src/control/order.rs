//! What the control thread is asked to do.

use std::io::IoSlice;
use std::sync::Arc;
use std::task::Wake;

use blockio::{DiskSource, Remote};
use device::scsi::ScsiDevice;
use device::{Answer, Device};
use rustix::fd::OwnedFd;

use crate::command::{CommandError, ExportStatus};
use crate::export::Endpoint;
use crate::export_log::ExportLog;
use crate::memory_limits::MemoryLimits;
use crate::spec::{ExportSettings, ExportSpec, UnitPlace, UnitSpec};

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
    /// Where front-ends come from.
    pub endpoint: Endpoint,
    /// Queue `i` is served by IoThread `i` modulo their number, which is not 0.
    pub threads: Vec<Remote>,
    /// What front-ends may have mapped.
    pub limits: MemoryLimits,
}

/// The logical units of an export, and their device.
pub(crate) struct ExportUnits {
    pub(crate) device: ScsiDevice,
    pub(crate) settings: ExportSettings,
    /// With the disk behind each.
    pub(crate) units: Vec<(UnitSpec, DiskSource)>,
}

pub(super) type Answered<T> = std::result::Result<T, CommandError>;

/// What the control thread is asked to do.
pub(super) enum Order {
    /// To keep the names of exports while these are opened.
    Reserve(Vec<ExportSpec>, Answer<Answered<()>>),
    /// To forget them: they will not be served.
    Release(Vec<String>),
    Serve(Vec<ExportSetup>, Answer<Answered<()>>),
    Remove(String, Answer<Answered<ExportStatus>>),
    Show(Answer<Vec<ExportStatus>>),
    /// To hand out what is needed to change the units of an export.
    Units(String, Answer<Answered<ExportUnits>>),
    /// To note that an export has one more unit, on this disk.
    UnitAdded(String, Box<UnitSpec>, DiskSource),
    /// To forget a unit. The answer is its disk, for whoever closes it.
    UnitRemoved(String, UnitPlace, Answer<Option<DiskSource>>),
    Stop,
    Abandon,
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
