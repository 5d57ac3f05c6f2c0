//! Logical units: their list, capacity and commands.

#![forbid(unsafe_code)]

use iomem::fits;

use super::command::{Cdb, read_write, synchronize_cache};
use crate::pattern::{Io, Op};
use crate::quantities::LunAddress;

/// The `lun` field of the REPORT LUNS well-known logical unit.
pub(crate) const WELL_KNOWN: [u8; 8] = [0xc1, 0x01, 0, 0, 0, 0, 0, 0];

/// A disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) address: LunAddress,
    pub(crate) blocks: u64,
    /// The binary logarithm of the size of a logical block in bytes.
    pub(crate) block_shift: u32,
    pub(crate) read_only: bool,
}

impl Unit {
    pub(crate) fn block_bytes(&self) -> u32 {
        1 << self.block_shift
    }

    /// The SCSI command for a request. The offset and the length are whole blocks.
    #[inline]
    pub(crate) fn command(&self, io: &Io) -> Cdb {
        let first = io.offset >> self.block_shift;
        let count = io.len >> self.block_shift;
        match io.op {
            Op::Read | Op::Write => read_write(io.op == Op::Write, first, count),
            Op::Flush => synchronize_cache(self.blocks),
        }
    }

    /// Parses the READ CAPACITY(16) data of the unit at `address`.
    pub(crate) fn from_capacity(address: LunAddress, data: &[u8]) -> Result<Self, String> {
        let (Some(last), Some(bytes)) = (
            data.first_chunk().map(|bytes| u64::from_be_bytes(*bytes)),
            data.get(8..).and_then(<[u8]>::first_chunk).map(|bytes| u32::from_be_bytes(*bytes)),
        ) else {
            return Err(format!("READ CAPACITY(16) returned {} bytes, not 32", data.len()));
        };
        if bytes < 512 || !bytes.is_power_of_two() {
            return Err(format!(
                "it has logical blocks of {bytes} bytes, which is not a power of two from 512 on"
            ));
        }
        let blocks =
            last.checked_add(1).filter(|blocks| blocks.checked_mul(bytes.into()).is_some());
        let blocks = blocks.ok_or_else(|| format!("its last block, {last}, is too high"))?;
        Ok(Self { address, blocks, block_shift: bytes.trailing_zeros(), read_only: false })
    }
}

/// The units that REPORT LUNS of a target lists, in order.
pub(crate) fn reported_luns(target: u8, data: &[u8]) -> Vec<LunAddress> {
    let bytes = data.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
    let entries = data.get(8..).unwrap_or_default();
    let count = fits::<_, usize>(bytes, "the length of a list") / 8;
    let entries = entries.as_chunks::<8>().0.iter().take(count);
    let luns = entries.filter_map(|entry| LunAddress::from_entry(target, *entry));
    let mut luns: Vec<_> = luns.collect();
    luns.sort_unstable();
    luns.dedup();
    luns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_luns_is_read_in_both_ways_of_addressing() {
        let entries: [[u8; 8]; 6] = [
            [0x41, 0x00, 0, 0, 0, 0, 0, 0],
            [0, 7, 0, 0, 0, 0, 0, 0],
            WELL_KNOWN,
            [0, 0, 0, 0, 0, 0, 0, 0],
            [0, 7, 0, 1, 0, 0, 0, 0],
            [0, 9, 0, 0, 0, 0, 0, 0],
        ];
        let mut data = vec![0, 0, 0, 40, 0, 0, 0, 0];
        data.extend(entries.as_flattened());
        let found: Vec<_> = reported_luns(3, &data).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["3:0", "3:7", "3:256"], "and not 3:9, which is behind the list");
        for cut in 0..data.len() {
            reported_luns(0, &data[..cut]);
        }
        assert!(reported_luns(0, &[0xff; 12]).is_empty());
    }

    #[test]
    fn a_capacity_that_cannot_be_used_is_refused() {
        let data = |last: u64, bytes: u32| {
            let mut data = [last.to_be_bytes().to_vec(), bytes.to_be_bytes().to_vec()].concat();
            data.resize(32, 0);
            data
        };
        let unit = Unit::from_capacity(LunAddress::FIRST, &data(1023, 4096)).unwrap();
        assert_eq!((unit.blocks, unit.block_bytes()), (1024, 4096));
        for (data, word) in [
            (data(0, 0), "0 bytes"),
            (data(0, 520), "520 bytes"),
            (data(u64::MAX, 512), "too high"),
            (data(u64::MAX - 1, 512), "too high"),
            (vec![0; 11], "11 bytes"),
        ] {
            let message = Unit::from_capacity(LunAddress::FIRST, &data).unwrap_err();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn requests_become_commands_in_blocks_of_the_unit() {
        let unit =
            Unit { address: LunAddress::FIRST, blocks: 1 << 33, block_shift: 12, read_only: false };
        let io = |op, offset, len| Io { op, unit: 0, offset, len };
        let read = unit.command(&io(Op::Read, 3 << 12, 2 << 12)).bytes();
        assert_eq!(read[..10], [0x28, 0, 0, 0, 0, 3, 0, 0, 2, 0]);
        let write = unit.command(&io(Op::Write, 1 << 44, 4096)).bytes();
        assert_eq!(write[..16], [0x8a, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(unit.command(&io(Op::Flush, 0, 0)).bytes()[0], 0x91);
    }
}
