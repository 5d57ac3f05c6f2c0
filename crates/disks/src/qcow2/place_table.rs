//! The known places of an image's data. With them, requests go straight to the file, without the
//! owner of the image.
//!
//! One thread, the owner, writes the table. IoThreads read it without locks. A place holds for
//! requests that began to use it before it was forgotten: see `readers.rs`.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The place of neighbouring bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Not looked up yet, or forgotten.
    Unknown,
    /// In the file of a layer, from this byte on.
    Data { layer: usize, offset: u64, writable: bool },
    /// Nowhere: the bytes are zeroes.
    Zero,
    /// Readable only by the owner: compressed, or in pieces that are too small.
    Owner,
}

/// Bytes in the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) place: Place,
    pub(super) bytes: u64,
}

const ZERO: u64 = 1;
const OWNER: u64 = 2;
const DATA: u64 = 3;
const KINDS: u64 = 3;
const WRITABLE: u64 = 4;
/// The layer is above the bits of an offset, which has at most 56 in this format.
const LAYER_SHIFT: u32 = 56;
const OFFSET: u64 = ((1 << LAYER_SHIFT) - 1) & !511;

/// The most layers of an image.
pub(super) const LAYERS_MAX: usize = 32;

/// The units in a slice. A slice has its memory from the first known unit on.
const SLICE_UNITS: u64 = 4096;

/// The most slices, which take 512 MiB. The owner finds places beyond them.
const SLICES_MAX: usize = 16_384;

/// Segments of a table. Each has twice as many slices as the one before, so that it can grow.
const SEGMENTS: usize = 22;

type Slice = Box<[AtomicU64]>;

#[derive(Debug)]
pub(super) struct PlaceTable {
    /// The unit, a power of two: the smallest cluster of all layers, or their largest block.
    unit_bytes: u64,
    segments: [OnceLock<Box<[OnceLock<Slice>]>>; SEGMENTS],
    /// The number of slices that may still be made.
    slices_left: AtomicUsize,
    /// The entry of units without a slice: unknown, or `OWNER` once no slice is left.
    absent: AtomicU64,
}

impl PlaceTable {
    pub(super) fn new(unit_bytes: u32) -> Self {
        assert!(unit_bytes.is_power_of_two() && unit_bytes >= 512, "clusters are powers of two");
        Self {
            unit_bytes: unit_bytes.into(),
            segments: [const { OnceLock::new() }; SEGMENTS],
            slices_left: AtomicUsize::new(SLICES_MAX),
            absent: AtomicU64::new(0),
        }
    }

    pub(super) fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// The size of the largest disk that has room.
    pub(super) fn bytes_max(&self) -> u64 {
        ((1 << SEGMENTS) - 1) * SLICE_UNITS * self.unit_bytes
    }

    /// The place of the bytes from `offset` on, and how many of `len` are there.
    #[inline]
    pub(super) fn run(&self, offset: u64, len: u64) -> Run {
        let mut unit = offset >> self.unit_bytes.trailing_zeros();
        let within = offset & (self.unit_bytes - 1);
        let first = self.load(unit);
        let mut bytes = (self.unit_bytes - within).min(len);
        while bytes < len {
            unit += 1;
            let expected = match first & KINDS {
                DATA => first + (bytes + within),
                _ => first,
            };
            if self.load(unit) != expected {
                break;
            }
            bytes = (bytes + self.unit_bytes).min(len);
        }
        Run { place: place(first, within), bytes }
    }

    #[inline]
    fn load(&self, unit: u64) -> u64 {
        let slice = self.slices(unit / SLICE_UNITS).and_then(OnceLock::get);
        match slice {
            Some(slice) => slice[at(unit % SLICE_UNITS)].load(Ordering::Acquire),
            None => self.absent.load(Ordering::Relaxed),
        }
    }

    #[inline]
    fn slices(&self, slice: u64) -> Option<&OnceLock<Slice>> {
        let (segment, index) = segment(slice);
        self.segments.get(segment)?.get()?.get(index)
    }

    /// Sets the places of units. `place` is that of the first unit, and data continues behind it.
    pub(super) fn set(&self, offset: u64, len: u64, place: Place) {
        assert!(offset.is_multiple_of(self.unit_bytes), "a unit is in one place");
        for done in (0..len).step_by(at(self.unit_bytes)) {
            let entry = match place {
                Place::Unknown => 0,
                Place::Zero => ZERO,
                Place::Owner => OWNER,
                Place::Data { layer, offset, writable } => {
                    let offset = offset + done;
                    assert!(layer < LAYERS_MAX && offset & !OFFSET == 0, "data is in clusters");
                    let layer = u64::try_from(layer).unwrap_or(0) << LAYER_SHIFT;
                    DATA | offset | layer | if writable { WRITABLE } else { 0 }
                }
            };
            self.store((offset + done) / self.unit_bytes, entry);
        }
    }

    fn store(&self, unit: u64, entry: u64) {
        let (segment, index) = segment(unit / SLICE_UNITS);
        let slices = self.segments[segment]
            .get_or_init(|| (0..1usize << segment).map(|_| OnceLock::new()).collect());
        // Only one thread writes, so no other thread makes this slice at the same time.
        let left = self.slices_left.load(Ordering::Relaxed);
        if slices[index].get().is_none() {
            if left == 0 {
                self.absent.store(OWNER, Ordering::Relaxed);
                return;
            }
            self.slices_left.store(left - 1, Ordering::Relaxed);
        }
        let slice = slices[index]
            .get_or_init(|| (0..SLICE_UNITS).map(|_| AtomicU64::new(0)).collect::<Slice>());
        slice[at(unit % SLICE_UNITS)].store(entry, Ordering::Release);
    }

    /// Forgets the places of the units that a range touches.
    pub(super) fn forget(&self, range: &Range<u64>) {
        let mut unit = range.start / self.unit_bytes;
        let end = range.end.div_ceil(self.unit_bytes);
        while unit < end {
            let slice_end = (unit / SLICE_UNITS + 1) * SLICE_UNITS;
            if let Some(slice) = self.slices(unit / SLICE_UNITS).and_then(OnceLock::get) {
                for unit in unit..slice_end.min(end) {
                    slice[at(unit % SLICE_UNITS)].store(0, Ordering::Release);
                }
            }
            unit = slice_end;
        }
    }
}

fn segment(slice: u64) -> (usize, usize) {
    let segment = (slice + 1).ilog2();
    (at(segment.into()), at(slice + 1 - (1 << segment)))
}

/// Converts a number to an index into memory.
fn at(number: u64) -> usize {
    iomem::fits(number, "an index")
}

#[inline]
fn place(entry: u64, within: u64) -> Place {
    match entry & KINDS {
        DATA => Place::Data {
            layer: at(entry >> LAYER_SHIFT),
            offset: (entry & OFFSET) + within,
            writable: entry & WRITABLE != 0,
        },
        ZERO => Place::Zero,
        OWNER => Place::Owner,
        _ => Place::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 65_536;

    fn data(layer: usize, offset: u64) -> Place {
        Place::Data { layer, offset, writable: layer == 0 }
    }

    #[test]
    fn units_without_a_slice_belong_to_the_owner() {
        let table = PlaceTable::new(65_536);
        table.slices_left.store(1, Ordering::Relaxed);
        let second = SLICE_UNITS * UNIT;
        table.set(second, UNIT, data(0, UNIT));
        assert_eq!(table.run(0, UNIT), Run { place: Place::Unknown, bytes: UNIT });
        table.set(0, UNIT, data(0, 2 * UNIT));
        assert_eq!(table.run(0, 2 * UNIT), Run { place: Place::Owner, bytes: 2 * UNIT });
        assert_eq!(table.run(second, UNIT).place, data(0, UNIT));
        table.forget(&(0..second));
        assert_eq!(table.run(0, UNIT).place, Place::Owner);
    }

    #[test]
    fn neighbours_in_one_place_are_one_run() {
        let table = PlaceTable::new(65_536);
        assert_eq!(table.run(5, 512), Run { place: Place::Unknown, bytes: 512 });
        table.set(0, 3 * UNIT, data(0, 10 * UNIT));
        table.set(3 * UNIT, UNIT, data(0, 20 * UNIT));
        table.set(4 * UNIT, UNIT, data(1, 21 * UNIT));
        table.set(5 * UNIT, 2 * UNIT, Place::Zero);
        table.set(7 * UNIT, UNIT, Place::Owner);
        for (offset, len, place, bytes) in [
            (512, 512, data(0, 10 * UNIT + 512), 512),
            (512, 9 * UNIT, data(0, 10 * UNIT + 512), 3 * UNIT - 512),
            (3 * UNIT, 2 * UNIT, data(0, 20 * UNIT), UNIT),
            (4 * UNIT + 1024, 2 * UNIT, data(1, 21 * UNIT + 1024), UNIT - 1024),
            (5 * UNIT, 3 * UNIT, Place::Zero, 2 * UNIT),
            (7 * UNIT, 2 * UNIT, Place::Owner, UNIT),
        ] {
            assert_eq!(table.run(offset, len), Run { place, bytes }, "{offset} {len}");
        }
        table.forget(&(2 * UNIT + 512..3 * UNIT + 512));
        assert_eq!(table.run(0, 9 * UNIT).bytes, 2 * UNIT);
        assert_eq!(table.run(2 * UNIT, UNIT).place, Place::Unknown);
        assert_eq!(table.run(3 * UNIT, UNIT).place, Place::Unknown, "a part is in the range");
        assert_eq!(table.run(4 * UNIT, UNIT).place, data(1, 21 * UNIT));
    }

    #[test]
    fn the_table_covers_its_largest_disk_to_the_last_byte() {
        let table = PlaceTable::new(512);
        let last = table.bytes_max() - 512;
        table.set(last, 512, Place::Zero);
        assert_eq!(table.run(last, 512).place, Place::Zero);
        assert_eq!(table.run(last + 512, 512).place, Place::Unknown);
        table.forget(&(0..last + 512));
        assert_eq!(table.run(last, 512).place, Place::Unknown);
    }
}
