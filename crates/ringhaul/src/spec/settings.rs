//! Settings that may change while a daemon runs.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::log;

/// The longest that an IoThread may busy-poll, in microseconds.
pub(crate) const POLL_MAX_US: u16 = 10_000;

/// A change of settings. A field that is left out keeps its value.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct SettingsChange {
    /// The filter of the log, in the syntax of `--log`.
    pub log: Option<String>,
    /// The longest time in microseconds that an IoThread busy-polls, 0 to 10000.
    // Wider than the range, so that the error for a larger number can state the range.
    pub poll_max_us: Option<u64>,
    /// The CPU time in percent that busy-polling may add to an operation, 1 to 100 (no bound).
    pub poll_budget: Option<u64>,
}

/// The current settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Settings {
    /// The filter of the log; none if this process does not write its own log.
    pub log: Option<String>,
    /// The longest time in microseconds that an IoThread busy-polls.
    pub poll_max_us: u16,
    /// The CPU time in percent that busy-polling may add to an operation; 100: no bound.
    pub poll_budget: u8,
}

/// Limits on the busy-polling of IoThreads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PollLimits {
    pub(crate) max_us: u16,
    pub(crate) budget_percent: u8,
}

impl PollLimits {
    pub(crate) fn max(self) -> Duration {
        Duration::from_micros(self.max_us.into())
    }
}

impl SettingsChange {
    /// Merges a later change into this one.
    pub(crate) fn add(&mut self, later: &Self) {
        let Self { log, poll_max_us, poll_budget } = later.clone();
        self.log = log.or(self.log.take());
        self.poll_max_us = poll_max_us.or(self.poll_max_us);
        self.poll_budget = poll_budget.or(self.poll_budget);
    }

    /// Changes the filter of the log, and `limits`: both, or neither if a value is out of its
    /// range.
    ///
    /// # Errors
    ///
    /// When a value is out of its range.
    pub(crate) fn apply(&self, limits: &mut PollLimits) -> Result<()> {
        let max_us = self.poll_max_us.unwrap_or(limits.max_us.into());
        let Some(max_us) = u16::try_from(max_us).ok().filter(|us| *us <= POLL_MAX_US) else {
            bail!("poll-max-us must be 0 to {POLL_MAX_US}, not {max_us}");
        };
        let percent = self.poll_budget.unwrap_or(limits.budget_percent.into());
        let Some(budget_percent) = u8::try_from(percent).ok().filter(|p| (1..=100).contains(p))
        else {
            bail!("poll-budget must be 1 to 100 percent, not {percent}");
        };
        if let Some(filter) = &self.log {
            log::set_filter(filter).context("cannot change the filter of the log")?;
        }
        *limits = PollLimits { max_us, budget_percent };
        Ok(())
    }
}

impl Settings {
    pub(crate) fn from_limits(limits: PollLimits) -> Self {
        let PollLimits { max_us, budget_percent } = limits;
        Self { log: log::filter(), poll_max_us: max_us, poll_budget: budget_percent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_changes_are_made_or_none() {
        let before = PollLimits { max_us: 32, budget_percent: 50 };
        let mut limits = before;
        for bad in [
            SettingsChange { poll_max_us: Some(1 << 40), ..SettingsChange::default() },
            SettingsChange { poll_max_us: Some(10_001), ..SettingsChange::default() },
            SettingsChange { poll_budget: Some(0), poll_max_us: Some(1), log: None },
            SettingsChange { poll_budget: Some(101), ..SettingsChange::default() },
            SettingsChange { log: Some("x=loud".into()), poll_max_us: Some(1), poll_budget: None },
        ] {
            assert!(bad.apply(&mut limits).is_err(), "{bad:?}");
            assert_eq!(limits, before, "{bad:?}");
        }
        let change = SettingsChange { poll_max_us: Some(0), ..SettingsChange::default() };
        change.apply(&mut limits).unwrap();
        assert_eq!(limits, PollLimits { max_us: 0, budget_percent: 50 });
        SettingsChange::default().apply(&mut limits).unwrap();
        assert_eq!(Settings::from_limits(limits).poll_max_us, 0);
        let unknown = serde_json::from_str::<SettingsChange>(r#"{"queue-size": 3}"#);
        let error = unknown.unwrap_err().to_string();
        assert!(error.contains("`log`, `poll-max-us`, `poll-budget`"), "{error}");
    }

    #[test]
    fn a_later_change_has_precedence_and_bounds_are_allowed() {
        let change = |number: u64| SettingsChange {
            log: Some(number.to_string()),
            poll_max_us: Some(number),
            poll_budget: Some(number),
        };
        let mut sum = change(1);
        sum.add(&SettingsChange::default());
        assert_eq!(sum, change(1));
        sum.add(&change(2));
        assert_eq!(sum, change(2));
        let mut limits = PollLimits { max_us: 32, budget_percent: 50 };
        let most = SettingsChange { log: None, poll_max_us: Some(10_000), poll_budget: Some(100) };
        most.apply(&mut limits).unwrap();
        let settings = Settings::from_limits(limits);
        assert_eq!((settings.poll_max_us, settings.poll_budget), (10_000, 100));
    }
}
