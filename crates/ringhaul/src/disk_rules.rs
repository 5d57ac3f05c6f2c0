//! What a disk may do at most, and what becomes of requests that it fails, as it is written down,
//! and how it is put into effect.

mod limit_spec;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use blockio::DiskSource;
use blockio::disk::{ErrorAction, ErrorPolicy, LimitGroup, Limits};
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(crate) use limit_spec::LIMIT_KEYS;
pub use limit_spec::LimitSpec;

/// What becomes of requests that a disk fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum OnError {
    /// The guest is told.
    Report,
    /// They are tried again until they succeed. The guest waits.
    Retry,
    /// Writes without space are held until there is some, or `ctl resume`. Other errors are told.
    Hold,
    /// The same for 20 seconds at most; then the guest is told.
    HoldBriefly,
}

impl OnError {
    const OF_READS: Self = Self::Report;
    const OF_WRITES: Self = Self::HoldBriefly;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
    fn is_usual_of_reads(&self) -> bool {
        *self == Self::OF_READS
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
    fn is_usual_of_writes(&self) -> bool {
        *self == Self::OF_WRITES
    }

    /// The value of a key.
    ///
    /// # Errors
    ///
    /// When it is none of these.
    fn parse(key: &str, value: &str, expected: &str) -> Result<Self> {
        let parsed = Self::from_str(value, false);
        parsed.map_err(|_| anyhow!("{key} is '{value}' (expected: {expected})"))
    }

    /// Of an option for reads, which never lack space.
    pub(crate) fn parser_of_reads() -> impl TypedValueParser<Value = Self> {
        let names = [Self::Report, Self::Retry].map(|action| action.to_possible_value());
        PossibleValuesParser::new(names.into_iter().flatten())
            .try_map(|name| Self::from_str(&name, false))
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

/// All of it for one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default)]
pub struct DiskRules {
    /// What it may do at most.
    #[serde(skip_serializing_if = "LimitSpec::is_empty")]
    pub limits: LimitSpec,
    /// What becomes of reads that fail; `report` if it is left out.
    #[serde(skip_serializing_if = "OnError::is_usual_of_reads")]
    pub rerror: OnError,
    /// What becomes of writes, discards and zeroes that fail; `hold-briefly` if it is left out.
    #[serde(skip_serializing_if = "OnError::is_usual_of_writes")]
    pub werror: OnError,
}

impl Default for DiskRules {
    fn default() -> Self {
        Self { limits: LimitSpec::default(), rerror: OnError::OF_READS, werror: OnError::OF_WRITES }
    }
}

/// The same, in full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ShownRules {
    /// What the disk may do at most.
    pub limits: LimitSpec,
    /// What becomes of reads that it fails.
    pub rerror: OnError,
    /// What becomes of writes, discards and zeroes that it fails.
    pub werror: OnError,
}

impl From<DiskRules> for ShownRules {
    fn from(DiskRules { limits, rerror, werror }: DiskRules) -> Self {
        Self { limits, rerror, werror }
    }
}

/// A change of it. What is left out stays.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct RulesChange {
    /// Limits to change; 0 is none, and an empty group is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSpec>,
    /// What becomes of reads that fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rerror: Option<OnError>,
    /// What becomes of writes, discards and zeroes that fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub werror: Option<OnError>,
}

impl RulesChange {
    /// Whether it leaves everything as it is.
    pub(crate) fn is_empty(&self) -> bool {
        let Self { limits, rerror, werror } = self;
        limits.as_ref().is_none_or(LimitSpec::is_empty) && rerror.is_none() && werror.is_none()
    }

    /// What makes the second rules of the first. Limits, which count as one here, and what becomes
    /// of errors are left alone where they are the same in both: others may have changed them.
    pub(crate) fn between(before: &DiskRules, after: &DiskRules) -> Self {
        let (old, new) = (before, after);
        Self {
            limits: (old.limits != new.limits).then(|| new.limits.in_full()),
            rerror: (old.rerror != new.rerror).then_some(new.rerror),
            werror: (old.werror != new.werror).then_some(new.werror),
        }
    }

    /// Takes `KEY=VALUE` of a command line. False: it is no key of rules.
    ///
    /// # Errors
    ///
    /// When the value makes no sense.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<bool> {
        match key {
            "rerror" => self.rerror = Some(OnError::parse(key, value, "report, retry")?),
            "werror" => {
                let expected = "report, retry, hold, hold-briefly";
                self.werror = Some(OnError::parse(key, value, expected)?);
            }
            _ => {
                let mut limits = self.limits.clone().unwrap_or_default();
                if !limits.set(key, value)? {
                    return Ok(false);
                }
                self.limits = Some(limits);
            }
        }
        Ok(true)
    }
}

impl DiskRules {
    /// What holds after `change`.
    pub(crate) fn changed(&self, change: &RulesChange) -> Self {
        let limits = change.limits.as_ref().map(|limits| self.limits.changed(limits));
        Self {
            limits: limits.unwrap_or_else(|| self.limits.clone()),
            rerror: change.rerror.unwrap_or(self.rerror),
            werror: change.werror.unwrap_or(self.werror),
        }
    }

    /// Checks what no type does.
    ///
    /// # Errors
    ///
    /// When numbers or words make no sense.
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

/// The groups of disks that share limits, by their names.
#[derive(Debug, Default)]
pub struct LimitGroups(Mutex<BTreeMap<String, Group>>);

/// A group, and its limits as they were written down.
#[derive(Debug, Default)]
struct Group {
    limits: LimitGroup,
    numbers: LimitSpec,
    /// When somebody has asked for them, unless they are those of the first disk.
    asked: Option<Instant>,
}

impl Group {
    fn is_newer(&self, asked: Instant) -> bool {
        self.asked.is_some_and(|last| last > asked)
    }
}

impl LimitGroups {
    /// Has rules hold for a disk that may yet not be served. Others of its group notice nothing:
    /// what holds for them holds for it, too.
    ///
    /// # Errors
    ///
    /// When they make no sense. Nothing has changed then.
    pub(crate) fn join(&self, disk: &DiskSource, rules: &DiskRules) -> Result<()> {
        self.apply_limits(disk, rules, false)
    }

    /// Has limits hold for all of the group that they name, which a disk [has joined](Self::join),
    /// if they name more than that. They were asked for at `asked`, before the disk was opened:
    /// whoever has changed those of the group since then has the last word.
    pub(crate) fn name_limits(&self, limits: &LimitSpec, asked: Instant) {
        if !limits.has_numbers() {
            return;
        }
        // They were checked when the disk joined.
        if let (Some(name), Ok(numbers)) = (&limits.group, limits.limits())
            && let Some(group) = self.groups().get_mut(name)
        {
            if group.is_newer(asked) {
                tracing::info!(
                    "the limits of group {name} stay: they have changed since a disk was asked for \
                     that is served now and names others"
                );
            } else if group.limits.set_limits(numbers).is_ok() {
                group.numbers = limits.clone();
                group.asked = Some(asked);
            }
        }
    }

    /// Has rules hold that have been changed, and what is changed of limits for all of the group.
    ///
    /// # Errors
    ///
    /// As [`join`](Self::join).
    pub(crate) fn apply_change(
        &self,
        disk: &DiskSource,
        rules: &DiskRules,
        change: &RulesChange,
    ) -> Result<()> {
        let names_limits = change.limits.as_ref().is_some_and(LimitSpec::has_numbers);
        self.apply_limits(disk, rules, names_limits)
    }

    fn apply_limits(&self, disk: &DiskSource, rules: &DiskRules, names_limits: bool) -> Result<()> {
        rules.check()?;
        let limits = rules.limits.limits()?;
        let mut groups = self.groups();
        if let Some(name) = rules.limits.group() {
            let group = groups.entry(name.to_owned()).or_default();
            if names_limits || !group.limits.has_members() {
                group.limits.set_limits(limits)?;
                group.numbers = rules.limits.clone();
                group.asked = names_limits.then(Instant::now);
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

    /// The debts of the limits of each group, for a process that goes on with them.
    pub(crate) fn debts(&self) -> BTreeMap<String, Vec<u64>> {
        let groups = self.groups();
        let debts = groups.iter().map(|(name, group)| (name.clone(), group.limits.debts()));
        debts.filter(|(_, debts)| !debts.is_empty()).collect()
    }

    /// Takes over the debts of groups.
    pub(crate) fn owe(&self, debts: &BTreeMap<String, Vec<u64>>) {
        for (name, group) in &*self.groups() {
            if let Some(debts) = debts.get(name) {
                group.limits.owe(debts);
            }
        }
    }

    /// Puts in the limits that hold for the group, if there is one.
    pub(crate) fn fill(&self, limits: &mut LimitSpec) {
        self.fill_if(limits, |_| true);
    }

    /// The same, if those were asked for after `asked`.
    pub(crate) fn fill_newer(&self, limits: &mut LimitSpec, asked: Instant) {
        self.fill_if(limits, |group| group.is_newer(asked));
    }

    fn fill_if(&self, limits: &mut LimitSpec, is_wanted: impl Fn(&Group) -> bool) {
        if let Some(name) = &limits.group
            && let Some(group) = self.groups().get(name)
            && group.limits.has_members()
            && is_wanted(group)
        {
            let group_name = limits.group.take();
            *limits = LimitSpec { group: group_name, ..group.numbers.clone() };
        }
    }

    fn groups(&self) -> MutexGuard<'_, BTreeMap<String, Group>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use blockio::DiskOptions;
    use blockio::disk::Rate;

    use super::limit_spec::tests::spec;
    use super::*;

    #[test]
    fn a_change_to_other_rules_leaves_nothing_of_those_before() {
        let rules = |words| DiskRules { limits: spec(words).unwrap(), ..DiskRules::default() };
        let all =
            ["", "iops-total=3", "bps-read=4K iops-total=7", "group=a", "group=b iops-read=1"];
        for (before, after) in all.iter().flat_map(|one| all.iter().map(move |other| (one, other)))
        {
            let (before, after) = (rules(before), rules(after));
            assert_eq!(before.changed(&RulesChange::between(&before, &after)), after);
        }
    }

    #[test]
    fn limits_of_a_group_that_changed_while_a_disk_was_opened_stay() {
        let groups = LimitGroups::default();
        let disk = || DiskSource::null(512, &DiskOptions::default()).unwrap();
        let spec = |words| spec(words).unwrap();
        let rules = |words| DiskRules { limits: spec(words), ..DiskRules::default() };
        let (served, late) = (disk(), disk());
        let (soon, later) = (Instant::now(), Instant::now() + std::time::Duration::from_mins(1));
        groups.join(&served, &rules("group=a iops-total=7")).unwrap();
        groups.join(&late, &rules("group=a iops-total=5")).unwrap();
        let now = || served.group().unwrap().limits().requests.total.unwrap().per_second;
        let change = RulesChange { limits: Some(spec("iops-total=9")), ..RulesChange::default() };
        groups.apply_change(&served, &rules("group=a iops-total=9"), &change).unwrap();
        groups.name_limits(&spec("group=a iops-total=5"), soon);
        assert_eq!(now(), 9);
        // For another process, which does not know about the change.
        let handed = |asked| {
            let mut limits = spec("group=a iops-total=5");
            groups.fill_newer(&mut limits, asked);
            limits
        };
        assert_eq!(handed(soon), spec("group=a iops-total=9"));
        assert_eq!(handed(later), spec("group=a iops-total=5"));
        groups.name_limits(&spec("group=a iops-total=5"), later);
        assert_eq!(now(), 5);
        // One that was asked for earlier comes after it.
        groups.name_limits(&spec("group=a iops-total=6"), soon);
        assert_eq!(now(), 5);
    }

    #[test]
    fn disks_of_a_group_share_its_limits_while_it_has_members() {
        let groups = LimitGroups::default();
        let disk = || DiskSource::null(512, &DiskOptions::default()).unwrap();
        let rules = |words| DiskRules { limits: spec(words).unwrap(), ..DiskRules::default() };
        let (one, other) = (disk(), disk());
        groups.join(&one, &rules("group=a iops-total=7")).unwrap();
        groups.join(&other, &rules("group=a")).unwrap();
        let limits = |disk: &DiskSource| disk.group().unwrap().limits().requests.total;
        let rate = |per_second| Some(Rate { per_second, burst: None });
        assert_eq!((limits(&one), limits(&other)), (rate(7), rate(7)));
        // It may yet not be served.
        groups.join(&other, &rules("group=a iops-total=9")).unwrap();
        assert_eq!((limits(&one), limits(&other)), (rate(7), rate(7)));
        groups.name_limits(&spec("group=a").unwrap(), Instant::now());
        assert_eq!(limits(&one), rate(7));
        groups.name_limits(&spec("group=a iops-total=9").unwrap(), Instant::now());
        assert_eq!(limits(&one), rate(9));
        let mut shown = spec("group=a").unwrap();
        groups.fill(&mut shown);
        assert_eq!(shown, spec("group=a iops-total=9").unwrap());
        let none =
            RulesChange { limits: Some(spec("iops-total=0").unwrap()), ..Default::default() };
        let unlimited = rules("group=a iops-total=9").changed(&none);
        groups.apply_change(&other, &unlimited, &none).unwrap();
        assert_eq!(limits(&one), None);
        groups.join(&one, &rules("iops-total=3")).unwrap();
        assert_eq!(one.limits().requests.total, rate(3));
        assert!(one.group().is_none());
        drop(other);
        // It is another one now.
        let mut left = spec("group=a iops-total=5").unwrap();
        groups.fill(&mut left);
        assert_eq!(left, spec("group=a iops-total=5").unwrap());
        groups.join(&one, &rules("group=a iops-total=5")).unwrap();
        assert_eq!(limits(&one), rate(5));
    }
}
