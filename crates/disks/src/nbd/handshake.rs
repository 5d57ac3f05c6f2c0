//! The handshake of NBD, fixed newstyle, over any stream: the properties of an export, and the form
//! of later messages. The numbers are from the protocol document of the NBD project (doc/proto.md).

use std::io::{self, Read, Write};

use super::wire::Framing;

/// A stream to a server, also inside TLS.
pub(super) trait Stream: Read + Write {}

impl<S: Read + Write> Stream for S {}

const MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OLD_MAGIC: u64 = 0x0000_4202_8186_1253;
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Flags of both sides.
const FIXED_NEWSTYLE: u16 = 1 << 0;
const NO_ZEROES: u16 = 1 << 1;

const OPTION_EXPORT_NAME: u32 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_START_TLS: u32 = 5;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED_REPLY: u32 = 8;
const OPTION_SET_META_CONTEXT: u32 = 10;
const OPTION_EXTENDED_HEADERS: u32 = 11;

const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_META_CONTEXT: u32 = 4;
const REPLY_IS_ERROR: u32 = 1 << 31;
const ERROR_UNSUPPORTED: u32 = REPLY_IS_ERROR | 1;
const ERROR_POLICY: u32 = REPLY_IS_ERROR | 2;
const ERROR_TLS_REQUIRED: u32 = REPLY_IS_ERROR | 5;
const ERROR_UNKNOWN: u32 = REPLY_IS_ERROR | 6;
const ERROR_SHUTDOWN: u32 = REPLY_IS_ERROR | 7;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

const CONTEXT: &str = "base:allocation";

/// The longest reply to an option, and the most replies.
const REPLY_BYTES_MAX: u32 = 64 << 10;
const REPLIES_MAX: usize = 1000;

/// The most data at once for a server that names no limit.
const PAYLOAD_MAX: u32 = 32 << 20;
/// A server with a lower limit would have requests cut into thousands of parts.
const MAX_MIN: u32 = 4096;

/// The abilities of an export, as flags.
pub(super) mod can {
    pub(in crate::nbd) const HAS_FLAGS: u16 = 1 << 0;
    pub(in crate::nbd) const READ_ONLY: u16 = 1 << 1;
    pub(in crate::nbd) const FLUSH: u16 = 1 << 2;
    pub(in crate::nbd) const FUA: u16 = 1 << 3;
    pub(in crate::nbd) const TRIM: u16 = 1 << 5;
    pub(in crate::nbd) const WRITE_ZEROES: u16 = 1 << 6;
    pub(in crate::nbd) const MULTI_CONN: u16 = 1 << 8;
    pub(in crate::nbd) const FAST_ZERO: u16 = 1 << 11;
    /// The flags on which requests depend. Further flags describe the server, or abilities that are
    /// not used.
    pub(in crate::nbd) const NEEDED: u16 =
        FLUSH | FUA | TRIM | WRITE_ZEROES | MULTI_CONN | FAST_ZERO;
}

/// The result of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) size_bytes: u64,
    /// See [`can`].
    pub(super) flags: u16,
    pub(super) framing: Framing,
    /// The unit of offsets and lengths: a power of two up to 65,536.
    pub(super) block_bytes_min: u32,
    /// A power of two that is at least the smallest.
    pub(super) block_bytes_preferred: u32,
    /// The most data of a request: a multiple of the smallest block.
    pub(super) payload_bytes_max: u32,
    /// The number of the context in which the server reports holes.
    pub(super) context: Option<u32>,
}

impl Facts {
    pub(super) fn can(&self, what: u16) -> bool {
        self.flags & what != 0
    }
}

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Requests.
    Serve,
    /// Questions about the export, after which the connection ends.
    Ask,
}

/// A stream after its first bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Greeted {
    no_zeroes: bool,
}

/// Reads the greeting, and answers it.
///
/// # Errors
///
/// The reason why the server cannot be used.
pub(super) fn greet(stream: &mut (impl Read + Write)) -> Result<Greeted, String> {
    if read_u64(stream)? != MAGIC {
        return Err("the program at this address is not an NBD server".to_owned());
    }
    match read_u64(stream)? {
        OPTION_MAGIC => {}
        OLD_MAGIC => {
            return Err(
                "the server speaks the oldstyle protocol from before 2011; use a newer server, or \
                 give its export a name"
                    .to_owned(),
            );
        }
        _ => return Err("the program at this address is not an NBD server".to_owned()),
    }
    let flags = read_u16(stream)?;
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(
            "the server does not speak the fixed newstyle protocol; use a newer server".to_owned()
        );
    }
    let shared = flags & (FIXED_NEWSTYLE | NO_ZEROES);
    send(stream, &u32::from(shared).to_be_bytes())?;
    Ok(Greeted { no_zeroes: shared & NO_ZEROES != 0 })
}

/// Asks for TLS, in which the stream must be wrapped next.
///
/// # Errors
///
/// If the server offers none.
pub(super) fn start_tls(stream: &mut (impl Read + Write)) -> Result<(), String> {
    send_option(stream, OPTION_START_TLS, &[])?;
    let mut replies = Replies::new(OPTION_START_TLS);
    match replies.next(stream)? {
        OptionReply::Ack => Ok(()),
        OptionReply::Refused(ERROR_UNSUPPORTED | ERROR_POLICY, _) => {
            Err("the server offers no TLS; start it with TLS, or use nbd:// to connect without TLS"
                .into())
        }
        OptionReply::Refused(error, text) => Err(refused("TLS", error, &text)),
        OptionReply::Info(_) | OptionReply::Context(_) => Err(unexpected()),
    }
}

/// Settles the rest. The server begins to serve `export`, or describes it.
///
/// # Errors
///
/// The reason why the server or the export cannot be used.
pub(super) fn negotiate(
    stream: &mut (impl Read + Write),
    greeted: Greeted,
    export: &str,
    purpose: Purpose,
) -> Result<Facts, String> {
    let framing = settle_framing(stream)?;
    let context = match framing {
        Framing::Simple => None,
        _ => settle_context(stream, export)?,
    };
    let option = if purpose == Purpose::Serve { OPTION_GO } else { OPTION_INFO };
    let Some(mut found) = ask_for_export(stream, option, export)? else {
        if purpose == Purpose::Ask {
            return Err("the server is too old to describe its exports".to_owned());
        }
        return old_export(stream, greeted, export, framing).and_then(|f| f.facts(context));
    };
    found.framing = framing;
    if purpose == Purpose::Ask {
        // Whatever the reply, the connection ends.
        let _ = send_option(stream, OPTION_ABORT, &[]);
    }
    found.facts(context)
}

fn settle_framing(stream: &mut (impl Read + Write)) -> Result<Framing, String> {
    for (option, framing) in [
        (OPTION_EXTENDED_HEADERS, Framing::Extended),
        (OPTION_STRUCTURED_REPLY, Framing::Structured),
    ] {
        send_option(stream, option, &[])?;
        match Replies::new(option).next(stream)? {
            OptionReply::Ack => return Ok(framing),
            OptionReply::Refused(error @ (ERROR_TLS_REQUIRED | ERROR_SHUTDOWN), text) => {
                return Err(refused("the connection", error, &text));
            }
            OptionReply::Refused(..) => {}
            OptionReply::Info(_) | OptionReply::Context(_) => return Err(unexpected()),
        }
    }
    Ok(Framing::Simple)
}

fn settle_context(stream: &mut (impl Read + Write), export: &str) -> Result<Option<u32>, String> {
    let mut data = Vec::new();
    put_text(&mut data, export)?;
    data.extend(1u32.to_be_bytes());
    put_text(&mut data, CONTEXT)?;
    send_option(stream, OPTION_SET_META_CONTEXT, &data)?;
    let (mut replies, mut context) = (Replies::new(OPTION_SET_META_CONTEXT), None);
    loop {
        match replies.next(stream)? {
            OptionReply::Ack => return Ok(context),
            // The export may be unknown: the next option for it has a better error.
            OptionReply::Refused(..) => return Ok(None),
            OptionReply::Context(data) => {
                if let Some((number, name)) = data.split_first_chunk()
                    && name == CONTEXT.as_bytes()
                {
                    context = Some(u32::from_be_bytes(*number));
                }
            }
            OptionReply::Info(_) => return Err(unexpected()),
        }
    }
}

/// A server's description of an export, not yet checked.
#[derive(Debug)]
struct ExportInfo {
    export: Option<(u64, u16)>,
    blocks: Option<[u32; 3]>,
    framing: Framing,
}

/// Asks for an export; `None` if the server does not know the option.
fn ask_for_export(
    stream: &mut (impl Read + Write),
    option: u32,
    export: &str,
) -> Result<Option<ExportInfo>, String> {
    let mut data = Vec::new();
    put_text(&mut data, export)?;
    data.extend(1u16.to_be_bytes());
    data.extend(INFO_BLOCK_SIZE.to_be_bytes());
    send_option(stream, option, &data)?;
    let mut replies = Replies::new(option);
    let mut found = ExportInfo { export: None, blocks: None, framing: Framing::Simple };
    loop {
        match replies.next(stream)? {
            OptionReply::Ack => return Ok(Some(found)),
            OptionReply::Info(data) => found.record(&data),
            OptionReply::Refused(ERROR_UNSUPPORTED, _) => return Ok(None),
            OptionReply::Refused(error, text) => {
                return Err(refused(&format!("the export '{export}'"), error, &text));
            }
            OptionReply::Context(_) => return Err(unexpected()),
        }
    }
}

/// Opens an export in the way of servers before 2016, which works or ends the connection.
fn old_export(
    stream: &mut (impl Read + Write),
    greeted: Greeted,
    export: &str,
    framing: Framing,
) -> Result<ExportInfo, String> {
    send_option(stream, OPTION_EXPORT_NAME, export.as_bytes())?;
    let gone = |error| {
        format!(
            "the server closed the connection; check that it has an export '{export}' ({error})"
        )
    };
    let size_bytes = read_u64(stream).map_err(gone)?;
    let flags = read_u16(stream)?;
    if !greeted.no_zeroes {
        read_exactly::<124>(stream)?;
    }
    Ok(ExportInfo { export: Some((size_bytes, flags)), blocks: None, framing })
}

impl ExportInfo {
    fn record(&mut self, data: &[u8]) {
        let Some((kind, rest)) = data.split_first_chunk() else { return };
        match u16::from_be_bytes(*kind) {
            INFO_EXPORT => {
                self.export = rest.split_first_chunk().and_then(|(size, flags)| {
                    let flags = u16::from_be_bytes(*flags.first_chunk()?);
                    Some((u64::from_be_bytes(*size), flags))
                });
            }
            INFO_BLOCK_SIZE => {
                let (sizes, _) = rest.as_chunks();
                let sizes: Vec<u32> = sizes.iter().map(|size| u32::from_be_bytes(*size)).collect();
                self.blocks = sizes.first_chunk().copied();
            }
            // Names and descriptions, which were not asked for.
            _ => {}
        }
    }

    fn facts(&self, context: Option<u32>) -> Result<Facts, String> {
        let Some((size_bytes, flags)) = self.export else {
            return Err("the server did not send the size of the export".to_owned());
        };
        if flags & can::HAS_FLAGS == 0 {
            return Err("the server did not send the capabilities of the export".to_owned());
        }
        let [min, preferred, max] = self.blocks.unwrap_or([1, 4096, PAYLOAD_MAX]);
        if !min.is_power_of_two() || min > 65_536 || !preferred.is_power_of_two() || max < min {
            return Err(format!("the server sent invalid block sizes ({min}, {preferred}, {max})"));
        }
        if max < MAX_MIN {
            return Err(format!(
                "the server takes at most {max} bytes in a request; at least {MAX_MIN} are needed"
            ));
        }
        Ok(Facts {
            size_bytes,
            flags,
            framing: self.framing,
            block_bytes_min: min,
            block_bytes_preferred: preferred.max(min),
            payload_bytes_max: max.min(PAYLOAD_MAX) / min * min,
            context,
        })
    }
}

/// A server's reply to an option.
enum OptionReply {
    Ack,
    Info(Vec<u8>),
    Context(Vec<u8>),
    Refused(u32, String),
}

/// The replies to an option.
struct Replies {
    option: u32,
    left: usize,
}

impl Replies {
    fn new(option: u32) -> Self {
        Self { option, left: REPLIES_MAX }
    }

    fn next(&mut self, stream: &mut impl Read) -> Result<OptionReply, String> {
        let Some(left) = self.left.checked_sub(1) else {
            return Err("the server sends too many replies to an option".to_owned());
        };
        self.left = left;
        let (magic, option) = (read_u64(stream)?, read_u32(stream)?);
        let (kind, len) = (read_u32(stream)?, read_u32(stream)?);
        if magic != REPLY_MAGIC || option != self.option || len > REPLY_BYTES_MAX {
            return Err(unexpected());
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data).map_err(|error| cannot("receive from", &error))?;
        match kind {
            REPLY_ACK => Ok(OptionReply::Ack),
            REPLY_INFO => Ok(OptionReply::Info(data)),
            REPLY_META_CONTEXT => Ok(OptionReply::Context(data)),
            _ if kind & REPLY_IS_ERROR != 0 => Ok(OptionReply::Refused(kind, printable(&data))),
            _ => Err(unexpected()),
        }
    }
}

/// Prepares a server's text for the log: one line of bounded length.
fn printable(data: &[u8]) -> String {
    let text = String::from_utf8_lossy(data);
    text.chars().filter(|character| !character.is_control()).take(200).collect()
}

fn refused(what: &str, error: u32, text: &str) -> String {
    let why = match error {
        ERROR_TLS_REQUIRED => "it requires TLS; use nbds:// and tls-certificates",
        ERROR_UNKNOWN => "it has no such export; list its exports with `nbdinfo --list`",
        ERROR_POLICY => "its configuration forbids it",
        ERROR_SHUTDOWN => "it is shutting down",
        _ => "",
    };
    let quoted = if text.is_empty() { String::new() } else { format!(" (its message: {text})") };
    let number = error & !REPLY_IS_ERROR;
    match why {
        "" => format!("the server rejected {what} with error {number}{quoted}"),
        why => format!("the server rejected {what}: {why}{quoted}"),
    }
}

fn unexpected() -> String {
    "the server violates the NBD protocol in its handshake".to_owned()
}

fn cannot(verb: &str, error: &io::Error) -> String {
    format!("cannot {verb} the server: {error}")
}

fn send_option(stream: &mut impl Write, option: u32, data: &[u8]) -> Result<(), String> {
    let len = u32::try_from(data.len()).map_err(|_| "the name of the export is too long")?;
    let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
    message.extend(option.to_be_bytes());
    message.extend(len.to_be_bytes());
    message.extend(data);
    send(stream, &message)
}

fn put_text(data: &mut Vec<u8>, text: &str) -> Result<(), String> {
    let len = u32::try_from(text.len()).map_err(|_| "the name of the export is too long")?;
    data.extend(len.to_be_bytes());
    data.extend(text.as_bytes());
    Ok(())
}

fn send(stream: &mut impl Write, data: &[u8]) -> Result<(), String> {
    let sent = stream.write_all(data).and_then(|()| stream.flush());
    sent.map_err(|error| cannot("send to", &error))
}

fn read_exactly<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map_err(|error| cannot("receive from", &error))?;
    Ok(bytes)
}

fn read_u64(stream: &mut impl Read) -> Result<u64, String> {
    read_exactly(stream).map(u64::from_be_bytes)
}

fn read_u32(stream: &mut impl Read) -> Result<u32, String> {
    read_exactly(stream).map(u32::from_be_bytes)
}

fn read_u16(stream: &mut impl Read) -> Result<u16, String> {
    read_exactly(stream).map(u16::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A server that sends given bytes, and keeps the bytes that it gets.
    struct Script {
        sent: Cursor<Vec<u8>>,
        received: Vec<u8>,
    }

    impl Script {
        fn new(parts: &[&[u8]]) -> Self {
            Self { sent: Cursor::new(parts.concat()), received: Vec::new() }
        }
    }

    impl Read for Script {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.sent.read(bytes)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.received.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\x00\x03";

    fn option(number: u8, data: &[u8]) -> Vec<u8> {
        let len = u32::try_from(data.len()).unwrap().to_be_bytes();
        [b"IHAVEOPT\0\0\0", &[number][..], &len, data].concat()
    }

    fn reply(option: u8, kind: [u8; 4], data: &[u8]) -> Vec<u8> {
        let len = u32::try_from(data.len()).unwrap().to_be_bytes();
        let magic = [0x00, 0x03, 0xe8, 0x89, 0x04, 0x55, 0x65, 0xa9];
        [&magic[..], &[0, 0, 0, option], &kind, &len, data].concat()
    }

    const ACK: [u8; 4] = [0, 0, 0, 1];
    const INFO: [u8; 4] = [0, 0, 0, 3];
    const CONTEXT_REPLY: [u8; 4] = [0, 0, 0, 4];
    const UNSUPPORTED: [u8; 4] = [0x80, 0, 0, 1];
    const FORBIDDEN: [u8; 4] = [0x80, 0, 0, 2];
    const SHUTS_DOWN: [u8; 4] = [0x80, 0, 0, 7];

    /// An export of a MiB with these flags.
    fn export(flags: [u8; 2]) -> Vec<u8> {
        [&[0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0][..], &flags].concat()
    }

    fn shake(script: &mut Script, purpose: Purpose) -> Result<Facts, String> {
        let greeted = greet(script)?;
        negotiate(script, greeted, "disk", purpose)
    }

    #[test]
    fn a_handshake_follows_the_protocol_byte_for_byte() {
        let blocks = [&[0, 3][..], &[0, 0, 2, 0], &[0, 0, 0x10, 0], &[0, 1, 0, 0]].concat();
        let context = [&[0, 0, 0, 9][..], b"base:allocation"].concat();
        let mut script = Script::new(&[
            GREETING,
            &reply(11, UNSUPPORTED, b"what?"),
            &reply(8, ACK, &[]),
            &reply(10, [0, 0, 0, 4], &context),
            &reply(10, ACK, &[]),
            &reply(7, INFO, &export([1, 0x0d])),
            &reply(7, INFO, &blocks),
            &reply(7, INFO, &[0, 1, b'n']),
            &reply(7, ACK, &[]),
        ]);
        let facts = shake(&mut script, Purpose::Serve).unwrap();
        let expected = Facts {
            size_bytes: 1 << 20,
            flags: 0x010d,
            framing: Framing::Structured,
            block_bytes_min: 512,
            block_bytes_preferred: 4096,
            payload_bytes_max: 65_536,
            context: Some(9),
        };
        assert_eq!(facts, expected);
        assert!(facts.can(can::MULTI_CONN) && facts.can(can::FLUSH) && !facts.can(can::TRIM));
        let name = [&[0, 0, 0, 4][..], b"disk"].concat();
        let expected = [
            &[0, 0, 0, 3][..],
            &option(11, &[]),
            &option(8, &[]),
            &option(10, &[&name[..], &[0, 0, 0, 1, 0, 0, 0, 15], b"base:allocation"].concat()),
            &option(7, &[&name[..], &[0, 1, 0, 3]].concat()),
        ];
        assert_eq!(script.received, expected.concat());
    }

    #[test]
    fn a_server_with_few_options_gets_the_old_export_request() {
        let mut script = Script::new(&[
            b"NBDMAGICIHAVEOPT\x00\x01",
            &reply(11, UNSUPPORTED, &[]),
            &reply(8, UNSUPPORTED, &[]),
            &reply(7, UNSUPPORTED, &[]),
            &export([0, 1])[2..],
            &[0; 124],
        ]);
        let facts = shake(&mut script, Purpose::Serve).unwrap();
        assert_eq!((facts.size_bytes, facts.flags), (1 << 20, 1));
        assert_eq!((facts.framing, facts.context), (Framing::Simple, None));
        assert_eq!((facts.block_bytes_min, facts.payload_bytes_max), (1, 32 << 20));
        assert!(script.received.ends_with(&option(1, b"disk")));
    }

    #[test]
    fn an_export_is_queried_without_being_opened() {
        let mut script = Script::new(&[
            GREETING,
            &reply(11, ACK, &[]),
            &reply(10, ACK, &[]),
            &reply(6, INFO, &export([0, 1])),
            &reply(6, ACK, &[]),
        ]);
        let facts = shake(&mut script, Purpose::Ask).unwrap();
        assert_eq!((facts.framing, facts.context), (Framing::Extended, None));
        assert!(script.received.ends_with(&option(2, &[])));
    }

    /// A server may describe contexts that it was not asked for.
    #[test]
    fn only_the_context_with_the_right_name_is_used() {
        let context = |number: u8, name: &str| {
            reply(10, [0, 0, 0, 4], &[&[0, 0, 0, number][..], name.as_bytes()].concat())
        };
        let (right, other) = (context(9, "base:allocation"), context(7, "qemu:allocation-depth"));
        let longer = context(6, "base:allocation-depth");
        let cut = reply(10, [0, 0, 0, 4], &[0, 0, 9]);
        for (replies, expected) in [
            (&[][..], None),
            (&[&right], Some(9)),
            (&[&other], None),
            (&[&longer], None),
            (&[&cut], None),
            (&[&other, &right], Some(9)),
            (&[&right, &other, &longer], Some(9)),
        ] {
            let replies: Vec<u8> = replies.iter().copied().flatten().copied().collect();
            let mut script = Script::new(&[&replies, &reply(10, ACK, &[])]);
            assert_eq!(settle_context(&mut script, "disk"), Ok(expected), "{replies:x?}");
        }
        let mut script = Script::new(&[&right, &reply(10, UNSUPPORTED, &[])]);
        assert_eq!(settle_context(&mut script, "disk"), Ok(None), "the server takes it back");
    }

    /// Requests have whole blocks, and data of at most 32 MiB.
    #[test]
    fn sizes_of_requests_fit_the_blocks_of_the_export() {
        let facts = |flags, blocks| {
            let info =
                ExportInfo { export: Some((1 << 20, flags)), blocks, framing: Framing::Simple };
            let facts = info.facts(None)?;
            Ok((facts.block_bytes_min, facts.block_bytes_preferred, facts.payload_bytes_max))
        };
        for (blocks, expected) in [
            (None, (1, 4096, 32 << 20)),
            (Some([1, 4096, u32::MAX]), (1, 4096, 32 << 20)),
            (Some([1, 1, 5000]), (1, 1, 5000)),
            (Some([512, 4096, 5000]), (512, 4096, 4608)),
            (Some([512, 4096, 4096]), (512, 4096, 4096)),
            (Some([4096, 512, 1 << 20]), (4096, 4096, 1 << 20)),
            (Some([65_536, 65_536, 100_000]), (65_536, 65_536, 65_536)),
        ] {
            assert_eq!(facts(can::HAS_FLAGS, blocks), Ok(expected), "{blocks:?}");
        }
        for (flags, blocks, expected) in [
            (can::FLUSH, None, "capabilities"),
            (1, Some([0, 4096, 1 << 20]), "invalid block sizes"),
            (1, Some([131_072, 131_072, 1 << 20]), "invalid block sizes"),
            (1, Some([512, 4095, 1 << 20]), "invalid block sizes"),
            (1, Some([65_536, 65_536, 65_535]), "invalid block sizes"),
            (1, Some([512, 4096, 4095]), "at most 4095 bytes"),
        ] {
            let error: Result<_, String> = facts(flags, blocks);
            assert!(error.as_ref().is_err_and(|why| why.contains(expected)), "{error:?}");
        }
    }

    #[test]
    fn an_error_names_the_fault_of_the_server() {
        let simple = [reply(11, UNSUPPORTED, &[]), reply(8, UNSUPPORTED, &[])].concat();
        let blocks = |min: u8, max: u8| {
            let sizes = [&[0, 3, 0, 0, 0, min][..], &[0, 0, 0x10, 0, 0, 0, max, 0]].concat();
            [reply(7, INFO, &export([0, 1])), reply(7, INFO, &sizes), reply(7, ACK, &[])].concat()
        };
        let (bad_blocks, small_blocks) = (blocks(3, 0xff), blocks(1, 1));
        let endless = reply(7, INFO, &[0, 1]).repeat(REPLIES_MAX + 1);
        let mut other_magic = reply(11, ACK, &[]);
        other_magic[0] = 1;
        for (parts, expected) in [
            (&[&b"SSH-2.0-OpenSSH_9.2\r\n"[..]][..], "is not an NBD server"),
            (&[b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53"], "oldstyle protocol"),
            (&[b"NBDMAGICIHAVEOPT\0\0"], "does not speak the fixed newstyle"),
            (&[b"NBDM"], "cannot receive from the server"),
            (&[GREETING, &reply(11, [0x80, 0, 0, 5], b"TLS\nfirst")], "use nbds://"),
            (&[GREETING, &reply(8, ACK, &[])], "violates the NBD protocol"),
            (&[GREETING, &reply(11, INFO, &[])], "violates the NBD protocol"),
            (&[GREETING, &simple, &reply(7, [0x80, 0, 0, 6], b"no")], "has no such export"),
            (&[GREETING, &simple, &reply(7, ACK, &[])], "did not send the size"),
            (&[GREETING, &simple, &bad_blocks], "sent invalid block sizes"),
            (&[GREETING, &simple, &small_blocks], "takes at most 256 bytes"),
            (&[GREETING, &simple, &endless], "sends too many replies"),
            (&[GREETING, &simple, &reply(7, UNSUPPORTED, &[])], "has an export 'disk'"),
            (&[b"NBDMAGICNOTANOPT\0\x03"], "is not an NBD server"),
            (&[GREETING, &other_magic], "violates the NBD protocol"),
            (&[GREETING, &reply(11, [0, 0, 0, 2], &[])], "violates the NBD protocol"),
            (&[GREETING, &reply(11, CONTEXT_REPLY, &[])], "violates the NBD protocol"),
            (&[GREETING, &reply(11, SHUTS_DOWN, b"bye")], "it is shutting down (its message: bye)"),
            (&[GREETING, &reply(11, ACK, &[]), &reply(10, INFO, &[])], "violates the NBD protocol"),
            (&[GREETING, &simple, &reply(7, CONTEXT_REPLY, &[])], "violates the NBD protocol"),
        ] {
            let error = shake(&mut Script::new(parts), Purpose::Serve).unwrap_err();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
        let mut huge = reply(11, ACK, &[]);
        huge[16..20].fill(0xff);
        let error = shake(&mut Script::new(&[GREETING, &huge]), Purpose::Serve).unwrap_err();
        assert!(error.contains("violates"), "{error}");
    }

    #[test]
    fn a_server_without_tls_is_refused_when_it_is_wanted() {
        for (kind, expected) in [
            (UNSUPPORTED, "offers no TLS; start it with TLS"),
            (FORBIDDEN, "offers no TLS; start it with TLS"),
            (SHUTS_DOWN, "the server rejected TLS: it is shutting down"),
            (INFO, "violates the NBD protocol"),
            (CONTEXT_REPLY, "violates the NBD protocol"),
        ] {
            let error = start_tls(&mut Script::new(&[&reply(5, kind, &[])])).unwrap_err();
            assert!(error.contains(expected), "{kind:?}: {error}");
        }
        let mut script = Script::new(&[&reply(5, ACK, &[])]);
        assert_eq!(start_tls(&mut script), Ok(()));
        assert_eq!(script.received, option(5, &[]));
    }

    /// The old request for an export would open it.
    #[test]
    fn a_server_without_descriptions_is_not_asked_to_open_an_export() {
        let simple = [reply(11, UNSUPPORTED, &[]), reply(8, UNSUPPORTED, &[])].concat();
        let mut script = Script::new(&[
            GREETING,
            &simple,
            &reply(6, UNSUPPORTED, &[]),
            &export([0, 1])[2..],
            &[0; 124],
        ]);
        let error = shake(&mut script, Purpose::Ask).unwrap_err();
        assert!(error.contains("too old to describe its exports"), "{error}");
    }
}
