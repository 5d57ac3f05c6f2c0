//! Opens a disk by its name: the layers from the bottom up, with their keys and backing files.

mod cancellation;
#[cfg(feature = "qcow2")]
mod image;
mod image_file;
pub mod inherit;
#[cfg(feature = "luks")]
mod luks;
pub mod passed_files;

use std::path::Path;

use anyhow::{Context, Result};
use blockio::disk::Folder;
use blockio::{DiskOptions, DiskSource};

use crate::spec::{BackingFiles, DiskSpec, ImageFormat, RbdSpec};
use image::{is_image, open_qcow2};

pub use cancellation::{CancelToken, with_hang_timeout};
use image_file::{ImageFile, ReadTime};

/// Opens the disk that a text names, such as `qcow2:/srv/disk.qcow2`, in the grammar of
/// [`spec`](crate::spec). Its files are opened with these options.
///
/// # Errors
///
/// When the text names no disk, or one that cannot be used. A [`blockio::Error`] inside can be had
/// with [`downcast_ref`](anyhow::Error::downcast_ref), such as that of a disk in use.
pub fn open(name: &str, options: &DiskOptions) -> Result<DiskSource> {
    let open_file = &mut |path: &Path, options: &DiskOptions| Ok(DiskSource::file(path, options)?);
    let cancel_token = &CancelToken::default();
    let opener =
        DiskOpener { options: options.clone(), cancel_token, is_handed_over: false, open_file };
    opener.open(&DiskSpec::parse(name)?)
}

/// Opens a file with options that fit its place in a disk. [`DiskSource::file`] is the model.
pub type OpenFile<'a> = dyn FnMut(&Path, &DiskOptions) -> Result<DiskSource> + 'a;

/// The opening of one disk with all its layers.
pub struct DiskOpener<'a> {
    /// Options of the disk. Its files differ from them as their places demand.
    pub options: DiskOptions,
    /// Cancels the opening while headers are read.
    pub cancel_token: &'a CancelToken,
    /// True if another process writes to the disk until the first request: none of its content is
    /// read before.
    pub is_handed_over: bool,
    /// Opens the file at the bottom, then the backing files of images, from the top down.
    pub open_file: &'a mut OpenFile<'a>,
}

impl DiskOpener<'_> {
    /// Opens the disk.
    ///
    /// # Errors
    ///
    /// When it cannot be used, or was cancelled and does not answer.
    pub fn open(mut self, disk: &DiskSpec) -> Result<DiskSource> {
        let source = self.open_layer(disk, false)?;
        if disk.has_unnamed_content() && !self.is_handed_over {
            self.cancel_token.while_reading(&source, || {
                source.detect_format();
                Ok(())
            })?;
        }
        Ok(source)
    }

    /// Opens a disk, beginning at its lowest layer. With `holds_image` an image lies above.
    fn open_layer(&mut self, disk: &DiskSpec, holds_image: bool) -> Result<DiskSource> {
        match disk {
            DiskSpec::File(path) => {
                (self.open_file)(path, &DiskOptions { holds_image, ..self.options.clone() })
            }
            DiskSpec::Null { size_bytes } => {
                Ok(DiskSource::null(*size_bytes, &self.cached_options())?)
            }
            DiskSpec::Nbd(nbd) => {
                let source = crate::nbd::open(nbd.options(), &self.cached_options());
                match self.is_handed_over {
                    false => Ok(source?),
                    true => source.context(
                        "cannot connect while the old process is connected; let the server allow \
                         one more connection",
                    ),
                }
            }
            DiskSpec::Rbd(image) => open_rbd(image, &self.options),
            DiskSpec::Raw { offset_bytes, size_bytes, over } => {
                let below = self.open_layer(over, holds_image)?;
                Ok(DiskSource::raw(below, *offset_bytes, *size_bytes)?)
            }
            #[cfg(feature = "luks")]
            DiskSpec::Luks { key, header, discard, over } => {
                let below = self.open_layer(over, holds_image)?;
                let open = || {
                    let files = self.options.files.as_ref();
                    luks::open_luks(below.clone(), key, header.as_deref(), *discard, files)
                };
                self.cancel_token.while_reading(&below, open)
            }
            #[cfg(not(feature = "luks"))]
            DiskSpec::Luks { .. } => {
                anyhow::bail!(
                    "cannot open {disk}: this program was built without LUKS (feature luks)"
                )
            }
            DiskSpec::Qcow2 { backing, over } => {
                let below = self.open_layer(over, true)?;
                self.open_image(below, over, backing)
            }
            DiskSpec::Image { format: ImageFormat::Auto, backing, over } => {
                let below = self.open_layer(over, true)?;
                if !self.cancel_token.while_reading(&below, || is_image(&below))? {
                    return Ok(below);
                }
                self.open_image(below, over, backing)
            }
        }
    }

    /// Opens the image in `below`, which is named `over`, with the backing files that are
    /// `allowed`.
    fn open_image(
        &mut self,
        below: DiskSource,
        over: &DiskSpec,
        allowed: &BackingFiles,
    ) -> Result<DiskSource> {
        let is_late = self.options.late_lock && !self.options.read_only;
        let options = DiskOptions {
            read_only: true,
            holds_image: true,
            user: None,
            // Backing files do not change users.
            no_lock: self.options.no_lock && !is_late,
            late_lock: false,
            ..self.options.clone()
        };
        let time = match (is_late, self.is_handed_over) {
            (true, _) => ReadTime::Locked,
            (false, true) => ReadTime::FirstRequest,
            (false, false) => ReadTime::Now,
        };
        let open_backing = |path: &Path, within: Option<&Folder>| {
            (self.open_file)(path, &DiskOptions { within: within.cloned(), ..options.clone() })
        };
        // The backing files of the image are local, so the token watches `below` alone.
        self.cancel_token.while_reading(&below, || {
            let (source, file) = (below.clone(), over.whole_file());
            let files = options.files.as_deref();
            let image = ImageFile { source, file, allowed, files, look_up: None };
            open_qcow2(image, open_backing, time)
        })
    }

    /// Options of a disk that no direct I/O reaches.
    fn cached_options(&self) -> DiskOptions {
        DiskOptions { direct: false, ..self.options.clone() }
    }
}

#[cfg(feature = "rbd")]
fn open_rbd(image: &RbdSpec, options: &DiskOptions) -> Result<DiskSource> {
    Ok(crate::rbd::open(image, options)?)
}

#[cfg(not(feature = "rbd"))]
fn open_rbd(image: &RbdSpec, _: &DiskOptions) -> Result<DiskSource> {
    anyhow::bail!("cannot open rbd:{image}: this program was built without Ceph (feature rbd)")
}

/// The stand-in for images in builds without the feature `qcow2`.
#[cfg(not(feature = "qcow2"))]
mod image {
    use std::path::Path;

    use anyhow::{Result, bail};
    use blockio::DiskSource;
    use blockio::disk::Folder;

    use super::image_file::{ImageFile, ReadTime};

    /// Fails: this program was built without images.
    pub(super) fn is_image(_: &DiskSource) -> Result<bool> {
        bail!("cannot open an image: this program was built without images (feature qcow2)")
    }

    /// Fails like [`is_image`].
    pub(super) fn open_qcow2(
        image: ImageFile<'_>,
        _: impl FnMut(&Path, Option<&Folder>) -> Result<DiskSource>,
        _: ReadTime,
    ) -> Result<DiskSource> {
        let ImageFile { source, file, allowed, files, look_up } = image;
        let _unused = (file, allowed, files, look_up.is_some());
        is_image(&source).map(|_| source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_name_opens_its_layers_with_the_options_of_the_caller() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let name = format!("raw,offset=512K,over={}", file.path().display());
        let options = DiskOptions { read_only: true, ..DiskOptions::default() };
        let info = open(&name, &options).unwrap().info();
        assert_eq!((info.size_bytes, info.read_only), (512 << 10, true));
        let _held = open(&name, &DiskOptions::default()).unwrap();
        let error = open(&name, &DiskOptions { at_once: true, ..DiskOptions::default() });
        let error = error.err().unwrap();
        assert!(matches!(error.downcast_ref(), Some(blockio::Error::InUse { .. })), "{error:#}");
        let error = open("disk.img", &options).err().unwrap().to_string();
        assert!(error.contains("write ./disk.img"), "{error}");
    }

    #[test]
    #[cfg(feature = "luks")]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_encrypted_disk_discards_only_if_its_name_says_so() {
        use crate::luks::tests::{PASSPHRASE, header, image};

        let (file, key) =
            (image(&header(|_| ()), 1 << 20), tempfile::NamedTempFile::new().unwrap());
        std::fs::write(key.path(), PASSPHRASE).unwrap();
        let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let (key, file) = (key.path().display(), file.path().display());
        let below = open(&file.to_string(), &options).unwrap().abilities().discard;
        for (discard, is_allowed) in [("", false), (",discard=on", true), (",discard=off", false)] {
            let name = format!("luks,key-file={key}{discard},over={file}");
            let source = open(&name, &options).unwrap();
            assert_eq!(source.abilities().discard, is_allowed && below, "{name}");
        }
    }

    #[test]
    #[cfg(feature = "rbd")]
    fn an_image_in_a_cluster_gets_the_options_of_the_caller() {
        for (logical, read_only, reason) in
            [(Some(100), true, "100"), (None, false, "a snapshot can only be read")]
        {
            let options =
                DiskOptions { logical_block_bytes: logical, read_only, ..DiskOptions::default() };
            let error = open("rbd:pool/image@snapshot", &options).err().unwrap();
            assert!(format!("{error:#}").contains(reason), "{error:#}");
        }
    }

    /// A late lock is for the image alone: its backing files are locked when they are opened.
    #[test]
    #[cfg(feature = "qcow2")]
    #[cfg_attr(miri, ignore = "runs a program")]
    fn backing_files_are_locked_unless_the_caller_locks_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let [base, top] = ["base", "top"].map(|name| folder.path().join(name));
        std::fs::write(&base, [7; 4096]).unwrap();
        // QEMU names raw files so, too.
        for format in ["raw", "file", "host_device"] {
            let mut create = std::process::Command::new("qemu-img");
            create.args(["create", "-q", "-u", "-f", "qcow2", "-b", "base", "-F", format]);
            let Ok(made) = create.arg(&top).arg("4096").status() else { return };
            assert!(made.success());
            for (late_lock, no_lock, read_only, is_locked) in [
                (false, false, false, true),
                (true, true, false, true),
                (false, true, false, false),
                (true, true, true, false),
            ] {
                let mut locked = None;
                let open_file = &mut |path: &Path, options: &DiskOptions| {
                    locked = Some(!options.no_lock);
                    Ok(DiskSource::file(path, options)?)
                };
                let options =
                    DiskOptions { late_lock, no_lock, read_only, ..DiskOptions::default() };
                let cancel_token = &CancelToken::default();
                let opener = DiskOpener { options, cancel_token, is_handed_over: false, open_file };
                let name = format!("qcow2,backing=anywhere,path={}", top.display());
                opener.open(&DiskSpec::parse(&name).unwrap()).unwrap();
                let case = (format, late_lock, no_lock, read_only);
                assert_eq!(locked, Some(is_locked), "{case:?}");
            }
        }
    }

    /// The file at the bottom is opened first, with the options of the caller.
    #[test]
    #[cfg(feature = "qcow2")]
    #[cfg_attr(miri, ignore = "runs a program")]
    fn backing_files_are_only_read_within_the_folder_of_the_image() {
        let folder = tempfile::tempdir().unwrap();
        let [base, top] = ["base", "top"].map(|name| folder.path().join(name));
        std::fs::write(&base, [7; 4096]).unwrap();
        let mut create = std::process::Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw"]).arg(&top);
        let Ok(made) = create.status() else { return };
        assert!(made.success());
        let mut files = Vec::new();
        let open_file = &mut |path: &Path, options: &DiskOptions| {
            let DiskOptions { read_only, holds_image, user, within, .. } = options;
            files.push((path.to_owned(), *read_only, *holds_image, *user, within.is_some()));
            Ok(DiskSource::file(path, options)?)
        };
        let options = DiskOptions { user: Some(7), ..DiskOptions::default() };
        let cancel_token = &CancelToken::default();
        let opener = DiskOpener { options, cancel_token, is_handed_over: false, open_file };
        let name = format!("qcow2,backing=beside,path={}", top.display());
        assert_eq!(opener.open(&DiskSpec::parse(&name).unwrap()).unwrap().info().size_bytes, 4096);
        let expected =
            [(top, false, true, Some(7), false), ("base".into(), true, true, None, true)];
        assert_eq!(files, expected);
    }
}
