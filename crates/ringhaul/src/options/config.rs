//! The configuration file: exports in the form that other programs write, and options of `serve`.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use blockio::file::open_regular;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, FromArgMatches};
use ringhaul_options::redact::escape_controls;
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use crate::options::{ServeArgs, one_line};
use crate::sandbox::helper;
use crate::socket::{Endpoint, permissions};
use crate::spec::parser_words::{FILE, reword_syntax};
use crate::spec::{EndpointSpec, ExportSpec, WrittenExport};

/// The key of exports. Every other key is an option.
const EXPORT: &str = "export";

/// Options without a key in the file.
const COMMAND_LINE_ONLY: &[&str] =
    &["config", "fd", "help", "print-capabilities", "takeover", "version"];

/// Options that belong to one export.
const EXPORT_OPTIONS: &[&str] =
    &["socket-path", "name", "device", "lun", "blk-file", "disk", "serial", "iothread"];

/// A file and the command line that it extends.
#[derive(Clone)]
pub struct ConfigFile {
    path: PathBuf,
    program: clap::Command,
    arguments: Vec<OsString>,
    /// The number of arguments before the options of `serve`.
    options_at: usize,
}

/// The merged content of a file and the command line.
#[derive(Debug)]
pub struct Config {
    /// All options of the program.
    pub matches: ArgMatches,
    /// The options of `serve`.
    pub args: ServeArgs,
    /// The exports of the file.
    pub exports: Vec<ExportSpec>,
    /// The options of the file that take effect, in command-line form.
    pub(crate) options: BTreeMap<String, Vec<String>>,
}

/// A parsed value and its place in the file.
struct Placed<T> {
    at: Range<usize>,
    what: T,
}

impl ConfigFile {
    /// Creates a reader of the file at `path`, for a program that was called with `arguments`, the
    /// first `options_at` of which stand before the options of `serve`.
    pub fn new(
        path: &Path,
        mut program: clap::Command,
        arguments: Vec<OsString>,
        options_at: usize,
    ) -> Self {
        // Propagates global options to every subcommand.
        program.build();
        Self { path: path.to_owned(), program, arguments, options_at }
    }

    /// The path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or a part of it is invalid. The error names line and column.
    pub fn read(&self) -> Result<Config> {
        let path = self.path.display();
        let file = helper::open_config(&self.path).unwrap_or_else(|| open_regular(&self.path));
        let text = file.and_then(std::io::read_to_string);
        let text = text.with_context(|| format!("cannot read the configuration file {path}"))?;
        self.parse(&text)
    }

    fn parse(&self, text: &str) -> Result<Config> {
        let error_at = |at: Range<usize>, message: &str| {
            let (line, column) = place(text, at.start);
            anyhow!("{}:{line}:{column}: {message}", self.path.display())
        };
        let syntax_error = |error: toml::de::Error| {
            let message = reword_syntax(error.message().trim());
            error_at(error.span().unwrap_or(0..0), &message)
        };
        let table = DeTable::parse(text).map_err(syntax_error)?.into_inner();
        let (mut options, mut written) = (BTreeMap::new(), Vec::new());
        for (key, value) in table {
            let at = key.span();
            if key.get_ref() == EXPORT {
                written = exports(value).map_err(|(at, message)| error_at(at, &message))?;
                continue;
            }
            let option = self.option(key.get_ref(), value);
            let option = option.map_err(|error| error_at(at, &format!("{error:#}")))?;
            options.extend(option.map(|option| (key.get_ref().to_string(), option)));
        }
        self.add_to_command_line(options, written, (error_at, &|byte| place(text, byte).0))
    }

    /// Converts a key and its value to command-line options. `None` if that is the default, or the
    /// command line sets the option itself.
    fn option(&self, key: &str, value: Spanned<DeValue<'_>>) -> Result<Option<Vec<String>>> {
        let serve = self.program.find_subcommand("serve").context("the program has no `serve`")?;
        if EXPORT_OPTIONS.contains(&key) {
            return Err(anyhow!("{key} is a key of an export; write it under [[export]]"));
        }
        let known = |arg: &&Arg| arg.get_long() == Some(key) && !COMMAND_LINE_ONLY.contains(&key);
        let arg = serve.get_arguments().find(known);
        let arg = arg.with_context(|| format!("unknown option '{key}'; see `serve --help`"))?;
        let value = toml::Value::deserialize(ValueDeserializer::from(value))
            .map_err(|error| anyhow!("{}", FILE.reword(error.message())))?;
        let options = options(key, arg, value)?;
        let words = ["serve"].into_iter().chain(options.iter().map(String::as_str));
        match serve.clone().try_get_matches_from(words) {
            // A missing companion option may come from another key or from the command line.
            Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => {
                return Err(anyhow!("{}", one_line(&error)));
            }
            _ => {}
        }
        let given = self.program.clone().try_get_matches_from(&self.arguments)?;
        let given = given.subcommand_matches("serve").context("the command is not `serve`")?;
        let is_given = given.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
        Ok((!is_given && !options.is_empty()).then_some(options))
    }

    fn add_to_command_line(
        &self,
        options: BTreeMap<String, Vec<String>>,
        written: Vec<Placed<WrittenExport>>,
        (error_at, line_of): (
            impl Fn(Range<usize>, &str) -> anyhow::Error,
            &dyn Fn(usize) -> usize,
        ),
    ) -> Result<Config> {
        let path = || format!("{}, with the command line", self.path.display());
        let mut arguments = self.arguments.clone();
        let at = self.options_at..self.options_at;
        arguments.splice(at, options.values().flatten().map(OsString::from));
        let matches = self.program.clone().try_get_matches_from(arguments);
        let matches = matches.map_err(|error| anyhow!("{}: {}", path(), one_line(&error)))?;
        let of_serve = matches.subcommand_matches("serve").context("the command is not `serve`")?;
        let args = ServeArgs::from_arg_matches(of_serve)?;
        args.check().with_context(path)?;
        let (mut all, usual) = (args.exports()?, args.default_settings());
        let of_command_line = all.len();
        let mut lines = Vec::new();
        for Placed { at, what } in written {
            let export = what.with_defaults(&usual);
            let clash = all.iter().enumerate().find_map(|(number, other)| {
                Some((number, export.clashes_with(other)?, other.name()))
            });
            if let Some((number, what, other)) = clash {
                let line = number.checked_sub(of_command_line).and_then(|number| lines.get(number));
                let of = line.map_or("the command line".to_owned(), |line| format!("line {line}"));
                let message = format!("{what} is already used by the export {other} of {of}");
                return Err(error_at(at, &message));
            }
            lines.push(line_of(at.start));
            if let (EndpointSpec::Path(path), Some(control)) = (&export.endpoint, &args.control)
                && path == control
            {
                let path = path.display();
                return Err(error_at(
                    at,
                    &format!("{path} is the path of the control socket; choose another path"),
                ));
            }
            if let EndpointSpec::Fd(_) = export.endpoint {
                return Err(error_at(at, "only --fd can inherit a descriptor; name a path"));
            }
            let checked = export.check(args.iothreads);
            checked.map_err(|error| error_at(at, &format!("{error:#}")))?;
            all.push(export);
        }
        let exports = all.split_off(of_command_line);
        Ok(Config { matches, args, exports, options })
    }
}

/// The exports of a file, each with the range of its text. An error has the range of the value.
fn exports(
    value: Spanned<DeValue<'_>>,
) -> Result<Vec<Placed<WrittenExport>>, (Range<usize>, String)> {
    let written = |value: Spanned<DeValue<'_>>| {
        let at = value.span();
        let read = serde_path_to_error::deserialize(ValueDeserializer::from(value));
        let what = read.map_err(|error| {
            let (place, error) = (error.path().to_string(), error.into_inner());
            let message = FILE.reword(error.message());
            // Some errors concern the whole export, and some name their place themselves.
            let is_known = place == "." || message.contains(&format!("`{place}`"));
            let message = if is_known { message } else { format!("{place}: {message}") };
            (error.span().unwrap_or_else(|| at.clone()), message)
        })?;
        Ok(Placed { at, what })
    };
    let at = value.span();
    if let DeValue::Array(_) = value.get_ref()
        && let DeValue::Array(array) = value.into_inner()
    {
        return array.into_iter().map(written).collect();
    }
    Err((at, "write each export as a table [[export]]".to_owned()))
}

/// Converts a key and its value to command-line options. A list makes one of each of its items, for
/// an option that may be repeated.
fn options(key: &str, arg: &Arg, value: toml::Value) -> Result<Vec<String>> {
    match value {
        toml::Value::Array(items) if matches!(arg.get_action(), ArgAction::Append) => {
            let made = items.into_iter().map(|item| option(key, arg, item));
            made.filter_map(Result::transpose).collect()
        }
        value => Ok(option(key, arg, value)?.into_iter().collect()),
    }
}

/// Converts a key and its value to a command-line option. `None`: a switch that is off.
fn option(key: &str, arg: &Arg, value: toml::Value) -> Result<Option<String>> {
    let is_switch = !arg.get_action().takes_values();
    let text = match (value, is_switch) {
        (toml::Value::Boolean(true), true) => return Ok(Some(format!("--{key}"))),
        (toml::Value::Boolean(false), true) => return Ok(None),
        (_, true) => return Err(anyhow!("{key} must be true or false")),
        (toml::Value::Boolean(is_on), false) => if is_on { "on" } else { "off" }.to_owned(),
        (toml::Value::String(_), false) if is_number(arg) => {
            return Err(anyhow!("{key} must be a number; write it without quotes"));
        }
        (toml::Value::String(text), false) => text,
        (toml::Value::Integer(number), false) => number.to_string(),
        (toml::Value::Float(number), false) => {
            return Err(anyhow!("{key} must be a whole number; write {number:.0}"));
        }
        (_, false) => {
            return Err(anyhow!("{key} must be a single value: a string, a number, true or false"));
        }
    };
    Ok(Some(format!("--{key}={text}")))
}

/// Returns true if the values of an option are numbers without a unit.
fn is_number(arg: &Arg) -> bool {
    let kind = arg.get_value_parser().type_id();
    [TypeId::of::<u8>(), TypeId::of::<u16>(), TypeId::of::<u32>()].iter().any(|of| kind == *of)
}

/// The line and the column of a byte, both from 1.
fn place(text: &str, byte: usize) -> (usize, usize) {
    let before = text.get(..byte).unwrap_or(text);
    let line_starts = before.rfind('\n').map_or(0, |end| end + 1);
    (before.matches('\n').count() + 1, before[line_starts..].chars().count() + 1)
}

impl Config {
    /// Checks the conditions that `serve` would check on start, as far as that opens nothing.
    ///
    /// # Errors
    ///
    /// When the control group does not exist, or a path is too long for a socket.
    pub fn check_here(&self) -> Result<()> {
        let ServeArgs { control_group, control_read_group, .. } = &self.args;
        for (group, option) in
            [(control_group, "--control-group"), (control_read_group, "--control-read-group")]
        {
            let id = group.as_deref().map(permissions::group_id).transpose();
            id.with_context(|| format!("cannot use {option}"))?;
        }
        if let Some(path) = &self.args.control {
            Endpoint::check_length(path, "--control")?;
        }
        let exports = self.args.exports()?;
        for export in exports.iter().chain(&self.exports) {
            if let EndpointSpec::Path(path) = &export.endpoint {
                Endpoint::check_length(path, "--socket-path")?;
            }
        }
        Ok(())
    }

    /// A summary with one line for each export, followed by its warnings.
    pub fn summary(&self) -> String {
        if self.exports.is_empty() {
            return "no exports\n".to_owned();
        }
        let lines = self.exports.iter().flat_map(|export| {
            let name = export.name();
            let warnings = export.content_warnings();
            let warnings =
                warnings.into_iter().map(move |warning| format!("{name}: warning: {warning}"));
            std::iter::once(export.summary()).chain(warnings)
        });
        lines.map(|line| escape_controls(&line) + "\n").collect()
    }
}
