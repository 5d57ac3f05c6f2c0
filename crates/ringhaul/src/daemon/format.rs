//! The messages between the two processes of a takeover.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::control::hand_over_state::{ExportProgress, HandedExport, HandedOpening};
use crate::socket::EndpointState;
use crate::spec::ExportSpec;
use crate::spec::settings::SettingsChange;
use crate::spec::stats::LoopStats;

/// The format in which this version describes itself. Raise it whenever the stored sample is no
/// longer understood, or written in another way, and store a new sample. Versions that do not fit
/// are then refused before any queue stops.
pub(crate) const FORMAT: u32 = 9;
/// The format that lacks only the stashes of front-ends.
pub(crate) const WITHOUT_STASHES: u32 = 8;
/// The format that lacks the counters beside the totals of requests besides.
const WITHOUT_COUNTERS: u32 = 7;
/// The format that lacks the reasons for engines besides.
const WITHOUT_ENGINE_REASONS: u32 = 6;
/// The format that lacks the totals of requests besides.
const WITHOUT_TOTALS: u32 = 5;
/// The formats that this version understands and writes, the best one first.
pub(crate) const FORMATS: [u32; 5] =
    [FORMAT, WITHOUT_STASHES, WITHOUT_COUNTERS, WITHOUT_ENGINE_REASONS, WITHOUT_TOTALS];

/// The method that begins a takeover.
pub(crate) const BEGIN: &str = "takeover";
pub(crate) const PAUSE: &str = "takeover.pause";
pub(crate) const TAKE: &str = "takeover.take";
pub(crate) const GIVE_UP: &str = "takeover.give-up";

/// The first message of the new process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Begin {
    /// Formats that the new process understands.
    pub(crate) formats: Vec<u32>,
    /// Versions of inflight regions that the new process can continue.
    #[serde(default)]
    pub(crate) inflight_versions: Vec<u16>,
    /// The version of the program, for the log.
    pub(crate) version: String,
    /// True if the new process takes passed sockets that no export has.
    #[serde(default)]
    pub(crate) takes_sockets: bool,
    /// True if the new process can tell the service manager to forget a stash.
    #[serde(default)]
    pub(crate) takes_stashes: bool,
}

/// A listening socket of a service manager that no export has.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct HandedSocket {
    pub(crate) name: String,
    pub(crate) socket: EndpointState,
}

/// The old process and its exports.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Description {
    pub(crate) version: String,
    pub(crate) process: u32,
    #[serde(rename = "life")]
    pub(crate) options: ProcessOptions,
    pub(crate) control: Option<EndpointState>,
    pub(crate) exports: Vec<HandedExport>,
    pub(crate) opening: Vec<HandedOpening>,
    /// Only for a process that takes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sockets: Vec<HandedSocket>,
}

impl Description {
    /// Leaves out the parts that a process of this format does not understand.
    pub(crate) fn for_format(mut self, format: u32) -> Self {
        if format <= WITHOUT_ENGINE_REASONS {
            self.exports.iter_mut().for_each(HandedExport::forget_engine_reasons);
        }
        self
    }
}

/// The start of a process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct ProcessOptions {
    /// The working directory, at which relative paths begin.
    pub(crate) directory: PathBuf,
    /// Arguments of `ringhaul serve`.
    pub(crate) arguments: Vec<String>,
    /// The settings that have changed since the start.
    pub(crate) changes: SettingsChange,
}

/// The state of the old process while its queues do not run.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct PausedState {
    /// The time at which the first queue was told to stop, in nanoseconds of CLOCK_MONOTONIC.
    pub(crate) since_ns: u64,
    /// The settings that have changed since the start, perhaps after the description.
    pub(crate) changes: SettingsChange,
    /// The exports as the configuration file has made them, if there is one.
    pub(crate) of_file: Option<Vec<ExportSpec>>,
    pub(crate) exports: Vec<ExportProgress>,
    /// The start of the counters, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) start_time: Option<u64>,
    /// Takeovers that have failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failed_takeovers: Option<u64>,
    /// The counters of the IoThreads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) iothreads: Vec<LoopStats>,
    /// The debts of groups' limits, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) debts: BTreeMap<String, Vec<u64>>,
}

impl PausedState {
    /// Leaves out the stored descriptors, which this process has the service manager forget.
    pub(crate) fn forget_stashes(&mut self) {
        self.exports.iter_mut().for_each(ExportProgress::forget_stash);
    }

    /// Leaves out the parts that a process of this format does not understand.
    pub(crate) fn for_format(mut self, format: u32) -> Self {
        if format <= WITHOUT_STASHES {
            self.forget_stashes();
        }
        if format <= WITHOUT_COUNTERS {
            (self.failed_takeovers, self.iothreads) = (None, Vec::new());
            self.exports.iter_mut().for_each(ExportProgress::forget_counters);
        }
        if format <= WITHOUT_TOTALS {
            self.start_time = None;
            self.exports.iter_mut().for_each(ExportProgress::forget_totals);
        }
        self
    }
}

/// The best of these formats that this version understands and writes.
pub(crate) fn common_format(formats: &[u32]) -> Option<u32> {
    FORMATS.into_iter().find(|format| formats.contains(format))
}

/// A line of the new process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Request {
    pub(crate) jsonrpc: String,
    #[serde(default)]
    pub(crate) id: Value,
    pub(crate) method: String,
    #[serde(default)]
    pub(crate) params: Value,
}

/// The content of an answer, and the names of the descriptors that follow it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Answer<T> {
    pub(crate) says: T,
    pub(crate) descriptors: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = include_str!("format/sample.json");
    /// The samples of earlier formats.
    const SAMPLE_8: &str = include_str!("format/sample-8.json");
    const SAMPLE_7: &str = include_str!("format/sample-7.json");
    const SAMPLE_6: &str = include_str!("format/sample-6.json");
    const SAMPLE_5: &str = include_str!("format/sample-5.json");
    const SAMPLES: [(&str, u32); 5] = [
        (SAMPLE, FORMAT),
        (SAMPLE_8, WITHOUT_STASHES),
        (SAMPLE_7, WITHOUT_COUNTERS),
        (SAMPLE_6, WITHOUT_ENGINE_REASONS),
        (SAMPLE_5, WITHOUT_TOTALS),
    ];

    fn parsed<T: for<'a> Deserialize<'a>>(sample: &str, part: &str) -> (T, Value) {
        let sample: Value = serde_json::from_str(sample).unwrap();
        (serde_json::from_value(sample[part].clone()).unwrap(), sample[part].clone())
    }

    /// A failure means that another version would not understand this one: raise [`FORMAT`].
    #[test]
    fn the_formats_match_the_stored_samples() {
        for (sample, format) in SAMPLES {
            let (description, stored): (Description, _) = parsed(sample, "description");
            assert_eq!(serde_json::to_value(description).unwrap(), stored, "format {format}");
            let (paused_state, stored): (PausedState, _) = parsed(sample, "standstill");
            assert_eq!(serde_json::to_value(paused_state).unwrap(), stored, "format {format}");
        }
        assert_eq!(FORMAT, 9, "the sample is of this format");
    }

    #[test]
    fn a_process_of_an_earlier_format_receives_only_the_parts_that_it_knows() {
        for (older, format) in SAMPLES {
            let (description, _): (Description, Value) = parsed(SAMPLE, "description");
            let (_, stored): (Description, Value) = parsed(older, "description");
            let written = serde_json::to_value(description.for_format(format)).unwrap();
            assert_eq!(written, stored, "format {format}");
            let (paused_state, _): (PausedState, Value) = parsed(SAMPLE, "standstill");
            let (_, stored): (PausedState, Value) = parsed(older, "standstill");
            let written = serde_json::to_value(paused_state.for_format(format)).unwrap();
            assert_eq!(written, stored, "format {format}");
        }
        for (formats, common) in [
            (&[9, 8, 7, 6, 5][..], Some(9)),
            (&[8, 7, 6, 5], Some(8)),
            (&[7, 6, 5], Some(7)),
            (&[6, 5], Some(6)),
            (&[5], Some(5)),
            (&[10, 9], Some(9)),
            (&[4], None),
            (&[10], None),
        ] {
            assert_eq!(common_format(formats), common, "{formats:?}");
        }
    }
}
