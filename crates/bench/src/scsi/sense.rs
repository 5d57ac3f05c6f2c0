//! Sense data in both of its formats (SPC-5, section 4.4), and its description.

#![forbid(unsafe_code)]

use std::fmt;

/// The decoded content of sense data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sense {
    key: u8,
    asc: u8,
    ascq: u8,
    /// The INFORMATION field: the failed block after a medium error.
    information: Option<u64>,
    /// The wrong byte in the CDB or in the parameters.
    field: Option<Field>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Field {
    in_cdb: bool,
    byte: u16,
}

/// Sense keys.
const NOT_READY: u8 = 0x2;
const MEDIUM_ERROR: u8 = 0x3;
const HARDWARE_ERROR: u8 = 0x4;
const ILLEGAL_REQUEST: u8 = 0x5;
const UNIT_ATTENTION: u8 = 0x6;
const DATA_PROTECT: u8 = 0x7;
const MISCOMPARE: u8 = 0xe;

const KEYS: [&str; 16] = [
    "NO SENSE",
    "RECOVERED ERROR",
    "NOT READY",
    "MEDIUM ERROR",
    "HARDWARE ERROR",
    "ILLEGAL REQUEST",
    "UNIT ATTENTION",
    "DATA PROTECT",
    "BLANK CHECK",
    "VENDOR SPECIFIC",
    "COPY ABORTED",
    "ABORTED COMMAND",
    "RESERVED",
    "VOLUME OVERFLOW",
    "MISCOMPARE",
    "COMPLETED",
];

impl Sense {
    /// Parses sense data; `None` if it is too short or its format is unknown.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        match bytes.first()? & 0x7f {
            0x70 | 0x71 => Self::parse_fixed(bytes),
            0x72 | 0x73 => Self::parse_descriptors(bytes),
            _ => None,
        }
    }

    fn parse_fixed(bytes: &[u8]) -> Option<Self> {
        const VALID: u8 = 0x80;
        let at = |index: usize| bytes.get(index).copied().unwrap_or(0);
        let information = u32::from_be_bytes([at(3), at(4), at(5), at(6)]).into();
        let key = bytes.get(2)? & 0xf;
        Some(Self {
            key,
            asc: at(12),
            ascq: at(13),
            information: (at(0) & VALID != 0).then_some(information),
            field: Field::parse(key, [at(15), at(16), at(17)]),
        })
    }

    fn parse_descriptors(bytes: &[u8]) -> Option<Self> {
        const INFORMATION: u8 = 0x00;
        const SENSE_KEY_SPECIFIC: u8 = 0x02;
        let [_, key, asc, ascq] = *bytes.first_chunk()?;
        let mut sense = Self { key: key & 0xf, asc, ascq, information: None, field: None };
        let mut rest = bytes.get(8..).unwrap_or_default();
        while let [kind, len, body @ ..] = rest {
            let (body, after) = body.split_at_checked((*len).into()).unwrap_or((body, &[]));
            match (*kind, body) {
                (INFORMATION, [valid, _, value @ ..]) if valid & 0x80 != 0 => {
                    sense.information = value.first_chunk().map(|value| u64::from_be_bytes(*value));
                }
                (SENSE_KEY_SPECIFIC, [_, _, specific @ ..]) => {
                    let specific = specific.first_chunk().copied();
                    sense.field = specific.and_then(|bytes| Field::parse(sense.key, bytes));
                }
                _ => {}
            }
            rest = after;
        }
        Some(sense)
    }

    /// Returns true if the state of the unit has changed since its last command. A unit reports
    /// this once.
    pub(crate) fn is_unit_attention(&self) -> bool {
        self.key == UNIT_ATTENTION
    }

    /// Returns true if the unit will become ready without help.
    pub(crate) fn is_becoming_ready(&self) -> bool {
        self.key == NOT_READY && (self.asc, self.ascq) == (0x04, 0x01)
    }

    /// The name of the condition in the standard.
    fn condition_name(&self) -> Option<&'static str> {
        Some(match (self.asc, self.ascq) {
            (0x04, 0x00) => "logical unit not ready, cause not reportable",
            (0x04, 0x01) => "logical unit is in process of becoming ready",
            (0x04, 0x02) => "logical unit not ready, initializing command required",
            (0x04, 0x03) => "logical unit not ready, manual intervention required",
            (0x05, 0x00) => "logical unit does not respond to selection",
            (0x0c, _) => "write error",
            (0x11, _) => "unrecovered read error",
            (0x1a, 0x00) => "parameter list length error",
            (0x1d, 0x00) => "miscompare during verify operation",
            (0x20, 0x00) => "invalid command operation code",
            (0x21, 0x00) => "logical block address out of range",
            (0x24, 0x00) => "invalid field in CDB",
            (0x25, 0x00) => "logical unit not supported",
            (0x26, 0x00) => "invalid field in parameter list",
            (0x27, 0x07) => "space allocation failed write protect",
            (0x27, _) => "write protected",
            (0x28, 0x00) => "not ready to ready change, medium may have changed",
            (0x29, 0x07) => "I_T nexus loss occurred",
            (0x29, _) => "power on, reset, or bus device reset occurred",
            (0x2a, 0x01) => "mode parameters changed",
            (0x2a, 0x03) => "reservations preempted",
            (0x2a, 0x04) => "reservations released",
            (0x2a, 0x05) => "registrations preempted",
            (0x2a, 0x09) => "capacity data has changed",
            (0x2a, _) => "parameters changed",
            (0x2c, _) => "command sequence error",
            (0x2f, _) => "commands cleared by another initiator",
            (0x38, 0x07) => "thin provisioning soft threshold reached",
            (0x3a, _) => "medium not present",
            (0x3f, 0x03) => "INQUIRY data has changed",
            (0x3f, 0x0e) => "REPORTED LUNS data has changed",
            (0x44, _) => "internal target failure",
            (0x4e, 0x00) => "overlapped commands attempted",
            (0x55, _) => "system resource failure",
            _ => return None,
        })
    }

    /// The remedy, unless the name makes it plain.
    fn advice(&self) -> Option<&'static str> {
        Some(match (self.key, self.asc, self.ascq) {
            (_, 0x27, 0x07) => "the disk behind the unit is full",
            (DATA_PROTECT, ..) => "the unit is read-only",
            (UNIT_ATTENTION, 0x2a, 0x09) | (_, 0x21, _) => {
                "the unit may have been resized: start again"
            }
            (UNIT_ATTENTION, ..) => "the unit was reset or changed while it was driven",
            (ILLEGAL_REQUEST, 0x20, _) => "the device does not have this command",
            (ILLEGAL_REQUEST, 0x24, _) => "it may be a larger transfer than the unit takes",
            (_, 0x25 | 0x3a, _) => "the unit may have been removed",
            (MEDIUM_ERROR | HARDWARE_ERROR, ..) => "the disk behind the unit fails",
            _ => return None,
        })
    }
}

impl fmt::Display for Sense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, asc, ascq, .. } = *self;
        f.write_str(KEYS[usize::from(key)])?;
        if let Some(condition) = self.condition_name() {
            write!(f, ": {condition}")?;
        }
        write!(f, " (key {key:X}h, asc {asc:02X}h, ascq {ascq:02X}h")?;
        if let Some(information) = self.information
            && [MEDIUM_ERROR, HARDWARE_ERROR, ILLEGAL_REQUEST, MISCOMPARE].contains(&key)
        {
            write!(f, ", at block {information}")?;
        }
        if let Some(Field { in_cdb, byte }) = self.field {
            write!(f, ", byte {byte} of the {}", if in_cdb { "CDB" } else { "parameters" })?;
        }
        f.write_str(")")?;
        self.advice().map_or(Ok(()), |advice| write!(f, "; {advice}"))
    }
}

impl Field {
    /// Parses the sense key specific bytes, which are a field pointer with ILLEGAL REQUEST.
    fn parse(key: u8, [flags, high, low]: [u8; 3]) -> Option<Self> {
        const VALID: u8 = 0x80;
        const IN_CDB: u8 = 0x40;
        (key == ILLEGAL_REQUEST && flags & VALID != 0)
            .then(|| Self { in_cdb: flags & IN_CDB != 0, byte: u16::from_be_bytes([high, low]) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(bytes: &[u8]) -> String {
        Sense::parse(bytes).map_or_else(|| "none".to_owned(), |sense| sense.to_string())
    }

    #[test]
    fn both_sense_formats_give_the_same_text() {
        let fixed = [0xf0, 0, 3, 0, 0, 0x10, 0x20, 10, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0];
        let mut described = vec![0x72, 3, 0x11, 0, 0, 0, 0, 12];
        described.extend([0, 10, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x10, 0x20]);
        let expected = "MEDIUM ERROR: unrecovered read error (key 3h, asc 11h, ascq 00h, at block \
                        4128); the disk behind the unit fails";
        assert_eq!(words(&fixed), expected);
        assert_eq!(words(&described), expected);
    }

    #[test]
    fn a_field_pointer_names_its_byte() {
        let fixed = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xc0, 0, 7];
        assert!(words(&fixed).contains("byte 7 of the CDB"), "{}", words(&fixed));
        let described = [0x72, 5, 0x26, 0, 0, 0, 0, 8, 2, 6, 0, 0, 0x80, 1, 0, 0];
        assert!(words(&described).contains("byte 256 of the parameters"), "{}", words(&described));
    }

    #[test]
    fn known_conditions_come_with_advice() {
        for (key, asc, ascq, word) in [
            (7, 0x27, 7, "full"),
            (7, 0x27, 0, "read-only"),
            (6, 0x2a, 9, "resized"),
            (6, 0x29, 0, "reset"),
            (5, 0x20, 0, "does not have this command"),
        ] {
            let text = words(&[0x72, key, asc, ascq, 0, 0, 0, 0]);
            assert!(text.contains(word), "{text}");
        }
        let unknown = words(&[0x72, 0xb, 0x99, 0x01, 0, 0, 0, 0]);
        assert_eq!(unknown, "ABORTED COMMAND (key Bh, asc 99h, ascq 01h)");
    }

    #[test]
    fn transient_states_are_recognised() {
        let sense = |key, asc, ascq| Sense::parse(&[0x72, key, asc, ascq, 0, 0, 0, 0]).unwrap();
        assert!(sense(6, 0x29, 0).is_unit_attention());
        assert!(sense(2, 4, 1).is_becoming_ready());
        assert!(!sense(2, 4, 3).is_becoming_ready() && !sense(2, 4, 1).is_unit_attention());
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_parsed(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            words(&bytes);
        }
    }
}
