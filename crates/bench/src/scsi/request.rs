//! A command request from header to response (virtio 1.3, section 5.6.6.1).

#![forbid(unsafe_code)]

use std::fmt;

use super::command::Cdb;
use super::sense::Sense;
use crate::memory::{RequestLayout, SharedMemory};

/// The defaults of the configuration fields `sense_size` and `cdb_size`.
pub(crate) const SENSE_BYTES: usize = 96;
pub(crate) const CDB_BYTES: usize = 32;

/// The form of a request. One cache line holds everything that a request without errors needs: the
/// header, and the fields of the response before its sense data.
pub(crate) const LAYOUT: RequestLayout = RequestLayout {
    stride: 192,
    header_bytes: 51,
    response_at: RESPONSE_AT,
    response_bytes: 108,
    data_in_last: true,
};

/// Offset in the header.
const CDB_AT: usize = 19;
/// Offset from the header's start, aligned after the header.
const RESPONSE_AT: usize = 52;
/// The header, and the response before its sense data.
const LINE_BYTES: usize = RESPONSE_AT + SENSE_AT;
/// The width of the stores that fill a line.
const WORD_BYTES: usize = size_of::<u128>();

/// Offsets in the response. The response code is the last field before the sense data.
const RESIDUAL_AT: usize = 4;
const STATUS_WORD_AT: usize = 8;
const SENSE_AT: usize = 12;
const RESPONSE_BYTES: usize = SENSE_AT + SENSE_BYTES;

const _: () = assert!(LAYOUT.header_bytes as usize == CDB_AT + CDB_BYTES);
const _: () = assert!(LAYOUT.response_bytes as usize == RESPONSE_BYTES);
const _: () =
    assert!(LINE_BYTES == 4 * WORD_BYTES && RESPONSE_AT + RESPONSE_BYTES <= LAYOUT.stride);

/// The value of the response byte before the server writes it.
const PENDING: u8 = 0xff;

/// Response codes.
const OK: u8 = 0;
const BUSY: u8 = 5;

/// Status codes (SAM-6).
const GOOD: u8 = 0x00;
const CHECK_CONDITION: u8 = 0x02;
const STATUS_BUSY: u8 = 0x08;
const TASK_SET_FULL: u8 = 0x28;

/// Writes a request to the unit with this `lun` field into the slot with its header at `at`.
#[inline]
pub(crate) fn put(memory: &SharedMemory, at: usize, tag: u64, lun: [u8; 8], cdb: Cdb) {
    // The task attribute (0 is SIMPLE), priority and CRN stay 0, as the end of the CDB does.
    let cdb_in = |at: usize| match at.checked_sub(CDB_AT) {
        None => cdb.0 << (8 * (CDB_AT - at)),
        Some(skipped) => cdb.0 >> (8 * skipped),
    };
    let pending = u128::from(PENDING) << (8 * (WORD_BYTES - 1));
    let lun_and_tag = u128::from(u64::from_le_bytes(lun)) | u128::from(tag) << 64;
    let words = [lun_and_tag, cdb_in(WORD_BYTES), cdb_in(2 * WORD_BYTES), pending];
    for (index, word) in words.into_iter().enumerate() {
        memory.put_number(at + index * WORD_BYTES, word.to_le());
    }
}

/// The result of a completed read, write or flush: 0 if it was carried out in full.
#[inline]
pub(crate) fn result(memory: &SharedMemory, at: usize) -> i32 {
    let residual = memory.number::<u32>(at + RESPONSE_AT + RESIDUAL_AT);
    let status_word = u32::from_le(memory.number(at + RESPONSE_AT + STATUS_WORD_AT));
    // The lower half is the status qualifier, which means nothing with status GOOD.
    i32::from(residual != 0 || status_word >> 16 != 0)
}

/// Reads the response of the slot with its header at `at`.
pub(crate) fn response(memory: &SharedMemory, at: usize) -> Response {
    let mut bytes = [0; RESPONSE_BYTES];
    memory.at(at + RESPONSE_AT, RESPONSE_BYTES).copy_to(&mut bytes);
    Response::parse(&bytes)
}

/// The response of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) residual: u32,
    status: u8,
    response: u8,
    sense: Option<Sense>,
}

impl Response {
    fn parse(bytes: &[u8; RESPONSE_BYTES]) -> Self {
        let [s0, s1, s2, s3, r0, r1, r2, r3, _, _, status, response, sense @ ..] = *bytes;
        let sense_bytes = usize::try_from(u32::from_le_bytes([s0, s1, s2, s3]));
        let sense = &sense[..sense_bytes.map_or(SENSE_BYTES, |bytes| bytes.min(SENSE_BYTES))];
        let residual = u32::from_le_bytes([r0, r1, r2, r3]);
        Self { residual, status, response, sense: Sense::parse(sense) }
    }

    /// Returns true if the command was carried out, in full or not.
    pub(crate) fn is_good(&self) -> bool {
        self.response == OK && self.status == GOOD
    }

    /// Returns true if the command was not carried out, but may be if it is sent again.
    pub(crate) fn is_busy(&self) -> bool {
        self.response == BUSY
            || (self.response == OK && [STATUS_BUSY, TASK_SET_FULL].contains(&self.status))
    }

    /// The sense data of CHECK CONDITION.
    pub(crate) fn sense(&self) -> Option<&Sense> {
        let checked = self.response == OK && self.status == CHECK_CONDITION;
        self.sense.as_ref().filter(|_| checked)
    }

    fn describe_status(&self) -> String {
        let words = match self.status {
            CHECK_CONDITION => match &self.sense {
                Some(sense) => return sense.to_string(),
                None => "CHECK CONDITION without sense data",
            },
            0x04 => "CONDITION MET, which belongs to other commands",
            STATUS_BUSY => "BUSY: the unit takes no command now",
            0x18 => "RESERVATION CONFLICT: another initiator has reserved the unit",
            TASK_SET_FULL => "TASK SET FULL: use a lower --iodepth",
            0x30 => "ACA ACTIVE: the unit waits for CLEAR ACA",
            0x40 => "TASK ABORTED: another initiator has aborted it",
            other => return format!("status {other:#04x}, which is not in the specification"),
        };
        words.to_owned()
    }
}

impl fmt::Display for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.response {
            OK if self.status != GOOD => return f.write_str(&self.describe_status()),
            OK if self.residual != 0 => {
                let residual = self.residual;
                return write!(f, "status GOOD, but {residual} bytes were not transferred");
            }
            OK => "status GOOD",
            1 => "OVERRUN: the device sees less data memory than the command needs",
            2 => "ABORTED: a task management function has aborted it",
            3 => "BAD TARGET: the device has no such target",
            4 => "RESET: the unit, the target or the bus was reset",
            BUSY => "BUSY: the device takes no command now",
            6 => "TRANSPORT FAILURE: the device has lost the target",
            7 => "TARGET FAILURE: the target is broken",
            8 => "NEXUS FAILURE: the path to the target is broken",
            9 => "FAILURE: the device could not carry it out; its log may say why",
            12 => "INCORRECT LUN: the target has no such logical unit",
            PENDING => "the device has not written its response",
            other => return write!(f, "response {other}, which is not in the specification"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::command::read_write;

    fn answer(memory: &SharedMemory, residual: u32, status: u8, code: u8, sense: &[u8]) -> String {
        let mut bytes = [0; 12];
        bytes[0] = u8::try_from(sense.len()).unwrap();
        bytes[4..8].copy_from_slice(&residual.to_le_bytes());
        (bytes[10], bytes[11]) = (status, code);
        memory.at(RESPONSE_AT, 12).copy_from(&bytes);
        memory.at(RESPONSE_AT + 12, sense.len()).copy_from(sense);
        assert_eq!(result(memory, 0) == 0, residual == 0 && status == 0 && code == 0);
        response(memory, 0).to_string()
    }

    #[test]
    fn a_header_follows_the_specification() {
        let memory = SharedMemory::new(4096).unwrap();
        let lun = [1, 0, 0x40, 3, 0, 0, 0, 0];
        put(&memory, 192, 0x0102_0304_0506_0708, lun, read_write(false, 9, 1));
        let mut bytes = [0; 51];
        memory.at(192, 51).copy_to(&mut bytes);
        assert_eq!(bytes[..8], lun);
        assert_eq!(bytes[8..16], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes[16..19], [0; 3]);
        assert_eq!(bytes[19..29], [0x28, 0, 0, 0, 0, 9, 0, 0, 1, 0]);
        assert_eq!(bytes[29..], [0; 22]);
        let far = read_write(true, u64::MAX - 1, u32::MAX - 2);
        put(&memory, 192, 7, lun, far);
        memory.at(192, 51).copy_to(&mut bytes);
        assert_eq!((&bytes[19..35], &bytes[35..]), (&far.bytes()[..], &[0; 16][..]));
        assert_eq!((LAYOUT.header_bytes, LAYOUT.response_bytes), (51, 108));
        assert!(response(&memory, 192).to_string().contains("not written its response"));
        assert_ne!(result(&memory, 192), 0, "no answer is not success");
    }

    #[test]
    fn answers_are_success_only_in_full() {
        let memory = SharedMemory::new(4096).unwrap();
        assert_eq!(answer(&memory, 0, 0, 0, &[]), "status GOOD");
        assert!(answer(&memory, 512, 0, 0, &[]).contains("512 bytes were not"));
        assert!(answer(&memory, 0, 0x18, 0, &[]).contains("RESERVATION CONFLICT"));
        assert!(answer(&memory, 0, 0x28, 0, &[]).contains("--iodepth"));
        assert!(answer(&memory, 0, 0x77, 0, &[]).contains("0x77"));
        assert!(answer(&memory, 0, 0, 3, &[]).contains("no such target"));
        assert!(answer(&memory, 0, 0, 10, &[]).contains("response 10"));
        assert!(answer(&memory, 0, 2, 0, &[]).contains("without sense"));
        let sense = [0x70, 0, 3, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0];
        assert!(answer(&memory, 0, 2, 0, &sense).contains("MEDIUM ERROR"));
    }

    #[test]
    fn busy_responses_are_recognised() {
        let parse = |status, code| {
            let mut bytes = [0; 108];
            (bytes[10], bytes[11]) = (status, code);
            Response::parse(&bytes)
        };
        assert!(parse(0, 5).is_busy() && parse(8, 0).is_busy() && parse(0x28, 0).is_busy());
        assert!(!parse(0, 0).is_busy() && parse(0, 0).is_good());
        assert!(!parse(8, 9).is_busy() && !parse(0, 9).is_good());
        let long = Response::parse(&[0xff; 108]);
        assert!(long.sense().is_none());
    }
}
