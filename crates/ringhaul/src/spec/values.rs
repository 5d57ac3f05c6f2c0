//! Settings that have few values, or a form of their own, and names that are derived from the
//! identity of a disk without revealing it.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, bail};
use clap::ValueEnum;
use device::blk::config::SERIAL_BYTES;
use iomem::fits;
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

impl fmt::Display for CacheMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl CacheMode {
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

/// The address of a metrics server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address and a port.
    Tcp(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        text.parse().map(Self::Tcp).map_err(|_| {
            format!("'{text}' is not of the form ADDRESS:PORT or unix:PATH, such as 127.0.0.1:9750")
        })
    }
}

impl<'de> Deserialize<'de> for MetricsAddress {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Checks a text that the guest sees, such as a serial number.
pub(crate) fn check_text(text: &str, bytes: usize) -> Result<()> {
    if text.len() > bytes || !text.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        bail!("it must be at most {bytes} bytes of printable ASCII");
    }
    Ok(())
}

/// Digits of base 32.
const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHIJKLMNOPQRSTUV";

/// Derives a serial number from the identity of a disk, without revealing it.
pub(crate) fn default_serial(identity: &str) -> String {
    if identity.is_empty() {
        return "null".to_owned();
    }
    // 100 bits as base-32 digits.
    let hash = hash(identity);
    let digit = |place: usize| {
        let value: usize = fits(hash >> (128 - 5 * (place + 1)) & 31, "five bits");
        char::from(DIGITS[value])
    };
    (0..SERIAL_BYTES).map(digit).collect()
}

/// Derives an NAA identifier from the identity of a disk: locally assigned, 60 bits (SPC-5, section
/// 7.7.6.6.4).
pub(crate) fn default_naa(identity: &str) -> [u8; 8] {
    let bits: u64 = fits(hash(identity) >> 68, "60 bits");
    (3 << 60 | bits).to_be_bytes()
}

/// Computes the 128-bit FNV-1a hash.
pub(crate) fn hash(identity: &str) -> u128 {
    identity.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serials_are_full_printable_and_apart() {
        let of = |inode: u32| default_serial(&format!("file system [1, 2], inode {inode}"));
        let serials: std::collections::BTreeSet<_> = (0..10_000).map(of).collect();
        assert_eq!(serials.len(), 10_000);
        for serial in serials {
            assert_eq!(serial.len(), SERIAL_BYTES);
            assert!(serial.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{serial}");
        }
        // Guests must see the same serial number in every version.
        assert_eq!(of(7), "55IN9JE2M4HQD2IQ9FGO");
        assert_eq!(default_serial(""), "null");
        assert_eq!(default_naa("file system [1, 2], inode 7")[0] >> 4, 3);
        assert_ne!(default_naa("a"), default_naa("b"));
    }

    #[test]
    fn an_address_is_a_port_or_a_path() {
        assert_eq!("unix:/a".parse(), Ok(MetricsAddress::Unix("/a".into())));
        let tcp = "127.0.0.1:9750".parse().unwrap();
        assert_eq!("127.0.0.1:9750".parse(), Ok(MetricsAddress::Tcp(tcp)));
        for bad in ["", "unix:", "9750", "localhost:9750", "127.0.0.1", "/a"] {
            assert!(bad.parse::<MetricsAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn each_cache_mode_has_its_name_its_file_and_its_flushes() {
        for (mode, name, is_direct, has_write_cache) in [
            (CacheMode::None, "none", true, true),
            (CacheMode::Directsync, "directsync", true, false),
            (CacheMode::Writeback, "writeback", false, true),
            (CacheMode::Writethrough, "writethrough", false, false),
        ] {
            assert_eq!(mode.to_string(), name);
            assert_eq!((mode.is_direct(), mode.has_write_cache()), (is_direct, has_write_cache));
        }
    }

    #[test]
    fn texts_for_the_guest_have_bounds() {
        for (text, is_good) in
            [("abc ~", true), ("abcdef", false), ("\x7f", false), ("\x1f", false)]
        {
            assert_eq!(check_text(text, 5).is_ok(), is_good, "{text:?}");
        }
        for (text, is_good) in [
            ("2000000000000001", true),
            ("0x5000000000000001", true),
            ("6000000000000001", false),
            ("200000000000001", false),
        ] {
            assert_eq!(Wwn::try_from(text.to_owned()).is_ok(), is_good, "{text}");
        }
    }
}
