//! The commands of a daemon and their replies. Both are plain data: signals, the command line and
//! the control socket send commands in the same form.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::spec::qos::{FullQosSpec, QosChange};
use crate::spec::settings::{Settings, SettingsChange};
pub use crate::spec::status::{
    Counts, DiskState, ExportDetails, ExportState, ExportStatus, Served,
};
use crate::spec::{ExportSpec, UnitPlace, UnitSpec};

/// A command to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Open these disks and serve them: all of them or, where one fails, none.
    Add(Vec<ExportSpec>),
    /// End an export and wait for its end.
    Remove(Removal),
    /// Change the settings that can change at run time.
    Set(SettingsChange),
    /// Add a logical unit to the virtio-scsi device of the named export, and notify its driver.
    AddUnit(String, Box<UnitSpec>),
    /// Remove a logical unit of a virtio-scsi device, and notify its driver. Requests that the
    /// device has accepted are finished.
    RemoveUnit(String, UnitPlace),
    /// Resize a disk of an export and notify the drivers. The place names a logical unit; `None`
    /// means the disk of a virtio-blk device.
    Resize(String, Option<UnitPlace>, NewSize),
    /// Change the limits and the error policy of a disk of an export.
    SetDisk(String, Option<UnitPlace>, Box<QosChange>),
    /// Retry at once the failed requests that wait for a disk. The place names a logical unit;
    /// `None` means all disks of the export.
    Resume(String, Option<UnitPlace>),
    /// Return the state that the units of an export had when their guest stopped.
    SaveState(String),
    /// Have the next guest of an export continue with this state.
    LoadState(String, Box<Value>),
    /// End all exports alike, then the daemon. On the second such command the daemon stops waiting
    /// for requests.
    End(EndCause),
}

/// The reader of counters. Each has its own peaks since its last reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatsReader {
    /// A client of the control socket.
    Control,
    /// A monitoring system.
    Monitoring,
}

impl StatsReader {
    pub(crate) const COUNT: usize = 2;
}

/// The way in which an export is to end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Removal {
    /// Its name or the path of its socket.
    pub export: String,
    /// Disconnect the front-end at once. Otherwise the front-end sees the end when its requests are
    /// answered. Either way, accepted requests are finished before the disks are closed and the
    /// name is free.
    #[serde(default)]
    pub force: bool,
    /// The time to wait, in milliseconds. After it the reply is an error that names the cause of
    /// the delay, and the export continues to end.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
}

impl Removal {
    /// Returns the removal of an export without force or deadline.
    pub fn new(export: impl Into<String>) -> Self {
        Self { export: export.into(), force: false, deadline_ms: None }
    }
}

/// The new size of a disk.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct NewSize {
    /// The size in bytes, which a regular file is set to. `None`: the present size of the file or
    /// device.
    pub size_bytes: Option<u64>,
    /// Permit a smaller size. Data beyond it is lost.
    pub shrink: bool,
}

/// The cause of a daemon's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndCause {
    /// A service manager asked for it.
    Sigterm,
    /// A user pressed Ctrl-C at the terminal.
    Sigint,
    /// A client of the control socket asked for it.
    Control,
    /// The terminal has closed. Never counts as the second command: service managers send it
    /// together with SIGTERM.
    Sighup,
    /// The predecessor was asked to end after it could no longer end the exports itself. Never
    /// counts as the second command: the sender may have asked both processes.
    Predecessor,
}

impl EndCause {
    /// The name in the log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sigterm => "SIGTERM",
            Self::Sigint => "SIGINT",
            Self::Sighup => "SIGHUP",
            Self::Control => "a request on the control socket",
            Self::Predecessor => "a request to the previous process",
        }
    }
}

/// The reply to a successful command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// The command was carried out.
    Done,
    /// The export has ended, with its final status.
    Removed(Box<ExportStatus>),
    /// The current settings.
    Settings(Settings),
    /// The new size of the disk in bytes.
    Resized(u64),
    /// The rules of the disk that apply now.
    Rules(Box<FullQosSpec>),
    /// The state of the units of an export.
    State(Value),
}

/// The reason that a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// An export with this name exists.
    #[error(
        "another export, perhaps one that is ending, has the name or socket {0}; choose another \
         name and socket"
    )]
    Exists(String),
    /// No export has this name.
    #[error("there is no export {0}; name an export by its name or its socket")]
    Unknown(String),
    /// The export is not in a state in which it can be removed or changed.
    #[error("the export {0} is {1}; wait until it is done, or name another export")]
    Busy(String, ExportState),
    /// The export has not ended by the deadline, for the second field's reason.
    #[error(
        "the export {0} has not ended: {1}; its removal continues, and its name is free when a \
         removal without a deadline returns"
    )]
    NotEnded(String, String),
    /// The export is no virtio-scsi device.
    #[error(
        "the export {0} is a virtio-blk device, which has no logical units; use device=scsi, and \
         write a size with a suffix, as in 512M"
    )]
    NoUnits(String),
    /// The export is a virtio-scsi device, and the command names none of its units.
    #[error("the export {0} is a virtio-scsi device; name one of its logical units")]
    NoDisk(String),
    /// The locks of the export do not follow its guests.
    #[error(
        "the export {0} does not wait for guests of other hosts; start it with the option \
         --lock late"
    )]
    NoTurns(String),
    /// The device has a unit at this place.
    #[error("the export {0} already has a unit {1}; choose another number or remove that unit")]
    UnitExists(String, UnitPlace),
    /// The unit at this place is being changed by another command.
    #[error("the unit {1} of the export {0} is being added, resized or removed; try again later")]
    UnitBusy(String, UnitPlace),
    /// The unit at this place was cancelled while it was being added.
    #[error(
        "adding the unit {1} of the export {0} was cancelled; its address is free when its disk is \
         closed"
    )]
    UnitBeingCancelled(String, UnitPlace),
    /// The unit, or its export, was removed while its disk was being opened.
    #[error(
        "the unit {1} of the export {0} was not added: it or the export was removed before its \
         disk was open; add it again if you need it"
    )]
    UnitCancelled(String, UnitPlace),
    /// The disk is being changed by another command.
    #[error("the disk of the export {0} is being resized; try again later")]
    DiskBusy(String),
    /// The export was removed while its disk was being opened.
    #[error("the export {0} was removed before it was served; add it again if you need it")]
    Cancelled(String),
    /// The device has no unit at this place.
    #[error("the export {0} has no unit {1}; `ringhaul ctl show` lists its units")]
    UnknownUnit(String, UnitPlace),
    /// A takeover by another process is in progress, or was about to begin.
    #[error(
        "another process is taking over the exports; try again when the takeover has succeeded or \
         failed"
    )]
    HandingOver,
    /// The process with this id has taken the exports over.
    #[error("process {0} has taken over the exports; connect again to reach it")]
    HandedOver(u32),
    /// The exports have changed since they were described for a hand-over.
    #[error("exports were added, changed or removed during the takeover; try again")]
    Changed,
    /// Queues have not stopped, so another process cannot resume them.
    #[error("requests were not finished in time ({0}); try again when the disk answers")]
    NotPaused(String),
    /// A hand-over is impossible at the moment, for this reason.
    #[error("{0:#}")]
    NotNow(anyhow::Error),
    /// The new program did not take over; a later attempt may succeed.
    #[error("{0}")]
    UpgradeLater(String),
    /// The new program did not take over; a later attempt would fail as well.
    #[error("{0}")]
    UpgradeRefused(String),
    /// The command succeeded but could not be saved for the next start.
    #[error("the change was made, but a restart would undo it: {0:#}")]
    NotSaved(anyhow::Error),
    /// The export was not being served, and its entry for the next start is deleted.
    #[error(
        "the export {0} was not served; its saved entry is deleted, and the next start does not \
         try it again"
    )]
    Forgotten(String),
    /// The daemon is ending and accepts no changes of exports.
    #[error("the daemon is ending; start it again before further requests")]
    Ending,
    /// The command is invalid in any state of the daemon.
    #[error("{0:#}")]
    Invalid(anyhow::Error),
    /// The command was tried and failed.
    #[error("{0:#}")]
    Failed(anyhow::Error),
}

impl CommandError {
    /// Returns true if a takeover that failed with this error may succeed in a moment.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Busy(..)
                | Self::UnitBusy(..)
                | Self::UnitBeingCancelled(..)
                | Self::DiskBusy(_)
                | Self::HandingOver
                | Self::Changed
                | Self::NotPaused(_)
                | Self::NotNow(_)
        )
    }

    /// The error with its causes.
    pub(crate) fn into_error(self) -> anyhow::Error {
        match self {
            Self::Invalid(error) | Self::Failed(error) | Self::NotNow(error) => error,
            other => other.into(),
        }
    }
}

impl From<anyhow::Error> for CommandError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A caller retries an upgrade only after an error that may pass in a moment.
    #[test]
    fn errors_that_may_pass_differ_from_errors_that_stay() {
        use CommandError::*;
        let (vm, place) = (|| "vm".to_owned(), UnitPlace { target: 0, lun: 1 });
        let why = || anyhow::anyhow!("why");
        for (error, is_transient) in [
            (Busy(vm(), ExportState::Stopping), true),
            (UnitBusy(vm(), place), true),
            (UnitBeingCancelled(vm(), place), true),
            (DiskBusy(vm()), true),
            (HandingOver, true),
            (Changed, true),
            (NotPaused(vm()), true),
            (NotNow(why()), true),
            (HandedOver(1), false),
            (Unknown(vm()), false),
            (Ending, false),
            (Invalid(why()), false),
            (Failed(why()), false),
            (UpgradeRefused(vm()), false),
        ] {
            assert_eq!(error.is_transient(), is_transient, "{error}");
            let says = error.to_string().contains("try again");
            assert!(is_transient || !says, "{error}");
        }
    }

    #[test]
    fn commands_can_be_written_down() {
        let add = r#"{"add": [{"endpoint": {"path": "/a"}, "device": {"blk": {"file": "/b"}}}]}"#;
        for (text, is_good) in [
            (add, true),
            (r#"{"remove": {"export": "/a", "force": true}}"#, true),
            (r#"{"end": "sigterm"}"#, true),
            (r#"{"end": "sigkill"}"#, false),
            (r#""remove""#, false),
        ] {
            let command = serde_json::from_str::<Command>(text);
            assert_eq!(command.is_ok(), is_good, "{text}");
            let Ok(command) = command else { continue };
            let again = serde_json::to_string(&command).unwrap();
            assert_eq!(serde_json::from_str::<Command>(&again).unwrap(), command);
        }
    }
}
