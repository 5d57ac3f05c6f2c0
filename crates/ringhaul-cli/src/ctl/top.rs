//! `ringhaul ctl top`: the exports with their rates and latencies, over and over.

mod figures;
mod screen;

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap_complete::ArgValueCandidates;
use ringhaul::spec::command::ExportStatus;
use ringhaul::spec::stats::DaemonStats;
use ringhaul_options::redact::escape_json;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::connection::{Connection, export_names};
use super::show::print;
use figures::{ExportFigures, Figures};
pub(crate) use screen::SortKey;
use screen::{HISTORY_MAX, Terminal, details, overview};

/// Options of `ringhaul ctl top`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TopArgs {
    /// Show this export with its histogram and the last minute.
    #[arg(add = ArgValueCandidates::new(export_names))]
    pub(super) export: Option<String>,
    /// Seconds between two pages.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    pub(super) interval: Duration,
    /// The order of the exports. Keys: i, b, p, d, n.
    #[arg(long, value_name = "KEY", default_value = "iops")]
    pub(super) sort: SortKey,
    /// Print one page and end.
    #[arg(long)]
    pub(super) once: bool,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    let seconds = seconds.ok_or_else(|| format!("'{text}' is not 0.1 to 3600 seconds"))?;
    Ok(Duration::from_secs_f64(seconds))
}

/// A reading of all counters.
struct Reading {
    stats: DaemonStats,
    exports: Vec<ExportStatus>,
    time: Instant,
}

impl Reading {
    fn new(daemon: &mut Connection) -> Result<Self> {
        let (stats, exports) = (ask(daemon, "stats")?, ask(daemon, "export.list")?);
        Ok(Self { stats, exports, time: Instant::now() })
    }
}

fn ask<T: DeserializeOwned>(daemon: &mut Connection, method: &str) -> Result<T> {
    match daemon.call(method, &json!({}))? {
        Ok(answer) => serde_json::from_value(answer)
            .with_context(|| format!("the daemon is of another version: its answer to {method}")),
        Err(refusal) => bail!("the daemon refused {method}: {}", refusal.message),
    }
}

/// Shows pages until the user ends it, or one page.
///
/// # Errors
///
/// When the daemon has gone, or the terminal.
pub(super) fn run(args: &TopArgs, daemon: &mut Connection, as_json: bool) -> Result<ExitCode> {
    let mut top = Top {
        sort: args.sort,
        has_details: args.export.is_some(),
        history: VecDeque::new(),
        keyboard: Keyboard::new(args.once || as_json),
    };
    let mut before = Reading::new(daemon)?;
    loop {
        if top.wait(before.time + args.interval)? == Step::End {
            return Ok(ExitCode::SUCCESS);
        }
        let after = Reading::new(daemon)?;
        let time = after.time.saturating_duration_since(before.time);
        let mut figures = Figures::new(&before.stats, &after.stats, &after.exports, time);
        if let Some(name) = &args.export {
            figures.exports.retain(|export| export.name == *name);
            ensure!(
                !figures.exports.is_empty(),
                "there is no export {name}; `ringhaul ctl list` has the names"
            );
        }
        match as_json {
            true => print(&escape_json(serde_json::to_string(&figures)? + "\n"))?,
            false => top.show(figures)?,
        }
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
        before = after;
    }
}

/// The state of the display.
struct Top {
    sort: SortKey,
    /// True for the page of one export.
    has_details: bool,
    /// The figures of that export.
    history: VecDeque<ExportFigures>,
    /// `None`: pages follow each other, as in a file.
    keyboard: Option<Keyboard>,
}

#[derive(PartialEq, Eq)]
enum Step {
    Continue,
    End,
}

impl Top {
    /// Waits until `when`, and carries out the keys that the user presses.
    fn wait(&mut self, when: Instant) -> Result<Step> {
        let Some(keyboard) = &self.keyboard else {
            std::thread::sleep(when.saturating_duration_since(Instant::now()));
            return Ok(Step::Continue);
        };
        let _listening = keyboard.listen()?;
        while let Some(key) = keyboard.key(when)? {
            if matches!(key, b'q' | CTRL_C) {
                return Ok(Step::End);
            }
            self.sort = SortKey::from_key(key).unwrap_or(self.sort);
        }
        Ok(Step::Continue)
    }

    fn show(&mut self, figures: Figures) -> Result<()> {
        let terminal = terminal();
        let page = if self.has_details {
            self.history.extend(figures.exports);
            let old = self.history.len().saturating_sub(HISTORY_MAX);
            self.history.drain(..old);
            details(&self.history, terminal)
        } else {
            overview(&figures, self.sort, terminal)
        };
        let keys = match self.has_details {
            true => "q quit".to_owned(),
            false => format!("q quit; sort: {}", SortKey::keyboard()),
        };
        match &self.keyboard {
            // From the top of the screen, and nothing of the last page below.
            Some(_) => print(&format!("\x1b[H\x1b[2J{page}\n{keys}\n")),
            None => print(&page),
        }
    }
}

/// The size of the terminal, or a wide page.
fn terminal() -> Terminal {
    let output = std::io::stdout();
    let size = tcgetwinsize(&output).ok().filter(|size| size.ws_col > 0 && size.ws_row > 4);
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    Terminal {
        columns: size.map_or(120, |size| usize::from(size.ws_col)),
        // An empty line, the line of the keys, and the line of the cursor.
        rows: size.map_or(usize::MAX, |size| usize::from(size.ws_row) - 3),
        has_colours: output.is_terminal() && !refused,
    }
}

/// The byte of Ctrl-C on a terminal that makes no signal of it.
const CTRL_C: u8 = 3;

/// The key of a function of the terminal that no key has (`_POSIX_VDISABLE` of Linux).
const NO_KEY: u8 = 0;

/// The keyboard of a terminal.
struct Keyboard {
    /// The settings at the start.
    before: Termios,
    /// The settings while keys are reported at once.
    listening: Termios,
}

impl Keyboard {
    /// `None` if the program has no terminal, or `is_plain`.
    fn new(is_plain: bool) -> Option<Self> {
        let (input, output) = (std::io::stdin(), std::io::stdout());
        if is_plain || !input.is_terminal() || !output.is_terminal() {
            return None;
        }
        let before = tcgetattr(&input).ok()?;
        let mut listening = before.clone();
        listening.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        // A signal would end the program with these settings.
        listening.special_codes[SpecialCodeIndex::VINTR] = NO_KEY;
        Some(Self { before, listening })
    }

    /// Reports keys at once until the returned value is dropped. While the program waits for the
    /// daemon, Ctrl-C ends it as usual.
    fn listen(&self) -> Result<Listening<'_>> {
        let set = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.listening);
        set.context("cannot set up the terminal")?;
        Ok(Listening(self))
    }

    /// The next key before `when`.
    fn key(&self, when: Instant) -> Result<Option<u8>> {
        let input = std::io::stdin();
        loop {
            let left = when.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).context("the interval is too long")?;
            let mut fds = [PollFd::from_borrowed_fd(input.as_fd(), PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) => return Ok(None),
                Ok(_) => {
                    let mut key = [0];
                    let count = rustix::io::read(&input, &mut key).context("cannot read a key")?;
                    // The end of the input is like the key to quit.
                    return Ok(Some(if count == 0 { b'q' } else { key[0] }));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for a key"),
            }
        }
    }
}

/// The time for which keys are reported at once.
struct Listening<'a>(&'a Keyboard);

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0.before);
    }
}
