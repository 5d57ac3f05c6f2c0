//! Opens images, and the backing files that they name.
//!
//! What an image says about other files is not to be believed: it may come from somebody else, or a
//! guest may have written it into what was a raw disk. So a format is never guessed from what is in
//! a file, and a backing file lies beside the image unless the user says otherwise.

use std::path::Path;
#[cfg(feature = "qcow2")]
use std::path::PathBuf;

#[cfg(feature = "qcow2")]
use anyhow::{Context, ensure};
use anyhow::{Result, bail};
use blockio::DiskSource;
#[cfg(feature = "qcow2")]
use blockio::disk::qcow2::Layer;

use crate::disk_spec::BackingFiles;

/// How the backing files of an image are opened.
pub(crate) struct Backing<'a> {
    /// The file that holds the image, if it does so from its first byte on.
    pub(crate) image: Option<&'a Path>,
    /// Where they may be. `None`: there may be none.
    pub(crate) allowed: Option<BackingFiles>,
    /// Opens one for reading.
    pub(crate) open: &'a mut dyn FnMut(&Path) -> Result<DiskSource>,
}

/// Says that this program has no such disks.
#[cfg(not(feature = "qcow2"))]
pub(crate) fn is_image(_: &DiskSource) -> Result<bool> {
    bail!("this ringhaul was built without images (the feature qcow2)")
}

/// The same.
#[cfg(not(feature = "qcow2"))]
pub(crate) fn open_qcow2(source: DiskSource, _: Backing<'_>, _: bool) -> Result<DiskSource> {
    is_image(&source).map(|_| source)
}

/// Whether there is an image in what has no name for its format. If there is none, and it is to be
/// written to, it is refused: the next time, whoever wrote to it could have made it one, with any
/// file of this machine as its backing file.
#[cfg(feature = "qcow2")]
pub(crate) fn is_image(source: &DiskSource) -> Result<bool> {
    if source.image_header()?.is_some() {
        return Ok(true);
    }
    if let Some(format) = source.foreign_format() {
        bail!(
            "{} has the header of a {format} image, which is not supported; convert it with \
             `qemu-img convert -O qcow2`",
            source.chain_text()
        );
    }
    ensure!(
        source.info().read_only,
        "{} has no format that is known, and a disk without a format is not written to as long as \
         its format is guessed: its guest could make it look like an image. If it is one without a \
         format, name it so, as in raw,over=PATH",
        source.chain_text()
    );
    Ok(false)
}

/// Opens the qcow2 image on `source`. With `is_deferred` another process still writes to it.
#[cfg(feature = "qcow2")]
pub(crate) fn open_qcow2(
    source: DiskSource,
    backing: Backing<'_>,
    is_deferred: bool,
) -> Result<DiskSource> {
    let mut layers = vec![Layer::qcow2(source)?];
    let mut image = backing.image.map(Path::to_owned);
    while let Some(named) = layers.last().and_then(Layer::backing).cloned() {
        let of = image.as_deref().map_or("the image".to_owned(), |path| path.display().to_string());
        let what = || format!("cannot open {}, the backing file of {of}", named.name);
        ensure!(layers.len() <= 32, "{of} has too many backing files; is it one of its own?");
        let Found { path, file } =
            backing.find(&named.name, image.as_deref()).with_context(what)?;
        let source = (backing.open)(&file).with_context(what)?;
        let layer = match named.format.as_deref() {
            Some("qcow2") => Layer::qcow2(source).with_context(what)?,
            Some("raw" | "file" | "host_device") => Layer::raw(source),
            Some(format) => bail!(
                "{}: its format {format} is not supported; convert it with `qemu-img convert -O \
                 qcow2`, and name that file with `qemu-img rebase -u`",
                what()
            ),
            None => bail!(
                "{}: {of} does not say which format it has, and that is not guessed; add it with \
                 `qemu-img rebase -u -b {} -F qcow2 {of}` (or -F raw)",
                what(),
                named.name
            ),
        };
        layers.push(layer);
        image = Some(path);
    }
    Ok(DiskSource::qcow2(layers, is_deferred)?)
}

/// A backing file.
#[cfg(feature = "qcow2")]
#[derive(Debug)]
struct Found {
    /// As the names say that lead to it. What it names itself is found from there, as QEMU does.
    path: PathBuf,
    /// Where it is, without links.
    file: PathBuf,
}

#[cfg(feature = "qcow2")]
impl Backing<'_> {
    /// The file that an image at `image` names.
    fn find(&self, name: &str, image: Option<&Path>) -> Result<Found> {
        let allowed = self.allowed.context(
            "the format of the image was found out from its content, and the guest of a disk \
             without a format could have written that to read this file; if it is an image that \
             is to be trusted, name its format, as in qcow2,path=PATH, or add backing=beside",
        )?;
        let name = name.strip_prefix("file:").unwrap_or(name);
        let is_elsewhere = name.split_once('/').map_or(name, |(start, _)| start).contains(':');
        ensure!(
            !is_elsewhere,
            "only files can be backing files; copy what is there into a file with `qemu-img \
             convert`, and name that with `qemu-img rebase -u`"
        );
        let path = match image.and_then(Path::parent) {
            Some(folder) => folder.join(name),
            None if name.starts_with('/') => PathBuf::from(name),
            None => bail!("its name is relative, and the image is no file; give an absolute one"),
        };
        let file = path.canonicalize().with_context(|| {
            format!("there is no {}; correct it with `qemu-img rebase -u`", path.display())
        })?;
        if allowed == BackingFiles::Anywhere {
            return Ok(Found { path, file });
        }
        let folder = self.image.and_then(Path::parent).map(|folder| match folder.as_os_str() {
            folder if folder.is_empty() => Path::new("."),
            _ => folder,
        });
        let folder = folder.map(Path::canonicalize).transpose()?;
        let is_beside = folder.as_ref().is_some_and(|folder| file.starts_with(folder));
        ensure!(
            is_beside,
            "{} does not lie in the folder of the image; if the image is to be trusted, allow that \
             with backing=anywhere",
            file.display()
        );
        // What lies beside a device are the other disks of the machine.
        let are_files = file.is_file() && self.image.is_some_and(Path::is_file);
        ensure!(
            are_files,
            "{} or the image over it is not a regular file; if the image is to be trusted, allow \
             that with backing=anywhere",
            file.display()
        );
        Ok(Found { path, file })
    }
}

#[cfg(all(test, feature = "qcow2"))]
mod tests {
    use super::*;

    fn find(image: Option<&Path>, allowed: BackingFiles, name: &str) -> Result<PathBuf, String> {
        let mut open = |_: &Path| unreachable!("nothing is opened");
        let backing = Backing { image, allowed: Some(allowed), open: &mut open };
        let found = backing.find(name, image).map_err(|error| format!("{error:#}"))?;
        Ok(found.file)
    }

    #[test]
    fn a_backing_file_lies_beside_its_image_unless_that_is_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let inner = root.join("images/old");
        std::fs::create_dir_all(&inner).unwrap();
        for path in ["secret", "images/base", "images/old/base", "images/disk.qcow2"] {
            std::fs::write(root.join(path), "").unwrap();
        }
        std::os::unix::fs::symlink(root.join("secret"), root.join("images/link")).unwrap();
        let image = root.join("images/disk.qcow2");
        let beside = |name: &str| find(Some(&image), BackingFiles::Beside, name);
        assert_eq!(beside("base").unwrap(), root.join("images/base"));
        assert_eq!(beside("old/base").unwrap(), inner.join("base"));
        assert_eq!(beside("file:base").unwrap(), root.join("images/base"));
        let absolute = root.join("images/base").display().to_string();
        assert_eq!(beside(&absolute).unwrap(), root.join("images/base"));
        let secret = root.join("secret").display().to_string();
        for name in ["../secret", "link", &secret] {
            assert!(beside(name).unwrap_err().contains("backing=anywhere"), "{name}");
            let allowed = find(Some(&image), BackingFiles::Anywhere, name);
            assert_eq!(allowed.unwrap(), root.join("secret"));
        }
        for (name, expected) in [
            ("nbd://host/x", "only files can be backing files; copy what is there into a file"),
            ("json:{}", "with `qemu-img convert`, and name that with `qemu-img rebase -u`"),
            ("absent", "qemu-img rebase -u"),
        ] {
            assert!(beside(name).unwrap_err().contains(expected), "{name}");
        }
        for (image, name) in [(image.as_path(), "old"), (Path::new("/dev/null"), "zero")] {
            let error = find(Some(image), BackingFiles::Beside, name).unwrap_err();
            assert!(error.contains("not a regular file"), "{error}");
            find(Some(image), BackingFiles::Anywhere, name).unwrap();
        }
        assert!(find(None, BackingFiles::Anywhere, "base").unwrap_err().contains("absolute"));
        assert!(find(None, BackingFiles::Beside, &secret).is_err());
    }
}
