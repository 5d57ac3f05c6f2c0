//! What an export is to be. It is data: the command line makes it, and anything else can.

use std::path::PathBuf;

use clap::ValueEnum;
use device::blk::config::QUEUES_MAX;
use serde::{Deserialize, Serialize};

/// What one export is to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ExportSpec {
    /// Where front-ends come from.
    pub endpoint: EndpointSpec,
    /// What is exported.
    pub disk: DiskSpec,
    /// How.
    #[serde(flatten)]
    pub settings: ExportSettings,
}

impl ExportSpec {
    /// Names the export among all of a daemon: no two are at one place.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.endpoint {
            EndpointSpec::Path(path) => path.display().to_string(),
            EndpointSpec::Fd(fd) => format!("descriptor {fd}"),
        }
    }
}

/// Where front-ends come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndpointSpec {
    /// A socket to be made at this path.
    Path(PathBuf),
    /// A descriptor that was inherited.
    Fd(i32),
}

/// A disk by its kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskSpec {
    /// A regular file or a block device.
    File(PathBuf),
    /// A disk that answers at once and keeps nothing.
    Null {
        /// Its size.
        size_bytes: u64,
    },
}

/// How a disk is exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ExportSettings {
    /// Writes are refused.
    pub read_only: bool,
    /// The disk is not locked.
    pub no_lock: bool,
    /// `None`: direct I/O where the file system has it.
    pub cache: Option<CacheMode>,
    /// What the guest sees, up to 20 bytes. `None`: what follows from what the disk is.
    pub serial: Option<String>,
    /// The smallest unit of a request. `None`: as the disk has it.
    pub logical_block_bytes: Option<u32>,
    /// The most queues that a front-end may use.
    pub num_queues: u16,
    /// Entries of a queue, for the limit on segments.
    pub queue_size: u16,
    /// The one IoThread that serves all its queues; `None`: they are spread.
    pub iothread: Option<u16>,
    /// Off is for measurement: then each completed request has its own notify.
    pub notify_batch: bool,
    /// The guest's memory is registered with io_uring.
    pub fixed_buffers: bool,
}

impl Default for ExportSettings {
    fn default() -> Self {
        Self {
            read_only: false,
            no_lock: false,
            cache: None,
            serial: None,
            logical_block_bytes: None,
            num_queues: QUEUES_MAX,
            queue_size: 128,
            iothread: None,
            notify_batch: true,
            fixed_buffers: false,
        }
    }
}

/// What stands between the guest and the disk, in QEMU's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Direct I/O; the guest flushes the disk's own write cache.
    None,
    /// Direct I/O; every write is on stable storage when it is answered.
    Directsync,
    /// The page cache; the guest flushes it.
    Writeback,
    /// The page cache; every write is on stable storage when it is answered.
    Writethrough,
}

impl CacheMode {
    pub(crate) fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    pub(crate) fn has_write_cache(self) -> bool {
        matches!(self, Self::None | Self::Writeback)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_can_be_written_down_and_read_with_what_is_usual_left_out() {
        let text = r#"{"endpoint": {"path": "/a.sock"}, "disk": {"null": {"size_bytes": 512}},
                       "cache": "directsync"}"#;
        let spec: ExportSpec = serde_json::from_str(text).unwrap();
        let settings =
            ExportSettings { cache: Some(CacheMode::Directsync), ..ExportSettings::default() };
        assert_eq!((spec.name(), &spec.settings), ("/a.sock".to_owned(), &settings));
        let again = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<ExportSpec>(&again).unwrap(), spec);
        assert!(serde_json::from_str::<ExportSpec>(r#"{"endpoint": {"fd": 3}}"#).is_err());
    }
}
