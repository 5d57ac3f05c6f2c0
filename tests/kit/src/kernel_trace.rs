//! Activity inside the kernel: events of tracefs, in their order.
//!
//! Strace sees only system calls. The work that io_uring and Linux AIO do after them is visible to
//! the kernel alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use rustix::process::{Pid, test_kill_process};

const INSTANCES: &str = "/sys/kernel/tracing/instances";
const PREFIX: &str = "ringhaul-test-";

/// A trace buffer of its own. Dropping it removes it.
pub struct KernelTrace {
    folder: PathBuf,
}

impl KernelTrace {
    /// Starts to collect `events`, each a path such as `ext4/ext4_sync_file_exit` and a filter in
    /// the kernel's language. An inner `Err` has the reason why tracing is impossible here.
    ///
    /// # Errors
    /// If the kernel has the events and rejects a filter.
    pub fn start(events: &[(&str, String)]) -> Result<std::result::Result<Self, String>> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        remove_left_over();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let folder = Path::new(INSTANCES).join(name);
        if let Err(error) = fs::create_dir(&folder) {
            return Ok(Err(format!("cannot use tracefs at {INSTANCES}: {error}")));
        }
        let trace = Self { folder };
        // A number for each event, common to all processors, instead of a time.
        trace.write("trace_clock", "counter")?;
        for (event, filter) in events {
            let folder = format!("events/{event}");
            if !trace.folder.join(&folder).exists() {
                return Ok(Err(format!("this kernel has no trace event {event}")));
            }
            trace.write(&format!("{folder}/filter"), filter)?;
            trace.write(&format!("{folder}/enable"), "1")?;
        }
        Ok(Ok(trace))
    }

    /// Ends the collection and returns the events, one per line.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn finish(self) -> Result<Vec<String>> {
        self.write("tracing_on", "0")?;
        let path = self.folder.join("trace");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path:?}"))?;
        Ok(text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect())
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.folder.join(file);
        fs::write(&path, text).with_context(|| format!("writing {text:?} to {path:?}"))
    }
}

impl Drop for KernelTrace {
    fn drop(&mut self) {
        // The kernel removes the folder's files with it.
        if let Err(error) = fs::remove_dir(&self.folder) {
            eprintln!("{} was not removed: {error}", self.folder.display());
        }
    }
}

/// Removes the buffers of tests that were killed.
fn remove_left_over() {
    let Ok(entries) = fs::read_dir(INSTANCES) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let owner = owner.and_then(|rest| rest.split('-').next()?.parse().ok());
        if let Some(owner) = owner.and_then(Pid::from_raw)
            && test_kill_process(owner).is_err()
        {
            // A second test may have been faster.
            let _ = fs::remove_dir(entry.path());
        }
    }
}
