//! Settings that have few values, or a form of their own.

use anyhow::{Result, bail};
use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The caches between the guest and the disk, in QEMU's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Direct I/O; the guest flushes the disk's own write cache.
    None,
    /// Direct I/O; every write is on stable storage when it is answered.
    Directsync,
    /// The page cache; the guest flushes it.
    Writeback,
    /// The page cache; every write is on stable storage when it is answered.
    Writethrough,
}

impl CacheMode {
    /// The name of the mode among the values of `--cache`.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Directsync => "directsync",
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
        }
    }

    pub(crate) fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    pub(crate) fn has_write_cache(self) -> bool {
        matches!(self, Self::None | Self::Writeback)
    }
}

/// An NAA identifier of 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct Wwn(pub [u8; 8]);

impl TryFrom<String> for Wwn {
    type Error = anyhow::Error;

    fn try_from(text: String) -> Result<Self> {
        let digits = text.strip_prefix("0x").unwrap_or(&text);
        let number = (digits.len() == 16).then(|| u64::from_str_radix(digits, 16).ok()).flatten();
        match number {
            // IEEE Extended, locally assigned, IEEE Registered (SPC-5, section 7.7.6.6).
            Some(number) if matches!(number >> 60, 2 | 3 | 5) => Ok(Self(number.to_be_bytes())),
            _ => {
                bail!("'{text}' is not a WWN: it needs 16 hexadecimal digits, the first 2, 3 or 5")
            }
        }
    }
}

impl From<Wwn> for String {
    fn from(wwn: Wwn) -> Self {
        format!("{:016x}", u64::from_be_bytes(wwn.0))
    }
}

/// Checks a text that the guest sees, such as a serial number.
pub(crate) fn check_text(text: &str, bytes: usize) -> Result<()> {
    if text.len() > bytes || !text.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        bail!("it must be at most {bytes} bytes of printable ASCII");
    }
    Ok(())
}
