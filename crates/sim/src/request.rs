//! Requests to a virtio-blk device, and the answers that they must get.

use device::blk::config::{SERIAL_BYTES, WRITE_ZEROES_SECTORS_MAX};
use iomem::fits;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};

use crate::content::{SECTOR, Value, bytes_of};
use crate::faults::Class;
use crate::message::{Flaw, Message};
use crate::plan::Plan;
use crate::rng::Rng;

/// Bytes before the data.
const HEADER: usize = 16;

/// The answer of a device to `GET_ID`.
pub(crate) fn serial(device: usize) -> String {
    format!("sim-0123456789-{device}")
}

/// The effect of a request on a disk.
#[derive(Debug, Clone, Default)]
pub(crate) struct DiskEffect {
    /// Classes of ops with errors that the request may report.
    pub(crate) classes: &'static [Class],
    /// First sectors and counts.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// The content of the sectors afterwards.
    pub(crate) leaves: Option<Value>,
    /// The request may leave sectors as they are.
    pub(crate) is_optional: bool,
    /// All data answered before the request is on stable storage at its answer.
    pub(crate) flushes: bool,
    /// The request's own data is on stable storage at its answer, with or without a cache.
    pub(crate) fua: bool,
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

/// A request before it becomes a chain.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) kind: Kind,
    /// Number of the request: the value that a write leaves.
    pub(crate) id: u64,
    /// Ranges of sectors: first, count.
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) message: Message,
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend(0_u32.to_le_bytes());
    header.extend(sector.to_le_bytes());
    header
}

impl Request {
    fn new(kind: Kind, id: u64, readable: Vec<u8>, data_in: usize) -> Self {
        let message = Message {
            readable,
            header: HEADER,
            writable: data_in + 1,
            data_in: (0, data_in),
            flaw: None,
        };
        Self { kind, id, ranges: Vec::new(), message }
    }

    /// Draws a request. `is_free` returns true if a range of sectors may be used now.
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
            // The feature is not offered then; the device must still refuse the request.
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
                request.message.flaw = Some(Flaw::NoIn);
                request
            }
        }
    }

    /// The status that must come without an injected fault.
    pub(crate) fn status(&self) -> u32 {
        if let Kind::Bad(status) = self.kind { status } else { VIRTIO_BLK_S_OK }
    }

    /// The effect on the disk.
    pub(crate) fn disk_effect(&self) -> DiskEffect {
        let classes: &[Class] = match self.kind {
            Kind::Read => &[Class::Read],
            Kind::Write => &[Class::Write, Class::Flush],
            Kind::WriteZeroes => &[Class::Write, Class::Deallocate, Class::Flush],
            Kind::Discard => &[Class::Deallocate, Class::Flush],
            // All of these may report a loss.
            Kind::Flush | Kind::GetId | Kind::Bad(_) => &[Class::Flush],
        };
        let leaves = match self.kind {
            Kind::Write => Some(Value::Id(self.id)),
            Kind::Discard | Kind::WriteZeroes => Some(Value::Zero),
            _ => None,
        };
        DiskEffect {
            classes,
            ranges: self.ranges.clone(),
            leaves,
            is_optional: self.kind == Kind::Discard,
            flushes: self.kind == Kind::Flush,
            fua: false,
        }
    }

    /// The data of a successful answer.
    pub(crate) fn id_answer(&self, serial: &str) -> Vec<u8> {
        let mut answer = serial.as_bytes()[..serial.len().min(SERIAL_BYTES)].to_vec();
        answer.resize(self.message.data_in.1, 0);
        answer
    }
}

fn segment(sector: u64, sectors: u64, flags: u32) -> Vec<u8> {
    let mut segment = sector.to_le_bytes().to_vec();
    segment.extend(fits::<_, u32>(sectors, "a number that was drawn").to_le_bytes());
    segment.extend(flags.to_le_bytes());
    segment
}

/// A range of whole blocks on the disk: first sector, sectors.
pub(crate) fn range(plan: &Plan, rng: &mut Rng) -> (u64, u64) {
    // A longer range would not fit the area.
    let most = plan.request_blocks.min(plan.blocks).min(16 * 512 / plan.block_bytes());
    let blocks = rng.between(1, most);
    let first = rng.below(plan.blocks - blocks + 1);
    (first * plan.block_sectors(), blocks * plan.block_sectors())
}
