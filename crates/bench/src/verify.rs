//! The contents of verified blocks, and the generation that the disk must return for each.
//!
//! The region of a unit is divided into blocks of one size, the largest that divides all sizes of
//! I/O. Each carries a header, which determines all of its content:
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | magic |
//! | 8..16 | sector (512 bytes) at which the block starts |
//! | 16..24 | number of this run and unit, which tells its blocks from all other ones |
//! | 24..28 | generation: 1 for the first write of the block, one more for each later one |
//! | 28..32 | size of the block in bytes |
//! | 32..36 | CRC-32 of all the rest |
//! | 36.. | filler |
//!
//! All integers are little-endian. A block has at most one request in flight: [`BlockMap::claim`]
//! claims all blocks of a request or none, and until the claim is released no other request touches
//! them. So the expected data of a read is known exactly, at any depth.

#![forbid(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use iomem::fits;

const SECTOR_BYTES: u64 = 512;
const MAGIC: &[u8; 8] = b"RHaulBlk";
const HEADER_BYTES: usize = 36;
const CRC_FIELD: Range<usize> = 32..36;

/// Fills the data memory before a read. A server that claims a read which it did not do is thus
/// detected even if the memory held the expected data before.
pub(crate) const PREFILL: u8 = 0xa5;

/// Set while a request on the block is in flight.
const BUSY: u32 = 1 << 31;
/// Set after a failed write: the disk may hold the old content, the new content, or parts of both.
const UNKNOWN: u32 = 1 << 30;
const GENERATION: u32 = UNKNOWN - 1;

/// The generations of all blocks of a unit's region, shared by all jobs.
#[derive(Debug)]
pub(crate) struct BlockMap {
    start: u64,
    block_bytes: u32,
    run: u64,
    blocks: Box<[AtomicU32]>,
}

impl BlockMap {
    /// Makes a map of `len` bytes, a multiple of `block_bytes`, from `start`, the first byte of the
    /// region. `run` should differ between runs, and between units.
    pub(crate) fn new(start: u64, len: u64, block_bytes: u32, run: u64) -> Self {
        let count = len / u64::from(block_bytes);
        Self { start, block_bytes, run, blocks: (0..count).map(|_| AtomicU32::new(0)).collect() }
    }

    fn blocks(&self, offset: u64, len: usize) -> impl Iterator<Item = (u64, &AtomicU32)> {
        let size = u64::from(self.block_bytes);
        let first = fits::<_, usize>((offset - self.start) / size, "the number of a block");
        let count = len / fits::<_, usize>(self.block_bytes, "the size of a block");
        let blocks = self.blocks.get(first..first + count).unwrap_or_default();
        (offset..).step_by(fits(size, "the size of a block")).zip(blocks)
    }

    /// Claims the blocks of a request. Returns false, and claims none, if any is already claimed.
    pub(crate) fn claim(&self, offset: u64, len: usize) -> bool {
        for (taken, (_, block)) in self.blocks(offset, len).enumerate() {
            if block.fetch_or(BUSY, Ordering::Acquire) & BUSY != 0 {
                for (_, block) in self.blocks(offset, len).take(taken) {
                    block.fetch_and(!BUSY, Ordering::Release);
                }
                return false;
            }
        }
        true
    }

    /// Releases the claim of a read.
    pub(crate) fn release_read(&self, offset: u64, len: usize) {
        for (_, block) in self.blocks(offset, len) {
            block.fetch_and(!BUSY, Ordering::Release);
        }
    }

    /// Releases the claim of a write, which put the next generation on the disk if it was `ok`.
    pub(crate) fn release_write(&self, offset: u64, len: usize, ok: bool) {
        let unknown = if ok { 0 } else { UNKNOWN };
        for (_, block) in self.blocks(offset, len) {
            let next = next_generation(block.load(Ordering::Relaxed));
            block.store(next | unknown, Ordering::Release);
        }
    }

    /// Fills `data` with the next generation of the blocks from `offset`, which must be claimed.
    pub(crate) fn stamp(&self, offset: u64, data: &mut [u8]) {
        let size = fits(self.block_bytes, "the size of a block");
        let blocks = self.blocks(offset, data.len());
        for ((offset, block), data) in blocks.zip(data.chunks_exact_mut(size)) {
            let generation = next_generation(block.load(Ordering::Relaxed));
            make_block(self.run, offset / SECTOR_BYTES, generation, data);
        }
    }

    /// Compares `data`, read from `offset` under a claim, with the last write. Skips blocks of
    /// unknown content and blocks that this run has not written. Returns the number of compared
    /// blocks.
    pub(crate) fn check(&self, offset: u64, data: &[u8]) -> Result<u64, Mismatch> {
        let size = fits(self.block_bytes, "the size of a block");
        let mut checked = 0;
        let blocks = self.blocks(offset, data.len());
        for ((offset, block), data) in blocks.zip(data.chunks_exact(size)) {
            let state = block.load(Ordering::Relaxed);
            if state & GENERATION != 0 && state & UNKNOWN == 0 {
                check_block(self.run, offset, state & GENERATION, data)?;
                checked += 1;
            }
        }
        Ok(checked)
    }

    /// Returns the offset of the first block in `range` that this run has written.
    pub(crate) fn next_written(&self, range: Range<u64>) -> Option<u64> {
        let len = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        self.blocks(range.start, len)
            .find(|(_, block)| block.load(Ordering::Relaxed) & GENERATION != 0)
            .map(|(offset, _)| offset)
    }
}

/// The generation of a block's next write. 0 means never written and is skipped.
fn next_generation(state: u32) -> u32 {
    ((state & GENERATION) % (GENERATION)) + 1
}

/// Fills `data` with the block that belongs at `sector`.
fn make_block(run: u64, sector: u64, generation: u32, data: &mut [u8]) {
    let size = fits::<_, u32>(data.len(), "the size of a block");
    // Distinct odd steps make every word of every block different, at the cost of one addition. The
    // filler need not look random. It only must not repeat where data could be misplaced.
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut word = run ^ sector.wrapping_mul(STEP) ^ (u64::from(generation) << 32);
    for bytes in data[HEADER_BYTES..].chunks_mut(8) {
        word = word.wrapping_add(STEP);
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
    data[0..8].copy_from_slice(MAGIC);
    data[8..16].copy_from_slice(&sector.to_le_bytes());
    data[16..24].copy_from_slice(&run.to_le_bytes());
    data[24..28].copy_from_slice(&generation.to_le_bytes());
    data[28..32].copy_from_slice(&size.to_le_bytes());
    let crc = checksum(data);
    data[CRC_FIELD].copy_from_slice(&crc.to_le_bytes());
}

fn checksum(data: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&data[..CRC_FIELD.start]);
    hasher.update(&data[CRC_FIELD.end..]);
    hasher.finalize()
}

fn field_u32(data: &[u8], at: usize) -> u32 {
    data[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn field_u64(data: &[u8], at: usize) -> u64 {
    data[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn check_block(run: u64, offset: u64, generation: u32, data: &[u8]) -> Result<(), Mismatch> {
    let sector = offset / SECTOR_BYTES;
    let size = fits::<_, u32>(data.len(), "the size of a block");
    let header_matches = data[0..8] == MAGIC[..]
        && field_u64(data, 8) == sector
        && field_u64(data, 16) == run
        && field_u32(data, 24) == generation
        && field_u32(data, 28) == size;
    if header_matches && field_u32(data, CRC_FIELD.start) == checksum(data) {
        return Ok(());
    }
    Err(explain(run, offset, generation, data))
}

/// Describes the difference of a block that does not match. The cost no longer matters.
fn explain(run: u64, offset: u64, generation: u32, data: &[u8]) -> Mismatch {
    let sector = offset / SECTOR_BYTES;
    let expected = format!("generation {generation} of sector {sector}");
    let ours = data[0..8] == MAGIC[..] && field_u64(data, 16) == run;
    let intact = field_u32(data, CRC_FIELD.start) == checksum(data);
    let found = if data.iter().all(|byte| *byte == 0) {
        "nothing but zeroes".to_owned()
    } else if data.iter().all(|byte| *byte == PREFILL) {
        "that the server has not written to the buffer".to_owned()
    } else if !ours && data[0..8] == MAGIC[..] && intact {
        "a block of another run or unit".to_owned()
    } else if ours && intact {
        let (found, at) = (field_u32(data, 24), field_u64(data, 8));
        format!("generation {found} of sector {at}")
    } else {
        let mut wanted = vec![0; data.len()];
        make_block(run, sector, generation, &mut wanted);
        let differ = |index: &usize| data[*index] != wanted[*index];
        let count = (0..data.len()).filter(differ).count();
        match (0..data.len()).find(differ) {
            Some(first) => format!(
                "{count} of {} bytes differ, the first is byte {first} of the block: \
                 expected {:#04x}, found {:#04x}",
                data.len(),
                wanted[first],
                data[first],
            ),
            None => "the expected bytes in a second comparison: the server still writes to them"
                .to_owned(),
        }
    };
    Mismatch { offset, sector, expected, found }
}

/// A block that differs from its last write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mismatch {
    offset: u64,
    sector: u64,
    expected: String,
    found: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, sector, expected, found } = self;
        write!(f, "wrong data at offset {offset} (sector {sector}): expected {expected}; ")?;
        write!(f, "found {found}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: usize = 1024;

    fn written(map: &BlockMap, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        assert!(map.claim(offset, len));
        map.stamp(offset, &mut data);
        map.release_write(offset, len, true);
        data
    }

    fn map() -> BlockMap {
        BlockMap::new(4096, 64 * 1024, 1024, 42)
    }

    fn found(map: &BlockMap, offset: u64, data: &[u8]) -> String {
        map.check(offset, data).unwrap_err().found
    }

    #[test]
    fn written_blocks_are_accepted() {
        let map = map();
        let data = written(&map, 5120, 4 * BLOCK);
        assert_eq!(map.check(5120, &data), Ok(4));
        assert_eq!(map.check(6144, &data[BLOCK..]), Ok(3));
    }

    #[test]
    fn unwritten_blocks_are_skipped() {
        let map = map();
        let mut data = vec![7; 3 * BLOCK];
        data[BLOCK..2 * BLOCK].copy_from_slice(&written(&map, 5120, BLOCK));
        assert_eq!(map.check(4096, &data), Ok(1));
    }

    #[test]
    fn an_older_generation_is_detected() {
        let map = map();
        let old = written(&map, 4096, BLOCK);
        let new = written(&map, 4096, BLOCK);
        assert_eq!(map.check(4096, &new), Ok(1));
        assert_eq!(found(&map, 4096, &old), "generation 1 of sector 8");
    }

    #[test]
    fn a_misplaced_block_is_detected() {
        let map = map();
        let data = written(&map, 4096, 2 * BLOCK);
        assert_eq!(found(&map, 4096, &data[BLOCK..]), "generation 1 of sector 10");
    }

    #[test]
    fn zeroes_foreign_blocks_and_prefilled_buffers_are_detected() {
        let map = map();
        let other = BlockMap::new(4096, 64 * 1024, 1024, 43);
        written(&map, 4096, BLOCK);
        assert_eq!(found(&map, 4096, &[0; BLOCK]), "nothing but zeroes");
        assert_eq!(
            found(&map, 4096, &written(&other, 4096, BLOCK)),
            "a block of another run or unit"
        );
    }

    #[test]
    fn a_mismatch_names_its_position() {
        let map = map();
        let mut data = written(&map, 4096, 2 * BLOCK);
        data[BLOCK + 500] ^= 0x10;
        let text = map.check(4096, &data).unwrap_err().to_string();
        assert!(text.contains("offset 5120 (sector 10)"), "{text}");
        assert!(text.contains("1 of 1024 bytes differ, the first is byte 500"), "{text}");
    }

    #[test]
    fn after_a_failed_write_a_block_is_not_checked_until_it_is_written_again() {
        let map = map();
        let first = written(&map, 4096, BLOCK);
        assert!(map.claim(4096, BLOCK));
        map.release_write(4096, BLOCK, false);
        assert_eq!(map.check(4096, &[1; BLOCK]), Ok(0));
        let third = written(&map, 4096, BLOCK);
        assert_eq!(map.check(4096, &third), Ok(1));
        assert!(map.check(4096, &first).is_err());
    }

    #[test]
    fn a_claim_is_all_or_nothing() {
        let map = map();
        assert!(map.claim(6144, BLOCK));
        assert!(!map.claim(4096, 4 * BLOCK));
        assert!(!map.claim(6144, BLOCK), "the failed claim must not end another one");
        assert!(map.claim(4096, 2 * BLOCK), "the failed claim must not keep anything");
        map.release_read(6144, BLOCK);
        assert!(map.claim(6144, BLOCK));
    }

    #[test]
    fn the_next_written_block_is_found() {
        let map = map();
        assert_eq!(map.next_written(4096..69_632), None);
        written(&map, 8192, BLOCK);
        assert_eq!(map.next_written(4096..69_632), Some(8192));
        assert_eq!(map.next_written(9216..69_632), None);
    }

    #[test]
    fn generations_wrap_past_never_written() {
        assert_eq!(next_generation(0), 1);
        assert_eq!(next_generation(GENERATION - 1), GENERATION);
        assert_eq!(next_generation(GENERATION), 1);
        assert_eq!(next_generation(BUSY | UNKNOWN | 5), 6);
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_detected(at in 0..BLOCK, bit in 0..8_u32) {
            let map = map();
            let mut data = written(&map, 4096, BLOCK);
            data[at] ^= 1 << bit;
            prop_assert!(map.check(4096, &data).is_err());
        }
    }
}
