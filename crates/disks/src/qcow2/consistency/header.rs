//! The parts of a qcow2 image's header that decide if and how the image is opened.

use std::fmt::Write as _;
use std::ops::Range;

/// The first bytes of an image.
const MAGIC: &[u8] = b"QFI\xfb";

/// Cluster sizes of the format, as powers of two.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;

/// The longest name of a backing file.
const NAME_BYTES_MAX: usize = 1023;

const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
/// Entries with the names of features.
const EXTENSION_NAMES: u32 = 0x6803_f857;
const NAME_ENTRY_BYTES: usize = 48;
const EXTENSION_BITMAPS: u32 = 0x2385_2875;

/// An incompatible feature: the last writer has not closed the image, and reference counts may be
/// wrong. Pointers to clusters are right.
const DIRTY: u64 = 1;
/// A compatible feature: the counts of an image that is in use are in the memory of its user.
const LAZY: u64 = 1;
/// An incompatible feature: a program has found damage. The image may be read.
const CORRUPT: u64 = 2;
/// An incompatible feature: the header names the kind of compressed clusters.
const HAS_COMPRESSION: u64 = 8;
/// Kinds of compressed clusters.
const ZLIB: u8 = 0;
const ZSTD: u8 = 1;
/// The place of the kind of compression in a header that is long enough.
const COMPRESSION_AT: usize = 104;

/// An autoclear feature: the bitmaps are valid. A program that changes the disk but not the bitmaps
/// clears it.
const BITMAPS: u64 = 1;

/// The fields of a qcow2 image's header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageHeader {
    /// The size of the disk in the image.
    pub(crate) size_bytes: u64,
    /// The unit in which the image allocates space.
    pub(crate) cluster_bytes: u32,
    /// The image or disk with the data that this image lacks.
    pub(crate) backing: Option<BackingFile>,
    version: u32,
    incompatible: u64,
    compatible: u64,
    /// The kind of compressed clusters.
    compression: u8,
    /// True for extensions that may own clusters.
    has_unknown_extensions: bool,
    /// The list of valid bitmaps.
    bitmaps: Option<Range<u64>>,
    is_encrypted: bool,
    snapshots: u32,
    /// The entries of the first table (L1).
    l1_entries: u32,
}

/// The backing file of an image, as the image names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingFile {
    /// An absolute path, or a path relative to the folder of the image.
    pub name: String,
    /// The format, such as `qcow2` or `raw`.
    pub format: Option<String>,
}

/// The number of bytes at the front that contain the header. `None` if this is no qcow2 image.
pub(crate) fn header_bytes(front: &[u8]) -> Option<Result<u64, String>> {
    if !front.starts_with(MAGIC) {
        return None;
    }
    // Other versions have other fields.
    Some(version(front).and_then(|_| Ok(1 << cluster_bits(front)?)))
}

fn version(front: &[u8]) -> Result<u32, String> {
    match u32_at(front, 4)? {
        version @ (2 | 3) => Ok(version),
        1 => Err("it is an image of the old format qcow (version 1); convert it with `qemu-img \
                  convert -O qcow2`"
            .into()),
        other => Err(format!("its qcow2 version {other} is not supported; versions 2 and 3 are")),
    }
}

fn cluster_bits(front: &[u8]) -> Result<u32, String> {
    let bits = u32_at(front, 20)?;
    match CLUSTER_BITS.contains(&bits) {
        true => Ok(bits),
        false => {
            Err(format!("its header has clusters of 2^{bits} bytes, which qcow2 does not allow"))
        }
    }
}

/// Parses the header at the front of an image. `front` must hold at least the first cluster.
pub(crate) fn parse(front: &[u8]) -> Result<ImageHeader, String> {
    let version = version(front)?;
    let cluster_bytes = 1 << cluster_bits(front)?;
    let (incompatible, compatible, autoclear, header_bytes) = match version {
        2 => (0, 0, 0, 72),
        _ => (u64_at(front, 72)?, u64_at(front, 80)?, u64_at(front, 88)?, u32_at(front, 100)?),
    };
    if !header_bytes.is_multiple_of(8) {
        return Err(format!("its header is damaged: it has {header_bytes} bytes"));
    }
    let name = backing_name(front)?;
    // Without a backing file, images of version 2 need no extensions, and few have room for them.
    let extensions = match (version, &name) {
        (2, None) => Extensions::default(),
        _ => Extensions::read(front, header_bytes)?,
    };
    let backing = name.map(|name| BackingFile { name, format: extensions.format });
    Ok(ImageHeader {
        size_bytes: u64_at(front, 24)?,
        cluster_bytes,
        backing,
        version,
        incompatible,
        compatible,
        compression: compression(front, header_bytes),
        has_unknown_extensions: extensions.has_unknown,
        bitmaps: extensions.bitmaps.filter(|_| autoclear & BITMAPS != 0),
        is_encrypted: u32_at(front, 32)? != 0,
        snapshots: u32_at(front, 60)?,
        l1_entries: u32_at(front, 36)?,
    })
}

/// The kind of compressed clusters. Shorter headers lack the field, which means zlib.
fn compression(front: &[u8], header_bytes: u32) -> u8 {
    let is_there = usize::try_from(header_bytes).is_ok_and(|bytes| bytes > COMPRESSION_AT);
    front.get(COMPRESSION_AT).filter(|_| is_there).copied().unwrap_or(ZLIB)
}

fn backing_name(front: &[u8]) -> Result<Option<String>, String> {
    let (offset, len) = (u64_at(front, 8)?, u32_at(front, 16)?);
    if offset == 0 || len == 0 {
        return Ok(None);
    }
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let name = offset.checked_add(len).and_then(|end| front.get(offset..end));
    let name = name.filter(|name| name.len() <= NAME_BYTES_MAX && !name.contains(&0));
    let name = name.and_then(|name| std::str::from_utf8(name).ok());
    let name = name.ok_or("the name of its backing file is damaged; repair it with qemu-img")?;
    check_printable("name", name).map(Some)
}

/// Refuses control characters in a text about the backing file: it may go to logs and terminals,
/// and the image may come from any source.
fn check_printable(what: &str, text: &str) -> Result<String, String> {
    match text.contains(char::is_control) {
        false => Ok(text.to_owned()),
        true => Err(format!(
            "the {what} of its backing file contains a control character: {text:?}; if you trust \
             the image, correct it with `qemu-img rebase -u`"
        )),
    }
}

/// Extensions behind the header.
#[derive(Default)]
struct Extensions {
    /// The format of the backing file.
    format: Option<String>,
    /// The place of the list of bitmaps.
    bitmaps: Option<Range<u64>>,
    /// True if there are other extensions, which this code does not know.
    has_unknown: bool,
}

impl Extensions {
    fn read(front: &[u8], header_bytes: u32) -> Result<Self, String> {
        let mut at = usize::try_from(header_bytes).unwrap_or(usize::MAX);
        let mut read = Self::default();
        loop {
            let (kind, len) = (u32_at(front, at)?, u32_at(front, at.saturating_add(4))?);
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let data = at.saturating_add(8)..at.saturating_add(8).saturating_add(len);
            match kind {
                0 => return Ok(read),
                EXTENSION_BACKING_FORMAT => {
                    let name = front.get(data.clone());
                    let name = name.and_then(|name| std::str::from_utf8(name).ok());
                    read.format = Some(check_printable("format", name.ok_or(TOO_SHORT)?)?);
                }
                EXTENSION_BITMAPS => {
                    let (bytes, offset) =
                        (u64_at(front, data.start + 8)?, u64_at(front, data.start + 16)?);
                    read.bitmaps = Some(offset..offset.saturating_add(bytes));
                }
                // imago fails an assertion at a partial entry.
                EXTENSION_NAMES if !len.is_multiple_of(NAME_ENTRY_BYTES) => {
                    return Err(NAMES.into());
                }
                EXTENSION_NAMES => {}
                _ => read.has_unknown = true,
            }
            at = data.end.checked_next_multiple_of(8).ok_or(TOO_SHORT)?;
        }
    }
}

/// Reasons to refuse writes to an image with counts that may be wrong.
const NOT_CLOSED: &str = "it was not closed properly, and its reference counts may be wrong; open \
                          it once where its file can be locked, or repair it with `qemu-img check \
                          -r all`";
const NOT_CLOSED_LAZY: &str = "it was not closed properly, and its reference counts are out of \
                               date (lazy_refcounts); repair it with `qemu-img check -r all`";

const NAMES: &str = "its header is damaged: its last feature name is truncated";
const TOO_SHORT: &str = "its header is damaged: it does not end in the first cluster";

fn u32_at(front: &[u8], at: usize) -> Result<u32, String> {
    let bytes = front.get(at..).and_then(|rest| rest.first_chunk());
    Ok(u32::from_be_bytes(*bytes.ok_or(TOO_SHORT)?))
}

fn u64_at(front: &[u8], at: usize) -> Result<u64, String> {
    let bytes = front.get(at..).and_then(|rest| rest.first_chunk());
    Ok(u64::from_be_bytes(*bytes.ok_or(TOO_SHORT)?))
}

impl ImageHeader {
    /// True if clusters that read as zeroes need no data.
    pub(crate) fn has_zero_clusters(&self) -> bool {
        self.version >= 3
    }

    /// True if the header has a place for the mark of `mark.rs`.
    pub(crate) fn has_mark(&self) -> bool {
        self.version >= 3
    }

    /// True if the image was marked as in use.
    pub(crate) fn is_dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }

    /// True if the image was marked as corrupt.
    pub(crate) fn is_corrupt(&self) -> bool {
        self.incompatible & CORRUPT != 0
    }

    /// True if clusters are compressed with Zstandard.
    pub(crate) fn has_zstd(&self) -> bool {
        self.incompatible & HAS_COMPRESSION != 0 && self.compression == ZSTD
    }

    /// True if we may mark the image, and free leaks of a user that did not close it: no counts are
    /// only in that user's memory.
    pub(crate) fn may_be_marked(&self) -> bool {
        self.has_mark() && self.compatible & LAZY == 0 && self.snapshots == 0
    }

    pub(crate) fn has_unknown_extensions(&self) -> bool {
        self.has_unknown_extensions
    }

    /// The place of the list of bitmaps that become invalid with the first change.
    pub(crate) fn bitmaps(&self) -> Option<&Range<u64>> {
        self.bitmaps.as_ref()
    }

    /// The reason to refuse writes to a marked image that we may not mark.
    pub(crate) fn refusal_when_marked(&self) -> &'static str {
        if self.compatible & LAZY == 0 { NOT_CLOSED } else { NOT_CLOSED_LAZY }
    }

    /// Refuses an image that cannot be used. The error names the obstacle and a remedy.
    pub(crate) fn check(&self, read_only: bool, logical_block_bytes: u32) -> Result<(), String> {
        if self.is_encrypted {
            return Err("it is encrypted, which is not supported; convert it to an unencrypted \
                        image with `qemu-img convert`"
                .into());
        }
        self.check_features(read_only)?;
        if self.snapshots > 0 && !read_only {
            return Err(format!(
                "it has internal snapshots ({}), so it can only be read; delete them with \
                 `qemu-img snapshot -d`, or open it read-only",
                self.snapshots
            ));
        }
        if self.cluster_bytes < logical_block_bytes {
            return Err(format!(
                "its clusters of {} bytes are smaller than a logical block of \
                 {logical_block_bytes}; choose a smaller block",
                self.cluster_bytes
            ));
        }
        self.check_size(logical_block_bytes)?;
        let cluster = u64::from(self.cluster_bytes);
        if (self.size_bytes.div_ceil(cluster * (cluster / 8))) > self.l1_entries.into() {
            return Err(
                "its L1 table is too small for its disk; check it with `qemu-img check`".into()
            );
        }
        Ok(())
    }

    /// Refuses a disk that is not a whole number of logical blocks.
    pub(crate) fn check_size(&self, logical_block_bytes: u32) -> Result<(), String> {
        if self.size_bytes == 0 || !self.size_bytes.is_multiple_of(logical_block_bytes.into()) {
            return Err(format!(
                "its disk of {} bytes is not a multiple of the logical block of \
                 {logical_block_bytes}; resize it with `qemu-img resize`",
                self.size_bytes
            ));
        }
        Ok(())
    }

    fn check_features(&self, read_only: bool) -> Result<(), String> {
        let mut unknown = String::new();
        if self.incompatible & HAS_COMPRESSION == 0 && self.compression != ZLIB {
            return Err(
                "its header is damaged: it has a compression type without the feature bit; check \
                 it with `qemu-img check`"
                    .into(),
            );
        }
        for bit in (0..64).filter(|bit| self.incompatible & (1 << bit) != 0) {
            match bit {
                // Only writers need the counts.
                0 => {}
                1 if read_only => {}
                1 => {
                    return Err(
                        "it is marked as corrupt; open it read-only to copy its data, or repair it \
                         with `qemu-img check -r all`"
                            .into(),
                    );
                }
                2 => unknown += "an external data file, ",
                3 if self.compression == ZSTD => {}
                3 => write!(unknown, "compression of kind {}, ", self.compression).unwrap_or(()),
                4 => unknown += "extended L2 entries (subclusters), ",
                bit => write!(unknown, "feature bit {bit}, ").unwrap_or(()),
            }
        }
        if unknown.is_empty() {
            return Ok(());
        }
        Err(format!(
            "it has {}which is not supported; convert it with `qemu-img convert -O qcow2`",
            unknown
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(change: impl FnOnce(&mut Vec<u8>)) -> Result<ImageHeader, String> {
        let mut front = vec![0; 65_536];
        front[..4].copy_from_slice(MAGIC);
        front[7] = 3;
        front[23] = 16;
        front[39] = 2;
        front[24..32].copy_from_slice(&(1u64 << 30).to_be_bytes());
        front[103] = 104;
        change(&mut front);
        parse(&front)
    }

    fn with_backing(front: &mut [u8]) {
        front[104..108].copy_from_slice(&EXTENSION_BACKING_FORMAT.to_be_bytes());
        front[111] = 3;
        front[112..115].copy_from_slice(b"raw");
        front[14..16].copy_from_slice(&512u16.to_be_bytes());
        front[19] = 8;
        front[512..520].copy_from_slice(b"base.img");
    }

    #[test]
    fn a_header_is_parsed() {
        let header = image(|front| with_backing(front)).unwrap();
        assert_eq!((header.size_bytes, header.cluster_bytes), (1 << 30, 65_536));
        let format = Some("raw".to_owned());
        assert_eq!(header.backing, Some(BackingFile { name: "base.img".into(), format }));
        header.check(false, 512).unwrap();
        assert!(header_bytes(b"not an image at all, but something").is_none());
    }

    #[test]
    fn an_unusable_image_is_refused_with_a_reason() {
        for (at, byte, expected) in [
            (79, 2, "marked as corrupt"),
            (79, 4, "an external data file"),
            (79, 8, "compression of kind 0"),
            (79, 16, "extended L2"),
            (72, 128, "feature bit 63"),
            (35, 2, "encrypted"),
            (63, 2, "internal snapshots (2)"),
            (31, 1, "not a multiple of the logical block"),
            (23, 8, "which qcow2 does not allow"),
            (39, 1, "its L1 table is too small"),
        ] {
            let made = image(|front| front[at] = byte);
            let error = made.and_then(|header| header.check(false, 512)).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        image(|front| front[63] = 2).unwrap().check(true, 512).unwrap();
        let made = image(|front| (front[103], front[104]) = (112, 1));
        let error = made.and_then(|header| header.check(false, 512)).unwrap_err();
        assert!(error.contains("a compression type without the feature bit"), "{error}");
        for (bits, expected) in [(9, "smaller than a logical block"), (11, "smaller"), (12, "L1")] {
            let header = image(|front| front[23] = bits).unwrap();
            let error = header.check(false, 4096).unwrap_err();
            assert!(error.contains(expected), "{bits}: {error}");
        }
        for (version, expected) in [(1, "old format qcow (version 1)"), (4, "version 4")] {
            let error = image(|front| front[7] = version).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let old = header_bytes(b"QFI\xfb\0\0\0\x01\0\0\0\0");
        assert!(old.unwrap().unwrap_err().contains("version 1"));
    }

    #[test]
    fn no_control_character_of_a_header_is_shown() {
        let (name, format) = (512, 112);
        for (at, byte, expected) in [
            (name + 2, b'\n', r#"name of its backing file contains a control character: "ba\n"#),
            (name + 2, 0x1b, r#"control character: "ba\u{1b}e.img"; if"#),
            (format, b'\n', r#"format of its backing file contains a control character: "\naw""#),
            (format, 0x1b, r#"control character: "\u{1b}aw"; if"#),
        ] {
            let made = image(|front| {
                with_backing(front);
                front[at] = byte;
            });
            let error = made.unwrap_err();
            assert!(error.contains(expected) && !error.contains(char::is_control), "{error:?}");
        }
    }

    #[test]
    fn a_damaged_header_is_refused_wherever_it_ends() {
        let mut front = vec![0; 65_536];
        image(|made| {
            with_backing(made);
            front.copy_from_slice(made);
        })
        .unwrap();
        for len in 0..520 {
            assert!(parse(&front[..len]).is_err(), "{len} bytes were enough");
        }
        for len in [1, 47, 49, 50] {
            front[104..108].copy_from_slice(&EXTENSION_NAMES.to_be_bytes());
            front[111] = len;
            assert!(parse(&front).unwrap_err().contains("feature name is truncated"), "{len}");
        }
        front[103] = 105;
        assert!(parse(&front).unwrap_err().contains("105 bytes"));
        front[103] = 104;
        front[108..112].fill(0xff);
        assert!(parse(&front).is_err());
        front[8..16].fill(0xff);
        assert!(parse(&front).is_err());
    }
}
