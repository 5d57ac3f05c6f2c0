//! The log on standard error: lines for people, or for programs. A thread of its own writes them.
//!
//! An event may have a field `export`, the name of its export, and a field `left_out`, the number
//! of earlier lines that a limit has suppressed. Without the field `export`, the event has the name
//! of the export in whose [span](fn@export_span) it happens.

mod export_span;
mod filter;
mod queue;
pub(crate) mod rate_limit;
mod recent;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::ffi::OsStr;
use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use blockio::executor::Lock;
use clap::ValueEnum;
use ringhaul_options::redact::{escape_json, printable, redact};
use rustix::fs::fstat;
use serde::Serialize;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

use export_span::{ExportNames, Fields};
use queue::Lines;

pub(crate) use export_span::export_span;
pub(crate) use queue::dropped_lines;
pub use queue::flush;
pub use recent::LogLine;
pub(crate) use recent::recent_lines;

/// Values of `--log-format`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line of text: time, level, export, message.
    #[default]
    Text,
    /// A JSON object in a line: `timestamp` (RFC 3339, UTC), `level`, `message`, and where they
    /// apply `export` and `left_out`.
    Json,
}

/// The environment variable with a filter.
const VARIABLE: &str = "RUST_LOG";

/// True if lines are JSON. A process that takes over may have to change it.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// The filter of the log that was started, and the function that replaces it.
struct Filter {
    reload: Box<dyn Fn(Targets) -> Result<(), String> + Send + Sync>,
    text: Lock<String>,
}

static FILTER: OnceLock<Filter> = OnceLock::new();

/// The filter of the log. `None` if this process has not [started](start) its log.
pub fn filter() -> Option<String> {
    let filter = FILTER.get()?;
    Some(filter.text.lock().clone())
}

/// Replaces the filter of the log.
///
/// # Errors
///
/// When the filter is invalid, or this process has not [started](start) its log.
pub(crate) fn set_filter(text: &str) -> anyhow::Result<()> {
    let parsed = filter::parse(text).map_err(anyhow::Error::msg)?;
    let filter = FILTER.get().context("this process does not write its own log")?;
    let mut current = filter.text.lock();
    (filter.reload)(export_span::with_spans(parsed)).map_err(anyhow::Error::msg)?;
    text.clone_into(&mut current);
    Ok(())
}

/// Adopts the filter and format of the previous process's log, as far as options had set them.
///
/// # Errors
///
/// When the filter is invalid.
pub(crate) fn adopt(filter: Option<&str>, format: Option<LogFormat>) -> anyhow::Result<()> {
    if let Some(format) = format {
        set_format(format);
    }
    filter.map_or(Ok(()), set_filter)
}

/// True if lines are JSON now.
fn is_json() -> bool {
    IS_JSON.load(Ordering::Relaxed)
}

fn set_format(format: LogFormat) {
    IS_JSON.store(format == LogFormat::Json, Ordering::Relaxed);
}

/// Starts the log of this process. `filter` overrides the environment variable `RUST_LOG`. Lines
/// wait for the [thread](start_writing) that writes them. Earlier lines are written when [`flush`]
/// returns, unless the reader of the log hangs.
pub fn start(format: LogFormat, filter: Option<&str>) {
    queue::start();
    set_format(format);
    report_panics();
    // The text is kept as written, because the parsed filter reorders its parts.
    let given = filter.and_then(|text| Some((filter::parse(text).ok()?, text.to_owned())));
    let (filter, text, ignored) = match given {
        Some((filter, text)) => (filter, text, None),
        None => filter_of_environment(),
    };
    let text = Lock::new(text);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| Lines)
        .with_ansi(has_colours())
        .event_format(LineFormat(is_json));
    let (filter, handle) = tracing_subscriber::reload::Layer::new(export_span::with_spans(filter));
    tracing_subscriber::registry().with(filter).with(ExportNames).with(lines).init();
    let reload = Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string()));
    // A second log cannot be started: `init` would have panicked.
    let _ = FILTER.set(Filter { reload, text });
    if let Some(error) = ignored {
        tracing::warn!("RUST_LOG is ignored: {error}; see --log in --help");
    }
}

/// Starts the thread that writes the log.
///
/// # Errors
///
/// When the kernel has no thread left.
pub fn start_writing() -> anyhow::Result<()> {
    queue::start_thread().context("cannot start the thread that writes the log")
}

/// True once a thread has panicked.
static IS_PANICKING: AtomicBool = AtomicBool::new(false);

/// Returns true once a thread has panicked: the process ends, and looks for the names of functions.
pub(crate) fn is_panicking() -> bool {
    IS_PANICKING.load(Ordering::Relaxed)
}

/// Sends panics through the log: a panic ends the process and must not wait for the log's reader.
fn report_panics() {
    std::panic::set_hook(Box::new(move |info| {
        IS_PANICKING.store(true, Ordering::Relaxed);
        let backtrace = Backtrace::capture();
        let mut text = info.to_string();
        if backtrace.status() == BacktraceStatus::Captured {
            // Writing to a string does not fail.
            let _ = write!(text, "\n{backtrace}");
        }
        let thread = std::thread::current();
        let text = format!("thread {}: {text}", thread.name().unwrap_or("unnamed"));
        write_failure(&redact(&text));
        flush();
    }));
}

/// The filter of `RUST_LOG`, or the default with the reason why the variable is ignored.
fn filter_of_environment() -> (Targets, String, Option<String>) {
    let (text, ignored) = match std::env::var(VARIABLE) {
        Ok(text) if !text.is_empty() => match filter::parse(&text) {
            Ok(targets) => return (targets, text, None),
            Err(error) => (filter::DEFAULT_LEVEL.to_string(), Some(error)),
        },
        _ => (filter::DEFAULT_LEVEL.to_string(), None),
    };
    (Targets::new().with_default(filter::DEFAULT_LEVEL), text, ignored)
}

/// Checks a filter.
///
/// # Errors
///
/// When a directive has an unknown level, or names an unknown part.
pub fn check_filter(text: &str) -> Result<(), String> {
    filter::parse(text).map(|_| ())
}

/// Returns true if standard error is the journal of systemd, which announces its device and inode
/// in a variable (systemd.exec(5)).
fn is_journal() -> bool {
    static IS_JOURNAL: OnceLock<bool> = OnceLock::new();
    *IS_JOURNAL.get_or_init(|| {
        let (Ok(named), Ok(own)) = (std::env::var("JOURNAL_STREAM"), fstat(io::stderr())) else {
            return false;
        };
        named == format!("{}:{}", own.st_dev, own.st_ino)
    })
}

/// Returns true if lines have colours: on a terminal, unless `NO_COLOR` is set (no-color.org).
fn has_colours() -> bool {
    io::stderr().is_terminal() && permits_colours(std::env::var_os("NO_COLOR").as_deref())
}

fn permits_colours(no_color: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty)
}

/// Writes the last line of a failing process, even if the filter would suppress it.
pub fn report_failure(text: &str) {
    match IS_JSON.load(Ordering::Relaxed) {
        // JSON has its own escapes.
        true => write_failure(&redact(text)),
        false => write_failure(&printable(text)),
    }
}

fn write_failure(text: &str) {
    if is_json() {
        let subscriber = tracing_subscriber::fmt()
            .with_writer(|| Lines)
            .event_format(LineFormat(|| true))
            .finish();
        tracing::subscriber::with_default(subscriber, || tracing::error!("{text}"));
    } else {
        // `Lines` accepts every line.
        let priority = if is_journal() { "<3>" } else { "" };
        let _ = Lines.write_all(format!("{priority}ringhaul: {text}\n").as_bytes());
    }
}

/// An event as a line of JSON.
#[derive(Serialize)]
struct Line<'a> {
    timestamp: String,
    level: &'static str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    export: Option<&'a str>,
    #[serde(skip_serializing_if = "is_zero")]
    left_out: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The format of lines: JSON if the function returns true, and text otherwise.
struct LineFormat(fn() -> bool);

impl<S, N> FormatEvent<S, N> for LineFormat
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if fields.export.is_none() {
            fields.export = export_span::current_export(context);
        }
        let level = *event.metadata().level();
        match self.0() {
            true => write_json(writer, level, &fields),
            false => write_text(writer, level, &fields),
        }
    }
}

/// Writes an event as text in which control characters, for example of names, are escaped.
fn write_text(mut writer: Writer<'_>, level: Level, fields: &Fields) -> fmt::Result {
    if is_journal() {
        // The journal adds the time.
        write!(writer, "<{}>{level} ", journal_priority(level))?;
    } else if writer.has_ansi_escapes() {
        writer.write_str(DIM)?;
        SystemTime.format_time(&mut writer)?;
        write!(writer, "{PLAIN} {}{level:>5}{PLAIN} ", colour(level))?;
    } else {
        SystemTime.format_time(&mut writer)?;
        write!(writer, " {level:>5} ")?;
    }
    if let Some(export) = &fields.export {
        write!(writer, "{}: ", printable(export))?;
    }
    writer.write_str(&printable(&fields.message))?;
    if fields.left_out > 0 {
        write!(writer, " ({} more were not logged)", fields.left_out)?;
    }
    writeln!(writer)
}

/// Escape sequences of a terminal.
const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// The escape sequence of a level: red, yellow, green, blue, magenta.
fn colour(level: Level) -> &'static str {
    match level {
        Level::ERROR => "\x1b[31m",
        Level::WARN => "\x1b[33m",
        Level::INFO => "\x1b[32m",
        Level::DEBUG => "\x1b[34m",
        Level::TRACE => "\x1b[35m",
    }
}

/// The priority of a line in the journal of systemd (sd-daemon(3)).
fn journal_priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

fn write_json(mut writer: Writer<'_>, level: Level, fields: &Fields) -> fmt::Result {
    let mut timestamp = String::new();
    SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
    let line = Line {
        timestamp,
        level: level.as_str(),
        message: &redact(&fields.message),
        export: fields.export.as_deref(),
        left_out: fields.left_out,
    };
    let json = serde_json::to_string(&line).map_err(|_| fmt::Error)?;
    writeln!(writer, "{}", escape_json(json))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::testing::LogCapture;

    /// The journal of systemd filters by the priorities of sd-daemon(3).
    #[test]
    fn levels_have_the_priorities_of_the_journal() {
        let levels = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
        assert_eq!(levels.map(journal_priority), [3, 4, 6, 7, 7]);
    }

    fn events() {
        tracing::warn!(export = %"a \"disk\"\n", left_out = 3_u64, "a {} of {}", "line", 2);
        tracing::info!("plain");
    }

    #[test]
    fn text_has_the_export_first_and_stays_on_its_line() {
        let kept = LogCapture::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(kept.clone())
            .with_ansi(false)
            .event_format(LineFormat(|| false))
            .finish();
        tracing::subscriber::with_default(subscriber, events);
        let text = kept.text();
        let lines: Vec<_> =
            text.lines().map(|line| line.split_once("Z ").expect("a time").1).collect();
        let first = " WARN a \"disk\"\\n: a line of 2 (3 more were not logged)";
        assert_eq!(lines, [first, " INFO plain"]);
    }

    /// A terminal takes U+009B for the start of a command.
    #[test]
    fn lines_of_both_formats_have_no_control_characters() {
        let is_text: fn() -> bool = || false;
        let is_json: fn() -> bool = || true;
        for (is_json, escape) in [(is_text, r"\u{9b}"), (is_json, r"\u009b")] {
            let kept = LogCapture::default();
            let lines = tracing_subscriber::fmt().with_writer(kept.clone()).with_ansi(false);
            let subscriber = lines.event_format(LineFormat(is_json)).finish();
            tracing::subscriber::with_default(subscriber, || {
                tracing::warn!(export = "a\u{9b}31m\u{7f}", "b\u{1b}[31m\u{9b}");
            });
            let text = kept.text();
            assert_eq!(text.matches(escape).count(), 2, "{text:?}");
            assert!(!text.trim_end().contains(char::is_control), "{text:?}");
        }
    }

    /// Lines of a disk have no field of their own. No filter suppresses the name, also not a filter
    /// that was in force when the span began.
    #[test]
    fn lines_in_the_span_of_an_export_have_its_name() {
        let kept = LogCapture::default();
        let lines = tracing_subscriber::fmt::layer().with_writer(kept.clone());
        let off = export_span::with_spans(filter::parse("off").unwrap());
        let (filter, handle) = tracing_subscriber::reload::Layer::new(off);
        let subscriber = tracing_subscriber::registry()
            .with(filter)
            .with(ExportNames)
            .with(lines.event_format(LineFormat(|| true)));
        tracing::subscriber::with_default(subscriber, || {
            let span = export_span("vm\"1");
            span.in_scope(|| tracing::error!("not logged"));
            handle.reload(export_span::with_spans(filter::parse("warn").unwrap())).unwrap();
            let of_thread = span.clone();
            let write = move || of_thread.in_scope(|| tracing::warn!("/a.img: answers again"));
            let dispatch = tracing::dispatcher::get_default(Clone::clone);
            let logged = move || tracing::dispatcher::with_default(&dispatch, write);
            std::thread::spawn(logged).join().unwrap();
            span.in_scope(|| tracing::warn!(export = "other", "a field comes first"));
            tracing::warn!("outside");
            export_span("").in_scope(|| tracing::warn!("without a name"));
        });
        let lines = kept.text();
        let lines: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let export = |line: &serde_json::Value| line.get("export").map(ToString::to_string);
        let exports: Vec<_> = lines.iter().map(export).collect();
        let expected = [Some(r#""vm\"1""#.into()), Some("\"other\"".into()), None, None];
        assert_eq!(exports, expected, "{lines:#?}");
    }

    #[test]
    fn no_color_switches_colours_off_unless_it_is_empty() {
        for (value, expected) in [(None, true), (Some(""), true), (Some("1"), false)] {
            assert_eq!(permits_colours(value.map(OsStr::new)), expected, "{value:?}");
        }
    }

    #[test]
    fn colours_are_escapes_around_time_and_level() {
        let kept = LogCapture::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(kept.clone())
            .with_ansi(true)
            .event_format(LineFormat(|| false))
            .finish();
        tracing::subscriber::with_default(subscriber, || tracing::info!("plain"));
        let text = kept.text();
        assert!(text.starts_with("\x1b[2m20"), "{text:?}");
        assert!(text.ends_with("Z\x1b[0m \x1b[32m INFO\x1b[0m plain\n"), "{text:?}");
    }

    #[test]
    fn json_has_every_part_as_a_member() {
        let kept = LogCapture::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(kept.clone())
            .event_format(LineFormat(|| true))
            .finish();
        tracing::subscriber::with_default(subscriber, events);
        let text = kept.text();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["export"], "a \"disk\"\n");
        assert_eq!(lines[0]["left_out"], 3);
        assert_eq!(lines[0]["message"], "a line of 2");
        assert_eq!(lines[1]["level"], "INFO");
        assert!(lines[1].get("export").is_none() && lines[1].get("left_out").is_none());
        assert!(lines[1]["timestamp"].as_str().unwrap().ends_with('Z'));
    }

    /// Set in the process that is to panic.
    const PANIC: &str = "RINGHAUL_TEST_PANICS";

    /// Runs in a process of its own, since it takes over the log and the panics of a whole process.
    #[test]
    fn a_panic_is_told_of_and_waits_for_no_reader() {
        if std::env::var_os(PANIC).is_some() {
            start(LogFormat::Text, None);
            start_writing().unwrap();
            tracing::info!("before");
            panic!("of a test");
        }
        let run = |stderr: Stdio| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "log::tests::a_panic_is_told_of_and_waits_for_no_reader"]);
            child.env(PANIC, "1").env_remove("RUST_LOG").stdout(Stdio::null()).stderr(stderr);
            child.spawn().unwrap()
        };
        let output = run(Stdio::piped()).wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        let (before, panic) = text.split_once("before").expect("what was logged before");
        assert!(!before.contains("panicked") && panic.contains("panicked at"), "{text}");
        assert!(panic.contains("of a test"), "{text}");

        let (_reader, mut writer) = std::io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while writer.write(&[b'.'; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).unwrap();
        assert!(!run(writer.into()).wait().unwrap().success());
    }
}
