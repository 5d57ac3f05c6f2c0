//! What a daemon can be asked to do, and what it answers. All of it is data: signals and the
//! command line send it, and anything else can.

use device::{RequestCounts, RequestKind, RequestTotals};
use serde::{Deserialize, Serialize};

use crate::spec::{ExportSpec, UnitPlace, UnitSpec};

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
    /// Give the virtio-scsi device of the export of this name one more logical unit, of which its
    /// driver is told.
    AddUnit(String, Box<UnitSpec>),
    /// Take a logical unit away from a virtio-scsi device. Its driver is told, and the requests
    /// that the device has taken are finished.
    RemoveUnit(String, UnitPlace),
    /// Give a disk of an export another size, and tell the drivers: that of a logical unit or,
    /// without a place, that of a virtio-blk device.
    Resize(String, Option<UnitPlace>, NewSize),
    /// End all exports in the same way, and the daemon with them. Asked a second time, the daemon
    /// does not wait for requests any longer.
    End(EndCause),
}

/// How an export is to end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
}

impl EndCause {
    /// What the log calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sigterm => "SIGTERM",
            Self::Sigint => "SIGINT",
            Self::Sighup => "SIGHUP",
            Self::Control => "a request on the control socket",
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
    /// The logical unit is there.
    UnitAdded,
    /// The logical unit has gone.
    UnitRemoved,
    /// The disk has this size in bytes.
    Resized(u64),
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
    #[error("the export {0} is {1}")]
    Busy(String, ExportState),
    /// The export has not ended by the deadline, for this reason.
    #[error(
        "the export {0} has not ended: {1}; it goes on ending, and its name is free when a removal \
         without a deadline returns"
    )]
    NotEnded(String, String),
    /// The export is no virtio-scsi device.
    #[error("the export {0} is a virtio-blk device, which has no logical units; use device=scsi")]
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
    /// Somebody else changes the disk.
    #[error("the disk of the export {0} is being resized; try again later")]
    DiskBusy(String),
    /// The device has no unit at this place.
    #[error("the export {0} has no unit {1}; its units are listed with it")]
    UnknownUnit(String, UnitPlace),
    /// Another process takes the exports over, or was about to.
    #[error("another process is taking the exports over; try again when it has, or has failed")]
    HandingOver,
    /// The exports are not those that were described.
    #[error("exports were added, changed or removed meanwhile; try again")]
    Changed,
    /// Queues have not stopped, so that no other process can go on with them.
    #[error("requests were not finished in time ({0}); try again when the disk answers")]
    NotPaused(String),
    /// Exports come and go no longer.
    #[error("the daemon is ending")]
    Ending,
    /// What was asked for was tried, and failed.
    #[error("{0:#}")]
    Failed(anyhow::Error),
}

impl CommandError {
    /// The error with its causes.
    pub(crate) fn into_error(self) -> anyhow::Error {
        match self {
            Self::Failed(error) => error,
            other => other.into(),
        }
    }
}

impl From<anyhow::Error> for CommandError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

/// What an export is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExportState {
    /// Its disk is being opened.
    Opening,
    /// Front-ends can connect, or one is connected.
    Serving,
    /// It accepts no front-end, and finishes the requests of the last.
    Stopping,
}

impl std::fmt::Display for ExportState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Opening => "opening",
            Self::Serving => "serving",
            Self::Stopping => "stopping",
        })
    }
}

/// An export at some moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ExportStatus {
    /// What it was asked to be. It has a name.
    #[serde(flatten)]
    pub spec: ExportSpec,
    /// What it is at.
    pub state: ExportState,
    /// How large its disks are now, all together; 0 while they are being opened.
    pub size_bytes: u64,
    /// How its disks are doing: the worst of them.
    pub disk_state: DiskState,
    /// Whether a front-end is connected.
    pub connected: bool,
    /// How many front-ends have connected so far.
    pub sessions: u64,
    /// Requests that were taken and are not answered.
    pub unfinished: u32,
    /// Requests that were answered.
    pub served: Served,
    /// What keeps it from ending, while it is stopping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

impl ExportStatus {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> String {
        self.spec.name()
    }

    /// Of an export that is being opened.
    pub(crate) fn opening(spec: ExportSpec) -> Self {
        Self {
            spec: spec.named(),
            state: ExportState::Opening,
            size_bytes: 0,
            disk_state: DiskState::Ready,
            connected: false,
            sessions: 0,
            unfinished: 0,
            served: Served::default(),
            waits_for: None,
        }
    }
}

/// How a disk is doing, the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskState {
    /// It answers.
    Ready,
    /// It has not answered an operation for 5 seconds or more.
    Late,
    /// Data that was written may be lost, so flushes fail until it is opened anew.
    Lost,
}

impl From<blockio::disk::DiskState> for DiskState {
    fn from(state: blockio::disk::DiskState) -> Self {
        match state {
            blockio::disk::DiskState::Ready => Self::Ready,
            blockio::disk::DiskState::Late(_) => Self::Late,
            blockio::disk::DiskState::Lost => Self::Lost,
        }
    }
}

/// What a device has served.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "they are the kinds of requests")]
pub struct Served {
    pub reads: Counts,
    pub writes: Counts,
    pub flushes: Counts,
    pub discards: Counts,
    pub write_zeroes: Counts,
    pub others: Counts,
}

/// What was served of one kind.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Requests that were answered, those that failed included.
    pub requests: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// How many failed.
    pub errors: u64,
}

impl From<RequestCounts> for Counts {
    fn from(RequestCounts { requests, bytes, errors }: RequestCounts) -> Self {
        Self { requests, bytes, errors }
    }
}

impl From<&RequestTotals> for Served {
    fn from(totals: &RequestTotals) -> Self {
        let of = |kind| Counts::from(totals[kind]);
        Self {
            reads: of(RequestKind::Read),
            writes: of(RequestKind::Write),
            flushes: of(RequestKind::Flush),
            discards: of(RequestKind::Discard),
            write_zeroes: of(RequestKind::WriteZeroes),
            others: of(RequestKind::Other),
        }
    }
}

/// In one line.
impl std::fmt::Display for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = [
            (self.reads, "reads"),
            (self.writes, "writes"),
            (self.flushes, "flushes"),
            (self.discards, "discards"),
            (self.write_zeroes, "write-zeroes"),
            (self.others, "others"),
        ];
        let each = all.map(|(Counts { requests, bytes, .. }, name)| match bytes {
            0 => format!("{requests} {name}"),
            _ => format!("{requests} {name} of {} KiB", bytes >> 10),
        });
        write!(f, "requests: {}", each.join(", "))?;
        match all.iter().map(|(counts, _)| counts.errors).sum::<u64>() {
            0 => Ok(()),
            failed => write!(f, "; {failed} failed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn what_was_served_is_one_line() {
        let mut served = Served::default();
        let nothing =
            "requests: 0 reads, 0 writes, 0 flushes, 0 discards, 0 write-zeroes, 0 others";
        assert_eq!(served.to_string(), nothing);
        served.writes = Counts { requests: 3, bytes: 8 << 10, errors: 1 };
        served.others.errors = 1;
        let expected = nothing.replace("0 writes", "3 writes of 8 KiB") + "; 2 failed";
        assert_eq!(served.to_string(), expected);
    }
}
