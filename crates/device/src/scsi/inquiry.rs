//! INQUIRY and its vital product data pages (SPC-5, sections 6.6 and 7.7; SBC-4, section 6.6).

use blockio::disk::DiskInfo;

use super::block::WRITE_SAME_BYTES_MAX;
use super::cdb::Cdb;
use super::outcome::{Data, Transferred};
use super::unit::{Identifiers, Unit, UnitOptions};
use super::unmap;
use super::verify::COMPARE_BLOCKS_MAX;
use crate::access::persist::TARGET_PORT;
use crate::access::sense::Sense;

/// Bytes of the standard data: up to the version descriptors.
const STANDARD_BYTES: usize = 74;
/// Standards: SAM-5, SPC-4, SBC-3 (SPC-5, section 6.6.2).
const VERSIONS: [u16; 3] = [0x00a0, 0x0460, 0x04c0];

const SUPPORTED_PAGES: u8 = 0x00;
const SERIAL: u8 = 0x80;
const IDENTIFICATION: u8 = 0x83;
const LIMITS: u8 = 0xb0;
const CHARACTERISTICS: u8 = 0xb1;
const PROVISIONING: u8 = 0xb2;
const PAGES: [u8; 6] =
    [SUPPORTED_PAGES, SERIAL, IDENTIFICATION, LIMITS, CHARACTERISTICS, PROVISIONING];

/// The peripheral qualifier and type of an address without a unit (SPC-5, section 6.6.2).
const NOTHING: u8 = 0x7f;
/// The device type of the well-known unit.
const WELL_KNOWN: u8 = 0x1e;

pub(super) fn inquiry(unit: &Unit, cdb: &Cdb, data: &Data) -> Transferred {
    let answer = match check(cdb)? {
        None => standard(0, &unit.options.vendor, &unit.options.product, &unit.options.revision),
        Some(SUPPORTED_PAGES) => page(SUPPORTED_PAGES, &PAGES),
        Some(SERIAL) => page(SERIAL, unit.options.serial.as_bytes()),
        Some(IDENTIFICATION) => page(IDENTIFICATION, &identification(unit)),
        Some(LIMITS) => page(LIMITS, &limits(unit)),
        Some(CHARACTERISTICS) => page(CHARACTERISTICS, &characteristics(unit)),
        Some(PROVISIONING) => page(PROVISIONING, &provisioning(unit)),
        Some(_) => return Err(Sense::in_cdb(2, None).into()),
    };
    data.answer(&answer, cdb.u16(3).into())
}

/// The answer of an address without a unit.
pub(super) fn answer_for_absent(cdb: &Cdb, data: &Data) -> Transferred {
    other(NOTHING, &[SUPPORTED_PAGES], cdb, data)
}

/// The answer of the well-known unit.
pub(super) fn answer_for_well_known(cdb: &Cdb, data: &Data) -> Transferred {
    other(WELL_KNOWN, &[SUPPORTED_PAGES, IDENTIFICATION], cdb, data)
}

fn other(kind: u8, pages: &[u8], cdb: &Cdb, data: &Data) -> Transferred {
    let mut answer = match check(cdb)? {
        None => standard(kind, "Ringhaul", "", ""),
        Some(SUPPORTED_PAGES) => page(SUPPORTED_PAGES, pages),
        Some(code @ IDENTIFICATION) if pages.contains(&code) => page(code, &target_port()),
        Some(_) => return Err(Sense::in_cdb(2, None).into()),
    };
    answer[0] = kind;
    data.answer(&answer, cdb.u16(3).into())
}

/// Returns the requested page; `None` for the standard data.
fn check(cdb: &Cdb) -> Result<Option<u8>, Sense> {
    let page = cdb.byte(2);
    match cdb.byte(1) & 1 {
        0 if page != 0 => Err(Sense::in_cdb(2, None)),
        0 => Ok(None),
        _ => Ok(Some(page)),
    }
}

fn standard(kind: u8, vendor: &str, product: &str, revision: &str) -> Vec<u8> {
    let mut data = vec![0; STANDARD_BYTES];
    data[0] = kind;
    // SPC-4.
    data[2] = 6;
    // HISUP, and the response data format, which is always 2.
    data[3] = 0x12;
    data[4] = iomem::fits(STANDARD_BYTES - 5, "the length of the data");
    // Commands are queued.
    data[7] = 0x02;
    for (place, text) in [(8..16, vendor), (16..32, product), (32..36, revision)] {
        put_text(&mut data[place], text);
    }
    for (place, version) in data[58..].chunks_exact_mut(2).zip(VERSIONS) {
        place.copy_from_slice(&version.to_be_bytes());
    }
    data
}

/// Writes text left-aligned, padded with spaces.
fn put_text(place: &mut [u8], text: &str) {
    place.fill(b' ');
    place[..text.len()].copy_from_slice(text.as_bytes());
}

fn page(code: u8, content: &[u8]) -> Vec<u8> {
    let length: u16 = iomem::fits(content.len(), "the length of a page");
    let mut page = vec![0, code];
    page.extend(length.to_be_bytes());
    page.extend(content);
    page
}

/// Identifiers that are unique to the disk, and the same on each path to it.
fn identification(unit: &Unit) -> Vec<u8> {
    let UnitOptions { identifiers, naa, vendor, serial, .. } = &unit.options;
    let mut descriptors = Vec::new();
    if *identifiers != Identifiers::VendorSpecific {
        // Binary, NAA, of the logical unit.
        descriptors.extend([0x01, 0x03, 0, 8]);
        descriptors.extend(naa);
    }
    let mut text = Vec::new();
    let kind = match identifiers {
        // T10 vendor identification: the vendor comes first.
        Identifiers::Standard => {
            text.resize(8, b' ');
            put_text(&mut text, vendor);
            0x01
        }
        Identifiers::VendorSpecific | Identifiers::VendorSpecificAndNaa => 0x00,
    };
    text.extend(serial.as_bytes());
    // ASCII, of the logical unit.
    descriptors.extend([0x02, kind, 0, iomem::fits(text.len(), "an identifier")]);
    descriptors.extend(text);
    descriptors.extend(target_port());
    descriptors
}

/// The identifier of the target port, which is the only one of a unit that is no disk.
fn target_port() -> [u8; 8] {
    let [high, low] = TARGET_PORT.to_be_bytes();
    // Binary, relative target port identifier, of the target port.
    [0x01, 0x14, 0, 4, 0, 0, high, low]
}

/// Block limits (SBC-4, section 6.6.4).
fn limits(unit: &Unit) -> [u8; 60] {
    let info = unit.info();
    let discard = || unit.source.discard_bytes().unwrap_or(info.logical_block_bytes);
    limits_of(&info, unit.source.optimal_bytes(), unit.can_unmap().then(discard))
}

/// Block limits of a disk with these hints in bytes. `discard` is `None` if it cannot unmap.
fn limits_of(info: &DiskInfo, optimal: Option<u32>, discard: Option<u32>) -> [u8; 60] {
    let block = u64::from(info.logical_block_bytes);
    let mut page = [0; 60];
    // WSNZ is 0: a count of 0 covers all blocks to the end.
    page[1] = COMPARE_BLOCKS_MAX;
    let granularity = info.physical_block_bytes / info.logical_block_bytes;
    page[2..4].copy_from_slice(&u16::try_from(granularity).unwrap_or(0).to_be_bytes());
    // 0 if unknown.
    let optimal = optimal.unwrap_or(0) / info.logical_block_bytes;
    page[8..12].copy_from_slice(&optimal.to_be_bytes());
    if let Some(discard) = discard {
        page[16..20].copy_from_slice(&unmap::BLOCKS_MAX.to_be_bytes());
        page[20..24].copy_from_slice(&unmap::DESCRIPTORS_MAX.to_be_bytes());
        page[24..28].copy_from_slice(&(discard / info.logical_block_bytes).to_be_bytes());
    }
    page[32..40].copy_from_slice(&(WRITE_SAME_BYTES_MAX / block).to_be_bytes());
    page
}

/// Block device characteristics (SBC-4, section 6.6.2).
fn characteristics(unit: &Unit) -> [u8; 60] {
    let mut page = [0; 60];
    // 1: does not rotate. 0: rotates at an unknown rate.
    let rate: u16 = if unit.options.rotational { 0 } else { 1 };
    page[0..2].copy_from_slice(&rate.to_be_bytes());
    page
}

/// Logical block provisioning (SBC-4, section 6.6.7).
fn provisioning(unit: &Unit) -> [u8; 4] {
    if unit.can_unmap() {
        // UNMAP, WRITE SAME (16) and (10) deallocate blocks, with unspecified content after that.
        // Thin: the medium may have less room than it reports.
        [0, 0xe0, 0x02, 0]
    } else {
        [0; 4]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests hints in bytes, which few test disks give.
    #[test]
    fn hints_of_a_disk_count_in_its_blocks() {
        for (logical, physical, granularity) in
            [(512_u32, 512, 1_u16), (512, 4096, 8), (4096, 4096, 1)]
        {
            let info = DiskInfo {
                size_bytes: 1 << 30,
                logical_block_bytes: logical,
                physical_block_bytes: physical,
                read_only: false,
                direct: true,
            };
            let number = |page: &[u8; 60], at: usize| {
                u32::from_be_bytes(std::array::from_fn(|byte| page[at + byte]))
            };
            let page = limits_of(&info, Some(1 << 22), Some(64 << 10));
            assert_eq!(page[2..4], granularity.to_be_bytes(), "{info:?}");
            assert_eq!(number(&page, 8), (1 << 22) / logical, "{info:?}");
            assert_eq!(number(&page, 24), (64 << 10) / logical, "{info:?}");
            let page = limits_of(&info, None, None);
            assert_eq!((number(&page, 8), &page[16..32]), (0, &[0; 16][..]), "{info:?}");
        }
    }
}
