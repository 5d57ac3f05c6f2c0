//! Changes by commands, and their fate at another base.

use std::collections::BTreeSet;
use std::mem::discriminant;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::spec::qos::QosSpec;
use crate::spec::rules::matches_export;
use crate::spec::settings::{Settings, SettingsChange};
use crate::spec::{DeviceSpec, ExportSpec, UnitPlace, UnitSettings, UnitSpec};

/// Every change by commands since the start that the command line describes.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Changes {
    /// The options that the daemon was started with.
    pub(crate) started: Vec<String>,
    /// Options that upgrades have added to these.
    pub(crate) upgraded: Vec<String>,
    pub(crate) settings: ChangedSettings,
    pub(crate) exports: Vec<ExportChange>,
}

/// Settings that were changed, with the base's values at the time.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct ChangedSettings {
    before: SettingsChange,
    now: SettingsChange,
}

/// An export that differs from the base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct ExportChange {
    /// The export of the base; none: a command has added it.
    before: Option<ExportSpec>,
    /// The export that commands have made of it; none: a command has removed it.
    now: Option<ExportSpec>,
}

/// Exports and settings for a daemon to begin with.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    /// The exports of the base as commands have left them.
    pub(crate) exports: Vec<ExportSpec>,
    /// Exports that only commands have named.
    pub(crate) added: Vec<ExportSpec>,
    /// Units that commands have added to exports of the base, by the names of these.
    pub(crate) units: Vec<(String, UnitPlace)>,
    pub(crate) settings: SettingsChange,
    /// Lines for the log, each with its export; a line on settings has no name.
    pub(crate) log_lines: Vec<(String, String)>,
    /// Lines about changes that are dropped, in the same form.
    pub(crate) dropped: Vec<(String, String)>,
}

impl ChangedSettings {
    fn record(&mut self, change: &SettingsChange, base: &Settings) {
        let base = base_change(base);
        let SettingsChange { log, poll_max_us, poll_budget } = change;
        if log.is_some() {
            (self.before.log, self.now.log) = (base.log, log.clone());
        }
        if poll_max_us.is_some() {
            (self.before.poll_max_us, self.now.poll_max_us) = (base.poll_max_us, *poll_max_us);
        }
        if poll_budget.is_some() {
            (self.before.poll_budget, self.now.poll_budget) = (base.poll_budget, *poll_budget);
        }
    }

    /// Forgets changes of these settings, because the base sets them now.
    pub(crate) fn forget(&mut self, change: &SettingsChange) {
        for settings in [&mut self.before, &mut self.now] {
            settings.log.take_if(|_| change.log.is_some());
            settings.poll_max_us.take_if(|_| change.poll_max_us.is_some());
            settings.poll_budget.take_if(|_| change.poll_budget.is_some());
        }
    }

    /// Keeps the changes of settings that have the same base as before. Returns the dropped
    /// changes.
    fn merge(&mut self, base: &Settings) -> SettingsChange {
        let base = base_change(base);
        let (before, now) = (&self.before, &self.now);
        let lost = SettingsChange {
            log: now.log.clone().filter(|_| before.log != base.log),
            poll_max_us: now.poll_max_us.filter(|_| before.poll_max_us != base.poll_max_us),
            poll_budget: now.poll_budget.filter(|_| before.poll_budget != base.poll_budget),
        };
        self.forget(&lost);
        lost
    }
}

/// The settings of the base as a change.
fn base_change(base: &Settings) -> SettingsChange {
    let Settings { log, poll_max_us, poll_budget } = base.clone();
    SettingsChange {
        log,
        poll_max_us: Some(poll_max_us.into()),
        poll_budget: Some(poll_budget.into()),
    }
}

impl ExportChange {
    /// Returns true if a command has added an export of this name.
    pub(crate) fn adds(&self, name: &str) -> bool {
        self.before.is_none() && self.is_about(name)
    }

    fn is_about(&self, name: &str) -> bool {
        self.now.iter().chain(&self.before).any(|spec| spec.is_called(name))
    }

    fn name(&self) -> String {
        self.now.iter().chain(&self.before).next().map(ExportSpec::name).unwrap_or_default()
    }

    fn is_empty(&self) -> bool {
        match (&self.before, &self.now) {
            (None, None) => true,
            (Some(before), Some(now)) => is_equal(before, now),
            _ => false,
        }
    }
}

impl Changes {
    /// Returns true if the next start needs nothing of it.
    pub(crate) fn is_empty(&self) -> bool {
        let Self { started: _, upgraded, settings, exports } = self;
        upgraded.is_empty() && exports.is_empty() && *settings == ChangedSettings::default()
    }

    /// Checks consistency beyond the types.
    ///
    /// # Errors
    ///
    /// When it makes no sense.
    pub(super) fn check(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        for change in &self.exports {
            if change.before.is_none() && change.now.is_none() {
                bail!("it names an export that never existed");
            }
            if !names.insert((change.name(), change.now.is_some())) {
                bail!("it names the export {} twice", change.name());
            }
        }
        Ok(())
    }

    pub(super) fn record_settings(&mut self, change: &SettingsChange, base: &Settings) {
        self.settings.record(change, base);
    }

    /// Notes an export that was added or removed.
    pub(super) fn record_export(&mut self, name: &str, base: &[ExportSpec], live: &[ExportSpec]) {
        let now = live.iter().find(|export| export.is_called(name));
        // The given name may be the socket of a removed export, which a new export has now.
        self.exports.retain(|change| !change.adds(name));
        let name = now.map_or_else(|| name.to_owned(), ExportSpec::name);
        // The base keeps its removal beside the export of another command in its place, which may
        // have its name and its socket.
        self.exports.retain(|change| !change.adds(&name));
        let of_base = base.iter().find(|export| export.is_called(&name));
        match (of_base, now) {
            (Some(before), None) => {
                self.exports.retain(|change| change.before.as_ref() != Some(before));
                self.exports.push(ExportChange { before: Some(before.clone()), now: None });
            }
            (Some(before), Some(now)) if matches_export(before, now) => {
                self.record_whole(now, base, live);
            }
            (_, Some(now)) => {
                self.exports.push(ExportChange { before: None, now: Some(unnamed(now)) });
            }
            (None, None) => {}
        }
    }

    /// Notes an export with all its disks.
    pub(super) fn record_whole(
        &mut self,
        now: &ExportSpec,
        base: &[ExportSpec],
        live: &[ExportSpec],
    ) {
        let name = now.name();
        let before = base.iter().find(|before| matches_export(before, now));
        let Some(before) = before else {
            if self.exports.iter().any(|change| change.adds(&name)) {
                places(now).iter().for_each(|place| self.record_one_disk(now, *place, base));
            } else {
                self.exports.push(ExportChange { before: None, now: Some(unnamed(now)) });
            }
            return;
        };
        self.exports
            .retain(|change| change.before.as_ref() != Some(before) || change.now.is_some());
        for place in places(before).union(&places(now)) {
            self.record_disk(&name, *place, base, live);
        }
    }

    /// Notes a disk that was added, removed or changed.
    pub(super) fn record_disk(
        &mut self,
        name: &str,
        place: Option<UnitPlace>,
        base: &[ExportSpec],
        live: &[ExportSpec],
    ) {
        let Some(now) = live.iter().find(|export| export.is_called(name)) else { return };
        self.record_one_disk(now, place, base);
        // Limits of one disk of a group hold for the whole group.
        let Some(group) = rules_at(now, place).and_then(|rules| rules.limits.group) else { return };
        for export in live {
            for other in places(export) {
                let its = rules_at(export, other).and_then(|rules| rules.limits.group);
                if its.as_ref() == Some(&group) {
                    self.record_one_disk(export, other, base);
                }
            }
        }
    }

    fn record_one_disk(&mut self, now: &ExportSpec, place: Option<UnitPlace>, base: &[ExportSpec]) {
        let name = now.name();
        if let Some(added) = self.exports.iter_mut().find(|change| change.adds(&name)) {
            // Units that could not be restored stay in it.
            added.now.iter_mut().for_each(|kept| copy_disk(kept, now, place));
            return;
        }
        let Some(before) = base.iter().find(|before| is_same_export(before, now)) else { return };
        let is_it = |change: &ExportChange| change.before.as_ref() == Some(before);
        let index = self.exports.iter().position(is_it).unwrap_or_else(|| {
            let (before, now) = (Some(before.clone()), Some(before.clone()));
            self.exports.push(ExportChange { before, now });
            self.exports.len() - 1
        });
        if let Some(kept) = &mut self.exports[index].now {
            copy_disk(kept, now, place);
        }
        if self.exports[index].is_empty() {
            self.exports.remove(index);
        }
    }

    /// Follows a base that now has another export of this name, or none, or other disks in it.
    pub(super) fn adopt_base_change(
        &mut self,
        name: &str,
        export: Option<&ExportSpec>,
        disks: Option<&BTreeSet<Option<UnitPlace>>>,
    ) {
        let (Some(export), Some(disks)) = (export, disks) else {
            self.exports.retain(|change| !change.is_about(name));
            return;
        };
        let is_it = |change: &ExportChange| change.before.is_some() && change.is_about(name);
        let Some(index) = self.exports.iter().position(is_it) else { return };
        let change = &mut self.exports[index];
        if let (Some(before), Some(now)) = (&change.before, &mut change.now) {
            let mut made = export.clone();
            for place in places(before).union(&places(now)).filter(|place| !disks.contains(place)) {
                if !is_same_disk(before, now, *place) {
                    copy_disk(&mut made, now, *place);
                }
            }
            *now = made;
            change.before = Some(export.clone());
        }
        if self.exports[index].is_empty() {
            self.exports.remove(index);
        }
    }

    /// Applies the changes to this base. Where the base has changed since the command, the base
    /// holds.
    pub(crate) fn merge(&mut self, base: &[ExportSpec], settings: &Settings) -> Merged {
        let mut merged = Merged { exports: base.to_vec(), ..Merged::default() };
        let lost = self.settings.merge(settings);
        if lost != SettingsChange::default() {
            let text = "the command line or the configuration file has other values than before, \
                        which take precedence";
            let text = format!("settings of control commands are dropped: {text}");
            merged.dropped.push((String::new(), text));
        }
        merged.settings = self.settings.now.clone();
        let changes = std::mem::take(&mut self.exports);
        // Removals come first, because they free places.
        let (removed, others): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|change| change.now.is_none());
        let changes = removed.into_iter().chain(others);
        self.exports = changes.filter_map(|change| merged.apply(change)).collect();
        merged
    }
}

impl Merged {
    /// Applies a change. Returns it relative to this base, unless nothing is left of it.
    fn apply(&mut self, ExportChange { before, now }: ExportChange) -> Option<ExportChange> {
        match (before, now) {
            (None, Some(now)) => {
                let name = now.name();
                if let Some(common) = self.exports.iter().find_map(|own| own.clashes_with(&now)) {
                    let text = format!(
                        "dropped the export that a control command added: the command line or the \
                         configuration file now names {common}"
                    );
                    self.dropped.push((name, text));
                    return None;
                }
                self.log_lines
                    .push((name, "restored the export that a control command added".to_owned()));
                self.added.push(now.clone());
                Some(ExportChange { before: None, now: Some(now) })
            }
            (Some(before), None) => {
                let index = self.exports.iter().position(|own| own.name() == before.name())?;
                let name = before.name();
                if self.exports[index] != before {
                    let text = "a control command removed it, but its entry on the command line or \
                                in the configuration file has changed since: it is served";
                    self.dropped.push((name, text.to_owned()));
                    return None;
                }
                self.exports.remove(index);
                let text = "stays removed, because a control command removed it; to serve it, add \
                            it with `ringhaul ctl`, or start with --state none";
                self.log_lines.push((name, text.to_owned()));
                Some(ExportChange { before: Some(before), now: None })
            }
            (Some(before), Some(now)) => self.apply_altered(&before, &now),
            (None, None) => None,
        }
    }

    fn apply_altered(&mut self, before: &ExportSpec, now: &ExportSpec) -> Option<ExportChange> {
        let name = before.name();
        let own = self.exports.iter_mut().find(|own| is_same_export(own, before));
        let Some(own) = own else {
            let text = "the command line and the configuration file no longer name it: its changes \
                        by control commands are dropped";
            self.dropped.push((name, text.to_owned()));
            return None;
        };
        let (base, mut changed) = (own.clone(), Vec::new());
        for place in places(before).union(&places(now)) {
            let what = place.map_or("its disk".to_owned(), |place| format!("unit {place}"));
            if is_same_disk(before, now, *place) {
                continue;
            }
            if !is_same_disk(before, &base, *place) {
                let text = format!(
                    "the entry of {what} on the command line or in the configuration file has \
                     changed since a control command changed it, and takes precedence"
                );
                self.dropped.push((name.clone(), text));
                continue;
            }
            copy_disk(own, now, *place);
            changed.push(what);
            let is_new = |spec: &ExportSpec| unit_at(spec, *place).is_none();
            if let Some(place) = place.filter(|_| is_new(before)) {
                self.units.push((name.clone(), place));
            }
        }
        let made = ExportChange { before: Some(base), now: Some(own.clone()) };
        if made.is_empty() {
            return None;
        }
        let text = format!("restored the changes of control commands: {}", changed.join(", "));
        self.log_lines.push((name, text));
        Some(made)
    }
}

/// An export without the name that repeats its socket.
fn unnamed(export: &ExportSpec) -> ExportSpec {
    let name = export.name.clone().filter(|name| *name != export.endpoint.to_string());
    ExportSpec { name, ..export.clone() }
}

/// Returns true if both are one export. Its disks and their rules may differ.
fn is_same_export(one: &ExportSpec, other: &ExportSpec) -> bool {
    discriminant(&one.device) == discriminant(&other.device)
        && one.name() == other.name()
        && one.endpoint == other.endpoint
}

/// Returns true if both have the same disks and rules. Their texts may differ.
fn is_equal(one: &ExportSpec, other: &ExportSpec) -> bool {
    let mut places = places(one);
    places.extend(self::places(other));
    is_same_export(one, other) && places.iter().all(|place| is_same_disk(one, other, *place))
}

fn places(export: &ExportSpec) -> BTreeSet<Option<UnitPlace>> {
    export.device.places().into_iter().collect()
}

fn unit_at(export: &ExportSpec, place: Option<UnitPlace>) -> Option<&UnitSpec> {
    match &export.device {
        DeviceSpec::Blk(_) => None,
        DeviceSpec::Scsi(units) => units.iter().find(|unit| Some(unit.place()) == place),
    }
}

/// The rules of the disk at a place.
fn rules_at(export: &ExportSpec, place: Option<UnitPlace>) -> Option<QosSpec> {
    let usual = &export.settings.rules;
    match &export.device {
        DeviceSpec::Blk(_) => Some(usual.clone()),
        DeviceSpec::Scsi(_) => Some(unit_at(export, place)?.settings.rules(usual)),
    }
}

fn is_same_disk(one: &ExportSpec, other: &ExportSpec, place: Option<UnitPlace>) -> bool {
    let shown = |unit: &UnitSpec| {
        let settings = unit.settings.clone();
        let settings = UnitSettings { limits: None, rerror: None, werror: None, ..settings };
        (settings, unit.disk.clone())
    };
    let units = [one, other].map(|export| unit_at(export, place).map(shown));
    rules_at(one, place) == rules_at(other, place) && units[0] == units[1]
}

/// Gives `to` the disk of `from` at a place, with its rules, or removes it.
fn copy_disk(to: &mut ExportSpec, from: &ExportSpec, place: Option<UnitPlace>) {
    let rules = rules_at(from, place);
    match (&mut to.device, rules) {
        (DeviceSpec::Blk(_), Some(rules)) => to.settings.rules = rules,
        (DeviceSpec::Blk(_), None) => {}
        (DeviceSpec::Scsi(units), rules) => {
            let at = units.iter().position(|unit| Some(unit.place()) == place);
            let (Some(mut unit), Some(rules)) = (unit_at(from, place).cloned(), rules) else {
                at.into_iter().for_each(|at| drop(units.remove(at)));
                return;
            };
            unit.settings.set_rules(&rules, &to.settings.rules);
            match at {
                Some(at) => units[at] = unit,
                None => units.push(unit),
            }
        }
    }
}
