//! Many seeds at once, in separate processes, so that a run that ends its process is noticed and
//! named.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::plan::Plan;
use crate::run::{self, Report};
use crate::world::Polls;

/// A run takes milliseconds, and a long one ten seconds of a processor, of which it may get a
/// tenth. A run that outlasts this many waits never ends. There are several waits, because all
/// processes may have been stopped during one of them.
const WAIT: Duration = Duration::from_secs(15);
const WAITS: u32 = 12;

/// The outcome of the seeds.
pub(crate) enum Ending {
    Passed(Report),
    /// A run failed.
    Failed(u64),
    /// A run ended its process, or did not end.
    SimulatedDeath(u64, String),
}

/// Runs every `stride`th of the seeds and reports progress on stdout.
pub(crate) fn work(first: u64, seeds: u64, stride: u64, settings: &[String]) -> Result<()> {
    let mut total = Report::default();
    let mut out = std::io::stdout();
    for seed in (first..first + seeds).step_by(usize::try_from(stride.max(1))?) {
        writeln!(out, "seed {seed}")?;
        match run::run(&Plan::with_settings(seed, settings)?, false)? {
            Ok(report) => total.add(&report),
            Err(_) => {
                writeln!(out, "failed {seed}")?;
                return Ok(());
            }
        }
    }
    let Report { ops, turns, polls: Polls { found, missed } } = total;
    writeln!(out, "done {ops} {turns} {found} {missed}")?;
    Ok(())
}

/// A process that runs seeds, killed when this is dropped.
struct Worker {
    child: Child,
    seed: u64,
    /// The process has run all its seeds.
    done: bool,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The process may have ended on its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Shares the seeds among `jobs` processes, and ends with the first failure.
pub(crate) fn share(first: u64, seeds: u64, jobs: u64, settings: &[String]) -> Result<Ending> {
    let (sender, lines) = mpsc::channel();
    let mut workers = Vec::new();
    for job in 0..jobs {
        workers.push(start(job, [first + job, seeds - job, jobs], settings, &sender)?);
    }
    drop(sender);
    follow(&mut workers, &lines)
}

fn start(
    job: u64,
    [first, seeds, stride]: [u64; 3],
    settings: &[String],
    sender: &Sender<(u64, Option<String>)>,
) -> Result<Worker> {
    let program = std::env::current_exe().context("finding this program")?;
    let numbers = [("--first-seed", first), ("--seeds", seeds), ("--stride", stride)];
    let mut child = Command::new(program)
        .args(numbers.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]))
        .args(settings.iter().map(|setting| format!("--set={setting}")))
        .stdout(Stdio::piped())
        .spawn()
        .context("starting a process for some of the seeds")?;
    let output = child.stdout.take().context("a child has no output")?;
    let sender = sender.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if sender.send((job, Some(line))).is_err() {
                return;
            }
        }
        let _ = sender.send((job, None));
    });
    Ok(Worker { child, seed: first, done: false })
}

fn follow(workers: &mut [Worker], lines: &Receiver<(u64, Option<String>)>) -> Result<Ending> {
    let mut total = Report::default();
    let mut left = workers.len();
    while left > 0 {
        let Some((job, line)) = (0..WAITS).find_map(|_| lines.recv_timeout(WAIT).ok()) else {
            let seeds: Vec<u64> = workers.iter().map(|worker| worker.seed).collect();
            let seed = seeds.first().copied().unwrap_or(0);
            let time = WAIT * WAITS;
            return Ok(Ending::SimulatedDeath(
                seed,
                format!("no end after {time:?}; one of {seeds:?}"),
            ));
        };
        let worker = &mut workers[usize::try_from(job)?];
        let line = line.unwrap_or_else(|| "ended".to_owned());
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["seed", seed] => worker.seed = seed.parse()?,
            ["failed", seed] => return Ok(Ending::Failed(seed.parse()?)),
            ["done", ops, turns, found, missed] => {
                let polls = Polls { found: found.parse()?, missed: missed.parse()? };
                total.add(&Report { ops: ops.parse()?, turns: turns.parse()?, polls });
                worker.done = true;
            }
            // The line is not enough: LeakSanitizer reports at the very end.
            ["ended"] => {
                let status = worker.child.wait().context("waiting for a child")?;
                if !status.success() || !worker.done {
                    return Ok(Ending::SimulatedDeath(worker.seed, status.to_string()));
                }
                left -= 1;
            }
            _ => bail!("a child says `{line}`"),
        }
    }
    Ok(Ending::Passed(total))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow_one(program: &str, lines: &[&str]) -> Ending {
        let child = Command::new(program).spawn().unwrap();
        let (sender, receiver) = mpsc::channel();
        let lines = lines.iter().map(|line| Some((*line).to_owned()));
        lines.chain([None]).for_each(|line| sender.send((0, line)).unwrap());
        follow(&mut [Worker { child, seed: 7, done: false }], &receiver).unwrap()
    }

    #[test]
    fn a_process_has_passed_when_it_says_so_and_ends_well() {
        let done = ["seed 8", "done 3 4 5 6"];
        let passed = follow_one("true", &done);
        assert!(matches!(passed, Ending::Passed(Report { ops: 3, turns: 4, .. })));
        assert!(matches!(follow_one("false", &done), Ending::SimulatedDeath(8, _)));
        assert!(matches!(follow_one("true", &[]), Ending::SimulatedDeath(7, _)));
    }
}
