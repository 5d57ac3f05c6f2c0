//! Registrations and the persistent reservation of a disk, and the commands that they forbid to a
//! port (SPC-4, sections 5.13.1, 5.13.7 and 5.13.10).

use std::fmt;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::access::sense::Sense;

/// The most registrations of a disk. Bounds the memory that initiators can make the daemon use.
pub(super) const REGISTRATIONS_MAX: usize = 128;

/// A reservation key that can be registered: zero stands for none.
pub(super) type Key = NonZeroU64;

/// The name of an initiator port, which must stay the same over restarts, since registrations are
/// saved by it. Initiators see it as a SAS address, so its first digit should be 3, as in an NAA
/// identifier that is assigned locally.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PortName(pub(crate) [u8; 8]);

impl PortName {
    /// Reads the name from 16 hexadecimal digits, as it is written.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let number = digits(text).ok_or_else(|| format!("{text:?} is not a port"))?;
        Ok(Self(number.to_be_bytes()))
    }
}

/// The number with these 16 hexadecimal digits.
pub(super) fn digits(text: &str) -> Option<u64> {
    let is_number = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    if is_number { u64::from_str_radix(text, 16).ok() } else { None }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl fmt::Debug for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PortName({self})")
    }
}

/// The TYPE of a persistent reservation (SPC-4, table 206), as codes of that table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub(super) enum ReservationType {
    WriteExclusive = 1,
    ExclusiveAccess = 3,
    WriteExclusiveRegistrantsOnly = 5,
    ExclusiveAccessRegistrantsOnly = 6,
    WriteExclusiveAllRegistrants = 7,
    ExclusiveAccessAllRegistrants = 8,
}

impl ReservationType {
    pub(super) const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrantsOnly,
        Self::ExclusiveAccessRegistrantsOnly,
        Self::WriteExclusiveAllRegistrants,
        Self::ExclusiveAccessAllRegistrants,
    ];

    /// The type with this code, if there is one.
    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.code() == code)
    }

    pub(super) fn code(self) -> u8 {
        self as u8
    }

    fn is_exclusive_access(self) -> bool {
        use ReservationType as T;
        matches!(
            self,
            T::ExclusiveAccess
                | T::ExclusiveAccessRegistrantsOnly
                | T::ExclusiveAccessAllRegistrants
        )
    }

    pub(super) fn is_registrants_only(self) -> bool {
        use ReservationType as T;
        matches!(self, T::WriteExclusiveRegistrantsOnly | T::ExclusiveAccessRegistrantsOnly)
    }

    pub(super) fn is_all_registrants(self) -> bool {
        use ReservationType as T;
        matches!(self, T::WriteExclusiveAllRegistrants | T::ExclusiveAccessAllRegistrants)
    }
}

/// Classes of commands in the tables "commands that are allowed in the presence of various
/// reservations" (SPC-4, table 65; SBC-4, table 13).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum CommandClass {
    /// Allowed always: INQUIRY, LOG SENSE, READ CAPACITY, REPORT LUNS, REQUEST SENSE, TEST UNIT
    /// READY, REPORT TARGET PORT GROUPS. Also PERSISTENT RESERVE IN, and OUT, which has rules of
    /// its own; PREVENT ALLOW MEDIUM REMOVAL that allows; START STOP UNIT with START set and no
    /// power condition.
    Unrestricted = 0,
    /// A conflict where access is exclusive: READ, VERIFY, PRE-FETCH, GET LBA STATUS, MODE SENSE,
    /// READ BUFFER, READ DEFECT DATA, RECEIVE DIAGNOSTIC RESULTS, REPORT SUPPORTED OPERATION CODES
    /// and TASK MANAGEMENT FUNCTIONS.
    Reads = 1,
    /// A conflict where writing is exclusive: WRITE, WRITE AND VERIFY, WRITE SAME, COMPARE AND
    /// WRITE, UNMAP, SYNCHRONIZE CACHE, FORMAT UNIT, MODE SELECT, LOG SELECT, SEND DIAGNOSTIC,
    /// WRITE BUFFER. Also PREVENT ALLOW MEDIUM REMOVAL that prevents, every other START STOP UNIT,
    /// and all commands not listed here.
    Writes = 2,
}

/// Classes of commands that a nexus may not use, as the bits of [`CommandClass`].
pub(super) type Conflicts = u8;

/// An I_T nexus that is registered. There is one target port, so the initiator port identifies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Registration {
    pub(super) port: PortName,
    pub(super) key: Key,
}

/// The persistent reservation of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reservation {
    pub(super) reservation_type: ReservationType,
    /// `None` if every registered nexus holds it, by an all registrants type.
    pub(super) holder: Option<PortName>,
}

impl Reservation {
    /// A reservation that `port` establishes.
    pub(super) fn new(reservation_type: ReservationType, port: PortName) -> Self {
        let holder = (!reservation_type.is_all_registrants()).then_some(port);
        Self { reservation_type, holder }
    }
}

/// The registrations and the reservation of a disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Registry {
    /// At most [`REGISTRATIONS_MAX`], of different ports, the oldest first.
    registrations: Vec<Registration>,
    /// The holder is registered; if all registrants hold it, there is at least one.
    pub(super) reservation: Option<Reservation>,
    /// True if the registry persists through a loss of power.
    pub(super) aptpl: bool,
}

impl Registry {
    /// Creates an empty registry.
    pub(super) fn new(aptpl: bool) -> Self {
        Self { aptpl, ..Self::default() }
    }

    pub(super) fn registrations(&self) -> &[Registration] {
        &self.registrations
    }

    /// The key that is registered for a port.
    pub(super) fn key_of(&self, port: PortName) -> Option<Key> {
        self.registrations.iter().find(|other| other.port == port).map(|found| found.key)
    }

    /// True if a port is a persistent reservation holder.
    pub(super) fn is_holder(&self, port: PortName) -> bool {
        let holds = |held: Reservation| match held.holder {
            Some(holder) => holder == port,
            None => self.key_of(port).is_some(),
        };
        self.reservation.is_some_and(holds)
    }

    /// Registers a port, or changes its key.
    ///
    /// # Errors
    ///
    /// If there are too many registrations.
    pub(super) fn set_key(&mut self, port: PortName, key: Key) -> Result<(), Sense> {
        if let Some(found) = self.registrations.iter_mut().find(|other| other.port == port) {
            found.key = key;
            return Ok(());
        }
        if self.registrations.len() >= REGISTRATIONS_MAX {
            return Err(Sense::TOO_MANY_REGISTRATIONS);
        }
        self.registrations.push(Registration { port, key });
        Ok(())
    }

    /// The same registry under other names of ports: `name` returns the new one. `None`: two ports
    /// would have one name.
    pub(super) fn renamed(&self, name: impl Fn(PortName) -> PortName) -> Option<Self> {
        let mut renamed = Self::new(self.aptpl);
        for Registration { port, key } in &self.registrations {
            let port = name(*port);
            if renamed.key_of(port).is_some() {
                return None;
            }
            renamed.registrations.push(Registration { port, key: *key });
        }
        let with_name = |held: Reservation| Reservation { holder: held.holder.map(&name), ..held };
        renamed.reservation = self.reservation.map(with_name);
        Some(renamed)
    }

    /// Removes the registrations that `is_removed` names, and the reservation if it has no holder
    /// left. Returns the released reservation.
    pub(super) fn remove(
        &mut self,
        mut is_removed: impl FnMut(Registration) -> bool,
    ) -> Option<Reservation> {
        self.registrations.retain(|registration| !is_removed(*registration));
        let held = self.reservation?;
        let is_held = match held.holder {
            Some(holder) => self.key_of(holder).is_some(),
            None => !self.registrations.is_empty(),
        };
        if is_held { None } else { self.reservation.take() }
    }

    /// The classes of commands that a port may not use now.
    pub(super) fn conflicts(&self, port: PortName) -> Conflicts {
        // Registrants are exempt from the types that are named after them.
        let is_exempt = match self.reservation {
            Some(held) if held.reservation_type.is_registrants_only() => {
                self.key_of(port).is_some()
            }
            _ => self.is_holder(port),
        };
        if is_exempt { 0 } else { self.conflicts_of_unregistered() }
    }

    /// The classes of commands that unregistered ports may not use now.
    pub(super) fn conflicts_of_unregistered(&self) -> Conflicts {
        let [reads, writes] = [CommandClass::Reads as u8, CommandClass::Writes as u8];
        match self.reservation {
            None => 0,
            Some(held) if held.reservation_type.is_exclusive_access() => reads | writes,
            Some(_) => writes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTS: [PortName; 3] =
        [PortName([3, 0, 0, 0, 0, 0, 0, 1]), PortName([3; 8]), PortName([0x3f; 8])];

    /// A registry of a holder and a second registrant; the third port is not registered.
    fn registry(reservation_type: ReservationType) -> Registry {
        let [holder, registrant, _] = PORTS;
        let mut registry = Registry::default();
        registry.set_key(holder, Key::MIN).unwrap();
        registry.set_key(registrant, Key::MAX).unwrap();
        registry.reservation = Some(Reservation::new(reservation_type, holder));
        registry
    }

    #[test]
    fn each_type_forbids_the_commands_of_the_tables() {
        use ReservationType as T;
        const NONE: u8 = 0;
        const WRITES: u8 = 2;
        const BOTH: u8 = 3;
        for (code, reservation_type, expected) in [
            (1, T::WriteExclusive, [NONE, WRITES, WRITES]),
            (3, T::ExclusiveAccess, [NONE, BOTH, BOTH]),
            (5, T::WriteExclusiveRegistrantsOnly, [NONE, NONE, WRITES]),
            (6, T::ExclusiveAccessRegistrantsOnly, [NONE, NONE, BOTH]),
            (7, T::WriteExclusiveAllRegistrants, [NONE, NONE, WRITES]),
            (8, T::ExclusiveAccessAllRegistrants, [NONE, NONE, BOTH]),
        ] {
            assert_eq!(ReservationType::from_code(code), Some(reservation_type));
            assert_eq!(reservation_type.code(), code);
            let registry = registry(reservation_type);
            assert_eq!(PORTS.map(|port| registry.conflicts(port)), expected, "type {code}");
            let holds = PORTS.map(|port| registry.is_holder(port));
            assert_eq!(holds, [true, code >= 7, false], "type {code}");
        }
        for code in [0, 2, 4, 9, 10, 15] {
            assert_eq!(ReservationType::from_code(code), None);
        }
        assert_eq!(PORTS.map(|port| Registry::default().conflicts(port)), [NONE; 3]);
    }

    #[test]
    fn a_reservation_goes_with_its_holder_or_with_the_last_of_all_registrants() {
        let [holder, registrant, _] = PORTS;
        for reservation_type in ReservationType::ALL {
            let all = reservation_type.is_all_registrants();
            let mut registry = registry(reservation_type);
            let held = registry.reservation;
            assert_eq!(registry.remove(|other| other.port == holder).is_some(), !all);
            assert_eq!(registry.reservation.is_some(), all);
            assert_eq!(registry.remove(|other| other.port == registrant), held.filter(|_| all));
            assert_eq!(registry, Registry::default());
        }
    }

    #[test]
    fn registrations_have_a_limit_and_their_keys_may_change_there() {
        let mut registry = Registry::default();
        let port = |number: usize| PortName(u64::try_from(number).unwrap().to_be_bytes());
        for number in 0..REGISTRATIONS_MAX {
            registry.set_key(port(number), Key::MIN).unwrap();
        }
        let full = registry.clone();
        let refused = registry.set_key(port(REGISTRATIONS_MAX), Key::MIN);
        assert_eq!(refused, Err(Sense::TOO_MANY_REGISTRATIONS));
        assert_eq!(registry, full);
        registry.set_key(port(5), Key::MAX).unwrap();
        assert_eq!(registry.key_of(port(5)), Some(Key::MAX));
        assert_eq!(registry.registrations().len(), REGISTRATIONS_MAX);
    }
}
