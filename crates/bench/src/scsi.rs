//! virtio-scsi from the driver's side (virtio 1.3, section 5.6): the configuration space, the
//! discovery of units, requests and responses.

#![forbid(unsafe_code)]

pub(crate) mod command;
pub(crate) mod lun;
pub(crate) mod request;
pub(crate) mod sense;

use std::io;

use iomem::fits;

use crate::plan::{DeviceInfo, TargetKind};
use crate::vhost_user::Connection;
use request::{CDB_BYTES, SENSE_BYTES};

/// The index after the control queue and the event queue.
pub(crate) const FIRST_REQUEST_QUEUE: usize = 2;

/// The size of `struct virtio_scsi_config`.
const CONFIG_BYTES: usize = 36;

/// Reads the properties of the device. The configuration space may be missing: QEMU keeps it in the
/// front-end, so back-ends need none. The units are still unknown.
pub(crate) fn read_info(connection: &Connection) -> io::Result<DeviceInfo> {
    let config = connection.config(CONFIG_BYTES)?;
    // Every device has at least one request queue, so a server without a count has one.
    let queues = connection.max_queues().unwrap_or(FIRST_REQUEST_QUEUE + 1);
    parse_info(config.as_deref(), queues)
}

fn parse_info(config: Option<&[u8]>, queues: usize) -> io::Result<DeviceInfo> {
    let mut info = DeviceInfo {
        kind: TargetKind::Scsi,
        units: Vec::new(),
        max_queues: queues.saturating_sub(FIRST_REQUEST_QUEUE),
        can_flush: true,
        size_max: None,
        seg_max: None,
    };
    let Some(config) = config else { return Ok(info) };
    let field = |at: usize| {
        let bytes = config[at..].first_chunk().copied();
        bytes.map_or(0, u32::from_le_bytes)
    };
    let count = |at| fits::<_, usize>(field(at), "a field of the configuration space");
    let (sense_bytes, cdb_bytes) = (count(20), count(24));
    if (sense_bytes, cdb_bytes) != (SENSE_BYTES, CDB_BYTES) {
        return Err(io::Error::other(format!(
            "it announces sense data of {sense_bytes} and CDBs of {cdb_bytes} bytes, where a \
             device that was reset has {SENSE_BYTES} and {CDB_BYTES}; is it a SCSI device?"
        )));
    }
    info.seg_max = Some(field(4)).filter(|segments| *segments > 0);
    info.max_queues = info.max_queues.min(count(0));
    Ok(info)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(fields: [u32; 7]) -> Vec<u8> {
        let mut bytes: Vec<_> = fields.iter().flat_map(|field| field.to_le_bytes()).collect();
        bytes.resize(CONFIG_BYTES, 0);
        bytes
    }

    #[test]
    fn a_device_without_configuration_space_has_the_defaults() {
        let info = parse_info(None, 6).unwrap();
        assert_eq!((info.max_queues, info.seg_max), (4, None));
        assert_eq!(parse_info(None, 1).unwrap().max_queues, 0);
    }

    #[test]
    fn the_configuration_space_sets_limits() {
        let limits = config([3, 126, 0xffff, 128, 16, 96, 32]);
        let info = parse_info(Some(&limits), 256).unwrap();
        assert_eq!((info.max_queues, info.seg_max), (3, Some(126)));
        assert_eq!(parse_info(Some(&limits), 4).unwrap().max_queues, 2);
        let other = config([3, 126, 0xffff, 128, 16, 252, 32]);
        let error = parse_info(Some(&other), 4).unwrap_err().to_string();
        assert!(error.contains("252") && error.contains("96"), "{error}");
    }
}
