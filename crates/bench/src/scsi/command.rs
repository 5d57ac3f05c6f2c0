//! Command descriptor blocks (SPC-5, SBC-4). Their fields are big-endian.

#![forbid(unsafe_code)]

use super::request::CDB_BYTES;

/// The CDB of a request: the command, and zeroes up to the length that the device expects.
pub(crate) type Cdb = [u8; CDB_BYTES];

/// A CDB that begins with `bytes`.
#[inline]
fn cdb<const N: usize>(bytes: [u8; N]) -> Cdb {
    let mut cdb = [0; CDB_BYTES];
    cdb[..N].copy_from_slice(&bytes);
    cdb
}

/// TEST UNIT READY.
pub(crate) fn test_unit_ready() -> Cdb {
    cdb([0x00; 6])
}

/// INQUIRY for standard data.
pub(crate) fn inquiry(room: u16) -> Cdb {
    let [a, b] = room.to_be_bytes();
    cdb([0x12, 0, 0, a, b, 0])
}

/// REPORT LUNS for the units of a target, without its well-known ones.
pub(crate) fn report_luns(room: u32) -> Cdb {
    let [a, b, c, d] = room.to_be_bytes();
    cdb([0xa0, 0, 0, 0, 0, 0, a, b, c, d, 0, 0])
}

/// READ CAPACITY(16), which is SERVICE ACTION IN(16) with service action 10h.
pub(crate) fn read_capacity_16(room: u32) -> Cdb {
    let [a, b, c, d] = room.to_be_bytes();
    cdb([0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d, 0, 0])
}

/// MODE SENSE(10) for all pages, without block descriptors: the header comes first.
pub(crate) fn mode_sense_10(room: u16) -> Cdb {
    const DISABLE_BLOCK_DESCRIPTORS: u8 = 0x08;
    const ALL_PAGES: u8 = 0x3f;
    let [a, b] = room.to_be_bytes();
    cdb([0x5a, DISABLE_BLOCK_DESCRIPTORS, ALL_PAGES, 0, 0, 0, 0, a, b, 0])
}

/// READ or WRITE of `count` blocks from block `first`: (10) where that has room for both, (16)
/// else.
#[inline]
pub(crate) fn read_write(write: bool, first: u64, count: u32) -> Cdb {
    if let (Ok(first), Ok(count)) = (u32::try_from(first), u16::try_from(count)) {
        let ([a, b, c, d], [e, f]) = (first.to_be_bytes(), count.to_be_bytes());
        return cdb([if write { 0x2a } else { 0x28 }, 0, a, b, c, d, 0, e, f, 0]);
    }
    let ([a, b, c, d, e, f, g, h], [i, j, k, l]) = (first.to_be_bytes(), count.to_be_bytes());
    cdb([if write { 0x8a } else { 0x88 }, 0, a, b, c, d, e, f, g, h, i, j, k, l, 0, 0])
}

/// SYNCHRONIZE CACHE of a whole unit, whose blocks (10) can name or only (16) can.
pub(crate) fn synchronize_cache(blocks: u64) -> Cdb {
    const NAMED_BY_10: u64 = 1 << 32;
    // A count of 0 stands for all blocks that there are.
    if blocks <= NAMED_BY_10 { cdb([0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]) } else { cdb([0x91; 1]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_are_as_short_as_their_fields_allow() {
        let read = read_write(false, 0x0102_0304, 0xffff);
        assert_eq!(read[..10], [0x28, 0, 1, 2, 3, 4, 0, 0xff, 0xff, 0]);
        assert!(read[10..].iter().all(|byte| *byte == 0));
        assert_eq!(read_write(true, u32::MAX.into(), 1)[0], 0x2a);
        let long = read_write(false, 5, 0x1_0000);
        assert_eq!(long[..16], [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 1, 0, 0, 0, 0]);
        let far = read_write(true, 0x1_0203_0405, 7);
        assert_eq!(far[..16], [0x8a, 0, 0, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 7, 0, 0]);
    }

    #[test]
    fn a_flush_names_the_whole_unit() {
        assert_eq!(synchronize_cache(1 << 32)[..3], [0x35, 0, 0]);
        assert_eq!(synchronize_cache((1 << 32) + 1)[..3], [0x91, 0, 0]);
    }

    #[test]
    fn allocation_lengths_are_where_they_belong() {
        assert_eq!(inquiry(0x1234)[..6], [0x12, 0, 0, 0x12, 0x34, 0]);
        assert_eq!(report_luns(0x0102_0304)[5..11], [0, 1, 2, 3, 4, 0]);
        assert_eq!(read_capacity_16(32)[9..15], [0, 0, 0, 0, 32, 0]);
        assert_eq!(mode_sense_10(8)[6..10], [0, 0, 8, 0]);
        assert!(test_unit_ready().iter().all(|byte| *byte == 0));
    }
}
