//! What direct I/O asks of memory, offsets and lengths.

use std::fs::File;

use rustix::fs::{AtFlags, StatxFlags};

/// What the kernel asks of an op, in bytes; each a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Alignment {
    /// Addresses of memory are multiples of it; 1 with the page cache.
    pub(super) memory: u32,
    /// Offsets, lengths, and the length of each range of memory are multiples of it; 1 with the
    /// page cache.
    pub(super) request: u32,
    /// Discards and zeroings are multiples of it: the logical block of a block device, whatever
    /// its page cache takes; 1 for a regular file.
    pub(super) range: u32,
}

impl Alignment {
    /// Everything goes.
    pub(super) const ANY: Self = Self { memory: 1, request: 1, range: 1 };

    /// `None`: the file cannot be used with direct I/O.
    pub(super) fn of(file: &File, direct: bool, is_block_device: bool) -> Option<Self> {
        let block = is_block_device.then(|| rustix::fs::ioctl_blksszget(file).ok()).flatten();
        let range = if is_block_device { block.unwrap_or(512) } else { 1 };
        if !direct {
            return Some(Self { range, ..Self::ANY });
        }
        let flags = StatxFlags::DIOALIGN | STATX_DIO_READ_ALIGN;
        if let Ok(stat) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, flags)
            && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
        {
            // Where the two differ, as on XFS once a file shares extents with a clone, smaller
            // writes work too: the file system takes the page cache for them and for nothing else.
            let has_read_align = stat.stx_mask & STATX_DIO_READ_ALIGN.bits() != 0
                && stat.stx_dio_read_offset_align > 0;
            let write = stat.stx_dio_offset_align;
            let request =
                if has_read_align { stat.stx_dio_read_offset_align.min(write) } else { write };
            let memory = stat.stx_dio_mem_align;
            return (memory > 0 && request > 0).then_some(Self { memory, request, range });
        }
        if let Some(bytes) = block {
            return Some(Self { memory: bytes, request: bytes, range });
        }
        let request = probe_request_align(file)?;
        Some(Self { memory: request, request, range })
    }

    /// The part of `len` bytes from `offset` on that is whole units of discards and zeroings.
    pub(super) fn whole_ranges(self, offset: u64, len: u64) -> Option<(u64, u64)> {
        let unit = u64::from(self.range);
        let start = offset.checked_next_multiple_of(unit)?;
        let end = (offset + len) / unit * unit;
        (start < end).then(|| (start, end - start))
    }
}

/// What direct reads need, where that is less than writes; since Linux 6.14.
const STATX_DIO_READ_ALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2_0000);

/// Tries reads of growing size at the start of the file. Kernels before 6.1 do not tell.
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
}
