//! The counters of a daemon at one moment, as data.

use blockio::stats::{BudgetStats, Histogram, OpStats, Stats};
use device::{BatchSizes, ErrorCause, QueueStats, RequestCounts, RequestKind, RequestTotals};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::spec::status::Served;

/// All counters of a daemon. Each begins at 0 when its export, queue or thread begins, and
/// continues in a process that takes over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct DaemonStats {
    /// The start of the counters in seconds since 1970, which a takeover keeps.
    pub start_time_seconds: u64,
    /// Takeovers by another process that have failed.
    pub failed_takeovers: u64,
    /// In the order in which the exports were added.
    pub exports: Vec<ExportStats>,
    /// In the order of their numbers; none before the first export.
    pub iothreads: Vec<LoopStats>,
}

/// The work of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ExportStats {
    /// Its name.
    pub name: String,
    /// The sum of all its queues, earlier front-ends included.
    pub served: Served,
    /// Sums for each kind of request, with latencies.
    pub operations: Vec<OperationStats>,
    /// Unanswered requests of all queues.
    pub depth: u64,
    /// The most unanswered requests of a queue since the last reading by the same kind of reader.
    pub depth_peak: u64,
    /// The time in nanoseconds that requests have waited for limits, all of them together.
    pub throttled_ns: u64,
    /// Like that, for a retry after the disk failed them.
    pub retried_ns: u64,
    /// Like that, for space on the disk.
    pub held_ns: u64,
    /// The queues that were started at least once.
    pub queues: Vec<QueueServed>,
}

/// The answered requests of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct OperationStats {
    /// The kind.
    pub operation: Operation,
    /// Answered requests, failed ones included.
    pub requests: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Failed requests by cause.
    pub errors: Errors,
    /// The number of requests in each bucket of latency, from the device's sight of a request to
    /// its answer. The bound of bucket `i` is 4,096 ns times 2 to the power of `i`. The last bucket
    /// has no bound.
    pub latency_buckets: Vec<u64>,
    /// The sum of all latencies in nanoseconds.
    pub latency_sum_ns: u64,
    /// The longest latency since the last reading by the same kind of reader, in nanoseconds.
    pub latency_max_ns: u64,
}

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the names are those of the devices")]
pub enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    Other,
}

/// Failed requests by cause.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Errors {
    /// The disk failed the request.
    pub disk: u64,
    /// The disk, or the file system below it, is full.
    pub no_space: u64,
    /// The request is malformed, out of range, or of a kind that the device lacks.
    pub invalid: u64,
    /// An initiator has reserved the disk.
    pub reserved: u64,
    /// The driver aborted the request, or a reset did.
    pub aborted: u64,
    /// Guest memory is gone, or the device could not serve the request.
    pub unavailable: u64,
}

/// The work of a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct QueueServed {
    /// Its number.
    pub index: u16,
    /// The requests that it has answered.
    pub served: Served,
    /// Kicks that the IoThread has received. A driver does not kick while the IoThread polls.
    pub kicks: u64,
    /// Calls to the driver.
    pub calls: u64,
    /// Publications of answers for which the driver wanted no call.
    pub calls_suppressed: u64,
    /// Requests that began in one run, for which one submit is enough.
    #[serde(default)]
    pub submit_batches: Batches,
    /// Answers that became visible to the driver at once.
    #[serde(default)]
    pub harvest_batches: Batches,
    /// Answers that one call announced: all since the call before it.
    #[serde(default)]
    pub call_batches: Batches,
}

/// Batches of requests by size.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Batches {
    /// The number of batches in each bucket. Bucket `i` has sizes up to 2 to the power of `i` that
    /// are in no bucket before it. The last bucket has no bound.
    pub buckets: Vec<u64>,
    /// The requests of all batches.
    pub sum: u64,
}

/// The counters of an IoThread's loop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct LoopStats {
    /// The name of the thread.
    pub name: String,
    /// Turns of the loop.
    pub turns: u64,
    /// Passes over all ready tasks.
    pub rounds: u64,
    /// Operations of the kernel, not requests.
    pub reads: Operations,
    #[expect(missing_docs, reason = "see above")]
    pub writes: Operations,
    #[expect(missing_docs, reason = "see above")]
    pub flushes: Operations,
    /// Discards and zeroing.
    pub deallocations: Operations,
    /// Operations that went unanswered for 5 seconds.
    pub late: u64,
    /// CPU time of the thread in nanoseconds, busy-polling included.
    pub cpu_ns: u64,
    /// The time in nanoseconds for which the thread was ready and other threads had its CPU.
    pub run_delay_ns: u64,
    /// Busy-polling in nanoseconds that ended with an event.
    pub poll_useful_ns: u64,
    /// Busy-polling in nanoseconds that ended with a sleep.
    pub poll_useless_ns: u64,
    /// Reads and writes completed by polling.
    pub polled: u64,
    /// Submits that the kernel refused because it lacked resources.
    pub submits_refused: u64,
    /// Harvests that found completions.
    pub harvests: u64,
    /// Completions that they have found.
    pub harvested: u64,
    /// Completions that one harvest found.
    pub harvested_at_once: Percentiles,
    /// Operations that a library has completed instead of the kernel, such as that of Ceph.
    pub foreign: u64,
    /// Completions of these operations that were found at once.
    pub foreign_at_once: Percentiles,
    /// Wake-ups of the loop by another thread, for these operations or any other reason.
    pub woken: u64,
    /// Submits.
    pub submits: u64,
    /// Operations that they have given to the kernel.
    pub submitted: u64,
    /// Operations in one submit.
    pub submitted_at_once: Percentiles,
    /// Requests with memory that the disk cannot take as it is.
    pub bounced: u64,
    /// Memory for bounced requests.
    pub bounce_memory: MemoryUse,
    /// Memory for long lists of buffers.
    pub list_memory: MemoryUse,
    /// System calls by their names.
    pub system_calls: SystemCalls,
}

/// The counters of one kind of operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Operations {
    /// Operations that the kernel has answered.
    pub count: u64,
    /// Operations that failed, a part of `count`.
    pub errors: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Nanoseconds from submit to harvest.
    pub latency_ns: Percentiles,
}

/// The distribution of numbers, each to within 3%.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Percentiles {
    /// Half of the numbers are not larger.
    pub median: u64,
    /// 99 of 100 numbers are not larger.
    pub p99: u64,
    /// 999 of 1000 numbers are not larger.
    pub p999: u64,
    /// The largest number.
    pub max: u64,
}

/// The use of memory with a limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct MemoryUse {
    /// Bytes in use.
    pub bytes: u64,
    /// The largest number of bytes in use at once.
    pub bytes_most: u64,
    /// Waits for memory.
    pub waits: u64,
    /// Failures of the system to provide memory.
    pub failed: u64,
}

/// System calls of an IoThread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SystemCalls {
    /// Submits of Linux AIO.
    pub io_submit: u64,
    /// Harvests of Linux AIO that went through the kernel.
    pub io_getevents: u64,
    /// Submits and waits of io_uring.
    pub io_uring_enter: u64,
    /// Waits of a loop that has no ring to wait in.
    pub epoll_wait: u64,
    /// Calls to drivers.
    pub eventfd_write: u64,
}

impl LoopStats {
    /// The counters of the thread with this name.
    pub(crate) fn new(name: String, stats: &Stats) -> Self {
        let calls = &stats.syscalls;
        let (cpu_ns, run_delay_ns) = stats.cpu_times().unwrap_or_default();
        Self {
            name,
            turns: stats.turns.get(),
            rounds: stats.rounds.get(),
            reads: Operations::from(&stats.read),
            writes: Operations::from(&stats.write),
            flushes: Operations::from(&stats.flush),
            deallocations: Operations::from(&stats.deallocate),
            late: stats.late.get(),
            cpu_ns,
            run_delay_ns,
            poll_useful_ns: stats.poll_useful_ns.get(),
            poll_useless_ns: stats.poll_useless_ns.get(),
            polled: stats.polled.get(),
            submits_refused: stats.submit_again.get(),
            harvests: stats.harvested_at_once.count(),
            harvested: stats.harvested_at_once.sum(),
            harvested_at_once: Percentiles::from(&stats.harvested_at_once),
            foreign: stats.foreign_at_once.sum(),
            foreign_at_once: Percentiles::from(&stats.foreign_at_once),
            woken: stats.woken.get(),
            submits: stats.submitted_at_once.count(),
            submitted: stats.submitted_at_once.sum(),
            submitted_at_once: Percentiles::from(&stats.submitted_at_once),
            bounced: stats.bounced.get(),
            bounce_memory: MemoryUse::from(&stats.bounce),
            list_memory: MemoryUse::from(&stats.lists),
            system_calls: SystemCalls {
                io_submit: calls.io_submit.get(),
                io_getevents: calls.io_getevents.get(),
                io_uring_enter: calls.io_uring_enter.get(),
                epoll_wait: calls.epoll_wait.get(),
                eventfd_write: calls.eventfd_write.get(),
            },
        }
    }
}

impl OperationStats {
    /// The counters of all kinds, with the longest latency of each.
    pub(crate) fn all(totals: &RequestTotals, latency_max_ns: [u64; 6]) -> Vec<Self> {
        let kinds = RequestKind::ALL.into_iter().zip(latency_max_ns);
        kinds.map(|(kind, max)| Self::new(kind, &totals[kind], max)).collect()
    }

    fn new(kind: RequestKind, counts: &RequestCounts, latency_max_ns: u64) -> Self {
        Self {
            operation: kind.into(),
            requests: counts.requests(),
            bytes: counts.bytes,
            errors: counts.into(),
            latency_buckets: counts.latency.buckets().to_vec(),
            latency_sum_ns: counts.latency.sum_ns(),
            latency_max_ns,
        }
    }
}

impl QueueServed {
    pub(crate) fn new(index: u16, stats: &QueueStats) -> Self {
        let (submits, harvests) = (stats.submit_batches.values(), stats.harvest_batches.values());
        let (calls, called_answers) = (stats.call_batches.values(), stats.called_answers.get());
        // Each answered request was in one batch of both.
        let totals = stats.totals();
        let answered = RequestKind::ALL.iter().map(|kind| totals[*kind].requests()).sum();
        Self {
            index,
            served: Served::from(&totals),
            kicks: stats.kicks.get(),
            calls: stats.calls.get(),
            calls_suppressed: stats.calls_suppressed.get(),
            submit_batches: Batches::new(&submits, answered),
            harvest_batches: Batches::new(&harvests, answered),
            call_batches: Batches::new(&calls, called_answers),
        }
    }
}

impl Batches {
    fn new(sizes: &BatchSizes, sum: u64) -> Self {
        Self { buckets: sizes.buckets().to_vec(), sum }
    }
}

impl Errors {
    /// Failed requests of all causes.
    pub fn total(&self) -> u64 {
        let Self { disk, no_space, invalid, reserved, aborted, unavailable } = *self;
        disk + no_space + invalid + reserved + aborted + unavailable
    }
}

impl From<RequestKind> for Operation {
    fn from(kind: RequestKind) -> Self {
        match kind {
            RequestKind::Read => Self::Read,
            RequestKind::Write => Self::Write,
            RequestKind::Flush => Self::Flush,
            RequestKind::Discard => Self::Discard,
            RequestKind::WriteZeroes => Self::WriteZeroes,
            RequestKind::Other => Self::Other,
        }
    }
}

impl From<&RequestCounts> for Errors {
    fn from(counts: &RequestCounts) -> Self {
        let of = |cause| counts.errors_of(cause);
        Self {
            disk: of(ErrorCause::Disk),
            no_space: of(ErrorCause::NoSpace),
            invalid: of(ErrorCause::Invalid),
            reserved: of(ErrorCause::Reserved),
            aborted: of(ErrorCause::Aborted),
            unavailable: of(ErrorCause::Unavailable),
        }
    }
}

impl From<&OpStats> for Operations {
    fn from(stats: &OpStats) -> Self {
        Self {
            count: stats.ops.get(),
            errors: stats.errors.get(),
            bytes: stats.bytes.get(),
            latency_ns: Percentiles::from(&stats.latency_ns),
        }
    }
}

impl<const BITS: u32> From<&Histogram<BITS>> for Percentiles {
    fn from(histogram: &Histogram<BITS>) -> Self {
        let values = histogram.values();
        Self {
            median: values.percentile(50.0),
            p99: values.percentile(99.0),
            p999: values.percentile(99.9),
            max: values.bounds().map_or(0, |(_, max)| max),
        }
    }
}

impl From<&BudgetStats> for MemoryUse {
    fn from(stats: &BudgetStats) -> Self {
        Self {
            bytes: stats.bytes.get(),
            bytes_most: stats.bytes_most.get(),
            waits: stats.waits.get(),
            failed: stats.failed.get(),
        }
    }
}
