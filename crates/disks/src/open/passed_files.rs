//! Opens the files of a disk for another process, which serves the disk.

use std::fs::File;
use std::path::{Path, PathBuf};
#[cfg(feature = "qcow2")]
use std::sync::Arc;

use anyhow::Result;
use blockio::DiskOptions;
#[cfg(feature = "qcow2")]
use blockio::{DiskSource, file::FileTable};

#[cfg(feature = "qcow2")]
use super::image::{is_image, open_layers};
#[cfg(feature = "qcow2")]
use super::image_file::ImageFile;
use crate::spec::{BackingFiles, DiskSpec, ImageFormat, KeySpec};

pub use super::image_file::LookUp;

/// Opens a file of a disk with options that fit its place.
/// [`open_for_other`](blockio::disk::open_for_other) is the model.
pub type OpenForOther<'a> = dyn FnMut(&Path, &DiskOptions) -> Result<File> + 'a;

/// Opens the files that a disk names, and the backing files of an image that lies in a file. Only
/// headers of images are read. The names of the other process for the files are beside them.
///
/// # Errors
///
/// When a file cannot be opened, or an image names a backing file that it may not have.
pub fn open_files(
    disk: &DiskSpec,
    options: &DiskOptions,
    open: &mut OpenForOther<'_>,
) -> Result<Vec<(PathBuf, File)>> {
    let mut files = Vec::new();
    add_files(disk, options, &mut Opener { open, look_up: None }, &mut files)?;
    Ok(files)
}

/// Like [`open_files`], for a program that asks with fewer rights than this one has: backing files
/// are looked up by `look_up`, and so no error tells of a file that it does not permit.
///
/// # Errors
///
/// Like [`open_files`], and errors of `look_up`.
pub fn open_files_by(
    disk: &DiskSpec,
    options: &DiskOptions,
    open: &mut OpenForOther<'_>,
    look_up: &LookUp<'_>,
) -> Result<Vec<(PathBuf, File)>> {
    let mut files = Vec::new();
    add_files(disk, options, &mut Opener { open, look_up: Some(look_up) }, &mut files)?;
    Ok(files)
}

/// The ways to open a file, and to look one up.
struct Opener<'a, 'b> {
    open: &'a mut OpenForOther<'b>,
    #[cfg_attr(not(feature = "qcow2"), expect(dead_code, reason = "only images look files up"))]
    look_up: Option<&'a LookUp<'a>>,
}

fn add_files(
    disk: &DiskSpec,
    options: &DiskOptions,
    opener: &mut Opener<'_, '_>,
    files: &mut Vec<(PathBuf, File)>,
) -> Result<()> {
    let beside = DiskOptions { read_only: true, no_lock: true, ..DiskOptions::default() };
    let mut add = |path: &Path, options: &DiskOptions| -> Result<()> {
        files.push((path.to_owned(), (opener.open)(path, options)?));
        Ok(())
    };
    match disk {
        DiskSpec::File(path) => add(path, options),
        DiskSpec::Null { .. } | DiskSpec::Nbd(_) | DiskSpec::Rbd(_) => Ok(()),
        DiskSpec::Raw { over, .. } => add_files(over, options, opener, files),
        DiskSpec::Luks { key, header, over, .. } => {
            if let KeySpec::File(path) = key {
                add(path, &beside)?;
            }
            header.iter().try_for_each(|path| add(path, &beside))?;
            add_files(over, options, opener, files)
        }
        DiskSpec::Qcow2 { backing, over } => {
            add_files(over, options, opener, files)?;
            add_backing(None, backing, over, opener, files)
        }
        DiskSpec::Image { format, backing, over } => {
            add_files(over, options, opener, files)?;
            add_backing(Some(*format), backing, over, opener, files)
        }
    }
}

/// Opens the backing files of the image in a file, if it may have any.
#[cfg(feature = "qcow2")]
fn add_backing(
    format: Option<ImageFormat>,
    allowed: &BackingFiles,
    over: &DiskSpec,
    opener: &mut Opener<'_, '_>,
    files: &mut Vec<(PathBuf, File)>,
) -> Result<()> {
    // An image in another layer is read by the process that serves it.
    let Some(file) = over.whole_file().filter(|_| *allowed != BackingFiles::None) else {
        return Ok(());
    };
    let options =
        DiskOptions { read_only: true, no_lock: true, holds_image: true, ..DiskOptions::default() };
    let as_disk = |path: &Path, opened: &File| -> Result<DiskSource> {
        let table = FileTable::new(vec![(path.to_owned(), opened.try_clone()?)], true);
        let options = DiskOptions { files: Some(Arc::new(table)), ..options.clone() };
        Ok(DiskSource::file(path, &options)?)
    };
    let Some((path, opened)) = files.iter().rev().find(|(path, _)| path == file) else {
        return Ok(());
    };
    let source = as_disk(path, opened)?;
    if format.is_some() && !is_image(&source)? {
        return Ok(());
    }
    let image =
        ImageFile { source, file: Some(file), allowed, files: None, look_up: opener.look_up };
    open_layers(image, |path, within, by_image| {
        let opened =
            (opener.open)(path, &DiskOptions { within: within.cloned(), ..options.clone() })?;
        let named = within.map_or_else(|| path.to_owned(), |folder| folder.join(path));
        let source = as_disk(&named, &opened)?;
        // The other process looks for the name in the image, which may differ from the listed one.
        if named != by_image {
            files.push((by_image.to_owned(), opened.try_clone()?));
        }
        files.push((named, opened));
        Ok(source)
    })
    .map(drop)
}

#[cfg(not(feature = "qcow2"))]
fn add_backing(
    _: Option<ImageFormat>,
    _: &BackingFiles,
    _: &DiskSpec,
    _: &mut Opener<'_, '_>,
    _: &mut [(PathBuf, File)],
) -> Result<()> {
    Ok(())
}

#[cfg(test)]
#[cfg(feature = "qcow2")]
mod tests {
    use blockio::disk::open_for_other;

    use super::*;

    /// The header of a small qcow2 image over a raw file.
    fn image_over(backing: &str) -> Vec<u8> {
        let mut image = vec![0; 4 << 16];
        image[..4].copy_from_slice(b"QFI\xfb");
        image[104..108].copy_from_slice(&0xe279_2aca_u32.to_be_bytes());
        image[112..115].copy_from_slice(b"raw");
        for (at, number) in [
            (4, 3),
            (12, 512),
            (16, u32::try_from(backing.len()).unwrap()),
            (20, 16),
            (28, 1 << 20),
            (36, 1),
            (44, 3 << 16),
            (52, 1 << 16),
            (56, 1),
            (96, 4),
            (100, 104),
            (108, 3),
        ] {
            image[at..at + 4].copy_from_slice(&u32::to_be_bytes(number));
        }
        image[512..512 + backing.len()].copy_from_slice(backing.as_bytes());
        image
    }

    /// A file that is missing here is opened with the rights of the other process.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn every_file_of_a_disk_is_opened_and_keys_only_to_be_read() {
        let luks = "luks,key-file=/no/key,header=/no/header,over=/no/a";
        for (disk, expected) in [
            ("/no/a", vec![("/no/a", false)]),
            ("raw,offset=1M,over=/no/a", vec![("/no/a", false)]),
            (luks, vec![("/no/key", true), ("/no/header", true), ("/no/a", false)]),
            ("qcow2:/no/a", vec![("/no/a", false)]),
            ("null:1M", vec![]),
            ("nbd://host/x", vec![]),
            ("rbd:p/i,conf=/no/conf", vec![]),
        ] {
            let mut opened = Vec::new();
            let open = &mut |path: &Path, options: &DiskOptions| {
                assert_eq!(options.read_only, options.no_lock, "a lock is for writes");
                opened.push((path.to_owned(), options.read_only));
                Ok(File::open("/dev/null")?)
            };
            let spec = DiskSpec::parse(disk).unwrap();
            let files = open_files(&spec, &DiskOptions::default(), open).unwrap();
            let expected: Vec<_> = expected
                .into_iter()
                .map(|(path, is_read)| (PathBuf::from(path), is_read))
                .collect();
            assert_eq!(opened, expected, "{disk}");
            assert!(files.iter().map(|file| &file.0).eq(expected.iter().map(|file| &file.0)));
        }
    }

    /// The process that serves the disk looks for the name in the image.
    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_listed_backing_file_is_found_by_its_name_in_the_image() {
        let folder = tempfile::tempdir().unwrap();
        let images = folder.path().join("images");
        std::fs::create_dir(&images).unwrap();
        std::fs::write(images.join("base"), [0; 4096]).unwrap();
        let top = images.join("top");
        let named = format!("qcow2,backing=base,path={}", top.display());
        let disk = DiskSpec::parse(&named).unwrap();
        let options = DiskOptions { read_only: true, ..DiskOptions::default() };
        let open = &mut |path: &Path, options: &DiskOptions| Ok(open_for_other(path, options)?);
        for (name, others) in [("base", 0), ("../images/base", 1)] {
            std::fs::write(&top, image_over(name)).unwrap();
            let files = open_files(&disk, &options, open).unwrap();
            assert_eq!(files.len(), 2 + others, "{files:?}");
            let table = FileTable::new(files, true);
            let files = Some(Arc::new(table));
            let options = DiskOptions { files, ..options.clone() };
            crate::open(&named, &options).unwrap();
        }
    }
}
