//! How large a disk could be, asked without its help: a file or device by its name.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use super::sysfs;

/// What sees from outside how large a disk could be, while it is in use: this neither keeps its
/// file open nor depends on the disk.
pub struct Outside(Look);

enum Look {
    Device(u64),
    File { path: PathBuf, device: u64, inode: u64 },
    Other(Box<dyn Fn() -> io::Result<Option<u64>> + Send + Sync>),
}

impl Outside {
    pub(super) fn new(path: &Path, metadata: &Metadata, is_block_device: bool) -> Self {
        Self(match is_block_device {
            true => Look::Device(metadata.rdev()),
            false => {
                let (device, inode) = (metadata.dev(), metadata.ino());
                Look::File { path: path.to_owned(), device, inode }
            }
        })
    }

    /// That of a disk of another kind. A kind that learns of a new size from its other
    /// end keeps that where this look finds it.
    pub(super) fn other(
        look: impl Fn() -> io::Result<Option<u64>> + Send + Sync + 'static,
    ) -> Self {
        Self(Look::Other(Box::new(look)))
    }

    /// Its size in bytes. `None`: it is not known, for example because nobody finds the file under
    /// its name any more. This may wait for as long as a file system does.
    ///
    /// # Errors
    ///
    /// When the kernel does not say.
    pub fn size_bytes(&self) -> io::Result<Option<u64>> {
        match &self.0 {
            Look::Device(number) => Ok(sysfs::size_bytes(*number)),
            Look::File { path, device, inode } => match std::fs::metadata(path) {
                Ok(data) if (data.dev(), data.ino()) == (*device, *inode) => Ok(Some(data.len())),
                Ok(_) => Ok(None),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            },
            Look::Other(look) => look(),
        }
    }
}

impl fmt::Debug for Outside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Look::Device(number) => write!(f, "Outside(device {number})"),
            Look::File { path, .. } => write!(f, "Outside({})", path.display()),
            Look::Other(_) => f.write_str("Outside(other)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::disk::{DiskOptions, DiskSource};

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_is_known_by_its_name_for_as_long_as_it_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["disk", "other"].map(|name| folder.path().join(name));
        std::fs::write(&path, [0; 512]).unwrap();
        let source = DiskSource::file(&path, &DiskOptions::default()).unwrap();
        let outside = source.outside().unwrap();
        assert_eq!(outside.size_bytes().unwrap(), Some(512));
        std::fs::write(&path, [0; 1024]).unwrap();
        assert_eq!(outside.size_bytes().unwrap(), Some(1024));
        assert_eq!(source.info().size_bytes, 512, "it was only looked at");
        std::fs::rename(&path, &other).unwrap();
        assert_eq!(outside.size_bytes().unwrap(), None);
        std::fs::write(&path, [0; 2048]).unwrap();
        assert_eq!(outside.size_bytes().unwrap(), None, "it is another file");
        let null = DiskSource::null(512, &DiskOptions::default()).unwrap();
        assert!(null.outside().is_none());
    }
}
