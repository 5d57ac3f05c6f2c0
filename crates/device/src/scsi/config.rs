//! Features and the configuration space of virtio-scsi (virtio 1.3, sections 5.6.3 and 5.6.4).

use std::ops::Range;

use virtio_bindings::virtio_config::{
    VIRTIO_F_ANY_LAYOUT as F_ANY_LAYOUT, VIRTIO_F_RING_PACKED as F_RING_PACKED,
    VIRTIO_F_VERSION_1 as F_VERSION_1,
};
use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX as F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC as F_INDIRECT_DESC,
};
pub(crate) use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_F_CHANGE as F_CHANGE, VIRTIO_SCSI_F_HOTPLUG as F_HOTPLUG,
};

use crate::device_core::Field;
use crate::queue::queue_setup::QueueTuning;
use crate::unit_address::LUN_MAX;

/// Bytes of the configuration space.
const CONFIG_BYTES: usize = 36;
/// The places of `sense_size` and `cdb_size`, which drivers may write.
pub(super) const SIZE_FIELDS: [Range<usize>; 2] = [20..24, 24..28];
/// The fields of the configuration space.
pub(crate) const FIELDS: [Field; 10] = [
    Field::new("num_queues", 0, 4, "number of queues"),
    Field::new("seg_max", 4, 4, "queue size"),
    Field::new("max_sectors", 8, 4, VERSION),
    Field::new("cmd_per_lun", 12, 4, "queue size"),
    Field::new("event_info_size", 16, 4, VERSION),
    Field::writable("sense_size", 20, 4),
    Field::writable("cdb_size", 24, 4),
    Field::new("max_channel", 28, 2, VERSION),
    Field::new("max_target", 30, 2, VERSION),
    Field::new("max_lun", 32, 4, VERSION),
];
/// The source of a field that is the same in all devices.
const VERSION: &str = "version";

/// The initial `sense_size`, in bytes.
pub(super) const SENSE_SIZE: u32 = 96;
/// The initial `cdb_size`, in bytes.
pub(super) const CDB_SIZE: u32 = 32;
/// The most that a driver may write to either: no CDB is longer (SPC-5, section 4.2.5).
pub(super) const SIZES_MAX: u32 = 260;

/// The index of the first request queue, after the control queue and the event queue.
pub(crate) const FIRST_REQUEST_QUEUE: u16 = 2;
/// The most request queues of a device: transports have 8 bits for the queue of an eventfd.
pub const REQUEST_QUEUES_MAX: u16 = 254;

/// The operator's options for a device.
#[derive(Debug, Clone)]
pub struct ScsiOptions {
    /// Request queues, 1 to [`REQUEST_QUEUES_MAX`].
    pub num_queues: u16,
    /// Entries of a queue, 4 to 1024. The limit on segments follows from it.
    pub queue_size: u16,
    /// Options of its queues.
    pub tuning: QueueTuning,
    /// If true, a command that an earlier process took waits for a unit that is not there. If
    /// false, it fails like new commands. Set it if units are added late after a crash.
    pub holds_commands: bool,
}

impl Default for ScsiOptions {
    fn default() -> Self {
        Self {
            num_queues: 1,
            // 254 segments, as in QEMU's own device.
            queue_size: 256,
            tuning: QueueTuning::default(),
            holds_commands: true,
        }
    }
}

/// The features of a device: neither data in both directions nor protection information.
pub(super) fn features() -> u64 {
    // Front-ends offer ANY_LAYOUT to older drivers anyway, and pass on its acceptance.
    let bits = [
        F_VERSION_1,
        F_ANY_LAYOUT,
        F_INDIRECT_DESC,
        F_EVENT_IDX,
        F_RING_PACKED,
        F_HOTPLUG,
        F_CHANGE,
    ];
    bits.iter().fold(0, |all, bit| all | 1 << bit)
}

/// The configuration space, little-endian.
pub(super) fn space(options: &ScsiOptions, sense_size: u32, cdb_size: u32) -> Vec<u8> {
    // One descriptor for the header and one for the response; the rest can be data.
    let seg_max = options.queue_size.saturating_sub(2).max(1);
    let words = [
        options.num_queues.into(),
        seg_max.into(),
        // In sectors of 512 bytes: no limit of this device.
        u32::MAX >> 9,
        // Commands of a unit at a time.
        options.queue_size.into(),
        // Bytes of an event.
        16,
        sense_size,
        cdb_size,
    ];
    let mut space: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    // One channel.
    space.extend(0_u16.to_le_bytes());
    space.extend(255_u16.to_le_bytes());
    space.extend(u32::from(LUN_MAX).to_le_bytes());
    assert_eq!(space.len(), CONFIG_BYTES);
    space
}

#[cfg(test)]
mod tests {
    use virtio_bindings::virtio_scsi::virtio_scsi_config;

    use super::*;
    use crate::device_core::field_places;

    #[test]
    fn fields_have_the_names_and_places_of_the_specification() {
        let expected = field_places![
            virtio_scsi_config:
            num_queues seg_max max_sectors cmd_per_lun event_info_size sense_size cdb_size
            max_channel max_target max_lun
        ];
        assert_eq!(FIELDS.each_ref().map(|field| (field.name, field.place.start)), expected);
        assert!(FIELDS.is_sorted_by(|one, next| one.place.end == next.place.start));
        let writable = FIELDS.into_iter().filter(|field| field.source.is_none());
        assert!(writable.map(|field| field.place).eq(SIZE_FIELDS));
    }
}
