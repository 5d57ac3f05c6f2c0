//! Plans as text: `name=value` for each of their numbers.

use std::fmt;

use anyhow::{Context, Result, ensure};

use super::{KNOBS, Plan};

impl Plan {
    /// The plan of a seed with changes of its numbers, each as `name=value`.
    pub(crate) fn with_settings(seed: u64, settings: &[String]) -> Result<Self> {
        let mut plan = Self::new(seed);
        for setting in settings {
            plan.set(setting)?;
        }
        Ok(plan)
    }

    /// Sets a number, from `name=value`.
    pub(crate) fn set(&mut self, text: &str) -> Result<()> {
        let (name, value) = text.split_once('=').context("a setting is name=value")?;
        let least = KNOBS.iter().find(|(knob, _)| *knob == name).map_or(0, |(_, least)| *least);
        let knob = self.knob(name).with_context(|| format!("there is no setting `{name}`"))?;
        *knob = value.parse().with_context(|| format!("the value of `{name}` is not a number"))?;
        ensure!(*knob >= least, "`{name}` is at least {least}");
        Ok(())
    }

    /// The settings that turn the plan of the seed into this plan.
    pub(crate) fn settings(&self) -> Vec<String> {
        let (mut drawn, mut this) = (Self::new(self.seed), self.clone());
        let changed = KNOBS.iter().filter_map(|(name, _)| {
            let value = *this.knob(name)?;
            (drawn.knob(name).is_some_and(|was| *was != value)).then(|| format!("{name}={value}"))
        });
        changed.collect()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut this = self.clone();
        for (name, _) in KNOBS {
            match this.knob(name) {
                Some(0) | None => {}
                Some(value) => write!(f, "{name}={value} ")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_turn_one_plan_of_a_seed_into_another() {
        let mut plan = Plan::new(7);
        for (name, least) in KNOBS {
            plan.set(&format!("{name}={}", least + 1)).unwrap();
        }
        let again = Plan::with_settings(7, &plan.settings()).unwrap();
        assert_eq!(plan, again);
        assert!(plan.set("requests=0").is_err());
        assert!(plan.set("colour=1").is_err());
        assert!(plan.set("requests").is_err());
    }
}
