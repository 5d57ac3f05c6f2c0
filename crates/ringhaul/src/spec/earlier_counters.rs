//! The sum of counters of this process and of an earlier one, from which it has taken over.

use std::ops::AddAssign;

use crate::spec::stats::{Batches, LoopStats, MemoryUse, Operations, QueueServed, SystemCalls};
use crate::spec::status::{Counts, Served};

/// Adds the fields of an earlier process, except for those behind a minus.
macro_rules! add_fields {
    ($($type:ident: $($sum:ident)+ $(- $($own:ident)+)?;)+) => {$(
        impl AddAssign<&Self> for $type {
            fn add_assign(&mut self, earlier: &Self) {
                let Self { $($sum,)+ $($($own: _,)+)? } = earlier;
                $(self.$sum += $sum;)+
            }
        }
    )+};
}

// Counters of the same queue, or of the thread with the same name. Distributions and the use of
// memory are of this process alone.
add_fields! {
    QueueServed: served kicks calls calls_suppressed submit_batches harvest_batches call_batches
        - index;
    LoopStats: turns rounds reads writes flushes deallocations late cpu_ns run_delay_ns
        poll_useful_ns poll_useless_ns polled submits_refused harvests harvested foreign woken
        submits submitted bounced bounce_memory list_memory system_calls
        - name harvested_at_once foreign_at_once submitted_at_once;
    Operations: count errors bytes - latency_ns;
    MemoryUse: waits failed - bytes bytes_most;
    SystemCalls: io_submit io_getevents io_uring_enter epoll_wait eventfd_write;
    Counts: requests bytes errors;
    Served: reads writes flushes discards write_zeroes others;
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
