//! Events of a device: each is reported once, in the order of the changes.

use std::collections::VecDeque;

use device::unit_address::UnitAddress;

/// The least number of events that a device keeps while it has no buffer for them.
const KEPT: usize = 64;

/// A change of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitChange {
    Added,
    Removed,
    CapacityChanged,
}

pub(crate) const EVENT_BYTES: usize = 16;

const MISSED: u32 = 0x8000_0000;

#[derive(Debug)]
struct Expected {
    bytes: [u8; EVENT_BYTES],
    /// The device may have dropped the event.
    is_optional: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Events {
    expected: VecDeque<Expected>,
    /// More events have waited than a device has to keep.
    may_miss: bool,
}

fn bytes_of(what: UnitChange, unit: UnitAddress) -> [u8; EVENT_BYTES] {
    let (kind, reason): (u32, u32) = match what {
        UnitChange::Added => (1, 1),
        UnitChange::Removed => (1, 2),
        UnitChange::CapacityChanged => (3, 0x092a),
    };
    let [l0, l1] = unit.lun.to_be_bytes();
    let flat = if unit.lun < 256 { 0 } else { 0x40 };
    let mut bytes = [0; EVENT_BYTES];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&[1, unit.target, flat | l0, l1]);
    bytes[12..].copy_from_slice(&reason.to_le_bytes());
    bytes
}

impl Events {
    /// Notes that a change has happened.
    pub(crate) fn expect(&mut self, what: UnitChange, unit: UnitAddress) {
        self.may_miss |= self.expected.len() >= KEPT;
        let is_optional = self.expected.len() >= KEPT;
        self.expected.push_back(Expected { bytes: bytes_of(what, unit), is_optional });
    }

    /// Notes that another driver comes. It receives no earlier events except for `reported` events,
    /// which were reported already.
    pub(crate) fn forget(&mut self, reported: usize) {
        self.expected.truncate(reported);
    }

    /// True if an event must still be reported.
    pub(crate) fn is_due(&self) -> bool {
        self.expected.iter().any(|expected| !expected.is_optional)
    }

    /// Checks an event. `may_be_empty`: the buffer may have been returned without one.
    pub(crate) fn take(&mut self, event: &[u8], may_be_empty: bool) -> Result<(), String> {
        let mut event: [u8; EVENT_BYTES] =
            event.try_into().map_err(|_| format!("an event of {} bytes", event.len()))?;
        if event[3] & MISSED.to_le_bytes()[3] != 0 {
            if !std::mem::take(&mut self.may_miss) {
                return Err("events are said to be missed, and none was".into());
            }
            event[3] &= !MISSED.to_le_bytes()[3];
        } else if event == [0; EVENT_BYTES] && may_be_empty {
            return Ok(());
        }
        if event == [0; EVENT_BYTES] {
            return Err("an event that says nothing".into());
        }
        while let Some(expected) = self.expected.pop_front() {
            if expected.bytes == event {
                return Ok(());
            }
            if !expected.is_optional {
                return Err(format!("event {event:x?}, not {:x?}", expected.bytes));
            }
        }
        Err(format!("event {event:x?}, which has not happened"))
    }
}
