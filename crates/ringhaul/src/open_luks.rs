//! Opens disks that are encrypted: fetches their keys.

use std::fs::File;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use blockio::disk::luks::{KeyWork, LuksOptions, Passphrase};
use blockio::{DiskOptions, DiskSource};

use crate::disk_spec::KeySpec;
use crate::inherit;

/// The disk that lies encrypted on `below`.
///
/// # Errors
///
/// When its key or its header cannot be read, or do not fit.
pub(crate) fn open_luks(
    below: DiskSource,
    key: &KeySpec,
    header: Option<&Path>,
    discard: bool,
) -> Result<DiskSource> {
    let passphrase = read_key(key)?;
    let header = header.map(open_header).transpose()?;
    let most_work = KeyWork::default();
    Ok(DiskSource::luks(below, &LuksOptions { passphrase, discard, header, most_work })?)
}

fn read_key(key: &KeySpec) -> Result<Passphrase> {
    match key {
        KeySpec::File(path) => {
            let what = |error: io::Error| {
                anyhow!("cannot read the key in {}: {error}; check key-file", path.display())
            };
            Passphrase::read(File::open(path).map_err(what)?).map_err(what)
        }
        &KeySpec::Fd(fd) => {
            let what = || {
                format!(
                    "cannot read the key from descriptor {fd}, which can be done once; a disk that \
                     is opened again needs a key-file"
                )
            };
            Passphrase::read(File::from(inherit::take_over(fd).with_context(what)?))
                .with_context(what)
        }
    }
}

/// Others may have it in use: it is only read.
fn open_header(path: &Path) -> Result<DiskSource> {
    let options = DiskOptions { read_only: true, no_lock: true, ..DiskOptions::default() };
    Ok(DiskSource::file(path, &options)?)
}
