//! Files that another program has opened, by their paths. A disk uses them in place of opening its
//! files by path.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Open files by path.
#[derive(Debug, Default)]
pub struct FileTable {
    files: Vec<(PathBuf, File)>,
    is_complete: bool,
}

impl FileTable {
    /// Makes a table of open files. If it `is_complete`, a disk may open no other file.
    #[must_use]
    pub fn new(files: Vec<(PathBuf, File)>, is_complete: bool) -> Self {
        Self { files, is_complete }
    }

    /// The file with this path, as another descriptor of the same open file. `None`: the file may
    /// be opened by its path.
    pub fn get(&self, path: &Path) -> Option<io::Result<File>> {
        match self.files.iter().find(|(named, _)| named == path) {
            Some((_, file)) => Some(file.try_clone()),
            None if self.is_complete => {
                let text = "it is not among the files that came with the command";
                Some(Err(io::Error::new(io::ErrorKind::PermissionDenied, text)))
            }
            None => None,
        }
    }

    /// All files with their paths.
    #[must_use]
    pub fn files(&self) -> &[(PathBuf, File)] {
        &self.files
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_complete_table_has_all_files_that_may_be_opened() {
        let open = || (PathBuf::from("/here"), File::open("/dev/null").unwrap());
        for is_complete in [false, true] {
            let table = FileTable::new(vec![open()], is_complete);
            assert!(table.get(Path::new("/here")).unwrap().is_ok());
            let other = table.get(Path::new("/there"));
            assert_eq!(other.is_some_and(|file| file.is_err()), is_complete);
        }
    }
}
