//! What a disk may do at most, and what becomes of requests that it fails, as it is written down,
//! and how it is put into effect.
//!
//! The words of limits are those of QEMU: `iops` and `bps`, each `-total`, `-read` and `-write`;
//! with `-max` the rate of a burst, with `-max-length` its seconds.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use blockio::DiskSource;
use blockio::disk::{Burst, ErrorAction, ErrorPolicy, LimitGroup, Limits, Rate, Rates};
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use ringhaul_options::parse_size;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Limits of a disk, or of a group of disks. What is left out or 0 is not limited.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct LimitSpec {
    /// The group of disks that share these limits. They are those of whoever of the group has named
    /// some last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Requests in a second: reads, writes, discards and zeroes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_total: Option<u64>,
    /// The same in a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_total_max: Option<u64>,
    /// For how many seconds a burst may last; 1 if it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_total_max_length: Option<u64>,
    /// Reads in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read: Option<u64>,
    /// The same in a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read_max: Option<u64>,
    /// For how many seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read_max_length: Option<u64>,
    /// Writes, discards and zeroes in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write: Option<u64>,
    /// The same in a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write_max: Option<u64>,
    /// For how many seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write_max_length: Option<u64>,
    /// Bytes in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_total: Option<u64>,
    /// The same in a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_total_max: Option<u64>,
    /// For how many seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_total_max_length: Option<u64>,
    /// Bytes that are read in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_read: Option<u64>,
    /// The same in a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_read_max: Option<u64>,
    /// For how many seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_read_max_length: Option<u64>,
    /// Bytes that are written or zeroed in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_write: Option<u64>,
    /// The same in a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_write_max: Option<u64>,
    /// For how many seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_write_max_length: Option<u64>,
    /// A request of more bytes counts as so many requests of this size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_size: Option<u64>,
}

/// The key of the group on a command line.
const GROUP: &str = "group";

impl LimitSpec {
    /// All numbers with their keys.
    fn numbers(&mut self) -> [(&'static str, &mut Option<u64>); 19] {
        [
            ("iops-total", &mut self.iops_total),
            ("iops-total-max", &mut self.iops_total_max),
            ("iops-total-max-length", &mut self.iops_total_max_length),
            ("iops-read", &mut self.iops_read),
            ("iops-read-max", &mut self.iops_read_max),
            ("iops-read-max-length", &mut self.iops_read_max_length),
            ("iops-write", &mut self.iops_write),
            ("iops-write-max", &mut self.iops_write_max),
            ("iops-write-max-length", &mut self.iops_write_max_length),
            ("bps-total", &mut self.bps_total),
            ("bps-total-max", &mut self.bps_total_max),
            ("bps-total-max-length", &mut self.bps_total_max_length),
            ("bps-read", &mut self.bps_read),
            ("bps-read-max", &mut self.bps_read_max),
            ("bps-read-max-length", &mut self.bps_read_max_length),
            ("bps-write", &mut self.bps_write),
            ("bps-write-max", &mut self.bps_write_max),
            ("bps-write-max-length", &mut self.bps_write_max_length),
            ("iops-size", &mut self.iops_size),
        ]
    }

    /// Takes `KEY=VALUE` of a command line. False: it is no key of limits.
    ///
    /// # Errors
    ///
    /// When the value makes no sense.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<bool> {
        if key == GROUP {
            self.group = Some(value.to_owned());
            return Ok(true);
        }
        let Some((_, number)) = self.numbers().into_iter().find(|(name, _)| *name == key) else {
            return Ok(false);
        };
        let is_size = key == "iops-size" || (key.starts_with("bps") && !key.ends_with("length"));
        *number = Some(match is_size {
            true => parse_size(value).map_err(anyhow::Error::msg)?,
            false => value.parse().with_context(|| format!("{key} must be a number"))?,
        });
        Ok(true)
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it names more than a group.
    /// The group, unless it has no name, which is none.
    fn group(&self) -> Option<&str> {
        self.group.as_deref().filter(|group| !group.is_empty())
    }

    pub(crate) fn has_numbers(&self) -> bool {
        Self { group: None, ..self.clone() } != Self::default()
    }

    /// What holds after `change`: what it names is so from then on, and 0 or an empty name is none.
    /// Whoever changes the group begins with no limits.
    pub(crate) fn changed(&self, change: &Self) -> Self {
        let moves = change.group.is_some() && change.group() != self.group();
        let mut changed = if moves { Self::default() } else { self.clone() };
        if change.group.is_some() {
            changed.group = change.group().map(str::to_owned);
        }
        let mut change = change.clone();
        for ((_, now), (_, new)) in changed.numbers().into_iter().zip(change.numbers()) {
            if new.is_some() {
                *now = new.filter(|number| *number > 0);
            }
        }
        changed
    }

    /// The change that makes this of others.
    pub(crate) fn change_from(&self, before: &Self) -> Self {
        let (mut change, mut before) = (self.clone(), before.clone());
        if self.group == before.group {
            for ((_, number), (_, before)) in change.numbers().into_iter().zip(before.numbers()) {
                *number = number.or(before.and(Some(0)));
            }
        } else {
            change.group.get_or_insert_default();
        }
        change
    }

    /// As a change that leaves nothing of what was before: what it does not name is none, but for
    /// the limits of a group that it names.
    pub(crate) fn in_full(&self) -> Self {
        let mut full = self.clone();
        if self.group.is_none() || self.has_numbers() {
            full.numbers().into_iter().for_each(|(_, number)| *number = number.or(Some(0)));
        }
        full.group.get_or_insert_default();
        full
    }

    /// The same as data of the disk.
    ///
    /// # Errors
    ///
    /// When a number is out of its range, or means nothing without another.
    pub(crate) fn limits(&self) -> Result<Limits> {
        let iops = [
            rate("iops-total", self.iops_total, self.iops_total_max, self.iops_total_max_length)?,
            rate("iops-read", self.iops_read, self.iops_read_max, self.iops_read_max_length)?,
            rate("iops-write", self.iops_write, self.iops_write_max, self.iops_write_max_length)?,
        ];
        let bps = [
            rate("bps-total", self.bps_total, self.bps_total_max, self.bps_total_max_length)?,
            rate("bps-read", self.bps_read, self.bps_read_max, self.bps_read_max_length)?,
            rate("bps-write", self.bps_write, self.bps_write_max, self.bps_write_max_length)?,
        ];
        let rates = |[total, read, write]: [Option<Rate>; 3]| Rates { total, read, write };
        let request_bytes = self.iops_size.and_then(NonZeroU64::new);
        let limits = Limits { requests: rates(iops), bytes: rates(bps), request_bytes };
        limits.check()?;
        Ok(limits)
    }
}

fn rate(
    key: &str,
    rate: Option<u64>,
    burst: Option<u64>,
    seconds: Option<u64>,
) -> Result<Option<Rate>> {
    let some = |number: Option<u64>| number.filter(|number| *number > 0);
    match (some(rate), some(burst), seconds) {
        (None, None, None) => Ok(None),
        (Some(per_second), None, None) => Ok(Some(Rate { per_second, burst: None })),
        (Some(per_second), Some(burst), seconds) => {
            let burst = Burst { per_second: burst, seconds: seconds.unwrap_or(1) };
            Ok(Some(Rate { per_second, burst: Some(burst) }))
        }
        (_, None, Some(_)) => bail!("{key}-max-length is that of a burst; give {key}-max too"),
        (None, ..) => bail!("{key}-max is a burst beyond a limit; give {key} too"),
    }
}

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

    /// As it is written.
    ///
    /// # Errors
    ///
    /// When it is none of these.
    pub(crate) fn parse(value: &str) -> Result<Self> {
        let parsed = Self::from_str(value, false).map_err(anyhow::Error::msg);
        parsed.context("it must be report, retry, hold or hold-briefly")
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

    /// What makes these rules of others.
    pub(crate) fn to(rules: &DiskRules) -> Self {
        Self {
            limits: Some(rules.limits.in_full()),
            rerror: Some(rules.rerror),
            werror: Some(rules.werror),
        }
    }

    /// Takes `KEY=VALUE` of a command line. False: it is no key of rules.
    ///
    /// # Errors
    ///
    /// When the value makes no sense.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<bool> {
        match key {
            "rerror" => self.rerror = Some(OnError::parse(value)?),
            "werror" => self.werror = Some(OnError::parse(value)?),
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
    /// if they name more than that.
    pub(crate) fn name_limits(&self, limits: &LimitSpec) {
        if !limits.has_numbers() {
            return;
        }
        // They were checked when the disk joined.
        if let (Some(name), Ok(numbers)) = (&limits.group, limits.limits())
            && let Some(group) = self.groups().get_mut(name)
            && group.limits.set_limits(numbers).is_ok()
        {
            group.numbers = limits.clone();
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

    /// Puts in the limits that hold for the group, if there is one.
    pub(crate) fn fill(&self, limits: &mut LimitSpec) {
        if let Some(name) = &limits.group
            && let Some(group) = self.groups().get(name)
            && group.limits.has_members()
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

    use super::*;

    fn spec(words: &str) -> Result<LimitSpec> {
        let mut spec = LimitSpec::default();
        for word in words.split_whitespace() {
            let (key, value) = word.split_once('=').unwrap();
            assert!(spec.set(key, value)?, "{key}");
        }
        Ok(spec)
    }

    #[test]
    fn limits_are_understood_as_qemu_has_them() {
        let limits = |words: &str| spec(words)?.limits();
        let rate = |per_second| Some(Rate { per_second, burst: None });
        let seen = limits("iops-total=100 bps-read=1M iops-size=4K").unwrap();
        assert_eq!((seen.requests.total, seen.bytes.read), (rate(100), rate(1 << 20)));
        assert_eq!(seen.request_bytes, NonZeroU64::new(4096));
        let seen = limits("bps-write=1M bps-write-max=2M bps-write-max-length=60").unwrap();
        let burst = Some(Burst { per_second: 2 << 20, seconds: 60 });
        assert_eq!(seen.bytes.write, Some(Rate { per_second: 1 << 20, burst }));
        assert!(limits("iops-total=0").unwrap().are_none());
        for (bad, expected) in [
            ("iops-total=x", "iops-total must be a number"),
            ("iops-read-max=9", "give iops-read too"),
            ("bps-read=9 bps-read-max-length=9", "give bps-read-max too"),
            ("iops-write=9 iops-write-max=8", "at least the limit"),
            ("iops-size=4K", "needs a limit on requests"),
        ] {
            let error = format!("{:#}", limits(bad).unwrap_err());
            assert!(error.contains(expected), "{bad}: {error}");
        }
        assert!(!LimitSpec::default().set("iops", "1").unwrap());
    }

    #[test]
    fn a_change_names_what_changes() {
        let before = spec("iops-total=100 bps-read=1M").unwrap();
        for (change, after) in [
            ("iops-total=200", "iops-total=200 bps-read=1M"),
            ("bps-read=0 iops-read=7", "iops-total=100 iops-read=7"),
            ("group=a", "group=a"),
            ("group=a iops-read=7", "group=a iops-read=7"),
        ] {
            let after = spec(after).unwrap();
            assert_eq!(before.changed(&spec(change).unwrap()), after, "{change}");
        }
        let member = spec("group=a iops-total=3").unwrap();
        assert_eq!(member.changed(&spec("group=").unwrap()), LimitSpec::default());
        assert_eq!(member.changed(&spec("group=a").unwrap()), member);
    }

    #[test]
    fn a_change_to_other_rules_leaves_nothing_of_those_before() {
        let rules = |words| DiskRules { limits: spec(words).unwrap(), ..DiskRules::default() };
        let all =
            ["", "iops-total=3", "bps-read=4K iops-total=7", "group=a", "group=b iops-read=1"];
        for (before, after) in all.iter().flat_map(|one| all.iter().map(move |other| (one, other)))
        {
            let (before, after) = (rules(before), rules(after));
            assert_eq!(before.changed(&RulesChange::to(&after)), after);
        }
    }

    #[test]
    fn a_change_from_one_to_the_other_makes_the_other() {
        let all =
            ["", "iops-total=3", "bps-read=4K iops-total=7", "group=a iops-read=1", "group=b"];
        for (before, after) in all.iter().flat_map(|one| all.iter().map(move |other| (one, other)))
        {
            let (before, after) = (spec(before).unwrap(), spec(after).unwrap());
            let change = after.change_from(&before);
            assert_eq!(before.changed(&change), after, "{change:?}");
        }
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
        groups.name_limits(&spec("group=a").unwrap());
        assert_eq!(limits(&one), rate(7));
        groups.name_limits(&spec("group=a iops-total=9").unwrap());
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
