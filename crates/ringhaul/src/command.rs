//! What a daemon can be asked to do, and what it answers. All of it is data: signals and the
//! command line send it, and anything else can.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Result, bail};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::disk_rules::{RulesChange, ShownRules};
use crate::settings::{Settings, SettingsChange};
use crate::spec::{ExportSpec, UnitPlace, UnitSpec};
use crate::stats::DaemonStats;
pub use crate::status::{Counts, DiskState, ExportDetails, ExportState, ExportStatus, Served};

/// What a daemon is asked to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
    /// Open these disks and serve them: all of them or, where one fails, none.
    Add(Vec<ExportSpec>),
    /// End an export, and wait for that.
    Remove(Removal),
    /// Describe the exports.
    Show,
    /// Describe one export in detail.
    Describe(String),
    /// Say what all counters are at.
    Stats,
    /// Change what may change while the daemon runs.
    Set(SettingsChange),
    /// Give the virtio-scsi device of the export of this name one more logical unit, of which its
    /// driver is told.
    AddUnit(String, Box<UnitSpec>),
    /// Take a logical unit away from a virtio-scsi device. Its driver is told, and the requests
    /// that the device has taken are finished.
    RemoveUnit(String, UnitPlace),
    /// Give a disk of an export another size, and tell the drivers: that of a logical unit or,
    /// without a place, that of a virtio-blk device.
    Resize(String, Option<UnitPlace>, NewSize),
    /// Change what a disk of an export may do, and what becomes of requests that it fails.
    SetDisk(String, Option<UnitPlace>, Box<RulesChange>),
    /// Try those requests of a disk again at once that wait because it has failed them: of that of
    /// a logical unit or, without a place, of all disks of the export.
    Resume(String, Option<UnitPlace>),
    /// End all exports in the same way, and the daemon with them. Asked a second time, the daemon
    /// does not wait for requests any longer.
    End(EndCause),
}

/// How an export is to end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Removal {
    /// Its name or its socket.
    pub export: String,
    /// Disconnect the front-end at once. Otherwise it sees the end when its requests are answered.
    /// Either way, requests that were taken are finished before the disks are closed and the name
    /// is free.
    #[serde(default)]
    pub force: bool,
    /// Wait for at most so many milliseconds. The answer is an error then that says what the end
    /// waits for, and the export goes on ending.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
}

impl Removal {
    /// Of an export that may take its time.
    pub fn of(export: impl Into<String>) -> Self {
        Self { export: export.into(), force: false, deadline_ms: None }
    }
}

/// How large a disk is to be.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct NewSize {
    /// In bytes: a regular file is made so long. `None`: as large as its file or device is now.
    pub size_bytes: Option<u64>,
    /// That size may be smaller than what there is, which is lost beyond it.
    pub shrink: bool,
}

/// Why a daemon is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndCause {
    /// A service manager asks for it.
    Sigterm,
    /// Somebody at a terminal does.
    Sigint,
    /// Somebody does over the control socket.
    Control,
    /// The terminal has gone. Never counts as the second time: service managers send it together
    /// with SIGTERM.
    Sighup,
    /// The process that this one has taken over from was asked, when that could not end any more
    /// what it served. Never counts as the second time: whoever asks may have asked both.
    Predecessor,
}

impl EndCause {
    /// What the log calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sigterm => "SIGTERM",
            Self::Sigint => "SIGINT",
            Self::Sighup => "SIGHUP",
            Self::Control => "a request on the control socket",
            Self::Predecessor => "a request to the process before this one",
        }
    }
}

/// What a daemon has done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// The disks are served.
    Added,
    /// The export has ended, as it was at its end.
    Removed(Box<ExportStatus>),
    /// The exports, in the order in which they were added.
    Exports(Vec<ExportStatus>),
    /// The export, in detail.
    Export(Box<ExportDetails>),
    /// The counters.
    Stats(Box<DaemonStats>),
    /// The settings, as they are now.
    Settings(Settings),
    /// The logical unit is there.
    UnitAdded,
    /// The logical unit has gone.
    UnitRemoved,
    /// The disk has this size in bytes.
    Resized(u64),
    /// What holds for the disk now.
    Rules(Box<ShownRules>),
    /// The requests are tried again.
    Resumed,
    /// The daemon ends.
    Ending,
}

/// Why a daemon has not done what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// There is an export of this name.
    #[error("{0} is another export, or one that is ending; choose another name and socket")]
    Exists(String),
    /// There is none.
    #[error("there is no export {0}; an export is called by its name or its socket")]
    Unknown(String),
    /// It is too early, or too late, to end this export.
    #[error("the export {0} is {1}; wait until that is done, or name another one")]
    Busy(String, ExportState),
    /// The export has not ended by the deadline, for this reason.
    #[error(
        "the export {0} has not ended: {1}; it goes on ending, and its name is free when a removal \
         without a deadline returns"
    )]
    NotEnded(String, String),
    /// The export is no virtio-scsi device.
    #[error(
        "the export {0} is a virtio-blk device, which has no logical units; use device=scsi, and \
         write a size with a suffix, as in 512M"
    )]
    NoUnits(String),
    /// The export is a virtio-scsi device, and it is not said which of its disks is meant.
    #[error("the export {0} is a virtio-scsi device; name one of its logical units")]
    NoDisk(String),
    /// The device has a unit at this place.
    #[error("the export {0} has a unit {1} already; choose another number or remove that one")]
    UnitExists(String, UnitPlace),
    /// Somebody else changes the unit at this place.
    #[error("the unit {1} of the export {0} is being added, resized or removed; try again later")]
    UnitBusy(String, UnitPlace),
    /// The unit at this place was being added, and is not wanted any more.
    #[error(
        "the unit {1} of the export {0} was being added, and is given up; its place is free when \
         its disk is closed"
    )]
    UnitGivenUp(String, UnitPlace),
    /// The unit, or its export, was removed while its disk was being opened.
    #[error(
        "the unit {1} of the export {0} was not added: it or the export was removed before its \
         disk was open; add it again if it is wanted"
    )]
    UnitUnwanted(String, UnitPlace),
    /// Somebody else changes the disk.
    #[error("the disk of the export {0} is being resized; try again later")]
    DiskBusy(String),
    /// It was removed while its disk was being opened.
    #[error("the export {0} was removed before it was served; add it again if it is wanted")]
    Unwanted(String),
    /// The device has no unit at this place.
    #[error("the export {0} has no unit {1}; its units are listed with it")]
    UnknownUnit(String, UnitPlace),
    /// Another process takes the exports over, or was about to.
    #[error("another process is taking the exports over; try again when it has, or has failed")]
    HandingOver,
    /// This process has taken the exports over.
    #[error("process {0} has taken the exports over; connect again to ask that one")]
    HandedOver(u32),
    /// The exports are not those that were described.
    #[error("exports were added, changed or removed meanwhile; try again")]
    Changed,
    /// Queues have not stopped, so that no other process can go on with them.
    #[error("requests were not finished in time ({0}); try again when the disk answers")]
    NotPaused(String),
    /// A hand-over is not possible at this moment, for this reason.
    #[error("{0:#}")]
    NotNow(anyhow::Error),
    /// The program has not taken over, and may in a moment.
    #[error("{0}")]
    UpgradeLater(String),
    /// The program has not taken over, and would not do so later either.
    #[error("{0}")]
    UpgradeRefused(String),
    /// It was done, and the next start will not know.
    #[error("it is done, but a restart would undo it: {0:#}")]
    NotKept(anyhow::Error),
    /// No export is served by this name, and none will be tried at the next start.
    #[error(
        "the export {0} was not served; it is forgotten, and the next start does not try it again"
    )]
    Forgotten(String),
    /// Exports come and go no longer.
    #[error("the daemon is ending; start it again to ask for anything")]
    Ending,
    /// What was asked for makes no sense, whatever there is.
    #[error("{0:#}")]
    Wrong(anyhow::Error),
    /// What was asked for was tried, and failed.
    #[error("{0:#}")]
    Failed(anyhow::Error),
}

impl CommandError {
    /// True: a takeover that this refuses may succeed in a moment.
    pub(crate) fn is_of_the_moment(&self) -> bool {
        matches!(
            self,
            Self::Busy(..)
                | Self::UnitBusy(..)
                | Self::UnitGivenUp(..)
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
            Self::Wrong(error) | Self::Failed(error) | Self::NotNow(error) => error,
            other => other.into(),
        }
    }
}

impl From<anyhow::Error> for CommandError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

/// Refuses the name of a program without a folder: which one is meant would depend on the `PATH`
/// that the daemon happens to have.
///
/// # Errors
///
/// When it is one.
pub(crate) fn check_is_path(binary: &Path) -> Result<()> {
    if !binary.as_os_str().as_bytes().contains(&b'/') {
        bail!(
            "'{}' does not say in which folder the program to upgrade to is, and PATH is not \
             searched; give its path, such as /usr/bin/ringhaul",
            binary.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A caller tries an upgrade again that was refused for the moment, and no other one.
    #[test]
    fn what_may_succeed_in_a_moment_is_told_from_what_will_not() {
        use CommandError::*;
        let (vm, place) = (|| "vm".to_owned(), UnitPlace { target: 0, lun: 1 });
        let why = || anyhow::anyhow!("why");
        for (error, is_of_the_moment) in [
            (Busy(vm(), ExportState::Stopping), true),
            (UnitBusy(vm(), place), true),
            (UnitGivenUp(vm(), place), true),
            (DiskBusy(vm()), true),
            (HandingOver, true),
            (Changed, true),
            (NotPaused(vm()), true),
            (NotNow(why()), true),
            (HandedOver(1), false),
            (Unknown(vm()), false),
            (Ending, false),
            (Wrong(why()), false),
            (Failed(why()), false),
            (UpgradeRefused(vm()), false),
        ] {
            assert_eq!(error.is_of_the_moment(), is_of_the_moment, "{error}");
            let says = error.to_string().contains("try again");
            assert!(is_of_the_moment || !says, "{error}");
        }
    }

    #[test]
    fn commands_can_be_written_down() {
        let add = r#"{"add": [{"endpoint": {"path": "/a"}, "device": {"blk": {"file": "/b"}}}]}"#;
        for (text, is_good) in [
            (add, true),
            (r#"{"remove": {"export": "/a", "force": true}}"#, true),
            (r#""show""#, true),
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
