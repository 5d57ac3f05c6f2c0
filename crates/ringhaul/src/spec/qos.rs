//! Limits and error policy of a disk: their written form, and how they are applied.

mod limit_spec;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use blockio::DiskSource;
use blockio::disk::{ErrorAction, ErrorPolicy, LimitGroup, Limits};
use blockio::executor::Lock;
use clap::ValueEnum;
use ringhaul_options::key_value::{self, Parts};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use limit_spec::LimitSpec;

/// The handling of requests that a disk fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum OnError {
    /// Report the error to the guest.
    Report,
    /// Retry until the request succeeds. The guest waits.
    Retry,
    /// Hold writes without space until there is some, or `ctl resume`. Report other errors.
    Hold,
    /// Like `hold`, for 20 seconds at most; then report the error to the guest.
    HoldBriefly,
}

impl OnError {
    const READ_DEFAULT: Self = Self::Report;
    const WRITE_DEFAULT: Self = Self::HoldBriefly;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
    fn is_read_default(&self) -> bool {
        *self == Self::READ_DEFAULT
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
    fn is_write_default(&self) -> bool {
        *self == Self::WRITE_DEFAULT
    }

    fn action(self) -> ErrorAction {
        match self {
            Self::Report => ErrorAction::Report,
            Self::Retry => ErrorAction::Retry,
            Self::Hold => ErrorAction::Hold,
            Self::HoldBriefly => ErrorAction::HoldBriefly,
        }
    }
}

/// The handling of failed reads, which never lack space.
#[derive(Debug, Clone, Copy, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum OnReadError {
    /// Report the error to the guest.
    Report,
    /// Retry until the request succeeds. The guest waits.
    Retry,
}

impl From<OnReadError> for OnError {
    fn from(action: OnReadError) -> Self {
        match action {
            OnReadError::Report => Self::Report,
            OnReadError::Retry => Self::Retry,
        }
    }
}

/// Keys of a command line for the handling of failed requests.
#[derive(Deserialize)]
struct OnErrors {
    rerror: Option<OnReadError>,
    werror: Option<OnError>,
}

/// The rules of one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default)]
pub struct QosSpec {
    /// The limits of the disk.
    #[serde(skip_serializing_if = "LimitSpec::is_empty")]
    pub limits: LimitSpec,
    /// The handling of reads that fail; `report` if it is left out.
    #[serde(skip_serializing_if = "OnError::is_read_default")]
    pub rerror: OnError,
    /// The handling of writes, discards and zeroes that fail; `hold-briefly` if it is left out.
    #[serde(skip_serializing_if = "OnError::is_write_default")]
    pub werror: OnError,
}

impl Default for QosSpec {
    fn default() -> Self {
        Self {
            limits: LimitSpec::default(),
            rerror: OnError::READ_DEFAULT,
            werror: OnError::WRITE_DEFAULT,
        }
    }
}

/// The rules of one disk, with no default left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct FullQosSpec {
    /// The limits of the disk.
    pub limits: LimitSpec,
    /// The handling of reads that the disk fails.
    pub rerror: OnError,
    /// The handling of writes, discards and zeroes that the disk fails.
    pub werror: OnError,
}

impl From<QosSpec> for FullQosSpec {
    fn from(QosSpec { limits, rerror, werror }: QosSpec) -> Self {
        Self { limits, rerror, werror }
    }
}

/// A change of a disk's rules. A key that is left out keeps its value.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct QosChange {
    /// Limits to change; 0 removes a limit, and an empty name removes the group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSpec>,
    /// The handling of reads that fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rerror: Option<OnError>,
    /// The handling of writes, discards and zeroes that fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub werror: Option<OnError>,
}

impl QosChange {
    /// Returns true if the change leaves all rules as they are.
    pub(crate) fn is_empty(&self) -> bool {
        let Self { limits, rerror, werror } = self;
        limits.as_ref().is_none_or(LimitSpec::is_empty) && rerror.is_none() && werror.is_none()
    }

    /// Returns the change that turns `before` into `after`. The limits, which count as one rule
    /// here, and the handling of errors are left out where both are equal, because a command may
    /// have changed them since.
    pub(crate) fn diff(before: &QosSpec, after: &QosSpec) -> Self {
        let (old, new) = (before, after);
        Self {
            limits: (old.limits != new.limits).then(|| new.limits.as_full_change()),
            rerror: (old.rerror != new.rerror).then_some(new.rerror),
            werror: (old.werror != new.werror).then_some(new.werror),
        }
    }

    /// Reads all parts that are left.
    ///
    /// # Errors
    ///
    /// When a key is no rule, or its value is invalid.
    pub fn from_parts(mut parts: Parts<'_>) -> Result<Self, key_value::Error> {
        let OnErrors { rerror, werror } = parts.take(&[])?;
        let limits: LimitSpec = parts.finish()?;
        let limits = Some(limits).filter(|limits| !limits.is_empty());
        Ok(Self { limits, rerror: rerror.map(OnError::from), werror })
    }
}

impl QosSpec {
    /// Returns the rules after `change`.
    pub(crate) fn with_change(&self, change: &QosChange) -> Self {
        let limits = change.limits.as_ref().map(|limits| self.limits.with_change(limits));
        Self {
            limits: limits.unwrap_or_else(|| self.limits.clone()),
            rerror: change.rerror.unwrap_or(self.rerror),
            werror: change.werror.unwrap_or(self.werror),
        }
    }

    /// Checks the values beyond their types.
    ///
    /// # Errors
    ///
    /// When numbers or words are invalid.
    pub(crate) fn check(&self) -> Result<()> {
        self.limits.limits().context("the limits")?;
        match self.rerror {
            OnError::Report | OnError::Retry => Ok(()),
            OnError::Hold | OnError::HoldBriefly => {
                bail!("rerror must be report or retry: only writes lack space")
            }
        }
    }
}

/// The groups of disks that share limits, by name.
#[derive(Debug, Default)]
pub struct LimitGroups(Lock<BTreeMap<String, Group>>);

/// A group, and its limits in written form.
#[derive(Debug, Default)]
struct Group {
    limits: LimitGroup,
    numbers: LimitSpec,
    /// The time at which the present limits were requested. `None` if they are the first disk's.
    requested_at: Option<Instant>,
}

impl Group {
    fn changed_since(&self, requested_at: Instant) -> bool {
        self.requested_at.is_some_and(|last| last > requested_at)
    }
}

impl LimitGroups {
    /// Applies rules to a disk that is not yet served. Disks in its group keep the limits of the
    /// group, which apply to the new disk too.
    ///
    /// # Errors
    ///
    /// When the rules are invalid. Nothing has changed then.
    pub(crate) fn join(&self, disk: &DiskSource, rules: &QosSpec) -> Result<()> {
        self.apply_limits(disk, rules, false)
    }

    /// Applies `limits` to the whole group that they name, if they name more than the group. A disk
    /// must [have joined](Self::join) it. The limits were requested at `requested_at`,
    /// before the disk was opened: a change of the group since then takes precedence.
    pub(crate) fn apply_group_limits(&self, limits: &LimitSpec, requested_at: Instant) {
        if !limits.has_numbers() {
            return;
        }
        // The limits were checked when the disk joined.
        if let (Some(name), Ok(numbers)) = (&limits.group, limits.limits())
            && let Some(group) = self.0.lock().get_mut(name)
        {
            if group.changed_since(requested_at) {
                tracing::info!(
                    "the limits of group {name} stay: they changed after the request for a new \
                     disk, whose limits for the group do not apply"
                );
            } else if group.limits.set_limits(numbers).is_ok() {
                group.numbers = limits.clone();
                group.requested_at = Some(requested_at);
            }
        }
    }

    /// Applies changed rules to a disk, and changed limits to its whole group.
    ///
    /// # Errors
    ///
    /// Like [`join`](Self::join).
    pub(crate) fn apply_change(
        &self,
        disk: &DiskSource,
        rules: &QosSpec,
        change: &QosChange,
    ) -> Result<()> {
        let names_limits = change.limits.as_ref().is_some_and(LimitSpec::has_numbers);
        self.apply_limits(disk, rules, names_limits)
    }

    fn apply_limits(&self, disk: &DiskSource, rules: &QosSpec, names_limits: bool) -> Result<()> {
        rules.check()?;
        let limits = rules.limits.limits()?;
        let mut groups = self.0.lock();
        if let Some(name) = rules.limits.group() {
            let group = groups.entry(name.to_owned()).or_default();
            if names_limits || !group.limits.has_members() {
                group.limits.set_limits(limits)?;
                group.numbers = rules.limits.clone();
                group.requested_at = names_limits.then(Instant::now);
            }
            disk.join(Some(&group.limits));
            disk.set_limits(&Limits::default())?;
        } else {
            disk.join(None);
            disk.set_limits(&limits)?;
        }
        groups.retain(|_, group| group.limits.has_members());
        let (read, write) = (rules.rerror.action(), rules.werror.action());
        disk.set_error_policy(ErrorPolicy { read, write });
        Ok(())
    }

    /// Returns the debts of each group's limits, for a process that resumes them.
    pub(crate) fn debts(&self) -> BTreeMap<String, Vec<u64>> {
        let groups = self.0.lock();
        let debts = groups.iter().map(|(name, group)| (name.clone(), group.limits.debts()));
        debts.filter(|(_, debts)| !debts.is_empty()).collect()
    }

    /// Takes over the debts of groups.
    pub(crate) fn add_debts(&self, debts: &BTreeMap<String, Vec<u64>>) {
        for (name, group) in &*self.0.lock() {
            if let Some(debts) = debts.get(name) {
                group.limits.set_debts(debts);
            }
        }
    }

    /// Replaces `limits` by the limits of their group, if the group exists.
    pub(crate) fn fill(&self, limits: &mut LimitSpec) {
        self.fill_if(limits, |_| true);
    }

    /// Like [`fill`](Self::fill), but only if the limits of the group were requested after
    /// `requested_at`.
    pub(crate) fn fill_newer(&self, limits: &mut LimitSpec, requested_at: Instant) {
        self.fill_if(limits, |group| group.changed_since(requested_at));
    }

    fn fill_if(&self, limits: &mut LimitSpec, is_wanted: impl Fn(&Group) -> bool) {
        if let Some(name) = &limits.group
            && let Some(group) = self.0.lock().get(name)
            && group.limits.has_members()
            && is_wanted(group)
        {
            let group_name = limits.group.take();
            *limits = LimitSpec { group: group_name, ..group.numbers.clone() };
        }
    }
}

#[cfg(test)]
mod tests {
    use blockio::DiskOptions;
    use blockio::disk::Rate;

    use super::limit_spec::tests::spec;
    use super::*;

    #[test]
    fn a_change_to_other_rules_keeps_no_earlier_rule() {
        let rules = |words| QosSpec { limits: spec(words).unwrap(), ..QosSpec::default() };
        let all =
            ["", "iops-total=3", "bps-read=4K iops-total=7", "group=a", "group=b iops-read=1"];
        for (before, after) in all.iter().flat_map(|one| all.iter().map(move |other| (one, other)))
        {
            let (before, after) = (rules(before), rules(after));
            assert_eq!(before.with_change(&QosChange::diff(&before, &after)), after);
        }
    }

    #[test]
    fn limits_of_a_group_that_changed_while_a_disk_was_opened_stay() {
        let groups = LimitGroups::default();
        let disk = || DiskSource::null(512, &DiskOptions::default()).unwrap();
        let spec = |words| spec(words).unwrap();
        let rules = |words| QosSpec { limits: spec(words), ..QosSpec::default() };
        let (served, late) = (disk(), disk());
        let (soon, later) = (Instant::now(), Instant::now() + std::time::Duration::from_secs(60));
        groups.join(&served, &rules("group=a iops-total=7")).unwrap();
        groups.join(&late, &rules("group=a iops-total=5")).unwrap();
        let now = || served.group().unwrap().limits().requests.total.unwrap().per_second;
        let change = QosChange { limits: Some(spec("iops-total=9")), ..QosChange::default() };
        groups.apply_change(&served, &rules("group=a iops-total=9"), &change).unwrap();
        groups.apply_group_limits(&spec("group=a iops-total=5"), soon);
        assert_eq!(now(), 9);
        // The process that takes over does not know about the change.
        let handed = |requested_at| {
            let mut limits = spec("group=a iops-total=5");
            groups.fill_newer(&mut limits, requested_at);
            limits
        };
        assert_eq!(handed(soon), spec("group=a iops-total=9"));
        assert_eq!(handed(later), spec("group=a iops-total=5"));
        groups.apply_group_limits(&spec("group=a iops-total=5"), later);
        assert_eq!(now(), 5);
        // A request from before the last change does not undo it.
        groups.apply_group_limits(&spec("group=a iops-total=6"), soon);
        assert_eq!(now(), 5);
    }

    #[test]
    fn disks_of_a_group_share_its_limits_while_it_has_members() {
        let groups = LimitGroups::default();
        let disk = || DiskSource::null(512, &DiskOptions::default()).unwrap();
        let rules = |words| QosSpec { limits: spec(words).unwrap(), ..QosSpec::default() };
        let (one, other) = (disk(), disk());
        groups.join(&one, &rules("group=a iops-total=7")).unwrap();
        groups.join(&other, &rules("group=a")).unwrap();
        let limits = |disk: &DiskSource| disk.group().unwrap().limits().requests.total;
        let rate = |per_second| Some(Rate { per_second, burst: None });
        assert_eq!((limits(&one), limits(&other)), (rate(7), rate(7)));
        // The disk is not yet served, so it changes nothing.
        groups.join(&other, &rules("group=a iops-total=9")).unwrap();
        assert_eq!((limits(&one), limits(&other)), (rate(7), rate(7)));
        groups.apply_group_limits(&spec("group=a").unwrap(), Instant::now());
        assert_eq!(limits(&one), rate(7));
        groups.apply_group_limits(&spec("group=a iops-total=9").unwrap(), Instant::now());
        assert_eq!(limits(&one), rate(9));
        let mut shown = spec("group=a").unwrap();
        groups.fill(&mut shown);
        assert_eq!(shown, spec("group=a iops-total=9").unwrap());
        let none = QosChange { limits: Some(spec("iops-total=0").unwrap()), ..Default::default() };
        let unlimited = rules("group=a iops-total=9").with_change(&none);
        groups.apply_change(&other, &unlimited, &none).unwrap();
        assert_eq!(limits(&one), None);
        groups.join(&one, &rules("iops-total=3")).unwrap();
        assert_eq!(one.limits().requests.total, rate(3));
        assert!(one.group().is_none());
        drop(other);
        // The group is a new one now.
        let mut left = spec("group=a iops-total=5").unwrap();
        groups.fill(&mut left);
        assert_eq!(left, spec("group=a iops-total=5").unwrap());
        groups.join(&one, &rules("group=a iops-total=5")).unwrap();
        assert_eq!(limits(&one), rate(5));
        assert_eq!(one.limits().requests.total, None, "its own limit would hold as well");
    }

    #[test]
    fn each_part_of_a_change_counts() {
        let change = |text: &str| -> QosChange { serde_json::from_str(text).unwrap() };
        for (text, is_empty) in [
            ("{}", true),
            (r#"{"limits": {}}"#, true),
            (r#"{"limits": {"iops-total": 0}}"#, false),
            (r#"{"rerror": "report"}"#, false),
            (r#"{"werror": "report"}"#, false),
        ] {
            assert_eq!(change(text).is_empty(), is_empty, "{text}");
        }
        let rules = |rerror, werror| QosSpec { rerror, werror, ..QosSpec::default() };
        let before = rules(OnError::Retry, OnError::Hold);
        assert_eq!(before.with_change(&change("{}")), before);
        let after = rules(OnError::Report, OnError::HoldBriefly);
        let diff = QosChange::diff(&before, &after);
        assert_eq!(before.with_change(&diff), after);
        assert!(QosChange::diff(&before, &before).is_empty());
        let (read, write) = (OnError::from(OnReadError::Retry), OnError::from(OnReadError::Report));
        assert_eq!((read, write), (OnError::Retry, OnError::Report));
        for (word, action) in [
            (OnError::Report, ErrorAction::Report),
            (OnError::Retry, ErrorAction::Retry),
            (OnError::Hold, ErrorAction::Hold),
            (OnError::HoldBriefly, ErrorAction::HoldBriefly),
        ] {
            assert_eq!(word.action(), action);
        }
    }
}
