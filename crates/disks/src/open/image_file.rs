//! The file of an image, and the time at which it is read, for builds with and without images.

use std::fs::File;
use std::path::Path;

use anyhow::Result;
use blockio::DiskSource;
use blockio::file::FileTable;

use crate::spec::BackingFiles;

/// The file of an image.
pub(super) struct ImageFile<'a> {
    /// The file as a disk.
    pub(super) source: DiskSource,
    /// The path of the file, if the image begins at its first byte.
    pub(super) file: Option<&'a Path>,
    /// The backing files that it may have.
    pub(super) allowed: &'a BackingFiles,
    /// Files that are open already.
    pub(super) files: Option<&'a FileTable>,
    /// The look-up of files for a program with fewer rights than this one.
    pub(super) look_up: Option<&'a LookUp<'a>>,
}

/// Opens the file at a path as a place only (`O_PATH`), if a program may know of that file.
pub type LookUp<'a> = dyn Fn(&Path) -> Result<File> + 'a;

/// The time at which the content of an image is read, apart from its headers.
#[derive(Debug, Clone, Copy)]
pub(super) enum ReadTime {
    /// While the image is opened.
    Now,
    /// At the first request: another process writes to the image until then.
    FirstRequest,
    /// At each begin of a use: further processes write to the image while they have its lock.
    Locked,
}
