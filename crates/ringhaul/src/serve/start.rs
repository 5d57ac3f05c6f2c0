//! The options and exports at a start: the command line, with the upgrades and commands that an
//! earlier process kept.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::daemon::Daemon;
use crate::daemon::arguments::{ParsedOptions, split_upgrade};
use crate::daemon::format::ProcessOptions;
use crate::daemon::saved_state::changes::{Changes, Merged};
use crate::daemon::saved_state::file::{Locked, StateFile};
use crate::daemon::saved_state::{self, SavedState};
use crate::log;
use crate::options::ServeArgs;
use crate::options::config::{Config, ConfigFile};
use crate::socket::permissions::{check_private_folder, group_id};
use crate::spec::ExportSpec;
use crate::spec::settings::Settings;

/// A start.
pub(super) struct Start {
    pub(super) args: ServeArgs,
    pub(super) config: Option<(ConfigFile, Config)>,
    pub(super) options: ProcessOptions,
    /// The exports of the command line and of the configuration file.
    base: Vec<ExportSpec>,
    /// `None`: nothing is kept.
    state: Option<State>,
}

/// A state file, its contents, and its lock until it is written again.
pub(super) type State = (StateFile, Changes, Option<Locked>);

impl Start {
    /// Reads the start of a process with these options, and its state file.
    ///
    /// # Errors
    ///
    /// When strangers can replace the state file, it is another daemon's or cannot be understood,
    /// or the options of an upgrade are no longer understood.
    pub(super) fn read(args: &ServeArgs, config: Option<(ConfigFile, Config)>) -> Result<Self> {
        let mut start = Self {
            args: args.clone(),
            config,
            options: ProcessOptions::current()?,
            base: args.exports()?,
            state: None,
        };
        if let Some(path) = saved_state::place(args.state.as_deref(), args.control.as_deref())? {
            check_folder(&path, args.control_group.as_deref())?;
            let (file, mut changes, locked) = StateFile::open(&path)?;
            start.adopt_upgrades(&mut changes)?;
            start.options.arguments.push(state_option(&path));
            start.state = Some((file, changes, locked));
        }
        let of_file = start.config.iter().flat_map(|(_, config)| config.exports.iter().cloned());
        start.base.extend(of_file);
        Ok(start)
    }

    /// All exports that the daemon may begin with.
    pub(super) fn all_exports(&self) -> Vec<ExportSpec> {
        let mut all = self.base.clone();
        if let Some((_, changes, _)) = &self.state {
            let settings = Settings::from_limits(self.args.poll_limits());
            let merged = changes.clone().merge(&self.base, &settings);
            all.extend(merged.exports.into_iter().chain(merged.added));
        }
        all
    }

    /// Adopts the options of upgrades, if the process was started like the first one. Options that
    /// could give it more rights are dropped.
    fn adopt_upgrades(&mut self, changes: &mut Changes) -> Result<()> {
        let Changes { started, upgraded, .. } = changes;
        let is_same = *started == self.options.arguments;
        started.clone_from(&self.options.arguments);
        if upgraded.is_empty() {
            return Ok(());
        }
        let shown = upgraded.join(" ");
        if !is_same {
            tracing::warn!(
                "dropped the options of an upgrade, because the command line has changed: {shown}"
            );
            upgraded.clear();
            return Ok(());
        }
        let (kept, dropped) = split_upgrade(upgraded, &self.options.arguments);
        *upgraded = kept;
        if !dropped.is_empty() {
            tracing::warn!(
                "dropped options of an upgrade, which only the command line may have: {}; if they \
                 are wanted, add them there",
                dropped.join(" ")
            );
        }
        if upgraded.is_empty() {
            return Ok(());
        }
        tracing::info!("using the options of an earlier upgrade: {}", upgraded.join(" "));
        self.options.arguments.extend(upgraded.iter().cloned());
        let ParsedOptions { args, log, log_format, config } = self.options.parse()?;
        log::adopt(log.as_deref(), log_format)?;
        (self.args, self.config) = (args, config);
        Ok(())
    }

    /// Returns the exports for a daemon, which keeps later changes.
    ///
    /// # Errors
    ///
    /// When the state file cannot be written.
    pub(super) fn begin(
        base: Vec<ExportSpec>,
        state: Option<State>,
        daemon: &Daemon,
    ) -> Result<Merged> {
        let Some((file, changes, locked)) = state else {
            return Ok(Merged { exports: base, ..Merged::default() });
        };
        let settings = Settings::from_limits(daemon.poll_limits());
        let (saved_state, merged) = SavedState::begin(file, changes, base, settings)?;
        drop(locked);
        daemon.set_saved_state(saved_state);
        Ok(merged)
    }

    /// Returns the base and the state.
    pub(super) fn into_base(self) -> (Vec<ExportSpec>, Option<State>) {
        (self.base, self.state)
    }
}

/// The state of the process that this one takes over from.
pub(super) struct PreviousState {
    /// `None`: nothing is kept.
    path: Option<PathBuf>,
    /// The options of the previous process.
    before: ProcessOptions,
    pub(super) options: ProcessOptions,
}

impl PreviousState {
    /// Reads the state file that the options of both processes name.
    ///
    /// # Errors
    ///
    /// When the state file cannot be understood.
    pub(super) fn read(
        before: ProcessOptions,
        mut options: ProcessOptions,
        args: &ServeArgs,
    ) -> Result<Self> {
        let path = saved_state::place(args.state.as_deref(), args.control.as_deref())?;
        if let Some(path) = &path {
            StateFile::take_over(path)?;
            let option = state_option(path);
            if !options.arguments.contains(&option) {
                options.arguments.push(option);
            }
        }
        Ok(Self { path, before, options })
    }

    /// Continues the state, for a daemon that serves the exports of the previous process.
    ///
    /// # Errors
    ///
    /// When the state file cannot be read or written.
    pub(super) fn resume(
        &self,
        of_file: Option<&[ExportSpec]>,
        settings: Settings,
        daemon: &Daemon,
    ) -> Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let (file, mut changes) = StateFile::take_over(path)?;
        if changes.started.is_empty() {
            changes.started.clone_from(&self.before.arguments);
        }
        let first = ProcessOptions { arguments: changes.started.clone(), ..self.before.clone() };
        changes.upgraded = self.added_to(&first)?;
        let mut base = first.parse()?.args.exports()?;
        base.extend(of_file.into_iter().flatten().cloned());
        let (saved_state, _) = SavedState::begin(file, changes, base, settings)?;
        daemon.set_saved_state(saved_state);
        daemon.keep_all(&daemon.changes())
    }

    /// The options that upgrades have added.
    fn added_to(&self, first: &ProcessOptions) -> Result<Vec<String>> {
        let known = first.log_options()?;
        let all = self.options.arguments.iter().skip(first.arguments.len());
        let is_new = |option: &&String| !known.contains(option) && !option.starts_with(STATE);
        Ok(all.filter(is_new).cloned().collect())
    }
}

/// The start of the option that names the file.
const STATE: &str = "--state=";

/// The option that names the file by its absolute path: the next process may start in another
/// folder.
fn state_option(path: &Path) -> String {
    format!("{STATE}{}", path.display())
}

/// Checks that only root, this user and the members of the control group can replace the file,
/// which names disks.
fn check_folder(state: &Path, control_group: Option<&str>) -> Result<()> {
    let group = control_group.map(group_id).transpose().context("cannot use --control-group")?;
    check_private_folder(state, group)
        .with_context(|| format!("cannot use the state file {}", state.display()))
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;
    use crate::sandbox::options::SandboxMode;
    use crate::spec::settings::SettingsChange;

    fn options(arguments: &[&str]) -> ProcessOptions {
        let arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
        let changes = SettingsChange::default();
        ProcessOptions { directory: "/".into(), arguments, changes }
    }

    /// The user has written another command line since the upgrade.
    #[test]
    fn options_of_an_upgrade_end_with_its_command_line() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let own = ["--poll-budget=9"];
        let base = Vec::new();
        let mut start = Start { args, config: None, options: options(&own), base, state: None };
        let mut changes = Changes {
            started: vec!["--poll-budget=8".to_owned()],
            upgraded: vec!["--poll-max-us=5".to_owned()],
            ..Changes::default()
        };
        start.adopt_upgrades(&mut changes).unwrap();
        assert_eq!((changes.started, changes.upgraded), (own.map(str::to_owned).to_vec(), vec![]));
        assert_eq!(start.options.arguments, own);
    }

    /// Code inside the sandbox may have replaced the file.
    #[test]
    fn an_upgrade_in_a_state_file_leaves_the_sandbox_on() {
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        let args = ServeArgs::from_arg_matches(&serve.get_matches_from(["serve"])).unwrap();
        let own = ["--poll-budget=9"];
        let base = Vec::new();
        let mut start = Start { args, config: None, options: options(&own), base, state: None };
        let upgraded = ["--sandbox=off", "--allow-disk-dir=/", "--poll-max-us=5"];
        let mut changes = Changes {
            started: own.map(str::to_owned).to_vec(),
            upgraded: upgraded.map(str::to_owned).to_vec(),
            ..Changes::default()
        };
        start.adopt_upgrades(&mut changes).unwrap();
        assert_eq!(changes.upgraded, ["--poll-max-us=5"]);
        assert_eq!(start.options.arguments, ["--poll-budget=9", "--poll-max-us=5"]);
        assert_eq!((start.args.confinement.sandbox, start.args.poll_max_us), (SandboxMode::On, 5));
        assert!(start.args.allow_disk_dir.is_empty());
    }

    /// The path of the file is no option of an upgrade: each process adds it.
    #[test]
    fn the_options_that_an_upgrade_has_added_are_told_from_the_first_ones() {
        let first = options(&["--disk=null:1M", "--socket-path=/s"]);
        let all = ["--disk=null:1M", "--socket-path=/s", "--poll-max-us=5", "--state=/state"];
        let previous = PreviousState { path: None, before: first.clone(), options: options(&all) };
        assert_eq!(previous.added_to(&first).unwrap(), ["--poll-max-us=5"]);
    }
}
