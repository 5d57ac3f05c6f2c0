//! Files that a client opens with its own rights, and passes beside a request.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use blockio::DiskOptions;
use blockio::disk::open_for_other;
use disks::open::passed_files::open_files;
use disks::spec::BackingFiles;
use rustix::net::SendFlags;
use rustix::process::geteuid;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::trusted_path;
use crate::process::fd_messages::{self, FDS_MAX};
use crate::spec::{DiskSpec, ExportSettings, ExportSpec, UnitPlace, UnitSpec};

/// A file that is passed, in the order of the descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Descriptor {
    /// Its path, as the disk names it. A backing file is named in the folder of its image.
    pub path: PathBuf,
    /// The target of the unit that has the disk; 0 if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<u8>,
    /// The unit. `None`: the disk of a virtio-blk device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lun: Option<u16>,
}

impl Descriptor {
    /// The place of the disk.
    pub(super) fn place(&self) -> Option<UnitPlace> {
        self.lun.map(|lun| UnitPlace { target: self.target.unwrap_or(0), lun })
    }
}

/// Files of a request, opened by this program.
#[derive(Debug, Default)]
pub struct OpenedFiles {
    /// The files, each with its use.
    pub files: Vec<(Descriptor, File)>,
    /// The reason why some are not among them: the daemon may open these itself.
    pub left_out: Option<anyhow::Error>,
}

impl OpenedFiles {
    /// Opens the files that the disks of an export name. For a daemon of another user
    /// (`is_foreign`), links of third users are not followed.
    pub fn for_export(spec: &ExportSpec, is_foreign: bool) -> Self {
        let mut all = Self::default();
        for ((disk, settings), place) in spec.disks().iter().zip(spec.device.places()) {
            all.add(place, disk, settings, is_foreign);
        }
        all
    }

    /// Opens the files that the disk of a unit names, for an export with these settings, like
    /// [`for_export`](Self::for_export).
    pub fn for_unit(unit: &UnitSpec, export: &ExportSettings, is_foreign: bool) -> Self {
        let mut all = Self::default();
        let (disk, settings) = unit.disk(export);
        all.add(Some(unit.place()), &disk, &settings, is_foreign);
        all
    }

    fn add(
        &mut self,
        place: Option<UnitPlace>,
        disk: &DiskSpec,
        settings: &ExportSettings,
        is_foreign: bool,
    ) {
        let options = DiskOptions {
            read_only: settings.read_only,
            no_lock: settings.opens_unlocked(),
            ..DiskOptions::default()
        };
        let open = &mut |path: &Path, options: &DiskOptions| match is_foreign {
            true => trusted_path::open(path, options),
            false => Ok(open_for_other(path, options)?),
        };
        let mut disk = disk.clone();
        if is_foreign && geteuid().is_root() && drop_backing_files(&mut disk) {
            self.left_out = Some(anyhow!(
                "with backing=anywhere, root passes no file that the header of an image names"
            ));
        }
        match open_files(&disk, &options, open) {
            Ok(files) => {
                let (target, lun) = (place.map(|place| place.target), place.map(|place| place.lun));
                let files = files.into_iter();
                self.files
                    .extend(files.map(|(path, file)| (Descriptor { path, target, lun }, file)));
                // The daemon opens the rest by itself.
                self.files.truncate(FDS_MAX);
            }
            Err(error) => self.left_out = Some(error),
        }
    }
}

/// Leaves backing files that the headers of images choose to the daemon. Returns true if there may
/// be some.
fn drop_backing_files(disk: &mut DiskSpec) -> bool {
    match disk {
        DiskSpec::File(_) | DiskSpec::Null { .. } | DiskSpec::Nbd(_) | DiskSpec::Rbd(_) => false,
        DiskSpec::Raw { over, .. } | DiskSpec::Luks { over, .. } => drop_backing_files(over),
        DiskSpec::Qcow2 { backing, over } | DiskSpec::Image { backing, over, .. } => {
            let is_left = *backing == BackingFiles::Anywhere;
            if is_left {
                *backing = BackingFiles::None;
            }
            drop_backing_files(over) || is_left
        }
    }
}

/// Sends a line with descriptors.
///
/// # Errors
///
/// When the peer has hung up.
pub fn send_line(stream: &UnixStream, line: &[u8], fds: &[impl AsFd]) -> std::io::Result<usize> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    fd_messages::send(stream, line, &fds, SendFlags::empty())
}

/// Gives each received descriptor its name, and checks that it is the file of that name.
///
/// # Errors
///
/// When their numbers differ, or a path leads to another file.
pub(super) fn named(names: Vec<Descriptor>, fds: Vec<OwnedFd>) -> Result<Vec<(Descriptor, File)>> {
    ensure!(
        names.len() == fds.len(),
        "{} descriptors came with the request, and `descriptors` names {}",
        fds.len(),
        names.len()
    );
    let named = names.into_iter().zip(fds).map(|(name, fd)| {
        let file = File::from(fd);
        check_path(&name.path, &file)?;
        Ok((name, file))
    });
    named.collect()
}

/// Checks that a path leads to this file. The path is the name of the file from then on: in locks,
/// in the log and for a later process. Where this user cannot follow the path, the name that the
/// kernel has for the file must be the same.
fn check_path(path: &Path, file: &File) -> Result<()> {
    let shown = path.display();
    let what = || format!("cannot use the descriptor that was passed for {shown}");
    ensure!(path.is_absolute(), "{}: its path is not absolute", what());
    let own = file.metadata().with_context(what)?;
    let is_same = match std::fs::metadata(path) {
        Ok(found) => (found.dev(), found.ino()) == (own.dev(), own.ino()),
        Err(_) => {
            let link = format!("/proc/self/fd/{}", file.as_raw_fd());
            std::fs::read_link(link).with_context(what)? == path
        }
    };
    ensure!(
        is_same,
        "{}: it is another file than the one at this path; pass the file that the path names, by a \
         path without links",
        what()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header of the inner image may name any file of root, too.
    #[test]
    fn backing_files_are_left_out_in_each_layer() {
        let image = |backing: &str, over: serde_json::Value| {
            let image = serde_json::json!({ "backing": backing, "over": over });
            serde_json::json!({ "qcow2": image })
        };
        let file = || serde_json::json!({ "file": "/disk" });
        let none = image("none", image("none", file()));
        let both = ["anywhere", "none"];
        for (outer, inner) in both.iter().flat_map(|outer| both.map(|inner| (*outer, inner))) {
            let disk = image(outer, image(inner, file()));
            let mut disk: DiskSpec = serde_json::from_value(disk).unwrap();
            let is_left = drop_backing_files(&mut disk);
            assert_eq!(is_left, [outer, inner].contains(&"anywhere"), "{outer}, {inner}");
            assert_eq!(serde_json::to_value(&disk).unwrap(), none, "{outer}, {inner}");
        }
    }

    #[test]
    fn a_descriptor_is_the_file_that_its_path_names() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
        std::fs::write(&one, "").unwrap();
        std::fs::write(&other, "").unwrap();
        let fd = || OwnedFd::from(File::open(&one).unwrap());
        let name = |path: &Path| Descriptor { path: path.to_owned(), target: None, lun: None };
        assert!(named(vec![name(&one)], vec![fd()]).is_ok());
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&one, &link).unwrap();
        assert!(named(vec![name(&link)], vec![fd()]).is_ok());
        for path in [&other, Path::new("one"), &folder.path().join("absent")] {
            let error = named(vec![name(path)], vec![fd()]).unwrap_err();
            assert!(error.to_string().contains("cannot use the descriptor"), "{error}");
        }
        // Files of two file systems may have the same number.
        let roots = ["/proc", "/sys"].map(Path::new);
        let inodes = roots.map(|root| root.metadata().map(|found| found.ino()).unwrap_or(0));
        if inodes == [1, 1] {
            assert!(
                named(vec![name(roots[0])], vec![File::open(roots[0]).unwrap().into()]).is_ok()
            );
            assert!(
                named(vec![name(roots[0])], vec![File::open(roots[1]).unwrap().into()]).is_err()
            );
        }
        for fds in [vec![], vec![fd(), fd()]] {
            assert!(named(vec![name(&one)], fds).is_err());
        }
    }
}
