//! The part that devices of both kinds share, and the fields of a configuration space.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockio::executor::Lock;
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtqueue::{AnswerPlace, RingLayout};

use crate::events::Events;
use crate::queue::call_watch::CallTrust;
use crate::queue::data_budget::DataBudget;
use crate::queue::queue_setup::{QueueOptions, QueueTuning};
use crate::stats::{Peaks, QueueStats, RequestTotals};

/// A status or response code as a byte: the ring has one byte for it, the headers of Linux have
/// more.
pub(crate) const fn byte(number: u32) -> u8 {
    let [byte, 0, 0, 0] = number.to_le_bytes() else { panic!("it is no byte") };
    byte
}

/// State of a device for its queues and its controller.
pub(crate) struct DeviceCore {
    /// The negotiated features.
    features: AtomicU64,
    /// Large requests that the queues have taken and not answered.
    data_budget: Arc<DataBudget>,
    pub(crate) events: Arc<dyn Events>,
    /// Decides if calls may be plain writes, which can hang.
    trust: Arc<CallTrust>,
    pub(crate) tuning: QueueTuning,
    in_order: bool,
    /// The place of the answer to a chain that has a fault.
    answer_place: AnswerPlace,
    /// Counters of each queue that was ever started, by its number.
    stats: Lock<BTreeMap<u16, Arc<QueueStats>>>,
    /// The totals of earlier processes.
    earlier: Lock<RequestTotals>,
    /// True if another process has stopped the queues and handed them over.
    was_handed_over: AtomicBool,
}

impl DeviceCore {
    pub(crate) fn new(
        tuning: QueueTuning,
        in_order: bool,
        answer_place: AnswerPlace,
        events: Arc<dyn Events>,
    ) -> Self {
        Self {
            features: AtomicU64::new(0),
            data_budget: Arc::default(),
            trust: Arc::new(CallTrust::new(Arc::clone(&events))),
            events,
            tuning,
            in_order,
            answer_place,
            stats: Lock::default(),
            earlier: Lock::default(),
            was_handed_over: AtomicBool::new(false),
        }
    }

    /// Notes that another process of this program has stopped the queues that start from now on.
    pub(crate) fn mark_handed_over(&self) {
        self.was_handed_over.store(true, Ordering::Relaxed);
    }

    /// The negotiated features; 0 without a driver.
    pub(crate) fn features(&self) -> u64 {
        self.features.load(Ordering::Relaxed)
    }

    /// True if this bit was negotiated.
    pub(crate) fn has(&self, feature: u32) -> bool {
        self.features() & (1 << feature) != 0
    }

    /// The layout of rings that start now.
    pub(crate) fn layout(&self) -> RingLayout {
        if self.has(VIRTIO_F_RING_PACKED) { RingLayout::Packed } else { RingLayout::Split }
    }

    /// Replaces the negotiated features and returns the previous ones.
    pub(crate) fn set_features(&self, features: u64) -> u64 {
        self.features.swap(features, Ordering::Relaxed)
    }

    /// The options that queue `index` starts with.
    pub(crate) fn queue_options(&self, index: u16, takes_requests: bool) -> QueueOptions {
        let mut all = self.stats.lock();
        let is_new = !all.contains_key(&index) && !self.was_handed_over.load(Ordering::Relaxed);
        let stats = Arc::clone(all.entry(index).or_default());
        QueueOptions {
            index,
            takes_requests,
            event_idx: self.has(VIRTIO_RING_F_EVENT_IDX),
            indirect: self.has(VIRTIO_RING_F_INDIRECT_DESC),
            layout: self.layout(),
            tuning: self.tuning,
            in_order: self.in_order,
            data_budget: Arc::clone(&self.data_budget),
            answer_place: self.answer_place,
            events: Arc::clone(&self.events),
            trust: Arc::clone(&self.trust),
            stats,
            is_new,
        }
    }

    /// Counters of queue `index`; `None` if it was never started.
    pub(crate) fn queue_stats(&self, index: u16) -> Option<Arc<QueueStats>> {
        self.stats.lock().get(&index).cloned()
    }

    /// Takes the peaks of all queues.
    pub(crate) fn take_peaks(&self) -> Peaks {
        let mut peaks = Peaks::default();
        self.stats.lock().values().for_each(|stats| peaks.include(stats.take_peaks()));
        peaks
    }

    /// Adds the totals of an earlier process.
    pub(crate) fn add_earlier(&self, totals: RequestTotals) {
        *self.earlier.lock() += totals;
    }

    /// Counters of all queues together, including earlier processes.
    pub(crate) fn totals(&self) -> RequestTotals {
        let mut totals = *self.earlier.lock();
        self.stats.lock().values().for_each(|stats| totals += stats.totals());
        totals
    }
}

/// A field of a configuration space, little-endian.
#[derive(Debug, Clone)]
pub(crate) struct Field {
    /// Its name in the specification.
    pub(crate) name: &'static str,
    /// Its bytes, at most 8.
    pub(crate) place: Range<usize>,
    /// The disk or the setting that gives it its value; `None` if drivers may write it.
    pub(crate) source: Option<&'static str>,
}

impl Field {
    /// A field that a driver cannot write.
    pub(crate) const fn new(
        name: &'static str,
        start: usize,
        bytes: usize,
        source: &'static str,
    ) -> Self {
        Self { name, place: Range { start, end: start + bytes }, source: Some(source) }
    }

    /// A field that a driver may write.
    pub(crate) const fn writable(name: &'static str, start: usize, bytes: usize) -> Self {
        Self { name, place: Range { start, end: start + bytes }, source: None }
    }
}

/// The names and places of fields in a structure of a library.
#[cfg(test)]
macro_rules! field_places {
    ($space:ty: $($name:ident)*) => {
        [$((stringify!($name), std::mem::offset_of!($space, $name))),*]
    };
}
#[cfg(test)]
pub(crate) use field_places;

/// Returns `len` bytes from `offset` on. Bytes beyond the end of `space` read as zeroes.
pub(crate) fn read_space(space: &[u8], offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    if let Some(rest) = space.get(offset..) {
        let there = rest.len().min(len);
        bytes[..there].copy_from_slice(&rest[..there]);
    }
    bytes
}

/// Returns the parts of `data`, which starts at `offset`, that lie in writable fields, each with
/// its own offset. All other bytes must be equal to `space`.
///
/// # Errors
///
/// When a read-only byte would change.
pub(crate) fn writable_parts<'a>(
    space: &[u8],
    fields: &[Field],
    offset: usize,
    data: &'a [u8],
) -> io::Result<Vec<(usize, &'a [u8])>> {
    let present = read_space(space, offset, data.len());
    for (at, (new, old)) in (offset..).zip(data.iter().zip(present)) {
        let field = fields.iter().find(|field| field.place.contains(&at));
        if *new != old && field.is_none_or(|field| field.source.is_some()) {
            let text = difference(space, field, offset, data, at);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
    }
    let end = offset + data.len();
    let writable = fields.iter().filter(|field| field.source.is_none()).map(|field| &field.place);
    let common = writable.map(|place| place.start.max(offset)..place.end.min(end));
    let there = common.filter(|part| !part.is_empty());
    Ok(there.map(|part| (part.start, &data[part.start - offset..part.end - offset])).collect())
}

/// The difference of `data`, which starts at `offset`, from `space` at a byte of this field.
fn difference(
    space: &[u8],
    field: Option<&Field>,
    offset: usize,
    data: &[u8],
    at: usize,
) -> String {
    let Some(Field { name, place, source: Some(source) }) = field else {
        let (here, there) = (read_space(space, at, 1)[0], data[at - offset]);
        return format!("byte {at} of the configuration space is {here:#x} here, {there:#x} there");
    };
    let here = read_space(space, place.start, place.len());
    let mut there = here.clone();
    for (at, byte) in place.clone().zip(&mut there) {
        if let Some(new) = at.checked_sub(offset).and_then(|index| data.get(index)) {
            *byte = *new;
        }
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
    let (here, there) = (number(&here), number(&there));
    format!("{name} is {here} here, {there} there; both devices need the same {source}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: [u8; 6] = [1, 2, 3, 4, 5, 6];
    /// Two adjacent fields that a driver may write, as in virtio-scsi.
    const FIELDS: [Field; 3] = [
        Field::writable("first", 1, 2),
        Field::writable("second", 3, 1),
        Field::new("fixed", 4, 2, "setting"),
    ];

    #[test]
    fn bytes_beyond_the_end_read_as_zeroes() {
        for (offset, len, expected) in [
            (0, 2, &[1, 2][..]),
            (5, 3, &[6, 0, 0]),
            (6, 1, &[0]),
            (usize::MAX, 2, &[0, 0]),
            (2, 0, &[]),
        ] {
            assert_eq!(read_space(&SPACE, offset, len), expected, "{len} bytes at {offset}");
        }
    }

    #[test]
    fn only_fields_that_can_be_written_may_differ() {
        type Parts<'a> = Result<Vec<(usize, &'a [u8])>, &'a str>;
        let table: [(usize, &[u8], Parts); 9] = [
            (0, &[1, 2, 3, 4, 5, 6], Ok(vec![(1, &[2, 3]), (3, &[4])])),
            (0, &[1, 9, 9, 9, 5], Ok(vec![(1, &[9, 9]), (3, &[9])])),
            (2, &[9], Ok(vec![(2, &[9])])),
            (4, &[5, 6, 0], Ok(vec![])),
            (0, &[7], Err("byte 0 of the configuration space is 0x1 here, 0x7 there")),
            (6, &[1], Err("byte 6 of the configuration space is 0x0 here, 0x1 there")),
            // 5 + 6 * 256
            (4, &[9, 7], Err("fixed is 1541 here, 1801 there; both devices need the same setting")),
            (3, &[9, 9], Err("fixed is 1541 here, 1545 there; both devices need the same setting")),
            (5, &[0], Err("fixed is 1541 here, 5 there; both devices need the same setting")),
        ];
        for (offset, data, expected) in table {
            let parts = writable_parts(&SPACE, &FIELDS, offset, data);
            let parts = parts.map_err(|error| error.to_string());
            assert_eq!(parts, expected.map_err(str::to_owned), "{data:?} at {offset}");
        }
    }
}
