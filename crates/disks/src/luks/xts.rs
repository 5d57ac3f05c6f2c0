//! AES in XTS mode (IEEE 1619), many blocks at a time.
//!
//! A processor that has instructions for AES works on several blocks at once, if it is given them
//! at once. So all blocks of a chunk are masked with their tweaks, then encrypted or decrypted,
//! then masked again.

use std::{fmt, io};

use aes::cipher::consts::U16;
use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes256, Block};
use zeroize::zeroize_stack;

use super::memory::NoDump;

/// The bytes that are worked on at once: with their tweaks they stay in the nearest cache. A
/// multiple of every sector.
pub(super) const CHUNK_BYTES: usize = 4096;

/// The unit of the positions of sectors, for sectors of any size.
const POSITION_BYTES: usize = 512;
const BLOCK_BYTES: usize = 16;
/// The part of the stack to wipe after a run. The processor has too few registers for all keys, so
/// some are copied to the stack, more of them without optimization.
const STACK_BYTES: usize = if cfg!(debug_assertions) { 16 << 10 } else { 2 << 10 };
/// The part of the stack to wipe after a key was taken in.
const KEY_STACK_BYTES: usize = 32 << 10;
/// Tweaks of a sector that are computed one by one. The rest follows from them.
const FIRST_TWEAKS: usize = 8;

/// The direction of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Encrypt,
    Decrypt,
}

/// A cipher with its key, which is left out of core dumps, and wiped when this is dropped.
pub(super) enum Cipher {
    Aes128(NoDump<KeyPair<Aes128>>),
    Aes256(NoDump<KeyPair<Aes256>>),
}

/// The keys for the data and for its position.
pub(super) struct KeyPair<C> {
    data: C,
    tweak: C,
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Aes128(_) => "AES-128",
            Self::Aes256(_) => "AES-256",
        })
    }
}

impl Cipher {
    /// Makes a cipher from a key of 32 or 64 bytes.
    pub(super) fn new(key: &[u8]) -> Result<Self, String> {
        let cipher = Self::expand(key);
        zeroize_stack::<KEY_STACK_BYTES>();
        cipher.map_err(|error| format!("cannot allocate memory for its key: {error}"))
    }

    /// Runs in a frame of its own: its remains on the stack lie where `new` wipes them.
    #[inline(never)]
    fn expand(key: &[u8]) -> io::Result<Self> {
        match key.len() {
            32 => NoDump::new(KeyPair::new(key)).map(Self::Aes128),
            64 => NoDump::new(KeyPair::new(key)).map(Self::Aes256),
            bytes => unreachable!("a key of {bytes} bytes: headers were checked"),
        }
    }

    /// Encrypts or decrypts whole sectors of `sector_bytes`, at most a chunk of them. `position` is
    /// that of the first sector, in units of 512 bytes.
    pub(super) fn run(
        &self,
        direction: Direction,
        chunk: &mut [u8],
        sector_bytes: usize,
        position: u64,
    ) {
        match self {
            Self::Aes128(pair) => pair.run(direction, chunk, sector_bytes, position),
            Self::Aes256(pair) => pair.run(direction, chunk, sector_bytes, position),
        }
    }
}

impl<C> KeyPair<C>
where
    C: KeyInit + BlockCipherEncrypt<BlockSize = U16> + BlockCipherDecrypt<BlockSize = U16>,
{
    fn new(key: &[u8]) -> Self {
        let (data, tweak) = key.split_at(key.len() / 2);
        let cipher = |key| C::new_from_slice(key).unwrap_or_else(|_| unreachable!("half a key"));
        Self { data: cipher(data), tweak: cipher(tweak) }
    }

    fn run(&self, direction: Direction, chunk: &mut [u8], sector_bytes: usize, position: u64) {
        assert!(chunk.len() <= CHUNK_BYTES && chunk.len().is_multiple_of(sector_bytes));
        let mut tweaks = [0; CHUNK_BYTES / BLOCK_BYTES];
        let tweaks = &mut tweaks[..chunk.len() / BLOCK_BYTES];
        self.compute_tweaks(tweaks, sector_bytes, position);
        let (blocks, _) = Block::slice_as_chunks_mut(chunk);
        mask(blocks, tweaks);
        self.run_blocks(direction, blocks);
        mask(blocks, tweaks);
        zeroize_stack::<STACK_BYTES>();
    }

    /// Runs in a frame of its own, like [`Cipher::expand`].
    #[inline(never)]
    fn run_blocks(&self, direction: Direction, blocks: &mut [Block]) {
        match direction {
            Direction::Encrypt => self.data.encrypt_blocks(blocks),
            Direction::Decrypt => self.data.decrypt_blocks(blocks),
        }
    }

    /// Computes the tweaks of all blocks. The first tweak of a sector is its position, encrypted.
    /// Runs in a frame of its own, too.
    #[inline(never)]
    fn compute_tweaks(&self, tweaks: &mut [u128], sector_bytes: usize, position: u64) {
        let mut firsts = [Block::default(); CHUNK_BYTES / POSITION_BYTES];
        let in_sector = sector_bytes / BLOCK_BYTES;
        let firsts = &mut firsts[..tweaks.len() / in_sector];
        let positions = (position..).step_by(sector_bytes / POSITION_BYTES);
        for (first, position) in firsts.iter_mut().zip(positions) {
            *first = Array(u128::from(position).to_le_bytes());
        }
        self.tweak.encrypt_blocks(firsts);
        for (first, tweaks) in firsts.iter().zip(tweaks.chunks_exact_mut(in_sector)) {
            let mut tweak = u128::from_le_bytes(first.0);
            for place in &mut tweaks[..FIRST_TWEAKS] {
                *place = tweak;
                tweak = double(tweak);
            }
            for at in FIRST_TWEAKS..tweaks.len() {
                tweaks[at] = double_repeatedly(tweaks[at - FIRST_TWEAKS]);
            }
        }
    }
}

/// Doubles a tweak in the field that the standard names.
fn double(tweak: u128) -> u128 {
    (tweak << 1) ^ ((tweak >> 127) * 0x87)
}

/// Doubles a tweak [`FIRST_TWEAKS`] times.
fn double_repeatedly(tweak: u128) -> u128 {
    let over = tweak >> (128 - FIRST_TWEAKS);
    (tweak << FIRST_TWEAKS) ^ over ^ (over << 1) ^ (over << 2) ^ (over << 7)
}

fn mask(blocks: &mut [Block], tweaks: &[u128]) {
    for (block, tweak) in blocks.iter_mut().zip(tweaks) {
        *block = Array((u128::from_le_bytes(block.0) ^ tweak).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn bytes(text: &str) -> Vec<u8> {
        let digits = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
        (0..text.len()).step_by(2).map(digits).collect()
    }

    /// Vectors 4 and 10 of IEEE 1619-2007: their first and their last 16 bytes.
    #[test]
    fn ciphertexts_match_the_standard() {
        let half = [
            "27182818284590452353602874713526",
            "31415926535897932384626433832795",
            "2718281828459045235360287471352662497757247093699959574966967627",
            "3141592653589793238462643383279502884197169399375105820974944592",
        ];
        for (key, position, first, last) in [
            (
                [half[0], half[1]].concat(),
                0,
                "27a7479befa1d476489f308cd4cfa6e2",
                "0a282df920147beabe421ee5319d0568",
            ),
            (
                [half[2], half[3]].concat(),
                0xff,
                "1c3b3a102f770386e4836c99e370cf9b",
                "c4f36ffda9fcea70b9c6e693e148c151",
            ),
        ] {
            let plain: Vec<u8> = (0..=255).cycle().take(512).collect();
            let mut data = plain.clone();
            let cipher = Cipher::new(&bytes(&key)).unwrap();
            cipher.run(Direction::Encrypt, &mut data, 512, position);
            assert_eq!((&data[..16], &data[496..]), (&bytes(first)[..], &bytes(last)[..]));
            cipher.run(Direction::Decrypt, &mut data, 512, position);
            assert_eq!(data, plain);
        }
    }

    #[test]
    fn sectors_encrypt_equally_alone_and_together() {
        for key_bytes in [32, 64] {
            let key: Vec<u8> = (1..=key_bytes).collect();
            let cipher = Cipher::new(&key).unwrap();
            let plain: Vec<u8> = (0..=250).cycle().take(CHUNK_BYTES).collect();
            for sector in [512, 1024, 2048, 4096] {
                let mut together = plain.clone();
                cipher.run(Direction::Encrypt, &mut together, sector, 1 << 40);
                for (at, expected) in together.chunks(sector).enumerate() {
                    let mut alone = plain[at * sector..][..sector].to_vec();
                    let position = (1 << 40) + (at * sector / POSITION_BYTES) as u64;
                    cipher.run(Direction::Encrypt, &mut alone, sector, position);
                    assert_eq!(alone, expected, "{sector} {at}");
                }
            }
        }
    }

    /// The tweaks of a long sector, one by one.
    #[test]
    fn later_tweaks_are_doubled_tweaks() {
        let mut tweak = 0xc3a5_5a3c_9669_f00f_0123_4567_89ab_cdef_u128;
        for _ in 0..1000 {
            let doubled = (0..FIRST_TWEAKS).fold(tweak, |tweak, _| double(tweak));
            assert_eq!(double_repeatedly(tweak), doubled);
            tweak = doubled ^ (tweak >> 3);
        }
    }

    /// Counts the parts of a key on the stack of this thread below the caller's frame.
    #[inline(never)]
    fn parts_on_stack(key: &[u8]) -> usize {
        let here = 0_u128;
        let mut bytes = vec![0; 128 << 10];
        let start = std::ptr::from_ref(&here) as u64 - bytes.len() as u64;
        File::open("/proc/self/mem").unwrap().read_exact_at(&mut bytes, start).unwrap();
        bytes.chunks(16).filter(|part| key.chunks(16).any(|of_key| of_key == *part)).count()
    }

    /// A core dump contains the stack, too.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn no_key_is_left_on_the_stack() {
        for key_bytes in [32, 64] {
            let key: Vec<u8> = (0..key_bytes).map(|at: u8| at.wrapping_mul(37) ^ 0x5b).collect();
            let cipher = Cipher::new(&key).unwrap();
            assert_eq!(parts_on_stack(&key), 0, "of {key_bytes}, taken in");
            for direction in [Direction::Encrypt, Direction::Decrypt] {
                cipher.run(direction, &mut vec![7; CHUNK_BYTES], 512, 0);
                assert_eq!(parts_on_stack(&key), 0, "of {key_bytes}, {direction:?}");
            }
        }
    }
}
