//! Measures the cost of waking a sleeping thread. Every figure depends on it, and machines differ
//! by a factor of ten.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const ROUNDS: usize = 1000;

/// The time between two wake-ups, after which the sleeper's CPU is idle.
const PAUSE: Duration = Duration::from_micros(200);

/// Describes the cost of one wake-up for the reports.
pub(crate) fn describe() -> Result<String> {
    let mut times = measure().context("measuring what a wake-up costs")?;
    times.sort_unstable();
    let at = |percent: usize| times[times.len() * percent / 100].as_secs_f64() * 1e6;
    Ok(format!(
        "{:.1} µs from the write of an eventfd to the end of a read on another CPU ({:.1} to {:.1} \
         for 80%)",
        at(50),
        at(10),
        at(90)
    ))
}

fn measure() -> Result<Vec<Duration>> {
    let allowed = sched_getaffinity(None)?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    let first = cpus.next().context("no CPU is allowed")?;
    let second = cpus.next().unwrap_or(first);
    let eventfd = eventfd(0, EventfdFlags::CLOEXEC)?;
    let (sender, woken) = mpsc::channel();
    let event = &eventfd;
    let sleep = move || -> Result<()> {
        pin(second)?;
        for _ in 0..ROUNDS {
            rustix::io::read(event, &mut [0; 8])?;
            // The receiver is dropped only if the waker has failed.
            let _ = sender.send(Instant::now());
        }
        Ok(())
    };
    let wake = move || -> Result<Vec<Duration>> {
        pin(first)?;
        (0..ROUNDS)
            .map(|_| {
                thread::sleep(PAUSE);
                let start = Instant::now();
                rustix::io::write(event, &1_u64.to_ne_bytes())?;
                Ok(woken.recv()?.saturating_duration_since(start))
            })
            .collect()
    };
    thread::scope(|scope| {
        let (sleeper, waker) = (scope.spawn(sleep), scope.spawn(wake));
        let ended = |_| anyhow!("a thread has panicked");
        sleeper.join().map_err(ended)??;
        waker.join().map_err(ended)?
    })
}

fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).context("pinning a thread")
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_wake_up_takes_some_time() {
        let times = super::measure().unwrap();
        assert_eq!(times.len(), super::ROUNDS);
        assert!(times.iter().all(|time| !time.is_zero()), "{times:?}");
    }
}
