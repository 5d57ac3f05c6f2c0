//! Alignment of memory, offsets and lengths for direct I/O.

use std::fs::File;

use rustix::fs::{AtFlags, StatxFlags};

/// The alignment that the kernel requires of an op, in bytes; each a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Alignment of memory addresses; 1 with the page cache.
    pub(crate) memory: u32,
    /// Alignment of offsets, lengths, and the length of each range of memory; 1 with the page
    /// cache.
    pub(crate) request: u32,
    /// Alignment of discards and zeroings: the logical block of a block device, even with the page
    /// cache; 1 for a regular file.
    pub(crate) range: u32,
}

impl Alignment {
    /// No alignment is required.
    pub(crate) const ANY: Self = Self { memory: 1, request: 1, range: 1 };

    /// Finds the alignment for a file. `None` if the file cannot be used with direct I/O.
    pub(crate) fn probe(file: &File, direct: bool, is_block_device: bool) -> Option<Self> {
        let block = is_block_device.then(|| rustix::fs::ioctl_blksszget(file).ok()).flatten();
        let range = if is_block_device { block.unwrap_or(512) } else { 1 };
        if !direct {
            return Some(Self { range, ..Self::ANY });
        }
        let flags = StatxFlags::DIOALIGN | STATX_DIO_READ_ALIGN;
        if let Ok(stat) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, flags)
            && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
        {
            // On XFS, reads need less alignment than writes once a file shares extents with a
            // clone. Writes with the alignment of reads work too: for these alone the file system
            // uses the page cache.
            let has_read_align = stat.stx_mask & STATX_DIO_READ_ALIGN.bits() != 0
                && stat.stx_dio_read_offset_align > 0;
            let write = stat.stx_dio_offset_align;
            let request =
                if has_read_align { stat.stx_dio_read_offset_align.min(write) } else { write };
            let is_possible = stat.stx_dio_mem_align > 0 && request > 0;
            let memory = memory_for(stat.stx_dio_mem_align, block);
            return is_possible.then_some(Self { memory, request, range });
        }
        if let Some(bytes) = block {
            return Some(Self { memory: bytes, request: bytes, range });
        }
        let request = probe_request_align(file)?;
        Some(Self { memory: request, request, range })
    }

    /// The whole units of discards and zeroings within `len` bytes from `offset`, as offset and
    /// length. `None` if there are none.
    pub(crate) fn whole_ranges(self, offset: u64, len: u64) -> Option<(u64, u64)> {
        let unit = u64::from(self.range);
        let start = offset.checked_next_multiple_of(unit)?;
        let end = (offset + len) / unit * unit;
        (start < end).then(|| (start, end - start))
    }

    /// The bytes of the first piece of a transfer of `len` bytes at `offset`. A piece has at most
    /// `most` bytes, and is whole units of requests or lies within one.
    pub(crate) fn piece(self, offset: u64, len: u64, most: usize) -> usize {
        let unit = u64::from(self.request);
        let lead = offset & (unit - 1);
        let piece = match lead {
            0 if len >= unit => len.min(most as u64) & !(unit - 1),
            _ => len.min(unit - lead),
        };
        // At most `most`, or less than a unit.
        usize::try_from(piece).unwrap_or_else(|_| unreachable!("a piece of {piece} bytes"))
    }
}

/// A piece of a request, and the whole units of requests around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    /// The byte of the disk at which the first unit starts.
    pub(crate) start: u64,
    /// Bytes of the first unit before the piece.
    pub(crate) lead: usize,
    /// Bytes of the piece.
    pub(crate) piece: usize,
    /// Bytes of all units.
    pub(crate) bytes: usize,
}

impl Window {
    /// Cuts a piece from `left` bytes at `offset`, as long as its units fit `most` bytes. `unit` is
    /// their size in bytes: a power of two that divides `most`.
    pub(crate) fn new(offset: u64, left: usize, most: usize, unit: usize) -> Self {
        let start = offset & !(unit as u64 - 1);
        let lead = usize::try_from(offset - start)
            .unwrap_or_else(|_| unreachable!("a unit of {unit} bytes"));
        let piece = left.min(most - lead);
        Self { start, lead, piece, bytes: (lead + piece).next_multiple_of(unit) }
    }

    /// Returns true if the piece does not fill its units.
    pub(crate) fn is_part(self) -> bool {
        self.piece != self.bytes
    }
}

/// The alignment of memory for a device, for which the kernel reports `memory`. A driver whose
/// blocks are pages may expect each block within one page of memory, and report less: zram reads
/// over the whole page when only a part of it is requested.
fn memory_for(memory: u32, block: Option<u32>) -> u32 {
    block.filter(|block| *block >= PAGE).map_or(memory, |block| memory.max(block))
}

/// The smallest page.
const PAGE: u32 = 4096;

/// The alignment of direct reads, if it is less than that of writes; since Linux 6.14.
const STATX_DIO_READ_ALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2_0000);

/// Tries reads of growing size at the start of the file. Kernels before 6.1 do not report the
/// alignment.
fn probe_request_align(file: &File) -> Option<u32> {
    let mut memory = vec![0u8; 3 * 4096];
    let skip = memory.as_ptr().align_offset(4096);
    let aligned = &mut memory[skip..skip + 4096];
    [512u32, 1024, 2048, 4096].into_iter().find(|&align| {
        let part = &mut aligned[..align as usize];
        !matches!(rustix::io::pread(file, part, 0), Err(rustix::io::Errno::INVAL))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_units_are_cut_out_of_a_range() {
        let align = Alignment { range: 4096, ..Alignment::ANY };
        let cases = [
            ((0, 4096), Some((0, 4096))),
            ((512, 8192), Some((4096, 4096))),
            ((512, 512), None),
            ((3584, 1024), None),
            ((4096, 4608), Some((4096, 4096))),
            ((u64::MAX - 511, 511), None),
        ];
        for ((offset, len), whole) in cases {
            assert_eq!(align.whole_ranges(offset, len), whole, "{offset} {len}");
        }
        assert_eq!(Alignment::ANY.whole_ranges(3, 5), Some((3, 5)));
    }

    #[test]
    fn blocks_of_a_page_are_in_whole_pages() {
        for (memory, block, expected) in [
            (4, None, 4),
            (4, Some(512), 4),
            (512, Some(4096), 4096),
            (512, Some(16_384), 16_384),
            (8192, Some(4096), 8192),
        ] {
            assert_eq!(memory_for(memory, block), expected, "{memory} {block:?}");
        }
    }

    #[test]
    fn a_piece_is_whole_units_or_lies_in_one() {
        let align = Alignment { request: 4096, ..Alignment::ANY };
        let most = 64 << 10;
        let cases = [
            ((0, 1 << 20), most),
            ((4096, 10_240), 8192),
            ((12_288, 2048), 2048),
            ((512, 1 << 20), 3584),
            ((3584, 512), 512),
            ((3584, 513), 512),
        ];
        for ((offset, len), piece) in cases {
            assert_eq!(align.piece(offset, len, most), piece, "{offset} {len}");
        }
        assert_eq!(Alignment::ANY.piece(7, 1 << 30, most), most);
    }

    #[test]
    fn a_window_is_the_units_around_a_piece() {
        let window = |start, lead, piece, bytes| Window { start, lead, piece, bytes };
        let of = |offset, left| Window::new(offset, left, 16_384, 4096);
        assert_eq!(of(8192, 4096), window(8192, 0, 4096, 4096));
        assert_eq!(of(8704, 512), window(8192, 512, 512, 4096));
        assert_eq!(of(8704, 8192), window(8192, 512, 8192, 12_288));
        assert_eq!(of(8704, 1 << 20), window(8192, 512, 15_872, 16_384));
        assert!(of(8704, 512).is_part() && !of(8192, 4096).is_part());
        assert_eq!(Window::new(9, 5, 8, 1), window(9, 0, 5, 5));
    }
}
