//! The limits of a disk as they are written down.
//!
//! The words are QEMU's: `iops` and `bps`, each `-total`, `-read` and `-write`; with `-max`
//! the rate of a burst, with `-max-length` its seconds.

use std::num::NonZeroU64;

use anyhow::{Result, bail};
use blockio::disk::{Burst, Limits, Rate, Rates};
use ringhaul_options::key_value::Size;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// Limits of a disk, or of a group of disks. Rates that are left out or 0 are not limited.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct LimitSpec {
    /// The group of disks that share these limits. The limits that a member has named last hold for
    /// all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Requests in a second: reads, writes, discards and zeroes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_total: Option<u64>,
    /// Requests in a second of a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_total_max: Option<u64>,
    /// The longest burst, in seconds; 1 if it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_total_max_length: Option<u64>,
    /// Reads in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read: Option<u64>,
    /// Reads in a second of a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read_max: Option<u64>,
    /// The longest burst of reads, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read_max_length: Option<u64>,
    /// Writes, discards and zeroes in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write: Option<u64>,
    /// Writes, discards and zeroes in a second of a burst.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write_max: Option<u64>,
    /// The longest burst of writes, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write_max_length: Option<u64>,
    /// Bytes in a second.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "bytes")]
    pub bps_total: Option<u64>,
    /// Bytes in a second of a burst.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "bytes")]
    pub bps_total_max: Option<u64>,
    /// The longest burst of bytes, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_total_max_length: Option<u64>,
    /// Bytes that are read in a second.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "bytes")]
    pub bps_read: Option<u64>,
    /// Bytes that are read in a second of a burst.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "bytes")]
    pub bps_read_max: Option<u64>,
    /// The longest burst of bytes that are read, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_read_max_length: Option<u64>,
    /// Bytes that are written or zeroed in a second.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "bytes")]
    pub bps_write: Option<u64>,
    /// Bytes that are written or zeroed in a second of a burst.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "bytes")]
    pub bps_write_max: Option<u64>,
    /// The longest burst of bytes that are written, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps_write_max_length: Option<u64>,
    /// A request of more bytes counts as several requests of this size.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "bytes")]
    pub iops_size: Option<u64>,
}

/// Reads a number of bytes, which may have a suffix on a command line.
fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Ok(Option::<Size>::deserialize(deserializer)?.map(|size| size.0))
}

/// The keys of rates of requests.
const REQUESTS: [&str; 3] = ["iops-total", "iops-read", "iops-write"];

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

    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The group. An empty name is no group.
    pub(super) fn group(&self) -> Option<&str> {
        self.group.as_deref().filter(|group| !group.is_empty())
    }

    /// Returns true if it names more than a group.
    pub(crate) fn has_numbers(&self) -> bool {
        Self { group: None, ..self.clone() } != Self::default()
    }

    /// The limits after `change`, which replaces the values that it names; 0 or an empty name
    /// removes one. Without its rate a burst is removed, and without its burst a length. The size
    /// of requests is removed with their last rate. A change of the group begins with no limits.
    pub(crate) fn with_change(&self, change: &Self) -> Self {
        let moves = change.group.is_some() && change.group() != self.group();
        let mut changed = if moves { Self::default() } else { self.clone() };
        if change.group.is_some() {
            changed.group = change.group().map(str::to_owned);
        }
        let mut change = change.clone();
        let numbers = change.numbers();
        let gone = numbers.iter().filter(|(_, new)| **new == Some(0)).map(|(key, _)| *key);
        let gone: Vec<&str> = gone.collect();
        let goes = |key: &str| {
            let is_of = |of: &&str| key.strip_prefix(of).is_some_and(|rest| rest.starts_with('-'));
            gone.iter().any(is_of)
        };
        for ((key, now), (_, new)) in changed.numbers().into_iter().zip(numbers) {
            if new.is_some() || goes(key) {
                *now = new.filter(|number| *number > 0);
            }
        }
        if change.iops_size.is_none() && REQUESTS.iter().any(|key| gone.contains(key)) {
            changed.iops_size = changed.iops_size.filter(|_| changed.limits_requests());
        }
        changed
    }

    fn limits_requests(&self) -> bool {
        let rates = [self.iops_total, self.iops_read, self.iops_write];
        rates.into_iter().flatten().any(|rate| rate > 0)
    }

    /// The change that turns `before` into this.
    pub(crate) fn diff_from(&self, before: &Self) -> Self {
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

    /// A change that keeps nothing from before: values that it does not name are removed, except
    /// the limits of a group that it names.
    pub(crate) fn as_full_change(&self) -> Self {
        let mut full = self.clone();
        if self.group.is_none() || self.has_numbers() {
            full.numbers().into_iter().for_each(|(_, number)| *number = number.or(Some(0)));
        }
        full.group.get_or_insert_default();
        full
    }

    /// The limits in the form of the disk.
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
        (_, None, Some(_)) => {
            bail!("{key}-max-length is the length of a burst; give {key}-max too")
        }
        (None, ..) => bail!("{key}-max is a burst beyond a limit; give {key} too"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use ringhaul_options::key_value::Parts;

    use super::*;

    pub(crate) fn spec(words: &str) -> Result<LimitSpec> {
        let parts: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        Ok(Parts::from_words(&parts).finish()?)
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
            ("iops-total=x", "iops-total: it must be a whole number"),
            ("iops-read-max=9", "give iops-read too"),
            ("bps-read=9 bps-read-max-length=9", "give bps-read-max too"),
            ("iops-write=9 iops-write-max=8", "at least the limit"),
            ("iops-size=4K", "needs a limit on requests"),
            ("bps-total=1.5M", "bps-total: '1.5M' is not a size"),
            ("iops-total=1K", "iops-total: it must be a whole number"),
            ("iops=1", "unknown key 'iops' (expected: group, iops-total, iops-total-max,"),
            ("bps-total-max=1X", "bps-total-max: '1X' has the unknown size suffix"),
        ] {
            let error = format!("{:#}", limits(bad).unwrap_err());
            assert!(error.contains(expected), "{bad}: {error}");
        }
    }

    #[test]
    fn each_key_limits_what_it_names() {
        for unit in ["iops", "bps"] {
            for direction in ["total", "read", "write"] {
                let key = format!("{unit}-{direction}");
                let words = format!("{key}=1000 {key}-max=2000 {key}-max-length=3");
                let burst = Some(Burst { per_second: 2000, seconds: 3 });
                let rate = Some(Rate { per_second: 1000, burst });
                let mut rates = Rates { total: None, read: None, write: None };
                match direction {
                    "total" => rates.total = rate,
                    "read" => rates.read = rate,
                    _ => rates.write = rate,
                }
                let mut expected = Limits::default();
                *(if unit == "bps" { &mut expected.bytes } else { &mut expected.requests }) = rates;
                assert_eq!(spec(&words).unwrap().limits().unwrap(), expected, "{words}");
            }
        }
    }

    #[test]
    fn a_change_names_only_differences() {
        let before = spec("iops-total=100 bps-read=1M").unwrap();
        for (change, after) in [
            ("iops-total=200", "iops-total=200 bps-read=1M"),
            ("bps-read=0 iops-read=7", "iops-total=100 iops-read=7"),
            ("group=a", "group=a"),
            ("group=a iops-read=7", "group=a iops-read=7"),
        ] {
            let after = spec(after).unwrap();
            assert_eq!(before.with_change(&spec(change).unwrap()), after, "{change}");
        }
        let before = spec("iops-read=3 iops-total=2 iops-total-max=9 iops-total-max-length=5");
        for (change, after) in [
            ("iops-total=0", "iops-read=3"),
            ("iops-total-max=0", "iops-read=3 iops-total=2"),
            ("iops-read=0", "iops-total=2 iops-total-max=9 iops-total-max-length=5"),
            ("iops-total=0 iops-total-max=8", "iops-read=3 iops-total-max=8"),
        ] {
            let changed = before.as_ref().unwrap().with_change(&spec(change).unwrap());
            assert_eq!(changed, spec(after).unwrap(), "{change}");
        }
        let sized = spec("iops-size=4K iops-total=2 iops-read=3 bps-read=1M").unwrap();
        for (change, after) in [
            ("iops-total=0", "iops-size=4K iops-read=3 bps-read=1M"),
            ("iops-total=0 iops-read=0", "bps-read=1M"),
            ("iops-total=0 iops-read=0 iops-write=7", "iops-size=4K iops-write=7 bps-read=1M"),
            ("bps-read=0", "iops-size=4K iops-total=2 iops-read=3"),
        ] {
            let changed = sized.with_change(&spec(change).unwrap());
            assert_eq!(changed, spec(after).unwrap(), "{change}");
            assert!(changed.limits().is_ok(), "{change}");
        }
        let asked = sized.with_change(&spec("iops-total=0 iops-read=0 iops-size=8K").unwrap());
        let error = asked.limits().unwrap_err().to_string();
        assert!(error.contains("needs a limit on requests"), "{error}");
        let member = spec("group=a iops-total=3").unwrap();
        assert_eq!(member.with_change(&spec("group=").unwrap()), LimitSpec::default());
        assert_eq!(member.with_change(&spec("group=a").unwrap()), member);
    }

    #[test]
    fn a_change_from_one_to_the_other_makes_the_other() {
        let all =
            ["", "iops-total=3", "bps-read=4K iops-total=7", "group=a iops-read=1", "group=b"];
        for (before, after) in all.iter().flat_map(|one| all.iter().map(move |other| (one, other)))
        {
            let (before, after) = (spec(before).unwrap(), spec(after).unwrap());
            let change = after.diff_from(&before);
            assert_eq!(before.with_change(&change), after, "{change:?}");
        }
    }
}
