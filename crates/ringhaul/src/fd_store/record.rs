//! The record of a session in a memory file: two halves, the newer of which is valid. A process
//! that is killed while it writes one half leaves the older half valid.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::pread;
use serde::{Deserialize, Serialize};
use vhost_user::SessionState;

use super::stash::Number;
use crate::spec::ExportSpec;

/// The format of records. Raise it whenever an earlier record means something else.
const FORMAT: u32 = 1;

/// The mark of a half.
const MAGIC: [u8; 8] = *b"rhrecord";

/// The bytes before the halves. They begin with the number of the last record with an answer that
/// was sent.
pub(super) const SENT_BYTES: u64 = 4096;

/// The most bytes of a half. Pages that were never written take no memory.
pub(super) const HALF_BYTES: u64 = 1 << 20;

/// Mark, number, length and checksum.
pub(super) const HEADER_BYTES: usize = 24;

/// A session, and the numbers of its descriptors in the stash.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Record {
    pub(super) export: ExportSpec,
    pub(super) session: SessionState,
    pub(super) descriptors: Vec<Number>,
}

/// The file of a record.
pub(super) struct RecordFile {
    file: File,
    /// The number of the last record.
    number: u64,
}

impl RecordFile {
    pub(super) fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("ringhaul-front-end", flags)?);
        ftruncate(&file, SENT_BYTES + 2 * HALF_BYTES)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, number: 0 })
    }

    /// Continues the file of another process.
    pub(super) fn open(file: OwnedFd) -> Self {
        let number = newest_half(file.as_fd()).map_or(0, |(number, _)| number);
        Self { file: File::from(file), number }
    }

    /// Writes a record in the place of the one before the last.
    pub(super) fn write(&mut self, record: &Record) -> io::Result<()> {
        self.write_as(FORMAT, record)
    }

    /// Writes a record in a format of this number.
    pub(super) fn write_as(&mut self, format: u32, record: &Record) -> io::Result<()> {
        let mut body = format.to_ne_bytes().to_vec();
        serde_json::to_writer(&mut body, record).map_err(io::Error::other)?;
        let number = self.number + 1;
        let half = SENT_BYTES + number % 2 * HALF_BYTES;
        if body.len() as u64 > HALF_BYTES - HEADER_BYTES as u64 {
            return Err(io::Error::other(format!("a record cannot have {} bytes", body.len())));
        }
        self.file.write_all_at(&body, half + HEADER_BYTES as u64)?;
        self.file.write_all_at(&header(number, &body), half)?;
        self.number = number;
        Ok(())
    }

    /// Notes that the answer in the last record was sent.
    pub(super) fn note_sent(&self) -> io::Result<()> {
        self.file.write_all_at(&self.number.to_ne_bytes(), 0)
    }
}

impl AsFd for RecordFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Reads the newest record of a killed process.
///
/// `None`: the process died before the first one.
///
/// # Errors
///
/// When it is damaged, or of another format.
pub(super) fn read(file: BorrowedFd<'_>) -> io::Result<Option<Record>> {
    let Some((number, body)) = newest_half(file) else {
        let is_blank = |half| {
            let mut first = [1; HEADER_BYTES];
            read_all(file, &mut first, SENT_BYTES + half * HALF_BYTES);
            first == [0; HEADER_BYTES]
        };
        let is_damaged = !is_blank(0) || !is_blank(1);
        return if is_damaged { Err(io::Error::other("its record is damaged")) } else { Ok(None) };
    };
    let found = body.first_chunk().map(|format| u32::from_ne_bytes(*format));
    if found != Some(FORMAT) {
        let found = found.unwrap_or_default();
        return Err(io::Error::other(format!("its record has format {found}, not {FORMAT}")));
    }
    let mut record: Record = serde_json::from_slice(&body[size_of::<u32>()..])
        .map_err(|error| io::Error::other(format!("its record is not understood: {error}")))?;
    let mut sent = [0; 8];
    pread(file, &mut sent, 0)?;
    if u64::from_ne_bytes(sent) == number {
        record.session.forget_answer();
    }
    Ok(Some(record))
}

/// The number and the content of the newest whole half.
fn newest_half(file: BorrowedFd<'_>) -> Option<(u64, Vec<u8>)> {
    let halves = [0, 1].map(|half| read_half(file, SENT_BYTES + half * HALF_BYTES));
    halves.into_iter().flatten().max_by_key(|(number, _)| *number)
}

/// The number and the content of a half, if it is whole.
fn read_half(file: BorrowedFd<'_>, half: u64) -> Option<(u64, Vec<u8>)> {
    let mut found = [0; HEADER_BYTES];
    read_all(file, &mut found, half)?;
    let number = u64::from_ne_bytes(*found[8..].first_chunk()?);
    let bytes = u32::from_ne_bytes(*found[16..].first_chunk()?);
    if u64::from(bytes) > HALF_BYTES - HEADER_BYTES as u64 {
        return None;
    }
    let mut body = vec![0; bytes as usize];
    read_all(file, &mut body, half + HEADER_BYTES as u64)?;
    (header(number, &body) == found).then_some((number, body))
}

fn header(number: u64, body: &[u8]) -> [u8; HEADER_BYTES] {
    let bytes: u32 = iomem::fits(body.len(), "bytes of a record");
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..16].copy_from_slice(&number.to_ne_bytes());
    header[16..20].copy_from_slice(&bytes.to_ne_bytes());
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&header[..20]);
    checksum.update(body);
    header[20..].copy_from_slice(&checksum.finalize().to_ne_bytes());
    header
}

fn read_all(file: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> Option<()> {
    let mut done = 0;
    while done < bytes.len() {
        match pread(file, &mut bytes[done..], offset + done as u64) {
            Ok(0) | Err(_) => return None,
            Ok(read) => done += read,
        }
    }
    Some(())
}
