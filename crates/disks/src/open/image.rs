//! Opens images, and the backing files that they name.
//!
//! An image must not be trusted about its neighbours: a stranger may have made it, or a user may
//! have written it into a raw disk. So no format is guessed from the content of a file, and no
//! backing file is opened unless the name of the disk allows it. Checks are made on open files,
//! because a name may mean another file a moment later.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use blockio::DiskSource;
use blockio::disk::Folder;
use blockio::file::FileTable;
use rustix::fs::{Mode, OFlags};

use super::image_file::{ImageFile, LookUp, ReadTime};
use crate::qcow2::{self, Layer};
use crate::spec::BackingFiles;

/// Returns true if a disk that is named without its format holds an image. A disk without an image
/// is refused if it is to be written to: its writer could make it an image with any file of this
/// machine as its backing file, which the next start would open.
pub(super) fn is_image(source: &DiskSource) -> Result<bool> {
    if qcow2::image_header(source)?.is_some() {
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
        "{} has no known format: with format detection such a disk must be read-only, because its \
         user could write the header of an image. If it is a raw disk, name it as one, as in \
         raw,over=PATH",
        source.chain_text()
    );
    Ok(false)
}

/// The most layers of an image, itself included.
const LAYERS_MAX: usize = 32;

/// Opens a qcow2 image with its backing files. `open_backing` opens one for reading: a path, which
/// may be relative to a folder that it must not leave.
pub(super) fn open_qcow2(
    image: ImageFile<'_>,
    mut open_backing: impl FnMut(&Path, Option<&Folder>) -> Result<DiskSource>,
    time: ReadTime,
) -> Result<DiskSource> {
    let layers = open_layers(image, |path, within, _| open_backing(path, within))?;
    Ok(match time {
        ReadTime::Now => qcow2::open(layers, false)?,
        ReadTime::FirstRequest => qcow2::open(layers, true)?,
        ReadTime::Locked => qcow2::open_late(layers)?,
    })
}

/// Opens the layers of a qcow2 image, from the top. `open_backing` also gets the path to which the
/// name in the image leads.
pub(super) fn open_layers(
    ImageFile { source, file, allowed, files, look_up }: ImageFile<'_>,
    mut open_backing: impl FnMut(&Path, Option<&Folder>, &Path) -> Result<DiskSource>,
) -> Result<Vec<Layer>> {
    let mut layers = vec![Layer::qcow2(source)?];
    let outer = file.map_or("the image".to_owned(), |path| path.display().to_string());
    let mut finder = BackingSearch::new(file, allowed, layers[0].source());
    (finder.files, finder.look_up) = (files, look_up);
    let mut image = file.map(Path::to_owned);
    while let Some(named) = layers.last().and_then(Layer::backing).cloned() {
        let of = image.as_deref().map_or("the image".to_owned(), |path| path.display().to_string());
        let what = || format!("cannot open {}, the backing file of {of}", named.name);
        ensure!(
            layers.len() < LAYERS_MAX,
            "{outer} has more than {LAYERS_MAX} layers: itself and its backing files; merge some \
             with `qemu-img commit` or `qemu-img rebase`"
        );
        let BackingFile { path, file, within } =
            finder.find(&named.name, image.as_deref()).with_context(what)?;
        let source = open_backing(&file, within.as_ref(), &path).with_context(what)?;
        let layer = match named.format.as_deref() {
            Some("qcow2") => Layer::qcow2(source).with_context(what)?,
            Some("raw" | "file" | "host_device") => Layer::raw(source),
            Some(format) => bail!(
                "{}: its format {format} is not supported; convert it with `qemu-img convert -O \
                 qcow2`, and name the new file with `qemu-img rebase -u`",
                what()
            ),
            None => bail!(
                "{}: {of} does not state the format of its backing file; add it with `qemu-img \
                 rebase -u -b {} -F qcow2 {of}` (or -F raw)",
                what(),
                named.name
            ),
        };
        layers.push(layer);
        image = Some(path);
    }
    Ok(layers)
}

/// A backing file.
#[derive(Debug)]
struct BackingFile {
    /// The path that the names lead to. The names in this file are relative to its folder, as in
    /// QEMU.
    path: PathBuf,
    /// The path to open, relative to `within` if there is such a folder.
    file: PathBuf,
    within: Option<Folder>,
}

/// Device and inode of a file.
type Id = (u64, u64);

fn id_of(file: &File) -> Result<Id> {
    let data = file.metadata()?;
    Ok((data.dev(), data.ino()))
}

/// The search for the backing files of one image, from the top.
struct BackingSearch<'a> {
    image: Option<&'a Path>,
    allowed: &'a BackingFiles,
    /// True if the image lies in a regular file.
    is_in_file: bool,
    /// The layers found so far.
    seen: Vec<(Id, PathBuf)>,
    /// Files that are open already. The program that opened them has searched for them.
    files: Option<&'a FileTable>,
    look_up: Option<&'a LookUp<'a>>,
}

impl<'a> BackingSearch<'a> {
    fn new(image: Option<&'a Path>, allowed: &'a BackingFiles, top: &DiskSource) -> Self {
        let is_in_file = top.chain().last().is_some_and(|link| link.kind == "file");
        let data = image.and_then(|path| Some((path.metadata().ok()?, path)));
        let seen = data.map(|(data, path)| ((data.dev(), data.ino()), path.to_owned()));
        let seen = seen.into_iter().collect();
        Self { image, allowed, is_in_file, seen, files: None, look_up: None }
    }

    /// Finds the file that an image at `image` names.
    fn find(&mut self, name: &str, image: Option<&Path>) -> Result<BackingFile> {
        let name = name.strip_prefix("file:").unwrap_or(name);
        let is_elsewhere = name.split_once('/').map_or(name, |(start, _)| start).contains(':');
        ensure!(
            !is_elsewhere,
            "only files can be backing files; copy its data into a file with `qemu-img convert`, \
             and name that file with `qemu-img rebase -u`"
        );
        let path = match image.and_then(Path::parent) {
            Some(folder) => folder.join(name),
            None if name.starts_with('/') => PathBuf::from(name),
            None => {
                bail!("its name is relative, and the image is not a file; give an absolute path")
            }
        };
        let passed = self.files.and_then(|files| files.get(&path));
        let (found, place) = match (self.allowed, passed) {
            (BackingFiles::None, _) => bail!(
                "the name of the disk allows no backing file; if the image is trusted and this is \
                 the right file, add it to the name of the disk: {}. backing=beside allows all \
                 files in the folder of the image",
                self.key(&path, &[])
            ),
            (_, Some(file)) => (BackingFile { file: path.clone(), path, within: None }, file?),
            (BackingFiles::Anywhere, None) => self.find_anywhere(path)?,
            (BackingFiles::Beside, None) => self.find_beside(path)?,
            (BackingFiles::Named(names), None) => self.find_listed(path, names)?,
        };
        self.check_loop(&found, id_of(&place)?)?;
        Ok(found)
    }

    fn find_anywhere(&self, path: PathBuf) -> Result<(BackingFile, File)> {
        let place = self.place_of(&path)?;
        Ok((BackingFile { file: path.clone(), path, within: None }, place))
    }

    fn find_beside(&self, path: PathBuf) -> Result<(BackingFile, File)> {
        // The files beside a device are further disks of the machine.
        let folder = self.folder().filter(|_| self.is_in_file).with_context(|| {
            format!(
                "the image is not a regular file, so backing=beside allows no file; allow this \
                 file with {}",
                self.key(&path, &[])
            )
        })?;
        let outside = || {
            format!(
                "it is outside the folder of the image, or a link leads out of that folder; if it \
                 is the right file, allow it with {}",
                self.key(&path, &[])
            )
        };
        let name = self.within(&path).with_context(outside)?;
        let folder = Folder::open(folder)
            .with_context(|| format!("cannot open the folder {}", folder.display()))?;
        let place = match (self.look_up, folder.find(&name)) {
            (Some(look_up), _) => look_up(&path)?,
            (None, Err(error)) if error.raw_os_error() == Some(libc::EXDEV) => bail!(outside()),
            (None, found) => found.with_context(|| absent(&path))?,
        };
        ensure!(
            place.metadata()?.is_file(),
            "it is not a regular file; if it is the right file, allow it with {}",
            self.key(&path, &[])
        );
        Ok((BackingFile { path, file: name, within: Some(folder) }, place))
    }

    /// Finds the listed file that `path` leads to. The file is opened by its name in the list: the
    /// image only selects it.
    fn find_listed(&self, path: PathBuf, names: &[PathBuf]) -> Result<(BackingFile, File)> {
        let wanted = id_of(&self.place_of(&path)?)?;
        for name in names {
            let listed = match (name.is_absolute(), self.folder()) {
                (true, _) => self.place_of(name).map(|place| (None, place)),
                (false, None) => bail!(
                    "the image is not a file; list absolute paths of backing files instead of {}",
                    name.display()
                ),
                (false, Some(folder)) => {
                    Folder::open(folder).map_err(Into::into).and_then(|folder| {
                        let place = match self.look_up {
                            Some(look_up) => look_up(&folder.join(name))?,
                            None => folder.find(name)?,
                        };
                        Ok((Some(folder), place))
                    })
                }
            };
            // A listed file that does not exist cannot be the one that the image names.
            let Ok((within, place)) = listed else { continue };
            if id_of(&place)? == wanted {
                return Ok((BackingFile { path, file: name.clone(), within }, place));
            }
        }
        bail!(
            "it is not among the backing files that the name of the disk lists; if it is the right \
             file, add it: {}",
            self.key(&path, names)
        )
    }

    fn place_of(&self, path: &Path) -> Result<File> {
        self.look_up.map_or_else(|| place_of(path), |look_up| look_up(path))
    }

    /// Refuses a file that is one of the layers above it.
    fn check_loop(&mut self, found: &BackingFile, id: Id) -> Result<()> {
        if let Some((_, above)) = self.seen.iter().find(|(seen, _)| *seen == id) {
            bail!(
                "its backing files form a loop through {}; correct it with `qemu-img rebase -u`",
                above.display()
            );
        }
        self.seen.push((id, found.path.clone()));
        Ok(())
    }

    /// The folder of the image.
    fn folder(&self) -> Option<&'a Path> {
        self.image.and_then(Path::parent)
    }

    /// Makes a path relative to the folder of the image, if it begins there.
    fn within(&self, path: &Path) -> Option<PathBuf> {
        let folder = self.folder()?;
        if let Ok(name) = path.strip_prefix(folder) {
            return Some(name.to_owned());
        }
        let named = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        path.strip_prefix(named.canonicalize().ok()?).ok().map(Path::to_owned)
    }

    /// Formats the key that allows this file beside the listed ones.
    fn key(&self, path: &Path, names: &[PathBuf]) -> String {
        let name = self.within(path).filter(|name| !name.starts_with(".."));
        let name = name.unwrap_or_else(|| path.to_owned());
        let names = names.iter().chain([&name]).map(|name| name.display().to_string());
        format!("backing={}", names.collect::<Vec<_>>().join(":").replace(',', ",,"))
    }
}

fn absent(path: &Path) -> String {
    format!("{} does not exist; correct the name with `qemu-img rebase -u`", path.display())
}

/// Opens the file at a path as a place only (`O_PATH`).
fn place_of(path: &Path) -> Result<File> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let place = rustix::fs::open(path, flags, Mode::empty());
    place.map(File::from).with_context(|| absent(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(image: Option<&Path>, allowed: &BackingFiles, name: &str) -> Result<PathBuf, String> {
        let is_in_file = image.is_some_and(Path::is_file);
        let mut finder = BackingSearch {
            image,
            allowed,
            is_in_file,
            seen: Vec::new(),
            files: None,
            look_up: None,
        };
        let found = finder.find(name, image).map_err(|error| format!("{error:#}"))?;
        let file = match &found.within {
            Some(folder) => folder.join(&found.file),
            None => found.file,
        };
        file.canonicalize().map_err(|error| error.to_string())
    }

    #[test]
    fn a_backing_file_is_found_where_the_name_of_the_disk_allows_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let inner = root.join("images/old");
        std::fs::create_dir_all(&inner).unwrap();
        for path in ["secret", "images/base", "images/old/base", "images/disk.qcow2"] {
            std::fs::write(root.join(path), "").unwrap();
        }
        std::os::unix::fs::symlink(root.join("secret"), root.join("images/link")).unwrap();
        let image = root.join("images/disk.qcow2");
        let beside = |name: &str| find(Some(&image), &BackingFiles::Beside, name);
        assert_eq!(beside("base").unwrap(), root.join("images/base"));
        assert_eq!(beside("old/base").unwrap(), inner.join("base"));
        assert_eq!(beside("file:base").unwrap(), root.join("images/base"));
        let absolute = root.join("images/base").display().to_string();
        assert_eq!(beside(&absolute).unwrap(), root.join("images/base"));
        let secret = root.join("secret").display().to_string();
        for name in ["../secret", "link", &secret] {
            let error = beside(name).unwrap_err();
            assert!(error.contains("is outside the folder"), "{name}: {error}");
            let allowed = find(Some(&image), &BackingFiles::Anywhere, name);
            assert_eq!(allowed.unwrap(), root.join("secret"));
            let none = find(Some(&image), &BackingFiles::None, name).unwrap_err();
            assert!(none.contains("add it to the name of the disk: backing="), "{none}");
        }
        for (name, expected) in [
            ("nbd://host/x", "only files can be backing files; copy its data into a file"),
            ("json:{}", "with `qemu-img convert`, and name that file with `qemu-img rebase -u`"),
            ("absent", "qemu-img rebase -u"),
        ] {
            assert!(beside(name).unwrap_err().contains(expected), "{name}");
        }
        let zero = find(Some(Path::new("/dev/null")), &BackingFiles::Beside, "zero").unwrap_err();
        assert!(zero.contains("the image is not a regular file"), "{zero}");
        assert!(beside("old").unwrap_err().contains("it is not a regular file"));
        let anywhere = &BackingFiles::Anywhere;
        assert!(find(None, anywhere, "base").unwrap_err().contains("absolute"));
        assert!(find(None, &BackingFiles::Beside, &secret).is_err());
    }

    /// The caller opens files for the daemon, and does not widen the name of the disk.
    #[test]
    fn a_passed_file_is_a_backing_file_only_where_the_disk_may_have_one() {
        let folder = tempfile::tempdir().unwrap();
        let (image, base) = (folder.path().join("disk.qcow2"), folder.path().join("base"));
        [&image, &base].iter().for_each(|path| std::fs::write(path, "").unwrap());
        let named = BackingFiles::Named(vec!["base".into()]);
        let all = [BackingFiles::None, BackingFiles::Beside, BackingFiles::Anywhere, named];
        for (allowed, is_found) in all.iter().zip([false, true, true, true]) {
            let passed = vec![(base.clone(), File::open(&base).unwrap())];
            let files = FileTable::new(passed, true);
            let files = Some(&files);
            let image = Some(&*image);
            let (is_in_file, seen) = (true, Vec::new());
            let mut finder =
                BackingSearch { image, allowed, is_in_file, seen, files, look_up: None };
            assert_eq!(finder.find("base", image).is_ok(), is_found, "{allowed:?}");
        }
    }

    /// A loop need not lead to the topmost image.
    #[test]
    fn a_file_that_comes_again_is_a_loop() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        ["top", "middle", "base"].iter().for_each(|name| std::fs::write(path(name), "").unwrap());
        std::os::unix::fs::symlink("middle", path("link")).unwrap();
        let (image, allowed) = (path("top"), BackingFiles::Beside);
        let image = Some(&*image);
        let mut finder = BackingSearch {
            image,
            allowed: &allowed,
            is_in_file: true,
            seen: Vec::new(),
            files: None,
            look_up: None,
        };
        finder.find("middle", image).unwrap();
        finder.find("base", image).unwrap();
        let error = finder.find("link", image).unwrap_err().to_string();
        assert!(error.contains("form a loop through") && error.contains("middle"), "{error}");
    }

    /// The image selects one of the listed files, and nothing else.
    #[test]
    fn only_listed_backing_files_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("images")).unwrap();
        for path in ["secret", "images/base", "images/other", "images/disk.qcow2"] {
            std::fs::write(root.join(path), "").unwrap();
        }
        std::os::unix::fs::symlink(root.join("secret"), root.join("images/link")).unwrap();
        std::os::unix::fs::symlink("base", root.join("images/alias")).unwrap();
        let image = root.join("images/disk.qcow2");
        let secret = root.join("secret");
        let named = |names: &[&Path]| {
            BackingFiles::Named(names.iter().map(|name| (*name).to_owned()).collect())
        };
        let list = named(&[Path::new("gone"), Path::new("base"), Path::new("link")]);
        for name in ["base", "alias", "../images/base", &root.join("images/base").to_string_lossy()]
        {
            assert_eq!(find(Some(&image), &list, name).unwrap(), root.join("images/base"));
        }
        // A relative name does not lead out of the folder, even if it is listed.
        for name in ["other", "link", "../secret"] {
            let error = find(Some(&image), &list, name).unwrap_err();
            assert!(error.contains("is not among the backing files"), "{name}: {error}");
            assert!(error.contains("add it: backing=gone:base:link:"), "{name}: {error}");
        }
        let list = named(&[&secret]);
        assert_eq!(find(Some(&image), &list, "link").unwrap(), secret);
        assert_eq!(find(None, &list, &secret.to_string_lossy()).unwrap(), secret);
        let relative = named(&[Path::new("secret")]);
        let error = find(None, &relative, &secret.to_string_lossy()).unwrap_err();
        assert!(error.contains("absolute paths of backing files instead of secret"), "{error}");
    }
}
