//! The response to a command (virtio 1.3, section 5.6.6.1).

use std::ops::Range;
use std::rc::Rc;

use iomem::SharedBytes;
use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_S_ABORTED, VIRTIO_SCSI_S_BAD_TARGET, VIRTIO_SCSI_S_FAILURE, VIRTIO_SCSI_S_OK,
    VIRTIO_SCSI_S_OVERRUN, VIRTIO_SCSI_S_RESET,
};
use virtqueue::LocalMemory;

use super::block;
use super::outcome::{Effect, Failure, Refused, refused};
use super::request_queue::LocalUnit;
use crate::access::sense::{Format, Sense};
use crate::access::task_set::Abort;
use crate::device_core::byte;
use crate::queue::Queue;
use crate::queue::reports::PopTime;
use crate::stats::RequestKind;

/// Bytes of a response before the sense data.
const FIXED_RESPONSE_BYTES: usize = 12;
/// Bytes of sense data of the default size.
const SENSE_BYTES: usize = 96;
/// The bytes of a response that hold the residual, which counts bytes not transferred.
const RESIDUAL: Range<usize> = 4..8;

/// Responses, which are a byte each.
const S_OK: u8 = byte(VIRTIO_SCSI_S_OK);
const S_OVERRUN: u8 = byte(VIRTIO_SCSI_S_OVERRUN);
const S_ABORTED: u8 = byte(VIRTIO_SCSI_S_ABORTED);
const S_BAD_TARGET: u8 = byte(VIRTIO_SCSI_S_BAD_TARGET);
const S_RESET: u8 = byte(VIRTIO_SCSI_S_RESET);
const S_FAILURE: u8 = byte(VIRTIO_SCSI_S_FAILURE);

/// Status codes (SAM-6, table 33); that of GOOD is 0.
const CHECK_CONDITION: u8 = 0x02;
const BUSY: u8 = 0x08;
const RESERVATION_CONFLICT: u8 = 0x18;

/// The result of a command, and its kind in the statistics.
pub(super) type Outcome = (RequestKind, Result<Effect, Refused>);

/// Bytes of a response with sense data of this size.
#[inline]
pub(super) fn response_bytes(sense_size: u32) -> usize {
    let sense_bytes: usize = iomem::fits(sense_size, "a size of sense data");
    FIXED_RESPONSE_BYTES + sense_bytes
}

/// A request from its chain to its answer.
pub(super) struct Request {
    pub(super) head: u16,
    popped: PopTime,
    response: SharedBytes,
    /// Bytes of data from the driver and to it.
    pub(super) room: [usize; 2],
    /// The addressed unit, if it exists.
    pub(super) local: Option<Rc<LocalUnit>>,
    /// The blocks of a plain transfer.
    pub(super) range: block::Range,
}

impl Request {
    #[inline(always)]
    pub(super) fn new(
        (head, popped): (u16, PopTime),
        response: SharedBytes,
        room: [usize; 2],
    ) -> Self {
        Self { head, popped, response, room, local: None, range: block::Range::NONE }
    }

    /// The unit that carries out the command, which must exist.
    #[inline(always)]
    pub(super) fn local(&self) -> &LocalUnit {
        self.local.as_deref().expect("a command that has begun is one of a unit")
    }

    /// Answers the request: counts it, writes its response, pushes its chain.
    #[inline(always)]
    pub(super) fn answer(
        &self,
        queue: &Queue,
        memory: &LocalMemory,
        abort: Option<Abort>,
        (kind, done): Outcome,
    ) {
        let [out, into] = self.room;
        let all = out + into;
        let response_bytes = self.response.bytes();
        let moved = match done {
            Ok(done) if abort.is_none() && memory.is_intact() => {
                if queue.count(kind, self.popped, done.medium_bytes) {
                    self.report_slow(queue, kind);
                }
                if done.moved == all {
                    self.response.zero();
                } else {
                    let mut bytes = [0; RESIDUAL.end];
                    bytes[RESIDUAL].copy_from_slice(&residual(all - done.moved));
                    self.response.write(&bytes);
                }
                done.moved
            }
            done => self.fail(queue, kind, done, abort),
        };
        let data = if into > 0 { moved } else { 0 };
        queue.push(self.head, iomem::fits(response_bytes + data, "bytes of a chain"));
    }

    /// Writes the response of a failed command. Returns the bytes that were transferred even so.
    #[cold]
    fn fail(
        &self,
        queue: &Queue,
        kind: RequestKind,
        done: Result<Effect, Refused>,
        abort: Option<Abort>,
    ) -> usize {
        let failure = match (abort, done) {
            (Some(abort), _) => refused(Failure::Aborted(abort)),
            (None, Err(failure)) => failure,
            // Bytes read from lost memory were zeroes, and bytes written to it are gone.
            (None, Ok(_)) => refused(Failure::MemoryGone),
        };
        let moved = failure.moved();
        let format = self.local.as_ref().map_or(Format::Fixed, |local| local.unit.sense_format());
        let mut bytes = [0; FIXED_RESPONSE_BYTES + SENSE_BYTES];
        write_failure(&failure, format, self.response.bytes() - FIXED_RESPONSE_BYTES, &mut bytes);
        let [out, into] = self.room;
        bytes[RESIDUAL].copy_from_slice(&residual(out + into - moved));
        self.response.write(&bytes);
        let is_slow = if failure.is_expected() {
            queue.refuse(kind, self.popped, failure.cause())
        } else {
            queue.fail(kind, self.popped, (failure.cause(), &failure))
        };
        if is_slow {
            self.report_slow(queue, kind);
        }
        moved
    }

    #[cold]
    fn report_slow(&self, queue: &Queue, kind: RequestKind) {
        let has_range = matches!(kind, RequestKind::Read | RequestKind::Write);
        let sector = has_range.then_some(self.range.offset / 512);
        queue.report_slow(kind, self.popped, sector);
    }
}

#[inline]
fn residual(bytes: usize) -> [u8; 4] {
    u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes()
}

/// Writes the driver's view of a failure: the only place that chooses it.
fn write_failure(
    failure: &Failure,
    format: Format,
    room: usize,
    bytes: &mut [u8; FIXED_RESPONSE_BYTES + SENSE_BYTES],
) {
    let (response, status, sense) = match failure {
        Failure::Check(sense) | Failure::Disk { sense, .. } => {
            (S_OK, CHECK_CONDITION, Some(*sense))
        }
        Failure::NotSaved(_) => (S_OK, CHECK_CONDITION, Some(Sense::NOT_SAVED)),
        Failure::MemoryGone => (S_OK, CHECK_CONDITION, Some(Sense::MEMORY_GONE)),
        Failure::Conflict => (S_OK, RESERVATION_CONFLICT, None),
        Failure::Busy => (S_OK, BUSY, None),
        Failure::Overrun => (S_OVERRUN, 0, None),
        Failure::BadTarget => (S_BAD_TARGET, 0, None),
        Failure::Malformed(_) | Failure::Chain(_) => (S_FAILURE, 0, None),
        Failure::Aborted(Abort::Aborted) => (S_ABORTED, 0, None),
        Failure::Aborted(Abort::Reset) => (S_RESET, 0, None),
    };
    (bytes[10], bytes[11]) = (status, response);
    if let Some(sense) = sense {
        let data = sense.data(format);
        let length = data.len().min(room);
        bytes[..4].copy_from_slice(&u32::to_le_bytes(iomem::fits(length, "sense data")));
        bytes[FIXED_RESPONSE_BYTES..][..data.len()].copy_from_slice(&data);
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::access::persist::{FileError, ReservationStorage, Reservations};
    use crate::access::sense::DiskUse;

    /// The error of reservations whose file is a directory.
    fn file_error() -> FileError {
        let folder = tempfile::tempdir().unwrap();
        let reservations = std::sync::Arc::<Reservations>::default();
        let place = ReservationStorage::File(folder.path().to_owned());
        reservations.store_in(place).map(drop).unwrap_err()
    }

    /// The numbers are from the standards: virtio 1.3, section 5.6.6.1, SAM-6 and SPC-6.
    #[test]
    fn each_failure_has_its_response_its_status_and_its_sense() {
        let disk = |kind: io::ErrorKind| Failure::Disk {
            asked: DiskUse::FLUSH,
            moved: 512,
            sense: Sense::NO_SPACE,
            source: kind.into(),
        };
        // Responses, statuses, and the sense key with its code and qualifier.
        for (failure, response, status, sense) in [
            (Failure::Check(Sense::UNKNOWN_OPCODE), 0, 0x02, Some([0x5, 0x20, 0x00])),
            (disk(io::ErrorKind::StorageFull), 0, 0x02, Some([0x7, 0x27, 0x07])),
            (Failure::NotSaved(file_error()), 0, 0x02, Some([0x4, 0x44, 0x00])),
            (Failure::MemoryGone, 0, 0x02, Some([0x4, 0x44, 0x00])),
            (Failure::Conflict, 0, 0x18, None),
            (Failure::Busy, 0, 0x08, None),
            (Failure::Overrun, 1, 0, None),
            (Failure::Aborted(Abort::Aborted), 2, 0, None),
            (Failure::BadTarget, 3, 0, None),
            (Failure::Aborted(Abort::Reset), 4, 0, None),
            (Failure::BOTH_WAYS, 9, 0, None),
            (Failure::Chain(virtqueue::ChainFault::ReadableAfterWritable), 9, 0, None),
        ] {
            for (format, start) in [(Format::Fixed, 0x70), (Format::Descriptor, 0x72)] {
                for room in [0, 4, 18, SENSE_BYTES] {
                    let what = format!("{failure} {format:?} {room}");
                    let mut bytes = [0; FIXED_RESPONSE_BYTES + SENSE_BYTES];
                    write_failure(&failure, format, room, &mut bytes);
                    assert_eq!((bytes[11], bytes[10]), (response, status), "{what}");
                    let length = u32::from_le_bytes(bytes[..4].try_into().unwrap());
                    let data = &bytes[FIXED_RESPONSE_BYTES..];
                    let Some([key, code, qualifier]) = sense else {
                        assert_eq!((length, data[0]), (0, 0), "{what}");
                        continue;
                    };
                    let whole = if start == 0x70 { 18 } else { 8 + usize::from(data[7]) };
                    assert_eq!(usize::try_from(length).unwrap(), whole.min(room), "{what}");
                    let at = if start == 0x70 { [0, 2, 12, 13] } else { [0, 1, 2, 3] };
                    assert_eq!(at.map(|at| data[at]), [start, key, code, qualifier], "{what}");
                }
            }
        }
    }

    /// Drivers retry without end a command that they believe to have aborted themselves.
    #[test]
    fn each_failure_has_its_cause_and_its_place_in_the_log() {
        use crate::ErrorCause::{Aborted, Invalid, Reserved, Unavailable};
        for (failure, cause, is_expected) in [
            (Failure::Check(Sense::UNKNOWN_OPCODE), Invalid, true),
            (Failure::NotSaved(file_error()), Unavailable, false),
            (Failure::MemoryGone, Unavailable, false),
            (Failure::Conflict, Reserved, true),
            (Failure::Busy, Unavailable, true),
            (Failure::Overrun, Invalid, false),
            (Failure::Aborted(Abort::Reset), Aborted, true),
            (Failure::BadTarget, Invalid, true),
            (Failure::BOTH_WAYS, Invalid, false),
        ] {
            assert_eq!((failure.cause(), failure.is_expected()), (cause, is_expected), "{failure}");
        }
    }
}
