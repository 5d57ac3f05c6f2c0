//! How an IoThread is set up.

use std::fmt;
use std::time::Duration;

/// How ops reach the kernel. Each file has one of these, and an IoThread may have all of them.
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

/// Where engine `aio` finds completions: for measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CompletionRing {
    /// In the ring that the kernel shares with the process, without a system call.
    #[default]
    Userspace,
    /// By `io_getevents`, as a program does that does not know the ring.
    Getevents,
}

/// An engine, and how it is set up: what only one of them has is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineConfig {
    /// See [`EngineKind::IoUring`].
    IoUring {
        /// A kernel thread takes submissions in, so that a submit needs no system call. It burns a
        /// core while there is work.
        sqpoll: bool,
        /// Completions of reads and writes are polled for on disks that can do that (direct I/O on
        /// a device whose driver has queues for it); the device makes no interrupts for them. The
        /// loop does not sleep, or little, while it has such ops.
        iopoll: bool,
    },
    /// See [`EngineKind::Aio`].
    Aio {
        /// For measurement: where completions are found.
        completion_ring: CompletionRing,
    },
    /// See [`EngineKind::Threads`].
    Threads,
}

impl EngineConfig {
    /// Which engine it is.
    #[must_use]
    pub fn kind(&self) -> EngineKind {
        match self {
            Self::IoUring { .. } => EngineKind::IoUring,
            Self::Aio { .. } => EngineKind::Aio,
            Self::Threads => EngineKind::Threads,
        }
    }
}

impl From<EngineKind> for EngineConfig {
    /// With what is best for most.
    fn from(kind: EngineKind) -> Self {
        EngineOptions::default().engine(kind)
    }
}

/// What is wished of whichever engine it will be: each takes what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineOptions {
    /// See [`EngineConfig::IoUring`].
    pub sqpoll: bool,
    /// See [`EngineConfig::IoUring`].
    pub iopoll: bool,
    /// See [`EngineConfig::Aio`].
    pub completion_ring: CompletionRing,
}

impl EngineOptions {
    /// The engine of this kind, with what it has of this.
    #[must_use]
    pub fn engine(self, kind: EngineKind) -> EngineConfig {
        let Self { sqpoll, iopoll, completion_ring } = self;
        match kind {
            EngineKind::IoUring => EngineConfig::IoUring { sqpoll, iopoll },
            EngineKind::Aio => EngineConfig::Aio { completion_ring },
            EngineKind::Threads => EngineConfig::Threads,
        }
    }
}

/// When fewer ops of a disk than there are go to the kernel: see `pacing.rs`, which says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacingConfig {
    /// Completions that come together, fewer than this, say nothing.
    pub convoy_min: usize,
    /// So many times in a row all ops complete together before it is tried to keep some back.
    pub convoys: u32,
    /// Ops in each span of a trial.
    pub span_ops: usize,
    /// How many ops the outcome of a trial holds for.
    pub period_ops: usize,
    /// The least number of ops that a disk may have in the kernel. A client with few requests has
    /// them all on the disk. One with eight has six, where the disk is faster that way.
    pub limit_min: usize,
}

impl Default for PacingConfig {
    fn default() -> Self {
        Self { convoy_min: 6, convoys: 16, span_ops: 1024, period_ops: 128 * 1024, limit_min: 4 }
    }
}

/// How much memory there is for what devices cannot take as it is: misaligned buffers, and zeroes
/// that have to be written; and for [parts of a disk](crate::Disk::read_part) that are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BounceConfig {
    /// The most bytes at once. All disks of the IoThread have equal shares, and requests wait for
    /// theirs in order.
    pub budget_bytes: usize,
    /// The least that the share of a disk has, at least 1, even if all shares together exceed the
    /// budget. The default is the largest logical block.
    pub share_bytes_min: usize,
    /// The most bytes that one request moves at once. By default it takes some 50 µs to copy them,
    /// and the loop does nothing else meanwhile.
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
pub struct ByteLimits {
    /// The most bytes of one op, for every kind of disk. The rest of a larger request follows when
    /// they have been moved, behind all tasks that are ready then. A logical block is never cut.
    pub op: usize,
    /// The most bytes of all disks in one round of the loop; the next round follows a look at the
    /// sources.
    pub round: usize,
    /// The most bytes of one disk that its engine has at a time; half of it with engine `threads`.
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

/// How an IoThread is set up.
#[derive(Debug, Clone)]
pub struct IoThreadConfig {
    /// The engine of disks that have no [preference](crate::DiskSource::prefer_engine). An
    /// [`EngineKind`] is turned into an engine with its defaults. Besides, an IoThread always has
    /// engine `threads`, and [`Io::add_engine`](crate::Io::add_engine) adds others.
    pub engine: EngineConfig,
    /// The most ops in the kernel at once by each engine, 1 to 65,535; more than that wait. Linux
    /// AIO counts it against `fs.aio-max-nr`.
    pub depth: u32,
    /// The longest that the loop busy-polls before it sleeps. It polls only while that pays: for
    /// ops, while the CPU time is worth the latency that it saves. Zero is never.
    pub poll_max: Duration,
    /// The share of the time in percent, 0 to 100, that may go into busy-polling.
    pub poll_budget_percent: u32,
    /// The time slice of the thread that sets the loop up, for when other threads want its CPU: it
    /// has the CPU back sooner and gives it away sooner. Zero leaves the kernel's, as Linux before
    /// 6.12 does in any case.
    pub slice: Duration,
    /// The loop is part of another one, which waits for the IoThread's descriptor instead of taking
    /// turns with [`Wait::ForEvent`](crate::Wait::ForEvent). Engine `io_uring` does without what
    /// makes a sleep in the ring cheaper: completions that are put off until somebody asks for
    /// them, of which the descriptor says nothing.
    pub embedded: bool,
    /// Bounds on the bytes of ops.
    pub bytes: ByteLimits,
    /// How much memory there is for what devices cannot take as it is.
    pub bounce: BounceConfig,
    /// When ops of a disk are kept back. The defaults are for real disks; a simulation with short
    /// runs has smaller numbers.
    pub pacing: PacingConfig,
    /// For measurement: whether completions are looked for right after each submit. If not, they
    /// are found only when the kernel wakes the loop.
    pub harvest_on_submit: bool,
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
            bytes: ByteLimits::default(),
            bounce: BounceConfig::default(),
            pacing: PacingConfig::default(),
            harvest_on_submit: true,
            submit_max: u32::MAX,
        }
    }
}

impl IoThreadConfig {
    /// The default of [`poll_max`](Self::poll_max) in microseconds.
    pub const POLL_MAX_US: u16 = 64;
    /// The time slice in microseconds of the threads of `ringhaul serve`. Beside eight busy loops
    /// it made 1.3 times the IOPS of the kernel's 1,400 (two CPUs).
    pub const SLICE_US: u32 = 300;
    /// The default of [`poll_budget_percent`](Self::poll_budget_percent).
    pub const POLL_BUDGET_PERCENT: u8 = 100;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_takes_what_it_has() {
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
