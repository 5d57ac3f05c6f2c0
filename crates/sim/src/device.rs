//! The simulated disk: the content that reads see, and the content that a loss of power leaves.

use iomem::fits;

use crate::content::{SECTOR, Value, bytes_of};
use crate::rng::Rng;

/// Sequence number of an event that has not happened.
const NEVER: u64 = u64::MAX;

struct Version {
    bytes: Box<[u8; SECTOR]>,
    /// The op that wrote the version.
    op: u64,
    /// The time of that op's answer.
    answered: u64,
    /// The op was answered with success.
    acknowledged: bool,
    /// A flush has failed to bring the version to stable storage. The kernel has considered it
    /// clean since.
    lost: bool,
}

/// The answer of an op that changes data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Error,
    Done,
    /// The data of the op is on stable storage.
    Durable,
}

/// Versions of a sector. The first is on stable storage, the last is visible to reads. A loss of
/// power may leave any of them.
struct Sector {
    versions: Vec<Version>,
}

pub(crate) struct Device {
    sectors: Vec<Sector>,
    /// The end of the file.
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

    /// Marks the versions of `op` as answered now.
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

    /// Brings to stable storage every version answered before `submitted`, and maybe later ones.
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

    /// Fails a flush or a durable write. In most sectors, answered versions then never reach stable
    /// storage, and later flushes skip them. Returns true if any version had been answered with
    /// success.
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

    /// Brings the present content to stable storage.
    pub(crate) fn settle(&mut self) {
        for sector in &mut self.sectors {
            let last = sector.versions.len() - 1;
            sector.versions.drain(..last);
            sector.versions[0].lost = false;
        }
    }

    /// Loses power: each sector keeps one of its versions.
    pub(crate) fn lose_power(&mut self, rng: &mut Rng) {
        for sector in &mut self.sectors {
            let chosen = rng.index(sector.versions.len());
            // Lost versions do not remain. The first version is never lost.
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
