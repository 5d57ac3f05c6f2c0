//! The opening of a regular file or a block device: its checks, and its locks.

use std::fs::{File, FileType};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, fcntl_getfl, fcntl_setfl, openat2};

use super::lock::{Conflict, OpenError, lock, lock_for, retry_open};
use crate::disk::info::DiskOptions;
use crate::error::Error;

/// Opens a file or block device for another process, which [uses](DiskOptions::files) and locks it.
/// A block device that is to be written to is claimed, unless `options` forbid it.
///
/// # Errors
///
/// Like [`DiskSource::file`](crate::disk::DiskSource::file).
pub fn open_for_other(name: &Path, options: &DiskOptions) -> Result<File, Error> {
    let shown = options.within.as_ref().map(|folder| folder.join(name));
    let path = shown.as_deref().unwrap_or(name);
    let failed = open_error(path, options);
    let found = match &options.within {
        None => std::fs::metadata(name),
        Some(folder) => folder.find(name).and_then(|place| place.metadata()),
    };
    let found = found.map_err(&failed)?.file_type();
    let unusable = |reason| Error::Unusable { path: path.to_owned(), reason };
    check_type(found, options).map_err(unusable)?;
    let is_block = found.is_block_device();
    retry_open(path, options.at_once, || {
        open_checked((name, path), options, is_block).map(|(file, _)| file)
    })
}

/// Checks that a file with these open flags serves a disk with these options.
pub(super) fn check_mode(flags: OFlags, options: &DiskOptions) -> Result<(), String> {
    let mode = flags & OFlags::RWMODE;
    if flags.contains(OFlags::PATH) || mode == OFlags::WRONLY {
        return Err("its descriptor cannot be read; open it for reading and writing".into());
    }
    if flags.contains(OFlags::APPEND) {
        return Err("its descriptor appends all data; open it without O_APPEND".into());
    }
    if mode != OFlags::RDWR && !options.read_only {
        return Err("its descriptor cannot be written to; open it for reading and writing, or \
                    export the disk read-only"
            .into());
    }
    Ok(())
}

/// Opens the file and locks it, if it has locks. For a block device that is written to, the open
/// itself is the claim.
pub(super) fn open_alone(
    (name, path): (&Path, &Path),
    options: &DiskOptions,
    is_block: bool,
) -> Result<(File, bool), OpenError> {
    let (file, flags) = open_checked((name, path), options, is_block)?;
    // io_uring reads a file with `O_NONBLOCK` in another way.
    fcntl_setfl(&file, flags - OFlags::NONBLOCK)
        .map_err(|errno| OpenError::Failed(open_error(path, options)(errno.into())))?;
    let is_locked = lock_as(&file, path, options).map_err(OpenError::Conflict)?;
    Ok((file, is_locked))
}

/// Locks a file as the options demand. Returns true if it is locked.
pub(super) fn lock_as(file: &File, path: &Path, options: &DiskOptions) -> Result<bool, Conflict> {
    let is_locked = match options.no_lock {
        true => false,
        false => lock(file, path, options.read_only)?,
    };
    if let Some(user) = options.user {
        lock_for(file, user)?;
    }
    Ok(is_locked)
}

/// Opens the file, and returns its flags.
fn open_checked(
    (name, path): (&Path, &Path),
    options: &DiskOptions,
    is_block: bool,
) -> Result<(File, OFlags), OpenError> {
    let failed = |error| OpenError::Failed(open_error(path, options)(error));
    let file = open(name, options, is_block).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => OpenError::Conflict(Conflict::Claimed),
        // Another program has a lease, which the kernel has asked it to release.
        Some(libc::EWOULDBLOCK) => OpenError::Conflict(Conflict::Locked),
        _ => failed(error),
    })?;
    let opened = file.metadata().map_err(failed)?.file_type();
    // The name may have been given to another file after the check.
    let checked = match opened.is_block_device() == is_block {
        true => check_type(opened, options),
        false => Err("another file replaced it while it was being opened; try again".into()),
    };
    checked
        .map_err(|reason| OpenError::Failed(Error::Unusable { path: path.to_owned(), reason }))?;
    let flags = fcntl_getfl(&file).map_err(|errno| failed(errno.into()))?;
    Ok((file, flags))
}

/// Fails for a type of file that cannot be a disk.
pub(super) fn check_type(found: FileType, options: &DiskOptions) -> Result<(), String> {
    if found.is_dir() {
        return Err("it is a directory; name a file or a block device".into());
    }
    if options.within.is_some() && !found.is_file() {
        return Err("it is not a regular file".into());
    }
    if !found.is_file() && !found.is_block_device() {
        return Err(
            "it is neither a regular file nor a block device; name a file or a block device".into(),
        );
    }
    Ok(())
}

fn open(name: &Path, options: &DiskOptions, is_block_device: bool) -> io::Result<File> {
    let mut flags = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR } | OFlags::CLOEXEC;
    if options.direct {
        flags |= OFlags::DIRECT;
    }
    if !is_block_device {
        // A named pipe in its place must not make this wait for a writer or reader.
        flags |= OFlags::NONBLOCK;
    } else if !options.read_only && !options.no_lock {
        // Fails if the device is mounted or claimed by another program.
        flags |= OFlags::EXCL;
    }
    match &options.within {
        Some(folder) => folder.open_beneath(name, flags),
        None => {
            let open = || match options.no_links {
                true => openat2(CWD, name, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS),
                false => rustix::fs::open(name, flags, Mode::empty()),
            };
            Ok(File::from(rustix::io::retry_on_intr(open)?))
        }
    }
}

pub(super) fn open_error(path: &Path, options: &DiskOptions) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    let options = options.clone();
    move |error| {
        let advice = match error.raw_os_error() {
            Some(libc::EINVAL) if options.direct => {
                "; the file system may not allow direct I/O: use the page cache"
            }
            Some(libc::EACCES | libc::EPERM) if !options.read_only => {
                "; check its permissions, or open it read-only"
            }
            Some(libc::EACCES | libc::EPERM) => "; check its permissions",
            Some(libc::ENOENT) => "; check the path",
            Some(libc::EROFS) => "; open it read-only",
            Some(libc::ELOOP) if options.no_links => {
                "; a link has appeared on its path: name a path without links"
            }
            Some(libc::EMFILE) => "; raise the limit on open files (ulimit -n)",
            _ => "",
        };
        Error::Open { path: path.clone(), error, advice }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::folder::Folder;

    /// A name may be exchanged between its check and its opening.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn the_opening_of_a_file_checks_the_opened_file() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("folder");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(root.path().join("secret"), [9; 512]).unwrap();
        std::os::unix::fs::symlink("../secret", folder.join("out")).unwrap();
        let within = Some(Folder::open(&folder).unwrap());
        let options = DiskOptions { read_only: true, within, ..DiskOptions::default() };
        let error = open(Path::new("out"), &options, false).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EXDEV));
        let pipe = folder.join("pipe");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let options = DiskOptions { read_only: true, ..DiskOptions::default() };
        for (path, is_block) in
            [(&*pipe, false), (&folder, false), (&root.path().join("secret"), true)]
        {
            let Err(OpenError::Failed(error)) = open_alone((path, path), &options, is_block) else {
                panic!("{} was opened", path.display())
            };
            assert!(matches!(error, Error::Unusable { .. }), "{error}");
        }
        let secret = root.path().join("secret");
        let Ok((file, _)) = open_alone((&secret, &secret), &options, false) else {
            panic!("it was not opened")
        };
        let flags = fcntl_getfl(&file).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK), "io_uring would read it otherwise: {flags:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn no_link_is_followed_on_a_path_without_links() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().canonicalize().unwrap().join(name);
        std::fs::create_dir(path("folder")).unwrap();
        std::fs::write(path("folder/disk"), [9; 512]).unwrap();
        std::os::unix::fs::symlink("folder", path("link")).unwrap();
        std::os::unix::fs::symlink("folder/disk", path("disk")).unwrap();
        let followed = DiskOptions { read_only: true, ..DiskOptions::default() };
        let options = DiskOptions { no_links: true, ..followed.clone() };
        open_for_other(&path("folder/disk"), &options).unwrap();
        for name in ["link/disk", "disk"] {
            open_for_other(&path(name), &followed).unwrap();
            let error = open_for_other(&path(name), &options).unwrap_err().to_string();
            assert!(error.contains("name a path without links"), "{error}");
        }
    }

    /// The name may come from an image, and the user of its disk can write that.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_within_a_folder_is_a_regular_file() {
        let devices = std::fs::read_dir("/dev").unwrap().flatten();
        let mut types = devices.filter_map(|entry| entry.file_type().ok());
        let Some(device) = types.find(FileTypeExt::is_block_device) else {
            eprintln!("skipped: there is no block device");
            return;
        };
        let file = tempfile::tempfile().unwrap().metadata().unwrap().file_type();
        let within = || Some(Folder::open(Path::new("/dev")).unwrap());
        for (found, is_usable_within) in [(file, true), (device, false)] {
            for (within, is_usable) in [(None, true), (within(), is_usable_within)] {
                let options = DiskOptions { within, ..DiskOptions::default() };
                assert_eq!(check_type(found, &options).is_ok(), is_usable, "{options:?}");
            }
        }
    }

    #[test]
    fn a_descriptor_is_used_only_if_its_mode_fits() {
        let read_only = DiskOptions { read_only: true, ..DiskOptions::default() };
        let writable = DiskOptions::default();
        for (flags, options, expected) in [
            (OFlags::RDWR, &writable, None),
            (OFlags::RDWR, &read_only, None),
            (OFlags::RDONLY, &read_only, None),
            (OFlags::RDONLY, &writable, Some("cannot be written to")),
            (OFlags::WRONLY, &writable, Some("cannot be read")),
            (OFlags::PATH, &read_only, Some("cannot be read")),
            (OFlags::RDWR | OFlags::APPEND, &writable, Some("O_APPEND")),
        ] {
            let said = check_mode(flags, options).err();
            match expected {
                None => assert_eq!(said, None, "{flags:?}"),
                Some(words) => assert!(said.unwrap().contains(words), "{flags:?}"),
            }
        }
    }
}
