//! The parts of exports and units that commands cannot change, by which an export stays the same.

use crate::spec::qos::QosSpec;
use crate::spec::{DeviceSpec, DiskSpec, ExportSettings, ExportSpec, UnitSettings, UnitSpec};

/// Returns true if `other` is the export `ours`, of which commands may have changed units,
/// sizes and rules.
pub(crate) fn matches_export(ours: &ExportSpec, other: &ExportSpec) -> bool {
    let is_device = match (&ours.device, &other.device) {
        (DeviceSpec::Blk(ours), DeviceSpec::Blk(other)) => matches_disk(ours, other),
        (DeviceSpec::Scsi(_), DeviceSpec::Scsi(_)) => true,
        _ => false,
    };
    is_device
        && ours.endpoint == other.endpoint
        && ours.name() == other.name()
        && without_rules(&ours.settings) == without_rules(&other.settings)
}

/// The settings that commands cannot change.
pub(crate) fn without_rules(settings: &ExportSettings) -> ExportSettings {
    ExportSettings { rules: QosSpec::default(), ..settings.clone() }
}

/// Returns true if `other` is the unit `ours`, of which commands may have changed size and
/// rules.
pub(crate) fn matches_unit(ours: &UnitSpec, other: &UnitSpec) -> bool {
    ours.place() == other.place()
        && unit_without_rules(&ours.settings) == unit_without_rules(&other.settings)
        && matches_disk(&ours.disk, &other.disk)
}

/// The settings that commands cannot change.
pub(crate) fn unit_without_rules(settings: &UnitSettings) -> UnitSettings {
    UnitSettings { limits: None, rerror: None, werror: None, ..settings.clone() }
}

/// Compares disks without the sizes of null disks, which commands can change.
fn matches_disk(ours: &DiskSpec, other: &DiskSpec) -> bool {
    match (ours, other) {
        (DiskSpec::Null { .. }, DiskSpec::Null { .. }) => true,
        (
            DiskSpec::Raw { offset_bytes, size_bytes, over },
            DiskSpec::Raw { offset_bytes: offset, size_bytes: size, over: others },
        ) => (offset_bytes, size_bytes) == (offset, size) && matches_disk(over, others),
        _ => ours == other,
    }
}
