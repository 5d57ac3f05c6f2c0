//! The options of a process, with which the process that takes over continues.

use std::ffi::OsString;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};

use super::format::ProcessOptions;
use crate::log::LogFormat;
use crate::options::ServeArgs;
use crate::options::config::{Config, ConfigFile};
use crate::sandbox::options::SandboxMode;
use crate::spec::settings::SettingsChange;

/// The options of `ringhaul serve`, where later ones replace earlier ones.
#[derive(Debug, Parser)]
#[command(name = "ringhaul serve", args_override_self = true, disable_help_flag = true)]
struct AllOptions {
    #[command(flatten)]
    serve: ServeArgs,
    /// The filter of the log, an option of all commands.
    #[arg(long)]
    log: Option<String>,
    /// The format of the log.
    #[arg(long)]
    log_format: Option<LogFormat>,
}

/// The options of an upgrade that later starts take from a state file. Code inside the sandbox can
/// replace that file: none of them gives a right, names a file or opens a socket.
const KEPT: [&str; 13] = [
    "engine",
    "iopoll",
    "iothreads",
    "keep-connections",
    "log",
    "log-format",
    "max-guest-memory",
    "max-mapped-memory",
    "poll-budget",
    "poll-max-us",
    "slice-us",
    "slow-request",
    "sqpoll",
];

/// Divides the words of an upgrade into those that a later start uses and, as `--name=value`, the
/// options that only a command line may have. The options of `command_line` are in neither part.
pub(crate) fn split_upgrade(
    words: &[String],
    command_line: &[String],
) -> (Vec<String>, Vec<String>) {
    let (kept, dropped): (Vec<_>, Vec<_>) =
        each_option(words).into_iter().partition(|(name, _)| KEPT.contains(&&**name));
    let known: Vec<String> =
        each_option(command_line).into_iter().map(|(_, words)| words.join("=")).collect();
    let dropped = dropped.into_iter().map(|(_, words)| words.join("="));
    let dropped = dropped.filter(|option| !known.contains(option)).collect();
    (kept.into_iter().flat_map(|(_, words)| words).collect(), dropped)
}

/// The options among these words: each one's name and its words. The name of a word that is no
/// option is empty.
fn each_option(words: &[String]) -> Vec<(String, Vec<String>)> {
    let command = AllOptions::command();
    let mut words = words.iter().peekable();
    let mut all = Vec::new();
    while let Some(word) = words.next() {
        let option = word.strip_prefix("--").unwrap_or_default();
        let name = option.split_once('=').map_or(option, |(name, _)| name);
        let mut whole = vec![word.clone()];
        let argument = command.get_arguments().find(|argument| argument.get_long() == Some(name));
        if name == option && argument.is_some_and(|argument| argument.get_action().takes_values()) {
            whole.extend(words.next_if(|next| !next.starts_with('-')).cloned());
        }
        all.push((name.to_owned(), whole));
    }
    all
}

/// The options with which a process continues.
pub(crate) struct ParsedOptions {
    pub(crate) args: ServeArgs,
    /// The filter of the log. `None`: no option sets it.
    pub(crate) log: Option<String>,
    /// The format of the log. `None`: no option sets it.
    pub(crate) log_format: Option<LogFormat>,
    /// The configuration file, if the options name one. Its settings are among the options.
    pub(crate) config: Option<(ConfigFile, Config)>,
}

impl ProcessOptions {
    /// The options of this process, without the options of the process that it takes over from.
    ///
    /// # Errors
    ///
    /// When the working directory is gone, or an option is no text.
    pub(crate) fn current() -> Result<Self> {
        let directory =
            std::env::current_dir().context("cannot determine the working directory")?;
        let arguments = own_arguments(std::env::args_os())?;
        Ok(Self { directory, arguments, changes: SettingsChange::default() })
    }

    /// The options that apply when the process `own` takes over from this one. An option of `own`
    /// takes precedence.
    #[must_use]
    pub(crate) fn overridden_by(mut self, own: &Self) -> Self {
        if !self.arguments.ends_with(&own.arguments) {
            self.arguments.extend(own.arguments.iter().cloned());
        }
        self
    }

    /// Checks the mode of the sandbox that the options of both processes give: code inside the
    /// sandbox of the old one may have stated them. Only the command line of this process may
    /// choose a mode that confines nothing.
    ///
    /// # Errors
    ///
    /// When it does not.
    pub(crate) fn check_sandbox(&self, mode: SandboxMode) -> Result<()> {
        let own = each_option(&self.arguments);
        ensure!(
            mode.confines() || own.iter().any(|(name, _)| name == "sandbox"),
            "the daemon states --sandbox {mode}, which code that has broken into it could do, too; \
             if no sandbox is wanted, give --sandbox {mode} to this command (`ringhaul ctl upgrade \
             --sandbox {mode} PROGRAM`)"
        );
        Ok(())
    }

    /// The options, including the settings of the configuration file.
    ///
    /// # Errors
    ///
    /// When this version does not understand one of them.
    pub(crate) fn parse(&self) -> Result<ParsedOptions> {
        let cannot = "cannot continue with the options of the old process";
        let AllOptions { serve, log, log_format } = self.whole().context(cannot)?;
        let Some(path) = &serve.config else {
            return Ok(ParsedOptions { args: serve, log, log_format, config: None });
        };
        let program =
            clap::Command::new("ringhaul").subcommand(AllOptions::command().name("serve"));
        let words = self.words().collect();
        let file = ConfigFile::new(&self.directory.join(path), program, words, 2);
        let config = file.read().context(cannot)?;
        let all = config.matches.subcommand_matches("serve").context("the command is not `serve`");
        let AllOptions { serve, log, log_format } =
            AllOptions::from_arg_matches(all.context(cannot)?)?;
        Ok(ParsedOptions { args: serve, log, log_format, config: Some((file, config)) })
    }

    /// The options on the log, each once, for a process that needs them before it has asked for the
    /// rest. Settings of a configuration file stay out: on the command line they would hold for
    /// ever.
    ///
    /// # Errors
    ///
    /// When the options are not understood.
    pub(crate) fn log_options(&self) -> Result<Vec<String>> {
        let AllOptions { log, log_format, .. } = self.whole()?;
        let log = log.map(|filter| format!("--log={filter}"));
        let format = log_format.and_then(|format| format.to_possible_value());
        let format = format.map(|format| format!("--log-format={}", format.get_name()));
        Ok(log.into_iter().chain(format).collect())
    }

    fn whole(&self) -> Result<AllOptions> {
        AllOptions::try_parse_from(self.words().skip(1)).map_err(|error| anyhow!("{error}"))
    }

    /// A command line with these options.
    fn words(&self) -> impl Iterator<Item = OsString> {
        let words = ["ringhaul", "serve"].map(OsString::from).into_iter();
        words.chain(self.arguments.iter().map(OsString::from))
    }
}

/// The options among the words of a command line.
fn own_arguments(words: impl Iterator<Item = OsString>) -> Result<Vec<String>> {
    let (mut arguments, mut is_value, mut has_command) = (Vec::new(), false, false);
    for word in words.skip(1) {
        let Some(word) = word.to_str() else { bail!("the option {} is not UTF-8", word.display()) };
        if std::mem::take(&mut is_value) || word.starts_with("--takeover=") {
            continue;
        }
        if word == "--takeover" {
            is_value = true;
        } else if word == "serve" && !has_command {
            has_command = true;
        } else {
            arguments.push(word.to_owned());
        }
    }
    Ok(arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process_options(words: &str) -> ProcessOptions {
        let arguments = own_arguments(words.split(' ').map(OsString::from)).unwrap();
        ProcessOptions { directory: "/".into(), arguments, changes: SettingsChange::default() }
    }

    /// The new process reads relative paths in the folder of the old one.
    #[test]
    fn a_process_tells_the_folder_in_which_it_works() {
        let own = ProcessOptions::current().unwrap();
        assert_eq!(own.directory, std::env::current_dir().unwrap());
        assert_eq!(own.changes, SettingsChange::default());
    }

    #[test]
    fn the_options_of_the_new_process_count_where_both_have_one() {
        let old = process_options(
            "ringhaul --log debug serve --iothreads 2 --blk-file /serve --engine aio",
        );
        assert_eq!(old.arguments[2..4], ["--iothreads", "2"]);
        for (new, iothreads) in [
            ("new serve --takeover /control", 2),
            ("new --takeover=/control", 2),
            ("new --log debug serve --iothreads 2 --takeover x --blk-file /serve --engine aio", 2),
            ("new serve --takeover /control --iothreads 3", 3),
        ] {
            let new = process_options(new);
            let both = old.clone().overridden_by(&new);
            assert_eq!(both.parse().unwrap().args.iothreads, iothreads, "{both:?}");
            // Repeated takeovers do not make it grow.
            for again in [&new, &both] {
                assert_eq!(both.clone().overridden_by(again).arguments, both.arguments);
            }
        }
        let error = format!("{:#}", process_options("old serve --nonsense").parse().err().unwrap());
        assert!(error.contains("--nonsense"), "{error}");
    }

    /// Code inside the sandbox may have written them.
    #[test]
    fn no_option_of_a_state_file_gives_a_right() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let own = words("--control /c --allow-disk-dir=/srv");
        let bad = "--sandbox=off --sandbox off --allow-disk-dir=/ --allow-socket-dir / \
                   --allow-network --control=/d --control-group x --control-read-group=x \
                   --config /c.toml --metrics=[::]:80 --state=/s --memory-files any --fd 3 \
                   --export name=x --takeover ctl -x -- stray --control=/c";
        let mixed = format!("--iothreads 4 {bad} --engine=aio --sqpoll --allow-disk-dir /srv");
        let (kept, dropped) = split_upgrade(&words(&mixed), &own);
        assert_eq!(kept, words("--iothreads 4 --engine=aio --sqpoll"));
        // The command line has the last one.
        let expected = "--sandbox=off --sandbox=off --allow-disk-dir=/ --allow-socket-dir=/ \
                        --allow-network --control=/d --control-group=x --control-read-group=x \
                        --config=/c.toml --metrics=[::]:80 --state=/s --memory-files=any --fd=3 \
                        --export=name=x --takeover=ctl -x -- stray";
        assert_eq!(dropped, words(expected));
        // An option is no value of the one before it.
        let (kept, dropped) = split_upgrade(&words("--log --sandbox=off"), &[]);
        assert_eq!((kept, dropped), (words("--log"), words("--sandbox=off")));
        let command = AllOptions::command();
        for name in KEPT {
            assert!(command.get_arguments().any(|known| known.get_long() == Some(name)), "{name}");
        }
    }

    /// Code inside the sandbox of the old process may have written its options.
    #[test]
    fn the_own_command_line_alone_switches_the_sandbox_off() {
        for (own, mode, is_accepted) in [
            ("serve --takeover /c", SandboxMode::Off, false),
            ("serve --takeover /c", SandboxMode::Log, false),
            ("serve --takeover /c", SandboxMode::Strict, true),
            ("serve --takeover /c --sandbox off", SandboxMode::Off, true),
            ("serve --takeover /c --sandbox=log", SandboxMode::Log, true),
            ("serve --takeover --sandbox --sandbox-x", SandboxMode::Off, false),
        ] {
            let own = process_options(&format!("ringhaul {own}"));
            assert_eq!(own.check_sandbox(mode).is_ok(), is_accepted, "{own:?}");
        }
    }

    #[test]
    fn options_on_the_log_are_given_once_however_often_they_are_handed_on() {
        let words = "ringhaul --log debug serve --blk-file=--log-file --log-format=json --log info";
        let mut old = process_options(words);
        for upgrade in 1..4 {
            let options = old.log_options().unwrap();
            assert_eq!(options, ["--log=info", "--log-format=json"], "upgrade {upgrade}");
            let words = format!("ringhaul {} serve --takeover x", options.join(" "));
            let next = old.clone().overridden_by(&process_options(&words));
            assert!(upgrade == 1 || next.arguments == old.arguments, "it grows: {next:?}");
            old = next;
        }
        assert_eq!(process_options("ringhaul serve --blk-file x").log_options().unwrap(), [""; 0]);
    }

    #[test]
    fn the_command_line_overrides_the_log_options_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        std::fs::write(&path, "log = 'debug'\nlog-format = 'json'").unwrap();
        let words = format!("ringhaul serve --config {}", path.display());
        let ParsedOptions { log, log_format, .. } = process_options(&words).parse().unwrap();
        assert_eq!((log.as_deref(), log_format), (Some("debug"), Some(LogFormat::Json)));
        let ParsedOptions { log, .. } =
            process_options(&format!("{words} --log warn")).parse().unwrap();
        assert_eq!(log.as_deref(), Some("warn"));
        assert_eq!(process_options(&words).log_options().unwrap(), [""; 0]);
    }
}
