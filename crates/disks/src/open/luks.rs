//! Opens encrypted disks: reads their keys and headers.

use std::fs::File;
use std::io::{self, Seek};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use blockio::file::{FileTable, check_regular, open_regular};
use blockio::{DiskOptions, DiskSource};
use rustix::io::Errno;

use super::inherit;
use crate::luks::{self, KdfLimits, LuksOptions, Passphrase};
use crate::secret_heap::with_secrets;
use crate::spec::KeySpec;

/// Opens the encrypted disk on `below`.
///
/// # Errors
///
/// When its key or its header cannot be read, or do not match.
pub(super) fn open_luks(
    below: DiskSource,
    key: &KeySpec,
    header: Option<&Path>,
    discard: bool,
    files: Option<&Arc<FileTable>>,
) -> Result<DiskSource> {
    let header = header.map(|path| open_header(path, files)).transpose()?;
    let most_work = KdfLimits::default();
    with_secrets(|| {
        let passphrase = read_key(key, files)?;
        Ok(luks::open(below, &LuksOptions { passphrase, discard, header, most_work })?)
    })
}

fn read_key(key: &KeySpec, files: Option<&Arc<FileTable>>) -> Result<Passphrase> {
    match key {
        KeySpec::File(path) => {
            let what = |error: io::Error| {
                anyhow!("cannot read the key in {}: {error}; check key-file", path.display())
            };
            let file = match files.and_then(|files| files.get(path)) {
                Some(passed) => passed.and_then(|mut file| {
                    check_regular(&file)?;
                    // The key may have been read before, by the process that handed it over.
                    file.rewind()?;
                    Ok(file)
                }),
                None => open_regular(path),
            };
            Passphrase::read(file.map_err(what)?).map_err(what)
        }
        &KeySpec::Fd(fd) => {
            read_inherited(fd).with_context(|| format!("cannot read the key from descriptor {fd}"))
        }
    }
}

fn read_inherited(fd: i32) -> Result<Passphrase> {
    ensure!(fd > 2, "descriptors 0 to 2 cannot have the key; choose a number above 2");
    let file = inherit::take_over(fd).map_err(|error| {
        let why = match Errno::from_io_error(&error) {
            Some(Errno::BADF) => "it is not open".to_owned(),
            _ => error.to_string(),
        };
        // A descriptor that was read before is closed, or its number belongs to the program by now.
        anyhow!(
            "{why}; start ringhaul with {fd}< KEYFILE, or use key-file for a disk that is opened \
             repeatedly, because a descriptor can be read only once"
        )
    })?;
    Passphrase::read(File::from(file))
        .map_err(|error| anyhow!("{error}; start ringhaul with {fd}< KEYFILE"))
}

/// Opens a header without a lock, because other disks may use it. It is only read.
fn open_header(path: &Path, files: Option<&Arc<FileTable>>) -> Result<DiskSource> {
    let files = files.cloned();
    let options = DiskOptions { read_only: true, no_lock: true, files, ..DiskOptions::default() };
    Ok(DiskSource::file(path, &options)?)
}
