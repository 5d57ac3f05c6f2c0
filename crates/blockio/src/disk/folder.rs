//! Folders beneath which files are opened, safely even while names change there.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};
use rustix::io::Errno;

/// The most attempts to open a file while names change in the folder.
const TRIES: usize = 64;

/// An open folder. A file [within](super::DiskOptions::within) it is a regular file in it or in a
/// subfolder, and no link leads out of it.
#[derive(Debug, Clone)]
pub struct Folder {
    folder: Arc<OwnedFd>,
    path: PathBuf,
}

impl Folder {
    /// Opens a folder.
    ///
    /// # Errors
    ///
    /// If there is none at `path`, or it cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let named = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = Arc::new(open(named, flags, Mode::empty())?);
        Ok(Self { folder, path: path.to_owned() })
    }

    /// The path of a file in the folder.
    pub fn join(&self, name: &Path) -> PathBuf {
        self.path.join(name)
    }

    /// Opens a file in the folder with `O_PATH`, for its metadata only.
    ///
    /// # Errors
    ///
    /// If there is no such file, or a link leads out of the folder (`EXDEV`).
    pub fn find(&self, name: &Path) -> io::Result<File> {
        self.open_beneath(name, OFlags::PATH)
    }

    pub(super) fn open_beneath(&self, name: &Path, flags: OFlags) -> io::Result<File> {
        let (flags, resolve) = (flags | OFlags::CLOEXEC, ResolveFlags::BENEATH);
        for _ in 1..TRIES {
            match openat2(&*self.folder, name, flags, Mode::empty(), resolve) {
                // Something was renamed, and the kernel cannot tell if the name led out.
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => return Ok(File::from(other?)),
            }
        }
        Ok(File::from(openat2(&*self.folder, name, flags, Mode::empty(), resolve)?))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn no_name_leads_out_of_a_folder() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("inner");
        fs::create_dir_all(inner.join("deeper")).unwrap();
        for file in ["secret", "inner/base", "inner/deeper/base"] {
            fs::write(root.path().join(file), file).unwrap();
        }
        symlink(root.path().join("secret"), inner.join("out")).unwrap();
        symlink("../secret", inner.join("up")).unwrap();
        symlink("deeper/base", inner.join("within")).unwrap();
        symlink(root.path(), inner.join("root")).unwrap();
        let folder = Folder::open(&inner).unwrap();
        for name in ["base", "deeper/base", "deeper/../base", "within", "./base"] {
            folder.find(Path::new(name)).unwrap();
            let mut file = folder.open_beneath(Path::new(name), OFlags::RDONLY).unwrap();
            assert!(io::read_to_string(&mut file).unwrap().ends_with("base"), "{name}");
        }
        let absolute = inner.join("base");
        for name in
            ["../secret", "out", "up", "root/secret", "root/inner/base", "deeper/../../secret"]
                .map(Path::new)
                .into_iter()
                .chain([&*absolute])
        {
            let error = folder.find(name).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EXDEV), "{}: {error}", name.display());
        }
    }
}
