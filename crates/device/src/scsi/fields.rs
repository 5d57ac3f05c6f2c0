//! Boundaries of fields in CDBs and parameter lists. A field pointer names the first byte of a
//! wrong field, and its highest bit unless the field has whole bytes (SPC-5, section 4.5.2.4.2).

/// All bits of a byte are one field, or the first byte of a longer one.
pub(super) const WHOLE_BYTE: u8 = 0x80;

/// Returns the first byte of the field that contains a bit, and its highest bit unless that byte is
/// [`WHOLE_BYTE`]. `starts` returns the bits of a byte that are the highest of a field, and zero if
/// the field of the previous byte continues.
pub(super) fn field_start(starts: impl Fn(usize) -> u8, byte: usize, bit: u8) -> (u16, Option<u8>) {
    let mut at = byte;
    let mut above = starts(at) & (u8::MAX << bit);
    while above == 0 && at > 0 {
        at -= 1;
        above = starts(at);
    }
    let bit = u8::try_from(above.trailing_zeros()).expect("a number of bits");
    let bit = (starts(at) != WHOLE_BYTE).then_some(bit);
    (iomem::fits(at, "a place in a CDB or in a list"), bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_begins_at_its_first_byte_and_its_highest_bit() {
        let fields = [WHOLE_BYTE, 0b1001_0010, WHOLE_BYTE, 0, 0, WHOLE_BYTE];
        for ((byte, bit), expected) in [
            ((0, 3), (0, None)),
            ((1, 7), (1, Some(7))),
            ((1, 5), (1, Some(7))),
            ((1, 4), (1, Some(4))),
            ((1, 2), (1, Some(4))),
            ((1, 0), (1, Some(1))),
            ((2, 7), (2, None)),
            ((4, 0), (2, None)),
            ((5, 0), (5, None)),
        ] {
            assert_eq!(field_start(|at| fields[at], byte, bit), expected, "{byte}, {bit}");
        }
    }
}
