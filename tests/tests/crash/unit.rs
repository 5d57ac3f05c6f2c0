//! Requests of the driver as commands to a logical unit of a virtio-scsi device.

use anyhow::{Result, ensure};
use ringhaul_kit::daemon::SECTOR_BYTES;
use ringhaul_kit::frontend::SCRATCH;
use ringhaul_kit::frontend::memory::Memory;
use ringhaul_kit::frontend::ring::Desc;

use super::driver::{BLOCK_BYTES, SLOTS};

/// The queues for control and events, which come first.
pub(super) const OTHER_QUEUES: u16 = 2;

const HEADER_BYTES: u32 = 51;
const RESPONSE_BYTES: u32 = 108;
/// Bytes for the header and the response of a slot.
const SLOT_BYTES: u64 = 256;
const RESPONSE: u64 = 64;

/// The flag of a descriptor that the device writes to.
const WRITABLE: u16 = 2;

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;
const UNIT_ATTENTION: u8 = 6;

/// The end of a command.
#[derive(PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// The unit reported an event instead of carrying out the command.
    ToBeSentAgain,
}

fn place(queue: usize, slot: usize) -> u64 {
    SCRATCH + (queue * usize::from(SLOTS) + slot) as u64 * SLOT_BYTES
}

/// Writes a command for `count` blocks from `first` on. Returns the chain, which includes `data`.
pub(super) fn put(
    memory: &Memory,
    lun: u8,
    (queue, slot): (usize, usize),
    opcode: u8,
    (first, count): (u64, u64),
    data: Option<Desc>,
) -> Result<Vec<Desc>> {
    let at = place(queue, slot);
    let mut header = [0; HEADER_BYTES as usize];
    header[..4].copy_from_slice(&[1, 0, 0x40, lun]);
    header[8..16].copy_from_slice(&at.to_le_bytes());
    let sectors = (BLOCK_BYTES / SECTOR_BYTES) as u64;
    header[19] = opcode;
    header[21..29].copy_from_slice(&(first * sectors).to_be_bytes());
    header[29..33].copy_from_slice(&u32::try_from(count * sectors)?.to_be_bytes());
    memory.write(at, &header)?;
    memory.write(at + RESPONSE, &[0xee; RESPONSE_BYTES as usize])?;
    let (header, response) =
        (Desc::readable(at, HEADER_BYTES), Desc::writable(at + RESPONSE, RESPONSE_BYTES));
    let (out, into) = match data {
        Some(data) if data.flags & WRITABLE == 0 => (Some(data), None),
        other => (None, other),
    };
    Ok([Some(header), out, Some(response), into].into_iter().flatten().collect())
}

/// Reads the response to a command.
///
/// # Errors
///
/// If the command has failed.
pub(super) fn outcome(memory: &Memory, (queue, slot): (usize, usize)) -> Result<Outcome> {
    let response = memory.read(place(queue, slot) + RESPONSE, RESPONSE_BYTES as usize)?;
    let (status, response_code, sense_key) = (response[10], response[11], response[14] & 0xf);
    if response_code == 0 && status == CHECK_CONDITION && sense_key == UNIT_ATTENTION {
        return Ok(Outcome::ToBeSentAgain);
    }
    ensure!(response_code == 0 && status == GOOD, "a command ended with {response:x?}");
    Ok(Outcome::Done)
}
