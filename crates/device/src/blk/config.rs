//! Features and the configuration space of virtio-blk (virtio 1.3, sections 5.2.3 and 5.2.4).

use blockio::disk::DiskInfo;

use crate::device_core::Field;
use crate::queue::queue_setup::QueueTuning;

pub use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE as F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE as F_CONFIG_WCE,
    VIRTIO_BLK_F_DISCARD as F_DISCARD, VIRTIO_BLK_F_FLUSH as F_FLUSH, VIRTIO_BLK_F_MQ as F_MQ,
    VIRTIO_BLK_F_RO as F_RO, VIRTIO_BLK_F_SEG_MAX as F_SEG_MAX,
    VIRTIO_BLK_F_TOPOLOGY as F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES as F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_ANY_LAYOUT as F_ANY_LAYOUT;
pub use virtio_bindings::virtio_config::{
    VIRTIO_F_RING_PACKED as F_RING_PACKED, VIRTIO_F_VERSION_1 as F_VERSION_1,
};
pub use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX as F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC as F_INDIRECT_DESC,
};

/// Bytes of a sector, independent of the logical block.
pub const SECTOR_BYTES: u64 = 512;
/// Offset of `writeback` in the configuration space.
pub const WRITEBACK_OFFSET: usize = 32;
/// Length of the configuration space, up to and including the fields of `WRITE_ZEROES`.
const CONFIG_BYTES: usize = 60;

/// The fields of the configuration space. Drivers write one of them.
pub(crate) const FIELDS: [Field; 19] = [
    Field::new("capacity", 0, 8, DISK),
    Field::new("size_max", 8, 4, DISK),
    Field::new("seg_max", 12, 4, "queue size"),
    Field::new("cylinders", 16, 2, DISK),
    Field::new("heads", 18, 1, DISK),
    Field::new("sectors", 19, 1, DISK),
    Field::new("blk_size", 20, 4, "logical block size"),
    Field::new("physical_block_exp", 24, 1, DISK),
    Field::new("alignment_offset", 25, 1, DISK),
    Field::new("min_io_size", 26, 2, DISK),
    Field::new("opt_io_size", 28, 4, DISK),
    Field::writable("writeback", WRITEBACK_OFFSET, 1),
    Field::new("num_queues", 34, 2, "number of queues"),
    Field::new("max_discard_sectors", 36, 4, READ_ONLY),
    Field::new("max_discard_seg", 40, 4, READ_ONLY),
    Field::new("discard_sector_alignment", 44, 4, DISK),
    Field::new("max_write_zeroes_sectors", 48, 4, READ_ONLY),
    Field::new("max_write_zeroes_seg", 52, 4, READ_ONLY),
    Field::new("write_zeroes_may_unmap", 56, 1, READ_ONLY),
];
/// The source of a field that no setting gives its value.
const DISK: &str = "disk";
/// The setting of a device without the fields of discards and zeroes.
const READ_ONLY: &str = "read-only setting";

/// The most sectors of one discard segment: 2 GiB. A hole of any size is one system call.
pub(crate) const DISCARD_SECTORS_MAX: u32 = 1 << 22;
/// The most sectors of one write-zeroes segment: 32 MiB. Some disks have no operation for it; then
/// zeroes are written, and one request should not take seconds.
pub const WRITE_ZEROES_SECTORS_MAX: u32 = 1 << 16;
/// The most segments of one discard or write-zeroes request.
pub const SEGMENTS_MAX: u32 = 16;
/// The most queues of a device: transports have 8 bits for the queue number of an eventfd.
pub const QUEUES_MAX: u16 = 256;
/// The most bytes of a serial number.
pub const SERIAL_BYTES: usize = 20;

/// The operator's settings of a device.
#[derive(Debug, Clone)]
pub struct BlkOptions {
    /// The answer to the driver's request for an id; at most [`SERIAL_BYTES`] bytes.
    pub serial: String,
    /// The number of queues: 1 to [`QUEUES_MAX`].
    pub num_queues: u16,
    /// Entries of a queue, from which the limit on segments follows: 2 to 1024.
    pub queue_size: u16,
    /// Offers the driver a write cache, which it has to flush.
    pub write_cache: bool,
    /// Options of its queues.
    pub tuning: QueueTuning,
    /// Answers requests in the order in which they were made available: for front-ends without an
    /// inflight region, which continue at used idx after their back-end died.
    pub in_order: bool,
}

impl Default for BlkOptions {
    fn default() -> Self {
        Self {
            serial: String::new(),
            num_queues: 1,
            queue_size: 128,
            write_cache: true,
            tuning: QueueTuning::default(),
            in_order: false,
        }
    }
}

/// The bytes of the configuration space.
type ConfigSpace = [u8; CONFIG_BYTES];

/// The features of a device.
pub(super) fn features(disk: &DiskInfo, options: &BlkOptions) -> u64 {
    let mut bits = vec![
        F_VERSION_1,
        // Front-ends offer this bit to older drivers anyway, and pass on its acceptance.
        F_ANY_LAYOUT,
        F_INDIRECT_DESC,
        F_EVENT_IDX,
        F_SEG_MAX,
        F_BLK_SIZE,
        F_TOPOLOGY,
        F_FLUSH,
        F_CONFIG_WCE,
    ];
    if options.num_queues > 1 {
        bits.push(F_MQ);
    }
    if !options.in_order {
        // Without a region, no process finds the place of the next used element of a packed ring.
        bits.push(F_RING_PACKED);
    }
    bits.extend(if disk.read_only { &[F_RO][..] } else { &[F_DISCARD, F_WRITE_ZEROES][..] });
    bits.iter().fold(0, |all, bit| all | 1 << bit)
}

/// Hints of a disk about itself, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Hints {
    /// See [`DiskSource::optimal_bytes`](blockio::DiskSource::optimal_bytes).
    pub(super) optimal: Option<u32>,
    /// See [`DiskSource::discard_bytes`](blockio::DiskSource::discard_bytes).
    pub(super) discard: Option<u32>,
}

/// The configuration space, little-endian.
pub(super) fn space(
    disk: &DiskInfo,
    hints: Hints,
    options: &BlkOptions,
    writeback: bool,
) -> ConfigSpace {
    let mut space = [0; CONFIG_BYTES];
    let mut put = |offset: usize, bytes: &[u8]| {
        space[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    let block = disk.logical_block_bytes;
    let blocks_per_physical = disk.physical_block_bytes / block;
    // Drivers do not discard parts of this unit.
    let discard_sectors = hints.discard.unwrap_or(block).max(block) / 512;
    put(0, &(disk.size_bytes / SECTOR_BYTES).to_le_bytes());
    // One descriptor for the header and one for the status; the rest can be data.
    put(12, &u32::from(options.queue_size.saturating_sub(2).max(1)).to_le_bytes());
    put(20, &block.to_le_bytes());
    // At most 31, in the lowest byte.
    put(24, &blocks_per_physical.ilog2().to_le_bytes()[..1]);
    // A size that does not fit in 16 bits is too large as a preferred write.
    put(26, &u16::try_from(blocks_per_physical).unwrap_or(1).to_le_bytes());
    // 0 stands for unknown.
    put(28, &hints.optimal.map_or(0, |bytes| bytes / block).to_le_bytes());
    put(WRITEBACK_OFFSET, &[u8::from(writeback)]);
    put(34, &options.num_queues.to_le_bytes());
    if !disk.read_only {
        put(36, &DISCARD_SECTORS_MAX.to_le_bytes());
        put(40, &SEGMENTS_MAX.to_le_bytes());
        put(44, &discard_sectors.to_le_bytes());
        put(48, &WRITE_ZEROES_SECTORS_MAX.to_le_bytes());
        put(52, &SEGMENTS_MAX.to_le_bytes());
        put(56, &[1]);
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device_core::field_places;
    use virtio_driver::{ByteValued, VirtioBlkConfig};

    fn disk(read_only: bool) -> DiskInfo {
        DiskInfo {
            size_bytes: 10 << 20,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            read_only,
            direct: true,
        }
    }

    fn options() -> BlkOptions {
        BlkOptions {
            serial: String::new(),
            num_queues: 4,
            queue_size: 128,
            write_cache: true,
            ..BlkOptions::default()
        }
    }

    #[test]
    fn a_driver_reads_every_field_where_it_expects_it() {
        let hints = Hints { optimal: Some(1 << 22), discard: Some(64 << 10) };
        let bytes = space(&disk(false), hints, &options(), true);
        let config = VirtioBlkConfig::from_slice(&bytes).unwrap();
        assert_eq!(u64::from(config.capacity), 20480);
        assert_eq!(u32::from(config.size_max), 0);
        assert_eq!(u32::from(config.seg_max), 126);
        assert_eq!(u32::from(config.blk_size), 512);
        assert_eq!(config.physical_block_exp, 3);
        assert_eq!(u16::from(config.min_io_size), 8);
        assert_eq!(u32::from(config.opt_io_size), 8192);
        assert_eq!(config.writeback, 1);
        assert_eq!(u16::from(config.num_queues), 4);
        assert_eq!(u32::from(config.max_discard_sectors), DISCARD_SECTORS_MAX);
        assert_eq!(u32::from(config.max_discard_seg), SEGMENTS_MAX);
        assert_eq!(u32::from(config.discard_sector_alignment), 128);
        assert_eq!(u32::from(config.max_write_zeroes_sectors), WRITE_ZEROES_SECTORS_MAX);
        assert_eq!(u32::from(config.max_write_zeroes_seg), SEGMENTS_MAX);
        assert_eq!(config.write_zeroes_may_unmap, 1);
    }

    /// Fields in logical blocks differ from fields in sectors only where a block is larger.
    #[test]
    fn fields_count_in_the_unit_that_they_have_with_blocks_of_each_size() {
        for (logical, physical, exponent, most) in
            [(512, 512, 0, 1), (512, 1 << 17, 8, 256), (4096, 4096, 0, 1), (4096, 1 << 15, 3, 8)]
        {
            let disk = DiskInfo {
                logical_block_bytes: logical,
                physical_block_bytes: physical,
                ..disk(false)
            };
            let hints = Hints { optimal: Some(1 << 22), ..Hints::default() };
            let bytes = space(&disk, hints, &options(), false);
            let config = VirtioBlkConfig::from_slice(&bytes).unwrap();
            assert_eq!(u64::from(config.capacity), 20480, "in sectors, whatever the block");
            assert_eq!(u32::from(config.blk_size), logical);
            assert_eq!(config.physical_block_exp, exponent, "{logical} of {physical}");
            assert_eq!(u16::from(config.min_io_size), most, "{logical} of {physical}");
            assert_eq!(u32::from(config.opt_io_size), (1 << 22) / logical);
            assert_eq!(u32::from(config.max_discard_sectors), DISCARD_SECTORS_MAX);
            assert_eq!(u32::from(config.max_write_zeroes_sectors), WRITE_ZEROES_SECTORS_MAX);
            assert_eq!(config.writeback, 0);
        }
    }

    #[test]
    fn fields_have_the_names_and_places_of_the_specification() {
        let expected = field_places![
            VirtioBlkConfig:
            capacity size_max seg_max cylinders heads sectors blk_size physical_block_exp
            alignment_offset min_io_size opt_io_size writeback num_queues max_discard_sectors
            max_discard_seg discard_sector_alignment max_write_zeroes_sectors max_write_zeroes_seg
            write_zeroes_may_unmap
        ];
        assert_eq!(FIELDS.each_ref().map(|field| (field.name, field.place.start)), expected);
        assert!(FIELDS.is_sorted_by(|one, next| one.place.end <= next.place.start));
    }

    #[test]
    fn discards_come_in_blocks_where_the_disk_has_no_larger_unit() {
        for (block, discard, sectors) in
            [(512, None, 1), (4096, None, 8), (4096, Some(512), 8), (512, Some(4096), 8)]
        {
            let disk = DiskInfo { logical_block_bytes: block, ..disk(false) };
            let hints = Hints { discard, ..Hints::default() };
            let bytes = space(&disk, hints, &options(), true);
            let config = VirtioBlkConfig::from_slice(&bytes).unwrap();
            let announced = u32::from(config.discard_sector_alignment);
            assert_eq!(announced, sectors, "{block} {discard:?}");
        }
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_writes() {
        let offered = features(&disk(true), &options());
        assert_ne!(offered & 1 << F_RO, 0);
        assert_eq!(offered & (1 << F_DISCARD | 1 << F_WRITE_ZEROES), 0);
        let offered = features(&disk(false), &options());
        assert_eq!(offered & 1 << F_RO, 0);
        assert_eq!(offered & 1 << 1, 0, "SIZE_MAX would make Linux cut segments");
    }
}
