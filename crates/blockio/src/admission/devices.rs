//! The devices of lanes, and the room that they have taken there.

use std::sync::Arc;

use crate::file::device_queue::Device;
use iomem::fits;

/// The place of a lane without a bounded device.
pub(super) const NO_DEVICE: u32 = u32::MAX;

/// A device, and its use by lanes.
pub(super) struct DeviceUse {
    device: Arc<Device>,
    lanes: u32,
    /// Requests of the device that ops in the engine count as.
    pub(super) units: u32,
    /// The lane with the op that did not fit. No other lane gets room before it.
    next: Option<u32>,
}

impl DeviceUse {
    /// Returns true if an op of a lane has room, and no other lane is before it.
    pub(super) fn has_room(&self, lane: u32, units: u32) -> bool {
        let is_next = self.next.is_none_or(|next| next == lane);
        is_next && (self.units == 0 || self.units.saturating_add(units) <= self.device.share())
    }

    /// Gives a lane the next room, unless another lane waits for it already.
    pub(super) fn set_next(&mut self, lane: u32) {
        self.next.get_or_insert(lane);
    }

    /// Takes a lane out of the line.
    pub(super) fn clear_next(&mut self, lane: u32) {
        self.next = self.next.filter(|&next| next != lane);
    }
}

/// The devices, each at the place that its lanes know.
#[derive(Default)]
pub(super) struct Devices(Vec<Option<DeviceUse>>);

impl Devices {
    #[inline]
    pub(super) fn get(&self, place: u32) -> Option<&DeviceUse> {
        self.0.get(place as usize)?.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, place: u32) -> Option<&mut DeviceUse> {
        self.0.get_mut(place as usize)?.as_mut()
    }

    /// Requests of all devices that ops in the engine count as.
    pub(super) fn units(&self) -> u32 {
        self.0.iter().flatten().map(|used| used.units).sum()
    }

    /// Returns the place of `device`, which has one lane more.
    pub(super) fn attach(&mut self, device: &Arc<Device>) -> u32 {
        let has = |place: &Option<DeviceUse>| {
            place.as_ref().is_some_and(|used| Arc::ptr_eq(&used.device, device))
        };
        let place = self.0.iter().position(has).unwrap_or_else(|| {
            device.add_user();
            let used = DeviceUse { device: Arc::clone(device), lanes: 0, units: 0, next: None };
            let place = self.0.iter().position(Option::is_none).unwrap_or_else(|| {
                self.0.push(None);
                self.0.len() - 1
            });
            self.0[place] = Some(used);
            place
        });
        if let Some(used) = &mut self.0[place] {
            used.lanes += 1;
        }
        fits(place, "a count of devices")
    }

    /// Removes a lane from the device at `place`.
    pub(super) fn detach(&mut self, place: u32, lane: u32) {
        let Some(used) = self.get_mut(place) else { return };
        used.lanes -= 1;
        used.clear_next(lane);
        if used.lanes == 0 {
            used.device.remove_user();
            self.0[place as usize] = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// IoThreads share a device, until their last disk on it has gone.
    #[test]
    fn an_iothread_without_disks_on_a_device_gives_its_share_back() {
        let device = Device::with(64, 4096);
        let mut all = [(); 2].map(|()| Devices::default());
        let place = all[0].attach(&device);
        let alone = device.share();
        let places = [0, 1].map(|_| all[1].attach(&device));
        assert!(device.share() < alone, "{} of {alone}", device.share());
        all[1].detach(places[0], 0);
        assert!(device.share() < alone, "one of its disks is left");
        all[1].detach(places[1], 1);
        assert_eq!(device.share(), alone);
        all[0].detach(place, 0);
    }

    /// A disk that has gone takes no turn.
    #[test]
    fn the_next_disk_of_a_device_gives_its_turn_back_when_it_goes() {
        let device = Device::with(64, 4096);
        let mut devices = Devices::default();
        let places = [0, 1].map(|_| devices.attach(&device));
        assert_eq!(places, [0; 2]);
        let used = devices.get_mut(0).unwrap();
        used.set_next(1);
        used.set_next(0);
        assert_eq!([0, 1].map(|lane| used.has_room(lane, 1)), [false, true]);
        devices.detach(0, 1);
        let used = devices.get_mut(0).unwrap();
        assert!(used.has_room(0, 1), "it waits for a disk that has gone");
        used.set_next(0);
        used.clear_next(1);
        assert_eq!([0, 1].map(|lane| used.has_room(lane, 1)), [true, false]);
        devices.detach(0, 0);
        assert!(devices.get(0).is_none());
        assert_eq!(devices.attach(&Device::with(64, 4096)), 0, "the place is free");
    }
}
