//! Registered files and memory, which the kernel has looked up in advance.

use std::io;

use crate::engine::kernel::Ring;
use crate::engine::kernel::abi::{BUFFERS_MAX, FILES_MAX};

/// The largest piece that the kernel takes: 1 GiB.
const PIECE_MAX: usize = 1 << 30;

/// The indices of registered files. All rings of an IoThread use the same.
#[derive(Default)]
pub(super) struct FixedFiles {
    taken: Vec<bool>,
}

impl FixedFiles {
    /// Takes a free index; `None` if all are in use. The index must not be given back before the
    /// kernel has taken the last entry that names it. The handle of the file, which slots hold,
    /// ensures that.
    pub(super) fn take_index(&mut self) -> Option<u32> {
        let index = self.taken.iter().position(|taken| !taken).unwrap_or(self.taken.len());
        let number = u32::try_from(index).ok().filter(|&number| number < FILES_MAX)?;
        self.taken.resize(self.taken.len().max(index + 1), false);
        self.taken[index] = true;
        Some(number)
    }

    pub(super) fn give_back(&mut self, index: u32) {
        if let Some(taken) = self.taken.get_mut(index as usize) {
            *taken = false;
        }
    }
}

/// A registered piece of memory.
struct Piece {
    start: usize,
    len: usize,
    index: u16,
    uses: u32,
}

/// Registered memory by address.
#[derive(Default)]
pub(super) struct FixedBuffers {
    /// Sorted by address.
    pieces: Vec<Piece>,
    last_hit: usize,
}

impl FixedBuffers {
    /// Returns the index of the piece that contains all of these bytes.
    #[inline]
    pub(super) fn index_of(&mut self, start: *mut u8, len: u32) -> Option<u16> {
        let (start, len) = (start.addr(), len as usize);
        let has = |piece: &Piece| {
            start >= piece.start
                && start - piece.start < piece.len
                && len <= piece.len - (start - piece.start)
        };
        if let Some(piece) = self.pieces.get(self.last_hit).filter(|piece| has(piece)) {
            return Some(piece.index);
        }
        let after = self.pieces.partition_point(|piece| piece.start <= start);
        let place = after.checked_sub(1)?;
        let piece = self.pieces.get(place).filter(|piece| has(piece))?;
        self.last_hit = place;
        Some(piece.index)
    }

    /// Registers all of `memory`, or nothing.
    pub(super) fn add(&mut self, ring: &Ring, memory: &[libc::iovec]) -> io::Result<()> {
        for (done, range) in pieces_of(memory).enumerate() {
            if let Err(error) = self.add_piece(ring, range) {
                for range in pieces_of(memory).take(done) {
                    self.remove_piece(ring, range);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn add_piece(&mut self, ring: &Ring, range: libc::iovec) -> io::Result<()> {
        let (start, len) = (range.iov_base.addr(), range.iov_len);
        let place = self.pieces.partition_point(|piece| piece.start < start);
        if let Some(piece) = self.pieces.get_mut(place)
            && piece.start == start
        {
            piece.uses += 1;
            return Ok(());
        }
        let mut taken: Vec<u16> = self.pieces.iter().map(|piece| piece.index).collect();
        taken.sort_unstable();
        let mut index = 0;
        while taken.get(usize::from(index)) == Some(&index) {
            index += 1;
        }
        if u32::from(index) >= BUFFERS_MAX {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        // SAFETY: the caller of `add` keeps memory mapped until it is removed from here, and the
        // kernel holds the pages themselves. Ops name it only by way of slots (see `op.rs`).
        unsafe { ring.update_buffer(u32::from(index), range) }?;
        self.pieces.insert(place, Piece { start, len, index, uses: 1 });
        Ok(())
    }

    pub(super) fn remove(&mut self, ring: &Ring, memory: &[libc::iovec]) {
        for range in pieces_of(memory) {
            self.remove_piece(ring, range);
        }
    }

    fn remove_piece(&mut self, ring: &Ring, range: libc::iovec) {
        let start = range.iov_base.addr();
        let Some(place) = self.pieces.iter().position(|piece| piece.start == start) else { return };
        let piece = &mut self.pieces[place];
        piece.uses -= 1;
        if piece.uses > 0 {
            return;
        }
        let piece = self.pieces.remove(place);
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty piece refers to no memory. Ops in the kernel hold the pages themselves.
        let result = unsafe { ring.update_buffer(u32::from(piece.index), nothing) };
        if let Err(error) = result {
            tracing::warn!("cannot unregister memory from io_uring: {error}");
        }
    }
}

/// Cuts ranges into pieces that the kernel takes.
fn pieces_of(memory: &[libc::iovec]) -> impl Iterator<Item = libc::iovec> + '_ {
    memory.iter().flat_map(|range| {
        (0..range.iov_len).step_by(PIECE_MAX).map(|offset| libc::iovec {
            iov_base: range.iov_base.cast::<u8>().wrapping_add(offset).cast(),
            iov_len: PIECE_MAX.min(range.iov_len - offset),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kernel::abi::Setup;
    use iomem::Buffers;

    /// The kernel's table of files has this many places.
    #[test]
    fn each_file_has_an_index_of_its_own_until_all_are_taken() {
        let mut files = FixedFiles::default();
        let taken: Vec<u32> = std::iter::from_fn(|| files.take_index()).collect();
        assert_eq!(taken, Vec::from_iter(0..FILES_MAX));
        assert_eq!(files.take_index(), None);
        for index in [7, FILES_MAX - 1, 3] {
            files.give_back(index);
        }
        assert_eq!([(); 4].map(|()| files.take_index()), [Some(3), Some(7), Some(255), None]);
    }

    #[test]
    fn memory_is_found_by_all_of_its_bytes() {
        let piece = |start, len, index| Piece { start, len, index, uses: 1 };
        let pieces = vec![piece(4096, 4096, 7), piece(16_384, 8192, 3)];
        let mut buffers = FixedBuffers { pieces, last_hit: 0 };
        for (start, len, expected) in [
            (4096, 4096, Some(7)),
            (4096, 4097, None),
            (4095, 2, None),
            (8191, 1, Some(7)),
            (8191, 2, None),
            (8192, 1, None),
            (16_384, 8192, Some(3)),
            (20_480, 4096, Some(3)),
            (20_480, 4097, None),
            (5000, 100, Some(7)),
            (0, 1, None),
            (usize::MAX, 1, None),
        ] {
            let found = buffers.index_of(std::ptr::without_provenance_mut(start), len);
            assert_eq!(found, expected, "{len} bytes at {start}");
        }
    }

    /// Two users may register the same memory.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn memory_stays_registered_until_its_last_user_goes() {
        let setup = Setup { depth: 8, sqpoll: false, embedded: false, polled_beside: None };
        let ring = Ring::new(&setup).unwrap();
        let [one, other] = [(); 2].map(|()| Buffers::aligned(8192, 4096));
        let start = |list: &Buffers| list.iovecs()[0].iov_base.cast::<u8>();
        let mut buffers = FixedBuffers::default();
        for memory in [&one, &other, &one] {
            buffers.add(&ring, memory.iovecs()).unwrap();
        }
        let indices = [&one, &other].map(|list| buffers.index_of(start(list), 8192).unwrap());
        assert_ne!(indices[0], indices[1]);
        buffers.remove(&ring, one.iovecs());
        assert_eq!(buffers.index_of(start(&one), 8192), Some(indices[0]), "it has another user");
        buffers.remove(&ring, one.iovecs());
        assert_eq!(buffers.index_of(start(&one), 8192), None);
        assert_eq!(buffers.index_of(start(&other), 8192), Some(indices[1]));
        // A list of which one range cannot be registered leaves nothing behind.
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 8192 };
        let list = [one.iovecs()[0], nothing];
        assert!(buffers.add(&ring, &list).is_err());
        assert_eq!(buffers.index_of(start(&one), 8192), None, "its first range is left");
        buffers.remove(&ring, other.iovecs());
        assert!(buffers.pieces.is_empty());
    }
}
