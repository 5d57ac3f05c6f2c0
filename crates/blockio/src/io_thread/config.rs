//! How an IoThread is set up.

use std::time::Duration;

use crate::engine::{CompletionRing, EngineKind};
use crate::error::Error;

/// How an IoThread is set up.
#[derive(Debug, Clone)]
pub struct IoThreadConfig {
    /// How ops reach the kernel.
    pub engine: EngineKind,
    /// The most ops in the kernel at once, 1 to 65,535; more than that wait. Linux AIO counts it
    /// against `fs.aio-max-nr`.
    pub depth: u32,
    /// The longest that the loop busy-polls before it sleeps. It polls only as long as that has
    /// paid lately; zero is never.
    pub poll_max: Duration,
    /// The share of the time in percent, 0 to 100, that may go into busy-polling.
    pub poll_budget_percent: u32,
    /// Engine `io_uring`: a kernel thread takes submissions in, so that a submit needs no system
    /// call. It burns a core while there is work.
    pub sqpoll: bool,
    /// Engine `io_uring`: completions of reads and writes are polled for on disks that can do
    /// that (direct I/O on a device whose driver has queues for it); the device makes no
    /// interrupts for them. The loop does not sleep, or little, while it has such ops.
    pub iopoll: bool,
    /// The most bytes of memory at once for what devices cannot take as it is: misaligned buffers,
    /// zeroes that have to be written. It is parted equally among the disks of the IoThread (at
    /// least 64 KiB for each, so many disks may take more), and requests wait for their part in
    /// order.
    pub bounce_bytes: usize,
    /// For measurement: whether completions are looked for right after each submit. If not, they
    /// are found only when the kernel wakes the loop.
    pub harvest_on_submit: bool,
    /// For measurement: the most ops that one submit gives to the kernel, at least 1.
    pub submit_max: u32,
    /// For measurement: where engine `aio` finds completions.
    pub completion_ring: CompletionRing,
}

impl Default for IoThreadConfig {
    fn default() -> Self {
        Self {
            engine: EngineKind::Threads,
            depth: 1024,
            poll_max: Duration::from_micros(64),
            poll_budget_percent: 100,
            sqpoll: false,
            iopoll: false,
            bounce_bytes: 32 << 20,
            harvest_on_submit: true,
            submit_max: u32::MAX,
            completion_ring: CompletionRing::default(),
        }
    }
}

impl IoThreadConfig {
    /// What only one engine has is an error with another.
    pub(super) fn check_engine(&self) -> Result<(), Error> {
        let options = [(self.sqpoll, "sqpoll"), (self.iopoll, "iopoll")];
        let asked = options.into_iter().find(|(is_asked, _)| *is_asked);
        match asked {
            Some((_, name)) if self.engine != EngineKind::IoUring => Err(Error::Options(format!(
                "engine {} has no {name}; use io_uring, or do without",
                self.engine
            ))),
            _ => Ok(()),
        }
    }
}
