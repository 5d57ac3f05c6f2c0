//! Paths for a daemon of another user. This user follows no link there that a third user has made:
//! it may lead to a file that neither the daemon nor the maker of the link could open.

use std::ffi::OsStr;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};
use blockio::DiskOptions;
use blockio::disk::open_for_other;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, readlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

/// The most links on a path, as in the kernel.
const LINKS_MAX: usize = 40;

/// Opens a file like [`open_for_other`], by links of root and of this user only.
///
/// # Errors
///
/// When the file cannot be opened, or another user has made a link on its path.
pub(super) fn open(path: &Path, options: &DiskOptions) -> Result<File> {
    let user = geteuid().as_raw();
    let named = options.within.as_ref().map(|folder| folder.join(path));
    let named = named.as_deref().unwrap_or(path);
    let resolved = resolve(named, user)?;
    if let Some(folder) = &options.within {
        let folder = resolve(&folder.join(Path::new("")), user)?;
        ensure!(
            resolved.starts_with(&folder),
            "{} is outside the folder {}",
            named.display(),
            folder.display()
        );
    }
    let opened = DiskOptions { within: None, no_links: true, ..options.clone() };
    let file = open_for_other(&resolved, &opened)?;
    ensure!(
        options.within.is_none() || file.metadata()?.is_file(),
        "{} is not a regular file",
        named.display()
    );
    Ok(file)
}

/// Opens a socket to connect to it, by links of root and of this user only.
///
/// # Errors
///
/// When the path leads nowhere, or another user has made a link on it.
pub fn open_socket(path: &Path) -> Result<OwnedFd> {
    let place = resolve(path, geteuid().as_raw())?;
    let opened = open_without_links(&place);
    opened.with_context(|| format!("cannot open {}", place.display()))
}

/// The flags of a place: a link at the end is opened itself.
const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens an absolute path without `..`, on which no link is followed.
fn open_without_links(path: &Path) -> rustix::io::Result<OwnedFd> {
    match openat2(CWD, path, PLACE, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        // Containers such as systemd-nspawn may not know the call.
        Err(Errno::NOSYS) => open_by_parts(path),
        opened => opened,
    }
}

/// Opens each part of a path in the one before it, which cannot be a link.
fn open_by_parts(path: &Path) -> rustix::io::Result<OwnedFd> {
    let mut parts = parts(path);
    let root = parts.pop().unwrap_or_default();
    let mut place = openat(CWD, &root, PLACE, Mode::empty())?;
    while let Some(part) = parts.pop() {
        place = openat(&place, &part, PLACE, Mode::empty())?;
    }
    Ok(place)
}

/// Resolves all links on a path. Each must belong to root or `user`.
fn resolve(path: &Path, user: u32) -> Result<PathBuf> {
    let failed = || format!("cannot open {}", path.display());
    let absolute = std::path::absolute(path).with_context(failed)?;
    let (mut place, mut links) = (PathBuf::new(), 0);
    // The next part is the last one.
    let mut left = parts(&absolute);
    while let Some(part) = left.pop() {
        if part == OsStr::new("..") {
            place.pop();
            continue;
        }
        // Replaces the path if the part is the root.
        let next = place.join(part);
        let opened = open_without_links(&next).with_context(failed)?;
        let found = fstat(&opened).with_context(failed)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
            place = next;
            continue;
        }
        let target = readlinkat(&opened, "", Vec::new()).with_context(failed)?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        ensure!(
            [0, user].contains(&found.st_uid),
            "{}: {} is a link of user {}; name its target, {}",
            failed(),
            next.display(),
            found.st_uid,
            target.display()
        );
        links += 1;
        ensure!(links <= LINKS_MAX, "{}: too many links are on its path", failed());
        left.extend(parts(&target));
    }
    Ok(place)
}

/// The parts of a path, from its end.
fn parts(path: &Path) -> Vec<OsString> {
    let parts = path.components().filter(|part| *part != Component::CurDir);
    parts.map(|part| part.as_os_str().to_owned()).rev().collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileTypeExt, lchown, symlink};

    use blockio::disk::Folder;

    use super::*;

    #[test]
    fn a_path_by_its_parts_follows_no_link() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().canonicalize().unwrap();
        fs::create_dir(home.join("a")).unwrap();
        fs::write(home.join("a/file"), "").unwrap();
        symlink("a", home.join("link")).unwrap();
        let inode = |opened: OwnedFd| fstat(opened).unwrap().st_ino;
        let file = fs::metadata(home.join("a/file")).unwrap();
        let found = inode(open_by_parts(&home.join("a/file")).unwrap());
        assert_eq!(found, std::os::unix::fs::MetadataExt::ino(&file));
        assert_eq!(open_by_parts(&home.join("link/file")).unwrap_err(), Errno::NOTDIR);
        assert!(open_by_parts(&home.join("nowhere")).is_err());
    }

    #[test]
    fn links_of_this_user_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/disk"), [7; 512]).unwrap();
        symlink("a/b", root.join("relative")).unwrap();
        symlink(root.join("relative"), root.join("a/absolute")).unwrap();
        symlink("../../relative/./disk", root.join("a/b/up")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let user = geteuid().as_raw();
        for name in ["a/b/disk", "relative/disk", "a/absolute/disk", "a/b/up", "relative/../b/up"] {
            assert_eq!(resolve(&root.join(name), user).unwrap(), root.join("a/b/disk"), "{name}");
        }
        assert_eq!(resolve(Path::new("/"), user).unwrap(), Path::new("/"));
        for (name, words) in [("loop", "too many links"), ("absent", "No such file")] {
            let error = format!("{:#}", resolve(&root.join(name), user).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn links_of_other_users_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        fs::create_dir(root.join("folder")).unwrap();
        fs::write(root.join("folder/disk"), [7; 512]).unwrap();
        symlink("folder", root.join("link")).unwrap();
        symlink("folder/disk", root.join("disk")).unwrap();
        if !geteuid().is_root() {
            return;
        }
        let options = DiskOptions { read_only: true, ..DiskOptions::default() };
        for (name, link) in [("link/disk", "link"), ("disk", "disk")] {
            open(&root.join(name), &options).unwrap();
            lchown(root.join(link), Some(65_534), None).unwrap();
            let error = format!("{:#}", open(&root.join(name), &options).unwrap_err());
            let words = format!("{} is a link of user 65534", root.join(link).display());
            assert!(error.contains(&words), "{error}");
            // Its owner follows it.
            resolve(&root.join(name), 65_534).unwrap();
        }
    }

    /// A daemon's user may replace its socket by a link to that of another daemon.
    #[test]
    fn a_link_of_another_user_leads_to_no_socket() {
        use std::os::fd::AsRawFd;
        use std::os::unix::net::{UnixListener, UnixStream};

        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let listener = UnixListener::bind(root.join("socket")).unwrap();
        symlink("socket", root.join("link")).unwrap();
        for name in ["socket", "link"] {
            let socket = open_socket(&root.join(name)).unwrap();
            let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
            let _stream = UnixStream::connect(path).unwrap();
            listener.accept().unwrap();
        }
        if geteuid().is_root() {
            lchown(root.join("link"), Some(65_534), None).unwrap();
            let error = format!("{:#}", open_socket(&root.join("link")).unwrap_err());
            assert!(error.contains("is a link of user 65534; name its target"), "{error}");
        }
    }

    #[test]
    fn a_file_within_a_folder_does_not_leave_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        fs::create_dir(root.join("folder")).unwrap();
        fs::write(root.join("folder/disk"), [7; 512]).unwrap();
        fs::write(root.join("secret"), [7; 512]).unwrap();
        symlink("../secret", root.join("folder/link")).unwrap();
        let within = Some(Folder::open(&root.join("folder")).unwrap());
        let options = DiskOptions { read_only: true, within, ..DiskOptions::default() };
        open(Path::new("disk"), &options).unwrap();
        for name in ["link", "../secret"] {
            let error = open(Path::new(name), &options).unwrap_err().to_string();
            assert!(error.contains("is outside the folder"), "{error}");
        }
        // Devices beside one are further disks of the machine.
        let mut devices = fs::read_dir("/dev").unwrap().map(|entry| entry.unwrap());
        let is_open = |device: &fs::DirEntry| {
            device.file_type().is_ok_and(|kind| kind.is_block_device())
                && File::open(device.path()).is_ok()
        };
        if let Some(device) = devices.find(is_open) {
            let within = Some(Folder::open(Path::new("/dev")).unwrap());
            let options = DiskOptions { within, no_lock: true, ..options };
            let error = open(device.file_name().as_ref(), &options).unwrap_err().to_string();
            assert!(error.contains("is not a regular file"), "{error}");
        }
    }
}
