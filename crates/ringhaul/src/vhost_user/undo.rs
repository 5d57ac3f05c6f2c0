//! What was so before a message, for when the message is refused.

use std::ops::Range;

use device::{Device, Negotiated};

use super::inflight::Inflight;
use super::ring::{RingSettings, RingState};

/// What rings and device were set to before a change. A refusal means that nothing has changed.
pub(super) struct Undo {
    pub(super) rings: Range<usize>,
    /// Where the requests of all rings were marked.
    pub(super) inflight: Box<Option<Inflight>>,
    settings: Vec<RingSettings>,
    /// Where the one ring would have gone on. Where others go on follows from what they did.
    base: Option<u16>,
    negotiated: Box<Negotiated>,
    rings_need_enable: bool,
}

impl Undo {
    /// As these rings are now, which do not run.
    pub(super) fn of(
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

    /// The same for a change of where the one ring continues.
    pub(super) fn with_base(self, base: u16) -> Self {
        Self { base: Some(base), ..self }
    }

    /// Makes it so again, while none of the rings runs. Returns whether rings need to be enabled.
    pub(super) fn restore(self, all: &mut [RingState], device: &Device) -> bool {
        for (ring, settings) in all[self.rings].iter_mut().zip(self.settings) {
            ring.settings = settings;
            ring.next_avail = self.base.unwrap_or(ring.next_avail);
        }
        device.restore(&self.negotiated);
        self.rings_need_enable
    }
}
