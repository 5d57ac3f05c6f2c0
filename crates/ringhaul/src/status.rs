//! What can be seen of exports: in short, and of one in all detail. All of it is data.

use device::{RequestCounts, RequestKind, RequestTotals};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::disk_rules::ShownRules;
use crate::peer::Peer;
use crate::spec::{ExportSpec, UnitPlace};

/// What an export is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
    /// The front-end has started a queue and shares no memory, so that the guest waits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lacks_memory: bool,
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
            lacks_memory: false,
            sessions: 0,
            unfinished: 0,
            served: Served::default(),
            waits_for: None,
        }
    }
}

/// How a disk is doing, the worst last.
#[derive(
    Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum DiskState {
    /// It answers.
    #[default]
    Ready,
    /// Requests that it has failed are tried again, and wait.
    Retried,
    /// It has no space left, and writes wait for some.
    Held,
    /// Its other end is not reached: it is tried again, and requests wait.
    Away,
    /// It has not answered an operation for 5 seconds or more.
    Late,
    /// Data that was written may be lost, so flushes fail until it is opened anew.
    Lost,
}

impl From<blockio::disk::DiskState> for DiskState {
    fn from(state: blockio::disk::DiskState) -> Self {
        match state {
            blockio::disk::DiskState::Ready => Self::Ready,
            blockio::disk::DiskState::Retried(_) => Self::Retried,
            blockio::disk::DiskState::Held(_) => Self::Held,
            blockio::disk::DiskState::Away(_) => Self::Away,
            blockio::disk::DiskState::Late(_) => Self::Late,
            blockio::disk::DiskState::Lost => Self::Lost,
        }
    }
}

/// What a device has served.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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

/// An export at some moment, in all detail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ExportDetails {
    /// What is listed of it.
    #[serde(flatten)]
    pub status: ExportStatus,
    /// The front-end that is connected.
    pub front_end: Option<FrontEndDetails>,
    /// The disk, or those of the logical units.
    pub disks: Vec<DiskDetails>,
    /// Logical units that are not there, and requests of an earlier process that wait for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_units: Vec<MissingUnit>,
}

/// A logical unit that is not there, and is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct MissingUnit {
    /// The place of the unit.
    #[serde(flatten)]
    pub unit: UnitPlace,
    /// The number of requests that wait for it.
    pub waiting_requests: usize,
}

/// A front-end that is connected, and what it has set up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct FrontEndDetails {
    /// For how many seconds it has been connected.
    pub connected_seconds: u64,
    /// The process, unless the kernel does not say.
    pub peer: Option<Peer>,
    /// What it has set up.
    #[serde(flatten)]
    pub session: SessionDetails,
}

/// What a front-end has set up.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct SessionDetails {
    /// The features that were negotiated, by the specification's names without their prefixes, or
    /// `bit-N`.
    pub features: Vec<String>,
    /// The same of the vhost-user protocol.
    pub protocol_features: Vec<String>,
    /// The queues that it has set up.
    pub queues: Vec<QueueDetails>,
    /// The memory that it shares.
    pub memory: MemoryDetails,
}

/// One queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct QueueDetails {
    /// Its number.
    pub index: u16,
    /// What it is for.
    pub role: QueueRole,
    /// How many entries it has.
    pub size: u16,
    /// Whether it is served.
    pub state: QueueState,
    /// The avail entry that is taken next, as of its last run; none while that is not known.
    pub next_avail: Option<u16>,
    /// Requests that the device has taken and not answered, as of its last run.
    pub requests: u32,
}

/// What a queue is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "they are those of the device")]
pub enum QueueRole {
    Request,
    Control,
    Event,
}

impl From<device::QueueRole> for QueueRole {
    fn from(role: device::QueueRole) -> Self {
        match role {
            device::QueueRole::Request => Self::Request,
            device::QueueRole::Control => Self::Control,
            device::QueueRole::Event => Self::Event,
        }
    }
}

/// Whether a queue is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum QueueState {
    /// It is not.
    Stopped,
    /// It is about to be.
    Starting,
    /// It is.
    Running,
    /// It finishes what it has taken.
    Stopping,
}

/// The memory that a front-end shares.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct MemoryDetails {
    /// How many regions.
    pub regions: u32,
    /// How many bytes all together.
    pub bytes: u64,
}

/// One disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct DiskDetails {
    /// Where it is in a virtio-scsi device.
    #[serde(flatten)]
    pub place: Option<UnitPlace>,
    /// How large it is now.
    pub size_bytes: u64,
    /// The smallest unit of a request.
    pub logical_block_bytes: u32,
    /// Whether the page cache is bypassed.
    pub direct: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// How it is doing.
    pub state: DiskState,
    /// Since when it is not ready, in seconds, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_seconds: Option<u64>,
    /// Why requests wait that it has failed, whatever its state is besides: `held` or `retried`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<DiskState>,
    /// What else there is to say about its state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
    /// Something about its content that its owner should know, such as the header of an image in a
    /// disk that is served without a format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// How many requests have waited so far because it had failed them.
    pub waited: u64,
    /// What it may do, and what becomes of requests that it fails.
    #[serde(flatten)]
    pub rules: ShownRules,
    /// What it is made of: itself first, then what it lies on.
    pub chain: Vec<String>,
    /// How its operations reach the kernel; none for a disk that needs no kernel.
    pub engine: Option<String>,
    /// Why it is that engine.
    pub engine_reason: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

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
