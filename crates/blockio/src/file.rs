//! Open files and block devices: their descriptors, their loss of data, their queues.

pub(crate) mod ab_test;
pub(crate) mod claim;
pub(crate) mod device_queue;
pub(crate) mod io_file;
pub(crate) mod op_kind;
pub(crate) mod open_file;
pub(crate) mod pacing;
pub(crate) mod write_loss;

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Opens a regular file that is read beside I/O. Does not wait for a writer, as opening a pipe
/// would: a pipe or a terminal could hold the reader for ever.
///
/// # Errors
///
/// If the file cannot be opened, or is not a regular one.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    check_regular(&file)?;
    Ok(file)
}

/// Refuses a file that is not a regular one.
///
/// # Errors
///
/// If it is another kind of file, or its kind is not known.
pub fn check_regular(file: &File) -> io::Result<()> {
    if file.metadata()?.is_file() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
}

/// Files that another program has opened, by their paths. A disk uses them in place of opening its
/// files by path.
#[derive(Debug, Default)]
pub struct FileTable {
    files: Vec<(PathBuf, File)>,
    is_complete: bool,
}

impl FileTable {
    /// Makes a table of open files. If it `is_complete`, a disk may open no other file.
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
    pub fn files(&self) -> &[(PathBuf, File)] {
        &self.files
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_a_regular_file_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let [file, pipe] = ["file", "pipe"].map(|name| folder.path().join(name));
        std::fs::write(&file, "text").unwrap();
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(io::read_to_string(open_regular(&file).unwrap()).unwrap(), "text");
        for other in [&pipe, folder.path(), Path::new("/dev/null")] {
            let error = open_regular(other).unwrap_err().to_string();
            assert_eq!(error, "it is not a regular file", "{}", other.display());
        }
    }

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
