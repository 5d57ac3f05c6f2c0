//! The guest's requests: what they ask, how their chains look, and what must come back.

use device::blk::config::{SERIAL_BYTES, WRITE_ZEROES_SECTORS_MAX};
use iomem::fits;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtqueue::driver::Desc;

use crate::content::{SECTOR, Value, bytes_of};
use crate::history::WriteRef;
use crate::layout::{TABLE_OFFSET, UNMAPPED};
use crate::plan::Plan;
use crate::rng::Rng;

/// What a device answers with `GET_ID`.
pub(crate) fn serial(device: usize) -> String {
    format!("sim-0123456789-{device}")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    GetId,
    /// A request that must fail with this status.
    Bad(u32),
}

/// A request before it is a chain.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) kind: Kind,
    /// Its number: the value that a write leaves.
    pub(crate) id: u64,
    /// Ranges of sectors: first, count.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// What the device reads, header included.
    pub(crate) readable: Vec<u8>,
    /// Bytes that the device may write, status included.
    pub(crate) writable: usize,
    /// One of its buffers is not in guest memory.
    pub(crate) unmapped: bool,
}

/// A request that is out.
#[derive(Debug)]
pub(crate) struct Outstanding {
    pub(crate) request: Request,
    pub(crate) pieces: Vec<Desc>,
    pub(crate) area: u64,
    /// The area as the guest left it.
    pub(crate) image: Vec<u8>,
    pub(crate) begin: u64,
    pub(crate) writes: Vec<WriteRef>,
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend(0_u32.to_le_bytes());
    header.extend(sector.to_le_bytes());
    header
}

impl Request {
    fn new(kind: Kind, id: u64, readable: Vec<u8>, data_in: usize) -> Self {
        Self { kind, id, ranges: Vec::new(), readable, writable: data_in + 1, unmapped: false }
    }

    /// Draws a request. `is_free` says whether a range of sectors may be used now.
    pub(crate) fn draw(
        plan: &Plan,
        rng: &mut Rng,
        id: u64,
        is_free: &dyn Fn(u64, u64) -> bool,
    ) -> Self {
        let weights = [
            (Kind::Read, plan.reads),
            (Kind::Write, plan.writes),
            (Kind::Flush, plan.flushes),
            (Kind::Discard, plan.discards),
            (Kind::WriteZeroes, plan.zeroes),
            (Kind::GetId, plan.ids),
            (Kind::Bad(VIRTIO_BLK_S_IOERR), plan.bads),
        ];
        let mut left = rng.below(weights.iter().map(|(_, weight)| weight).sum());
        let chosen = weights.iter().find(|(_, weight)| {
            let found = left < *weight;
            left = left.saturating_sub(*weight);
            found
        });
        let kind = chosen.map_or(Kind::Read, |(kind, _)| *kind);
        match kind {
            Kind::Flush => return Self::new(kind, id, header(VIRTIO_BLK_T_FLUSH, 0), 0),
            Kind::GetId => {
                let room = rng.pick(&[1, 19, 20, 20, 20, 21, 64]);
                return Self::new(kind, id, header(VIRTIO_BLK_T_GET_ID, 0), room);
            }
            Kind::Bad(_) => return Self::bad(plan, rng, id),
            _ => {}
        }
        let (sector, sectors) = range(plan, rng);
        if !is_free(sector, sectors) {
            return Self::new(Kind::Flush, id, header(VIRTIO_BLK_T_FLUSH, 0), 0);
        }
        let bytes = fits::<_, usize>(sectors, "a number that was drawn") * SECTOR;
        let mut request = match kind {
            Kind::Read => Self::new(kind, id, header(VIRTIO_BLK_T_IN, sector), bytes),
            Kind::Write => {
                let mut readable = header(VIRTIO_BLK_T_OUT, sector);
                for sector in sector..sector + sectors {
                    readable.extend(bytes_of(Value::Id(id), sector));
                }
                Self::new(kind, id, readable, 0)
            }
            _ => return Self::ranged(plan, rng, id, kind, (sector, sectors)),
        };
        request.ranges = vec![(sector, sectors)];
        if plan.read_only > 0 && kind == Kind::Write {
            request.kind = Kind::Bad(VIRTIO_BLK_S_IOERR);
            request.ranges.clear();
        }
        request
    }

    /// A discard or write-zeroes request: one range in some segments.
    fn ranged(plan: &Plan, rng: &mut Rng, id: u64, kind: Kind, range: (u64, u64)) -> Self {
        let (mut sector, mut left) = range;
        let (request_type, unmap) = match kind {
            Kind::Discard => (VIRTIO_BLK_T_DISCARD, 0),
            _ => (VIRTIO_BLK_T_WRITE_ZEROES, u32::from(rng.chance(500))),
        };
        let mut readable = header(request_type, 0);
        while left > 0 {
            let blocks = rng.between(1, left / plan.block_sectors());
            let sectors = blocks * plan.block_sectors();
            readable.extend(segment(sector, sectors, unmap));
            (sector, left) = (sector + sectors, left - sectors);
        }
        let mut request = Self::new(kind, id, readable, 0);
        if plan.read_only > 0 {
            // Not offered then; the device must still refuse it.
            request.kind = Kind::Bad(VIRTIO_BLK_S_IOERR);
        } else {
            request.ranges = vec![range];
        }
        request
    }

    /// A request that must fail, and must have no effect.
    fn bad(plan: &Plan, rng: &mut Rng, id: u64) -> Self {
        let (io_error, unsupported) =
            (Kind::Bad(VIRTIO_BLK_S_IOERR), Kind::Bad(VIRTIO_BLK_S_UNSUPP));
        let with = |mut first: Vec<u8>, rest: Vec<u8>| {
            first.extend(rest);
            first
        };
        let (sector, sectors) = range(plan, rng);
        match rng.below(9) {
            0 => Self::new(unsupported, id, header(77, sector), 0),
            1 => Self::new(io_error, id, header(VIRTIO_BLK_T_IN, plan.sectors()), 4096),
            2 => Self::new(io_error, id, header(VIRTIO_BLK_T_IN, u64::MAX / 512 - 1), 4096),
            3 => Self::new(io_error, id, header(VIRTIO_BLK_T_IN, sector), 100),
            4 => {
                let data = vec![0x77; usize::from(rng.pick(&[1_u16, 511, 513]))];
                Self::new(io_error, id, with(header(VIRTIO_BLK_T_OUT, sector), data), 0)
            }
            5 => Self::new(io_error, id, header(VIRTIO_BLK_T_IN, sector)[..15].to_vec(), 0),
            6 => {
                let segment = segment(sector, sectors, 1);
                Self::new(unsupported, id, with(header(VIRTIO_BLK_T_DISCARD, 0), segment), 0)
            }
            7 => {
                let long = u64::from(WRITE_ZEROES_SECTORS_MAX) + 8;
                let segment = segment(0, long, 0);
                Self::new(io_error, id, with(header(VIRTIO_BLK_T_WRITE_ZEROES, 0), segment), 0)
            }
            _ => {
                let mut request = Self::new(io_error, id, header(VIRTIO_BLK_T_IN, sector), 512);
                request.unmapped = true;
                request
            }
        }
    }

    /// The status that must come if no fault was put in.
    pub(crate) fn status(&self) -> u32 {
        if let Kind::Bad(status) = self.kind { status } else { VIRTIO_BLK_S_OK }
    }

    /// Bytes of the answer that are data, where the answer is a success.
    pub(crate) fn id_answer(&self, serial: &str) -> Vec<u8> {
        let mut answer = serial.as_bytes()[..serial.len().min(SERIAL_BYTES)].to_vec();
        answer.resize(self.writable - 1, 0);
        answer
    }

    /// Lays the request out in the guest's memory from `area` on, in at most `room` buffers.
    /// `image` is the memory there. Returns `None` if there are too few.
    pub(crate) fn lay_out(
        &self,
        plan: &Plan,
        rng: &mut Rng,
        area: u64,
        image: &mut [u8],
        room: usize,
    ) -> Option<Vec<Desc>> {
        let most = fits::<_, usize>(plan.pieces, "a number that was drawn").min(room / 2);
        if most == 0 || (self.unmapped && room < 3) {
            return None;
        }
        let aligned = rng.chance(plan.aligned);
        let is_odd = rng.chance(plan.odd_ranges);
        let align = u64::from(plan.memory_align());
        let mut lay = Lay { area, image, align, at: 0, pieces: Vec::new() };
        let data = self.readable.len().saturating_sub(16);
        let parts = match odd_cut(plan, rng, data, most.saturating_sub(1)).filter(|_| is_odd) {
            Some(parts) => [vec![(16, false)], parts].concat(),
            None => {
                let keep = aligned && data > 0 && most > 1;
                let lengths = cut(rng, self.readable.len(), most, keep, 16);
                lengths.into_iter().map(|len| (len, aligned && len >= SECTOR)).collect()
            }
        };
        let mut from = 0;
        for (len, aligned) in parts {
            lay.place(rng, len, false, aligned);
            lay.fill(&self.readable[from..from + len]);
            from += len;
        }
        if self.unmapped {
            lay.pieces.push(Desc::writable(UNMAPPED, 512));
            lay.place(rng, 1, true, false);
            return Some(lay.pieces);
        }
        let data = self.writable - 1;
        let parts = match odd_cut(plan, rng, data, most.saturating_sub(1)).filter(|_| is_odd) {
            Some(parts) => [parts, vec![(1, false)]].concat(),
            None => {
                let lengths = cut(rng, self.writable, most, aligned && data > 0 && most > 1, data);
                lengths.into_iter().map(|len| (len, aligned && len >= SECTOR)).collect()
            }
        };
        for (len, aligned) in parts {
            lay.place(rng, len, true, aligned);
        }
        Some(lay.pieces)
    }
}

fn segment(sector: u64, sectors: u64, flags: u32) -> Vec<u8> {
    let mut segment = sector.to_le_bytes().to_vec();
    segment.extend(fits::<_, u32>(sectors, "a number that was drawn").to_le_bytes());
    segment.extend(flags.to_le_bytes());
    segment
}

/// A range of whole blocks on the disk: first sector, sectors.
fn range(plan: &Plan, rng: &mut Rng) -> (u64, u64) {
    // More would not fit the area.
    let most = plan.request_blocks.min(plan.blocks).min(16 * 512 / plan.block_bytes());
    let blocks = rng.between(1, most);
    let first = rng.below(plan.blocks - blocks + 1);
    (first * plan.block_sectors(), blocks * plan.block_sectors())
}

/// Cuts `total` bytes into at most `most` parts; with `keep`, only at `border`.
fn cut(rng: &mut Rng, total: usize, most: usize, keep: bool, border: usize) -> Vec<usize> {
    if keep {
        return vec![border, total - border];
    }
    let mut cuts: Vec<usize> = (1..rng.between(1, most as u64)).map(|_| rng.index(total)).collect();
    cuts.extend([0, total]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Cuts data into at least three ranges and at most `most`, with whether each is to be aligned: all
/// are, and are whole blocks long, but for one place, which may be any. `None`: it is too small.
fn odd_cut(plan: &Plan, rng: &mut Rng, data: usize, most: usize) -> Option<Vec<(usize, bool)>> {
    let block = fits(plan.block_bytes(), "the size of a block");
    let blocks = data / block;
    if !data.is_multiple_of(block) || blocks < 3 || most < 3 {
        return None;
    }
    let count = fits(rng.between(3, blocks.min(most) as u64), "a number that was drawn");
    // Each has a block; what is left goes to the last.
    let mut parts = vec![(block, true); count];
    parts[count - 1].0 += (blocks - count) * block;
    let odd = rng.index(count);
    if odd + 1 < count && rng.chance(500) {
        // The address may be aligned; the length, and that of the next, is not.
        let moved = fits::<_, usize>(rng.between(1, block as u64 - 1), "a number that was drawn");
        parts[odd].0 -= moved;
        parts[odd + 1].0 += moved;
    } else {
        parts[odd].1 = false;
    }
    Some(parts)
}

/// Buffers being placed one after the other, with gaps.
struct Lay<'a> {
    area: u64,
    image: &'a mut [u8],
    /// What aligned ranges start at multiples of.
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
