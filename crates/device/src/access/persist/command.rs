//! PERSISTENT RESERVE OUT as it arrives: its CDB and its parameter list (SPC-4, section 6.16).
//!
//! RESERVATION CONFLICT takes precedence over errors of fields (SAM-5, section 5.3.3). So a request
//! stores the error of a field until the rules ask for that field.

use super::registry::{Key, PortName, ReservationType};
use crate::access::sense::Sense;

/// Bytes of the CDBs of PERSISTENT RESERVE IN and OUT.
pub(crate) const CDB_BYTES: usize = 10;

/// Bytes of the parameter list, and of the part before the TransportID of REGISTER AND MOVE.
const BASIC_LIST_BYTES: usize = 24;
/// The most bytes of a parameter list. No protocol's TransportID makes it longer.
const LIST_BYTES_MAX: usize = 512;
/// Bytes of the shortest TransportID, which is also that of ports here.
const TRANSPORT_ID_BYTES: usize = 24;
/// SAS Serial SCSI Protocol: its TransportID has a name of eight bytes.
const PROTOCOL_IDENTIFIER: u8 = 6;

/// RELATIVE TARGET PORT IDENTIFIER: each initiator sees the disk behind a target port of its own.
pub(crate) const TARGET_PORT: u16 = 1;

/// Offset in the CDB.
const PARAMETER_LIST_LENGTH: u16 = 5;
// Offsets in the parameter list.
const KEY: u16 = 0;
const SERVICE_ACTION_KEY: u16 = 8;
const BITS: u16 = 20;
// Offsets in the parameter list of REGISTER AND MOVE.
const MOVE_BITS: u16 = 17;
const MOVE_TARGET_PORT: u16 = 18;
const MOVE_LENGTH: u16 = 20;
const MOVE_TRANSPORT_ID: u16 = 24;
const MOVE_SAS_ADDRESS: u16 = 28;

// Bits of a parameter list. APTPL is the same bit in REGISTER AND MOVE.
const APTPL: u8 = 0;
const UNREG: u8 = 1;
const ALL_TG_PT: u8 = 2;
const SPEC_I_PT: u8 = 3;

/// The service action of a command (SPC-4, table 213).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServiceAction {
    Register,
    Reserve,
    Release,
    Clear,
    Preempt,
    PreemptAndAbort,
    RegisterAndIgnoreExistingKey,
    RegisterAndMove,
}

impl ServiceAction {
    fn from_cdb(cdb: &[u8; CDB_BYTES]) -> Result<Self, Sense> {
        Ok(match cdb[1] & 0x1f {
            0 => Self::Register,
            1 => Self::Reserve,
            2 => Self::Release,
            3 => Self::Clear,
            4 => Self::Preempt,
            5 => Self::PreemptAndAbort,
            6 => Self::RegisterAndIgnoreExistingKey,
            7 => Self::RegisterAndMove,
            _ => return Err(Sense::in_cdb(1, Some(4))),
        })
    }

    fn registers(self) -> bool {
        matches!(self, Self::Register | Self::RegisterAndIgnoreExistingKey)
    }
}

/// A PERSISTENT RESERVE OUT command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) action: ServiceAction,
    pub(super) scope: Result<(), Sense>,
    pub(super) reservation_type: Result<ReservationType, Sense>,
    /// RESERVATION KEY.
    pub(super) key: Option<Key>,
    /// SERVICE ACTION RESERVATION KEY.
    pub(super) action_key: Option<Key>,
    /// An error if a bit of the parameter list asks for something unsupported.
    pub(super) bits: Result<(), Sense>,
    /// APTPL, which registering service actions have.
    pub(super) aptpl: bool,
    /// UNREG, which REGISTER AND MOVE has.
    pub(super) unregisters: bool,
    /// The destination of REGISTER AND MOVE.
    pub(super) destination: Result<PortName, Sense>,
}

/// The sense for a service action that needs a key and has none.
pub(super) const NO_ACTION_KEY: Sense = Sense::in_list(SERVICE_ACTION_KEY, None);
/// The sense for a port to which no reservation can be moved.
pub(super) const NO_DESTINATION: Sense = Sense::in_list(MOVE_SAS_ADDRESS, None);
/// The sense for a move while there is no reservation.
pub(super) const NOTHING_TO_MOVE: Sense = Sense::in_cdb(1, Some(4));

/// The number of bytes of a command's parameter list.
///
/// # Errors
///
/// If there is no such service action, or none of its parameter lists has that length.
pub(crate) fn list_bytes(cdb: &[u8; CDB_BYTES]) -> Result<usize, Sense> {
    let action = ServiceAction::from_cdb(cdb)?;
    let bytes = u32::from_be_bytes(part(cdb, PARAMETER_LIST_LENGTH));
    let shortest = match action {
        ServiceAction::RegisterAndMove => BASIC_LIST_BYTES + TRANSPORT_ID_BYTES,
        _ => BASIC_LIST_BYTES,
    };
    match usize::try_from(bytes) {
        Ok(bytes) if (shortest..=LIST_BYTES_MAX).contains(&bytes) => Ok(bytes),
        _ => Err(Sense::LIST_LENGTH),
    }
}

impl Request {
    /// Parses a command. `persists` is true if APTPL is supported.
    ///
    /// # Errors
    ///
    /// If there is no such service action, or its parameter list is too long or too short.
    pub(super) fn parse(cdb: &[u8; CDB_BYTES], list: &[u8], persists: bool) -> Result<Self, Sense> {
        let action = ServiceAction::from_cdb(cdb)?;
        if list_bytes(cdb)? != list.len() || length_by_fields(action, list) != list.len() {
            return Err(Sense::LIST_LENGTH);
        }
        let moves = action == ServiceAction::RegisterAndMove;
        let at = if moves { MOVE_BITS } else { BITS };
        let has = |bit: u8| list[usize::from(at)] & (1 << bit) != 0;
        let refused = if !moves && has(SPEC_I_PT) {
            Some(SPEC_I_PT)
        } else if action.registers() && has(ALL_TG_PT) {
            Some(ALL_TG_PT)
        } else if (moves || action.registers()) && has(APTPL) && !persists {
            Some(APTPL)
        } else {
            None
        };
        Ok(Self {
            action,
            scope: if cdb[2] >> 4 == 0 { Ok(()) } else { Err(Sense::in_cdb(2, Some(7))) },
            reservation_type: ReservationType::from_code(cdb[2] & 0xf)
                .ok_or(Sense::in_cdb(2, Some(3))),
            key: Key::new(u64::from_be_bytes(part(list, KEY))),
            action_key: Key::new(u64::from_be_bytes(part(list, SERVICE_ACTION_KEY))),
            bits: refused.map_or(Ok(()), |bit| Err(Sense::in_list(at, Some(bit)))),
            aptpl: has(APTPL),
            unregisters: has(UNREG),
            destination: if moves { destination(list) } else { Err(NO_DESTINATION) },
        })
    }

    /// The type of the reservation that the command establishes.
    pub(super) fn established(&self) -> Result<ReservationType, Sense> {
        self.scope.and(self.reservation_type)
    }
}

/// The length of a parameter list by its own fields. All fields except the TransportIDs must exist.
fn length_by_fields(action: ServiceAction, list: &[u8]) -> usize {
    if action == ServiceAction::RegisterAndMove {
        let transport_id = usize::try_from(u32::from_be_bytes(part(list, MOVE_LENGTH)));
        transport_id.unwrap_or(usize::MAX).saturating_add(BASIC_LIST_BYTES)
    } else if list[usize::from(BITS)] & (1 << SPEC_I_PT) != 0 {
        // TransportIDs follow, and are refused with that bit.
        list.len()
    } else {
        BASIC_LIST_BYTES
    }
}

/// The port in the parameter list of REGISTER AND MOVE (SPC-4, sections 6.16.4 and 7.6.4).
fn destination(list: &[u8]) -> Result<PortName, Sense> {
    let [first, ..] = part::<1>(list, MOVE_TRANSPORT_ID);
    let bytes = list.len() - BASIC_LIST_BYTES;
    if u16::from_be_bytes(part(list, MOVE_TARGET_PORT)) != TARGET_PORT {
        return Err(Sense::in_list(MOVE_TARGET_PORT, None));
    }
    if first >> 6 != 0 {
        return Err(Sense::in_list(MOVE_TRANSPORT_ID, Some(7)));
    }
    if first & 0xf != PROTOCOL_IDENTIFIER {
        return Err(Sense::in_list(MOVE_TRANSPORT_ID, Some(3)));
    }
    if bytes != TRANSPORT_ID_BYTES {
        return Err(Sense::in_list(MOVE_LENGTH, None));
    }
    Ok(PortName(part(list, MOVE_SAS_ADDRESS)))
}

impl PortName {
    /// The TransportID of this port (SPC-4, section 7.6.4.7). Virtio defines no format of its own.
    pub(super) fn transport_id(self) -> [u8; TRANSPORT_ID_BYTES] {
        let mut bytes = [0; TRANSPORT_ID_BYTES];
        bytes[0] = PROTOCOL_IDENTIFIER;
        bytes[4..12].copy_from_slice(&self.0);
        bytes
    }
}

/// Copies `N` bytes, which must exist.
fn part<const N: usize>(bytes: &[u8], at: u16) -> [u8; N] {
    std::array::from_fn(|index| bytes[usize::from(at) + index])
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: PortName = PortName([0x31, 2, 3, 4, 5, 6, 7, 8]);

    fn cdb(action: u8, bytes: usize) -> [u8; CDB_BYTES] {
        [0x5f, action, 0x05, 0, 0, 0, 0, 0, u8::try_from(bytes).unwrap(), 0]
    }

    fn basic(bits: u8) -> Vec<u8> {
        let mut list = vec![0; 24];
        list[7] = 1;
        list[8] = 2;
        list[20] = bits;
        list
    }

    fn moving() -> Vec<u8> {
        let mut list = basic(24);
        list[20..24].copy_from_slice(&[0, 0, 0, 24]);
        list[19] = 1;
        list.extend(PORT.transport_id());
        list
    }

    fn parse(action: u8, list: &[u8]) -> Result<Request, Sense> {
        Request::parse(&cdb(action, list.len()), list, true)
    }

    #[test]
    fn fields_are_where_the_standard_has_them() {
        let request = parse(6, &basic(1)).unwrap();
        assert_eq!(request.action, ServiceAction::RegisterAndIgnoreExistingKey);
        assert_eq!(request.established(), Ok(ReservationType::WriteExclusiveRegistrantsOnly));
        assert_eq!(request.key, Key::new(1));
        assert_eq!(request.action_key, Key::new(2 << 56));
        assert!(request.aptpl && request.bits.is_ok());
        assert!(!parse(6, &basic(0)).unwrap().aptpl);
        let mut list = moving();
        assert_eq!(parse(7, &list).unwrap().destination, Ok(PORT));
        for (bits, expected) in [(0, [false, false]), (1, [true, false]), (2, [false, true])] {
            list[17] = bits;
            let request = parse(7, &list).unwrap();
            assert_eq!([request.aptpl, request.unregisters], expected);
        }
    }

    #[test]
    fn service_actions_that_are_not_supported_are_refused() {
        for action in 0..32 {
            let list = if action == 7 { moving() } else { basic(0) };
            let expected = if action < 8 { Ok(list.len()) } else { Err(Sense::in_cdb(1, Some(4))) };
            assert_eq!(list_bytes(&cdb(action, list.len())), expected);
            assert_eq!(parse(action, &list).err(), expected.err());
        }
    }

    #[test]
    fn lists_of_another_length_are_refused() {
        for action in 0..7 {
            for bytes in [0, 1, 23] {
                assert_eq!(list_bytes(&cdb(action, bytes)), Err(Sense::LIST_LENGTH));
            }
            let mut longer = basic(0);
            longer.extend([0; 4]);
            assert_eq!(parse(action, &longer), Err(Sense::LIST_LENGTH));
        }
        assert_eq!(list_bytes(&cdb(7, 47)), Err(Sense::LIST_LENGTH));
        let mut huge = cdb(0, 24);
        for bytes in [513u32, 1 << 16, u32::MAX] {
            huge[5..9].copy_from_slice(&bytes.to_be_bytes());
            assert_eq!(list_bytes(&huge), Err(Sense::LIST_LENGTH));
        }
        // The device has received less than the CDB announces.
        let refused = Request::parse(&cdb(0, 28), &basic(8), true);
        assert_eq!(refused, Err(Sense::LIST_LENGTH));
        for length in [0, 23, 20, 28, 255] {
            let mut list = moving();
            list[23] = length;
            assert_eq!(parse(7, &list), Err(Sense::LIST_LENGTH), "{length}");
        }
    }

    #[test]
    fn bits_that_are_not_supported_are_pointed_to_where_they_count() {
        let pointer = |action, list: &[u8], persists| {
            Request::parse(&cdb(action, list.len()), list, persists).unwrap().bits
        };
        for action in 0..7 {
            let registers = action == 0 || action == 6;
            let only =
                |bit, counts| if counts { Err(Sense::in_list(20, Some(bit))) } else { Ok(()) };
            assert_eq!(pointer(action, &basic(1 << 3), true), only(3, true));
            assert_eq!(pointer(action, &basic(1 << 2), true), only(2, registers));
            assert_eq!(pointer(action, &basic(1), false), only(0, registers));
            assert_eq!(pointer(action, &basic(1), true), Ok(()));
            let mut with_ports = basic(1 << 3);
            with_ports.extend([0, 0, 0, 24]);
            with_ports.extend(PORT.transport_id());
            assert_eq!(pointer(action, &with_ports, true), only(3, true));
        }
        let mut list = moving();
        list[17] = 1;
        assert_eq!(pointer(7, &list, true), Ok(()));
        assert_eq!(pointer(7, &list, false), Err(Sense::in_list(17, Some(0))));
    }

    #[test]
    fn scopes_and_types_that_do_not_exist_are_pointed_to() {
        for byte in 0..=255 {
            let mut cdb = cdb(1, 24);
            cdb[2] = byte;
            let request = Request::parse(&cdb, &basic(0), true).unwrap();
            let expected = match (byte >> 4, ReservationType::from_code(byte & 0xf)) {
                (1.., _) => Err(Sense::in_cdb(2, Some(7))),
                (0, None) => Err(Sense::in_cdb(2, Some(3))),
                (0, Some(known)) => Ok(known),
            };
            assert_eq!(request.established(), expected, "{byte:x}");
        }
    }

    #[test]
    fn ports_that_cannot_be_moved_to_are_pointed_to() {
        for (at, value, expected) in [
            (18, 1, Sense::in_list(18, None)),
            (19, 2, Sense::in_list(18, None)),
            (24, 0x46, Sense::in_list(24, Some(7))),
            (24, 0x05, Sense::in_list(24, Some(3))),
        ] {
            let mut list = moving();
            list[at] = value;
            assert_eq!(parse(7, &list).unwrap().destination, Err(expected), "{at}");
        }
        for excess in [1, 4] {
            let mut list = moving();
            list.extend(vec![0; excess]);
            list[23] += u8::try_from(excess).unwrap();
            let refused = parse(7, &list).unwrap().destination;
            assert_eq!(refused, Err(Sense::in_list(20, None)), "{excess}");
        }
    }
}
