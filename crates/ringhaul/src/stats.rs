//! The counters of a daemon at some moment, as data.

use blockio::stats::{BounceStats, Histogram, ListStats, OpStats, Stats};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::status::Served;

/// All counters of a daemon. They begin at 0 when what they count for begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct DaemonStats {
    /// In the order in which the exports were added.
    pub exports: Vec<ExportStats>,
    /// In the order of their numbers; none before the first export.
    pub iothreads: Vec<LoopStats>,
}

/// What an export has served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ExportStats {
    /// Its name.
    pub name: String,
    /// All its queues together, those of earlier front-ends included.
    pub served: Served,
    /// Those that were started once.
    pub queues: Vec<QueueServed>,
}

/// What a queue has served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct QueueServed {
    /// Its number.
    pub index: u16,
    /// What it has served.
    pub served: Served,
}

/// What the loop of an IoThread counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct LoopStats {
    /// The thread.
    pub name: String,
    /// Turns of the loop.
    pub turns: u64,
    /// Times that all tasks which were ready ran.
    pub rounds: u64,
    /// Operations of the kernel, not requests.
    pub reads: Operations,
    #[expect(missing_docs, reason = "see above")]
    pub writes: Operations,
    #[expect(missing_docs, reason = "see above")]
    pub flushes: Operations,
    /// Discards and zeroing.
    pub deallocations: Operations,
    /// Operations that were not answered for 5 seconds.
    pub late: u64,
    /// Reads and writes whose completions were polled for.
    pub polled: u64,
    /// Submits that the kernel refused because it lacked resources.
    pub submits_refused: u64,
    /// Completions that were found at once.
    pub harvested_at_once: Spread,
    /// Operations that something else than the kernel has completed, such as the library of Ceph.
    pub foreign: u64,
    /// How many of these were found at once.
    pub foreign_at_once: Spread,
    /// Times that another thread had to wake the loop, for these or anything else.
    pub woken: u64,
    /// Operations that were submitted at once.
    pub submitted_at_once: Spread,
    /// Requests whose memory the disk cannot take as it is.
    pub bounced: u64,
    /// Memory for those.
    pub bounce_memory: MemoryUse,
    /// Memory for long lists of buffers.
    pub list_memory: MemoryUse,
    /// System calls by their names.
    pub system_calls: SystemCalls,
}

/// What operations of one kind did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Operations {
    /// Those that the kernel has answered.
    pub count: u64,
    /// How many of these failed.
    pub errors: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Nanoseconds from submit to harvest.
    pub latency_ns: Spread,
}

/// How numbers are spread, each to within 3%.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct Spread {
    /// Half of them are not larger.
    pub median: u64,
    /// 99 of 100 are not larger.
    pub p99: u64,
    /// 999 of 1000 are not larger.
    pub p999: u64,
    /// The largest.
    pub max: u64,
}

/// How memory with a limit is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct MemoryUse {
    /// Bytes in use.
    pub bytes: u64,
    /// The most that were in use at once.
    pub bytes_most: u64,
    /// How often somebody had to wait for some.
    pub waits: u64,
    /// How often the system had none.
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
    /// Those of the thread of this name.
    pub(crate) fn of(name: String, stats: &Stats) -> Self {
        let calls = &stats.syscalls;
        Self {
            name,
            turns: stats.turns.get(),
            rounds: stats.rounds.get(),
            reads: Operations::from(&stats.read),
            writes: Operations::from(&stats.write),
            flushes: Operations::from(&stats.flush),
            deallocations: Operations::from(&stats.deallocate),
            late: stats.late.get(),
            polled: stats.polled.get(),
            submits_refused: stats.submit_again.get(),
            harvested_at_once: Spread::from(&stats.harvested_at_once),
            foreign: stats.foreign_at_once.sum(),
            foreign_at_once: Spread::from(&stats.foreign_at_once),
            woken: stats.woken.get(),
            submitted_at_once: Spread::from(&stats.submitted_at_once),
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

impl From<&OpStats> for Operations {
    fn from(stats: &OpStats) -> Self {
        Self {
            count: stats.ops.get(),
            errors: stats.errors.get(),
            bytes: stats.bytes.get(),
            latency_ns: Spread::from(&stats.latency_ns),
        }
    }
}

impl<const BITS: u32> From<&Histogram<BITS>> for Spread {
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

impl From<&BounceStats> for MemoryUse {
    fn from(stats: &BounceStats) -> Self {
        Self {
            bytes: stats.bytes.get(),
            bytes_most: stats.bytes_most.get(),
            waits: stats.waits.get(),
            failed: stats.failed.get(),
        }
    }
}

impl From<&ListStats> for MemoryUse {
    fn from(stats: &ListStats) -> Self {
        let (bytes, bytes_most) = (stats.bytes.get(), stats.bytes_most.get());
        Self { bytes, bytes_most, waits: stats.waits.get(), failed: 0 }
    }
}
