//! The hand-over of a device to another process, in addition to its negotiated features.
//!
//! A virtio-scsi device loses nothing by it, so its initiators receive no notice: pending unit
//! attentions and events go along, and none are added.

use std::fs::File;
use std::io;

use serde::{Deserialize, Serialize};

use crate::access::AccessState;
use crate::device::Device;
use crate::scsi::event_queue::Event;
use crate::unit_address::UnitAddress;

/// The state of a device without running queues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DeviceState(Kind);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum Kind {
    /// The access state of the disk, which initiators of other devices have set up.
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
    /// The state that another process needs to continue the device, and for each of its disks the
    /// file that keeps reservations, if there is one. Call it while no queue runs.
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
        scsi.units().with_all(|mut all| {
            all.try_for_each(|unit| {
                let UnitAddress { target, lun } = unit.address;
                let (access, file) = unit.access.hand_over()?;
                units.push(UnitState {
                    target,
                    lun,
                    attentions: unit.attentions.pending_codes(),
                    access,
                });
                files.push(file);
                io::Result::Ok(())
            })
        })?;
        Ok((DeviceState(Kind::Scsi { units, events: scsi.events().waiting() }), files))
    }

    /// Continues with the state of a device in another process. Call it before a queue runs.
    ///
    /// # Errors
    ///
    /// When the state is of another kind of device, has other units, or makes no sense.
    pub fn resume(&self, state: DeviceState, files: Vec<Option<File>>) -> io::Result<()> {
        let other = || io::Error::new(io::ErrorKind::InvalidData, "it was another device");
        let mut files = files.into_iter();
        self.core().mark_handed_over();
        match (self, state.0) {
            (Self::Blk(blk), Kind::Blk(access)) => {
                blk.access().take_over(access, files.next().flatten())
            }
            (Self::Scsi(scsi), Kind::Scsi { units, events }) => {
                if scsi.units().with_all(|all| all.count()) != units.len() {
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
