//! Open files and block devices: their descriptors, their loss of data, their queues.

pub(crate) mod ab_test;
pub(crate) mod claim;
pub(crate) mod device_queue;
mod file_table;
pub(crate) mod io_file;
pub(crate) mod op_kind;
pub(crate) mod open_file;
pub(crate) mod pacing;
pub(crate) mod write_loss;

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

pub use file_table::FileTable;

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
}
