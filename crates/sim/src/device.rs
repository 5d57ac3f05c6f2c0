//! The simulated disk: what reads see, and what a loss of power would leave.

use iomem::fits;

use crate::content::{SECTOR, Value, bytes_of};
use crate::rng::Rng;

/// Sequence number of something that has not happened.
const NEVER: u64 = u64::MAX;

struct Version {
    bytes: Box<[u8; SECTOR]>,
    /// The op that wrote it.
    op: u64,
    /// When that op was answered.
    answered: u64,
    /// It was answered with success.
    acknowledged: bool,
    /// A flush has failed to bring it to stable storage. The kernel takes it for clean since.
    lost: bool,
}

/// How an op that changes data is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Error,
    Done,
    /// What it wrote is on stable storage.
    Durable,
}

/// The first version is on stable storage, the last is what reads see. Any of them may be what is
/// left after a loss of power.
struct Sector {
    versions: Vec<Version>,
}

pub(crate) struct Device {
    sectors: Vec<Sector>,
    /// Where the file ends.
    pub(crate) end_sector: u64,
}

impl Device {
    /// A disk with `initial` in all sectors before `end_sector`, where the file ends.
    pub(crate) fn new(sectors: u64, end_sector: u64, initial: Value) -> Self {
        let sector = |sector| {
            let value = if sector < end_sector { initial } else { Value::Zero };
            let bytes = Box::new(bytes_of(value, sector));
            Sector {
                versions: vec![Version {
                    bytes,
                    op: 0,
                    answered: 0,
                    acknowledged: true,
                    lost: false,
                }],
            }
        };
        Self { sectors: (0..sectors).map(sector).collect(), end_sector }
    }

    pub(crate) fn content(&self, sector: u64) -> &[u8; SECTOR] {
        let versions = &self.sectors[index(sector)].versions;
        &versions[versions.len() - 1].bytes
    }

    /// Reads from byte `offset` on.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        each_sector(offset, bytes.len(), |sector, within, at, len| {
            bytes[at..at + len].copy_from_slice(&self.content(sector)[within..within + len]);
        });
    }

    /// Writes at byte `offset`, on behalf of `op`.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8], op: u64) {
        each_sector(offset, bytes.len(), |sector, within, at, len| {
            let mut content = Box::new(*self.content(sector));
            content[within..within + len].copy_from_slice(&bytes[at..at + len]);
            let versions = &mut self.sectors[index(sector)].versions;
            versions.push(Version {
                bytes: content,
                op,
                answered: NEVER,
                acknowledged: false,
                lost: false,
            });
            self.end_sector = self.end_sector.max(sector + 1);
        });
    }

    /// `op` is answered now.
    pub(crate) fn answered(&mut self, offset: u64, len: usize, op: u64, now: u64, how: Answer) {
        each_sector(offset, len, |sector, _, _, _| {
            let versions = &mut self.sectors[index(sector)].versions;
            versions.iter_mut().filter(|v| v.op == op).for_each(|version| {
                version.answered = now;
                version.acknowledged = how != Answer::Error;
            });
            if how == Answer::Durable
                && let Some(last) = versions.iter().rposition(|v| v.op == op)
            {
                versions.drain(..last);
            }
        });
    }

    /// Brings to stable storage what was answered before `submitted`, and maybe more.
    pub(crate) fn flush(&mut self, submitted: u64, rng: &mut Rng) {
        for sector in &mut self.sectors {
            let versions = &mut sector.versions;
            let is_done = |v: &Version| !v.lost && v.answered < submitted;
            let must = versions.iter().rposition(is_done).unwrap_or(0);
            let most = must + rng.index(versions.len() - must);
            let last = versions[must..=most].iter().rposition(|v| !v.lost).unwrap_or(0);
            versions.drain(..must + last);
        }
    }

    /// A flush fails, or a write that was to be on stable storage: of most sectors, what was
    /// answered will never come there, and later flushes have nothing to do with it. Returns
    /// whether there was anything that was answered with success.
    pub(crate) fn fail_flush(&mut self, rng: &mut Rng) -> bool {
        let mut any = false;
        for sector in &mut self.sectors {
            let loses = rng.chance(800);
            let answered = sector.versions.iter_mut().skip(1).filter(|v| v.answered != NEVER);
            answered.for_each(|version| {
                any |= version.acknowledged;
                version.lost |= loses;
            });
        }
        any
    }

    /// Whatever is there is on stable storage.
    pub(crate) fn settle(&mut self) {
        for sector in &mut self.sectors {
            let last = sector.versions.len() - 1;
            sector.versions.drain(..last);
            sector.versions[0].lost = false;
        }
    }

    /// The power goes: of each sector some version is left.
    pub(crate) fn lose_power(&mut self, rng: &mut Rng) {
        for sector in &mut self.sectors {
            let chosen = rng.index(sector.versions.len());
            // Of what was lost, nothing is left; the first version never was.
            let left = sector.versions[..=chosen].iter().rposition(|v| !v.lost).unwrap_or(0);
            sector.versions.drain(..left);
            sector.versions.truncate(1);
        }
    }
}

/// Calls `visit(sector, offset within, bytes before, bytes)` for each sector of a range of bytes.
fn each_sector(offset: u64, len: usize, mut visit: impl FnMut(u64, usize, usize, usize)) {
    let mut at = 0;
    while at < len {
        let byte = offset + at as u64;
        let within = index(byte % SECTOR as u64);
        let part = (SECTOR - within).min(len - at);
        visit(byte / SECTOR as u64, within, at, part);
        at += part;
    }
}

fn index(value: u64) -> usize {
    fits(value, "a size")
}
