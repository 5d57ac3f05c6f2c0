//! The state of a device whose guest moves to another host, in addition to the memory, rings and
//! features that a front-end moves.
//!
//! It is a JSON object of at most some kilobytes for each unit. In contrast to a
//! [hand-over](crate::DeviceState), no file moves along: the device there has files, serial numbers
//! and ports of its own.

use std::io;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::access::DiskAccess;
use crate::access::persist::{MovedReservations, PortName, SHARED_TEXT};
use crate::device::Device;
use crate::scsi::ScsiDevice;
use crate::scsi::event_queue::{EVENTS_MAX, Event};
use crate::scsi::unit::{ATTENTIONS_MAX, Unit};
use crate::unit_address::UnitAddress;

const FORMAT: &str = "ringhaul device state";
const VERSION: u32 = 1;

/// The state of the logical units of a virtio-scsi device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct MovedState {
    format: String,
    version: u32,
    units: Vec<MovedUnit>,
    /// Events that wait for a buffer of the driver.
    events: Vec<Event>,
    /// True if more events came than could wait.
    missed_events: bool,
}

/// A state that the device cannot continue with.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct MoveError(String);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct MovedUnit {
    target: u8,
    lun: u16,
    /// The serial number, by which the guest knows the disk.
    serial: String,
    /// The NAA identifier, by which the guest knows the disk.
    wwn: String,
    /// The name under which the unit's own initiator is registered.
    port: String,
    /// Codes of unit attentions, the first one first.
    attentions: Vec<[u8; 2]>,
    access: MovedAccess,
}

/// Shared state of a disk, for another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct MovedAccess {
    is_stopped: bool,
    /// WCE of the caching mode page is cleared.
    cache_is_off: bool,
    /// D_SENSE of the control mode page.
    has_descriptor_sense: bool,
    reservations: MovedReservations,
}

/// The start of a state of any version.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

/// The remedy for a state that was changed.
const AS_IT_IS: &str = "use the output of `ctl state save` as it is";

impl MovedState {
    /// Reads a state of any source.
    ///
    /// # Errors
    ///
    /// If it is none, has another version, or is incomplete.
    pub fn parse(value: &Value) -> Result<Self, MoveError> {
        let wrong = |error: serde_json::Error| {
            MoveError(format!("it is no such state: {error}; {AS_IT_IS}"))
        };
        let Header { format, version } = Header::deserialize(value).map_err(wrong)?;
        if format != FORMAT {
            return Err(MoveError(format!("its format is {format:?}, not {FORMAT:?}")));
        }
        if version != VERSION {
            return Err(MoveError(format!(
                "it has version {version}, and only version {VERSION} is supported; use the same \
                 version of ringhaul on both hosts"
            )));
        }
        let state = Self::deserialize(value).map_err(wrong)?;
        let is_long = |unit: &MovedUnit| unit.attentions.len() > ATTENTIONS_MAX;
        if state.events.len() > EVENTS_MAX || state.units.iter().any(is_long) {
            return Err(MoveError(format!(
                "it has too many events or unit attentions; {AS_IT_IS}"
            )));
        }
        let mut places: Vec<_> = state.units.iter().map(|unit| (unit.target, unit.lun)).collect();
        places.sort_unstable();
        if places.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(MoveError(format!("it has a unit twice; {AS_IT_IS}")));
        }
        Ok(state)
    }

    /// Pairs the name of each unit's port there with the name here.
    fn ports(&self, device: &ScsiDevice) -> Result<Vec<(PortName, PortName)>, MoveError> {
        let pair = |moved: &MovedUnit| {
            let there = PortName::parse(&moved.port).map_err(MoveError)?;
            let here = moved.with_unit(device, |unit| Ok(PortName(unit.options.port)))?;
            Ok((there, here))
        };
        self.units.iter().map(pair).collect()
    }
}

impl MovedUnit {
    fn from_unit(unit: &Unit) -> io::Result<Self> {
        let UnitAddress { target, lun } = unit.address;
        Ok(Self {
            target,
            lun,
            serial: unit.options.serial.clone(),
            wwn: PortName(unit.options.naa).to_string(),
            port: PortName(unit.options.port).to_string(),
            attentions: unit.attentions.pending_codes(),
            access: unit.access.moved_state()?,
        })
    }

    /// Calls `visit` with the device's unit at this address.
    fn with_unit<T>(
        &self,
        device: &ScsiDevice,
        visit: impl FnOnce(&Unit) -> Result<T, MoveError>,
    ) -> Result<T, MoveError> {
        let address = UnitAddress { target: self.target, lun: self.lun };
        let unit = device.units().borrow(address);
        let unit = unit.ok_or_else(|| {
            MoveError(format!("it has a unit {address}, which is missing here; add that unit"))
        })?;
        visit(&unit).map_err(|MoveError(why)| MoveError(format!("unit {address}: {why}")))
    }

    /// Checks that `unit` can continue with this state, under other names of ports.
    fn check(&self, unit: &Unit, ports: &[(PortName, PortName)]) -> Result<(), MoveError> {
        let Self { serial, wwn, .. } = self;
        for (key, there, here) in [
            ("serial", serial, &unit.options.serial),
            ("wwn", wwn, &PortName(unit.options.naa).to_string()),
        ] {
            if there != here {
                return Err(MoveError(format!(
                    "the guest knows its disk by {key}={there}, and here it has {key}={here}; set \
                     {key}={there} here if it is the same disk"
                )));
            }
        }
        unit.access.check_moved(&self.access, ports).map_err(MoveError)
    }
}

impl DiskAccess {
    /// State for another host. Call it while no command runs.
    fn moved_state(&self) -> io::Result<MovedAccess> {
        Ok(MovedAccess {
            is_stopped: self.is_stopped(),
            cache_is_off: self.cache_is_off(),
            has_descriptor_sense: self.has_descriptor_sense(),
            reservations: self.reservations.moved_state()?,
        })
    }

    /// Checks that the disk can continue with the state of another host, where ports have the first
    /// of each two names. Returns the reason if it cannot.
    fn check_moved(
        &self,
        state: &MovedAccess,
        ports: &[(PortName, PortName)],
    ) -> Result<(), String> {
        if self.disk_users.lock().iter().any(|user| !user.is_gone()) {
            return Err(SHARED_TEXT.to_owned());
        }
        self.reservations.check_moved(&state.reservations, ports).map(drop)
    }

    /// Continues with the state of another host. Waits for the file of the reservations.
    fn continue_moved(
        &self,
        state: &MovedAccess,
        ports: &[(PortName, PortName)],
    ) -> Result<(), String> {
        self.reservations.continue_moved(&state.reservations, ports)?;
        self.set_stopped(state.is_stopped);
        self.set_cache_off(state.cache_is_off);
        self.set_descriptor_sense(state.has_descriptor_sense);
        Ok(())
    }
}

impl Device {
    /// The state with which a device on another host can continue. `None`: a device of this kind
    /// has none. Call it while no queue runs.
    ///
    /// # Errors
    ///
    /// If the state cannot be encoded.
    pub fn moved_state(&self) -> io::Result<Option<MovedState>> {
        let Self::Scsi(scsi) = self else { return Ok(None) };
        let units: io::Result<_> =
            scsi.units().with_all(|all| all.map(|unit| MovedUnit::from_unit(unit)).collect());
        let (events, missed_events) = scsi.events().waiting();
        let (format, version, units) = (FORMAT.to_owned(), VERSION, units);
        Ok(Some(MovedState { format, version, units: units?, events, missed_events }))
    }

    /// Checks that the device can [continue](Self::continue_moved) with the state of another.
    ///
    /// # Errors
    ///
    /// If the devices have different units, or the state is not valid.
    pub fn check_moved(&self, state: &MovedState) -> Result<(), MoveError> {
        let Self::Scsi(scsi) = self else {
            return Err(MoveError("the device has no logical units".to_owned()));
        };
        let ports = state.ports(scsi)?;
        let check = |moved: &MovedUnit| moved.with_unit(scsi, |unit| moved.check(unit, &ports));
        state.units.iter().try_for_each(check)?;
        let is_known = |address: UnitAddress| {
            state.units.iter().any(|unit| (unit.target, unit.lun) == (address.target, address.lun))
        };
        let addresses =
            scsi.units().with_all(|all| all.map(|unit| unit.address).collect::<Vec<_>>());
        match addresses.into_iter().find(|address| !is_known(*address)) {
            None => Ok(()),
            Some(other) => Err(MoveError(format!(
                "it has no unit {other}, which the device here has; remove that unit"
            ))),
        }
    }

    /// Continues with the state of a device on another host. Call it before a queue runs, after
    /// [`check_moved`](Self::check_moved). May wait for the files of reservations.
    ///
    /// # Errors
    ///
    /// If the check fails, or a reservation that has to outlive the process cannot be saved.
    pub fn continue_moved(&self, state: &MovedState) -> Result<(), MoveError> {
        self.check_moved(state)?;
        let Self::Scsi(scsi) = self else { return Ok(()) };
        let ports = state.ports(scsi)?;
        for moved in &state.units {
            moved.with_unit(scsi, |unit| {
                unit.access.continue_moved(&moved.access, &ports).map_err(MoveError)?;
                unit.attentions.take_over(&moved.attentions);
                Ok(())
            })?;
        }
        scsi.events().take_over((state.events.clone(), state.missed_events));
        Ok(())
    }
}
