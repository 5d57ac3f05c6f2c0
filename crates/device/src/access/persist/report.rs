//! PERSISTENT RESERVE IN (SPC-4, section 6.15).

use super::command::{CDB_BYTES, TARGET_PORT};
use super::registry::{PortName, Registry, Reservation, ReservationType};
use crate::access::sense::Sense;

/// LU_SCOPE, the only SCOPE.
const LU_SCOPE: u8 = 0;
/// TMV: the mask of types is valid.
const TYPE_MASK_VALID: u8 = 1 << 7;
/// ALLOW COMMANDS, 011b: TEST UNIT READY is always allowed. Where writing is exclusive, so are MODE
/// SENSE and the commands that the standard lists with it.
const ALLOW_COMMANDS: u8 = 0b011 << 4;

/// Returns all data of a command. `persists` is true if APTPL is supported.
///
/// # Errors
///
/// If there is no such service action.
pub(super) fn data(
    cdb: &[u8; CDB_BYTES],
    registry: &Registry,
    generation: u32,
    persists: bool,
) -> Result<Vec<u8>, Sense> {
    let with_header = |body: Vec<u8>| {
        let bytes: u32 = iomem::fits(body.len(), "bytes of persistent reservations");
        [&generation.to_be_bytes()[..], &bytes.to_be_bytes(), &body].concat()
    };
    match cdb[1] & 0x1f {
        0 => Ok(with_header(keys(registry))),
        1 => Ok(with_header(reservation(registry))),
        2 => Ok(capabilities(registry, persists).to_vec()),
        3 => Ok(with_header(full_status(registry))),
        _ => Err(Sense::in_cdb(1, Some(4))),
    }
}

/// READ KEYS.
fn keys(registry: &Registry) -> Vec<u8> {
    let registrations = registry.registrations().iter();
    registrations.flat_map(|registration| registration.key.get().to_be_bytes()).collect()
}

/// READ RESERVATION.
fn reservation(registry: &Registry) -> Vec<u8> {
    let Some(held) = registry.reservation else { return Vec::new() };
    // The key is zero if all registrants hold the reservation.
    let key = held.holder.and_then(|holder| registry.key_of(holder));
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&key.map_or(0, Into::into).to_be_bytes());
    bytes[13] = scope_and_type(held);
    bytes.to_vec()
}

/// REPORT CAPABILITIES. There is no support for replacing lost reservations (RLR_C), for RESERVE
/// and RELEASE (CRH), for lists of initiator ports (SIP_C) and for all target ports (ATP_C).
fn capabilities(registry: &Registry, persists: bool) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[1] = 8;
    bytes[2] = u8::from(persists);
    bytes[3] = TYPE_MASK_VALID | ALLOW_COMMANDS | u8::from(registry.aptpl);
    let mask = ReservationType::ALL.iter().fold(0u16, |mask, known| mask | 1 << known.code());
    // The lower types are in the byte that comes first.
    bytes[4..6].copy_from_slice(&mask.to_le_bytes());
    bytes
}

/// READ FULL STATUS.
fn full_status(registry: &Registry) -> Vec<u8> {
    let mut bytes = Vec::new();
    for registration in registry.registrations() {
        let held = registry.reservation.filter(|_| registry.is_holder(registration.port));
        bytes.extend(registration.key.get().to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend([u8::from(held.is_some()), held.map_or(0, scope_and_type)]);
        bytes.extend([0; 4]);
        bytes.extend(TARGET_PORT.to_be_bytes());
        bytes.extend(transport_id(registration.port));
    }
    bytes
}

/// A TransportID after its length.
fn transport_id(port: PortName) -> Vec<u8> {
    let id = port.transport_id();
    let bytes: u32 = iomem::fits(id.len(), "bytes of a TransportID");
    [&bytes.to_be_bytes()[..], &id].concat()
}

fn scope_and_type(held: Reservation) -> u8 {
    LU_SCOPE << 4 | held.reservation_type.code()
}

#[cfg(test)]
mod tests {
    use super::super::registry::Key;
    use super::*;

    const PORTS: [PortName; 2] = [PortName([0x31; 8]), PortName([0x32; 8])];

    fn registry(reservation_type: Option<ReservationType>) -> Registry {
        let mut registry = Registry::default();
        for (port, key) in PORTS.into_iter().zip([0x0102_0304_0506_0708, 9]) {
            registry.set_key(port, Key::new(key).unwrap()).unwrap();
        }
        registry.reservation =
            reservation_type.map(|reservation_type| Reservation::new(reservation_type, PORTS[1]));
        registry
    }

    fn read(service_action: u8, registry: &Registry) -> Vec<u8> {
        let cdb = [0x5e, service_action, 0, 0, 0, 0, 0, 0, 8, 0];
        data(&cdb, registry, 0x0a0b_0c0d, true).unwrap()
    }

    #[test]
    fn keys_are_listed_with_their_whole_length() {
        assert_eq!(read(0, &Registry::default()), [0xa, 0xb, 0xc, 0xd, 0, 0, 0, 0]);
        let expected = [
            &[0xa, 0xb, 0xc, 0xd, 0, 0, 0, 16][..],
            &[1, 2, 3, 4, 5, 6, 7, 8],
            &[0, 0, 0, 0, 0, 0, 0, 9],
        ];
        assert_eq!(read(0, &registry(None)), expected.concat());
    }

    #[test]
    fn the_reservation_has_the_key_of_its_holder_or_none() {
        assert_eq!(read(1, &registry(None)), [0xa, 0xb, 0xc, 0xd, 0, 0, 0, 0]);
        for reservation_type in ReservationType::ALL {
            let key = if reservation_type.is_all_registrants() { 0 } else { 9 };
            let expected = [
                &[0xa, 0xb, 0xc, 0xd, 0, 0, 0, 16][..],
                &[0, 0, 0, 0, 0, 0, 0, key],
                &[0, 0, 0, 0, 0, reservation_type.code(), 0, 0],
            ];
            assert_eq!(read(1, &registry(Some(reservation_type))), expected.concat());
        }
    }

    #[test]
    fn capabilities_state_support_and_activity() {
        let cdb = [0x5e, 2, 0, 0, 0, 0, 0, 0, 8, 0];
        let mut registry = Registry::default();
        for (persists, aptpl) in [(false, false), (true, false), (true, true)] {
            registry.aptpl = aptpl;
            let [ptpl_c, ptpl_a] = [u8::from(persists), u8::from(aptpl)];
            let expected = [0, 8, ptpl_c, 0xb0 | ptpl_a, 0xea, 0x01, 0, 0];
            assert_eq!(data(&cdb, &registry, 7, persists).unwrap(), expected);
        }
    }

    #[test]
    fn full_status_has_a_descriptor_for_each_registration() {
        let status = |port: u8, key: [u8; 8], holder: [u8; 2]| {
            let head = [&key[..], &[0; 4], &holder, &[0; 4], &[0, 1], &[0, 0, 0, 24]].concat();
            [&head[..], &[6, 0, 0, 0], &[port; 8], &[0; 12]].concat()
        };
        let keys = [[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 0, 9]];
        for (reservation_type, holders) in [
            (None, [[0, 0], [0, 0]]),
            (Some(ReservationType::ExclusiveAccess), [[0, 0], [1, 3]]),
            (Some(ReservationType::WriteExclusiveRegistrantsOnly), [[0, 0], [1, 5]]),
            (Some(ReservationType::WriteExclusiveAllRegistrants), [[1, 7], [1, 7]]),
        ] {
            let expected = [
                vec![0xa, 0xb, 0xc, 0xd, 0, 0, 0, 96],
                status(0x31, keys[0], holders[0]),
                status(0x32, keys[1], holders[1]),
            ];
            assert_eq!(read(3, &registry(reservation_type)), expected.concat());
        }
    }

    #[test]
    fn other_service_actions_are_refused() {
        for action in 4..32 {
            let cdb = [0x5e, action, 0, 0, 0, 0, 0, 0, 8, 0];
            let refused = data(&cdb, &Registry::default(), 0, true);
            assert_eq!(refused, Err(Sense::in_cdb(1, Some(4))));
        }
    }
}
