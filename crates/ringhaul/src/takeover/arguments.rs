//! How a process was started, so that the one that takes over works in the same way.

use std::ffi::OsString;

use anyhow::{Context, Result, anyhow, bail};
use clap::{CommandFactory, Parser};

use super::format::Life;
use crate::config::{Config, ConfigFile};
use crate::options::ServeArgs;
use crate::settings::SettingsChange;

/// The options of `ringhaul serve`, where later ones replace earlier ones.
#[derive(Debug, Parser)]
#[command(name = "ringhaul serve", args_override_self = true, disable_help_flag = true)]
struct Whole {
    #[command(flatten)]
    serve: ServeArgs,
    /// Of the log, which is set up already.
    #[arg(long)]
    log: Option<String>,
    /// The same.
    #[arg(long)]
    log_format: Option<String>,
}

impl Life {
    /// That of this process, without what it takes over from.
    ///
    /// # Errors
    ///
    /// When the working directory is gone, or an option is no text.
    pub(crate) fn own() -> Result<Self> {
        let directory = std::env::current_dir().context("cannot tell the working directory")?;
        let arguments = own_arguments(std::env::args_os())?;
        Ok(Self { directory, arguments, changes: SettingsChange::default() })
    }

    /// The life that goes on when this process, with its own options, takes over from that one. Its
    /// own ones count where both have one.
    #[must_use]
    pub(crate) fn continued_by(mut self, own: &Self) -> Self {
        if self.arguments != own.arguments {
            self.arguments.extend(own.arguments.iter().cloned());
        }
        self
    }

    /// The options, and the configuration file if they name one, whose options are among them.
    ///
    /// # Errors
    ///
    /// When this version does not understand one of them.
    pub(crate) fn options(&self) -> Result<(ServeArgs, Option<(ConfigFile, Config)>)> {
        let cannot = "cannot go on with the options of the old process";
        let words = ["ringhaul", "serve"].map(str::to_owned).into_iter();
        let words: Vec<OsString> = words.chain(self.arguments.clone()).map(Into::into).collect();
        let whole = Whole::try_parse_from(&words[1..]);
        let args = whole.map_err(|error| anyhow!("{cannot}: {error}"))?.serve;
        let Some(path) = &args.config else { return Ok((args, None)) };
        let program = clap::Command::new("ringhaul").subcommand(Whole::command().name("serve"));
        let file = ConfigFile::new(&self.directory.join(path), program, words, 2);
        let config = file.read().context(cannot)?;
        Ok((config.args.clone(), Some((file, config))))
    }
}

/// The options among the words of a command line.
fn own_arguments(words: impl Iterator<Item = OsString>) -> Result<Vec<String>> {
    let (mut arguments, mut is_value, mut has_command) = (Vec::new(), false, false);
    for word in words.skip(1) {
        let Some(word) = word.to_str() else { bail!("the option {} is no text", word.display()) };
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

    fn life(words: &str) -> Life {
        let arguments = own_arguments(words.split(' ').map(OsString::from)).unwrap();
        Life { directory: "/".into(), arguments, changes: SettingsChange::default() }
    }

    #[test]
    fn the_options_of_the_new_process_count_where_both_have_one() {
        let old = life("ringhaul --log debug serve --iothreads 2 --blk-file /serve --engine aio");
        assert_eq!(old.arguments[2..4], ["--iothreads", "2"]);
        for (new, iothreads) in [
            ("new serve --takeover /control", 2),
            ("new --takeover=/control", 2),
            ("new --log debug serve --iothreads 2 --takeover x --blk-file /serve --engine aio", 2),
            ("new serve --takeover /control --iothreads 3", 3),
        ] {
            let new = life(new);
            let both = old.clone().continued_by(&new);
            assert_eq!(both.options().unwrap().0.iothreads, iothreads, "{both:?}");
            // Taken over again and again, it does not grow.
            assert_eq!(both.clone().continued_by(&both).arguments, both.arguments);
        }
        let error = life("old serve --nonsense").options().err().unwrap().to_string();
        assert!(error.contains("--nonsense"), "{error}");
    }
}
