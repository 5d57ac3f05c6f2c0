//! The set-up of an IoThread.

use std::fmt;
use std::time::Duration;

/// The way of ops to the kernel. Each file uses one engine, and an IoThread may have all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring: one ring for submissions, completions and everything that the loop waits for.
    IoUring,
    /// Linux AIO with the completion ring read in userspace. Asynchronous for files opened with
    /// `O_DIRECT`; with the page cache a submit waits for the disk.
    Aio,
    /// Blocking system calls on a pool of threads.
    Threads,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IoUring => "io_uring",
            Self::Aio => "aio",
            Self::Threads => "threads",
        })
    }
}

/// The place where engine `aio` finds completions: for measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CompletionRing {
    /// In the ring that the kernel shares with the process, without a system call.
    #[default]
    Userspace,
    /// By `io_getevents`, as in programs that do not know the ring.
    Getevents,
}

/// An engine and its own options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineConfig {
    /// See [`EngineKind::IoUring`].
    IoUring {
        /// A kernel thread takes submissions, so that a submit needs no system call. It burns a
        /// core while there is work.
        sqpoll: bool,
        /// Polls for completions of reads and writes on disks that support it: direct I/O on a
        /// device whose driver has queues for that. The device makes no interrupts for them. The
        /// loop sleeps little or not at all while it has such ops.
        iopoll: bool,
    },
    /// See [`EngineKind::Aio`].
    Aio {
        /// The place where completions are found: for measurement.
        completion_ring: CompletionRing,
    },
    /// See [`EngineKind::Threads`].
    Threads,
}

impl EngineConfig {
    /// The kind of this engine.
    pub fn kind(&self) -> EngineKind {
        match self {
            Self::IoUring { .. } => EngineKind::IoUring,
            Self::Aio { .. } => EngineKind::Aio,
            Self::Threads => EngineKind::Threads,
        }
    }
}

impl From<EngineKind> for EngineConfig {
    /// Makes the engine with its default options.
    fn from(kind: EngineKind) -> Self {
        EngineOptions::default().engine(kind)
    }
}

/// Options for an engine of any kind: each takes its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[doc(hidden)]
pub struct EngineOptions {
    /// See [`EngineConfig::IoUring`].
    pub sqpoll: bool,
    /// See [`EngineConfig::IoUring`].
    pub iopoll: bool,
    /// See [`EngineConfig::Aio`].
    pub completion_ring: CompletionRing,
}

impl EngineOptions {
    /// Makes the engine of this kind, with its part of these options.
    pub fn engine(self, kind: EngineKind) -> EngineConfig {
        let Self { sqpoll, iopoll, completion_ring } = self;
        match kind {
            EngineKind::IoUring => EngineConfig::IoUring { sqpoll, iopoll },
            EngineKind::Aio => EngineConfig::Aio { completion_ring },
            EngineKind::Threads => EngineConfig::Threads,
        }
    }
}

/// Rules for keeping ops of a disk back from the kernel. `pacing.rs` has the reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub struct PacingConfig {
    /// The least number of completions together that counts as a convoy.
    pub convoy_min: usize,
    /// The number of convoys in a row, each with all ops completing together, that starts a trial.
    pub convoys: u32,
    /// Ops in each span of a trial.
    pub span_ops: usize,
    /// The number of ops for which the outcome of a trial holds.
    pub period_ops: usize,
    /// The least limit on ops of a disk in the kernel. A client with few requests has them all on
    /// the disk. One with eight has six, if the disk is faster that way.
    pub limit_min: usize,
}

impl PacingConfig {
    /// No pacing, for measurement: no number of convoys starts a trial.
    pub const OFF: Self = Self { convoys: u32::MAX, ..Self::ON };

    const ON: Self =
        Self { convoy_min: 6, convoys: 16, span_ops: 1024, period_ops: 128 * 1024, limit_min: 4 };
}

impl Default for PacingConfig {
    fn default() -> Self {
        Self::ON
    }
}

/// Memory for data that devices cannot take as it is (misaligned buffers, and zeroes to write), and
/// for [parts of a disk](crate::Disk::read_part) that are inspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BounceConfig {
    /// The most bytes at once. All disks of the IoThread have equal shares, and requests wait in
    /// order for their disk's share.
    pub budget_bytes: usize,
    /// The least share of a disk in bytes, at least 1, even if all shares together exceed the
    /// budget. The default is the largest logical block.
    pub share_bytes_min: usize,
    /// The most bytes that one request moves at once. Copying the default takes some 50 µs, during
    /// which the loop does nothing else.
    pub piece_bytes_max: usize,
}

impl Default for BounceConfig {
    fn default() -> Self {
        Self { budget_bytes: 32 << 20, share_bytes_min: 64 << 10, piece_bytes_max: 256 << 10 }
    }
}

/// Bounds on the bytes of reads and writes that go to the kernel, so that large ones hold the loop
/// for a short time only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub struct ByteLimits {
    /// The most bytes of one op, for every kind of disk. The rest of a larger request follows when
    /// they have been moved, behind all tasks that are ready then. A logical block is never cut.
    pub op: usize,
    /// The most bytes of all disks in one round of the loop. Sources are checked before the next
    /// round.
    pub round: usize,
    /// The most bytes of one disk in its engine at a time; half of it with engine `threads`.
    pub disk: usize,
}

impl ByteLimits {
    /// The default of [`op`](Self::op). A submit copies or maps as much in some 100 µs, and holds
    /// the loop for that time. Reads of 16 MiB are equally fast with 512 KiB, 1, 2 and 4 MiB. The
    /// 99th percentile of a neighbour beside them, on zram, is 4.4, 4.6, 5.5 and 7.6 ms.
    pub const OP: usize = 1 << 20;
    /// The default of [`round`](Self::round): some milliseconds of copying on a busy machine.
    pub const ROUND: usize = 8 << 20;
    /// The default of [`disk`](Self::disk): the work of a fast disk for some milliseconds.
    pub const DISK: usize = 32 << 20;
}

impl Default for ByteLimits {
    fn default() -> Self {
        Self { op: Self::OP, round: Self::ROUND, disk: Self::DISK }
    }
}

/// The set-up of an IoThread.
#[derive(Debug, Clone)]
pub struct IoThreadConfig {
    /// The engine of disks that have no [preference](crate::DiskSource::prefer_engine).
    /// `EngineKind::into` makes an engine with its defaults. An IoThread also has engine `threads`
    /// in any case, and [`Io::add_engine`](crate::Io::add_engine) adds more.
    pub engine: EngineConfig,
    /// The most ops in the kernel at once by each engine, 1 to 65,535; further ops wait. Linux AIO
    /// counts it against `fs.aio-max-nr`.
    pub depth: u32,
    /// The longest time of busy-polling before the loop sleeps; zero for none. It polls only while
    /// that pays: for ops, while the CPU time is worth the latency that it saves.
    pub poll_max: Duration,
    /// The CPU time in percent, 0 to 100, that busy-polling for a lower latency may add to an op;
    /// 100 sets no bound. Polling that takes less CPU time than a sleep is outside the budget.
    pub poll_budget_percent: u32,
    /// The time slice of the thread that sets the loop up, for times when other threads want its
    /// CPU. With a short slice it gets the CPU back sooner and gives it away sooner. Zero keeps the
    /// kernel's slice, and so does Linux before 6.12 in any case.
    pub slice: Duration,
    /// True if a program's own loop waits for the IoThread's descriptor, instead of taking turns
    /// with [`Wait::ForEvent`](crate::Wait::ForEvent). Engine `io_uring` then does without deferred
    /// completions: they make a sleep in the ring cheaper, but not the descriptor readable.
    pub embedded: bool,
    /// True if the loop wakes each second while ops are in the kernel, to report disks that do not
    /// answer. Otherwise another thread has to [watch](crate::stats::Stats::is_idle) it.
    pub watches_itself: bool,
    /// Bounds on the bytes of ops, which a simulation makes smaller.
    #[doc(hidden)]
    pub bytes: ByteLimits,
    /// Memory for data that devices cannot take as it is.
    pub bounce: BounceConfig,
    /// Rules for keeping ops of a disk back. The defaults are for real disks; a simulation with
    /// short runs has smaller numbers.
    #[doc(hidden)]
    pub pacing: PacingConfig,
    /// For measurement: false leaves out the harvest right after each submit, so that completions
    /// are found only when the kernel wakes the loop.
    pub harvest_on_submit: bool,
    /// For measurement: false makes Linux AIO announce each completion through its eventfd, even of
    /// a device that completes its ops within the submit.
    pub omits_announcements: bool,
    /// For measurement: false makes busy-polling post the completions that io_uring has deferred as
    /// soon as it sees them, instead of letting them gather.
    pub gathers_completions: bool,
    /// For measurement: false makes a wait for polled ops poll all the time, without pauses.
    pub pauses: bool,
    /// For measurement: the most ops that one submit gives to the kernel, at least 1.
    pub submit_max: u32,
}

impl Default for IoThreadConfig {
    fn default() -> Self {
        Self {
            engine: EngineConfig::Threads,
            depth: 1024,
            poll_max: Duration::from_micros(Self::POLL_MAX_US.into()),
            poll_budget_percent: Self::POLL_BUDGET_PERCENT.into(),
            slice: Duration::ZERO,
            embedded: false,
            watches_itself: false,
            bytes: ByteLimits::default(),
            bounce: BounceConfig::default(),
            pacing: PacingConfig::default(),
            harvest_on_submit: true,
            omits_announcements: true,
            gathers_completions: true,
            pauses: true,
            submit_max: u32::MAX,
        }
    }
}

impl IoThreadConfig {
    /// The default of [`poll_max`](Self::poll_max) in microseconds.
    pub const POLL_MAX_US: u16 = 64;
    /// The time slice in microseconds of the threads of `ringhaul serve`. Beside eight busy loops
    /// its IOPS were 1.3 times the figure with the kernel's 1,400 µs (two CPUs).
    pub const SLICE_US: u32 = 300;
    /// The default of [`poll_budget_percent`](Self::poll_budget_percent).
    pub const POLL_BUDGET_PERCENT: u8 = 10;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_takes_its_own_options() {
        let completion_ring = CompletionRing::Getevents;
        let options = EngineOptions { sqpoll: true, iopoll: true, completion_ring };
        let engine = |kind| options.engine(kind);
        let io_uring = EngineConfig::IoUring { sqpoll: true, iopoll: true };
        assert_eq!(engine(EngineKind::IoUring), io_uring);
        assert_eq!(engine(EngineKind::Aio), EngineConfig::Aio { completion_ring });
        for kind in [EngineKind::IoUring, EngineKind::Aio, EngineKind::Threads] {
            assert_eq!(engine(kind).kind(), kind);
            assert_eq!(EngineConfig::from(kind).kind(), kind);
        }
        let io_uring = EngineConfig::IoUring { sqpoll: false, iopoll: false };
        assert_eq!(EngineConfig::from(EngineKind::IoUring), io_uring);
    }
}
