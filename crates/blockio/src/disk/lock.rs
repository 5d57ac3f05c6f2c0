//! Locks: nobody else writes to what we write to.

use std::fs::File;
use std::path::Path;

use rustix::fs::FlockOperation;

use super::DiskOptions;
use crate::error::Error;

/// Two daemons that write to one file destroy it, so a writer locks it for itself alone. Block
/// devices are claimed by the open itself; a lock there would disturb udev.
pub(super) fn lock(
    file: &File,
    path: &Path,
    options: &DiskOptions,
    is_block: bool,
) -> Result<(), Error> {
    if is_block {
        return Ok(());
    }
    let operation = if options.read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    match rustix::fs::flock(file, operation) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::Unusable {
            path: path.to_owned(),
            reason: "another program has locked it; stop that first, or open it read-only in both"
                .into(),
        }),
        // Some network file systems have no locks; that alone does not make the disk unusable.
        _ => Ok(()),
    }
}
