//! The share of each lane in the room of an engine.

use std::ops::{Index, IndexMut};

use crate::config::EngineKind;
use iomem::fits;

/// The most units that are guaranteed to a lane.
const GUARANTEED_MAX: u32 = 64;
/// A lane may have this many times the common room that is free.
const COMMON_FACTOR: u32 = 4;

/// The division of an engine's room.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Shares {
    /// The room of each lane alone.
    pub(super) guaranteed: u32,
    /// The room that all lanes share.
    common: u32,
    /// The taken part of the common room.
    pub(super) taken: u32,
}

impl Shares {
    /// Divides the room among `lanes` lanes and one that is to come.
    pub(super) fn new(capacity: u32, lanes: usize) -> Self {
        let lanes = fits::<_, u32>(lanes, "a count of disks").saturating_add(1);
        let guaranteed = (capacity / lanes.saturating_mul(2)).clamp(1, GUARANTEED_MAX);
        Self {
            guaranteed,
            common: capacity.saturating_sub(guaranteed.saturating_mul(lanes)),
            taken: 0,
        }
    }

    pub(super) fn common_part(&self, units: u32) -> u32 {
        units.saturating_sub(self.guaranteed)
    }

    pub(super) fn have_room(&self, before: u32, after: u32) -> bool {
        let (mine, more) =
            (self.common_part(after), self.common_part(after) - self.common_part(before));
        let free = self.common.saturating_sub(self.taken);
        mine == 0 || (more <= free && mine <= free.saturating_mul(COMMON_FACTOR))
    }

    /// Counts a lane that grows from `before` to `after`.
    pub(super) fn charge(&mut self, before: u32, after: u32) {
        self.taken += self.common_part(after) - self.common_part(before);
    }

    /// Counts a lane that shrinks from `before` to `after`.
    pub(super) fn release(&mut self, before: u32, after: u32) {
        self.taken -= self.common_part(before) - self.common_part(after);
    }
}

/// A value for each engine.
#[derive(Debug, Default)]
pub(super) struct ByEngine<T>([T; 3]);

impl<T> Index<EngineKind> for ByEngine<T> {
    type Output = T;

    #[inline]
    fn index(&self, engine: EngineKind) -> &T {
        &self.0[engine as usize]
    }
}

impl<T> IndexMut<EngineKind> for ByEngine<T> {
    #[inline]
    fn index_mut(&mut self, engine: EngineKind) -> &mut T {
        &mut self.0[engine as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that comes later has more than its guaranteed part at once.
    #[test]
    fn a_busy_disk_leaves_a_part_of_the_common_room() {
        let mut shares = Shares { guaranteed: 4, common: 40, taken: 0 };
        let grow = |shares: &mut Shares| {
            let mut units = 0;
            while shares.have_room(units, units + 1) {
                shares.charge(units, units + 1);
                units += 1;
            }
            units
        };
        let all = [(); 4].map(|()| grow(&mut shares));
        assert_eq!(all, [36, 11, 5, 4], "a lane may have four times the free room");
        shares.release(36, 0);
        assert_eq!(shares.taken, 8);
    }
}
