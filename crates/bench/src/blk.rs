//! virtio-blk: the configuration space, and requests from header to status (virtio 1.3, section
//! 5.2).

#![forbid(unsafe_code)]

use std::io;

use crate::memory::{RequestLayout, SharedMemory};
use crate::pattern::{Io, Op};
use crate::plan::{DeviceInfo, TargetKind, UnitInfo};
use crate::vhost_user::Connection;

const SIZE_MAX: u64 = 1 << 1;
const SEG_MAX: u64 = 1 << 2;
const RO: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
const FLUSH: u64 = 1 << 9;
const TOPOLOGY: u64 = 1 << 10;
const MQ: u64 = 1 << 12;

/// The features of virtio-blk that the driver accepts.
pub(crate) const FEATURES: u64 = SIZE_MAX | SEG_MAX | RO | BLK_SIZE | FLUSH | TOPOLOGY | MQ;

/// Up to the fields of write zeroes. Later versions have more fields, which some servers lack.
const CONFIG_BYTES: usize = 60;

const SECTOR_BYTES: u64 = 512;

/// Types of requests.
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH_REQUEST: u32 = 4;

/// The value of the status byte before the server writes it.
const PENDING: u8 = 0xff;

/// A header of 16 bytes, with the status byte in the same cache line.
pub(crate) const LAYOUT: RequestLayout = RequestLayout {
    stride: 64,
    header_bytes: 16,
    response_at: 16,
    response_bytes: 1,
    data_in_last: false,
};

/// Reads the properties of the device.
pub(crate) fn read_info(connection: &Connection) -> io::Result<DeviceInfo> {
    let config = connection.config(CONFIG_BYTES)?.ok_or_else(|| {
        io::Error::other(
            "it offers no configuration space (protocol feature CONFIG), which has the size of the \
             disk; if it is a SCSI device, add --device scsi",
        )
    })?;
    parse_info(&config, connection.features(), connection.max_queues())
}

fn parse_info(config: &[u8], features: u64, queue_limit: Option<usize>) -> io::Result<DeviceInfo> {
    let u16_at =
        |at: usize| config[at..].first_chunk().map_or(0, |bytes| u16::from_le_bytes(*bytes));
    let u32_at =
        |at: usize| config[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    let sectors = config.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let offered = |flag, value: u32| (features & flag != 0 && value > 0).then_some(value);
    let queues = if features & MQ != 0 { usize::from(u16_at(34)) } else { 1 };
    let disk_bytes = sectors
        .checked_mul(SECTOR_BYTES)
        .ok_or_else(|| io::Error::other(format!("it announces a capacity of {sectors} sectors")))?;
    Ok(DeviceInfo {
        kind: TargetKind::Blk,
        units: vec![UnitInfo {
            name: "the disk".to_owned(),
            disk_bytes,
            logical_block_bytes: offered(BLK_SIZE, u32_at(20)).unwrap_or(512),
            read_only: features & RO != 0,
        }],
        max_queues: queues.min(queue_limit.unwrap_or(1)),
        can_flush: features & FLUSH != 0,
        size_max: offered(SIZE_MAX, u32_at(8)),
        seg_max: offered(SEG_MAX, u32_at(12)),
    })
}

/// Writes the request into the slot with its header at `at`.
#[inline]
pub(crate) fn put(memory: &SharedMemory, at: usize, io: &Io) {
    let kind = match io.op {
        Op::Read => IN,
        Op::Write => OUT,
        Op::Flush => FLUSH_REQUEST,
    };
    let sector = io.offset / SECTOR_BYTES;
    memory.put_number(at, (u128::from(sector) << 64 | u128::from(kind)).to_le());
    memory.put_number(at + LAYOUT.response_at, PENDING);
}

/// The result of a completed request: the status.
#[inline]
pub(crate) fn result(memory: &SharedMemory, at: usize) -> i32 {
    memory.number::<u8>(at + LAYOUT.response_at).into()
}

/// Describes a result other than 0.
pub(crate) fn describe_error(result: i32) -> String {
    match result {
        1 => "status 1, I/O error".to_owned(),
        2 => "status 2, not supported".to_owned(),
        _ if result == i32::from(PENDING) => "the device has not written its status".to_owned(),
        _ => format!("status {result}, which is not in the specification"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_its_type_and_sector_and_no_status_yet() {
        let memory = SharedMemory::new(4096).unwrap();
        let io = Io { op: Op::Write, unit: 0, offset: 7 * 512, len: 512 };
        put(&memory, 64, &io);
        let mut bytes = [0; 17];
        memory.at(64, 17).copy_to(&mut bytes);
        assert_eq!(bytes, [1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, PENDING]);
        assert!(describe_error(result(&memory, 64)).contains("not written its status"));
        memory.put_number(64 + LAYOUT.response_at, 0_u8);
        assert_eq!(result(&memory, 64), 0);
    }

    #[test]
    fn fields_count_if_their_feature_was_negotiated() {
        let mut config = [0; CONFIG_BYTES];
        config[0] = 8;
        config[9] = 0x10;
        config[12] = 126;
        config[21] = 0x10;
        config[34] = 4;
        let all = parse_info(&config, u64::MAX, Some(16)).unwrap();
        assert_eq!((all.units[0].disk_bytes, all.units[0].logical_block_bytes), (4096, 4096));
        assert_eq!((all.size_max, all.seg_max, all.max_queues), (Some(4096), Some(126), 4));
        assert!(all.units[0].read_only && all.can_flush);
        let none = parse_info(&config, 0, Some(16)).unwrap();
        assert_eq!((none.units[0].disk_bytes, none.units[0].logical_block_bytes), (4096, 512));
        assert_eq!((none.size_max, none.seg_max, none.max_queues), (None, None, 1));
        config[..8].fill(0xff);
        assert!(parse_info(&config, 0, None).is_err());
    }
}
