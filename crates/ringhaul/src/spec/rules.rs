//! What disks may do, and what becomes of requests that they fail, where it stands in an export.

use std::time::Instant;

use super::{DeviceSpec, ExportSpec, UnitSettings};
use crate::disk_rules::{DiskRules, LimitGroups, LimitSpec, RulesChange};

impl ExportSpec {
    /// Has its limits hold for all of the groups that its disks have joined. Those that units name
    /// themselves count more than what is usual. The export was asked for at `asked`.
    pub(crate) fn name_limits(&self, groups: &LimitGroups, asked: Instant) {
        let usual = &self.settings.rules;
        match &self.device {
            DeviceSpec::Blk(_) => groups.name_limits(&usual.limits, asked),
            DeviceSpec::Scsi(units) => {
                let mut settings: Vec<_> = units.iter().map(|unit| &unit.settings).collect();
                settings.sort_by_key(|settings| settings.names_limits());
                let limits = settings.iter().map(|own| own.rules(usual).limits);
                limits.for_each(|limits| groups.name_limits(&limits, asked));
            }
        }
    }

    /// Puts in the limits that hold for groups.
    pub(crate) fn fill_limits(&mut self, groups: &LimitGroups) {
        self.fill_limits_by(|limits| groups.fill(limits));
    }

    /// Puts in the limits of groups that have changed since the export was asked for.
    pub(crate) fn fill_newer_limits(&mut self, groups: &LimitGroups, asked: Instant) {
        self.fill_limits_by(|limits| groups.fill_newer(limits, asked));
    }

    fn fill_limits_by(&mut self, fill: impl Fn(&mut LimitSpec)) {
        let usual = &mut self.settings.rules.limits;
        let before = usual.clone();
        fill(usual);
        if let DeviceSpec::Scsi(units) = &mut self.device {
            for own in units.iter_mut().filter_map(|unit| unit.settings.limits.as_mut()) {
                let mut limits = before.changed(own);
                fill(&mut limits);
                *own = limits.change_from(usual);
            }
        }
    }
}

impl UnitSettings {
    /// What holds for its disk, in an export where this is usual.
    pub(crate) fn rules(&self, usual: &DiskRules) -> DiskRules {
        let Self { limits, rerror, werror, .. } = self;
        usual.changed(&RulesChange { limits: limits.clone(), rerror: *rerror, werror: *werror })
    }

    /// Whether it has limits that are not usual.
    pub(crate) fn names_limits(&self) -> bool {
        self.limits.as_ref().is_some_and(LimitSpec::has_numbers)
    }

    /// The same settings with other rules, in an export where those are usual.
    pub(crate) fn set_rules(&mut self, rules: &DiskRules, usual: &DiskRules) {
        self.limits = Some(rules.limits.change_from(&usual.limits));
        (self.rerror, self.werror) = (Some(rules.rerror), Some(rules.werror));
    }

    /// The same settings with other rules, whatever is usual in the export. What holds for a group
    /// is left to it, unless the unit itself names it.
    pub(crate) fn set_rules_in_full(&mut self, rules: &DiskRules) {
        let limits = match &rules.limits.group {
            Some(group) if !self.names_limits() => {
                LimitSpec { group: Some(group.clone()), ..LimitSpec::default() }
            }
            _ => rules.limits.in_full(),
        };
        self.limits = Some(limits);
        (self.rerror, self.werror) = (Some(rules.rerror), Some(rules.werror));
    }
}
