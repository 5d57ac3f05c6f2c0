//! Default names of disks, derived from the identity of a disk without revealing it.

use device::blk::config::SERIAL_BYTES;
use iomem::fits;

/// Digits of base 32.
const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHIJKLMNOPQRSTUV";

/// Derives a serial number from the identity of a disk, without revealing it.
pub(crate) fn serial(identity: &str) -> String {
    if identity.is_empty() {
        return "null".to_owned();
    }
    // 100 bits as base-32 digits.
    let hash = hash(identity);
    let digit = |place: usize| {
        let value: usize = fits(hash >> (128 - 5 * (place + 1)) & 31, "five bits");
        char::from(DIGITS[value])
    };
    (0..SERIAL_BYTES).map(digit).collect()
}

/// Derives an NAA identifier from the identity of a disk: locally assigned, 60 bits (SPC-5, section
/// 7.7.6.6.4).
pub(crate) fn naa(identity: &str) -> [u8; 8] {
    let bits: u64 = fits(hash(identity) >> 68, "60 bits");
    (3 << 60 | bits).to_be_bytes()
}

/// Computes the 128-bit FNV-1a hash.
pub(crate) fn hash(identity: &str) -> u128 {
    identity.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serials_are_full_printable_and_apart() {
        let of = |inode: u32| serial(&format!("file system [1, 2], inode {inode}"));
        let serials: std::collections::BTreeSet<_> = (0..10_000).map(of).collect();
        assert_eq!(serials.len(), 10_000);
        for serial in serials {
            assert_eq!(serial.len(), SERIAL_BYTES);
            assert!(serial.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{serial}");
        }
        // Guests must see the same serial number in every version.
        assert_eq!(of(7), "55IN9JE2M4HQD2IQ9FGO");
        assert_eq!(serial(""), "null");
        assert_eq!(naa("file system [1, 2], inode 7")[0] >> 4, 3);
        assert_ne!(naa("a"), naa("b"));
    }
}
