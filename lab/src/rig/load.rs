//! The background load of the machine while a server is measured: most hosts are full.
//!
//! Linux divides a CPU between sessions first (autogroups), as it does between services and virtual
//! machines. So each busy loop runs in its own session, and the mixed load in one.

use std::fmt;
use std::hint;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Serialize, Serializer};

/// Time for the load to reach its steady state before the first measurement.
const SETTLING: Duration = Duration::from_millis(500);

/// The size of one write of the mixed load's writer, which flushes after each.
const WRITE_BYTES: usize = 1 << 20;

/// The number of sleepers of the mixed load, and the pause and work of each.
const SLEEPERS: usize = 8;
const PAUSE: Duration = Duration::from_millis(2);
const WORK: Duration = Duration::from_micros(200);

/// The background load of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// An idle host.
    Nothing,
    /// This number of threads that never sleep.
    Loops(u32),
    /// Compilers, a writer that flushes, and threads that sleep and wake.
    Mixed,
}

impl Load {
    /// The loads beside which servers are compared.
    pub(crate) const BUSY: [Self; 3] = [Self::Loops(2), Self::Loops(8), Self::Mixed];

    /// Starts the load. Its files go to `folder`.
    pub(crate) fn start(self, folder: &Path) -> Result<RunningLoad> {
        let mut running = RunningLoad { children: Vec::new() };
        match self {
            Self::Nothing => return Ok(running),
            Self::Loops(count) => {
                for _ in 0..count {
                    running.start(&mut part("loop", folder)?)?;
                }
            }
            Self::Mixed => running.start(&mut part("mixed", folder)?)?,
        }
        thread::sleep(SETTLING);
        Ok(running)
    }
}

impl fmt::Display for Load {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => out.write_str("nothing"),
            Self::Loops(count) => write!(out, "{count}-loops"),
            Self::Mixed => out.write_str("mixed-load"),
        }
    }
}

impl Serialize for Load {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Returns the command that plays one part of a load in its own session.
fn part(name: &str, folder: &Path) -> Result<Command> {
    let program = std::env::current_exe().context("looking for the lab's own program")?;
    let mut command = Command::new("setsid");
    command.arg(program).args(["load", name]).arg(folder);
    Ok(command)
}

/// A running load. Dropping it ends all its processes.
pub(crate) struct RunningLoad {
    children: Vec<Child>,
}

impl RunningLoad {
    fn start(&mut self, command: &mut Command) -> Result<()> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        self.children.push(command.spawn().context("starting a load; is setsid installed?")?);
        Ok(())
    }
}

impl Drop for RunningLoad {
    fn drop(&mut self) {
        for child in &mut self.children {
            // `setsid` runs the program in its own process, so the child leads the group of its
            // children.
            let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
            let _ = child.kill();
            if let Err(error) = child.wait() {
                eprintln!("lab: a load does not end: {error}");
            }
        }
    }
}

/// Options of the hidden command `load`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The part that this process plays
    part: Part,
    /// Folder for its files
    folder: std::path::PathBuf,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Part {
    Loop,
    Mixed,
}

/// Plays a part of a load until the process is killed.
pub(crate) fn play(args: &Args) -> Result<()> {
    match args.part {
        Part::Loop => loop {
            hint::spin_loop();
        },
        Part::Mixed => play_mixed(&args.folder),
    }
}

/// Runs a compiler for each CPU, a writer, and the [`SLEEPERS`].
fn play_mixed(folder: &Path) -> Result<()> {
    let compilers = thread::available_parallelism().map_or(1, usize::from);
    let source = folder.join("load.rs");
    std::fs::write(&source, SOURCE).context("writing the source that the load compiles")?;
    let source = &source;
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for _ in 0..SLEEPERS {
            threads.push(scope.spawn(sleep_and_work));
        }
        for number in 0..compilers {
            let output = folder.join(format!("load-{number}.o"));
            threads.push(scope.spawn(move || compile(source, &output)));
        }
        threads.push(scope.spawn(|| write_and_flush(&folder.join("load.data"))));
        // The first part that fails ends the load: `Drop` kills the rest of the process group.
        loop {
            if let Some(place) = threads.iter().position(|thread| thread.is_finished()) {
                let ended = threads.swap_remove(place).join();
                let result = ended.unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked")));
                eprintln!("lab: a part of the mixed load ended: {result:?}");
                std::process::exit(1);
            }
            thread::sleep(Duration::from_millis(100));
        }
    })
}

fn sleep_and_work() -> Result<()> {
    loop {
        thread::sleep(PAUSE);
        let start = Instant::now();
        while start.elapsed() < WORK {
            hint::spin_loop();
        }
    }
}

fn write_and_flush(path: &Path) -> Result<()> {
    let data = vec![0x5a; WRITE_BYTES];
    loop {
        let mut file = std::fs::File::create(path).context("creating the file of the load")?;
        file.write_all(&data).context("writing the file of the load")?;
        file.sync_all().context("flushing the file of the load")?;
    }
}

fn compile(source: &Path, output: &Path) -> Result<()> {
    loop {
        let mut command = Command::new("rustc");
        command.args(["--crate-type", "lib", "--emit", "obj", "-O", "-o"]).arg(output).arg(source);
        let status = command.status().context("running rustc")?;
        anyhow::ensure!(status.success(), "rustc ended with {status}");
    }
}

/// Enough generic code to keep a compiler busy for some tenths of a second.
const SOURCE: &str = "
use std::collections::BTreeMap;
pub fn words(text: &str) -> BTreeMap<String, Vec<usize>> {
    let mut map: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (place, word) in text.split(' ').enumerate() {
        map.entry(word.to_owned()).or_default().push(place);
    }
    map
}
pub fn sorted(numbers: &mut Vec<(u64, String)>) { numbers.sort(); numbers.dedup(); }
";

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use super::*;

    #[test]
    fn each_load_has_a_name() {
        let names = Load::BUSY.map(|load| load.to_string());
        assert_eq!(names, ["2-loops", "8-loops", "mixed-load"]);
    }

    #[test]
    fn dropping_a_load_ends_its_children() {
        let mut running = RunningLoad { children: Vec::new() };
        // The shell leads a process group, as a part of a load does. Its child belongs to the
        // group.
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 1000 & echo $! > \"$0\"; wait"]);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        running.start(shell.arg(&file).process_group(0)).unwrap();
        let pid = loop {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            if let Ok(pid) = text.trim().parse::<u32>() {
                break pid;
            }
            thread::sleep(Duration::from_millis(1));
        };
        drop(running);
        let has_ended = || {
            let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let is_dead = state.is_empty() || state.contains(") Z ") || state.contains(") X ");
            anyhow::ensure!(is_dead, "the child still runs: {state}");
            Ok(())
        };
        ringhaul_tools::process::retry(Duration::from_secs(30), has_ended).unwrap();
    }
}
