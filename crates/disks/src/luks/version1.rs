//! The header of version 1 (LUKS On-Disk Format Specification 1.2.3).

use super::hash::Hash;
use super::header::{
    Header, Kdf, KeyCheck, Payload, STRIPES_MAX, Slot, check_cipher, check_key_bytes, overlap,
    parse_text,
};

/// The start of the header while the disk is being re-encrypted.
pub(super) const REENCRYPTED_MAGIC: [u8; 6] = *b"LUKS\xde\xad";
/// Bytes of the header.
pub(super) const HEADER_BYTES: usize = 592;
/// The unit of offsets.
const UNIT_BYTES: u64 = 512;
const SLOTS: u32 = 8;
const SLOTS_AT: usize = 208;
const SLOT_BYTES: usize = 48;
const ENABLED: u32 = 0x00ac_71f3;
const DISABLED: u32 = 0x0000_dead;

/// Parses a header. If it is detached, the data may begin anywhere.
pub(super) fn parse(bytes: &[u8; HEADER_BYTES], is_detached: bool) -> Result<Header, String> {
    let cipher = format!("{}-{}", parse_text(&bytes[8..40])?, parse_text(&bytes[40..72])?);
    check_cipher(&cipher)?;
    let hash = Hash::from_name(parse_text(&bytes[72..104])?)?;
    let key_bytes = check_key_bytes(read_be(bytes, 108).into())?;
    let check = KeyCheck {
        hash,
        digest: bytes[112..132].to_vec(),
        salt: bytes[132..164].to_vec(),
        rounds: read_be(bytes, 164),
    };
    let payload = Payload {
        offset_bytes: u64::from(read_be(bytes, 104)) * UNIT_BYTES,
        size_bytes: None,
        sector_bytes: 512,
        first_position: 0,
    };
    let mut slots = Vec::new();
    for (index, at) in (0..SLOTS).zip((SLOTS_AT..).step_by(SLOT_BYTES)) {
        match read_be(bytes, at) {
            ENABLED => {}
            DISABLED => continue,
            other => return Err(format!("its key slot {index} has an invalid state: {other:#x}")),
        }
        let stripes = read_be(bytes, at + 44);
        if !(1..=STRIPES_MAX).contains(&stripes) {
            return Err(format!("its key slot {index} has {stripes} stripes instead of 4000"));
        }
        let salt = bytes[at + 8..at + 40].to_vec();
        slots.push(Slot {
            number: index,
            kdf: Kdf::Pbkdf2 { hash, rounds: read_be(bytes, at + 4), salt },
            slot_key_bytes: key_bytes,
            area_offset: u64::from(read_be(bytes, at + 40)) * UNIT_BYTES,
            stripes,
            split_hash: hash,
            key_bytes,
            check: check.clone(),
        });
    }
    let ends = slots.iter().map(|slot| slot.area_offset + slot.area_bytes());
    let end = ends.max().unwrap_or(0).max(HEADER_BYTES as u64);
    if !is_detached && payload.offset_bytes < end {
        return Err(overlap(payload.offset_bytes, end));
    }
    Ok(Header {
        version: 1,
        uuid: parse_text(&bytes[168..208])?.to_owned(),
        payload,
        slots,
        skipped: String::new(),
        remark: None,
    })
}

fn read_be(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
