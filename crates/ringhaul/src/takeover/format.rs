//! What the two processes of a takeover say to each other.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::control::handed::{ExportProgress, HandedExport, HandedOpening};
use crate::export::EndpointState;
use crate::settings::SettingsChange;
use crate::spec::ExportSpec;

/// The format in which this version describes itself. Raise it whenever the stored sample is not
/// understood any more, or written in another way, and store another: versions that do not fit are
/// then refused before anything stops.
pub(super) const FORMAT: u32 = 4;
/// The formats that it understands.
pub(super) const FORMATS: [u32; 1] = [FORMAT];

/// The method that begins a takeover.
pub(super) const BEGIN: &str = "takeover";
pub(super) const PAUSE: &str = "takeover.pause";
pub(super) const TAKE: &str = "takeover.take";
pub(super) const GIVE_UP: &str = "takeover.give-up";

/// What the new process says first.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Begin {
    /// Formats that it understands.
    pub(super) formats: Vec<u32>,
    /// Versions of inflight regions that it goes on with.
    #[serde(default)]
    pub(super) inflight_versions: Vec<u16>,
    /// Of the program, for the log.
    pub(super) version: String,
}

/// What the old process is, and serves.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Description {
    pub(super) version: String,
    pub(super) process: u32,
    pub(super) life: Life,
    pub(super) control: Option<EndpointState>,
    pub(super) exports: Vec<HandedExport>,
    pub(super) opening: Vec<HandedOpening>,
}

/// How a process was started.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Life {
    /// Relative paths begin here.
    pub(crate) directory: PathBuf,
    /// Of `ringhaul serve`.
    pub(crate) arguments: Vec<String>,
    /// What was set since the start.
    pub(crate) changes: SettingsChange,
}

/// How far the old process has come.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Standstill {
    /// When the first queue was told to stop, in nanoseconds of CLOCK_MONOTONIC.
    pub(super) since_ns: u64,
    /// What was set since the start: more than when the old process described itself, maybe.
    pub(super) changes: SettingsChange,
    /// The exports of the configuration file as they are served by it, if there is one.
    pub(super) of_file: Option<Vec<ExportSpec>>,
    pub(super) exports: Vec<ExportProgress>,
}

/// A line of the new process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request {
    pub(super) jsonrpc: String,
    #[serde(default)]
    pub(super) id: Value,
    pub(super) method: String,
    #[serde(default)]
    pub(super) params: Value,
}

/// What comes with an answer: the names of its descriptors, which follow it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Answer<T> {
    pub(super) says: T,
    pub(super) descriptors: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A failure means that another version would not understand this one: raise [`FORMAT`].
    #[test]
    fn the_format_is_that_of_the_stored_sample() {
        let sample: Value = serde_json::from_str(include_str!("format/sample.json")).unwrap();
        let description: Description =
            serde_json::from_value(sample["description"].clone()).unwrap();
        assert_eq!(serde_json::to_value(description).unwrap(), sample["description"]);
        let standstill: Standstill = serde_json::from_value(sample["standstill"].clone()).unwrap();
        assert_eq!(serde_json::to_value(standstill).unwrap(), sample["standstill"]);
        assert_eq!(FORMAT, 4, "the sample is of this format");
    }
}
