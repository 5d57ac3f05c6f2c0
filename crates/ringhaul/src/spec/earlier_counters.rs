//! The sum of counters of this process and of an earlier one, from which it has taken over.

use std::ops::AddAssign;

use crate::spec::stats::{Batches, LoopStats, MemoryUse, Operations, QueueServed, SystemCalls};
use crate::spec::status::{Counts, Served};

/// Adds the counters of the same queue in an earlier process.
impl AddAssign<&Self> for QueueServed {
    fn add_assign(&mut self, earlier: &Self) {
        let Self { index: _, served, kicks, calls, calls_suppressed, .. } = earlier;
        self.served += *served;
        self.kicks += kicks;
        self.calls += calls;
        self.calls_suppressed += calls_suppressed;
        self.submit_batches += &earlier.submit_batches;
        self.harvest_batches += &earlier.harvest_batches;
        self.call_batches += &earlier.call_batches;
    }
}

impl AddAssign<&Self> for Batches {
    fn add_assign(&mut self, other: &Self) {
        let len = self.buckets.len().max(other.buckets.len());
        self.buckets.resize(len, 0);
        for (mine, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += more;
        }
        self.sum += other.sum;
    }
}

/// Adds the counters of the thread with the same name in an earlier process. Distributions and
/// the use of memory are of this process alone.
impl AddAssign<&Self> for LoopStats {
    fn add_assign(&mut self, earlier: &Self) {
        for (mine, more) in [
            (&mut self.turns, earlier.turns),
            (&mut self.rounds, earlier.rounds),
            (&mut self.late, earlier.late),
            (&mut self.cpu_ns, earlier.cpu_ns),
            (&mut self.run_delay_ns, earlier.run_delay_ns),
            (&mut self.poll_useful_ns, earlier.poll_useful_ns),
            (&mut self.poll_useless_ns, earlier.poll_useless_ns),
            (&mut self.polled, earlier.polled),
            (&mut self.submits_refused, earlier.submits_refused),
            (&mut self.harvests, earlier.harvests),
            (&mut self.harvested, earlier.harvested),
            (&mut self.foreign, earlier.foreign),
            (&mut self.woken, earlier.woken),
            (&mut self.submits, earlier.submits),
            (&mut self.submitted, earlier.submitted),
            (&mut self.bounced, earlier.bounced),
        ] {
            *mine += more;
        }
        self.reads += &earlier.reads;
        self.writes += &earlier.writes;
        self.flushes += &earlier.flushes;
        self.deallocations += &earlier.deallocations;
        self.bounce_memory += &earlier.bounce_memory;
        self.list_memory += &earlier.list_memory;
        self.system_calls += &earlier.system_calls;
    }
}

impl AddAssign<&Self> for Operations {
    fn add_assign(&mut self, earlier: &Self) {
        let Self { count, errors, bytes, latency_ns: _ } = earlier;
        self.count += count;
        self.errors += errors;
        self.bytes += bytes;
    }
}

impl AddAssign<&Self> for MemoryUse {
    fn add_assign(&mut self, earlier: &Self) {
        let Self { bytes: _, bytes_most: _, waits, failed } = earlier;
        self.waits += waits;
        self.failed += failed;
    }
}

impl AddAssign<&Self> for SystemCalls {
    fn add_assign(&mut self, earlier: &Self) {
        let Self { io_submit, io_getevents, io_uring_enter, epoll_wait, eventfd_write } = earlier;
        self.io_submit += io_submit;
        self.io_getevents += io_getevents;
        self.io_uring_enter += io_uring_enter;
        self.epoll_wait += epoll_wait;
        self.eventfd_write += eventfd_write;
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        let Self { requests, bytes, errors } = other;
        self.requests += requests;
        self.bytes += bytes;
        self.errors += errors;
    }
}

impl AddAssign for Served {
    fn add_assign(&mut self, other: Self) {
        let Self { reads, writes, flushes, discards, write_zeroes, others } = other;
        self.reads += reads;
        self.writes += writes;
        self.flushes += flushes;
        self.discards += discards;
        self.write_zeroes += write_zeroes;
        self.others += others;
    }
}

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde::de::DeserializeOwned;
    use serde_json::{Map, Value};

    use super::*;

    const SAMPLE: &str = include_str!("../daemon/format/sample.json");

    /// Numbers that describe the present process alone, by their keys.
    const OWN: [&str; 8] =
        ["index", "bytes-most", "median", "p99", "p999", "max", "bounce-memory", "list-memory"];

    /// Doubles all numbers that are sums.
    fn doubled(value: &Value, key: &str) -> Value {
        match value {
            Value::Number(number) if !OWN.contains(&key) => (2 * number.as_u64().unwrap()).into(),
            Value::Array(all) => all.iter().map(|one| doubled(one, key)).collect(),
            Value::Object(all) => {
                let each = all.iter().map(|(key, one)| (key.clone(), doubled(one, key)));
                let mut all: Map<String, Value> = each.collect();
                if OWN.contains(&key) {
                    all.insert("bytes".into(), value["bytes"].clone());
                }
                Value::Object(all)
            }
            other => other.clone(),
        }
    }

    fn check<T>(of: &Value)
    where
        T: Serialize + DeserializeOwned + for<'a> AddAssign<&'a T>,
    {
        let read = || serde_json::from_value::<T>(of.clone()).unwrap();
        let mut sum = read();
        sum += &read();
        assert_eq!(serde_json::to_value(sum).unwrap(), doubled(of, ""));
    }

    #[test]
    fn every_counter_continues() {
        let sample: Value = serde_json::from_str(SAMPLE).unwrap();
        let state = &sample["standstill"];
        check::<LoopStats>(&state["iothreads"][0]);
        check::<QueueServed>(&state["exports"][0]["counters"]["queues"][0]);
    }

    /// A process of another version may have other buckets.
    #[test]
    fn batches_keep_all_their_buckets() {
        let of = |buckets: &[u64]| Batches { buckets: buckets.to_vec(), sum: 1 };
        let (short, long) = (of(&[1, 2]), of(&[1, 2, 3]));
        let mut sums = [short.clone(), long.clone()];
        sums[0] += &long;
        sums[1] += &short;
        assert!(sums.iter().all(|sum| *sum == Batches { buckets: vec![2, 4, 3], sum: 2 }));
    }
}
