//! Reads and writes of the configuration space ("Virtio device config space").

use std::io;

use super::message::Config;
use super::outcome::Refusal;
use super::ring::invalid;
use crate::blk::BlkDevice;
use crate::blk::config::WRITEBACK_OFFSET;

/// Bytes of a configuration space that front-ends may name.
const SPACE_BYTES: u32 = 0x1000;
/// Where some front-ends have the device's registers begin in the configuration space.
const REGISTERS_OFFSET: u32 = 0x100;

/// Who writes: the driver.
const FROM_DRIVER: u32 = 0;
/// Who writes: a migration, which may write all fields.
const FROM_MIGRATION: u32 = 1;
/// The flags that front-ends send with a read, where they mean nothing.
const READ_FLAGS: u32 = 3;

/// The answer to a read.
pub(super) fn read(device: &BlkDevice, config: &Config) -> Result<Vec<u8>, Refusal> {
    if config.flags & !READ_FLAGS != 0 {
        let text = format!("a read of the configuration with flags {:#x}", config.flags);
        return Err(Refusal::harmless(text));
    }
    check_range(config)?;
    Ok(Config { data: bytes_of(device, config), ..*config }.encode())
}

/// Carries out a write. A guest can have any made, so none that is refused ends the connection.
pub(super) fn write(device: &BlkDevice, config: &Config) -> Result<(), Refusal> {
    check_range(config)?;
    let offset = offset_of(config);
    let written = match config.flags {
        FROM_DRIVER => device.write_config(offset, &config.data),
        FROM_MIGRATION => restore(device, offset, config),
        flags => Err(invalid(format!("a write to the configuration with flags {flags:#x}"))),
    };
    written.map_err(Refusal::harmless)
}

/// What is there. What lies beyond the fields that we have reads as zeroes; the size is as asked.
fn bytes_of(device: &BlkDevice, config: &Config) -> Vec<u8> {
    let mut bytes = vec![0; config.data.len()];
    if let Some(rest) = device.config_space().get(offset_of(config)..) {
        let len = rest.len().min(bytes.len());
        bytes[..len].copy_from_slice(&rest[..len]);
    }
    bytes
}

/// A migration writes any fields. Those that the disk decides must be as they are here.
fn restore(device: &BlkDevice, offset: usize, config: &Config) -> io::Result<()> {
    let mut writeback = None;
    let present = bytes_of(device, config);
    for (at, (new, old)) in (offset..).zip(config.data.iter().zip(present)) {
        if at == WRITEBACK_OFFSET {
            writeback = Some(*new);
        } else if *new != old {
            let text = format!("byte {at} of the configuration is {old:#x} here, not {new:#x}");
            return Err(invalid(text));
        }
    }
    writeback.map_or(Ok(()), |value| device.write_config(WRITEBACK_OFFSET, &[value]))
}

fn check_range(config: &Config) -> Result<(), Refusal> {
    let size = u32::try_from(config.data.len()).unwrap_or(u32::MAX);
    let end = config.offset.checked_add(size);
    if size == 0 || end.is_none_or(|end| end > SPACE_BYTES) {
        let text = format!("{size} bytes at {} of the configuration", config.offset);
        return Err(Refusal::harmless(text));
    }
    Ok(())
}

/// The place in the configuration space: most front-ends count from its start, some from the start
/// of the device's registers, 256 bytes earlier.
fn offset_of(config: &Config) -> usize {
    config.offset.checked_sub(REGISTERS_OFFSET).unwrap_or(config.offset) as usize
}
