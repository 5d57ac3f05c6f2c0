//! Clusters that are compressed by Zstandard. imago supports only zlib. So the kind of compression
//! is hidden from imago, and it reads none of these clusters: neither for a request nor to copy the
//! rest of a partly written one.
//!
//! imago copies nothing of a cluster that is overwritten as a whole. The disk may end inside its
//! last cluster, so imago sees a size that ends with that cluster.

use std::io;
use std::io::Read as _;

use ruzstd::decoding::errors::FrameDecoderError;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// The largest window of a frame. RFC 8878 recommends it as the limit of decoders.
const WINDOW_BYTES_MAX: u64 = 8 << 20;

const TOO_LONG: &str = "it decompresses to more than a cluster";

/// The feature of a header that is hidden from imago, and its place.
const FEATURE: u8 = 8;
const FEATURE_AT: usize = 79;
/// The place of the disk's size, and of the cluster's size.
const SIZE: std::ops::Range<usize> = 24..32;
const CLUSTER_AT: usize = 23;

/// The size of the disk in a header.
pub(super) fn disk_bytes(header: &[u8]) -> u64 {
    let size = header.get(SIZE).and_then(|size| size.first_chunk());
    size.map_or(0, |size| u64::from_be_bytes(*size))
}

/// Makes a header look as if its clusters were compressed by zlib, and as if the disk ended with a
/// cluster.
pub(super) fn mask(header: &mut [u8], has_zstd: bool, is_rounded: bool) {
    if has_zstd && let Some(feature) = header.get_mut(FEATURE_AT) {
        *feature &= !FEATURE;
    }
    if is_rounded {
        let seen = disk_bytes(header).checked_next_multiple_of(cluster_bytes(header));
        set_disk_bytes(header, seen.unwrap_or(u64::MAX));
    }
}

/// Restores the fields that are hidden from imago.
pub(super) fn restore(header: &mut [u8], has_zstd: bool, disk_bytes: Option<u64>) {
    if has_zstd && let Some(feature) = header.get_mut(FEATURE_AT) {
        *feature |= FEATURE;
    }
    if let Some(bytes) = disk_bytes {
        set_disk_bytes(header, bytes);
    }
}

fn set_disk_bytes(header: &mut [u8], disk_bytes: u64) {
    if let Some(size) = header.get_mut(SIZE) {
        size.copy_from_slice(&disk_bytes.to_be_bytes());
    }
}

/// The size of a cluster, clamped to the sizes of the format: the header may have changed.
pub(super) fn cluster_bytes(header: &[u8]) -> u64 {
    1 << u32::from(header.get(CLUSTER_AT).copied().unwrap_or(0)).clamp(9, 21)
}

/// The flag of an L2 entry with a compressed cluster.
const IS_COMPRESSED: u64 = 1 << 62;
/// The offset of a table, in an entry of L1.
pub(super) const TABLE_OFFSET: u64 = ((1 << 56) - 1) & !511;

/// The place of compressed data in a file. The data ends before the end of these bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CompressedRange {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl CompressedRange {
    /// The place that an entry of an L2 table names. `None` if its cluster is not compressed.
    pub(super) fn from_entry(entry: u64, cluster_bytes: u64) -> Option<Self> {
        if entry & (1 << 63) != 0 || entry & IS_COMPRESSED == 0 {
            return None;
        }
        let offset_bits = 62 - (cluster_bytes.trailing_zeros() - 8);
        let descriptor = entry & (IS_COMPRESSED - 1);
        let offset = descriptor & ((1 << offset_bits) - 1) & ((1 << 56) - 1);
        let sectors = descriptor >> offset_bits;
        Some(Self { offset, bytes: (sectors + 1) * 512 - offset % 512 })
    }
}

/// Decompresses a cluster of this size.
pub(super) fn decompress(mut data: &[u8], cluster_bytes: usize) -> io::Result<Vec<u8>> {
    let wrong = |error: FrameDecoderError| io::Error::other(error);
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(WINDOW_BYTES_MAX);
    let mut cluster = vec![0; cluster_bytes];
    let mut done = 0;
    while done < cluster_bytes {
        decoder.reset(&mut data).map_err(wrong)?;
        if decoder.content_size() > (cluster_bytes - done) as u64 {
            return Err(io::Error::other(TOO_LONG));
        }
        while !decoder.is_finished() {
            decoder
                .decode_blocks(&mut data, BlockDecodingStrategy::UptoBlocks(1))
                .map_err(wrong)?;
            done += decoder.read(&mut cluster[done..])?;
            if decoder.can_collect() > 0 {
                return Err(io::Error::other(TOO_LONG));
            }
        }
    }
    Ok(cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();
    const BLOCK: u32 = 128 << 10;
    const ROUNDS: u32 = 2000;

    /// The front of a frame with a window of 1 KiB times a power of two.
    fn front(power: u8) -> Vec<u8> {
        [&MAGIC[..], &[0, power << 3]].concat()
    }

    /// A block of equal bytes.
    fn equal(bytes: u32, is_last: bool) -> Vec<u8> {
        let header = u32::from(is_last) | 1 << 1 | bytes << 3;
        [&header.to_le_bytes()[..3], &[7]].concat()
    }

    #[test]
    fn frames_yield_one_cluster_and_no_more() {
        let frame = |blocks: &[Vec<u8>]| [front(10), blocks.concat()].concat();
        let cluster: usize = iomem::fits(BLOCK, "a cluster");
        let decompress = |data: &[u8]| decompress(data, cluster).map_err(|error| error.to_string());
        let whole = frame(&[equal(BLOCK, true)]);
        assert_eq!(decompress(&[&whole[..], b"the next one"].concat()), Ok(vec![7; cluster]));
        let halves = [false, true].map(|is_last| equal(BLOCK / 2, is_last));
        assert_eq!(decompress(&frame(&halves)), Ok(vec![7; cluster]));
        let two = frame(&[equal(BLOCK / 2, true)]).repeat(2);
        assert_eq!(decompress(&two), Ok(vec![7; cluster]));
        for end in 0..whole.len() {
            assert!(decompress(&whole[..end]).is_err(), "{end}");
        }
        assert_eq!(
            decompress(&frame(&[equal(BLOCK, false), equal(1, true)])),
            Err(TOO_LONG.into())
        );
        // The frame announces more than a cluster.
        let long = [&MAGIC[..], &[0b1010_0000], &(BLOCK + 1).to_le_bytes()].concat();
        assert_eq!(decompress(&[long, equal(BLOCK, true)].concat()), Err(TOO_LONG.into()));
        let window = [front(14), equal(BLOCK, true)].concat();
        assert!(decompress(&window).unwrap_err().contains("window"));
        // A terabyte in 32 MiB.
        let bomb = frame(&[equal(BLOCK, false).repeat(8 << 20)]);
        assert_eq!(decompress(&bomb), Err(TOO_LONG.into()));
    }

    /// The maker of an image may put any bytes into a frame.
    #[test]
    fn damaged_frames_are_errors() {
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(random >> 33).unwrap()
        };
        let mut cluster: Vec<u8> = (0..16_384).map(|_| next().to_le_bytes()[0] & 15).collect();
        cluster.copy_within(100..4000, 8000);
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let whole = ruzstd::encoding::compress_to_vec(&cluster[..], level);
        assert!(whole.len() < 12_000);
        assert_eq!(decompress(&whole, cluster.len()).unwrap(), cluster);
        let mut errors = 0;
        for round in 0..ROUNDS {
            let mut frame = whole.clone();
            for _ in 0..round % 4 + 1 {
                // Every second round damages the headers of the frame and of its first block.
                let end = if round % 2 == 0 { 40 } else { frame.len() };
                frame[next() % end] = next().to_le_bytes()[0];
            }
            frame.truncate(if round % 8 == 0 { next() % frame.len() } else { frame.len() });
            match decompress(&frame, cluster.len()) {
                Ok(found) => assert_eq!(found.len(), cluster.len()),
                Err(_) => errors += 1,
            }
        }
        assert!(errors > ROUNDS / 4, "{errors} of {ROUNDS} frames are damaged");
    }

    #[test]
    fn an_entry_names_the_range_of_compressed_data() {
        assert_eq!(CompressedRange::from_entry(1 << 63 | IS_COMPRESSED | 4096, 65_536), None);
        assert_eq!(CompressedRange::from_entry(4096, 65_536), None);
        let entry = IS_COMPRESSED | 2 << 54 | 4100;
        assert_eq!(
            CompressedRange::from_entry(entry, 65_536),
            Some(CompressedRange { offset: 4100, bytes: 1532 })
        );
        let entry = IS_COMPRESSED | 1 << 61 | 511;
        assert_eq!(
            CompressedRange::from_entry(entry, 512),
            Some(CompressedRange { offset: 511, bytes: 513 })
        );
    }

    #[test]
    fn a_masked_header_is_restored_when_it_is_written() {
        let mut header = vec![0; 512];
        header[CLUSTER_AT] = 16;
        header[FEATURE_AT] = FEATURE | 1;
        set_disk_bytes(&mut header, 65_537);
        let before = header.clone();
        mask(&mut header, true, true);
        assert_eq!((header[FEATURE_AT], disk_bytes(&header)), (1, 131_072));
        restore(&mut header, true, Some(65_537));
        assert_eq!(header, before);
        mask(&mut header, false, false);
        assert_eq!(header, before);
    }
}
