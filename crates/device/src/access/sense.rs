//! Sense data: reasons for commands that were not carried out (SPC-5, section 4.5).

use std::io;

/// A sense key (SPC-5, table 28).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Key {
    NoSense = 0x0,
    NotReady = 0x2,
    MediumError = 0x3,
    HardwareError = 0x4,
    IllegalRequest = 0x5,
    UnitAttention = 0x6,
    DataProtect = 0x7,
    AbortedCommand = 0xb,
    Miscompare = 0xe,
}

/// The place of a wrong field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field {
    /// True for the CDB, false for the parameter list.
    in_cdb: bool,
    byte: u16,
    /// The most significant bit of the field, if it is no whole byte.
    bit: Option<u8>,
}

/// The reason for a command that was not, or not entirely, carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sense {
    pub(crate) key: Key,
    /// Additional sense code and its qualifier.
    pub(crate) code: [u8; 2],
    /// The LBA, or the offset in the data, that the reason concerns.
    information: Option<u64>,
    field: Option<Field>,
}

/// The format of sense data (SPC-5, section 4.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Fixed,
    /// With room for LBAs of eight bytes.
    Descriptor,
}

/// A request to a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DiskUse {
    action: &'static str,
    lba: Option<u64>,
    writes: bool,
}

impl DiskUse {
    pub(crate) const FLUSH: Self = Self { action: "flush", lba: None, writes: true };

    /// A read of the block at `lba`.
    pub(crate) fn reads(action: &'static str, lba: u64) -> Self {
        Self { action, lba: Some(lba), writes: false }
    }

    /// A change of the block at `lba`.
    pub(crate) fn writes(action: &'static str, lba: u64) -> Self {
        Self { action, lba: Some(lba), writes: true }
    }
}

impl std::fmt::Display for DiskUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.lba {
            Some(lba) => write!(f, "{} at block {lba}", self.action),
            None => f.write_str(self.action),
        }
    }
}

/// Bytes of sense data in fixed format.
const FIXED_BYTES: usize = 18;
/// Bytes of sense data in descriptor format at most.
const DESCRIPTORS_BYTES: usize = 8 + 12 + 8;

impl Sense {
    const fn new(key: Key, code: [u8; 2]) -> Self {
        Self { key, code, information: None, field: None }
    }

    pub(crate) const NONE: Self = Self::new(Key::NoSense, [0x00, 0x00]);
    pub(crate) const UNKNOWN_OPCODE: Self = Self::new(Key::IllegalRequest, [0x20, 0x00]);
    pub(crate) const LBA_OUT_OF_RANGE: Self = Self::new(Key::IllegalRequest, [0x21, 0x00]);
    pub(crate) const NO_SUCH_UNIT: Self = Self::new(Key::IllegalRequest, [0x25, 0x00]);
    pub(crate) const LIST_LENGTH: Self = Self::new(Key::IllegalRequest, [0x1a, 0x00]);
    pub(crate) const SAVING: Self = Self::new(Key::IllegalRequest, [0x39, 0x00]);
    pub(crate) const STOPPED: Self = Self::new(Key::NotReady, [0x04, 0x02]);
    pub(crate) const WRITE_PROTECTED: Self = Self::new(Key::DataProtect, [0x27, 0x00]);
    pub(crate) const NO_SPACE: Self = Self::new(Key::DataProtect, [0x27, 0x07]);
    pub(crate) const MISCOMPARE: Self = Self::new(Key::Miscompare, [0x1d, 0x00]);
    /// I/O PROCESS TERMINATED: the command may have been carried out, or not.
    pub(crate) const PERHAPS_DONE: Self = Self::new(Key::AbortedCommand, [0x00, 0x06]);
    pub(crate) const POWER_ON: Self = Self::new(Key::UnitAttention, [0x29, 0x00]);
    pub(crate) const UNIT_WAS_RESET: Self = Self::new(Key::UnitAttention, [0x29, 0x03]);
    pub(crate) const NEXUS_LOST: Self = Self::new(Key::UnitAttention, [0x29, 0x07]);
    pub(crate) const MODE_CHANGED: Self = Self::new(Key::UnitAttention, [0x2a, 0x01]);
    pub(crate) const RESERVATIONS_PREEMPTED: Self = Self::new(Key::UnitAttention, [0x2a, 0x03]);
    pub(crate) const RESERVATIONS_RELEASED: Self = Self::new(Key::UnitAttention, [0x2a, 0x04]);
    pub(crate) const REGISTRATIONS_PREEMPTED: Self = Self::new(Key::UnitAttention, [0x2a, 0x05]);
    /// INVALID RELEASE OF PERSISTENT RESERVATION.
    pub(crate) const INVALID_RELEASE: Self = Self::new(Key::IllegalRequest, [0x26, 0x04]);
    /// INSUFFICIENT REGISTRATION RESOURCES.
    pub(crate) const TOO_MANY_REGISTRATIONS: Self = Self::new(Key::IllegalRequest, [0x55, 0x04]);
    const TARGET_FAILURE: Self = Self::new(Key::HardwareError, [0x44, 0x00]);
    /// Persistent reservations could not be saved.
    pub(crate) const NOT_SAVED: Self = Self::TARGET_FAILURE;
    pub(crate) const CAPACITY_CHANGED: Self = Self::new(Key::UnitAttention, [0x2a, 0x09]);
    /// COMMANDS CLEARED BY ANOTHER INITIATOR.
    pub(crate) const COMMANDS_CLEARED: Self = Self::new(Key::UnitAttention, [0x2f, 0x00]);
    pub(crate) const UNITS_CHANGED: Self = Self::new(Key::UnitAttention, [0x3f, 0x0e]);

    /// True for a miscompare, at any offset.
    pub(crate) fn is_miscompare(self) -> bool {
        matches!(self.key, Key::Miscompare)
    }

    /// A unit attention with this code.
    pub(crate) const fn attention(code: [u8; 2]) -> Self {
        Self::new(Key::UnitAttention, code)
    }

    /// An unsupported value of a CDB field; `bit` is its highest bit, if it is no whole byte.
    pub(crate) const fn in_cdb(byte: u16, bit: Option<u8>) -> Self {
        let field = Some(Field { in_cdb: true, byte, bit });
        Self { field, ..Self::new(Key::IllegalRequest, [0x24, 0x00]) }
    }

    /// An unsupported value of a field in the parameter list, with `bit` as in
    /// [`in_cdb`](Self::in_cdb).
    pub(crate) const fn in_list(byte: u16, bit: Option<u8>) -> Self {
        let field = Some(Field { in_cdb: false, byte, bit });
        Self { field, ..Self::new(Key::IllegalRequest, [0x26, 0x00]) }
    }

    /// True for unit attentions about a power-on or reset of the unit.
    pub(crate) fn is_reset(&self) -> bool {
        self.key == Key::UnitAttention && self.code[0] == 0x29 && !self.is_nexus_loss()
    }

    /// True for the unit attention about a lost nexus, which leaves the unit as it was.
    pub(crate) fn is_nexus_loss(&self) -> bool {
        self.key == Key::UnitAttention && self.code == Self::NEXUS_LOST.code
    }

    /// Adds the LBA, or for a miscompare the offset of the first byte that differs.
    pub(crate) const fn with_information(self, information: u64) -> Self {
        Self { information: Some(information), ..self }
    }

    /// Translates a disk error for the initiator: the only place that chooses the sense data.
    pub(crate) fn from_disk_error(error: &io::Error, asked: DiskUse) -> Self {
        let medium = if asked.writes {
            Self::new(Key::MediumError, [0x0c, 0x00])
        } else {
            Self::new(Key::MediumError, [0x11, 0x00])
        };
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) if asked.writes => Self::NO_SPACE,
            Some(libc::EROFS | libc::EPERM | libc::EACCES) if asked.writes => Self::WRITE_PROTECTED,
            // The request was not carried out and may be retried, maybe on another path to the
            // disk.
            Some(
                libc::ENOMEM
                | libc::EAGAIN
                | libc::EINTR
                | libc::EBUSY
                | libc::ETIMEDOUT
                | libc::ENOLINK,
            ) => Self::new(Key::AbortedCommand, [0x00, 0x00]),
            Some(libc::ENODEV | libc::ENXIO | libc::ENOMEDIUM) => {
                Self::new(Key::NotReady, [0x3a, 0x00])
            }
            // The device reports its own failure, regardless of the medium.
            Some(libc::EREMOTEIO) => Self::TARGET_FAILURE,
            _ => Self { information: asked.lba, ..medium },
        }
    }

    /// True if a read error may concern only some of its blocks.
    pub(crate) fn may_be_single_block(error: &io::Error) -> bool {
        matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODATA | libc::EILSEQ))
    }

    /// The guest has truncated the file behind its memory.
    pub(crate) const MEMORY_GONE: Self = Self::TARGET_FAILURE;

    /// The sense data in this format.
    pub(crate) fn data(&self, format: Format) -> Vec<u8> {
        match format {
            Format::Fixed => self.fixed().to_vec(),
            Format::Descriptor => self.descriptors(),
        }
    }

    /// Fixed format (SPC-5, section 4.5.3). Information that exceeds its four bytes is omitted: the
    /// bit VALID is zero then.
    fn fixed(&self) -> [u8; FIXED_BYTES] {
        let mut data = [0; FIXED_BYTES];
        data[0] = 0x70;
        data[2] = self.key as u8;
        if let Some(information) = self.information
            && let Ok(information) = u32::try_from(information)
        {
            data[0] |= 0x80;
            data[3..7].copy_from_slice(&information.to_be_bytes());
        }
        data[7] = 10;
        data[12..14].copy_from_slice(&self.code);
        data[15..18].copy_from_slice(&self.specific());
        data
    }

    /// Descriptor format (SPC-5, section 4.5.2).
    fn descriptors(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(DESCRIPTORS_BYTES);
        data.extend([0x72, self.key as u8, self.code[0], self.code[1], 0, 0, 0, 0]);
        if let Some(information) = self.information {
            data.extend([0x00, 10, 0x80, 0]);
            data.extend(information.to_be_bytes());
        }
        if self.field.is_some() {
            let [s0, s1, s2] = self.specific();
            data.extend([0x02, 6, 0, 0, s0, s1, s2, 0]);
        }
        let added = data.len() - 8;
        data[7] = iomem::fits(added, "bytes of sense descriptors");
        data
    }

    /// The field pointer (SPC-5, section 4.5.2.4.2).
    fn specific(&self) -> [u8; 3] {
        let Some(Field { in_cdb, byte, bit }) = self.field else { return [0; 3] };
        let bits = bit.map_or(0, |bit| 0x08 | (bit & 7));
        let [high, low] = byte.to_be_bytes();
        [0x80 | (u8::from(in_cdb) << 6) | bits, high, low]
    }
}

impl std::fmt::Display for Sense {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [code, qualifier] = self.code;
        write!(f, "{:?}, {code:02x}h/{qualifier:02x}h", self.key)?;
        if let Some(Field { in_cdb, byte, .. }) = self.field {
            write!(f, ", byte {byte} of the {}", if in_cdb { "CDB" } else { "parameter list" })?;
        }
        if let Some(information) = self.information {
            write!(f, ", at {information}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Sense {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_format_has_the_field_and_the_address_where_drivers_look() {
        let data = Sense::in_cdb(2, Some(5)).fixed();
        assert_eq!(data[..3], [0x70, 0, 5]);
        assert_eq!(data[7], 10);
        assert_eq!(data[12..18], [0x24, 0, 0, 0xc0 | 8 | 5, 0, 2]);
        let data = Sense::in_list(0x102, None).fixed();
        assert_eq!(data[12..18], [0x26, 0, 0, 0x80, 1, 2]);
        let error = io::Error::from_raw_os_error(libc::EIO);
        let data = Sense::from_disk_error(&error, DiskUse::reads("read", 0x0102_0304)).fixed();
        assert_eq!(data[..7], [0xf0, 0, 3, 1, 2, 3, 4]);
        // An LBA that does not fit is omitted.
        let far = Sense::from_disk_error(&error, DiskUse::writes("write", 1 << 32));
        assert_eq!(far.fixed()[..7], [0x70, 0, 3, 0, 0, 0, 0]);
    }

    #[test]
    fn descriptor_format_has_room_for_any_address() {
        let error = io::Error::from_raw_os_error(libc::EIO);
        let data = Sense::from_disk_error(&error, DiskUse::writes("write", 1 << 32)).descriptors();
        assert_eq!(data[..8], [0x72, 3, 0x0c, 0, 0, 0, 0, 12]);
        assert_eq!(data[8..], [0, 10, 0x80, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
        let data = Sense::in_cdb(1, None).descriptors();
        assert_eq!(data[7..], [8, 2, 6, 0, 0, 0xc0, 0, 1, 0]);
        assert_eq!(Sense::NONE.descriptors(), [0x72, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn errors_of_the_disk_are_told_apart() {
        let sense =
            |errno, asked| Sense::from_disk_error(&io::Error::from_raw_os_error(errno), asked);
        let (reads, writes) = (DiskUse::reads("read", 7), DiskUse::writes("write", 7));
        let with = |key, code| Sense::new(key, code);
        let unread = Sense { information: Some(7), ..with(Key::MediumError, [0x11, 0]) };
        let unwritten = Sense { information: Some(7), ..with(Key::MediumError, [0x0c, 0]) };
        let try_again = [with(Key::AbortedCommand, [0, 0]); 2];
        let no_medium = [with(Key::NotReady, [0x3a, 0]); 2];
        for (errnos, expected) in [
            (&[libc::ENOSPC, libc::EDQUOT, libc::EFBIG][..], [unread, Sense::NO_SPACE]),
            (&[libc::EROFS, libc::EPERM, libc::EACCES], [unread, Sense::WRITE_PROTECTED]),
            (&[libc::ENOMEM, libc::EAGAIN, libc::EINTR, libc::EBUSY], try_again),
            (&[libc::ETIMEDOUT, libc::ENOLINK], try_again),
            (&[libc::ENODEV, libc::ENXIO, libc::ENOMEDIUM], no_medium),
            (&[libc::EREMOTEIO], [with(Key::HardwareError, [0x44, 0]); 2]),
            (&[libc::EIO, libc::ENODATA, libc::EILSEQ, libc::EINVAL], [unread, unwritten]),
        ] {
            for errno in errnos {
                assert_eq!([sense(*errno, reads), sense(*errno, writes)], expected, "{errno}");
            }
        }
        for (errno, expected) in [
            (libc::EIO, true),
            (libc::ENODATA, true),
            (libc::EILSEQ, true),
            (libc::ETIMEDOUT, false),
            (libc::ENOSPC, false),
            (libc::EREMOTEIO, false),
        ] {
            let error = io::Error::from_raw_os_error(errno);
            assert_eq!(Sense::may_be_single_block(&error), expected, "{errno}");
        }
        // The lost block is unknown.
        let flush = sense(libc::EIO, DiskUse::FLUSH);
        assert_eq!((flush.code, flush.information), ([0x0c, 0], None));
        assert_eq!(
            (reads.to_string(), DiskUse::FLUSH.to_string()),
            ("read at block 7".into(), "flush".into())
        );
    }
}
