//! The contents of a header of either version, and the way from a passphrase to the key of the
//! volume.
//!
//! A header may come from anyone: its demands are bounded before they are met.

use argon2::{Algorithm, Argon2, Block, Params, Version};
use iomem::fits;
use zeroize::Zeroizing;

use super::hash::{Hash, Key};
use super::memory::{Blocks, LIMIT_KIB, MEMORY};
use super::xts::{CHUNK_BYTES, Cipher, Direction};

/// The most work that a header may demand for a passphrase, in all key slots together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KdfLimits {
    /// Rounds of PBKDF2, for each hash that the key has room for.
    pub pbkdf2_rounds: u64,
    /// KiB of memory for Argon2 at a time.
    pub argon2_kib: u32,
    /// KiB that Argon2 goes over, in all passes together.
    pub argon2_passes_kib: u64,
}

impl Default for KdfLimits {
    /// Each limit allows some minutes. `cryptsetup` aims at two seconds for a key slot, of which
    /// there are at most 32, and never takes more than 1 GiB without being asked. With ten passes
    /// over that for each, twelve key slots can be tried.
    fn default() -> Self {
        Self { pbkdf2_rounds: 1 << 29, argon2_kib: LIMIT_KIB, argon2_passes_kib: 1 << 27 }
    }
}

impl KdfLimits {
    /// Takes the rounds of PBKDF2 for `bytes` bytes from the work that is left.
    fn take_pbkdf2(&mut self, hash: Hash, rounds: u32, bytes: usize) -> Result<(), String> {
        let all = u64::from(rounds) * bytes.div_ceil(hash.bytes()) as u64;
        match self.pbkdf2_rounds.checked_sub(all).filter(|_| rounds > 0) {
            Some(left) => self.pbkdf2_rounds = left,
            None => {
                return Err(format!(
                    "asks for {rounds} rounds of PBKDF2, which is zero or, together with earlier \
                     key slots, too many; change it with `cryptsetup luksConvertKey \
                     --pbkdf-force-iterations`"
                ));
            }
        }
        Ok(())
    }

    /// Takes the passes of Argon2 from the work that is left.
    fn take_argon2(&mut self, kib: u32, passes: u32) -> Result<(), String> {
        let all = u64::from(passes) * u64::from(kib);
        let left = self.argon2_passes_kib.checked_sub(all);
        match left.filter(|_| kib <= self.argon2_kib) {
            Some(left) => self.argon2_passes_kib = left,
            None => {
                return Err(format!(
                    "asks for {kib} KiB of memory and {passes} passes, which is too much, alone or \
                     together with earlier key slots; change it with `cryptsetup luksConvertKey \
                     --pbkdf-memory`"
                ));
            }
        }
        Ok(())
    }
}

/// Reads a number of bytes from an offset on.
pub(super) type ReadAt<'a> = dyn Fn(u64, usize) -> Result<Vec<u8>, String> + 'a;

/// The contents of a header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) version: u16,
    pub(super) uuid: String,
    pub(super) payload: Payload,
    /// In the order in which they are tried.
    pub(super) slots: Vec<Slot>,
    /// Key slots that cannot be tried, with reasons.
    pub(super) skipped: String,
    /// A remark on the state of the header itself.
    pub(super) remark: Option<String>,
}

/// The place of the data, and its encryption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Payload {
    pub(super) offset_bytes: u64,
    /// `None`: up to the end.
    pub(super) size_bytes: Option<u64>,
    pub(super) sector_bytes: u32,
    /// The position of the first sector, in units of 512 bytes.
    pub(super) first_position: u64,
}

/// A place that holds the key of the volume, encrypted with a passphrase.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) number: u32,
    pub(super) kdf: Kdf,
    /// The length of the key that the passphrase becomes.
    pub(super) slot_key_bytes: usize,
    pub(super) area_offset: u64,
    pub(super) stripes: u32,
    pub(super) split_hash: Hash,
    /// The length of the key of the volume.
    pub(super) key_bytes: usize,
    pub(super) check: KeyCheck,
}

/// The derivation of a key from a passphrase.
#[derive(Debug)]
pub(super) enum Kdf {
    Pbkdf2 { hash: Hash, rounds: u32, salt: Vec<u8> },
    Argon2 { algorithm: Algorithm, passes: u32, kib: u32, lanes: u32, salt: Vec<u8> },
}

/// The digest by which the key of the volume is recognized.
#[derive(Debug, Clone)]
pub(super) struct KeyCheck {
    pub(super) hash: Hash,
    pub(super) rounds: u32,
    pub(super) salt: Vec<u8>,
    pub(super) digest: Vec<u8>,
}

/// The most key slots, as in `cryptsetup`.
pub(super) const SLOTS_MAX: usize = 32;

/// The most stripes of a key. The usual number is 4000.
pub(super) const STRIPES_MAX: u32 = 16_384;

/// The sector size of areas with keys, independent of that of the data.
const AREA_SECTOR_BYTES: usize = 512;

/// Checks the length of an XTS key.
pub(super) fn check_key_bytes(bytes: u64) -> Result<usize, String> {
    match bytes {
        32 | 64 => Ok(fits(bytes, "the length of a key")),
        _ => Err(format!(
            "its keys have {bytes} bytes; AES with 128 or 256 bits in XTS mode has 32 or 64"
        )),
    }
}

/// The start of a header.
pub(super) const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const CIPHER: &str = "aes-xts-plain64";

/// The text of a field, up to a zero or to the end.
pub(super) fn parse_text(field: &[u8]) -> Result<&str, String> {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    std::str::from_utf8(&field[..end])
        .map_err(|_| "its header has text that is not UTF-8".to_owned())
}

pub(super) fn check_cipher(name: &str) -> Result<(), String> {
    if name == CIPHER {
        return Ok(());
    }
    Err(format!(
        "its cipher {name:?} is not supported; re-encrypt it with `cryptsetup reencrypt --cipher \
         {CIPHER}`"
    ))
}

/// The reason to refuse a header with data that begins too early.
pub(super) fn overlap(data: u64, header: u64) -> String {
    format!("its data begins at byte {data}, and its header ends only at {header}")
}

impl Header {
    /// Returns the key of the volume.
    pub(super) fn unlock(
        &self,
        passphrase: &[u8],
        most: &KdfLimits,
        read: &ReadAt<'_>,
    ) -> Result<Key, String> {
        if self.slots.is_empty() {
            return Err(format!(
                "it has no usable key slot{}; add a key with `cryptsetup luksAddKey`",
                self.skipped
            ));
        }
        let (mut left, mut skipped) = (*most, self.skipped.clone());
        for slot in &self.slots {
            match slot.unlock(passphrase, &mut left, read) {
                Ok(Some(key)) => return Ok(key),
                Ok(None) => {}
                Err(reason) => skipped += &format!("; key slot {} {reason}", slot.number),
            }
        }
        let newline = match passphrase.last() {
            Some(b'\n') => " (which ends with a newline)",
            _ => "",
        };
        Err(format!(
            "the key{newline} opens none of the {} key slots{skipped}; check that it is the key of \
             this disk",
            self.slots.len()
        ))
    }
}

impl Slot {
    /// Bytes of its area.
    pub(super) fn area_bytes(&self) -> u64 {
        self.key_bytes as u64 * u64::from(self.stripes)
    }

    /// Returns the key of the volume, if the passphrase is the right one.
    fn unlock(
        &self,
        passphrase: &[u8],
        left: &mut KdfLimits,
        read: &ReadAt<'_>,
    ) -> Result<Option<Key>, String> {
        left.take_pbkdf2(self.check.hash, self.check.rounds, self.check.digest.len())?;
        let slot_key = self.kdf.derive(passphrase, self.slot_key_bytes, left)?;
        let cipher = Cipher::new(&slot_key)?;
        let bytes: usize = fits(self.area_bytes(), "the area of a key");
        let sectors = bytes.next_multiple_of(AREA_SECTOR_BYTES);
        let read = read(self.area_offset, sectors).map_err(|why| format!("is lost: {why}"))?;
        let mut material = Zeroizing::new(read);
        for (chunk, position) in material.chunks_mut(CHUNK_BYTES).zip((0..).step_by(CHUNK_SECTORS))
        {
            cipher.run(Direction::Decrypt, chunk, AREA_SECTOR_BYTES, position);
        }
        let key = self.split_hash.merge(&material[..bytes], self.key_bytes);
        Ok(self.check.matches(&key).then_some(key))
    }
}

const CHUNK_SECTORS: usize = CHUNK_BYTES / AREA_SECTOR_BYTES;

impl Kdf {
    fn derive(&self, passphrase: &[u8], bytes: usize, left: &mut KdfLimits) -> Result<Key, String> {
        match self {
            Self::Pbkdf2 { hash, rounds, salt } => {
                left.take_pbkdf2(*hash, *rounds, bytes)?;
                Ok(hash.pbkdf2(passphrase, salt, *rounds, bytes))
            }
            &Self::Argon2 { algorithm, passes, kib, lanes, ref salt } => {
                left.take_argon2(kib, passes)?;
                let refused = |error: argon2::Error| format!("cannot be used: {error}");
                let params = Params::new(kib, passes, lanes, Some(bytes)).map_err(refused)?;
                let block_count = params.block_count();
                let argon2 = Argon2::new(algorithm, Version::V0x13, params);
                let mut key = Zeroizing::new(vec![0; bytes]);
                let _memory = MEMORY.take(kib);
                let mut blocks = Blocks::<Block>::new(block_count).map_err(|error| {
                    format!("asks for {kib} KiB of memory, more than available: {error}")
                })?;
                argon2
                    .hash_password_into_with_memory(passphrase, salt, &mut key, blocks.all())
                    .map_err(refused)?;
                Ok(key)
            }
        }
    }
}

impl KeyCheck {
    fn matches(&self, key: &[u8]) -> bool {
        self.hash.pbkdf2(key, &self.salt, self.rounds, self.digest.len())[..] == self.digest[..]
    }
}
