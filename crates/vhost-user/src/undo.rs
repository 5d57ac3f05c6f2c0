//! The settings before a message, to be restored if the message is refused.

use std::ops::Range;

use device::{Device, Negotiated};

use super::inflight::Inflight;
use super::ring::{RingSettings, RingState};

/// The settings of rings and device before a change. A refused message changes nothing.
pub(super) struct Undo {
    pub(super) rings: Range<usize>,
    /// The inflight region of all rings.
    pub(super) inflight: Box<Option<Inflight>>,
    settings: Vec<RingSettings>,
    /// The next avail entry of the one ring. That of other rings follows from the chains that they
    /// popped.
    base: Option<u16>,
    negotiated: Box<Negotiated>,
    rings_need_enable: bool,
}

impl Undo {
    /// Records the settings of these rings, which do not run.
    pub(super) fn new(
        all: &[RingState],
        rings: Range<usize>,
        device: &Device,
        inflight: Option<&Inflight>,
        rings_need_enable: bool,
    ) -> Self {
        let settings = all[rings.clone()].iter().map(|ring| ring.settings.clone()).collect();
        let negotiated = Box::new(device.negotiated());
        let inflight = Box::new(inflight.cloned());
        Self { rings, inflight, settings, base: None, negotiated, rings_need_enable }
    }

    /// Records also the next avail entry of the one ring, which the change replaces.
    pub(super) fn with_base(self, base: u16) -> Self {
        Self { base: Some(base), ..self }
    }

    /// Restores the settings, while none of the rings runs. Returns true if rings need to be
    /// enabled.
    pub(super) fn restore(self, all: &mut [RingState], device: &Device) -> bool {
        for (ring, settings) in all[self.rings].iter_mut().zip(self.settings) {
            ring.settings = settings;
            ring.next_avail = self.base.unwrap_or(ring.next_avail);
        }
        device.restore(&self.negotiated);
        self.rings_need_enable
    }
}
