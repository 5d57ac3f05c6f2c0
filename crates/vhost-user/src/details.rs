//! The visible state of a front-end's session. All of it is data.

use serde::{Deserialize, Serialize};

/// The state of a front-end's session.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct SessionDetails {
    /// The negotiated features, by the specification's names without their prefixes, or `bit-N`.
    pub features: Vec<String>,
    /// The negotiated features of the vhost-user protocol, named in the same way.
    pub protocol_features: Vec<String>,
    /// The queues that the front-end has set up.
    pub queues: Vec<QueueDetails>,
    /// The memory that the front-end shares.
    pub memory: MemoryDetails,
}

/// A queue and its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct QueueDetails {
    /// Its number.
    pub index: u16,
    /// The role of the queue.
    pub role: QueueRole,
    /// The number of entries.
    pub size: u16,
    /// The state of the queue.
    pub state: QueueState,
    /// The avail entry that is taken next, as of its last run; none while that is unknown.
    pub next_avail: Option<u16>,
    /// Requests that the device has taken and not answered, as of its last run.
    pub requests: u32,
}

/// The role of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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

/// The state of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum QueueState {
    /// Not served.
    Stopped,
    /// About to be served.
    Starting,
    /// Served.
    Running,
    /// Finishing the requests that it has taken.
    Stopping,
}

/// The memory that a front-end shares.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct MemoryDetails {
    /// The number of regions.
    pub regions: u32,
    /// The bytes of all regions together.
    pub bytes: u64,
}
