//! Command descriptor blocks (SPC-5, SBC-4). Their fields are big-endian.

#![forbid(unsafe_code)]

/// The CDB of a request: the command, with its first byte lowest in the number, and zeroes up to
/// the length that the device expects. It is built in a number and stored once. A wide read of
/// bytes just written would stall until they have left the processor's store buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cdb(pub(super) u128);

#[cfg(test)]
impl Cdb {
    pub(super) fn bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }
}

/// A CDB that begins with `bytes`.
fn cdb<const N: usize>(bytes: [u8; N]) -> Cdb {
    let mut all = [0; 16];
    all[..N].copy_from_slice(&bytes);
    Cdb(u128::from_le_bytes(all))
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

/// REPORT LUNS for the units of a target, without its well-known units.
pub(crate) fn report_luns(room: u32) -> Cdb {
    let [a, b, c, d] = room.to_be_bytes();
    cdb([0xa0, 0, 0, 0, 0, 0, a, b, c, d, 0, 0])
}

/// READ CAPACITY(16), which is SERVICE ACTION IN(16) with service action 10h.
pub(crate) fn read_capacity_16(room: u32) -> Cdb {
    let [a, b, c, d] = room.to_be_bytes();
    cdb([0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d, 0, 0])
}

/// MODE SENSE(10) for all pages without block descriptors. The header comes first.
pub(crate) fn mode_sense_10(room: u16) -> Cdb {
    const DISABLE_BLOCK_DESCRIPTORS: u8 = 0x08;
    const ALL_PAGES: u8 = 0x3f;
    let [a, b] = room.to_be_bytes();
    cdb([0x5a, DISABLE_BLOCK_DESCRIPTORS, ALL_PAGES, 0, 0, 0, 0, a, b, 0])
}

/// READ or WRITE of `count` blocks from block `first`: (10) if both fit its fields, else (16).
#[inline]
pub(crate) fn read_write(write: bool, first: u64, count: u32) -> Cdb {
    let field = |big_endian: u64, at: u32| u128::from(big_endian) << (8 * at);
    let opcode = |read: u8| u128::from(if write { read + 2 } else { read });
    if let (Ok(first), Ok(count)) = (u32::try_from(first), u16::try_from(count)) {
        let (first, count) = (first.swap_bytes().into(), count.swap_bytes().into());
        return Cdb(opcode(0x28) | field(first, 2) | field(count, 7));
    }
    let count = count.swap_bytes().into();
    Cdb(opcode(0x88) | field(first.swap_bytes(), 2) | field(count, 10))
}

/// SYNCHRONIZE CACHE of a whole unit: (10) if it can name all `blocks`, else (16).
pub(crate) fn synchronize_cache(blocks: u64) -> Cdb {
    const NAMED_BY_10: u64 = 1 << 32;
    // A count of 0 means all blocks of the unit.
    if blocks <= NAMED_BY_10 { cdb([0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]) } else { cdb([0x91; 1]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_use_the_shortest_cdb() {
        let read = read_write(false, 0x0102_0304, 0xffff).bytes();
        assert_eq!(read[..10], [0x28, 0, 1, 2, 3, 4, 0, 0xff, 0xff, 0]);
        assert!(read[10..].iter().all(|byte| *byte == 0));
        assert_eq!(read_write(true, u32::MAX.into(), 1).bytes()[0], 0x2a);
        let long = read_write(false, 5, 0x1_0000).bytes();
        assert_eq!(long[..16], [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 1, 0, 0, 0, 0]);
        let far = read_write(true, 0x1_0203_0405, 7).bytes();
        assert_eq!(far[..16], [0x8a, 0, 0, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 7, 0, 0]);
    }

    #[test]
    fn a_flush_covers_the_whole_unit() {
        assert_eq!(synchronize_cache(1 << 32).bytes()[..3], [0x35, 0, 0]);
        assert_eq!(synchronize_cache((1 << 32) + 1).bytes()[..3], [0x91, 0, 0]);
    }

    #[test]
    fn allocation_lengths_have_their_offsets() {
        assert_eq!(inquiry(0x1234).bytes()[..6], [0x12, 0, 0, 0x12, 0x34, 0]);
        assert_eq!(report_luns(0x0102_0304).bytes()[5..11], [0, 1, 2, 3, 4, 0]);
        assert_eq!(read_capacity_16(32).bytes()[9..15], [0, 0, 0, 0, 32, 0]);
        assert_eq!(mode_sense_10(8).bytes()[6..10], [0, 0, 8, 0]);
        assert!(test_unit_ready().bytes().iter().all(|byte| *byte == 0));
    }
}
