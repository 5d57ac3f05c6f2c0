//! Hash functions by their names in headers, and the key operations that LUKS builds on them.

use iomem::fits;
use sha1::Sha1;
use sha2::digest::Digest;
use sha2::{Sha224, Sha256, Sha384, Sha512};
use zeroize::Zeroizing;

/// A hash function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hash {
    Sha1,
    Sha224,
    Sha256,
    Sha384,
    Sha512,
}

const NAMES: [(&str, Hash); 5] = [
    ("sha1", Hash::Sha1),
    ("sha224", Hash::Sha224),
    ("sha256", Hash::Sha256),
    ("sha384", Hash::Sha384),
    ("sha512", Hash::Sha512),
];

impl Hash {
    pub(super) fn from_name(name: &str) -> Result<Self, String> {
        let known = NAMES.iter().find(|(known, _)| *known == name);
        known.map(|(_, hash)| *hash).ok_or_else(|| {
            let names = NAMES.map(|(name, _)| name).join(", ");
            format!("its hash {name:?} is not supported; {names} are")
        })
    }

    /// Hashes all parts, one after another.
    pub(super) fn digest(self, parts: &[&[u8]]) -> Zeroizing<Vec<u8>> {
        fn digest_with<D: Digest>(parts: &[&[u8]]) -> Zeroizing<Vec<u8>> {
            let hash = parts.iter().fold(D::new(), |hash, part| hash.chain_update(part));
            Zeroizing::new(hash.finalize().to_vec())
        }
        match self {
            Self::Sha1 => digest_with::<Sha1>(parts),
            Self::Sha224 => digest_with::<Sha224>(parts),
            Self::Sha256 => digest_with::<Sha256>(parts),
            Self::Sha384 => digest_with::<Sha384>(parts),
            Self::Sha512 => digest_with::<Sha512>(parts),
        }
    }

    /// The size of a hash in bytes.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha224 => 28,
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// PBKDF2 with HMAC (RFC 8018).
    pub(super) fn pbkdf2(self, secret: &[u8], salt: &[u8], rounds: u32, bytes: usize) -> Key {
        let mut out = Zeroizing::new(vec![0; bytes]);
        match self {
            Self::Sha1 => pbkdf2::pbkdf2_hmac::<Sha1>(secret, salt, rounds, &mut out),
            Self::Sha224 => pbkdf2::pbkdf2_hmac::<Sha224>(secret, salt, rounds, &mut out),
            Self::Sha256 => pbkdf2::pbkdf2_hmac::<Sha256>(secret, salt, rounds, &mut out),
            Self::Sha384 => pbkdf2::pbkdf2_hmac::<Sha384>(secret, salt, rounds, &mut out),
            Self::Sha512 => pbkdf2::pbkdf2_hmac::<Sha512>(secret, salt, rounds, &mut out),
        }
        out
    }

    /// Restores a key of `bytes` bytes. It was split so that nothing of it is left when any part of
    /// `material` is overwritten (LUKS specification, "Anti-forensic splitter").
    pub(super) fn merge(self, material: &[u8], bytes: usize) -> Key {
        let mut key = Zeroizing::new(vec![0; bytes]);
        for (at, stripe) in material.chunks_exact(bytes).enumerate() {
            if at > 0 {
                self.diffuse(&mut key);
            }
            for (byte, with) in key.iter_mut().zip(stripe) {
                *byte ^= with;
            }
        }
        key
    }

    /// Replaces each part of the size of a hash by the hash of its number and itself.
    fn diffuse(self, key: &mut [u8]) {
        for (number, part) in key.chunks_mut(self.bytes()).enumerate() {
            let number: u32 = fits(number, "a part of a key");
            let hash = self.digest(&[&number.to_be_bytes(), part]);
            part.copy_from_slice(&hash[..part.len()]);
        }
    }
}

/// A secret that is wiped when it is dropped.
pub(super) type Key = Zeroizing<Vec<u8>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_have_the_stated_size() {
        for (name, hash) in NAMES {
            assert_eq!(Hash::from_name(name), Ok(hash));
            assert_eq!(hash.digest(&[b"a", b"b"]).len(), hash.bytes());
            assert_eq!(hash.digest(&[b"a", b"b"]), hash.digest(&[b"ab"]));
        }
        assert!(Hash::from_name("whirlpool").unwrap_err().contains("sha1, sha224"));
    }

    /// Of Python's hashlib, for "password", "salt" and two rounds.
    #[test]
    fn each_name_derives_the_key_of_its_hash() {
        for (name, expected) in [
            ("sha1", 0xea6c_014d_c72d_6f8c),
            ("sha224", 0x9320_0ffa_96c5_776d),
            ("sha256", 0xae4d_0c95_af6b_46d3),
            ("sha384", 0x54f7_75c6_d790_f219),
            ("sha512", 0xe1d9_c16a_a681_708a_u64),
        ] {
            let key = Hash::from_name(name).unwrap().pbkdf2(b"password", b"salt", 2, 8);
            assert_eq!(key[..], expected.to_be_bytes(), "{name}");
        }
    }

    /// Splits like the specification: all stripes but the last one are arbitrary.
    #[test]
    fn a_key_that_was_split_is_merged() {
        for (hash, bytes) in [(Hash::Sha1, 64), (Hash::Sha256, 32), (Hash::Sha512, 32)] {
            let key: Vec<u8> = (1..=255).cycle().take(bytes).collect();
            let mut material: Vec<u8> = (7..=250).cycle().take(bytes * 3).collect();
            let mut last = Zeroizing::new(vec![0; bytes]);
            for stripe in material.chunks(bytes) {
                last.iter_mut().zip(stripe).for_each(|(byte, with)| *byte ^= with);
                hash.diffuse(&mut last);
            }
            material.extend(last.iter().zip(&key).map(|(byte, with)| byte ^ with));
            assert_eq!(hash.merge(&material, bytes)[..], key[..]);
            material[1] ^= 1;
            assert_ne!(hash.merge(&material, bytes)[..], key[..]);
        }
    }
}
