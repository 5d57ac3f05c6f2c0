//! Makes the device of an export on its disks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use blockio::DiskSource;
use device::access::{DiskAccess, ReservationStorage};
use device::blk::config::{BlkOptions, QUEUES_MAX};
use device::scsi::ScsiDevice;
use device::scsi::config::{REQUEST_QUEUES_MAX, ScsiOptions};
use device::scsi::unit::{Identifiers, UnitOptions};
use device::unit_address::UnitAddress;
use device::{Device, Events, QueueTuning};

use crate::open::disk::OpenDisk;
use crate::open::shared_disks::SharedDisks;
use crate::process::folder_of;
use crate::socket::permissions::check_folder;
use crate::spec::qos::LimitGroups;
use crate::spec::{
    DeviceSpec, DiskSpec, EndpointSpec, ExportSettings, ExportSpec, LikeDisk, StopRule, UnitNames,
    UnitPlace, UnitSpec, values,
};

/// The version in at most 4 bytes, for INQUIRY.
const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));

impl ExportSpec {
    /// The disks of the export, each with the settings to open it.
    pub(crate) fn disks(&self) -> Vec<(DiskSpec, ExportSettings)> {
        let settings = &self.settings;
        match &self.device {
            DeviceSpec::Blk(disk) => vec![(disk.clone(), settings.clone())],
            DeviceSpec::Scsi(units) => units.iter().map(|unit| unit.disk(settings)).collect(),
        }
    }

    /// The files with persistent reservations that the export may use, each with true if it may be
    /// made and replaced.
    pub(crate) fn reservations(&self) -> Vec<(PathBuf, bool)> {
        let units = match &self.device {
            // virtio-blk only heeds them.
            DeviceSpec::Blk(disk) => {
                return default_reservations(disk).into_iter().map(|path| (path, false)).collect();
            }
            DeviceSpec::Scsi(units) => units,
        };
        let of_unit = |unit: &UnitSpec| match &unit.settings.reservations {
            Some(path) => Some(by_one_name(path)),
            None => default_reservations(&unit.disk),
        };
        units.iter().filter_map(of_unit).map(|path| (path, true)).collect()
    }

    /// Returns warnings about plain files with the header of an image, without opening them as
    /// disks.
    pub(crate) fn content_warnings(&self) -> Vec<String> {
        let disks = self.disks();
        let paths = disks.iter().filter_map(|(disk, _)| match disk {
            DiskSpec::File(path) => Some(path),
            _ => None,
        });
        paths.filter_map(|path| DiskSource::format_warning(path)).collect()
    }

    /// Formats the log line that announces the export with these disks.
    pub(crate) fn serving_line(&self, disks: &[OpenDisk]) -> String {
        let what = match (&self.device, disks) {
            (DeviceSpec::Blk(_), [disk]) => format!("{}: {}", disk.name, disk.summary),
            (_, [_]) => "virtio-scsi, 1 logical unit".to_owned(),
            (_, disks) => format!("virtio-scsi, {} logical units", disks.len()),
        };
        match &self.endpoint {
            EndpointSpec::Path(path) => format!("{what}; serving on {}", path.display()),
            EndpointSpec::Fd(_) => format!("{what}; serving on an inherited socket"),
        }
    }

    /// Makes the device, on disks in the order of [`disks`](Self::disks).
    ///
    /// # Errors
    ///
    /// When a logical unit cannot be made as requested.
    pub(crate) fn make_device(
        &self,
        disks: &[OpenDisk],
        events: Arc<dyn Events>,
        shared_disks: &SharedDisks,
        groups: &LimitGroups,
    ) -> Result<Device> {
        let settings = &self.settings;
        for ((_, settings), disk) in self.disks().iter().zip(disks) {
            groups.join(&disk.source, &settings.rules)?;
        }
        let tuning = QueueTuning {
            notify_batch: settings.notify_batch,
            prefetch: settings.prefetch,
            run_max: settings.run_max,
            fixed_buffers: settings.fixed_buffers,
            ..QueueTuning::default()
        };
        match &self.device {
            DeviceSpec::Blk(spec) => {
                let disk = disks.first().context("virtio-blk without a disk")?;
                let source = disk.source.clone();
                let default_serial = || values::default_serial(source.identity());
                let options = BlkOptions {
                    serial: settings.serial.clone().unwrap_or_else(default_serial),
                    num_queues: settings.num_queues.unwrap_or(QUEUES_MAX),
                    queue_size: settings.queue_size,
                    write_cache: disk.cache.has_write_cache(),
                    tuning,
                    in_order: settings.in_order,
                };
                let access = shared_disks.access(&source)?;
                // Reservations that initiators left behind apply before any of them returns.
                // A file beside the disk of a member is not for the rights of the daemon.
                let is_named = settings.files.is_none();
                if let Some(path) = default_reservations(spec).filter(|_| is_named) {
                    let place = ReservationStorage::Existing(path);
                    drop(if disk.is_late {
                        access.store_reservations_later(place)?
                    } else {
                        access.store_reservations(place)?
                    });
                }
                let held = Arc::clone(&access);
                let _size = shared_disks.hold_size(&held, &disk.source, disk.opened)?;
                Ok(Device::blk_with_access(source, options, access, events))
            }
            DeviceSpec::Scsi(units) => {
                let options = ScsiOptions {
                    num_queues: settings.num_queues.unwrap_or(REQUEST_QUEUES_MAX),
                    queue_size: settings.queue_size,
                    tuning,
                    ..ScsiOptions::default()
                };
                let device = Device::scsi(options, events);
                if let Device::Scsi(scsi) = &device {
                    for (unit, disk) in units.iter().zip(disks) {
                        let access = shared_disks.access(&disk.source)?;
                        let _size = shared_disks.hold_size(&access, &disk.source, disk.opened)?;
                        unit.add_to(scsi, &self.name(), (disk, None), &access)?;
                    }
                }
                Ok(device)
            }
        }
    }
}

impl UnitPlace {
    /// The address of the place within the device.
    pub(crate) fn address(self) -> UnitAddress {
        UnitAddress { target: self.target, lun: self.lun }
    }
}

impl UnitSpec {
    fn address(&self) -> UnitAddress {
        self.place().address()
    }

    /// Adds the unit to the device of the export with this name, during the turn of a guest.
    /// Without a turn, the file of the reservations of a disk that is locked late belongs to
    /// another host. The caller holds the size of the disk, and ends the use of a disk whose unit
    /// was not added.
    ///
    /// # Errors
    ///
    /// When it cannot be added as requested.
    pub(crate) fn add_to(
        &self,
        device: &ScsiDevice,
        export: &str,
        (disk, turn): (&OpenDisk, Option<u64>),
        access: &Arc<DiskAccess>,
    ) -> Result<()> {
        let _kept = match (disk.is_late, turn) {
            (true, None) => access.store_reservations_later(self.reservations()?)?,
            _ => access.store_reservations(self.reservations()?)?,
        };
        if let Some(turn) = turn.filter(|_| disk.is_late) {
            access.begin_use(turn)?;
        }
        let options = self.options(disk, export, Arc::clone(access))?;
        let adding = || format!("cannot export {} as a unit", self.address());
        device.add_unit(self.address(), disk.source.clone(), options).with_context(adding)
    }

    /// Returns true if the disk of the unit is locked only while queues of the export run.
    pub(crate) fn is_locked_late(&self, export: &ExportSettings) -> bool {
        self.disk(export).1.late_lock
    }

    /// The disk behind the unit, with the settings to open it.
    pub(crate) fn disk(&self, export: &ExportSettings) -> (DiskSpec, ExportSettings) {
        let own = &self.settings;
        let settings = ExportSettings {
            read_only: own.read_only.unwrap_or(export.read_only),
            no_lock: own.no_lock.unwrap_or(export.no_lock),
            late_lock: export.late_lock && own.no_lock != Some(true),
            cache: own.cache.or(export.cache),
            logical_block_bytes: own.logical_block_bytes.or(export.logical_block_bytes),
            rules: own.rules(&export.rules),
            files: own.files.clone(),
            ..export.clone()
        };
        (self.disk.clone(), settings)
    }

    /// The properties that initiators see, in the export with this name.
    fn options(
        &self,
        disk: &OpenDisk,
        export: &str,
        access: Arc<DiskAccess>,
    ) -> Result<UnitOptions> {
        let own = &self.settings;
        let path = format!("{export} {}", self.address());
        let identity = match disk.source.identity() {
            // Disks without content are told apart by their places.
            "" => path.clone(),
            identity => identity.to_owned(),
        };
        let text = |own: &Option<String>, usual: &str| own.clone().unwrap_or(usual.to_owned());
        let (vendor, product, revision, names) = match own.like {
            Some(LikeDisk::Qemu) => ("QEMU", "QEMU HARDDISK", "2.5+", UnitNames::Serial),
            None => ("Ringhaul", "Virtual Disk", VERSION, UnitNames::Wwn),
        };
        let identifiers = match (own.names.unwrap_or(names), own.wwn) {
            (UnitNames::Wwn, _) => Identifiers::Standard,
            (UnitNames::Serial, None) => Identifiers::VendorSpecific,
            (UnitNames::Serial, Some(_)) => Identifiers::VendorSpecificAndNaa,
        };
        Ok(UnitOptions {
            vendor: text(&own.vendor, vendor),
            product: text(&own.product, product),
            revision: text(&own.revision, revision),
            identifiers,
            obeys_stop: own.stop == Some(StopRule::Obey),
            serial: own.serial.clone().unwrap_or_else(|| values::default_serial(&identity)),
            naa: own.wwn.map_or_else(|| values::default_naa(&identity), |wwn| wwn.0),
            rotational: own.rotational.unwrap_or_else(|| disk.source.is_rotational()),
            discard: self.discard(disk)?,
            write_cache: disk.cache.has_write_cache(),
            access,
            port: values::default_naa(&path),
        })
    }

    /// Returns true if the guest may discard blocks: by the setting, or else if the disk takes
    /// discards.
    fn discard(&self, disk: &OpenDisk) -> Result<bool> {
        let is_taken = disk.source.discard_bytes().is_some();
        if self.settings.discard == Some(true) && !is_taken {
            bail!("{}: the device takes no discards; leave out discard=on", disk.name);
        }
        Ok(self.settings.discard.unwrap_or(is_taken))
    }

    /// The place where persistent reservations are kept.
    ///
    /// # Errors
    ///
    /// When every user can replace the file that the setting names. A user who can replace the file
    /// beside a disk can replace the disk, too.
    fn reservations(&self) -> Result<ReservationStorage> {
        Ok(match &self.settings.reservations {
            Some(path) => {
                check_folder(path).with_context(|| {
                    format!("cannot keep persistent reservations in {}", path.display())
                })?;
                ReservationStorage::File(by_one_name(path))
            }
            None if self.settings.files.is_some() => ReservationStorage::Shared(None),
            None => ReservationStorage::Shared(default_reservations(&self.disk)),
        })
    }
}

/// The default place for the persistent reservations of a disk: beside its file. A block device has
/// no such place.
fn default_reservations(disk: &DiskSpec) -> Option<PathBuf> {
    match disk.whole_file() {
        Some(path) if path.is_file() => {
            let path = path.canonicalize().unwrap_or(path.to_owned());
            let mut beside = path.into_os_string();
            beside.push(".reservations");
            Some(beside.into())
        }
        _ => None,
    }
}

/// Normalises the path of a file that need not exist.
fn by_one_name(path: &Path) -> PathBuf {
    match (folder_of(path).canonicalize(), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        // An invalid path fails when it is used.
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use disks::open::CancelToken;
    use serde_json::json;

    use super::*;
    use crate::control::export_log::ExportLog;
    use crate::spec::{FileRecord, UnitSettings};

    fn make(device: DeviceSpec, shared_disks: &SharedDisks) -> Result<Device> {
        let settings = ExportSettings { no_lock: true, ..ExportSettings::default() };
        make_with(device, settings, shared_disks)
    }

    fn make_with(
        device: DeviceSpec,
        settings: ExportSettings,
        shared_disks: &SharedDisks,
    ) -> Result<Device> {
        let endpoint = EndpointSpec::Path("test.sock".into());
        let spec = ExportSpec { name: None, endpoint, device, settings };
        let disks = spec
            .disks()
            .iter()
            .map(|disk| OpenDisk::open(disk, None, &CancelToken::default(), None))
            .collect::<Result<Vec<_>>>()?;
        let groups = LimitGroups::default();
        spec.make_device(&disks, Arc::new(ExportLog::new("test")), shared_disks, &groups)
    }

    #[test]
    fn virtio_blk_finds_reservations_beside_its_disk_and_makes_no_file_for_them() {
        let folder = tempfile::tempdir().unwrap();
        let [disk, beside, other] =
            ["disk", "disk.reservations", "other"].map(|name| folder.path().join(name));
        fs::write(&disk, [0; 4096]).unwrap();
        let blk = DeviceSpec::Blk(DiskSpec::File(disk.clone()));
        let settings = UnitSettings { reservations: Some(other), ..UnitSettings::default() };
        let unit = UnitSpec { target: 0, lun: 0, disk: DiskSpec::File(disk), settings };
        let shared_disks = SharedDisks::default();
        let first = make(blk.clone(), &shared_disks).unwrap();
        let second = make(DeviceSpec::Scsi(vec![unit]), &shared_disks).unwrap();
        assert!(!beside.exists());
        drop((first, second));
        fs::write(&beside, "{}").unwrap();
        let error = make(blk, &SharedDisks::default()).err().unwrap().to_string();
        assert!(error.contains("cannot load the persistent reservations in"), "{error}");
        assert!(error.contains("disk.reservations"), "{error}");
    }

    /// The rule for sockets of exports.
    #[test]
    fn reservations_in_a_folder_of_all_users_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for (mode, is_allowed) in [(0o777, false), (0o1777, true), (0o755, true)] {
            fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
            for name in ["file", "missing/file"] {
                let reservations = Some(folder.path().join(name));
                let settings = UnitSettings { reservations, ..UnitSettings::default() };
                let disk = DiskSpec::Null { size_bytes: 1 << 20 };
                let unit = UnitSpec { target: 0, lun: 0, disk, settings };
                let made = make(DeviceSpec::Scsi(vec![unit]), &SharedDisks::default());
                let error = made.err().map(|error| format!("{error:#}")).unwrap_or_default();
                let words = match (name, is_allowed) {
                    ("file", true) => "",
                    ("file", false) => "every user can replace files in",
                    _ => "does not exist; create it",
                };
                assert!(error.is_empty() == words.is_empty(), "{mode:o}, {name}: {error}");
                assert!(error.contains(words), "{mode:o}, {name}: {error}");
            }
        }
    }

    /// A member opens its disk by itself. The file beside it would be opened, or made, with the
    /// rights of the daemon.
    #[test]
    fn the_disk_of_a_member_has_no_reservations_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let [disk, beside] = ["disk", "disk.reservations"].map(|name| folder.path().join(name));
        fs::write(&disk, [0; 4096]).unwrap();
        fs::write(&beside, "{}").unwrap();
        let file = File::open(&disk).unwrap();
        for files in [None, Some(vec![FileRecord::new(&disk, &file).unwrap()])] {
            let is_of_member = files.is_some();
            let settings = ExportSettings {
                files: files.clone(),
                no_lock: true,
                read_only: true,
                ..ExportSettings::default()
            };
            let device = DeviceSpec::Blk(DiskSpec::File(disk.clone()));
            let made = make_with(device, settings, &SharedDisks::default());
            assert_eq!(made.is_ok(), is_of_member);
            let settings = UnitSettings { files, ..UnitSettings::default() };
            let unit = UnitSpec { target: 0, lun: 0, disk: DiskSpec::File(disk.clone()), settings };
            let has_none = matches!(unit.reservations(), Ok(ReservationStorage::Shared(None)));
            assert_eq!(has_none, is_of_member);
        }
    }

    /// A guest that moves from QEMU finds its disk by the names that it had.
    #[test]
    fn a_unit_has_the_names_that_its_settings_choose() {
        use Identifiers::{Standard, VendorSpecific, VendorSpecificAndNaa};
        let (qemu, wwn) = ("QEMU HARDDISK", "5000000000000001");
        for (settings, texts, identifiers) in [
            (json!({}), ["Ringhaul", "Virtual Disk", VERSION], Standard),
            (json!({ "like": "qemu" }), ["QEMU", qemu, "2.5+"], VendorSpecific),
            (json!({ "like": "qemu", "wwn": wwn }), ["QEMU", qemu, "2.5+"], VendorSpecificAndNaa),
            (json!({ "like": "qemu", "names": "wwn" }), ["QEMU", qemu, "2.5+"], Standard),
            (json!({ "like": "qemu", "product": "a" }), ["QEMU", "a", "2.5+"], VendorSpecific),
            (
                json!({ "names": "serial", "vendor": "b", "revision": "1" }),
                ["b", "Virtual Disk", "1"],
                VendorSpecific,
            ),
        ] {
            let disk = json!({ "null": { "size-bytes": 512 } });
            let unit = json!({ "lun": 1, "disk": disk, "settings": settings });
            let unit: UnitSpec = serde_json::from_value(unit).unwrap();
            let disk = unit.disk(&ExportSettings::default());
            let disk = OpenDisk::open(&disk, None, &CancelToken::default(), None).unwrap();
            let options = unit.options(&disk, "vm", Arc::default()).unwrap();
            let UnitOptions { vendor, product, revision, .. } = &options;
            assert_eq!([vendor, product, revision], texts, "{settings}");
            assert_eq!(options.identifiers, identifiers, "{settings}");
        }
    }
}
