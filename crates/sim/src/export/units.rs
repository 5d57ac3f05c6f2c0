//! The disk behind an export, or the logical units on all disks.

use std::num::NonZeroU16;
use std::rc::Rc;
use std::sync::Arc;

use device::blk::config::BlkOptions;
use device::scsi::config::ScsiOptions;
use device::scsi::unit::UnitOptions;
use device::scsi::{RemovedUnit, UnitError};
use device::{Device, LogEvents, QueueTuning};
use iomem::fits;

use super::Export;
use crate::disk::Disk;
use crate::failure::Failure;
use crate::plan::Plan;
use crate::request::serial;
use crate::rng::Rng;
use crate::scsi::unit::address;

/// A limit that a few long chains reach.
const LONG_LISTS_BYTES: u64 = 1024;

/// The device of an export.
pub(super) fn device(plan: &Plan, index: usize, disks: &[Rc<Disk>]) -> Device {
    let num_queues = fits(plan.queues, "a number of queues");
    let queue_size = plan.queue_size();
    let tuning = QueueTuning {
        notify_batch: plan.no_notify_batch == 0,
        prefetch: true,
        run_max: NonZeroU16::new(fits(plan.run_max, "chains of a run")),
        fixed_buffers: plan.fixed_buffers > 0,
        long_lists_bytes: LONG_LISTS_BYTES,
    };
    let events = Arc::new(LogEvents::new(format!("sim-{index}")));
    if plan.scsi == 0 {
        let options = BlkOptions {
            serial: serial(index),
            num_queues,
            queue_size,
            write_cache: plan.no_write_cache == 0,
            tuning,
            in_order: plan.in_order > 0,
        };
        return Device::blk(disks[0].source.clone(), options, events);
    }
    let options = ScsiOptions {
        num_queues,
        queue_size,
        tuning,
        // The guests abort nothing, and some of their commands name units that never come.
        holds_commands: false,
    };
    let device = Device::scsi(options, events);
    for disk in disks {
        add(&device, index, disk).expect("a new device has no unit");
    }
    device
}

/// Adds the unit of device number `index` on a disk.
fn add(device: &Device, index: usize, disk: &Disk) -> Result<(), UnitError> {
    let Device::Scsi(scsi) = device else { unreachable!("it has units") };
    let byte = |number: usize| u8::try_from(number).expect("plans have a few of each");
    let naa = [0x31, 0, 0, 0, 0, 0, 0, byte(disk.index)];
    let port = [0x32, 0, 0, 0, 0, 0, byte(disk.index), byte(index)];
    let options = UnitOptions {
        serial: serial(disk.index),
        write_cache: disk.plan.no_write_cache == 0,
        access: Arc::clone(&disk.shared().access),
        ..UnitOptions::new(naa, port)
    };
    scsi.add_unit(address(index, disk.index), disk.source.clone(), options)
}

impl Export {
    /// Removes a unit, or adds it again.
    pub(super) fn plug(&mut self, rng: &mut Rng) {
        let disk = rng.index(self.disks.len());
        let is_there = self.guest.unit_is_there(disk);
        let Device::Scsi(scsi) = &self.device else { return };
        if is_there {
            self.guest.unit_changed(disk, false);
            let removed = scsi.remove_unit(address(self.index, disk));
            self.removed.push(removed.expect("the device has the unit"));
        } else {
            // Commands that have begun may still have the port.
            match add(&self.device, self.index, &self.disks[disk]) {
                Ok(()) => self.guest.unit_changed(disk, true),
                Err(UnitError::Port(_)) => {}
                Err(error) => panic!("a unit cannot be added: {error}"),
            }
        }
        self.trace(|| format!("disk {disk} has a unit: {}", self.guest.unit_is_there(disk)));
    }

    /// Closes disks of removed units as soon as they are unused.
    pub(super) fn close_unused(&mut self) {
        self.removed.retain(|unit| !unit.is_unused());
    }

    /// Checks that the disks of removed units are unused when no queue runs.
    pub(crate) fn check_removed(&self) -> Result<(), Failure> {
        match self.removed.iter().all(RemovedUnit::is_unused) {
            true => Ok(()),
            false => Err(Failure::new("leak", "the disk of a unit that was removed is in use")),
        }
    }

    /// Notes that a disk has another size, which all devices with a unit there report. Returns
    /// false if this device has none.
    pub(crate) fn resized(&self, disk: usize) -> bool {
        let Device::Scsi(scsi) = &self.device else { return false };
        let is_there = self.guest.unit_is_there(disk);
        if let Some(access) = scsi.access(address(self.index, disk)) {
            access.refresh();
        }
        is_there
    }
}
