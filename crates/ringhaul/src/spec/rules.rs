//! What disks may do, and what becomes of requests that they fail, where it stands in an export.

use super::{DeviceSpec, ExportSpec, UnitSettings};
use crate::disk_rules::{DiskRules, LimitGroups};

impl ExportSpec {
    /// Puts in the limits that hold for groups.
    pub(crate) fn fill_limits(&mut self, groups: &LimitGroups) {
        groups.fill(&mut self.settings.rules.limits);
        if let DeviceSpec::Scsi(units) = &mut self.device {
            let own = units.iter_mut().filter_map(|unit| unit.settings.limits.as_mut());
            own.for_each(|limits| groups.fill(limits));
        }
    }
}

impl UnitSettings {
    /// What holds for its disk, in an export where this is usual.
    pub(crate) fn rules(&self, usual: &DiskRules) -> DiskRules {
        DiskRules {
            limits: self.limits.clone().unwrap_or_else(|| usual.limits.clone()),
            rerror: self.rerror.unwrap_or(usual.rerror),
            werror: self.werror.unwrap_or(usual.werror),
        }
    }

    /// The same settings with other rules.
    pub(crate) fn set_rules(&mut self, rules: &DiskRules) {
        self.limits = Some(rules.limits.clone());
        (self.rerror, self.werror) = (Some(rules.rerror), Some(rules.werror));
    }
}
