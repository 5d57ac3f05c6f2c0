//! The folder for the disks of unit tests.

use std::path::PathBuf;

/// A folder for files on a disk, beside the program of the test: `/tmp` may be in memory.
///
/// # Panics
///
/// When the system does not know the program.
pub fn disk_folder() -> PathBuf {
    let mut program = std::env::current_exe().expect("the path of this program");
    program.pop();
    program
}
