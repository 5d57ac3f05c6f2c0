//! `ringhaul ctl top`: the exports with their rates and latencies, over and over.

mod figures;
mod screen;

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap_complete::ArgValueCandidates;
use ringhaul::spec::command::ExportStatus;
use ringhaul::spec::stats::DaemonStats;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
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
        export: args.export.clone(),
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
        let figures = Figures::new(&before.stats, &after.stats, &after.exports, time);
        match as_json {
            true => print(&format!("{}\n", serde_json::to_string(&figures)?))?,
            false => top.show(&figures)?,
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
    export: Option<String>,
    /// The figures of `export`.
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
        while let Some(key) = keyboard.key(when)? {
            match key {
                b'q' => return Ok(Step::End),
                b'i' => self.sort = SortKey::Iops,
                b'b' => self.sort = SortKey::Bandwidth,
                b'p' => self.sort = SortKey::P99,
                b'd' => self.sort = SortKey::Depth,
                b'n' => self.sort = SortKey::Name,
                _ => {}
            }
        }
        Ok(Step::Continue)
    }

    fn show(&mut self, figures: &Figures) -> Result<()> {
        let terminal = terminal();
        let page = match &self.export {
            None => overview(figures, self.sort, terminal),
            Some(name) => {
                let export = figures.exports.iter().find(|export| export.name == *name);
                let export = export.with_context(|| {
                    format!("there is no export {name}; `ringhaul ctl list` has the names")
                })?;
                self.history.push_back(export.clone());
                if self.history.len() > HISTORY_MAX {
                    self.history.pop_front();
                }
                details(&self.history, terminal)
            }
        };
        match &self.keyboard {
            // From the top of the screen, and nothing of the last page below.
            Some(_) => print(&format!("\x1b[H\x1b[2J{page}\nq quit; sort: i b p d n\n")),
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
        // A line for the keys.
        rows: size.map_or(usize::MAX, |size| usize::from(size.ws_row) - 2),
        has_colours: output.is_terminal() && !refused,
    }
}

/// The keyboard of a terminal, which reports keys at once. Dropping it restores the terminal.
struct Keyboard(Termios);

impl Keyboard {
    /// `None` if the program has no terminal, or `is_plain`.
    fn new(is_plain: bool) -> Option<Self> {
        let (input, output) = (std::io::stdin(), std::io::stdout());
        if is_plain || !input.is_terminal() || !output.is_terminal() {
            return None;
        }
        let before = tcgetattr(&input).ok()?;
        let mut now = before.clone();
        // Ctrl-C still ends the program.
        now.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        tcsetattr(&input, OptionalActions::Now, &now).ok()?;
        Some(Self(before))
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

impl Drop for Keyboard {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}
