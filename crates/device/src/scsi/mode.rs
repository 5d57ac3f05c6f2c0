//! MODE SENSE and MODE SELECT (SPC-5, sections 6.13 and 7.5; SBC-4, section 6.5).

use super::block;
use super::cdb::{Cdb, Op, WHOLE_BYTE, field_start};
use super::outcome::{Data, Failure, TaskHandle, Transferred};
use super::request_queue::LocalUnit;
use super::reserve;
use super::task_wait::DiskTask;
use super::unit::Unit;
use crate::access::sense::{Format, Sense};

const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const EXCEPTIONS: u8 = 0x1c;
const ALL_PAGES: u8 = 0x3f;
const ALL_SUBPAGES: u8 = 0xff;

/// WCE, in the third byte of the caching page.
const WRITE_CACHE: u8 = 0x04;
/// D_SENSE, in the third byte of the control page.
const DESCRIPTOR_SENSE: u8 = 0x04;
/// Beginnings of the fields of pages (SBC-4, section 6.5.6; SPC-5, sections 7.5.10 and 7.5.14;
/// SBC-4, section 6.5.8), for [`field_start`].
const CACHING_FIELDS: [u8; 20] = [
    0xe0, WHOLE_BYTE, 0xff, 0x88, WHOLE_BYTE, 0, WHOLE_BYTE, 0, WHOLE_BYTE, 0, WHOLE_BYTE, 0, 0xf5,
    WHOLE_BYTE, WHOLE_BYTE, 0, WHOLE_BYTE, WHOLE_BYTE, 0, 0,
];
const CONTROL_FIELDS: [u8; 12] =
    [0xe0, WHOLE_BYTE, 0x9f, 0x8d, 0xec, 0xfc, WHOLE_BYTE, 0, WHOLE_BYTE, 0, WHOLE_BYTE, 0];
const EXCEPTIONS_FIELDS: [u8; 12] =
    [0xe0, WHOLE_BYTE, 0xff, 0x88, WHOLE_BYTE, 0, 0, 0, WHOLE_BYTE, 0, 0, 0];

/// SPF, of the first byte of a page.
const SUBPAGE_FORMAT: u8 = 0x40;

/// WP and DPOFUA, of the device-specific parameter (SBC-4, section 6.5.1).
const WRITE_PROTECTED: u8 = 0x80;
const DPO_AND_FUA: u8 = 0x10;

/// The requested values of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Values {
    Current,
    Changeable,
    Default,
}

/// The difference between the two lengths of a command.
struct Form {
    /// Bytes of the header.
    header: usize,
    /// If true, blocks of the medium are counted in eight bytes.
    long_blocks: bool,
}

impl Form {
    fn from_cdb(cdb: &Cdb) -> Self {
        let is_short = cdb.opcode() < 0x20;
        let long_blocks = !is_short && cdb.byte(1) & 0x10 != 0;
        Self { header: if is_short { 4 } else { 8 }, long_blocks }
    }

    /// The parameter list length, or the allocation length.
    fn length(&self, cdb: &Cdb) -> usize {
        if self.header == 4 { cdb.byte(4).into() } else { cdb.u16(7).into() }
    }
}

pub(super) fn sense(unit: &Unit, cdb: &Cdb, data: &Data) -> Transferred {
    let form = Form::from_cdb(cdb);
    let values = match cdb.byte(2) >> 6 {
        0 => Values::Current,
        1 => Values::Changeable,
        2 => Values::Default,
        _ => return Err(Sense::SAVING.into()),
    };
    let (page, subpage) = (cdb.byte(2) & 0x3f, cdb.byte(3));
    if subpage != 0 && subpage != ALL_SUBPAGES {
        return Err(Sense::in_cdb(3, None).into());
    }
    let pages: Vec<u8> = match page {
        CACHING => caching(unit, values).into(),
        CONTROL => control(unit, values).into(),
        EXCEPTIONS => exceptions().into(),
        ALL_PAGES => {
            let pages = [&caching(unit, values)[..], &control(unit, values), &exceptions()];
            pages.concat()
        }
        _ => return Err(Sense::in_cdb(2, Some(5)).into()),
    };
    let has_blocks = cdb.byte(1) & 8 == 0;
    let blocks = if has_blocks { block_descriptor(unit, form.long_blocks) } else { Vec::new() };
    let protected = if unit.info().read_only { WRITE_PROTECTED } else { 0 };
    let specific = protected | DPO_AND_FUA;
    let after = form.header + blocks.len() + pages.len();
    let mut answer = if form.header == 4 {
        let length = iomem::fits(after - 1, "bytes of mode pages");
        vec![length, 0, specific, iomem::fits(blocks.len(), "a descriptor")]
    } else {
        let length: u16 = iomem::fits(after - 2, "bytes of mode pages");
        let descriptor: u16 = iomem::fits(blocks.len(), "a descriptor");
        let mut header = length.to_be_bytes().to_vec();
        header.extend([0, specific, u8::from(form.long_blocks && has_blocks), 0]);
        header.extend(descriptor.to_be_bytes());
        header
    };
    answer.extend(blocks);
    answer.extend(pages);
    data.answer(&answer, form.length(cdb))
}

/// The size of the medium (SBC-4, section 6.5.2).
fn block_descriptor(unit: &Unit, long: bool) -> Vec<u8> {
    let info = unit.info();
    let blocks = info.size_bytes / u64::from(info.logical_block_bytes);
    if long {
        let mut descriptor = blocks.to_be_bytes().to_vec();
        descriptor.extend([0; 4]);
        descriptor.extend(info.logical_block_bytes.to_be_bytes());
        return descriptor;
    }
    // Larger numbers are reported as the highest value.
    let mut descriptor = u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes().to_vec();
    // A block has 64 KiB at most, so the byte before its length is 0.
    descriptor.extend(info.logical_block_bytes.to_be_bytes());
    descriptor
}

fn caching(unit: &Unit, values: Values) -> [u8; 20] {
    let is_on = match values {
        Values::Current => unit.has_write_cache(),
        // Without a cache there is nothing to switch.
        Values::Changeable | Values::Default => unit.options.write_cache,
    };
    let mut page = [0; 20];
    page[..2].copy_from_slice(&[CACHING, 18]);
    page[2] = if is_on { WRITE_CACHE } else { 0 };
    page
}

fn control(unit: &Unit, values: Values) -> [u8; 12] {
    let has_descriptors = match values {
        Values::Current => unit.sense_format() == Format::Descriptor,
        Values::Changeable => true,
        Values::Default => false,
    };
    let mut page = [0; 12];
    page[..2].copy_from_slice(&[CONTROL, 10]);
    page[2] = if has_descriptors { DESCRIPTOR_SENSE } else { 0 };
    if values != Values::Changeable {
        // Commands are carried out in any order.
        page[3] = 0x10;
        // A busy timeout without a limit.
        page[8..10].copy_from_slice(&[0xff, 0xff]);
    }
    page
}

/// No exceptions are reported.
fn exceptions() -> [u8; 12] {
    let mut page = [0; 12];
    page[..2].copy_from_slice(&[EXCEPTIONS, 10]);
    page
}

pub(super) async fn select(
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
    data: Data,
) -> Transferred {
    let (unit, form) = (&local.unit, Form::from_cdb(cdb));
    if cdb.byte(1) & 0x10 == 0 {
        // Only pages in the format of the standard are supported.
        return Err(Sense::in_cdb(1, Some(4)).into());
    }
    let length = form.length(cdb);
    if length == 0 {
        return Ok(0);
    }
    // The list is freed before the command waits.
    let Selected { write_cache, sense_format } = parse(unit, &form, &data.list(length)?)?;
    let write_cache = write_cache.filter(|wanted| *wanted != unit.has_write_cache());
    match write_cache {
        Some(true) => unit.set_write_cache(true),
        Some(false) => switch_cache_off(local, cdb, task).await?,
        None => {}
    }
    let sense_format = sense_format.filter(|wanted| *wanted != unit.sense_format());
    if let Some(format) = sense_format {
        unit.access.set_descriptor_sense(format == Format::Descriptor);
    }
    if write_cache.is_some() || sense_format.is_some() {
        unit.access.add_attention_for_others(unit.attached.nexus(), Sense::MODE_CHANGED);
    }
    Ok(length)
}

/// Flushes all writes while no task writes, and switches the cache off: initiators stop flushing
/// then.
async fn switch_cache_off(
    local: &LocalUnit,
    cdb: &Cdb,
    task: TaskHandle<'_>,
) -> Result<(), Failure> {
    let unit = &local.unit;
    let exclusive = DiskTask::new(local, task).take_medium().await?;
    // The reservation may have changed since the command began.
    reserve::check(unit, Op::ModeSelect, cdb)?;
    block::flush(local).await?;
    unit.set_write_cache(false);
    drop(exclusive);
    Ok(())
}

/// The changeable fields of the pages in a parameter list.
#[derive(Default)]
struct Selected {
    write_cache: Option<bool>,
    sense_format: Option<Format>,
}

/// Reads a parameter list. All of it is checked before anything is changed.
fn parse(unit: &Unit, form: &Form, list: &[u8]) -> Result<Selected, Failure> {
    let Some((header, rest)) = list.split_at_checked(form.header) else {
        return Err(Sense::LIST_LENGTH.into());
    };
    let (descriptor, descriptor_at, is_long) = if form.header == 4 {
        (usize::from(header[3]), 3, false)
    } else {
        (usize::from(u16::from_be_bytes([header[6], header[7]])), 6, header[4] & 1 != 0)
    };
    let Some((blocks, mut pages)) = rest.split_at_checked(descriptor) else {
        return Err(Sense::LIST_LENGTH.into());
    };
    let expected = block_descriptor(unit, is_long);
    if !blocks.is_empty() {
        if blocks.len() != expected.len() {
            return Err(Sense::in_list(descriptor_at, None).into());
        }
        if let Some(at) = differs_at(blocks, &expected, is_long) {
            return Err(Sense::in_list(place(form.header + at), None).into());
        }
    }
    let mut selected = Selected::default();
    while !pages.is_empty() {
        let at = list.len() - pages.len();
        let [code, length, ..] = *pages else { return Err(Sense::LIST_LENGTH.into()) };
        let Some(Page { current, changeable, begins }) = Page::from_code(unit, code & 0x3f) else {
            return Err(Sense::in_list(place(at), Some(5)).into());
        };
        if code & SUBPAGE_FORMAT != 0 {
            // No page has that format.
            return Err(Sense::in_list(place(at), Some(6)).into());
        }
        if usize::from(length) != current.len() - 2 {
            return Err(Sense::in_list(place(at + 1), None).into());
        }
        let Some((page, rest)) = pages.split_at_checked(current.len()) else {
            return Err(Sense::LIST_LENGTH.into());
        };
        for byte in 2..page.len() {
            let changed = (page[byte] ^ current[byte]) & !changeable[byte];
            if let Some(bit) = changed.checked_ilog2() {
                let bit = u8::try_from(bit).expect("a bit of a byte");
                let (byte, bit) = field_start(|byte| begins[byte], byte, bit);
                return Err(Sense::in_list(place(at) + byte, bit).into());
            }
        }
        match code & 0x3f {
            CACHING => selected.write_cache = Some(page[2] & WRITE_CACHE != 0),
            CONTROL if page[2] & DESCRIPTOR_SENSE != 0 => {
                selected.sense_format = Some(Format::Descriptor);
            }
            CONTROL => selected.sense_format = Some(Format::Fixed),
            _ => {}
        }
        pages = rest;
    }
    Ok(selected)
}

/// A page with its current values and its changeable bits.
struct Page {
    current: Vec<u8>,
    changeable: Vec<u8>,
    /// Beginnings of the fields.
    begins: &'static [u8],
}

impl Page {
    fn from_code(unit: &Unit, code: u8) -> Option<Self> {
        let all = |values| match code {
            CACHING => Some((caching(unit, values).to_vec(), &CACHING_FIELDS[..])),
            CONTROL => Some((control(unit, values).to_vec(), &CONTROL_FIELDS[..])),
            EXCEPTIONS => Some((exceptions().to_vec(), &EXCEPTIONS_FIELDS[..])),
            _ => None,
        };
        let ((current, begins), (changeable, _)) =
            (all(Values::Current)?, all(Values::Changeable)?);
        Some(Self { current, changeable, begins })
    }
}

/// Returns the offset at which a block descriptor differs from the medium: its number of blocks,
/// the byte after that, or the block length. A number of 0, or the highest, changes nothing (SBC-4,
/// section 6.5.2).
fn differs_at(blocks: &[u8], expected: &[u8], is_long: bool) -> Option<usize> {
    let (count, length_at) = if is_long { (8, 12) } else { (4, 5) };
    let is_count = blocks[..count] == expected[..count]
        || blocks[..count].iter().all(|byte| *byte == 0)
        || blocks[..count].iter().all(|byte| *byte == 0xff);
    if !is_count {
        Some(0)
    } else if let Some(at) = (count..length_at).find(|at| blocks[*at] != expected[*at]) {
        Some(at)
    } else {
        (blocks[length_at..] != expected[length_at..]).then_some(length_at)
    }
}

fn place(at: usize) -> u16 {
    iomem::fits(at, "a place in a list")
}
