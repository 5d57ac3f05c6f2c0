//! A passphrase, and its source.

use std::fmt;
use std::io::{self, Read};

use super::hash::Key;

/// The most bytes of a passphrase, as in `cryptsetup`.
const BYTES_MAX: usize = 8 << 20;
/// The size of the first buffer. Most passphrases are shorter.
const FIRST_BYTES: usize = 4096;

/// A passphrase. It is not shown, and wiped when it is dropped.
pub struct Passphrase(Key);

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase")
    }
}

impl Passphrase {
    /// Reads all of `source`, newlines included, like `cryptsetup --key-file` and QEMU's secrets.
    ///
    /// # Errors
    ///
    /// Errors of the source, and `InvalidData` if it is empty or has more than 8 MiB.
    pub fn read(mut source: impl Read) -> io::Result<Self> {
        let mut bytes = Key::new(vec![0; FIRST_BYTES]);
        let mut len = 0;
        loop {
            if len == bytes.len() {
                // The vector must not grow by itself: that would leave a copy behind.
                let mut larger = Key::new(vec![0; 2 * len]);
                larger[..len].copy_from_slice(&bytes);
                bytes = larger;
            }
            match source.read(&mut bytes[len..]) {
                Ok(0) => break,
                Ok(more) => len += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if len > BYTES_MAX {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it has more than 8 MiB"));
            }
        }
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is empty"));
        }
        bytes.truncate(len);
        Ok(Self(bytes))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_source_is_the_passphrase() {
        for len in [1, FIRST_BYTES, FIRST_BYTES + 1, 100_000] {
            let text: Vec<u8> = b"abc\n".iter().copied().cycle().take(len).collect();
            assert_eq!(Passphrase::read(&text[..]).unwrap().bytes(), text);
        }
        assert!(!format!("{:?}", Passphrase::read(&b"secret"[..]).unwrap()).contains("secret"));
        for bad in [0, BYTES_MAX + 1] {
            assert!(Passphrase::read(&vec![7; bad][..]).is_err());
        }
    }
}
