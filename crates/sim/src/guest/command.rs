//! Draws commands for the units of virtio-scsi devices.

use device::unit_address::UnitAddress;
use iomem::fits;

use crate::content::{SECTOR, Value, bytes_of};
use crate::disk::Disk;
use crate::message::{Flaw, Message};
use crate::plan::Plan;
use crate::request::range;
use crate::rng::Rng;
use crate::scsi::command::{Command, Kind};
use crate::scsi::reservations::Order;
use crate::scsi::{BAD_TARGET, FAILURE, OVERRUN, Outcome, RESPONSE, SENSE, lun_bytes};

/// Bytes of a request before its data.
const HEADER: usize = 19 + 32;

/// The unit that a command is drawn for.
pub(super) struct Target<'a> {
    pub(super) unit: usize,
    pub(super) address: UnitAddress,
    pub(super) disk: &'a Disk,
    pub(super) tag: u64,
    /// Number of the device.
    pub(super) device: usize,
}

impl Target<'_> {
    /// Draws a command for the unit. `plan` is the plan of the guest.
    pub(super) fn draw(&self, plan: &Plan, rng: &mut Rng, id: u64) -> Command {
        let disk = self.disk;
        let read_only = disk.plan.read_only > 0;
        let range = range(&Plan { request_blocks: plan.request_blocks, ..disk.plan.clone() }, rng);
        let mut drawn = Draft {
            rng,
            id,
            target: self,
            range,
            cdb: Vec::new(),
            out: Vec::new(),
            into: 0,
            flaw: None,
        };
        let kind = drawn.kind(plan, read_only);
        let no_overlap = plan.no_overlap > 0 && !disk.is_free(range.0, range.1);
        let has_range = !matches!(
            kind,
            Kind::TestUnitReady | Kind::Select(_) | Kind::Reserve(_) | Kind::Bad(_)
        );
        match kind {
            _ if no_overlap && has_range => drawn.finish(Kind::TestUnitReady),
            kind => drawn.finish(kind),
        }
    }
}

/// A command that is being drawn.
struct Draft<'a> {
    rng: &'a mut Rng,
    id: u64,
    target: &'a Target<'a>,
    range: (u64, u64),
    cdb: Vec<u8>,
    out: Vec<u8>,
    /// Bytes of data to the guest.
    into: usize,
    flaw: Option<Flaw>,
}

impl Draft<'_> {
    fn kind(&mut self, plan: &Plan, read_only: bool) -> Kind {
        let unmaps = if read_only { 0 } else { plan.discards };
        let weights = [
            (Kind::Read, plan.reads),
            (Kind::Write, plan.writes),
            (Kind::Synchronize, plan.flushes),
            (Kind::Unmap, unmaps),
            (Kind::WriteSame, plan.zeroes),
            (Kind::CompareAndWrite, plan.swaps),
            (Kind::TestUnitReady, 1 + plan.ids),
            (Kind::Select(self.rng.chance(500)), plan.selects),
            (Kind::Bad(Outcome::Good), plan.bads),
        ];
        if plan.reserves > 0
            && self.rng.chance(plan.reserves)
            && let Some(order) = self.order()
        {
            return Kind::Reserve(order);
        }
        let mut left = self.rng.below(weights.iter().map(|(_, weight)| weight).sum());
        let chosen = weights.iter().find(|(_, weight)| {
            let found = left < *weight;
            left = left.saturating_sub(*weight);
            found
        });
        chosen.map_or(Kind::Read, |(kind, _)| *kind)
    }

    /// A PERSISTENT RESERVE OUT, or `None` if one is in progress on the disk: two at a time are
    /// BUSY.
    fn order(&mut self) -> Option<Order> {
        let shared = self.target.disk.shared();
        if !shared.reservations.is_idle() {
            return None;
        }
        let from = self.target.device;
        let rng = &mut *self.rng;
        let types = [1, 3, 5, 6, 7, 8, shared.reservations.code(), shared.reservations.code(), 2];
        let own = shared.reservations.key_of(from);
        Some(Order {
            from,
            action: rng.pick(&[0, 0, 6, 1, 1, 2, 3, 4, 5]),
            code: rng.pick(&types),
            key: if rng.chance(900) { own } else { rng.below(4) },
            action_key: rng.below(4),
        })
    }

    fn block_bytes(&self) -> usize {
        fits(self.target.disk.plan.block_bytes(), "the size of a block")
    }

    /// First block and number of blocks.
    fn blocks(&self) -> (u64, u32) {
        let sectors = self.target.disk.plan.block_sectors();
        (self.range.0 / sectors, fits(self.range.1 / sectors, "a number that was drawn"))
    }

    fn bytes(&self) -> usize {
        fits::<_, usize>(self.range.1, "a number that was drawn") * SECTOR
    }

    /// Makes the CDB of a command on blocks, in any of the lengths that it has.
    fn on_blocks(&mut self, opcodes: &[u8], flags: u8) {
        let (lba, count) = self.blocks();
        let opcode = self.rng.pick(opcodes);
        let mut cdb = vec![opcode, flags];
        let small: u32 = fits(lba, "a number that was drawn");
        match opcode >> 5 {
            0 => {
                let [_, b, c, d] = small.to_be_bytes();
                cdb = vec![opcode, b, c, d, fits(count, "a number that was drawn"), 0];
            }
            1 | 2 => {
                cdb.extend(small.to_be_bytes());
                cdb.push(0);
                cdb.extend(fits::<_, u16>(count, "a number that was drawn").to_be_bytes());
                cdb.push(0);
            }
            4 => {
                cdb.extend(lba.to_be_bytes());
                cdb.extend(count.to_be_bytes());
                cdb.extend([0, 0]);
            }
            _ => {
                cdb.extend(small.to_be_bytes());
                cdb.extend(count.to_be_bytes());
                cdb.extend([0, 0]);
            }
        }
        self.cdb = cdb;
    }

    fn content(&self, value: impl Fn(u64) -> Value) -> Vec<u8> {
        let sectors = self.range.0..self.range.0 + self.range.1;
        sectors.flat_map(|sector| bytes_of(value(sector), sector)).collect()
    }

    /// Makes the command.
    fn finish(mut self, kind: Kind) -> Command {
        let mut expects = Vec::new();
        let mut kind = kind;
        let fua = self.rng.chance(200);
        let flags = if fua { 0x08 } else { 0 };
        let mut has_fua = false;
        let mut moved = self.bytes();
        let has_range = !matches!(
            kind,
            Kind::TestUnitReady | Kind::Select(_) | Kind::Reserve(_) | Kind::Bad(_)
        );
        if !has_range {
            (self.range, moved) = ((0, 0), 0);
        }
        match kind {
            Kind::Read => {
                self.on_blocks(&[0x08, 0x28, 0x88, 0xa8], 0);
                self.into = moved + self.excess();
            }
            Kind::Write => {
                let opcodes: &[u8] =
                    if fua { &[0x2a, 0x8a, 0xaa] } else { &[0x0a, 0x2a, 0x8a, 0xaa] };
                self.on_blocks(opcodes, flags);
                has_fua = fua;
                let id = self.id;
                self.out = self.content(|_| Value::Id(id));
                let excess = self.excess();
                self.out.resize(moved + excess, 0x5a);
            }
            Kind::Synchronize => {
                // SYNCHRONIZE CACHE flushes all blocks, for any range.
                self.range = (0, 0);
                moved = 0;
                self.on_blocks(&[0x35, 0x91], 0);
            }
            Kind::Unmap => moved = self.unmap(),
            Kind::WriteSame => moved = self.write_same(),
            Kind::CompareAndWrite => {
                expects = self.compare_and_write(flags);
                (has_fua, moved) = (fua, 2 * moved);
            }
            Kind::TestUnitReady => self.cdb = vec![0; 6],
            Kind::Select(is_on) => moved = self.select(is_on),
            Kind::Reserve(order) => moved = self.reserve(order),
            Kind::Bad(_) => kind = Kind::Bad(self.bad()),
        }
        let Target { unit, address, tag, .. } = *self.target;
        let mut readable = match kind {
            Kind::Bad(Outcome::Response(BAD_TARGET)) => vec![1, 77, 0x40, 0, 0, 0, 0, 0],
            Kind::Bad(Outcome::Check(5, [0x25, 0])) => vec![1, address.target, 0x7f, 1, 0, 0, 0, 0],
            _ => lun_bytes(address).to_vec(),
        };
        readable.extend(tag.to_le_bytes());
        readable.extend([0; 3]);
        self.cdb.resize(32, 0);
        readable.extend(&self.cdb);
        assert_eq!(readable.len(), HEADER);
        readable.extend(&self.out);
        let message = Message {
            readable,
            header: HEADER,
            writable: RESPONSE + SENSE + self.into,
            data_in: (RESPONSE + SENSE, self.into),
            flaw: self.flaw,
        };
        let (id, range) = (self.id, self.range);
        Command { kind, id, tag, unit, range, expects, fua: has_fua, moved, message }
    }

    /// Bytes of room that the CDB does not ask for.
    fn excess(&mut self) -> usize {
        if self.rng.chance(100) { 1 + self.rng.index(600) } else { 0 }
    }

    fn unmap(&mut self) -> usize {
        let (mut lba, mut left) = self.blocks();
        let mut descriptors = Vec::new();
        while left > 0 {
            let count = fits(self.rng.between(1, left.into()), "a number that was drawn");
            descriptors.extend(lba.to_be_bytes());
            descriptors.extend(u32::to_be_bytes(count));
            descriptors.extend([0; 4]);
            (lba, left) = (lba + u64::from(count), left - count);
        }
        let bytes: u16 = fits(descriptors.len(), "a number that was drawn");
        self.out = [&(bytes + 6).to_be_bytes()[..], &bytes.to_be_bytes(), &[0; 4]].concat();
        self.out.extend(descriptors);
        self.cdb = vec![0x42, 0, 0, 0, 0, 0, 0];
        self.cdb.extend((bytes + 8).to_be_bytes());
        self.cdb.push(0);
        self.out.len()
    }

    fn write_same(&mut self) -> usize {
        let unmaps = self.rng.chance(300);
        let has_none = self.rng.chance(300);
        let flags = if unmaps { 0x08 } else { 0 };
        if has_none {
            self.on_blocks(&[0x93], flags | 1);
            return 0;
        }
        self.on_blocks(&[0x41, 0x93], flags);
        self.out = vec![0; self.block_bytes()];
        self.out.len()
    }

    fn compare_and_write(&mut self, flags: u8) -> Vec<Value> {
        let (lba, count) = self.blocks();
        self.cdb = vec![0x89, flags];
        self.cdb.extend(lba.to_be_bytes());
        self.cdb.extend([0, 0, 0, fits(count, "a number that was drawn"), 0, 0]);
        let disk = self.target.disk;
        let sectors = self.range.0..self.range.0 + self.range.1;
        let expects: Vec<Value> = sectors.map(|sector| disk.last_value(sector)).collect();
        let first = self.range.0;
        let id = self.id;
        self.out = self.content(|sector| expects[fits::<_, usize>(sector - first, "an offset")]);
        self.out.extend(self.content(|_| Value::Id(id)));
        expects
    }

    /// The caching page, with WCE or without.
    fn select(&mut self, is_on: bool) -> usize {
        let mut page = vec![0; 20];
        page[..3].copy_from_slice(&[0x08, 18, if is_on { 4 } else { 0 }]);
        self.out = vec![0; 4];
        self.out.extend(page);
        self.cdb = vec![0x15, 0x10, 0, 0, fits(self.out.len(), "a page"), 0];
        self.out.len()
    }

    fn reserve(&mut self, order: Order) -> usize {
        self.cdb = vec![0x5f, order.action, order.code, 0, 0, 0, 0, 0, 24, 0];
        self.out = [order.key.to_be_bytes(), order.action_key.to_be_bytes(), [0; 8]].concat();
        self.out.len()
    }

    /// Makes a command that must be refused. Returns the outcome.
    fn bad(&mut self) -> Outcome {
        let refused = |code| Outcome::Check(5, code);
        match self.rng.below(8) {
            0 => {
                self.cdb = vec![0xff];
                refused([0x20, 0])
            }
            1 => {
                // Protection information.
                self.cdb = vec![0x28, 0x20, 0, 0, 0, 0, 0, 0, 1, 0];
                self.into = self.block_bytes();
                refused([0x24, 0])
            }
            2 => {
                self.cdb = vec![0x88, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
                self.into = self.block_bytes();
                refused([0x21, 0])
            }
            3 => {
                self.cdb = vec![0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
                self.into = self.rng.index(self.block_bytes());
                Outcome::Response(OVERRUN)
            }
            4 => {
                // Data in both directions.
                self.cdb = vec![0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
                (self.into, self.out) = (self.block_bytes(), vec![7; 5]);
                Outcome::Response(FAILURE)
            }
            5 => {
                self.cdb = vec![0; 6];
                refused([0x25, 0])
            }
            6 => {
                // The buffers of this command are not valid memory.
                self.cdb = vec![0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
                self.into = self.block_bytes();
                self.flaw = Some(self.rng.pick(&[Flaw::NoOut, Flaw::NoIn, Flaw::Order]));
                Outcome::Response(FAILURE)
            }
            _ => {
                self.cdb = vec![0; 6];
                Outcome::Response(BAD_TARGET)
            }
        }
    }
}
