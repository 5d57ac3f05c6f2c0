//! Counts the system calls of a server with a tracer that works on this machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use ringhaul_tools::process;
use ringhaul_tools::workspace;

/// A program that counts system calls of all threads of a program from start to end.
#[derive(Clone, Debug)]
pub(crate) enum Tracer {
    /// Counts in the kernel and hardly slows the program.
    Perf(PathBuf),
    /// Stops the program twice for each system call.
    Strace(PathBuf),
}

impl Tracer {
    /// Returns the best tracer that works here. The trial writes to `folder`.
    pub(crate) fn find(folder: &Path) -> Option<Self> {
        let perf = workspace::find_program("perf").map(Self::Perf);
        let strace = workspace::find_program("strace").map(Self::Strace);
        let works = |tracer: &Self| tracer.count_trial(folder).is_ok_and(|count| count > 0.0);
        [perf, strace].into_iter().flatten().find(works)
    }

    /// Returns the words before the command line of the program. Counts go to `output`.
    pub(crate) fn prefix(&self, output: &Path) -> Vec<String> {
        let (program, options): (_, &[&str]) = match self {
            Self::Perf(program) => (program, &["stat", "-x,", "-e", "raw_syscalls:sys_enter"]),
            Self::Strace(program) => (program, &["-c", "-f", "-U", "calls,name"]),
        };
        let words = [program.to_string_lossy().into_owned()];
        let options = options.iter().map(|option| (*option).to_owned());
        let output = ["-o".to_owned(), output.to_string_lossy().into_owned(), "--".to_owned()];
        words.into_iter().chain(options).chain(output).collect()
    }

    /// The factor by which a server with many system calls slows down: a guess, to bound the time.
    pub(crate) fn slowdown(&self) -> f64 {
        match self {
            Self::Perf(_) => 1.0,
            Self::Strace(_) => 20.0,
        }
    }

    /// Reads the number of system calls from the output of the tracer.
    pub(crate) fn read(&self, output: &Path) -> Result<f64> {
        let text = std::fs::read_to_string(output)
            .with_context(|| format!("reading {}", output.display()))?;
        let count = match self {
            Self::Perf(_) => perf_count(&text),
            Self::Strace(_) => strace_count(&text),
        };
        count.with_context(|| format!("no count of system calls in {text:?}"))
    }

    fn count_trial(&self, folder: &Path) -> Result<f64> {
        let output = folder.join("trial");
        let words = self.prefix(&output);
        let mut command = Command::new(&words[0]);
        process::output(command.args(&words[1..]).arg("true"))?;
        self.read(&output)
    }
}

impl std::fmt::Display for Tracer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Perf(_) => "perf stat -e raw_syscalls:sys_enter",
            Self::Strace(_) => "strace -c -f",
        })
    }
}

/// The count in a line `263,,raw_syscalls:sys_enter,…`.
fn perf_count(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains("raw_syscalls:sys_enter"))?;
    line.split(',').next()?.parse().ok()
}

/// The count in a line `262 total`.
fn strace_count(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.ends_with(" total"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_both_tracers() {
        let text = "# started on Fri\n\n263,,raw_syscalls:sys_enter,2746068,100.00,,\n";
        assert_eq!(perf_count(text), Some(263.0));
        assert_eq!(perf_count("<not supported>,,raw_syscalls:sys_enter,0,100.00,,"), None);
        let text = "    calls syscall\n--------- ---\n       64 openat\n--- ---\n      262 total\n";
        assert_eq!(strace_count(text), Some(262.0));
        assert_eq!(strace_count(""), None);
    }
}
