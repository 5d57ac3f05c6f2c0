//! Reads and writes of the configuration space ("Virtio device config space").

use std::os::fd::OwnedFd;

use device::Device;
use iomem::fits;
use rustix::net::{SendFlags, send};

use super::message::{Config, Header, code, protocol_feature};
use super::outcome::Refusal;

/// The protocol features that the daemon offers.
pub const PROTOCOL_FEATURES: u64 = protocol_feature::MQ
    | protocol_feature::LOG_SHMFD
    | protocol_feature::REPLY_ACK
    | protocol_feature::BACKEND_REQ
    | protocol_feature::CONFIG
    | protocol_feature::INFLIGHT_SHMFD
    | protocol_feature::RESET_DEVICE
    | protocol_feature::CONFIGURE_MEM_SLOTS
    | protocol_feature::STATUS
    | protocol_feature::GET_VRING_BASE_INFLIGHT
    | protocol_feature::GET_VRING_BASE_SKIP_DRAIN;

/// The protocol features of this device. Front-ends of virtio-scsi keep its configuration space
/// themselves.
pub(super) fn protocol_features(device: &Device) -> u64 {
    match device {
        Device::Blk(_) => PROTOCOL_FEATURES,
        Device::Scsi(_) => PROTOCOL_FEATURES & !protocol_feature::CONFIG,
    }
}

/// Bytes of a configuration space that front-ends may name.
const SPACE_BYTES: u32 = 0x1000;
/// The offset at which some front-ends place the device's registers in the configuration space.
const REGISTERS_OFFSET: u32 = 0x100;

/// The writer is the driver.
const FROM_DRIVER: u32 = 0;
/// The writer is a migration, which may write all fields.
const FROM_MIGRATION: u32 = 1;
/// The flags that front-ends send with a read, where they have no meaning.
const READ_FLAGS: u32 = 3;

/// The answer to a read.
pub(super) fn read(device: &Device, config: &Config) -> Result<Vec<u8>, Refusal> {
    if config.flags & !READ_FLAGS != 0 {
        let text =
            format!("a read of the configuration space has unknown flags {:#x}", config.flags);
        return Err(Refusal::harmless(text));
    }
    check_range(config)?;
    let data = device.read_config(offset_of(config), config.data.len());
    Ok(Config { data, ..*config }.encode())
}

/// Carries out a write. A guest can cause any write of its driver, so a refused one does not end
/// the connection. A guest must not continue with a device other than its own.
pub(super) fn write(device: &Device, config: &Config) -> Result<(), Refusal> {
    check_range(config)?;
    let offset = offset_of(config);
    match config.flags {
        FROM_DRIVER => device.write_config(offset, &config.data).map_err(Refusal::harmless),
        FROM_MIGRATION => device.restore_config(offset, &config.data).map_err(|error| {
            Refusal::needing_ack(format!("the guest comes from another device: {error}"))
        }),
        flags => Err(Refusal::harmless(format!(
            "a write to the configuration space has unknown flags {flags:#x}"
        ))),
    }
}

/// Notifies a front-end that has negotiated it that the configuration has changed. Returns false if
/// it has not, or if the message cannot be sent.
pub(super) fn send_change(channel: &OwnedFd, protocol_features: u64) -> bool {
    let wanted = protocol_feature::BACKEND_REQ | protocol_feature::CONFIG;
    let message = Header::new(code::BACKEND_CONFIG_CHANGE, 0).encode();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    protocol_features & wanted == wanted && send(channel, &message, flags) == Ok(message.len())
}

fn check_range(config: &Config) -> Result<(), Refusal> {
    let size: u32 = fits(config.data.len(), "bytes of a message");
    let end = config.offset.checked_add(size);
    if size == 0 || end.is_none_or(|end| end > SPACE_BYTES) {
        let text =
            format!("{size} bytes at offset {} are outside the configuration space", config.offset);
        return Err(Refusal::harmless(text));
    }
    Ok(())
}

/// The offset in the configuration space: most front-ends count from its start, some from the start
/// of the device's registers, 256 bytes earlier.
fn offset_of(config: &Config) -> usize {
    config.offset.checked_sub(REGISTERS_OFFSET).unwrap_or(config.offset) as usize
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A front-end that has not asked for them does not understand messages of the back-end.
    #[test]
    fn only_a_front_end_that_wants_it_hears_of_a_change() {
        let (channel, config) = (protocol_feature::BACKEND_REQ, protocol_feature::CONFIG);
        let others = PROTOCOL_FEATURES & !(channel | config);
        for (features, is_told) in [
            (0, false),
            (channel, false),
            (config, false),
            (others, false),
            (others | channel, false),
            (others | config, false),
            (channel | config, true),
            (PROTOCOL_FEATURES, true),
        ] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            assert_eq!(send_change(&ours.into(), features), is_told, "{features:#x}");
            let mut told = Vec::new();
            theirs.read_to_end(&mut told).unwrap();
            let message = [2_u32, 1, 0].map(u32::to_ne_bytes).concat();
            assert_eq!(told, if is_told { message } else { Vec::new() }, "{features:#x}");
        }
    }
}
