//! Commands that report on units and their capabilities (SPC-5, sections 6.33 to 6.40; SBC-4,
//! sections 5.20 and 5.21).

use blockio::disk::{DiskInfo, ExtentKind};

use super::block;
use super::cdb::{COMMANDS, Cdb, Command, Op, find};
use super::inquiry;
use super::outcome::{Data, Failure, Transferred};
use super::request_queue::LocalUnit;
use super::unit::Unit;
use super::units::Units;
use crate::access::sense::{Format, Sense};
use crate::unit_address::UnitAddress;

/// The LUN of the well-known unit.
const REPORT_LUNS_LUN: [u8; 8] = [0xc1, 1, 0, 0, 0, 0, 0, 0];

/// A disk is queried for this many bytes at a time, since it may have to scan all of its tables.
/// The initiator asks again from there.
const LBA_STATUS_BYTES: u64 = 256 << 20;

/// Answers a command for an address without a unit.
pub(super) fn no_unit(units: &Units, address: UnitAddress, cdb: &Cdb, data: &Data) -> Transferred {
    if !units.has_target(address.target) {
        return Err(Failure::BadTarget);
    }
    let Ok(command) = cdb.command() else { return Err(Sense::NO_SUCH_UNIT.into()) };
    match command.op {
        Op::Inquiry | Op::ReportLuns | Op::RequestSense => cdb.check(command)?,
        _ => return Err(Sense::NO_SUCH_UNIT.into()),
    }
    match command.op {
        Op::Inquiry => inquiry::answer_for_absent(cdb, data),
        Op::ReportLuns => list_luns(units, Some(address.target), cdb, data),
        _ => answer_sense(Sense::NO_SUCH_UNIT, cdb, data),
    }
}

/// Answers a command for the well-known unit.
pub(super) fn well_known(units: &Units, cdb: &Cdb, data: &Data) -> Transferred {
    let command = cdb.command().map_err(|_| Sense::UNKNOWN_OPCODE)?;
    match command.op {
        Op::ReportLuns | Op::Inquiry | Op::RequestSense | Op::TestUnitReady => {
            cdb.check(command)?
        }
        _ => return Err(Sense::UNKNOWN_OPCODE.into()),
    }
    match command.op {
        Op::ReportLuns => list_luns(units, None, cdb, data),
        Op::Inquiry => inquiry::answer_for_well_known(cdb, data),
        Op::RequestSense => answer_sense(Sense::NONE, cdb, data),
        _ => Ok(0),
    }
}

pub(super) fn luns(units: &Units, unit: &Unit, cdb: &Cdb, data: &Data) -> Transferred {
    list_luns(units, Some(unit.address.target), cdb, data)
}

/// Lists the LUNs of a target, or if `None`, of the first target that has any. An initiator that
/// receives the list needs no attention about changed units.
fn list_luns(units: &Units, target: Option<u8>, cdb: &Cdb, data: &Data) -> Transferred {
    let (has_units, has_well_known) = match cdb.byte(2) {
        0 => (true, false),
        1 => (false, true),
        2 => (true, true),
        _ => return Err(Sense::in_cdb(2, None).into()),
    };
    let length: usize = iomem::fits(cdb.u32(6), "an allocation length");
    let all: Vec<UnitAddress> = units.with_all(|all| all.map(|unit| unit.address).collect());
    let target = target.or_else(|| all.first().map(|unit| unit.target));
    let mut luns = Vec::new();
    if has_units {
        let of_target = all.iter().filter(|unit| Some(unit.target) == target);
        luns.extend(of_target.flat_map(|unit| unit.lun_bytes()));
    }
    if has_well_known {
        luns.extend(REPORT_LUNS_LUN);
    }
    let mut answer = u32::to_be_bytes(iomem::fits(luns.len(), "bytes of LUNs")).to_vec();
    answer.extend([0; 4]);
    answer.extend(luns);
    let moved = data.answer(&answer, length)?;
    if has_units {
        units.with_all(|all| {
            let of_target = all.filter(|unit| Some(unit.address.target) == target);
            of_target.for_each(|unit| unit.attentions.remove(Sense::UNITS_CHANGED));
        });
    }
    Ok(moved)
}

pub(super) fn request_sense(unit: &Unit, cdb: &Cdb, data: &Data) -> Transferred {
    let otherwise = if block::check_ready(unit).is_ok() { Sense::NONE } else { Sense::STOPPED };
    let attention = unit.attentions.take();
    let moved = answer_sense(attention.unwrap_or(otherwise), cdb, data);
    if let Some(attention) = attention
        && !matches!(moved, Ok(1..))
    {
        // The attention stays if the initiator did not receive it.
        unit.attentions.put_back(attention);
    }
    moved
}

fn answer_sense(sense: Sense, cdb: &Cdb, data: &Data) -> Transferred {
    let format = if cdb.byte(1) & 1 != 0 { Format::Descriptor } else { Format::Fixed };
    data.answer(&sense.data(format), cdb.byte(4).into())
}

/// The address of the last block. A disk that was cut below one block while in use has none, which
/// the field cannot express. It shows as one block, and accesses to that block fail.
fn last_block(unit: &Unit) -> u64 {
    let info = unit.info();
    (info.size_bytes / u64::from(info.logical_block_bytes)).saturating_sub(1)
}

pub(super) fn read_capacity10(unit: &Unit, data: &Data) -> Transferred {
    let (info, last) = (unit.info(), last_block(unit));
    // The highest value refers drivers to READ CAPACITY (16).
    let last = u32::try_from(last).unwrap_or(u32::MAX);
    let answer = [last.to_be_bytes(), info.logical_block_bytes.to_be_bytes()].concat();
    data.answer(&answer, answer.len())
}

pub(super) fn read_capacity16(unit: &Unit, cdb: &Cdb, data: &Data) -> Transferred {
    let answer = capacity16(&unit.info(), last_block(unit), unit.can_unmap());
    data.answer(&answer, iomem::fits(cdb.u32(10), "an allocation length"))
}

/// The data of READ CAPACITY (16) (SBC-4, section 5.21.2).
fn capacity16(info: &DiskInfo, last: u64, can_unmap: bool) -> [u8; 32] {
    let mut answer = [0; 32];
    answer[..8].copy_from_slice(&last.to_be_bytes());
    answer[8..12].copy_from_slice(&info.logical_block_bytes.to_be_bytes());
    let exponent = (info.physical_block_bytes / info.logical_block_bytes).ilog2();
    answer[13] = iomem::fits(exponent.min(15), "an exponent");
    if can_unmap {
        answer[14] = 0x80;
    }
    answer
}

/// Reports a run of equal blocks from an address: mapped, also if the state is unknown, or
/// deallocated (SBC-4, section 5.8.2). Without support for unmapping, all blocks are mapped.
pub(super) async fn lba_status(local: &LocalUnit, cdb: &Cdb, data: &Data) -> Transferred {
    const DEALLOCATED: u8 = 1;
    block::check_ready(&local.unit)?;
    let info = local.unit.info();
    let block = u64::from(info.logical_block_bytes);
    let (lba, blocks) = (cdb.u64(2), info.size_bytes / block);
    if lba >= blocks {
        return Err(Sense::LBA_OUT_OF_RANGE.into());
    }
    let most = (LBA_STATUS_BYTES / block).min(u32::MAX.into());
    let mut count = (blocks - lba).min(most);
    let mut status = 0;
    if local.unit.can_unmap()
        && let Ok(extent) = local.disk.block_status(lba * block, count * block).await
    {
        // In whole blocks: one that is a hole in part alone counts as mapped.
        count = extent.bytes / block;
        status = if extent.kind == ExtentKind::Hole { DEALLOCATED } else { 0 };
    }
    let count: u32 = iomem::fits(count, "blocks of at most what was asked for");
    let mut answer = [0; 24];
    answer[3] = 20;
    answer[8..16].copy_from_slice(&lba.to_be_bytes());
    answer[16..20].copy_from_slice(&count.to_be_bytes());
    answer[20] = status;
    data.answer(&answer, iomem::fits(cdb.u32(10), "an allocation length"))
}

/// Log pages (SPC-5, section 7.3): the list of pages, and a page without exceptions.
pub(super) fn log_sense(cdb: &Cdb, data: &Data) -> Transferred {
    const SUPPORTED: u8 = 0x00;
    const EXCEPTIONS: u8 = 0x2f;
    // There is no sense code to report, and the temperature is unknown.
    const NO_EXCEPTION: [u8; 8] = [0, 0, 0x03, 4, 0, 0, 0xff, 0];
    if cdb.byte(3) != 0 {
        return Err(Sense::in_cdb(3, None).into());
    }
    if cdb.u16(5) != 0 {
        return Err(Sense::in_cdb(5, None).into());
    }
    let page = cdb.byte(2) & 0x3f;
    let content: &[u8] = match page {
        SUPPORTED => &[SUPPORTED, EXCEPTIONS],
        EXCEPTIONS => &NO_EXCEPTION,
        _ => return Err(Sense::in_cdb(2, Some(5)).into()),
    };
    let length: u16 = iomem::fits(content.len(), "the length of a page");
    // DS: the parameters of the page are not saved.
    let saves_none = if page == EXCEPTIONS { 0x80 } else { 0 };
    let mut answer = vec![saves_none | page, 0];
    answer.extend(length.to_be_bytes());
    answer.extend(content);
    data.answer(&answer, cdb.u16(7).into())
}

/// Command timeouts: none are known.
const TIMEOUTS: [u8; 12] = [0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

pub(super) fn opcodes(unit: &Unit, cdb: &Cdb, data: &Data) -> Transferred {
    let has_timeouts = cdb.byte(2) & 0x80 != 0;
    let (opcode, action) = (cdb.byte(3), cdb.u16(4));
    let one = |found: Option<&Command>| {
        let mut answer = vec![0, 1, 0, 0];
        if let Some(usage) = found.and_then(|command| command.usage_of(unit.can_unmap())) {
            answer[1] = 3 | if has_timeouts { 0x80 } else { 0 };
            answer[3] = iomem::fits(usage.len(), "bytes of a CDB");
            answer.extend(usage);
            answer.extend(has_timeouts.then_some(TIMEOUTS).iter().flatten());
        }
        answer
    };
    let action_byte = u8::try_from(action).ok();
    let has_actions = find(opcode, None).map(|command| command.has_service_action);
    let answer = match cdb.byte(2) & 7 {
        0 => all_opcodes(unit, has_timeouts),
        1 if has_actions == Some(true) => return Err(Sense::in_cdb(2, Some(2)).into()),
        1 => one(find(opcode, None)),
        2 if has_actions == Some(false) => return Err(Sense::in_cdb(2, Some(2)).into()),
        2 => one(action_byte.and_then(|action| find(opcode, Some(action)))),
        3 => match has_actions {
            Some(true) => one(action_byte.and_then(|action| find(opcode, Some(action)))),
            _ if action != 0 => one(None),
            _ => one(find(opcode, None)),
        },
        _ => return Err(Sense::in_cdb(2, Some(2)).into()),
    };
    data.answer(&answer, iomem::fits(cdb.u32(6), "an allocation length"))
}

fn all_opcodes(unit: &Unit, has_timeouts: bool) -> Vec<u8> {
    let mut list = Vec::new();
    let can_unmap = unit.can_unmap();
    for command in COMMANDS.iter().filter(|command| command.usage_of(can_unmap).is_some()) {
        let action = if command.has_service_action { command.usage[1] & 0x1f } else { 0 };
        let flags = u8::from(command.has_service_action) | if has_timeouts { 2 } else { 0 };
        let length = iomem::fits(command.usage.len(), "bytes of a CDB");
        list.extend([command.usage[0], 0, 0, action, 0, flags, 0, length]);
        list.extend(has_timeouts.then_some(TIMEOUTS).iter().flatten());
    }
    let mut answer = u32::to_be_bytes(iomem::fits(list.len(), "bytes of commands")).to_vec();
    answer.extend(list);
    answer
}

/// Reports the functions of the control queue.
pub(super) fn task_management(cdb: &Cdb, data: &Data) -> Transferred {
    let length: usize = iomem::fits(cdb.u32(6), "an allocation length");
    if length < 4 {
        return Err(Sense::in_cdb(6, None).into());
    }
    // ABORT TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET, QUERY TASK; then QUERY TASK
    // SET and I_T NEXUS RESET.
    let functions = [0xdc, 0x03];
    let answer: &[u8] = if cdb.byte(2) & 0x80 != 0 {
        // With timeouts, none of which are known.
        &[functions[0], functions[1], 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    } else {
        &[functions[0], functions[1], 0, 0]
    };
    data.answer(answer, length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_physical_block_counts_in_logical_ones() {
        for (logical_block_bytes, physical_block_bytes, exponent) in
            [(512, 512, 0), (512, 4096, 3), (4096, 4096, 0), (4096, 1 << 15, 3), (512, 1 << 30, 15)]
        {
            let info = DiskInfo {
                size_bytes: 1 << 30,
                logical_block_bytes,
                physical_block_bytes,
                read_only: false,
                direct: true,
            };
            let answer = capacity16(&info, 7, false);
            assert_eq!((answer[13], answer[14]), (exponent, 0), "{info:?}");
        }
    }
}
