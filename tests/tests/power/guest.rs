//! A guest that tracks the possible contents of each sector after a loss of power.

use std::collections::HashMap;
use std::ops::Range;

use anyhow::{Context, Result, ensure};
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, blk, segment};
use ringhaul_kit::journal::Journal;
use ringhaul_kit::random::Random;

pub(super) const SECTOR: usize = 512;
/// Requests of a round, each to a separate part of the disk.
const PARTS: u16 = 8;
/// The maximum number of sectors of a request.
const SECTORS_MAX: u64 = 160;
/// Descriptors of a request.
const CHAIN: u16 = 4;
/// The flag of write zeroes that allows the device to deallocate (virtio 1.3, section 5.2.6).
const UNMAP: u32 = 1;

/// The number that fills a sector, or zero for zeroes.
pub(super) type Version = u64;

/// A sector of this version. Version 0 is zeroes.
pub(super) fn filled(version: Version) -> Vec<u8> {
    let mut random = Random::new(version);
    let mut words = vec![version; SECTOR / 8];
    words[1..].fill_with(|| if version == 0 { 0 } else { random.below(u64::MAX) });
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// A request that changes sectors, with its begin and end by the clock of the journal.
struct Op {
    sectors: Range<u64>,
    version: Version,
    /// True for a discard: the sectors may keep their contents.
    is_hint: bool,
    begun: usize,
    ended: usize,
}

/// The log of requests and answers.
pub(super) struct Log {
    first: Vec<Version>,
    /// True if an answer promises stable data. The guest flushes nothing then.
    is_stable: bool,
    ops: Vec<Op>,
    /// Begin and end of each flush.
    flushes: Vec<(usize, usize)>,
}

/// A request of the round without an answer.
enum Request {
    Change(Op),
    Flush(usize),
}

impl Log {
    pub(super) fn new(first: Vec<Version>, is_stable: bool) -> Self {
        Self { first, is_stable, ops: Vec::new(), flushes: Vec::new() }
    }

    /// Records that the disk has grown to `sectors`, by sectors of zeroes.
    pub(super) fn grow(&mut self, sectors: usize) {
        self.first.resize(sectors, 0);
    }

    pub(super) fn sectors(&self) -> usize {
        self.first.len()
    }

    /// The versions that each sector may have if the power is lost at a moment.
    pub(super) fn allowed(&self, at: usize) -> Vec<Vec<Version>> {
        let answered = self.flushes.iter().filter(|(_, ended)| *ended <= at);
        let covered = answered.map(|(begun, _)| *begun).max().unwrap_or(0);
        let mut allowed: Vec<Vec<Version>> = self.first.iter().map(|one| vec![*one]).collect();
        for op in self.ops.iter().filter(|op| op.begun < at) {
            let is_stable = op.ended < covered || self.is_stable && op.ended <= at;
            for sector in op.sectors.clone() {
                let sector = &mut allowed[usize::try_from(sector).expect("a sector of a test")];
                if is_stable && !op.is_hint {
                    sector.clear();
                }
                sector.push(op.version);
            }
        }
        allowed
    }

    /// Sends rounds of requests, each to a separate part of the disk.
    pub(super) fn run(
        &mut self,
        frontend: &mut Frontend,
        journal: &Journal,
        random: &mut Random,
        requests: usize,
    ) -> Result<()> {
        let until = self.ops.len() + requests;
        while self.ops.len() < until {
            let mut waiting = HashMap::new();
            for part in 0..PARTS {
                if random.below(16) == 0 && !self.is_stable {
                    let begun = journal.now();
                    submit(frontend, part, blk::FLUSH, 0, &[])?;
                    waiting.insert(part, Request::Flush(begun));
                } else {
                    let op = self.submit_change(frontend, journal, random, part)?;
                    waiting.insert(part, Request::Change(op));
                }
            }
            while !waiting.is_empty() {
                let used = frontend.rings[0].wait_used()?;
                let ended = journal.now();
                let part = u16::try_from(used.head)? / CHAIN;
                let status = frontend.status(0, part);
                ensure!(status == Some(blk::OK), "a request ended with {status:?}");
                match waiting.remove(&part).context("another request was answered")? {
                    Request::Change(op) => self.ops.push(Op { ended, ..op }),
                    Request::Flush(begun) => self.flushes.push((begun, ended)),
                }
            }
        }
        Ok(())
    }

    fn submit_change(
        &self,
        frontend: &mut Frontend,
        journal: &Journal,
        random: &mut Random,
        part: u16,
    ) -> Result<Op> {
        let of_part = self.sectors() as u64 / u64::from(PARTS);
        let count = match random.below(3) {
            0 => 1,
            1 => 8,
            _ => 1 + random.below(SECTORS_MAX),
        };
        let first = u64::from(part) * of_part + random.below(of_part - count + 1);
        let sectors = first..first + count;
        let begun = journal.now();
        let kind = match random.below(8) {
            0 => blk::WRITE_ZEROES,
            1 => blk::DISCARD,
            _ => blk::OUT,
        };
        // A number that is unique to this request.
        let version = if kind == blk::OUT { begun as u64 + 2 } else { 0 };
        let flags = if kind == blk::WRITE_ZEROES && random.below(2) == 0 { UNMAP } else { 0 };
        let (at, out) = match kind {
            blk::OUT => (first, filled(version).repeat(usize::try_from(count)?)),
            _ => (0, segment(first, u32::try_from(count)?, flags)),
        };
        submit(frontend, part, kind, at, &out)?;
        let is_hint = kind == blk::DISCARD;
        Ok(Op { sectors, version, is_hint, begun, ended: usize::MAX })
    }
}

fn submit(frontend: &mut Frontend, part: u16, kind: u32, sector: u64, out: &[u8]) -> Result<()> {
    let (header, status) = frontend.put_header(0, part, kind, sector)?;
    let data = DATA + u64::from(part) * SECTORS_MAX * SECTOR as u64;
    let mut chain = vec![Desc::readable(header, 16)];
    if !out.is_empty() {
        frontend.memory.write(data, out)?;
        chain.push(Desc::readable(data, u32::try_from(out.len())?));
    }
    chain.push(Desc::writable(status, 1));
    let ring = &mut frontend.rings[0];
    ring.put_chain(part * CHAIN, &chain);
    ring.submit(part * CHAIN)
}
