//! The messages of the server for tests, as bytes.

use std::io::Read;
use std::os::unix::net::UnixStream;

use super::super::wire::Framing;

/// Numbers of commands in the protocol.
pub(super) const READ: u16 = 0;
pub(super) const WRITE: u16 = 1;
pub(super) const DISCONNECT: u16 = 2;
pub(super) const FLUSH: u16 = 3;
pub(super) const TRIM: u16 = 4;
pub(super) const ZEROES: u16 = 6;
pub(super) const STATUS: u16 = 7;

#[derive(Clone)]
pub(super) struct Request {
    pub(super) command: u16,
    pub(super) flags: u16,
    pub(super) cookie: [u8; 8],
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) data: Vec<u8>,
    pub(super) framing: Framing,
}

/// The state of `bytes` bytes, with the flags of the context.
pub(super) fn status(bytes: u64, flags: u64) -> Vec<u8> {
    [&[0, 0, 0, 9, 0, 0, 0, 1][..], &bytes.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// The reply to a request.
pub(super) fn reply(request: &Request, error: u32, data: &[u8]) -> Vec<u8> {
    if request.framing != Framing::Simple {
        return reply_in_chunk(request, error, data);
    }
    let header = [&[0x67, 0x44, 0x66, 0x98][..], &error.to_be_bytes(), &request.cookie];
    [&header.concat()[..], data].concat()
}

/// A reply of one chunk.
fn reply_in_chunk(request: &Request, error: u32, data: &[u8]) -> Vec<u8> {
    let is_extended = request.framing == Framing::Extended;
    let (kind, payload) = match (error, request.command) {
        (0, READ) => (1u16, [&request.offset.to_be_bytes()[..], data].concat()),
        (0, STATUS) if is_extended => (6, data.to_vec()),
        // The context, and numbers of 32 bits without a count.
        (0, STATUS) => (5, [&data[..4], &data[12..16], &data[20..24]].concat()),
        (0, _) => (0, Vec::new()),
        (error, _) => (0x8001, [&error.to_be_bytes()[..], &[0, 0]].concat()),
    };
    let magic: [u8; 4] =
        if is_extended { [0x6e, 0x8a, 0x27, 0x8c] } else { [0x66, 0x8e, 0x33, 0xef] };
    let head = [&magic[..], &[0, 1], &kind.to_be_bytes(), &request.cookie].concat();
    let len = (payload.len() as u64).to_be_bytes();
    match is_extended {
        true => [&head[..], &request.offset.to_be_bytes(), &len, &payload].concat(),
        false => [&head[..], &len[4..], &payload].concat(),
    }
}

/// Reads a request; `None` at the end.
pub(super) fn read_request(
    stream: &mut UnixStream,
    framing: Framing,
) -> std::io::Result<Option<Request>> {
    let mut magic = [0; 4];
    if stream.read(&mut magic)? != 4 {
        return Ok(None);
    }
    let flags = u16::from_be_bytes(take(stream)?);
    let command = u16::from_be_bytes(take(stream)?);
    let (cookie, offset) = (take(stream)?, u64::from_be_bytes(take(stream)?));
    let len = match framing {
        Framing::Extended => u64::from_be_bytes(take(stream)?),
        _ => u32::from_be_bytes(take(stream)?).into(),
    };
    let mut data = Vec::new();
    if command == WRITE {
        data.resize(usize::try_from(len).unwrap(), 0);
        stream.read_exact(&mut data)?;
    }
    Ok(Some(Request { command, flags, cookie, offset, len, data, framing }))
}

pub(super) fn take<const N: usize>(stream: &mut UnixStream) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
