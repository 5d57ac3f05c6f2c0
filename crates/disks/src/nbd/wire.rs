//! The messages of NBD's transmission phase as bytes, as in the protocol document of the NBD
//! project (doc/proto.md). Nothing here reads or writes a socket.

use iomem::fits;

/// The longest request without its data.
pub(super) const REQUEST_BYTES_MAX: usize = 32;

/// The longest part of a reply that is parsed as a whole: everything but data.
pub(super) const REPLY_BYTES_MAX: usize = 16 << 10;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Flags of requests.
pub(super) const FLAG_FUA: u16 = 1 << 0;
pub(super) const FLAG_NO_HOLE: u16 = 1 << 1;
pub(super) const FLAG_ONE_EXTENT: u16 = 1 << 3;
pub(super) const FLAG_FAST_ZERO: u16 = 1 << 4;
const FLAG_PAYLOAD_LENGTH: u16 = 1 << 5;

const REPLY_FLAG_DONE: u16 = 1 << 0;

const CHUNK_NONE: u16 = 0;
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
const CHUNK_STATUS: u16 = 5;
const CHUNK_STATUS_EXTENDED: u16 = 6;
const CHUNK_IS_ERROR: u16 = 1 << 15;

/// A breach of the protocol by a server. Its connection can no longer be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Violation(pub(super) &'static str);

/// The framing of requests and replies, which the handshake has settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    Simple,
    Structured,
    Extended,
}

impl Framing {
    /// The most bytes of a request without data: lengths have 32 bits without extended headers.
    pub(super) fn range_bytes_max(self) -> u64 {
        match self {
            Self::Extended => u64::MAX,
            Self::Simple | Self::Structured => 1 << 31,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    WriteZeroes,
    BlockStatus,
}

impl Command {
    fn number(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::WriteZeroes => 6,
            Self::BlockStatus => 7,
        }
    }

    /// Returns true if the command changes the content of the disk.
    pub(super) fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Trim | Self::WriteZeroes)
    }
}

/// A request without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) command: Command,
    pub(super) flags: u16,
    pub(super) offset: u64,
    /// The number of bytes to move, to zero, to trim or to ask about.
    pub(super) len: u64,
}

impl Request {
    pub(super) const FLUSH: Self = Self { command: Command::Flush, flags: 0, offset: 0, len: 0 };

    /// Returns the range of the disk that the request changes.
    pub(super) fn changed_range(&self) -> Option<std::ops::Range<u64>> {
        self.command.changes().then(|| self.offset..self.offset.saturating_add(self.len))
    }

    /// The first byte of the disk behind the request.
    pub(super) fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Returns the bytes of the request, without its data. `cookie` comes back with the reply.
    pub(super) fn encode(self, cookie: u64, framing: Framing) -> Header {
        let mut header = Header { bytes: [0; REQUEST_BYTES_MAX], used: 0 };
        let mut flags = self.flags;
        if framing == Framing::Extended {
            if self.command == Command::Write {
                flags |= FLAG_PAYLOAD_LENGTH;
            }
            header.put(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
        } else {
            header.put(&REQUEST_MAGIC.to_be_bytes());
        }
        header.put(&flags.to_be_bytes());
        header.put(&self.command.number().to_be_bytes());
        header.put(&cookie.to_be_bytes());
        header.put(&self.offset.to_be_bytes());
        match framing {
            Framing::Extended => header.put(&self.len.to_be_bytes()),
            _ => header.put(&fits::<u64, u32>(self.len, "the length of a request").to_be_bytes()),
        }
        header
    }
}

/// The bytes of a request, without its data.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    bytes: [u8; REQUEST_BYTES_MAX],
    used: usize,
}

impl Header {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.used..self.used + bytes.len()].copy_from_slice(bytes);
        self.used += bytes.len();
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }
}

/// A reply, or one of several parts of it, without data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) cookie: u64,
    pub(super) content: ReplyContent,
    /// True if nothing more comes for this cookie.
    pub(super) is_last: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplyContent {
    /// The request is done; after a read, all its data follows.
    Simple,
    /// Nothing: the part only marks the end.
    Nothing,
    /// `len` bytes follow, which belong at this offset of the disk.
    Data { offset: u64, len: u64 },
    /// Zeroes belong at this offset of the disk.
    Hole { offset: u64, len: u64 },
    /// The first `len` bytes of the range have the state `flags`.
    Status { context: u32, len: u64, flags: u64 },
    /// The request has failed, with this error number of the protocol.
    Error(u32),
}

/// The result of parsing received bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parsed {
    /// The reply is not complete: at least this many bytes are needed.
    Needs(usize),
    /// A reply, and the number of its bytes.
    Reply(Reply, usize),
}

/// Parses the start of the received bytes.
///
/// # Errors
///
/// If they break the protocol.
pub(super) fn parse(bytes: &[u8], framing: Framing) -> Result<Parsed, Violation> {
    let Some(magic) = u32_at(bytes, 0) else { return Ok(Parsed::Needs(16)) };
    match (magic, framing) {
        (SIMPLE_REPLY_MAGIC, Framing::Simple | Framing::Structured) => Ok(parse_simple(bytes)),
        (STRUCTURED_REPLY_MAGIC, Framing::Structured) => {
            let (Some(cookie), Some(len)) = (u64_at(bytes, 8), u32_at(bytes, 16)) else {
                return Ok(Parsed::Needs(20));
            };
            parse_chunk(bytes, 20, cookie, len.into())
        }
        (EXTENDED_REPLY_MAGIC, Framing::Extended) => {
            let (Some(cookie), Some(len)) = (u64_at(bytes, 8), u64_at(bytes, 24)) else {
                return Ok(Parsed::Needs(32));
            };
            parse_chunk(bytes, 32, cookie, len)
        }
        _ => Err(Violation("it sent an invalid reply")),
    }
}

fn parse_simple(bytes: &[u8]) -> Parsed {
    let (Some(error), Some(cookie)) = (u32_at(bytes, 4), u64_at(bytes, 8)) else {
        return Parsed::Needs(16);
    };
    let content = if error == 0 { ReplyContent::Simple } else { ReplyContent::Error(error) };
    Parsed::Reply(Reply { cookie, content, is_last: true }, 16)
}

/// Parses a part of a structured or extended reply, with a payload of `len` bytes.
fn parse_chunk(bytes: &[u8], head: usize, cookie: u64, len: u64) -> Result<Parsed, Violation> {
    let (Some(flags), Some(kind)) = (u16_at(bytes, 4), u16_at(bytes, 6)) else {
        return Ok(Parsed::Needs(head));
    };
    let is_last = flags & REPLY_FLAG_DONE != 0;
    let found = |content, used| Ok(Parsed::Reply(Reply { cookie, content, is_last }, used));
    if kind == CHUNK_DATA {
        let Some(len) = len.checked_sub(8).filter(|len| *len > 0) else {
            return Err(Violation("it sent a data chunk of zero bytes"));
        };
        return match u64_at(bytes, head) {
            Some(offset) => found(ReplyContent::Data { offset, len }, head + 8),
            None => Ok(Parsed::Needs(head + 8)),
        };
    }
    let whole = usize::try_from(len).ok().filter(|len| *len <= REPLY_BYTES_MAX - head);
    let Some(whole) = whole.map(|len| head + len) else {
        return Err(Violation("it sent a reply that is too long"));
    };
    let Some(bytes) = bytes.get(..whole) else { return Ok(Parsed::Needs(whole)) };
    let payload = bytes.get(head..).unwrap_or_default();
    match content(kind, payload) {
        Some(content) => found(content, whole),
        None => Err(Violation("it sent a reply with an unknown type or a wrong length")),
    }
}

/// Parses the payload of a part without data.
fn content(kind: u16, payload: &[u8]) -> Option<ReplyContent> {
    match kind {
        CHUNK_NONE => payload.is_empty().then_some(ReplyContent::Nothing),
        CHUNK_HOLE => {
            let (offset, len) = (u64_at(payload, 0)?, u32_at(payload, 8)?);
            (payload.len() == 12 && len > 0)
                .then_some(ReplyContent::Hole { offset, len: len.into() })
        }
        CHUNK_STATUS => {
            let (context, len) = (u32_at(payload, 0)?, u32_at(payload, 4)?);
            let flags = u32_at(payload, 8)?;
            let is_whole = (payload.len() - 4).is_multiple_of(8);
            is_whole.then_some(ReplyContent::Status {
                context,
                len: len.into(),
                flags: flags.into(),
            })
        }
        CHUNK_STATUS_EXTENDED => {
            let (context, count) = (u32_at(payload, 0)?, u32_at(payload, 4)?);
            let (len, flags) = (u64_at(payload, 8)?, u64_at(payload, 16)?);
            let is_whole = u64::from(count) * 16 + 8 == payload.len() as u64;
            is_whole.then_some(ReplyContent::Status { context, len, flags })
        }
        // All parts of this kind begin with the number and a text.
        _ if kind & CHUNK_IS_ERROR != 0 => {
            let (error, text) = (u32_at(payload, 0)?, u16_at(payload, 4)?);
            (payload.len() - 6 >= text.into()).then_some(ReplyContent::Error(error))
        }
        _ => None,
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Converts an error number of the protocol to an errno; `EIO` if it is unknown.
pub(super) fn errno(error: u32) -> i32 {
    match error {
        1 => libc::EPERM,
        12 => libc::ENOMEM,
        22 => libc::EINVAL,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        108 => libc::ESHUTDOWN,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    /// A late request holds back later writes to the range that it may still change.
    #[test]
    fn requests_that_change_the_disk_have_a_range() {
        for (command, is_change) in [
            (Command::Read, false),
            (Command::Write, true),
            (Command::Disconnect, false),
            (Command::Flush, false),
            (Command::Trim, true),
            (Command::WriteZeroes, true),
            (Command::BlockStatus, false),
        ] {
            let request = Request { command, flags: 0, offset: 4096, len: 512 };
            assert_eq!(request.changed_range(), is_change.then_some(4096..4608), "{command:?}");
            assert_eq!(request.end(), 4608);
            let last = Request { offset: u64::MAX - 1, ..request };
            assert_eq!(last.changed_range().is_some(), is_change, "it ends with the numbers");
        }
    }

    /// A whole disk may be discarded at once.
    #[test]
    fn the_longest_range_of_each_framing_has_a_length() {
        for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
            let len = framing.range_bytes_max();
            assert!(len.is_multiple_of(4096) || len == u64::MAX, "the rest is aligned");
            let request = Request { command: Command::Trim, flags: 0, offset: 0, len };
            let encoded = request.encode(7, framing);
            assert!(encoded.as_bytes().ends_with(&len.to_be_bytes()[4..]), "{framing:?}");
        }
    }

    #[test]
    fn requests_are_encoded_by_the_protocol() {
        let request =
            Request { command: Command::Write, flags: FLAG_FUA, offset: 0x0102, len: 0x0304 };
        let compact = request.encode(0xa1a2_a3a4_a5a6_a7a8, Framing::Structured);
        let cookie = [0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8];
        let expected = bytes_of(&[
            &[0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1],
            &cookie,
            &[0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 3, 4],
        ]);
        assert_eq!(compact.as_bytes(), expected);
        let extended = request.encode(0xa1a2_a3a4_a5a6_a7a8, Framing::Extended);
        let expected = bytes_of(&[
            &[0x21, 0xe4, 0x1c, 0x71, 0, 0x21, 0, 1],
            &cookie,
            &[0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 3, 4],
        ]);
        assert_eq!(extended.as_bytes(), expected);
        // Only data follows its request, and has the flag for that.
        for (command, number) in [
            (Command::Read, 0),
            (Command::Disconnect, 2),
            (Command::Flush, 3),
            (Command::Trim, 4),
            (Command::WriteZeroes, 6),
            (Command::BlockStatus, 7),
        ] {
            let request = Request { command, flags: FLAG_FUA, offset: 0, len: 0 };
            for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
                let encoded = request.encode(0, framing);
                assert_eq!(encoded.as_bytes()[4..8], [0, 1, 0, number], "{command:?}");
            }
        }
    }

    #[test]
    fn each_error_of_the_protocol_has_its_errno() {
        for (error, expected) in [
            (1, libc::EPERM),
            (5, libc::EIO),
            (12, libc::ENOMEM),
            (22, libc::EINVAL),
            (28, libc::ENOSPC),
            (75, libc::EOVERFLOW),
            (95, libc::EOPNOTSUPP),
            (108, libc::ESHUTDOWN),
            (0, libc::EIO),
            (4, libc::EIO),
        ] {
            assert_eq!(errno(error), expected, "{error}");
        }
    }

    /// Memory for received bytes is bounded.
    #[test]
    fn the_longest_reply_without_data_is_bounded() {
        const EXTENDED_HEAD: u64 = 32;
        let most = REPLY_BYTES_MAX as u64 - EXTENDED_HEAD;
        for (len, expected) in [
            (most, Ok(Parsed::Needs(REPLY_BYTES_MAX))),
            (most + 1, Err(Violation("it sent a reply that is too long"))),
            (u64::MAX, Err(Violation("it sent a reply that is too long"))),
        ] {
            let head = [0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0x80, 1];
            let bytes = bytes_of(&[&head, &[0; 16], &len.to_be_bytes()]);
            assert_eq!(parse(&bytes, Framing::Extended), expected, "{len}");
        }
    }

    /// Each reply is parsed from its bytes. Each beginning of them needs more.
    #[test]
    fn replies_are_parsed_only_from_all_their_bytes() {
        let cookie = 7u64.to_be_bytes();
        let structured = |flags: u8, kind: [u8; 2], payload: &[u8]| {
            let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
            bytes_of(&[&[0x66, 0x8e, 0x33, 0xef, 0, flags], &kind, &cookie, &len, payload])
        };
        let extended = |kind: [u8; 2], payload: &[u8]| {
            let (offset, len) = (9u64.to_be_bytes(), (payload.len() as u64).to_be_bytes());
            let magic = [0x6e, 0x8a, 0x27, 0x8c, 0, 1];
            bytes_of(&[&magic, &kind, &cookie, &offset, &len, payload])
        };
        let simple =
            |error: u8| bytes_of(&[&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, error], &cookie[..]]);
        let at_512 = 512u64.to_be_bytes();
        let hole = bytes_of(&[&at_512, &[0, 0, 2, 0]]);
        let status = [0, 0, 0, 3, 0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 0];
        let status64 = bytes_of(&[&[0, 0, 0, 3, 0, 0, 0, 1], &at_512, &3u64.to_be_bytes()]);
        let error = [0, 0, 0, 28, 0, 2, b'n', b'o'];
        for (bytes, framing, content, is_last) in [
            (simple(0), Framing::Simple, ReplyContent::Simple, true),
            (simple(5), Framing::Structured, ReplyContent::Error(5), true),
            (structured(1, [0, 0], &[]), Framing::Structured, ReplyContent::Nothing, true),
            (
                structured(0, [0, 2], &hole),
                Framing::Structured,
                ReplyContent::Hole { offset: 512, len: 512 },
                false,
            ),
            (
                structured(1, [0, 5], &status),
                Framing::Structured,
                ReplyContent::Status { context: 3, len: 512, flags: 3 },
                true,
            ),
            (structured(1, [0x80, 1], &error), Framing::Structured, ReplyContent::Error(28), true),
            (structured(1, [0x90, 9], &error), Framing::Structured, ReplyContent::Error(28), true),
            (
                extended([0, 6], &status64),
                Framing::Extended,
                ReplyContent::Status { context: 3, len: 512, flags: 3 },
                true,
            ),
        ] {
            let reply = Reply { cookie: 7, content, is_last };
            assert_eq!(parse(&bytes, framing), Ok(Parsed::Reply(reply, bytes.len())));
            let longer = bytes_of(&[&bytes, &[0; 40]]);
            assert_eq!(parse(&longer, framing), Ok(Parsed::Reply(reply, bytes.len())));
            for end in 0..bytes.len() {
                let Ok(Parsed::Needs(needs)) = parse(&bytes[..end], framing) else {
                    panic!("{content:?} is complete after {end} bytes");
                };
                assert!(end < needs && needs <= bytes.len().max(20), "{content:?}: {end} {needs}");
            }
        }
        let data = structured(1, [0, 1], &bytes_of(&[&at_512, &[1; 100]]));
        let reply = Reply {
            cookie: 7,
            content: ReplyContent::Data { offset: 512, len: 100 },
            is_last: true,
        };
        assert_eq!(parse(&data[..28], Framing::Structured), Ok(Parsed::Reply(reply, 28)));
        assert_eq!(parse(&data[..27], Framing::Structured), Ok(Parsed::Needs(28)));
    }

    #[test]
    fn bytes_that_form_no_reply_are_a_violation() {
        let chunk = |kind: [u8; 2], len: u32, payload: &[u8]| {
            let magic = [0x66, 0x8e, 0x33, 0xef, 0, 1];
            bytes_of(&[&magic, &kind, &[0; 8], &len.to_be_bytes(), payload])
        };
        for bytes in [
            vec![0; 16],
            chunk([0, 1], 8, &[0; 8]),
            chunk([0, 1], 3, &[0; 3]),
            chunk([0, 2], 11, &[0; 11]),
            chunk([0, 2], 12, &[0; 12]),
            chunk([0, 2], 13, &[1; 13]),
            chunk([0, 5], 16, &[1; 16]),
            chunk([0, 5], 5, &[0; 5]),
            chunk([0, 7], 0, &[]),
            chunk([0x80, 1], 5, &[0; 5]),
            chunk([0x80, 1], 6, &[0, 0, 0, 5, 0, 1]),
            chunk([0x80, 1], u32::MAX, &[]),
            chunk([0, 0], 1, &[0]),
        ] {
            assert!(parse(&bytes, Framing::Structured).is_err(), "{bytes:?}");
        }
        // The number of extents is not the length.
        for (count, payload) in [(1, [0; 36]), (3, [0; 36])] {
            let head = [0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 6];
            let payload = bytes_of(&[&[0, 0, 0, 5, 0, 0, 0, count], &payload[4..]]);
            let len = (payload.len() as u64).to_be_bytes();
            let bytes = bytes_of(&[&head, &[0; 16], &len, &payload]);
            assert!(parse(&bytes, Framing::Extended).is_err(), "{count}");
        }
        let simple = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0];
        assert!(parse(&simple, Framing::Extended).is_err());
        assert!(parse(&chunk([0, 0], 0, &[]), Framing::Simple).is_err());
    }
}
