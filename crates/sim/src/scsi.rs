//! virtio-scsi devices: commands of their guests, and the answers that they must get (virtio 1.3,
//! section 5.6; SAM-5, SPC-4, SBC-3). The product shares none of this code, or it would share its
//! mistakes.

pub(crate) mod attentions;
pub(crate) mod command;
pub(crate) mod events;
pub(crate) mod function;
pub(crate) mod reservations;
pub(crate) mod shared;
pub(crate) mod unit;

use device::unit_address::UnitAddress;

pub(crate) const CONTROL_QUEUE: usize = 0;
pub(crate) const EVENT_QUEUE: usize = 1;

/// Bytes of a response before the sense data, and of the sense data.
pub(crate) const RESPONSE: usize = 12;
pub(crate) const SENSE: usize = 96;

/// A sense code and its qualifier.
pub(crate) type Code = [u8; 2];

pub(crate) const POWER_ON: Code = [0x29, 0x00];
pub(crate) const UNIT_RESET: Code = [0x29, 0x03];
pub(crate) const NEXUS_LOST: Code = [0x29, 0x07];
pub(crate) const MODE_CHANGED: Code = [0x2a, 0x01];
pub(crate) const COMMANDS_CLEARED: Code = [0x2f, 0x00];
pub(crate) const UNITS_CHANGED: Code = [0x3f, 0x0e];
pub(crate) const CAPACITY_CHANGED: Code = [0x2a, 0x09];

/// Sense keys.
pub(crate) const UNIT_ATTENTION: u8 = 6;

/// The answer to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Good,
    Conflict,
    Busy,
    /// CHECK CONDITION with this key and code.
    Check(u8, Code),
    /// A response of virtio-scsi other than OK.
    Response(u8),
}

/// Responses of virtio-scsi.
pub(crate) const OVERRUN: u8 = 1;
pub(crate) const ABORTED: u8 = 2;
pub(crate) const BAD_TARGET: u8 = 3;
pub(crate) const RESET: u8 = 4;
pub(crate) const FAILURE: u8 = 9;

impl Outcome {
    /// Decodes a response.
    pub(crate) fn decode(response: &[u8]) -> Result<Self, String> {
        let [s0, s1, s2, s3, _, _, _, _, _, _, status, code, sense @ ..] = response else {
            return Err("the response is incomplete".into());
        };
        let sense_bytes = u32::from_le_bytes([*s0, *s1, *s2, *s3]);
        let outcome = match (*code, *status) {
            (0, 0) => Self::Good,
            (0, 0x18) => Self::Conflict,
            (0, 8) => Self::Busy,
            (0, 2) => match sense {
                [0x70 | 0xf0, _, key, _, _, _, _, _, _, _, _, _, asc, qualifier, ..] => {
                    Self::Check(*key, [*asc, *qualifier])
                }
                _ => return Err(format!("sense data of unknown format: {:x?}", &sense[..18])),
            },
            (code, 0) if code != 0 => Self::Response(code),
            (code, status) => return Err(format!("response {code}, status {status:#x}")),
        };
        let has_sense = matches!(outcome, Self::Check(..));
        let is_clean = sense.iter().all(|byte| *byte == 0);
        if (sense_bytes > 0) != has_sense || !has_sense && !is_clean {
            return Err(format!("{sense_bytes} bytes of sense data with {outcome:?}"));
        }
        Ok(outcome)
    }
}

/// The bytes that name a unit in requests, always by flat space addressing.
pub(crate) fn lun_bytes(unit: UnitAddress) -> [u8; 8] {
    let [l0, l1] = unit.lun.to_be_bytes();
    [1, unit.target, 0x40 | l0, l1, 0, 0, 0, 0]
}
