//! How much of an engine's room each lane may have.

use std::ops::{Index, IndexMut};

use crate::config::EngineKind;
use iomem::fits;

/// The most ops of a lane that are its own.
const OWN_MAX: u32 = 64;
/// A lane may have this many times what would stay free for all.
const PART: u32 = 4;

/// How the room of an engine is shared out.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Shares {
    /// What each lane has for itself.
    pub(super) own: u32,
    /// What all have together.
    common: u32,
    /// What is taken of that.
    pub(super) taken: u32,
}

impl Shares {
    /// The shares of `lanes` lanes, and room for one that is to come.
    pub(super) fn of(capacity: u32, lanes: usize) -> Self {
        let lanes = fits::<_, u32>(lanes, "a count of disks").saturating_add(1);
        let own = (capacity / lanes.saturating_mul(2)).clamp(1, OWN_MAX);
        Self { own, common: capacity.saturating_sub(own.saturating_mul(lanes)), taken: 0 }
    }

    pub(super) fn beyond(&self, units: u32) -> u32 {
        units.saturating_sub(self.own)
    }

    pub(super) fn allow(&self, before: u32, after: u32) -> bool {
        let (mine, more) = (self.beyond(after), self.beyond(after) - self.beyond(before));
        let free = self.common.saturating_sub(self.taken);
        mine == 0 || (more <= free && mine <= free.saturating_mul(PART))
    }

    /// A lane has `after` in place of `before`, which is less.
    pub(super) fn takes(&mut self, before: u32, after: u32) {
        self.taken += self.beyond(after) - self.beyond(before);
    }

    /// A lane has `after` in place of `before`, which was more.
    pub(super) fn gets_back(&mut self, before: u32, after: u32) {
        self.taken -= self.beyond(before) - self.beyond(after);
    }
}

/// One for each engine.
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
