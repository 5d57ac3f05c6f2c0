//! The limits and the error policy in the specification of an export, and the parts that commands
//! cannot change, by which an export stays the same.

use std::time::Instant;

use super::{DeviceSpec, DiskSpec, ExportSettings, ExportSpec, UnitSettings, UnitSpec};
use crate::spec::qos::{LimitGroups, LimitSpec, QosChange, QosSpec};

impl ExportSpec {
    /// Applies its limits to the groups that its disks have joined. Limits that units name
    /// themselves replace the usual ones. The export was requested at `requested_at`.
    pub(crate) fn apply_group_limits(&self, groups: &LimitGroups, requested_at: Instant) {
        let usual = &self.settings.rules;
        match &self.device {
            DeviceSpec::Blk(_) => groups.apply_group_limits(&usual.limits, requested_at),
            DeviceSpec::Scsi(units) => {
                let mut settings: Vec<_> = units.iter().map(|unit| &unit.settings).collect();
                settings.sort_by_key(|settings| settings.names_limits());
                let limits = settings.iter().map(|own| own.rules(usual).limits);
                limits.for_each(|limits| groups.apply_group_limits(&limits, requested_at));
            }
        }
    }

    /// Fills in the present limits of groups.
    pub(crate) fn fill_limits(&mut self, groups: &LimitGroups) {
        self.fill_limits_by(|limits| groups.fill(limits));
    }

    /// Fills in the limits of groups that have changed since the export was requested.
    pub(crate) fn fill_newer_limits(&mut self, groups: &LimitGroups, requested_at: Instant) {
        self.fill_limits_by(|limits| groups.fill_newer(limits, requested_at));
    }

    fn fill_limits_by(&mut self, fill: impl Fn(&mut LimitSpec)) {
        let usual = &mut self.settings.rules.limits;
        let before = usual.clone();
        fill(usual);
        if let DeviceSpec::Scsi(units) = &mut self.device {
            for own in units.iter_mut().filter_map(|unit| unit.settings.limits.as_mut()) {
                let mut limits = before.with_change(own);
                fill(&mut limits);
                *own = limits.diff_from(usual);
            }
        }
    }
}

impl UnitSettings {
    /// The rules of its disk, in an export with these usual rules.
    pub(crate) fn rules(&self, usual: &QosSpec) -> QosSpec {
        let Self { limits, rerror, werror, .. } = self;
        usual.with_change(&QosChange { limits: limits.clone(), rerror: *rerror, werror: *werror })
    }

    /// Returns true if the unit itself names limits.
    pub(crate) fn names_limits(&self) -> bool {
        self.limits.as_ref().is_some_and(LimitSpec::has_numbers)
    }

    /// Sets the rules, in an export with these usual rules.
    pub(crate) fn set_rules(&mut self, rules: &QosSpec, usual: &QosSpec) {
        self.limits = Some(rules.limits.diff_from(&usual.limits));
        (self.rerror, self.werror) = (Some(rules.rerror), Some(rules.werror));
    }

    /// Sets the rules, for an export with any usual rules. The limits of a group are left to the
    /// group, unless the unit itself names them.
    pub(crate) fn set_rules_in_full(&mut self, rules: &QosSpec) {
        let limits = match &rules.limits.group {
            Some(group) if !self.names_limits() => {
                LimitSpec { group: Some(group.clone()), ..LimitSpec::default() }
            }
            _ => rules.limits.as_full_change(),
        };
        self.limits = Some(limits);
        (self.rerror, self.werror) = (Some(rules.rerror), Some(rules.werror));
    }
}

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

#[cfg(test)]
mod tests {
    use blockio::{DiskOptions, DiskSource};

    use super::*;
    use crate::spec::qos::OnError;

    fn limits(group: &str, iops_total: u64) -> LimitSpec {
        let (group, iops_total) = (Some(group.to_owned()), Some(iops_total));
        LimitSpec { group, iops_total, ..LimitSpec::default() }
    }

    /// A unit may be in a group of its own.
    #[test]
    fn an_export_has_the_present_limits_of_its_groups() {
        let groups = LimitGroups::default();
        let members = [("a", 7), ("b", 9)].map(|(group, iops)| {
            let disk = DiskSource::null(512, &DiskOptions::default()).unwrap();
            let rules = QosSpec { limits: limits(group, iops), ..QosSpec::default() };
            groups.join(&disk, &rules).unwrap();
            disk
        });
        let text = r#"{"endpoint": {"path": "/c"}, "device": {"scsi": [
            {"lun": 0, "disk": "/d"},
            {"lun": 1, "disk": "/e", "settings": {"limits": {"group": "b"}}}]}}"#;
        let mut spec: ExportSpec = serde_json::from_str(text).unwrap();
        spec.settings.rules.limits = limits("a", 5);
        let all = |spec: &ExportSpec| {
            let DeviceSpec::Scsi(units) = &spec.device else { unreachable!() };
            let usual = &spec.settings.rules;
            let of_units = units.iter().map(|unit| unit.settings.rules(usual).limits);
            [usual.limits.clone()].into_iter().chain(of_units).collect::<Vec<_>>()
        };
        let own = LimitSpec { iops_total: None, ..limits("b", 0) };
        assert_eq!(all(&spec), [limits("a", 5), limits("a", 5), own]);
        spec.fill_limits(&groups);
        assert_eq!(all(&spec), [limits("a", 7), limits("a", 7), limits("b", 9)]);
        drop(members);
    }

    #[test]
    fn the_rules_of_a_unit_are_beside_the_usual_ones() {
        let usual = |iops_total| {
            let limits = LimitSpec { iops_total: Some(iops_total), ..LimitSpec::default() };
            QosSpec { limits, ..QosSpec::default() }
        };
        let rules = QosSpec { rerror: OnError::Retry, werror: OnError::Report, ..usual(7) };
        let reads = LimitSpec { iops_read: Some(9), ..LimitSpec::default() };
        for usual in [usual(7), QosSpec { limits: reads, ..QosSpec::default() }] {
            let mut settings = UnitSettings::default();
            settings.set_rules(&rules, &usual);
            assert_eq!(settings.rules(&usual), rules);
        }
        for (own, expected) in [(None, None), (Some(3), Some(3))] {
            let named = own.map(|iops| LimitSpec { group: None, ..limits("", iops) });
            let mut settings = UnitSettings { limits: named, ..UnitSettings::default() };
            let of_group = QosSpec { limits: limits("a", 3), ..rules.clone() };
            settings.set_rules_in_full(&of_group);
            let full = settings.limits.clone().unwrap();
            assert_eq!((full.group.as_deref(), full.iops_total), (Some("a"), expected));
            assert_eq!((settings.rerror, settings.werror), {
                (Some(OnError::Retry), Some(OnError::Report))
            });
        }
    }

    #[test]
    fn an_export_and_a_unit_are_known_by_all_that_commands_cannot_change() {
        let export = |text: &str| -> ExportSpec { serde_json::from_str(text).unwrap() };
        let ours = r#"{"name": "a", "endpoint": {"path": "/a"}, "device": {"blk": "/d"}}"#;
        for (word, other) in [("/a", "/b"), ("/d", "/e"), (r#""a""#, r#""b""#)] {
            assert!(!matches_export(&export(ours), &export(&ours.replace(word, other))), "{word}");
        }
        assert!(matches_export(&export(ours), &export(ours)));
        let unit = |text: &str| -> UnitSpec { serde_json::from_str(text).unwrap() };
        let ours = r#"{"lun": 1, "disk": "/d", "settings": {"serial": "s"}}"#;
        for (word, other) in [("1", "2"), ("/d", "/e"), (r#""s""#, r#""t""#)] {
            assert!(!matches_unit(&unit(ours), &unit(&ours.replace(word, other))), "{word}");
        }
        assert!(matches_unit(&unit(ours), &unit(ours)));
    }
}
