//! The content of a chain for any device, and its layout in guest memory.

use iomem::fits;
use virtqueue::driver::Desc;

use crate::content::SECTOR;
use crate::layout::{TABLE_OFFSET, UNMAPPED};
use crate::plan::Plan;
use crate::rng::Rng;

/// The content of a chain.
#[derive(Debug, Clone, Default)]
pub(crate) struct Message {
    /// Bytes that the device reads.
    pub(crate) readable: Vec<u8>,
    /// Length of the part before the data.
    pub(crate) header: usize,
    /// Bytes of the room that the device may write.
    pub(crate) writable: usize,
    /// Offset and length of the data in that room.
    pub(crate) data_in: (usize, usize),
    /// The fault of the chain, if it has one.
    pub(crate) flaw: Option<Flaw>,
}

/// A fault of a chain that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// A buffer for the device to read is not in guest memory.
    NoOut,
    /// The buffer for the data to the guest is not in guest memory.
    NoIn,
    /// A readable buffer follows a writable one.
    Order,
}

impl Message {
    /// Lays the message out in the guest's memory from `area` on, in at most `room` buffers.
    /// `image` is the memory there. Returns `None` if `room` is too small.
    pub(crate) fn lay_out(
        &self,
        plan: &Plan,
        rng: &mut Rng,
        area: u64,
        image: &mut [u8],
        room: usize,
    ) -> Option<Vec<Desc>> {
        // A flaw needs one more buffer.
        let room = room.checked_sub(usize::from(self.flaw.is_some()))?;
        let most = fits::<_, usize>(plan.pieces, "a number that was drawn").min(room / 2);
        if most == 0 {
            return None;
        }
        let aligned = rng.chance(plan.aligned);
        let is_odd = rng.chance(plan.odd_ranges);
        let align = u64::from(plan.memory_align());
        let mut lay = Lay { area, image, align, at: 0, pieces: Vec::new() };
        let parts = |rng: &mut Rng, total: usize, (before, data): (usize, usize)| {
            let rest = [(before, false), (total - before - data, false)];
            let rest = rest.map(|part| Some(part).filter(|(len, _)| *len > 0));
            match odd_cut(plan, rng, data, most.saturating_sub(1)).filter(|_| is_odd) {
                Some(parts) => rest[0].into_iter().chain(parts).chain(rest[1]).collect(),
                None => {
                    let keep = aligned && data > 0 && most > 1;
                    let border = if before > 0 { before } else { data };
                    let lengths = cut(rng, total, most, keep, border);
                    let parts = lengths.into_iter().map(|len| (len, aligned && len >= SECTOR));
                    parts.collect::<Vec<_>>()
                }
            }
        };
        let header = self.header.min(self.readable.len());
        let out = parts(rng, self.readable.len(), (header, self.readable.len() - header));
        let mut from = 0;
        for (len, aligned) in out {
            lay.place(rng, len, false, aligned);
            lay.fill(&self.readable[from..from + len]);
            from += len;
        }
        let Some(flaw) = self.flaw else {
            for (len, aligned) in parts(rng, self.writable, self.data_in) {
                lay.place(rng, len, true, aligned);
            }
            return Some(lay.pieces);
        };
        let (before, data) = self.data_in;
        let mut place = |lay: &mut Lay<'_>, total| {
            let lengths = cut(rng, total, most, false, 0);
            lengths.into_iter().for_each(|len| lay.place(rng, len, true, false));
        };
        if flaw == Flaw::NoOut {
            lay.pieces.push(Desc::readable(UNMAPPED, 512));
        }
        place(&mut lay, before);
        match flaw {
            Flaw::NoOut => {}
            Flaw::NoIn => lay.pieces.push(Desc::writable(UNMAPPED, 512)),
            Flaw::Order => lay.pieces.push(Desc::readable(area, 1)),
        }
        place(&mut lay, self.writable - before - data);
        Some(lay.pieces)
    }
}

/// Cuts `total` bytes into at most `most` parts; with `keep`, only at `border`.
fn cut(rng: &mut Rng, total: usize, most: usize, keep: bool, border: usize) -> Vec<usize> {
    if total == 0 {
        return Vec::new();
    }
    if keep {
        return vec![border, total - border];
    }
    let mut cuts: Vec<usize> = (1..rng.between(1, most as u64)).map(|_| rng.index(total)).collect();
    cuts.extend([0, total]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Cuts data into at least three ranges and at most `most`. The flag of each range is true if it
/// must be aligned. All ranges are aligned and whole blocks long except at one place. Returns
/// `None` if the data is too small.
fn odd_cut(plan: &Plan, rng: &mut Rng, data: usize, most: usize) -> Option<Vec<(usize, bool)>> {
    let block = fits(plan.block_bytes(), "the size of a block");
    let blocks = data / block;
    if !data.is_multiple_of(block) || blocks < 3 || most < 3 {
        return None;
    }
    let count = fits(rng.between(3, blocks.min(most) as u64), "a number that was drawn");
    // Each range gets one block; the last range gets the rest.
    let mut parts = vec![(block, true); count];
    parts[count - 1].0 += (blocks - count) * block;
    let odd = rng.index(count);
    if odd + 1 < count && rng.chance(500) {
        // The address may be aligned. The lengths of this range and the next are not.
        let moved = fits::<_, usize>(rng.between(1, block as u64 - 1), "a number that was drawn");
        parts[odd].0 -= moved;
        parts[odd + 1].0 += moved;
    } else {
        parts[odd].1 = false;
    }
    Some(parts)
}

/// Buffers placed in a row, with gaps.
struct Lay<'a> {
    area: u64,
    image: &'a mut [u8],
    /// Alignment of aligned ranges.
    align: u64,
    at: u64,
    pieces: Vec<Desc>,
}

impl Lay<'_> {
    fn place(&mut self, rng: &mut Rng, len: usize, writable: bool, aligned: bool) {
        self.at += rng.below(9);
        if aligned {
            self.at = self.at.next_multiple_of(self.align);
        }
        let piece_len = fits(len, "a number that was drawn");
        let desc = if writable { Desc::writable } else { Desc::readable };
        self.pieces.push(desc(self.area + self.at, piece_len));
        self.at += len as u64;
        assert!(self.at <= TABLE_OFFSET, "the area of a chain is too small");
    }

    /// Writes the piece placed last into the image.
    fn fill(&mut self, bytes: &[u8]) {
        let end = fits(self.at, "a number that was drawn");
        self.image[end - bytes.len()..end].copy_from_slice(bytes);
    }
}
