//! The specification of an export, as plain data that the command line or another program makes.

pub mod command;
mod earlier_counters;
pub(crate) mod file_record;
pub(crate) mod lease_id;
pub(crate) mod parser_words;
pub mod process;
pub mod qos;
pub(crate) mod rules;
pub mod settings;
pub mod stats;
pub mod status;
pub mod switches;
mod unit;
pub(crate) mod values;

use std::num::NonZeroU16;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use blockio::{DiskOptions, DiskSource};
use device::blk::config::{QUEUES_MAX, SERIAL_BYTES};
use device::scsi::config::REQUEST_QUEUES_MAX;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use file_record::FileRecord;
use qos::{LimitSpec, OnError, QosChange, QosSpec};
use switches::RUN_MAX;

pub use disks::DiskSpec;
pub(crate) use unit::check_apart;
pub use unit::{LikeDisk, StopRule, UnitNames, UnitPlace, UnitSettings, UnitSpec};
pub(crate) use values::check_text;
pub use values::{CacheMode, Wwn};

/// The longest name of an export.
const NAME_CHARACTERS: usize = 100;

/// The specification of one export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", from = "WrittenExport")]
pub struct ExportSpec {
    /// The name in commands, up to 100 characters. `None`: the path of its socket.
    pub name: Option<String>,
    /// The socket for front-ends.
    pub endpoint: EndpointSpec,
    /// The device and its disks.
    pub device: DeviceSpec,
    /// Settings of the device and of its disks.
    #[serde(flatten)]
    pub settings: ExportSettings,
}

impl ExportSpec {
    /// The name of the export, unique within a daemon.
    pub fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.endpoint.to_string())
    }

    /// A copy with the name filled in.
    pub fn named(&self) -> Self {
        Self { name: Some(self.name()), ..self.clone() }
    }

    /// Returns true if `text` is its name or the path of its socket, either of which commands
    /// accept.
    pub(crate) fn is_called(&self, text: &str) -> bool {
        self.name.as_deref() == Some(text) || self.endpoint.to_string() == text
    }

    /// Describes the export in one line.
    pub(crate) fn summary(&self) -> String {
        let device = match &self.device {
            DeviceSpec::Blk(disk) => format!("virtio-blk, {disk}"),
            DeviceSpec::Scsi(units) if units.is_empty() => "virtio-scsi without units".to_owned(),
            DeviceSpec::Scsi(units) => {
                let unit = |unit: &UnitSpec| format!("{} {}", unit.place(), unit.disk);
                let units: Vec<String> = units.iter().map(unit).collect();
                format!("virtio-scsi, {}", units.join(", "))
            }
        };
        let read_only = if self.settings.read_only { ", read-only" } else { "" };
        let at = self.name.as_ref().map(|_| format!(" on {}", self.endpoint)).unwrap_or_default();
        format!("{}{at}: {device}{read_only}", self.name())
    }

    /// Returns the name or the socket that both exports use, which no two exports may.
    pub(crate) fn clashes_with(&self, other: &Self) -> Option<String> {
        let own = [self.name(), self.endpoint.to_string()];
        own.into_iter().find(|name| other.is_called(name))
    }

    /// Checks the values beyond their types, for a daemon with this many IoThreads.
    ///
    /// # Errors
    ///
    /// When a setting is out of its range.
    pub(crate) fn check(&self, iothreads: u16) -> Result<()> {
        self.check_names_and_sizes()?;
        if let DeviceSpec::Scsi(units) = &self.device {
            check_apart(units)?;
            units.iter().try_for_each(|unit| unit.check(&self.settings.rules))?;
            if self.settings.in_order {
                bail!(
                    "in-order is for virtio-blk devices only; leave it out, and use a front-end \
                     that keeps an inflight region"
                );
            }
            if self.settings.num_queues > Some(REQUEST_QUEUES_MAX) {
                bail!(
                    "a virtio-scsi device has at most {REQUEST_QUEUES_MAX} request queues; lower \
                     the number of queues"
                );
            }
        }
        self.settings.check(iothreads)
    }
}

/// An export in its written form; a key that is left out has its default. All keys are side by
/// side, so that a reader of a file can report the place of a wrong one.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct WrittenExport {
    /// The name in commands, up to 100 characters; the path of its socket if it is left out.
    name: Option<String>,
    /// The socket for front-ends.
    endpoint: EndpointSpec,
    /// The device and its disks.
    device: DeviceSpec,
    /// Refuse writes.
    read_only: Option<bool>,
    /// Do not lock the disk.
    no_lock: Option<bool>,
    /// Lock the disk only while queues of the guest run.
    late_lock: Option<bool>,
    /// Answer requests of virtio-blk in order where there is no inflight region.
    in_order: Option<bool>,
    /// The cache mode; direct I/O where the file system has it if it is left out.
    cache: Option<CacheMode>,
    /// The serial number, up to 20 bytes; derived from the identity of the disk if it is left out.
    serial: Option<String>,
    /// The smallest unit of a request, a power of two from 512 to 65,536.
    logical_block_bytes: Option<u32>,
    /// The most queues that a front-end may use, 1 to 256.
    num_queues: Option<u16>,
    /// Entries of a queue, for the limit on segments: a power of two from 4 to 1024.
    queue_size: Option<u16>,
    /// The one IoThread that serves all its queues, from 0; they are spread if it is left out.
    iothread: Option<u16>,
    /// For measurement: off checks for each request if the driver wants a call.
    notify_batch: Option<bool>,
    /// For measurement: off lets the processor fetch each request only when it is read.
    prefetch: Option<bool>,
    /// For measurement: the most chains that a queue takes in one go, 1 to 1024.
    run_max: Option<NonZeroU16>,
    /// Register the guest's memory with io_uring.
    fixed_buffers: Option<bool>,
    /// The limits of each disk.
    limits: Option<LimitSpec>,
    /// The handling of reads that a disk fails; `report` if it is left out.
    rerror: Option<OnError>,
    /// The handling of writes, discards and zeroes that a disk fails; `hold-briefly` if it is left
    /// out.
    werror: Option<OnError>,
    /// The files that a member of the group has named; no other file is opened for the disk.
    files: Option<Vec<FileRecord>>,
}

impl WrittenExport {
    /// Fills in `usual` for the keys that are left out.
    pub(crate) fn with_defaults(self, usual: &ExportSettings) -> ExportSpec {
        let settings = ExportSettings {
            read_only: self.read_only.unwrap_or(usual.read_only),
            no_lock: self.no_lock.unwrap_or(usual.no_lock),
            late_lock: self.late_lock.unwrap_or(usual.late_lock),
            in_order: self.in_order.unwrap_or(usual.in_order),
            cache: self.cache.or(usual.cache),
            serial: self.serial.or_else(|| usual.serial.clone()),
            logical_block_bytes: self.logical_block_bytes.or(usual.logical_block_bytes),
            num_queues: self.num_queues.or(usual.num_queues),
            queue_size: self.queue_size.unwrap_or(usual.queue_size),
            iothread: self.iothread.or(usual.iothread),
            notify_batch: self.notify_batch.unwrap_or(usual.notify_batch),
            prefetch: self.prefetch.unwrap_or(usual.prefetch),
            run_max: self.run_max.or(usual.run_max),
            fixed_buffers: self.fixed_buffers.unwrap_or(usual.fixed_buffers),
            rules: usual.rules.with_change(&QosChange {
                limits: self.limits,
                rerror: self.rerror,
                werror: self.werror,
            }),
            files: self.files.or_else(|| usual.files.clone()),
        };
        let Self { name, endpoint, device, .. } = self;
        ExportSpec { name, endpoint, device, settings }
    }
}

impl From<WrittenExport> for ExportSpec {
    fn from(written: WrittenExport) -> Self {
        written.with_defaults(&ExportSettings::default())
    }
}

/// The socket for front-ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EndpointSpec {
    /// The path of a socket to create.
    Path(PathBuf),
    /// An inherited descriptor.
    Fd(i32),
}

impl std::fmt::Display for EndpointSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Fd(fd) => write!(f, "descriptor {fd}"),
        }
    }
}

/// A device by its kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceSpec {
    /// virtio-blk on one disk.
    Blk(DiskSpec),
    /// virtio-scsi with these logical units.
    Scsi(Vec<UnitSpec>),
}

impl DeviceSpec {
    /// The places of its disks, in order. `None`: the disk of a virtio-blk device.
    pub(crate) fn places(&self) -> Vec<Option<UnitPlace>> {
        match self {
            Self::Blk(_) => vec![None],
            Self::Scsi(units) => units.iter().map(|unit| Some(unit.place())).collect(),
        }
    }
}

/// Settings with which a disk is exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ExportSettings {
    /// Writes are refused.
    pub read_only: bool,
    /// The disk is not locked.
    pub no_lock: bool,
    /// The disk is locked only while queues of the guest run.
    #[serde(skip_serializing_if = "is_off")]
    pub late_lock: bool,
    /// Requests of virtio-blk are answered in order, without an inflight region.
    pub in_order: bool,
    /// `None`: direct I/O where the file system has it.
    pub cache: Option<CacheMode>,
    /// The serial number, up to 20 bytes. `None`: derived from the identity of the disk.
    pub serial: Option<String>,
    /// The smallest unit of a request. `None`: the unit of the disk.
    pub logical_block_bytes: Option<u32>,
    /// The most queues that a front-end may use; for virtio-scsi the most request queues. `None`:
    /// as many as the device can have.
    pub num_queues: Option<u16>,
    /// Entries of a queue, for the limit on segments.
    pub queue_size: u16,
    /// The one IoThread that serves all its queues; `None`: they are spread.
    pub iothread: Option<u16>,
    /// For measurement: off checks for each request if the driver wants a call.
    pub notify_batch: bool,
    /// For measurement: off lets the processor fetch each request only when it is read.
    pub prefetch: bool,
    /// For measurement: see [`run_max`](device::QueueTuning::run_max).
    pub run_max: Option<NonZeroU16>,
    /// The guest's memory is registered with io_uring.
    pub fixed_buffers: bool,
    /// Limits and error policy of the disks.
    #[serde(flatten)]
    pub rules: QosSpec,
    /// The files that a member of the `--control-group` has named. `None`: root or the user of the
    /// daemon has named them, and the disk may open each file that it names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<FileRecord>>,
}

impl ExportSettings {
    /// True if the disk is opened without a lock.
    pub(crate) fn opens_unlocked(&self) -> bool {
        self.no_lock || self.late_lock
    }
}

impl Default for ExportSettings {
    fn default() -> Self {
        Self {
            read_only: false,
            no_lock: false,
            late_lock: false,
            in_order: false,
            cache: None,
            serial: None,
            logical_block_bytes: None,
            num_queues: None,
            queue_size: 128,
            iothread: None,
            notify_batch: true,
            prefetch: true,
            run_max: None,
            fixed_buffers: false,
            rules: QosSpec::default(),
            files: None,
        }
    }
}

impl ExportSettings {
    /// Checks the values beyond their types, for a daemon with this many IoThreads.
    ///
    /// # Errors
    ///
    /// When a setting is out of its range.
    pub(crate) fn check(&self, iothreads: u16) -> Result<()> {
        if let Some(serial) = &self.serial {
            check_text(serial, SERIAL_BYTES).context("the serial number")?;
        }
        let (queues, most) = (self.num_queues.unwrap_or(1), QUEUES_MAX);
        ensure!((1..=most).contains(&queues), "the number of queues must be 1 to {most}");
        check_queue_size(self.queue_size).context("the queue size")?;
        ensure!(self.run_max.is_none_or(|max| max <= RUN_MAX), "run-max must be 1 to {RUN_MAX}");
        self.rules.check()?;
        ensure!(
            !(self.no_lock && self.late_lock),
            "no-lock and late-lock exclude each other; choose one"
        );
        match self.iothread {
            Some(iothread) if iothread >= iothreads && iothreads == 1 => {
                bail!("IoThread {iothread} does not exist; with --iothreads 1 there is only 0")
            }
            Some(iothread) if iothread >= iothreads => bail!(
                "IoThread {iothread} does not exist; with --iothreads {iothreads} the IoThreads \
                 are 0 to {}",
                iothreads - 1
            ),
            _ => Ok(()),
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_off(flag: &bool) -> bool {
    !flag
}

/// Checks the name of an export.
pub(crate) fn check_name(name: &str) -> Result<()> {
    if !(1..=NAME_CHARACTERS).contains(&name.chars().count()) || name.contains(char::is_control) {
        bail!("it must have 1 to {NAME_CHARACTERS} characters, without control characters");
    }
    Ok(())
}

/// Checks the number of entries of a queue.
pub(crate) fn check_queue_size(size: u16) -> Result<()> {
    if !(size.is_power_of_two() && (4..=1024).contains(&size)) {
        bail!("it must be a power of two from 4 to 1024");
    }
    Ok(())
}

impl ExportSpec {
    /// Checks the name and the socket of the export, the logical blocks of all disks, and the sizes
    /// of null disks.
    ///
    /// # Errors
    ///
    /// When one is invalid.
    fn check_names_and_sizes(&self) -> Result<()> {
        if let Some(name) = &self.name {
            check_name(name).context("the name of an export")?;
        }
        if matches!(&self.endpoint, EndpointSpec::Path(path) if path.as_os_str().is_empty()) {
            bail!("the path of its socket is empty; give the path of a new socket");
        }
        let usual = self.settings.logical_block_bytes;
        let units = match &self.device {
            DeviceSpec::Blk(disk) => return check(disk, usual),
            DeviceSpec::Scsi(units) => units,
        };
        units.iter().try_for_each(|unit| {
            let checked = check(&unit.disk, unit.settings.logical_block_bytes.or(usual));
            checked.with_context(|| format!("unit {}", unit.place()))
        })
    }
}

fn check(disk: &DiskSpec, logical_block_bytes: Option<u32>) -> Result<()> {
    if let Some(bytes) = logical_block_bytes {
        DiskOptions::check_logical_block(bytes)?;
    }
    if let DiskSpec::Null { size_bytes } = disk {
        let options = DiskOptions { logical_block_bytes, ..DiskOptions::default() };
        DiskSource::null(*size_bytes, &options)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_refused_from_any_source() {
        type Change = fn(&mut ExportSettings);
        let table: [(Change, &str); 7] = [
            (|settings| settings.serial = Some("x".repeat(21)), "20 bytes"),
            (|settings| settings.serial = Some("\u{e9}".into()), "ASCII"),
            (|settings| settings.num_queues = Some(0), "1 to 256"),
            (|settings| settings.num_queues = Some(257), "1 to 256"),
            (|settings| settings.queue_size = 6, "a power of two"),
            (|settings| settings.queue_size = 2048, "a power of two"),
            (|settings| settings.iothread = Some(3), "the IoThreads are 0 to 2"),
        ];
        assert!(ExportSettings::default().check(1).is_ok());
        for (change, expected) in table {
            let mut settings = ExportSettings::default();
            change(&mut settings);
            let error = settings.check(3).unwrap_err();
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        }
    }

    #[test]
    fn a_virtio_scsi_device_has_two_queues_of_its_own() {
        let check = |device, num_queues| {
            let settings = ExportSettings { num_queues, ..ExportSettings::default() };
            let endpoint = EndpointSpec::Path("/a".into());
            ExportSpec { name: None, endpoint, device, settings }.check(1)
        };
        let blk = || DeviceSpec::Blk(DiskSpec::Null { size_bytes: 512 });
        for (num_queues, fits) in [(None, true), (Some(254), true), (Some(255), false)] {
            let result = check(DeviceSpec::Scsi(Vec::new()), num_queues);
            assert_eq!(result.is_ok(), fits, "{num_queues:?}: {result:?}");
        }
        assert!(check(blk(), Some(256)).is_ok());
    }

    #[test]
    fn answers_in_order_are_for_virtio_blk() {
        let check = |device| {
            let settings = ExportSettings { in_order: true, ..ExportSettings::default() };
            let endpoint = EndpointSpec::Path("/a".into());
            ExportSpec { name: None, endpoint, device, settings }.check(1)
        };
        check(DeviceSpec::Blk(DiskSpec::Null { size_bytes: 512 })).unwrap();
        let error = check(DeviceSpec::Scsi(Vec::new())).unwrap_err().to_string();
        assert!(error.contains("in-order is for virtio-blk"), "{error}");
    }

    #[test]
    fn an_export_has_a_name_and_a_socket_and_shares_neither() {
        let named = |name: Option<&str>, path: &str| ExportSpec {
            name: name.map(str::to_owned),
            endpoint: EndpointSpec::Path(path.into()),
            device: DeviceSpec::Scsi(Vec::new()),
            settings: ExportSettings::default(),
        };
        let (plain, vm) = (named(None, "/a"), named(Some("vm"), "/b"));
        assert!(plain.is_called("/a") && vm.is_called("vm") && vm.is_called("/b"));
        assert!(!vm.is_called("/a") && plain.clashes_with(&vm).is_none());
        for (other, what) in [
            (named(Some("vm"), "/c"), "vm"),
            (named(Some("x"), "/b"), "/b"),
            (named(Some("/b"), "/c"), "/b"),
            (named(None, "vm"), "vm"),
        ] {
            assert_eq!(other.clashes_with(&vm).as_deref(), Some(what));
            assert_eq!(vm.clashes_with(&other).as_deref(), Some(what));
        }
        for bad in ["", "a\nb", &"x".repeat(101)] {
            assert!(named(Some(bad), "/a").check(1).is_err(), "{bad}");
        }
        assert!(named(Some(&"\u{e9}".repeat(100)), "/a").check(1).is_ok());
    }

    /// `read_only` in place of `read-only` must not make a disk writable.
    #[test]
    fn a_misspelt_key_is_refused() {
        let with = |disk: &str, more: &str| {
            let text =
                format!(r#"{{"endpoint": {{"path": "/a"}}, "device": {{"blk": {disk}}}{more}}}"#);
            serde_json::from_str::<ExportSpec>(&text).map_err(|error| error.to_string())
        };
        let file = r#"{"file": "/b"}"#;
        assert!(with(file, r#", "read-only": true"#).unwrap().settings.read_only);
        let error = with(file, r#", "read_only": true"#).unwrap_err();
        assert!(error.contains("unknown field `read_only`"), "{error}");
        assert!(with(r#"{"null": {"size-bytes": 512, "size": 1}}"#, "").is_err());
    }

    #[test]
    fn an_export_is_written_and_read_without_its_defaults() {
        let text = r#"{"endpoint": {"path": "/a.sock"}, "cache": "directsync",
                       "device": {"blk": {"null": {"size-bytes": 512}}}}"#;
        let spec: ExportSpec = serde_json::from_str(text).unwrap();
        let settings =
            ExportSettings { cache: Some(CacheMode::Directsync), ..ExportSettings::default() };
        assert_eq!((spec.name(), &spec.settings), ("/a.sock".to_owned(), &settings));
        let again = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<ExportSpec>(&again).unwrap(), spec);
        assert!(serde_json::from_str::<ExportSpec>(r#"{"endpoint": {"fd": 3}}"#).is_err());
    }
}

#[cfg(test)]
mod validation_tests {
    use super::*;

    #[test]
    fn blocks_and_disks_of_impossible_sizes_are_refused() {
        for (device, expected) in [
            (r#"{"blk": {"null": {"size-bytes": 4096}}}"#, None),
            (r#"{"blk": {"null": {"size-bytes": 512}}}"#, Some("a disk of 512 bytes")),
            (r#"{"scsi": [{"lun": 1, "disk": "null:0"}]}"#, Some("unit 0:1: a disk of 0 bytes")),
            (
                r#"{"scsi": [{"lun": 1, "disk": "/a", "settings": {"logical-block-bytes": 3}}]}"#,
                Some("unit 0:1: a logical block of 3 bytes"),
            ),
        ] {
            let rest = r#""endpoint": {"path": "/s"}, "logical-block-bytes": 4096"#;
            let text = format!(r#"{{"device": {device}, {rest}}}"#);
            let export: ExportSpec = serde_json::from_str(&text).unwrap();
            let error = export.check(1).err().map(|error| format!("{error:#}"));
            let is_right = match (&error, expected) {
                (Some(error), Some(expected)) => error.contains(expected),
                (error, expected) => error.is_none() && expected.is_none(),
            };
            assert!(is_right, "{device}: {error:?}");
        }
    }

    /// An export with these keys beside the necessary ones.
    fn written(keys: &serde_json::Value) -> serde_json::Value {
        let mut all = serde_json::json!({
            "endpoint": { "path": "/vm" }, "device": { "blk": { "null": { "size-bytes": 4096 } } },
        });
        let keys = keys.as_object().unwrap().clone();
        all.as_object_mut().unwrap().extend(keys);
        all
    }

    #[test]
    fn a_key_that_is_left_out_has_the_usual_value() {
        let usual = serde_json::json!({
            "read-only": true, "no-lock": false, "late-lock": true, "in-order": true,
            "cache": "writeback", "serial": "usual", "logical-block-bytes": 4096,
            "num-queues": 7, "queue-size": 64, "iothread": 2, "notify-batch": false,
            "prefetch": true, "run-max": 3, "fixed-buffers": true,
            "limits": { "iops-total": 5 }, "rerror": "retry", "werror": "hold", "files": [],
        });
        let own = serde_json::json!({
            "read-only": false, "no-lock": true, "late-lock": false, "in-order": false,
            "cache": "none", "serial": "own", "logical-block-bytes": 512, "num-queues": 8,
            "queue-size": 32, "iothread": 3, "notify-batch": true, "prefetch": false, "run-max": 4,
            "fixed-buffers": false, "limits": { "iops-total": 6 }, "rerror": "report",
            "werror": "report",
        });
        let read = |keys| serde_json::from_value::<ExportSpec>(written(&keys)).unwrap();
        let settings = read(usual.clone()).settings;
        assert!(settings.opens_unlocked(), "its lock comes late");
        let shown = serde_json::to_value(&settings).unwrap();
        assert!(usual.as_object().unwrap().iter().all(|(key, value)| shown[key] == *value));
        let filled = |keys: &serde_json::Value| {
            let spec: WrittenExport = serde_json::from_value(written(keys)).unwrap();
            spec.with_defaults(&settings).settings
        };
        assert_eq!(filled(&serde_json::json!({})), settings);
        for (key, value) in own.as_object().unwrap() {
            let mut all = usual.clone();
            all[key] = value.clone();
            assert_eq!(filled(&serde_json::json!({ key: value })), read(all).settings, "{key}");
        }
    }

    #[test]
    fn bounds_are_allowed_and_numbers_beyond_them_are_not() {
        let scsi = |units: &str| -> serde_json::Value {
            serde_json::from_str(&format!(r#"{{"device": {{"scsi": [{units}]}}}}"#)).unwrap()
        };
        let unit = |lun: u16, rest: &str| {
            format!(r#"{{"lun": {lun}, "disk": {{"null": {{"size-bytes": 512}}}}{rest}}}"#)
        };
        let serial = |bytes| format!(r#", "settings": {{"serial": "{}"}}"#, "x".repeat(bytes));
        let mut large = scsi(&unit(0, ""));
        large["logical-block-bytes"] = 4096.into();
        for (keys, is_good) in [
            (serde_json::json!({ "run-max": RUN_MAX }), true),
            (serde_json::json!({ "run-max": RUN_MAX.get() + 1 }), false),
            (serde_json::json!({ "queue-size": 4 }), true),
            (serde_json::json!({ "queue-size": 2 }), false),
            (serde_json::json!({ "queue-size": 1024 }), true),
            (serde_json::json!({ "late-lock": true, "no-lock": true }), false),
            (serde_json::json!({ "iothread": 0 }), true),
            (serde_json::json!({ "iothread": 1 }), false),
            (serde_json::json!({ "rerror": "hold" }), false),
            (serde_json::json!({ "endpoint": { "path": "" } }), false),
            (scsi(&unit(16_383, "")), true),
            (scsi(&unit(16_384, "")), false),
            (scsi(&[unit(1, ""), unit(1, "")].join(",")), false),
            (scsi(&unit(1, &serial(36))), true),
            (scsi(&unit(1, &serial(37))), false),
            (scsi(&unit(1, r#", "settings": {"rerror": "hold"}"#)), false),
            (large, false),
        ] {
            let spec: ExportSpec = serde_json::from_value(written(&keys)).unwrap();
            let checked = spec.check(1);
            assert_eq!(checked.is_ok(), is_good, "{keys}: {checked:?}");
        }
    }

    #[test]
    fn a_summary_names_the_socket_beside_the_name() {
        let keys = serde_json::json!({ "name": "a", "read-only": true });
        let spec: ExportSpec = serde_json::from_value(written(&keys)).unwrap();
        let summary = spec.summary();
        assert!(summary.starts_with("a on /vm: virtio-blk, "), "{summary}");
        assert!(summary.ends_with(", read-only"), "{summary}");
    }
}
