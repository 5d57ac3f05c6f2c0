//! The resources that the server uses: CPU time and context switches, from /proc.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fs;
use std::io;
use std::time::Duration;

use iomem::fits;

use crate::args::BenchArgs;
use crate::error::BenchError;

/// The counters of a process at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct ServerSample {
    threads: HashMap<u32, ThreadSample>,
    /// User and system time of the process in ticks, which includes ended threads.
    user_ticks: u64,
    system_ticks: u64,
    /// CPU time of the process in nanoseconds, which includes ended threads; `None` for another
    /// process.
    process_ns: Option<u64>,
}

#[derive(Debug, Clone, Copy, Default)]
struct ThreadSample {
    /// Nanoseconds on a CPU; `None` if the kernel does not count them.
    on_cpu_ns: Option<u64>,
    voluntary: u64,
    involuntary: u64,
}

/// The usage of a process between two samples.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ServerUsage {
    pub(crate) cpu_us: f64,
    /// Share of the CPU time in user mode, from 0 to 1; `None` without a single tick.
    pub(crate) user_share: Option<f64>,
    /// Switches of the threads that live at the end of the interval.
    pub(crate) voluntary_switches: u64,
    pub(crate) involuntary_switches: u64,
    pub(crate) threads: usize,
}

impl ServerSample {
    /// Reads the counters of process `pid`.
    pub(crate) fn take(pid: u32) -> io::Result<Self> {
        let (user_ticks, system_ticks) =
            parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat"))?)
                .ok_or_else(|| io::Error::other("its stat file has an unknown form"))?;
        let mut threads = HashMap::new();
        for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
            let path = entry?.path();
            let tid = path.file_name().and_then(|name| name.to_str()?.parse().ok());
            // A thread may end between the listing and the reading.
            let (Some(tid), Ok(status)) = (tid, fs::read_to_string(path.join("status"))) else {
                continue;
            };
            let schedstat = fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            let sample = ThreadSample {
                on_cpu_ns: schedstat.split_whitespace().next().and_then(|ns| ns.parse().ok()),
                voluntary: status_field(&status, "voluntary_ctxt_switches:"),
                involuntary: status_field(&status, "nonvoluntary_ctxt_switches:"),
            };
            threads.insert(tid, sample);
        }
        let process_ns = (pid == std::process::id()).then(own_cpu_ns);
        Ok(Self { threads, user_ticks, system_ticks, process_ns })
    }

    /// Returns the usage since `earlier`.
    ///
    /// For this process the CPU time comes from the process clock. For another process it is the
    /// sum over its threads, in nanoseconds. If threads have ended in between, that sum lacks them,
    /// and the process's ticks count if they are higher.
    pub(crate) fn since(&self, earlier: &Self) -> ServerUsage {
        const NS_PER_S: u64 = 1_000_000_000;
        let tick_ns = NS_PER_S / rustix::param::clock_ticks_per_second().max(1);
        let user = self.user_ticks.saturating_sub(earlier.user_ticks);
        let ticks = user + self.system_ticks.saturating_sub(earlier.system_ticks);
        let mut usage = ServerUsage {
            cpu_us: 0.0,
            user_share: (ticks > 0).then(|| user as f64 / ticks as f64),
            voluntary_switches: 0,
            involuntary_switches: 0,
            threads: self.threads.len(),
        };
        let mut on_cpu_ns = Some(0_u64);
        for (tid, now) in &self.threads {
            let then = earlier.threads.get(tid).copied().unwrap_or_default();
            usage.voluntary_switches += now.voluntary.saturating_sub(then.voluntary);
            usage.involuntary_switches += now.involuntary.saturating_sub(then.involuntary);
            on_cpu_ns = on_cpu_ns
                .zip(now.on_cpu_ns)
                .map(|(sum, ns)| sum + ns.saturating_sub(then.on_cpu_ns.unwrap_or(0)));
        }
        let ended = earlier.threads.keys().any(|tid| !self.threads.contains_key(tid));
        let by_ticks = ticks * tick_ns;
        let process_ns = self.process_ns.zip(earlier.process_ns);
        let total_ns = match on_cpu_ns {
            _ if process_ns.is_some() => process_ns.map_or(0, |(now, then)| now - then),
            Some(ns) if !ended => ns,
            Some(ns) => ns.max(by_ticks),
            None => by_ticks,
        };
        usage.cpu_us = total_ns as f64 / 1000.0;
        usage
    }
}

/// The process under measurement.
pub(crate) struct Server {
    pub(crate) pid: Option<u32>,
}

impl Server {
    pub(crate) fn find(args: &BenchArgs, peer: Option<u32>) -> Result<Self, BenchError> {
        if let Some(pid) = args.server_pid {
            ServerSample::take(pid.get()).map_err(|error| {
                BenchError::Usage(format!("--server-pid={pid}: cannot read its counters: {error}"))
            })?;
            return Ok(Self { pid: Some(pid.get()) });
        }
        let pid = peer.filter(|pid| *pid != std::process::id());
        let pid = pid.filter(|pid| ServerSample::take(*pid).is_ok());
        if pid.is_none() {
            tracing::warn!(
                "the server's process is not visible here, so its CPU time is not counted; set \
                 --server-pid"
            );
        }
        Ok(Self { pid })
    }

    /// Makes this process the server, for `--filename`.
    pub(crate) fn this_process() -> Self {
        Self { pid: Some(std::process::id()) }
    }

    pub(crate) fn sample(&self) -> Option<ServerSample> {
        ServerSample::take(self.pid?).ok()
    }
}

/// Returns the CPU time of this process.
fn own_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).map_or(0, |time| fits(time.as_nanos(), "a CPU time in nanoseconds"))
}

/// Returns user and system ticks from `/proc/PID/stat`, see proc_pid_stat(5).
fn parse_stat(text: &str) -> Option<(u64, u64)> {
    // The program's name, in parentheses, may contain parentheses.
    let (_, after_name) = text.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

fn status_field(status: &str, name: &str) -> u64 {
    let value = status.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_read_past_a_strange_name() {
        let text = "7 (a) b) (c) S 1 7 7 0 -1 4194560 100 0 0 0 123 456 0 0 20 0 1 0 99 0 0";
        assert_eq!(parse_stat(text), Some((123, 456)));
        assert_eq!(parse_stat("7 (x) S 1"), None);
    }

    #[test]
    fn own_work_is_counted() {
        let before = ServerSample::take(std::process::id()).unwrap();
        let mut sum = 0_u64;
        let usage = loop {
            sum = (0..100_000).fold(sum, |sum, i| std::hint::black_box(sum ^ i));
            let usage = ServerSample::take(std::process::id()).unwrap().since(&before);
            if usage.cpu_us >= 20_000.0 && usage.user_share.is_some() {
                break usage;
            }
        };
        assert!(usage.threads >= 1, "{usage:?}");
    }

    #[test]
    fn ended_threads_are_counted_by_ticks() {
        let thread = |ns| ThreadSample { on_cpu_ns: Some(ns), voluntary: 3, involuntary: 1 };
        let before = ServerSample {
            threads: HashMap::from([(1, thread(1_000)), (2, thread(1_000))]),
            user_ticks: 10,
            system_ticks: 10,
            process_ns: None,
        };
        let after = ServerSample {
            threads: HashMap::from([(1, thread(5_000))]),
            user_ticks: 13,
            system_ticks: 11,
            process_ns: None,
        };
        let tick_us = 1_000_000 / rustix::param::clock_ticks_per_second();
        let usage = after.since(&before);
        assert!((usage.cpu_us - (4 * tick_us) as f64).abs() < 0.5, "{usage:?}");
        assert_eq!(usage.user_share, Some(0.75));
    }
}
