//! Command descriptor blocks: the supported commands and their fields (SPC-5, SBC-4).

use crate::access::sense::Sense;

/// The bytes of a CDB that are evaluated: no supported command has more.
pub(crate) const KEPT_BYTES: usize = 16;

/// The operation of a command, for CDBs of all lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    TestUnitReady,
    RequestSense,
    Inquiry,
    ModeSelect,
    ModeSense,
    LogSense,
    StartStopUnit,
    PreventAllow,
    ReadCapacity10,
    ReadCapacity16,
    Read,
    Write,
    WriteAndVerify,
    Verify,
    SynchronizeCache,
    WriteSame,
    Unmap,
    GetLbaStatus,
    ReportLuns,
    ReportOpcodes,
    ReportTaskManagement,
    CompareAndWrite,
    ReserveIn,
    ReserveOut,
}

impl Op {
    /// True if the command must wait while another command has the medium to itself.
    #[inline]
    pub(crate) fn uses_medium(self) -> bool {
        matches!(
            self,
            Self::Read
                | Self::Write
                | Self::WriteAndVerify
                | Self::Verify
                | Self::WriteSame
                | Self::Unmap
        )
    }

    /// True if CDBs of 10 bytes and more have a GROUP NUMBER.
    fn has_group(self) -> bool {
        self.uses_medium() || matches!(self, Self::CompareAndWrite | Self::SynchronizeCache)
    }
}

/// A command that units support.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Command {
    pub(crate) op: Op,
    /// The CDB usage data (SPC-5, section 6.34.3): the opcode, the service action, and the bits
    /// that are evaluated.
    pub(crate) usage: &'static [u8],
    /// True if the second byte has a service action.
    pub(crate) has_service_action: bool,
    /// Bits that must be zero, of the CDB as a big-endian number.
    zero: u128,
}

impl Command {
    /// The CDB usage data, which depends on the unit's support for unmapping. `None` if the unit
    /// lacks the command.
    pub(crate) fn usage_of(&self, can_unmap: bool) -> Option<Vec<u8>> {
        let mut usage = self.usage.to_vec();
        match self.op {
            Op::Unmap if !can_unmap => return None,
            Op::WriteSame if !can_unmap => usage[1] &= !UNMAP,
            _ => {}
        }
        Some(usage)
    }

    /// The bits of a byte at which fields begin, for [`field_start`]. Only bits that must be zero
    /// count. Adjacent ones are one field, except for fields of the standards that are not
    /// supported; several reserved bytes are a field each.
    fn begins(&self, at: usize) -> u8 {
        let zero = self.zero.to_be_bytes()[at];
        let bytes = self.usage.len();
        let apart = match (self.op, at) {
            // CONTROL: two bits of the vendor, three reserved ones, NACA, and two obsolete ones.
            _ if at == bytes - 1 => 0b0010_0111,
            // An obsolete address, from byte 2 on.
            (Op::ReadCapacity10, 3..=5) | (Op::ReadCapacity16, 3..=9) => return 0,
            // PMI.
            (Op::ReadCapacity10, 8) | (Op::ReadCapacity16, 14) => 0x01,
            // RELADR, and ANCHOR.
            (Op::ReadCapacity10 | Op::Unmap, 1) => 0x01,
            // CMDDT.
            (Op::Inquiry, 1) => 0x02,
            // RTD and SP.
            (Op::ModeSelect, 1) => 0x03,
            // PPC and SP.
            (Op::LogSense, 1) => 0x03,
            // POWER CONDITION MODIFIER, and the bits after POWER CONDITION.
            (Op::StartStopUnit, 3 | 4) => 0x08,
            // SYNC_NV.
            (Op::SynchronizeCache, 1) => 0x04,
            // ANCHOR, PBDATA and LBDATA.
            (Op::WriteSame, 1) => 0x17,
            (op, 1) if op.has_group() => 0x07,
            // GROUP NUMBER.
            (op, at) if op.has_group() && bytes == 10 && at == 6 => 0x20,
            (op, at) if op.has_group() && bytes > 10 && at == bytes - 2 => {
                // The two bits before are separate fields if the command moves blocks.
                let moves = matches!(op, Op::Read | Op::Write | Op::WriteAndVerify | Op::Verify);
                if moves { 0x60 } else { 0x20 }
            }
            _ => 0,
        };
        (zero & !(zero >> 1)) | (zero & apart) | !zero
    }
}

/// UNMAP, in the second byte of WRITE SAME.
pub(crate) const UNMAP: u8 = 0x08;

/// Bits of a field that takes any value.
const F: u8 = 0xff;
/// SERVICE ACTION, in the second byte.
const SERVICE_ACTION: u8 = 0x1f;

const fn command(op: Op, usage: &'static [u8], has_service_action: bool) -> Command {
    assert!(usage.len() <= KEPT_BYTES);
    let mut used = [0; KEPT_BYTES];
    let mut at = 0;
    while at < KEPT_BYTES {
        // Bytes after the CDB do not belong to it.
        used[at] = if at == 0 || at >= usage.len() { F } else { usage[at] };
        at += 1;
    }
    if has_service_action {
        used[1] = SERVICE_ACTION;
    }
    Command { op, usage, has_service_action, zero: !u128::from_be_bytes(used) }
}

const fn plain(op: Op, usage: &'static [u8]) -> Command {
    command(op, usage, false)
}

const fn with_action(op: Op, usage: &'static [u8]) -> Command {
    command(op, usage, true)
}

/// DPO and FUA.
const CACHE: u8 = 0x18;
/// DPO and BYTCHK.
const CHECK: u8 = 0x16;

/// By opcode and service action, ascending. Bits that are zero here must be zero: protection
/// information, groups, and NACA are not supported.
pub(crate) static COMMANDS: &[Command] = &[
    plain(Op::TestUnitReady, &[0x00, 0, 0, 0, 0, 0]),
    plain(Op::RequestSense, &[0x03, 1, 0, 0, F, 0]),
    plain(Op::Read, &[0x08, 0x1f, F, F, F, 0]),
    plain(Op::Write, &[0x0a, 0x1f, F, F, F, 0]),
    plain(Op::Inquiry, &[0x12, 1, F, F, F, 0]),
    plain(Op::ModeSelect, &[0x15, 0x10, 0, 0, F, 0]),
    plain(Op::ModeSense, &[0x1a, 0x08, F, F, F, 0]),
    plain(Op::StartStopUnit, &[0x1b, 1, 0, 0, 7, 0]),
    plain(Op::PreventAllow, &[0x1e, 0, 0, 0, 3, 0]),
    plain(Op::ReadCapacity10, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    plain(Op::Read, &[0x28, CACHE, F, F, F, F, 0, F, F, 0]),
    plain(Op::Write, &[0x2a, CACHE, F, F, F, F, 0, F, F, 0]),
    plain(Op::WriteAndVerify, &[0x2e, CHECK, F, F, F, F, 0, F, F, 0]),
    plain(Op::Verify, &[0x2f, CHECK, F, F, F, F, 0, F, F, 0]),
    plain(Op::SynchronizeCache, &[0x35, 2, F, F, F, F, 0, F, F, 0]),
    plain(Op::WriteSame, &[0x41, 0x08, F, F, F, F, 0, F, F, 0]),
    plain(Op::Unmap, &[0x42, 0, 0, 0, 0, 0, 0, F, F, 0]),
    plain(Op::LogSense, &[0x4d, 0, F, F, 0, F, F, F, F, 0]),
    plain(Op::ModeSelect, &[0x55, 0x10, 0, 0, 0, 0, 0, F, F, 0]),
    plain(Op::ModeSense, &[0x5a, 0x18, F, F, 0, 0, 0, F, F, 0]),
    with_action(Op::ReserveIn, &[0x5e, 0, 0, 0, 0, 0, 0, F, F, 0]),
    with_action(Op::ReserveIn, &[0x5e, 1, 0, 0, 0, 0, 0, F, F, 0]),
    with_action(Op::ReserveIn, &[0x5e, 2, 0, 0, 0, 0, 0, F, F, 0]),
    with_action(Op::ReserveIn, &[0x5e, 3, 0, 0, 0, 0, 0, F, F, 0]),
    with_action(Op::ReserveOut, &[0x5f, 0, F, 0, 0, F, F, F, F, 0]),
    with_action(Op::ReserveOut, &[0x5f, 1, F, 0, 0, F, F, F, F, 0]),
    with_action(Op::ReserveOut, &[0x5f, 2, F, 0, 0, F, F, F, F, 0]),
    with_action(Op::ReserveOut, &[0x5f, 3, F, 0, 0, F, F, F, F, 0]),
    with_action(Op::ReserveOut, &[0x5f, 4, F, 0, 0, F, F, F, F, 0]),
    with_action(Op::ReserveOut, &[0x5f, 5, F, 0, 0, F, F, F, F, 0]),
    with_action(Op::ReserveOut, &[0x5f, 6, F, 0, 0, F, F, F, F, 0]),
    with_action(Op::ReserveOut, &[0x5f, 7, F, 0, 0, F, F, F, F, 0]),
    plain(Op::Read, &[0x88, CACHE, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(Op::CompareAndWrite, &[0x89, CACHE, F, F, F, F, F, F, F, F, 0, 0, 0, F, 0, 0]),
    plain(Op::Write, &[0x8a, CACHE, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(Op::WriteAndVerify, &[0x8e, CHECK, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(Op::Verify, &[0x8f, CHECK, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(Op::SynchronizeCache, &[0x91, 2, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(Op::WriteSame, &[0x93, 0x09, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    with_action(Op::ReadCapacity16, &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0]),
    with_action(Op::GetLbaStatus, &[0x9e, 0x12, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(Op::ReportLuns, &[0xa0, 0, F, 0, 0, 0, F, F, F, F, 0, 0]),
    with_action(Op::ReportOpcodes, &[0xa3, 0x0c, 0x87, F, F, F, F, F, F, F, 0, 0]),
    with_action(Op::ReportTaskManagement, &[0xa3, 0x0d, 0x80, 0, 0, 0, F, F, F, F, 0, 0]),
    plain(Op::Read, &[0xa8, CACHE, F, F, F, F, F, F, F, F, 0, 0]),
    plain(Op::Write, &[0xaa, CACHE, F, F, F, F, F, F, F, F, 0, 0]),
    plain(Op::WriteAndVerify, &[0xae, CHECK, F, F, F, F, F, F, F, F, 0, 0]),
    plain(Op::Verify, &[0xaf, CHECK, F, F, F, F, F, F, F, F, 0, 0]),
];

/// By opcode: the index of its first command, or `NOWHERE`.
static FIRST: [u8; 256] = {
    let mut first = [NOWHERE; 256];
    let mut at = COMMANDS.len();
    assert!(at < NOWHERE as usize);
    while at > 0 {
        at -= 1;
        first[COMMANDS[at].usage[0] as usize] = at.to_le_bytes()[0];
    }
    first
};
const NOWHERE: u8 = 255;

/// The front of a CDB, padded with zeroes, as a big-endian number. Its fields are read from
/// registers, at any offset.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cdb(u128);

impl Cdb {
    /// Creates a CDB from its two halves, in the byte order of memory.
    #[inline]
    pub(crate) fn from_words([first, second]: [u64; 2]) -> Self {
        let number = |half: u64| u128::from(u64::from_be_bytes(half.to_le_bytes()));
        Self(number(first) << 64 | number(second))
    }

    /// Limits the CDB to the number of bytes that arrive. If its command is longer, the result is
    /// an unknown command.
    pub(crate) fn cut_to(self, bytes: usize) -> Self {
        let whole = match self.opcode() >> 5 {
            0 => 6,
            1 | 2 => 10,
            4 => 16,
            _ => 12,
        };
        if bytes < whole { Self(u128::MAX) } else { self }
    }

    #[inline]
    pub(crate) fn opcode(&self) -> u8 {
        self.byte(0)
    }

    /// True if a read or write must access the medium itself: FUA. CDBs of 6 bytes have address
    /// bits in its place.
    #[inline]
    pub(crate) fn asks_fua(&self) -> bool {
        const FUA: u8 = 0x08;
        !matches!(self.opcode(), 0x08 | 0x0a) && self.byte(1) & FUA != 0
    }

    #[inline]
    pub(crate) fn byte(&self, at: usize) -> u8 {
        u8::from_be_bytes(self.array(at))
    }

    #[inline]
    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.array(at))
    }

    #[inline]
    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.array(at))
    }

    #[inline]
    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.array(at))
    }

    #[inline]
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        // Shifts out all bytes before the field.
        let from_field = self.0 << (8 * at);
        *from_field.to_be_bytes().first_chunk().expect("a field of a CDB")
    }

    /// The command of this CDB, without a [check](Self::check) of its fields.
    ///
    /// # Errors
    ///
    /// If the opcode or the service action is not supported.
    #[inline]
    pub(crate) fn command(&self) -> Result<&'static Command, Sense> {
        let first = usize::from(FIRST[usize::from(self.opcode())]);
        let Some(mut found) = COMMANDS.get(first) else { return Err(Sense::UNKNOWN_OPCODE) };
        if found.has_service_action {
            found = find(self.opcode(), Some(self.byte(1) & SERVICE_ACTION))
                .ok_or(Sense::in_cdb(1, Some(4)))?;
        }
        Ok(found)
    }

    /// Checks the bits that must be zero.
    ///
    /// # Errors
    ///
    /// If one is set.
    #[inline]
    pub(crate) fn check(&self, command: &Command) -> Result<(), Sense> {
        let excess = self.0 & command.zero;
        if excess == 0 { Ok(()) } else { Err(in_excess(command, excess)) }
    }

    /// The first block of a command on the medium, and the number of blocks.
    #[inline(always)]
    pub(crate) fn blocks(&self) -> (u64, u32) {
        match self.opcode() >> 5 {
            0 => {
                let count = self.byte(4);
                let lba = self.u32(0) & 0x001f_ffff;
                (lba.into(), if count == 0 { 256 } else { count.into() })
            }
            1 | 2 => (self.u32(2).into(), self.u16(7).into()),
            4 => (self.u64(2), self.u32(10)),
            _ => (self.u32(2).into(), self.u32(6)),
        }
    }

    /// The offset of the number of blocks.
    pub(crate) fn blocks_at(&self) -> u16 {
        match self.opcode() >> 5 {
            0 => 4,
            1 | 2 => 7,
            4 => 10,
            _ => 6,
        }
    }
}

/// Finds the command with this opcode, and with this service action unless it is `None`.
pub(crate) fn find(opcode: u8, service_action: Option<u8>) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| {
        command.usage[0] == opcode
            && service_action.is_none_or(|action| command.usage[1] & SERVICE_ACTION == action)
    })
}

/// Returns a pointer to the field of the first set bit that must be zero.
#[cold]
fn in_excess(command: &Command, excess: u128) -> Sense {
    let place = excess.leading_zeros();
    let byte = iomem::fits(place / 8, "a byte of a CDB");
    let bit = iomem::fits(7 - place % 8, "a bit");
    let (byte, bit) = field_start(|at| command.begins(at), byte, bit);
    Sense::in_cdb(byte, bit)
}

/// All bits of a byte are one field, or the first byte of a longer one.
pub(super) const WHOLE_BYTE: u8 = 0x80;

/// Returns the first byte of the field that contains a bit, and its highest bit unless that byte is
/// [`WHOLE_BYTE`]: the field pointer of sense data (SPC-5, section 4.5.2.4.2). `starts` returns the
/// bits of a byte that are the highest of a field, and zero if the field of the previous byte
/// continues.
pub(super) fn field_start(starts: impl Fn(usize) -> u8, byte: usize, bit: u8) -> (u16, Option<u8>) {
    let mut at = byte;
    let mut above = starts(at) & (u8::MAX << bit);
    while above == 0 && at > 0 {
        at -= 1;
        above = starts(at);
    }
    let bit = u8::try_from(above.trailing_zeros()).expect("a number of bits");
    let bit = (starts(at) != WHOLE_BYTE).then_some(bit);
    (iomem::fits(at, "a place in a CDB or in a list"), bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cdb(bytes: &[u8]) -> Cdb {
        let mut cdb = [0; KEPT_BYTES];
        cdb[..bytes.len()].copy_from_slice(bytes);
        Cdb(u128::from_be_bytes(cdb))
    }

    #[test]
    fn commands_are_ascending_and_as_long_as_their_opcode_says() {
        let key = |command: &Command| (command.usage[0], command.usage[1] & SERVICE_ACTION);
        for pair in COMMANDS.windows(2) {
            let [one, two] = pair else { unreachable!() };
            assert!(one.usage[0] < two.usage[0] || key(one) < key(two), "{one:?} {two:?}");
        }
        for command in COMMANDS {
            let expected = match command.usage[0] >> 5 {
                0 => 6,
                1 | 2 => 10,
                4 => 16,
                _ => 12,
            };
            assert_eq!(command.usage.len(), expected, "{command:?}");
        }
    }

    /// The field pointer for a CDB with this bit flipped; `None` if the bit belongs to a field.
    fn refused(good: &[u8; KEPT_BYTES], at: usize, bit: u8) -> Option<(u16, Option<u8>)> {
        let mut bytes = *good;
        bytes[at] ^= 1 << bit;
        let command = cdb(good).command().unwrap();
        let sense = cdb(&bytes).check(command).err()?;
        let places =
            (0..16).flat_map(|byte| (0..8).map(Some).chain([None]).map(move |bit| (byte, bit)));
        places.into_iter().find(|(byte, bit)| Sense::in_cdb(*byte, *bit) == sense)
    }

    #[test]
    fn each_bit_that_is_no_field_is_refused_at_its_field_or_before() {
        for command in COMMANDS {
            let mut good = [0; KEPT_BYTES];
            good[0] = command.usage[0];
            if command.has_service_action {
                good[1] = command.usage[1] & SERVICE_ACTION;
            }
            assert_eq!(cdb(&good).command().unwrap(), command);
            for at in 1..command.usage.len() {
                for bit in 0..8 {
                    let used = match (command.has_service_action, at) {
                        (true, 1) => SERVICE_ACTION,
                        _ => command.usage[at],
                    };
                    let is_action = command.has_service_action && at == 1 && bit < 5;
                    if is_action {
                        continue;
                    }
                    let place = refused(&good, at, bit);
                    assert_eq!(place.is_none(), used & (1 << bit) != 0, "{command:?} {at} {bit}");
                    if let Some((byte, top)) = place {
                        let is_there = usize::from(byte) == at && top.is_none_or(|top| top >= bit);
                        let is_address = at <= 9 && byte == 2 && top.is_none();
                        assert!(is_there || is_address, "{command:?} {at} {bit}");
                    }
                }
            }
        }
        assert_eq!(cdb(&[0x02]).command(), Err(Sense::UNKNOWN_OPCODE));
        assert_eq!(cdb(&[0xff]).command(), Err(Sense::UNKNOWN_OPCODE));
        assert_eq!(cdb(&[0x9e, 0x11]).command(), Err(Sense::in_cdb(1, Some(4))));
    }

    #[test]
    fn pointers_are_to_the_begin_of_a_field() {
        for (front, bit, expected) in [
            // Protection information.
            (&[0x28, 0][..], (1, 5), (1, Some(7))),
            (&[0x28], (1, 6), (1, Some(7))),
            (&[0x8a], (1, 5), (1, Some(7))),
            (&[0x08], (1, 5), (1, Some(7))),
            // Bits of the second byte.
            (&[0x28], (1, 2), (1, Some(2))),
            (&[0x28], (1, 0), (1, Some(0))),
            (&[0x2f], (1, 3), (1, Some(3))),
            (&[0x2f], (1, 0), (1, Some(0))),
            (&[0x41], (1, 4), (1, Some(4))),
            (&[0x93], (1, 1), (1, Some(1))),
            (&[0x12], (1, 1), (1, Some(1))),
            (&[0x12], (1, 3), (1, Some(7))),
            (&[0x15], (1, 0), (1, Some(0))),
            (&[0x15], (1, 2), (1, Some(3))),
            (&[0x1a], (1, 0), (1, Some(2))),
            (&[0x35], (1, 2), (1, Some(2))),
            (&[0x35], (1, 3), (1, Some(7))),
            (&[0x42], (1, 0), (1, Some(0))),
            (&[0x42], (1, 4), (1, Some(7))),
            (&[0x4d], (1, 0), (1, Some(0))),
            (&[0x5e], (1, 5), (1, Some(7))),
            (&[0x03], (1, 4), (1, Some(7))),
            // Groups, and fields beside them.
            (&[0x28], (6, 0), (6, Some(5))),
            (&[0x28], (6, 6), (6, Some(7))),
            (&[0xa8], (10, 4), (10, Some(5))),
            (&[0x88], (14, 0), (14, Some(5))),
            (&[0x88], (14, 6), (14, Some(6))),
            (&[0x42], (6, 1), (6, Some(5))),
            (&[0x91], (14, 0), (14, Some(5))),
            (&[0x89], (14, 3), (14, Some(5))),
            // Obsolete addresses.
            (&[0x25], (5, 0), (2, None)),
            (&[0x25], (2, 7), (2, None)),
            (&[0x25], (8, 0), (8, Some(0))),
            (&[0x9e, 0x10], (9, 0), (2, None)),
            (&[0x9e, 0x10], (14, 0), (14, Some(0))),
            (&[0x1b], (3, 0), (3, Some(3))),
            (&[0x1b], (4, 5), (4, Some(7))),
            (&[0x1b], (4, 3), (4, Some(3))),
            (&[0xa3, 0x0c], (2, 3), (2, Some(6))),
            // Reserved bytes.
            (&[0x00], (1, 3), (1, None)),
            (&[0x00], (4, 0), (4, None)),
            (&[0x42], (5, 1), (5, None)),
            (&[0x89], (12, 6), (12, None)),
            (&[0xa0], (10, 6), (10, None)),
            (&[0x9e, 0x12], (14, 6), (14, None)),
            // CONTROL.
            (&[0x00], (5, 2), (5, Some(2))),
            (&[0x28], (9, 0), (9, Some(0))),
            (&[0x88], (15, 6), (15, Some(7))),
            (&[0x88], (15, 3), (15, Some(5))),
        ] {
            let mut good = [0; KEPT_BYTES];
            good[..front.len()].copy_from_slice(front);
            assert_eq!(refused(&good, bit.0, bit.1), Some(expected), "{front:x?}, {bit:?}");
        }
    }

    #[test]
    fn a_command_of_which_bytes_are_missing_is_none() {
        for command in COMMANDS {
            let mut whole = [0; KEPT_BYTES];
            whole[..2].copy_from_slice(&command.usage[..2]);
            let bytes = command.usage.len();
            assert_eq!(cdb(&whole).cut_to(bytes).command(), Ok(command));
            assert_eq!(cdb(&whole).cut_to(bytes - 1).command(), Err(Sense::UNKNOWN_OPCODE));
        }
    }

    #[test]
    fn blocks_are_where_each_length_has_them() {
        for (bytes, expected) in [
            (&[0x08, 0x1f, 0xff, 0xfe, 3][..], (0x1f_fffe, 3)),
            (&[0x0a, 0, 0, 7, 0], (7, 256)),
            (&[0x28, 0, 1, 2, 3, 4, 0, 5, 6], (0x0102_0304, 0x0506)),
            (&[0x41, 8, 1, 2, 3, 4, 0, 0, 0], (0x0102_0304, 0)),
            (&[0xa8, 0, 1, 2, 3, 4, 5, 6, 7, 8], (0x0102_0304, 0x0506_0708)),
            (
                &[0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
                (0x0102_0304_0506_0708, 0x090a_0b0c),
            ),
        ] {
            assert_eq!(cdb(bytes).blocks(), expected);
        }
    }

    #[test]
    fn a_field_begins_at_its_first_byte_and_its_highest_bit() {
        let fields = [WHOLE_BYTE, 0b1001_0010, WHOLE_BYTE, 0, 0, WHOLE_BYTE];
        for ((byte, bit), expected) in [
            ((0, 3), (0, None)),
            ((1, 7), (1, Some(7))),
            ((1, 5), (1, Some(7))),
            ((1, 4), (1, Some(4))),
            ((1, 2), (1, Some(4))),
            ((1, 0), (1, Some(1))),
            ((2, 7), (2, None)),
            ((4, 0), (2, None)),
            ((5, 0), (5, None)),
        ] {
            assert_eq!(field_start(|at| fields[at], byte, bit), expected, "{byte}, {bit}");
        }
    }
}
