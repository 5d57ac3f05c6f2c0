//! Content of sectors: each write has a number, and fills its sectors with a pattern of it.

use crate::rng::mix;

pub(crate) const SECTOR: usize = 512;

/// The write that a sector's content comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Value {
    Zero,
    Id(u64),
}

/// The initial content of a disk, different for each disk.
pub(crate) fn initial(disk: usize) -> Value {
    Value::Id(1 + disk as u64)
}

/// The bytes that `value` leaves in `sector`.
pub(crate) fn bytes_of(value: Value, sector: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if let Value::Id(id) = value {
        for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
            let content = match index {
                0 => id,
                1 => sector,
                _ => mix(id ^ (sector << 32) ^ ((index as u64) << 56)),
            };
            word.copy_from_slice(&content.to_le_bytes());
        }
    }
    bytes
}

/// The write that left these bytes in `sector`, or `None` if no write did.
pub(crate) fn value_of(bytes: &[u8], sector: u64) -> Option<Value> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Some(Value::Zero);
    }
    let id = u64::from_le_bytes(*bytes.first_chunk()?);
    (bytes == bytes_of(Value::Id(id), sector)).then_some(Value::Id(id))
}

/// Describes bytes for a failure.
pub(crate) fn describe(bytes: &[u8]) -> String {
    let word = |index: usize| {
        let word = bytes.get(8 * index..8 * index + 8).and_then(|word| word.first_chunk());
        word.map_or(0, |word| u64::from_le_bytes(*word))
    };
    let zeroes = bytes.iter().filter(|byte| **byte == 0).count();
    format!("begins as write {} to sector {}, {zeroes} of its bytes are 0", word(0), word(1))
}
