//! Threads that sleep, and the count of their wake-ups.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ringhaul_tools::process::retry;
use rustix::process::Pid;

use crate::cli::LIMIT;

/// The time for which a resting thread must not wake. The daemon checks busy disks each second.
const OBSERVED: Duration = Duration::from_secs(3);

/// The number of sleeps of each thread of a process so far, for threads whose name has this start.
/// A thread that wakes sleeps again.
fn sleeps(process: Pid, name: &str) -> Result<BTreeMap<String, u64>> {
    let mut counts = BTreeMap::new();
    let path = format!("/proc/{}/task", process.as_raw_nonzero());
    for entry in fs::read_dir(&path).with_context(|| format!("reading {path}"))? {
        // A thread that has ended since the listing has no files.
        let Ok((thread, count)) = sleeps_of(&entry?.path()) else { continue };
        if thread.starts_with(name) {
            counts.insert(thread, count);
        }
    }
    Ok(counts)
}

fn sleeps_of(folder: &Path) -> Result<(String, u64)> {
    let status = fs::read_to_string(folder.join("status"))?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let name = field("Name:").context("a thread without a name")?.trim();
    let count = field("voluntary_ctxt_switches:").context("the kernel counts no sleeps")?;
    Ok((format!("{name} {}", folder.display()), count.trim().parse()?))
}

/// Waits until no thread of a process whose name has this start has woken for some seconds.
///
/// # Errors
/// If they do not rest, or no thread has such a name.
pub fn wait_for_rest(process: Pid, name: &str) -> Result<()> {
    retry(LIMIT, || {
        let before = sleeps(process, name)?;
        ensure!(!before.is_empty(), "no thread {name}");
        std::thread::sleep(OBSERVED);
        let after = sleeps(process, name)?;
        let woken: Vec<_> =
            after.iter().filter(|(thread, count)| before.get(*thread) != Some(count)).collect();
        ensure!(woken.is_empty(), "these threads wake: {woken:?}");
        Ok(())
    })
}
