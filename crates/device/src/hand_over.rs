//! What a device hands over to one in another process, beside what was negotiated.
//!
//! Nothing of a virtio-scsi device gets lost by that, so its initiators have nothing to learn: unit
//! attentions and events that nobody has heard yet go along, and no others are added.

use std::fs::File;
use std::io;

use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::scsi::access::AccessState;
use crate::scsi::address::UnitAddress;
use crate::scsi::event_queue::Event;

/// The state of a device whose queues do not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DeviceState(Kind);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum Kind {
    /// What others on its disk have agreed on.
    Blk(AccessState),
    Scsi {
        units: Vec<UnitState>,
        events: (Vec<Event>, bool),
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnitState {
    target: u8,
    lun: u16,
    /// Codes of unit attentions.
    attentions: Vec<[u8; 2]>,
    access: AccessState,
}

impl Device {
    /// What another process needs to go on with the device: its state, and for each of its disks
    /// the file that keeps reservations, if there is one. Call it while no queue runs.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub fn hand_over(&self) -> io::Result<(DeviceState, Vec<Option<File>>)> {
        let scsi = match self {
            Self::Blk(blk) => {
                let (access, file) = blk.access().hand_over()?;
                return Ok((DeviceState(Kind::Blk(access)), vec![file]));
            }
            Self::Scsi(scsi) => scsi,
        };
        let (mut units, mut files) = (Vec::new(), Vec::new());
        scsi.units().look(|mut all| {
            all.try_for_each(|unit| {
                let UnitAddress { target, lun } = unit.address;
                let (access, file) = unit.access.hand_over()?;
                units.push(UnitState { target, lun, attentions: unit.attentions.codes(), access });
                files.push(file);
                io::Result::Ok(())
            })
        })?;
        Ok((DeviceState(Kind::Scsi { units, events: scsi.events().waiting() }), files))
    }

    /// Goes on with what a device in another process had. Call it before a queue runs.
    ///
    /// # Errors
    ///
    /// When that was another kind of device, had other units, or makes no sense.
    pub fn go_on(&self, state: DeviceState, files: Vec<Option<File>>) -> io::Result<()> {
        let other = || io::Error::new(io::ErrorKind::InvalidData, "it was another device");
        let mut files = files.into_iter();
        self.common().is_handed_over();
        match (self, state.0) {
            (Self::Blk(blk), Kind::Blk(access)) => {
                blk.access().take_over(access, files.next().flatten())
            }
            (Self::Scsi(scsi), Kind::Scsi { units, events }) => {
                if scsi.units().look(|all| all.count()) != units.len() {
                    return Err(other());
                }
                for UnitState { target, lun, attentions, access } in units {
                    let unit = scsi.units().borrow(UnitAddress { target, lun });
                    let unit = unit.ok_or_else(other)?;
                    unit.access.take_over(access, files.next().flatten())?;
                    unit.attentions.take_over(&attentions);
                }
                scsi.events().take_over(events);
                Ok(())
            }
            _ => Err(other()),
        }
    }
}
