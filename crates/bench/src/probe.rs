//! Finds the units of a SCSI device and their properties, by commands on a queue without other
//! requests.

#![forbid(unsafe_code)]

use std::io;
use std::thread;
use std::time::Duration;

use crate::driver::Virtqueue;
use crate::plan::QueueShape;
use crate::quantities::{LunAddress, LunChoice};
use crate::scsi::command::{self, Cdb};
use crate::scsi::lun::{Unit, WELL_KNOWN, reported_luns};
use crate::scsi::request::{self, Response};
use crate::scsi::sense::Sense;

/// The shape of the queue for [`find_units`].
pub(crate) const SHAPE: QueueShape = QueueShape {
    queues: 1,
    size: 128,
    slots: 1,
    slot_bytes: REPORT_LUNS_BYTES as usize,
    segment_bytes: REPORT_LUNS_BYTES as usize,
    descriptors: 3,
};

/// Room for all units that a target can have.
const REPORT_LUNS_BYTES: u32 = 8 + 8 * 16_384;
const INQUIRY_BYTES: u8 = 36;
const CAPACITY_BYTES: u8 = 32;
const MODE_HEADER_BYTES: u8 = 8;

/// The most times that a command is sent to a unit that first reports a unit attention or is not
/// ready.
const ATTEMPTS: usize = 100;
/// Pause before a command is repeated after the unit was busy.
const PAUSE: Duration = Duration::from_millis(100);

/// Finds the units to drive.
pub(crate) fn find_units(queue: &mut Virtqueue, choice: LunChoice) -> io::Result<Vec<Unit>> {
    let units = match choice {
        LunChoice::One(address) => vec![find_unit(queue, address)?],
        LunChoice::All => find_all(queue)?,
    };
    Ok(units)
}

/// Waits until the units take commands, and consumes their pending unit attentions.
pub(crate) fn make_ready(queue: &mut Virtqueue, units: &[Unit]) -> io::Result<()> {
    units.iter().try_for_each(|unit| make_unit_ready(queue, unit.address))
}

fn make_unit_ready(queue: &mut Virtqueue, address: LunAddress) -> io::Result<()> {
    execute(queue, address.field(), &command::test_unit_ready(), 0)?
        .map(drop)
        .map_err(|response| failed(address, "TEST UNIT READY", &response))
}

fn find_unit(queue: &mut Virtqueue, address: LunAddress) -> io::Result<Unit> {
    let kind = match inquire(queue, address)? {
        Ok(0) => return examine(queue, address),
        Ok(kind) => describe_kind(kind).to_owned(),
        Err(response) => response.to_string(),
    };
    let others = report_luns(queue).map(|addresses| join(&addresses)).unwrap_or_default();
    let advice = match others.as_str() {
        "" => "set --lun to a disk of the device".to_owned(),
        others => format!("set --lun to a disk; the device has the units {others}"),
    };
    Err(io::Error::other(format!("there is no disk at unit {address} ({kind}): {advice}")))
}

fn find_all(queue: &mut Virtqueue) -> io::Result<Vec<Unit>> {
    let mut units = Vec::new();
    for address in report_luns(queue)? {
        match inquire(queue, address)? {
            Ok(0) => units.push(examine(queue, address)?),
            Ok(kind) => tracing::warn!("unit {address} is left out: {}", describe_kind(kind)),
            Err(response) => return Err(failed(address, "INQUIRY", &response)),
        }
    }
    if units.is_empty() {
        return Err(io::Error::other("it reports no disks: give it at least one, or set --lun"));
    }
    Ok(units)
}

/// Asks each target for its units, and the well-known unit if none answers.
fn report_luns(queue: &mut Virtqueue) -> io::Result<Vec<LunAddress>> {
    const ROOM: usize = REPORT_LUNS_BYTES as usize;
    let cdb = command::report_luns(REPORT_LUNS_BYTES);
    let mut found: Option<Vec<_>> = None;
    for target in 0..=u8::MAX {
        if let Ok(data) = execute(queue, LunAddress::lun0(target).field(), &cdb, ROOM)? {
            found.get_or_insert_default().extend(reported_luns(target, &data));
        }
    }
    if let Some(found) = found {
        return Ok(found);
    }
    match execute(queue, WELL_KNOWN, &cdb, ROOM)? {
        Ok(data) => Ok(reported_luns(0, &data)),
        Err(response) => Err(io::Error::other(format!(
            "no target answers REPORT LUNS, nor does the well-known unit ({response}): name a unit \
             with --lun"
        ))),
    }
}

/// Returns the peripheral qualifier and device type of a unit: 0 for a disk that exists.
fn inquire(queue: &mut Virtqueue, address: LunAddress) -> io::Result<Result<u8, Response>> {
    let cdb = command::inquiry(INQUIRY_BYTES.into());
    let data = execute(queue, address.field(), &cdb, INQUIRY_BYTES.into())?;
    match data.as_deref() {
        Ok([kind, ..]) => Ok(Ok(*kind)),
        Ok([]) => Err(io::Error::other(format!("INQUIRY of unit {address} returned nothing"))),
        Err(response) => Ok(Err(response.clone())),
    }
}

/// Makes a disk ready and reads its capacity and write protection.
fn examine(queue: &mut Virtqueue, address: LunAddress) -> io::Result<Unit> {
    const WRITE_PROTECTED: u8 = 0x80;
    make_unit_ready(queue, address)?;
    let cdb = command::read_capacity_16(CAPACITY_BYTES.into());
    let capacity = execute(queue, address.field(), &cdb, CAPACITY_BYTES.into())?
        .map_err(|response| failed(address, "READ CAPACITY(16)", &response))?;
    let unit = Unit::from_capacity(address, &capacity)
        .map_err(|error| io::Error::other(format!("unit {address}: {error}")))?;
    let cdb = command::mode_sense_10(MODE_HEADER_BYTES.into());
    // Without mode pages a disk counts as writable.
    let mode = execute(queue, address.field(), &cdb, MODE_HEADER_BYTES.into())?.unwrap_or_default();
    let read_only = mode.get(3).is_some_and(|parameter| parameter & WRITE_PROTECTED != 0);
    Ok(Unit { read_only, ..unit })
}

/// Carries out a command, and repeats it if the unit reports a unit attention or is not ready.
/// Returns the data that was read.
fn execute(
    queue: &mut Virtqueue,
    lun: [u8; 8],
    cdb: &Cdb,
    room: usize,
) -> io::Result<Result<Vec<u8>, Response>> {
    let mut attempts = 0;
    loop {
        let put = |memory: &_, at, tag| request::put(memory, at, tag, lun, *cdb);
        let (memory, at) = queue.execute(put, room)?;
        let response = request::response(memory, at);
        if response.is_good() {
            let residual = usize::try_from(response.residual).unwrap_or(usize::MAX);
            return queue.executed_data(room.saturating_sub(residual)).map(Ok);
        }
        attempts += 1;
        let sense = response.sense();
        let attention = sense.is_some_and(Sense::is_unit_attention);
        let busy = response.is_busy() || sense.is_some_and(Sense::is_becoming_ready);
        if attempts == ATTEMPTS || !(attention || busy) {
            return Ok(Err(response));
        }
        if busy {
            thread::sleep(PAUSE);
        }
    }
}

fn failed(address: LunAddress, what: &str, response: &Response) -> io::Error {
    io::Error::other(format!("unit {address}: {what} failed: {response}"))
}

/// Describes a peripheral qualifier and device type other than 0.
fn describe_kind(kind: u8) -> &'static str {
    match (kind >> 5, kind & 0x1f) {
        (1 | 3, _) => "there is no unit",
        (0, 0x01) => "it is a tape",
        (0, 0x05) => "it is a CD or DVD drive",
        (0, 0x0c | 0x0d) => "it is a controller or an enclosure",
        (0, 0x14) => "it is a zoned disk",
        (0, 0x1e) => "it is a well-known unit",
        _ => "it is not a disk",
    }
}

fn join(addresses: &[LunAddress]) -> String {
    /// A longer list would not be read.
    const SHOWN: usize = 16;
    let shown: Vec<_> = addresses.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = if addresses.len() > SHOWN { " and others" } else { "" };
    format!("{}{more}", shown.join(", "))
}
