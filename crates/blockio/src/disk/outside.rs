//! How large a file or device is, asked by its name.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::sysfs;

/// What sees from outside how large a file or block device is, while a disk has it open: this
/// neither keeps it open nor depends on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outside {
    path: PathBuf,
    number: Number,
}

/// What tells it from all others.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Number {
    Device(u64),
    File { device: u64, inode: u64 },
}

impl Outside {
    pub(super) fn new(path: &Path, metadata: &Metadata, is_block_device: bool) -> Self {
        let number = match is_block_device {
            true => Number::Device(metadata.rdev()),
            false => Number::File { device: metadata.dev(), inode: metadata.ino() },
        };
        Self { path: path.to_owned(), number }
    }

    /// Its size in bytes. `None`: nobody finds it under its name any more. This may wait for as
    /// long as a file system does.
    ///
    /// # Errors
    ///
    /// When the kernel does not say.
    pub fn size_bytes(&self) -> io::Result<Option<u64>> {
        match self.number {
            Number::Device(number) => Ok(sysfs::size_bytes(number)),
            Number::File { device, inode } => match std::fs::metadata(&self.path) {
                Ok(data) if (data.dev(), data.ino()) == (device, inode) => Ok(Some(data.len())),
                Ok(_) => Ok(None),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            },
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
