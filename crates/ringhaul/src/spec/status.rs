//! The visible state of exports: the short form of all, and the details of one. All of it is data.

use device::{RequestCounts, RequestKind, RequestTotals};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vhost_user::SessionDetails;
pub use vhost_user::{QueueDetails, QueueRole, QueueState};

use crate::process::peer::Peer;
use crate::spec::qos::FullQosSpec;
use crate::spec::{ExportSpec, UnitPlace};

/// Options that share the memory of a guest.
pub const HOW_TO_SHARE_MEMORY: &str = "with QEMU, give it \
    `-object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem`; with \
    libvirt, `<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>`";

/// The state of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExportState {
    /// Its disk is being opened.
    Opening,
    /// Front-ends can connect, or one is connected.
    Serving,
    /// Front-ends are no longer accepted, and the requests of the last one are being finished.
    Stopping,
}

impl std::fmt::Display for ExportState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.serialize(f)
    }
}

/// An export at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ExportStatus {
    /// Its specification, with a name.
    #[serde(flatten)]
    pub spec: ExportSpec,
    /// The state of the export.
    pub state: ExportState,
    /// The size of its disks now, all together; 0 while they are being opened.
    pub size_bytes: u64,
    /// The state of its disks: the worst of them.
    pub disk_state: DiskState,
    /// True if a front-end is connected.
    pub connected: bool,
    /// True if the front-end has started a queue and shares no memory, so that the guest waits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lacks_memory: bool,
    /// The number of front-ends that have connected so far.
    pub sessions: u64,
    /// Requests that were accepted and are not answered.
    pub unfinished: u32,
    /// Requests that were answered.
    pub served: Served,
    /// The reason that it has not ended, while it is stopping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

impl ExportStatus {
    /// Its name.
    pub fn name(&self) -> String {
        self.spec.name()
    }

    /// The status of an export that is being opened.
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

/// The number of exports in each state, as a service manager shows it.
pub(crate) fn count_states(exports: &[ExportStatus]) -> String {
    let count = |is_so: &dyn Fn(&ExportStatus) -> bool| {
        exports.iter().filter(|export| is_so(export)).count()
    };
    let serving = count(&|export| export.state == ExportState::Serving);
    let mut text = format!(
        "{serving} {} served, {} with a front-end",
        if serving == 1 { "export" } else { "exports" },
        count(&|export| export.connected)
    );
    for (number, state) in [
        (count(&|export| export.state == ExportState::Opening), "being opened"),
        (count(&|export| export.state == ExportState::Stopping), "ending"),
    ] {
        if number > 0 {
            text += &format!(", {number} {state}");
        }
    }
    text
}

/// The condition of a disk, the worst last.
#[derive(
    Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum DiskState {
    /// The disk answers.
    #[default]
    Ready,
    /// Failed requests wait and are retried.
    Retried,
    /// The disk has no space left, and writes wait for some.
    Held,
    /// The server of the disk is unreachable: connecting is retried, and requests wait.
    Away,
    /// An operation has gone unanswered for 5 seconds or more.
    Late,
    /// Written data may be lost, so flushes fail until the disk is opened again.
    Lost,
}

impl DiskState {
    /// All states.
    pub(crate) const ALL: [Self; 6] =
        [Self::Ready, Self::Retried, Self::Held, Self::Away, Self::Late, Self::Lost];
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

/// The requests that a device has answered.
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

/// The answered requests of one kind.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Counts {
    /// Answered requests, failed ones included.
    pub requests: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Failed requests.
    pub errors: u64,
}

impl From<RequestCounts> for Counts {
    fn from(counts: RequestCounts) -> Self {
        Self { requests: counts.requests(), bytes: counts.bytes, errors: counts.errors() }
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

/// Formats all counts in one line.
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

/// An export at one moment, in detail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ExportDetails {
    /// The short form.
    #[serde(flatten)]
    pub status: ExportStatus,
    /// The connected front-end.
    pub front_end: Option<FrontEndDetails>,
    /// The disk, or the disks of the logical units.
    pub disks: Vec<DiskDetails>,
    /// Missing logical units, and the requests of an earlier process that wait for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_units: Vec<MissingUnit>,
}

/// A missing logical unit that requests wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct MissingUnit {
    /// The place of the unit.
    #[serde(flatten)]
    pub unit: UnitPlace,
    /// The number of requests that wait for it.
    pub waiting_requests: usize,
}

/// A connected front-end, with its session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct FrontEndDetails {
    /// Seconds since it connected.
    pub connected_seconds: u64,
    /// The process, if the kernel reports it.
    pub peer: Option<Peer>,
    /// True if a kill of the daemon does not disconnect it, because the service manager keeps its
    /// connection.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kept: bool,
    /// The state of the session.
    #[serde(flatten)]
    pub session: SessionDetails,
}

/// A disk and its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct DiskDetails {
    /// The place in a virtio-scsi device.
    #[serde(flatten)]
    pub place: Option<UnitPlace>,
    /// The size now.
    pub size_bytes: u64,
    /// The smallest unit of a request.
    pub logical_block_bytes: u32,
    /// True if the page cache is bypassed.
    pub direct: bool,
    /// True if writes are refused.
    pub read_only: bool,
    /// The condition of the disk.
    pub state: DiskState,
    /// The seconds for which it has not been ready, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_seconds: Option<u64>,
    /// The reason that failed requests wait, independent of `state`: `held` or `retried`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<DiskState>,
    /// A remark on the state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
    /// A warning for the owner about the content, such as the header of an image in a disk that is
    /// served without a format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// The number of failed requests that have waited so far.
    pub waited: u64,
    /// Limits and error policy.
    #[serde(flatten)]
    pub rules: FullQosSpec,
    /// The disk, followed by the layers below it.
    pub chain: Vec<String>,
    /// The numbers of its block device, or of the file system of its file, as `MAJOR:MINOR`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_number: Option<String>,
    /// The engine; none for a disk that needs no kernel.
    pub engine: Option<String>,
    /// The reason for the choice of the engine.
    pub engine_reason: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{DeviceSpec, EndpointSpec, ExportSettings};

    #[test]
    fn the_served_requests_are_one_line() {
        let mut served = Served::default();
        let nothing =
            "requests: 0 reads, 0 writes, 0 flushes, 0 discards, 0 write-zeroes, 0 others";
        assert_eq!(served.to_string(), nothing);
        served.writes = Counts { requests: 3, bytes: 8 << 10, errors: 1 };
        served.others.errors = 1;
        let expected = nothing.replace("0 writes", "3 writes of 8 KiB") + "; 2 failed";
        assert_eq!(served.to_string(), expected);
    }

    #[test]
    fn exports_are_counted_by_state() {
        let export = |state, connected| {
            let spec = ExportSpec {
                name: None,
                endpoint: EndpointSpec::Path("/a".into()),
                device: DeviceSpec::Scsi(Vec::new()),
                settings: ExportSettings::default(),
            };
            ExportStatus { state, connected, ..ExportStatus::opening(spec) }
        };
        use ExportState::{Opening, Serving, Stopping};
        for (exports, expected) in [
            (vec![], "0 exports served, 0 with a front-end"),
            (vec![export(Serving, true)], "1 export served, 1 with a front-end"),
            (
                vec![export(Serving, false), export(Serving, true), export(Opening, false)],
                "2 exports served, 1 with a front-end, 1 being opened",
            ),
            (vec![export(Stopping, true)], "0 exports served, 1 with a front-end, 1 ending"),
        ] {
            assert_eq!(count_states(&exports), expected);
        }
    }
}
