//! Headers of image formats at the front of a disk that is used without a format.
//!
//! Such a disk is probably an image of a format that was not named, and a write destroys it. But a
//! user of the disk can write such a header, too. So no format is taken from the content, and no
//! disk is refused because of it.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fd::AsFd;
use rustix::io::Errno;

/// Headers, each with its offset in bytes and its format.
const HEADERS: &[(usize, &[u8], &str)] = &[
    (0, b"QFI\xfb\0\0\0\x01", "qcow"),
    (0, b"QFI\xfb", QCOW2),
    (0, b"QED\0", "QED"),
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (64, b"\x7f\x10\xda\xbe", "VDI"),
    (0, b"vhdxfile", "VHDX"),
    (0, VHD, "VHD"),
    (0, b"WithoutFreeSpace", "Parallels"),
    (0, b"WithouFreSpacExt", "Parallels"),
];

const QCOW2: &str = "qcow2";

/// The front of the header of a VHD image. An image of fixed size has it only in its last sector,
/// which has 511 bytes in some old images.
const VHD: &[u8] = b"conectix";

/// The bytes to read at the front and at the end.
pub(super) const BYTES: usize = 4096;

/// The format of the image that begins with `front` and ends with `end`.
pub(super) fn format_of(front: &[u8], end: &[u8]) -> Option<&'static str> {
    let has = |(at, header, _): &&(usize, &[u8], &str)| {
        front.get(*at..).is_some_and(|rest| rest.starts_with(header))
    };
    if let Some((_, _, format)) = HEADERS.iter().find(has) {
        return Some(format);
    }
    let footer = |bytes| end.len().checked_sub(bytes).is_some_and(|at| end[at..].starts_with(VHD));
    (footer(512) || footer(511)).then_some("VHD")
}

/// Advice on an image of this format that is used as a disk without a format.
fn advice(format: &str) -> &'static str {
    match format {
        QCOW2 => "if it is an image, name it qcow2:PATH",
        _ => "if it is an image, convert it with `qemu-img convert -O qcow2`, or -O raw",
    }
}

/// The warning about a disk without a format that begins like an image.
pub(super) fn warning(format: &str) -> String {
    format!(
        "it has the header of a {format} image but is used as a raw disk, so writes can destroy \
         the image; {}; for a raw disk, name it raw,over=PATH",
        advice(format)
    )
}

/// The reason why a file of this size is no disk, if it has an image. `None` if it has none.
pub(super) fn wrong_size(file: impl AsFd + Copy, size_bytes: u64) -> Option<String> {
    let format = format_of_file(file)?;
    Some(format!(
        "its size of {size_bytes} bytes is not a multiple of the logical block, and it has the \
         header of a {format} image; {}",
        advice(format)
    ))
}

/// The reason why a disk without a qcow2 image is refused. It may have an image of another
/// `format`.
pub(super) fn not_qcow2(format: Option<&str>) -> String {
    match format {
        Some(format) => format!(
            "it is not a qcow2 image but has the header of a {format} image; convert it with \
             `qemu-img convert -O qcow2`"
        ),
        None => {
            "it is not a qcow2 image; for a raw disk, give its path alone; to create an image, use \
             `qemu-img create -f qcow2`"
                .to_owned()
        }
    }
}

/// The warning about the file or device at `path`, which is not opened as a disk. `None` if it has
/// no such header, or cannot be read.
pub(super) fn format_warning(path: &Path) -> Option<String> {
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    format_of_file(&file).map(warning)
}

/// The format of the image in an open file. `None` if it has none, or cannot be read.
pub(super) fn format_of_file(file: impl AsFd + Copy) -> Option<&'static str> {
    let size = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).ok()?;
    let mut memory = vec![0; 2 * BYTES];
    // Direct I/O needs memory that begins at a block.
    let skipped = memory.as_ptr().align_offset(BYTES).min(BYTES);
    let block = &mut memory[skipped..skipped + BYTES];
    let front = read(file, block, 0)?.to_vec();
    let last = size.saturating_sub(1) / BYTES as u64 * BYTES as u64;
    let end = read(file, block, last).unwrap_or_default();
    format_of(&front, end)
}

fn read(file: impl AsFd + Copy, block: &mut [u8], offset: u64) -> Option<&[u8]> {
    let mut read = rustix::io::pread(file, &mut *block, offset);
    while read == Err(Errno::INTR) {
        read = rustix::io::pread(file, &mut *block, offset);
    }
    block.get(..read.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_is_known_by_its_header() {
        for (at, header, format) in HEADERS {
            let mut front = vec![0; 512];
            front[*at..at + header.len()].copy_from_slice(header);
            assert_eq!(format_of(&front, &[]), Some(*format), "{header:?}");
            front[*at + header.len() - 1] ^= 0x80;
            assert_ne!(format_of(&front, &[]), Some(*format), "{header:?}, damaged");
            assert_eq!(format_of(&header[..header.len() - 1], &[]).filter(|it| it == format), None);
        }
        for bytes in [511, 512] {
            let mut end = vec![0; 4096];
            end[4096 - bytes..][..VHD.len()].copy_from_slice(VHD);
            assert_eq!(format_of(&[], &end), Some("VHD"), "the last {bytes} bytes");
        }
        assert_eq!(format_of(&[0; 4096], &[0; 4096]), None);
    }
}
