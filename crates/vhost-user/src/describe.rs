//! The description of a front-end's set-up: features, queues, memory.

use device::Device;
use iomem::fits;
use virtqueue::GuestMemory;

use super::details::{MemoryDetails, QueueDetails, SessionDetails};
use super::ring::RingState;

/// Names of the feature bits that are offered, from the specification.
type Names = &'static [(u32, &'static str)];

/// Features of all devices and of vhost-user.
const COMMON: Names = &[
    (26, "log-all"),
    (27, "any-layout"),
    (28, "indirect-desc"),
    (29, "event-idx"),
    (34, "ring-packed"),
    (30, "protocol-features"),
    (32, "version-1"),
    (35, "in-order"),
];

/// Features of virtio-blk.
const BLK: Names = &[
    (2, "seg-max"),
    (5, "ro"),
    (6, "blk-size"),
    (9, "flush"),
    (10, "topology"),
    (11, "config-wce"),
    (12, "mq"),
    (13, "discard"),
    (14, "write-zeroes"),
];

/// Features of virtio-scsi.
const SCSI: Names = &[(1, "hotplug"), (2, "change")];

/// Features of the vhost-user protocol.
const PROTOCOL: Names = &[
    (0, "mq"),
    (1, "log-shmfd"),
    (3, "reply-ack"),
    (5, "backend-req"),
    (9, "config"),
    (12, "inflight-shmfd"),
    (13, "reset-device"),
    (15, "configure-mem-slots"),
    (16, "status"),
    (20, "get-vring-base-inflight"),
    (23, "get-vring-base-skip-drain"),
];

/// Describes the front-end's set-up.
pub(super) fn describe(
    device: &Device,
    [features, protocol_features]: [u64; 2],
    rings: &[RingState],
    memory: &GuestMemory,
) -> SessionDetails {
    let own = match device {
        Device::Blk(_) => BLK,
        Device::Scsi(_) => SCSI,
    };
    let queues = (0..).zip(rings).filter(|(_, ring)| ring.settings.size != 0);
    let queue = |(index, ring): (u16, &RingState)| {
        let requests = ring.load().0.requests;
        let role = device.queue_role(index).expect("the device has a queue for each ring").into();
        let (size, state) = (ring.settings.size, ring.state());
        QueueDetails { index, role, size, state, next_avail: ring.next_avail_now(), requests }
    };
    SessionDetails {
        features: names(features, &[own, COMMON]),
        protocol_features: names(protocol_features, &[PROTOCOL]),
        queues: queues.map(queue).collect(),
        memory: MemoryDetails {
            regions: fits(memory.num_regions(), "regions of a map"),
            bytes: memory.bytes(),
        },
    }
}

/// The names of the bits that are set.
fn names(bits: u64, tables: &[Names]) -> Vec<String> {
    let set = (0..64_u32).filter(|bit| bits >> bit & 1 != 0);
    set.map(|bit| {
        let mut known = tables.iter().copied().flatten();
        let name = known.find(|(known, _)| *known == bit);
        name.map_or_else(|| format!("bit-{bit}"), |(_, name)| (*name).to_owned())
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockio::{DiskOptions, DiskSource};
    use device::LogEvents;
    use device::blk::config::BlkOptions;
    use device::scsi::config::ScsiOptions;

    use super::super::config::PROTOCOL_FEATURES;
    use super::super::message::{F_LOG_ALL, F_PROTOCOL_FEATURES};
    use super::*;

    #[test]
    fn each_offered_feature_has_a_name() {
        let disk = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let log = || Arc::new(LogEvents::new("test"));
        let blk = Device::blk(disk, BlkOptions::default(), log());
        let scsi = Device::scsi(ScsiOptions::default(), log());
        let of_blk = names(blk.features() | F_PROTOCOL_FEATURES | F_LOG_ALL, &[BLK, COMMON]);
        let of_scsi = names(scsi.features() | F_PROTOCOL_FEATURES, &[SCSI, COMMON]);
        let protocol = names(PROTOCOL_FEATURES, &[PROTOCOL]);
        for name in [&of_blk, &of_scsi, &protocol].into_iter().flatten() {
            assert!(!name.starts_with("bit-"), "{name}");
        }
        assert!(of_blk.contains(&"flush".to_owned()) && of_scsi.contains(&"hotplug".to_owned()));
        assert_eq!(names(1 << 63 | 1 << 29, &[COMMON]), ["event-idx", "bit-63"]);
    }
}
