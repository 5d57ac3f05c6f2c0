//! The files, folders and servers that a disk needs, for a sandbox around the program that opens
//! it.

use std::path::{Path, PathBuf};

use super::backing::BackingFiles;
use super::data::{DiskSpec, KeySpec};
use super::nbd::NbdSpec;

/// A place that a disk needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskPlace {
    /// A file or device with the data of the disk.
    Data(PathBuf),
    /// A file that is read.
    Read(PathBuf),
    /// A folder with files that are read, at any depth.
    ReadFolder(PathBuf),
    /// All files of the machine, which are read.
    ReadAnywhere,
    /// A server on this machine, at its socket.
    LocalServer(PathBuf),
    /// A server at a port of another machine, which is found by its name or address.
    Server(u16),
    /// A Ceph cluster with the files that name it and its key.
    Ceph(Vec<PathBuf>),
}

impl DiskSpec {
    /// The places that the disk needs, from its top layer down.
    pub fn places(&self) -> Vec<DiskPlace> {
        let mut places = Vec::new();
        self.add_places(&mut places);
        places
    }

    fn add_places(&self, places: &mut Vec<DiskPlace>) {
        match self {
            Self::File(path) => places.push(DiskPlace::Data(path.clone())),
            Self::Null { .. } => {}
            Self::Nbd(nbd) => add_server(nbd, places),
            Self::Rbd(image) => {
                let files = image.conf.iter().chain(&image.keyring).cloned().collect();
                places.push(DiskPlace::Ceph(files));
            }
            Self::Raw { over, .. } => over.add_places(places),
            Self::Luks { key, header, over, .. } => {
                if let KeySpec::File(path) = key {
                    places.push(DiskPlace::Read(path.clone()));
                }
                places.extend(header.iter().cloned().map(DiskPlace::Read));
                over.add_places(places);
            }
            Self::Qcow2 { backing, over } | Self::Image { backing, over, .. } => {
                let image = over.whole_file().unwrap_or(Path::new(""));
                let folder = folder_of(image);
                match backing {
                    BackingFiles::None => {}
                    BackingFiles::Beside => places.push(DiskPlace::ReadFolder(folder.clone())),
                    BackingFiles::Anywhere => places.push(DiskPlace::ReadAnywhere),
                    BackingFiles::Named(names) => {
                        let named = names.iter().map(|name| folder.join(name));
                        places.extend(named.map(DiskPlace::Read));
                    }
                }
                over.add_places(places);
            }
        }
    }
}

fn add_server(nbd: &NbdSpec, places: &mut Vec<DiskPlace>) {
    places.push(match &nbd.socket {
        Some(path) => DiskPlace::LocalServer(path.clone()),
        None => DiskPlace::Server(nbd.port()),
    });
    places.extend(nbd.tls_certificates.iter().cloned().map(DiskPlace::ReadFolder));
}

/// The folder of an image. Names of backing files begin in the folder of the file itself, not in
/// that of a link to it.
fn folder_of(image: &Path) -> PathBuf {
    let image = image.canonicalize().unwrap_or(image.to_owned());
    match image.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => ".".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_and_server_of_a_disk_is_a_place() {
        use DiskPlace::{Ceph, Data, LocalServer, Read, ReadAnywhere, ReadFolder, Server};
        for (disk, expected) in [
            ("null:1M", vec![]),
            ("raw,offset=1M,over=/no/a", vec![Data("/no/a".into())]),
            (
                "luks,key-file=/no/key,header=/no/header,over=/no/a",
                vec![Read("/no/key".into()), Read("/no/header".into()), Data("/no/a".into())],
            ),
            ("qcow2:/no/a", vec![Data("/no/a".into())]),
            (
                "qcow2,backing=beside,path=/no/a",
                vec![ReadFolder("/no".into()), Data("/no/a".into())],
            ),
            (
                "image,format=auto,backing=b:/c,path=/no/a",
                vec![Read("/no/b".into()), Read("/c".into()), Data("/no/a".into())],
            ),
            ("qcow2,backing=anywhere,path=/no/a", vec![ReadAnywhere, Data("/no/a".into())]),
            ("nbd://host/x", vec![Server(10809)]),
            ("nbd://host:7/x", vec![Server(7)]),
            ("nbd+unix:///x?socket=/no/s", vec![LocalServer("/no/s".into())]),
            (
                "nbd,host=h,tls=on,tls-certificates=/no/tls",
                vec![Server(10809), ReadFolder("/no/tls".into())],
            ),
            (
                "rbd:p/i,conf=/no/conf,keyring=/no/ring",
                vec![Ceph(vec!["/no/conf".into(), "/no/ring".into()])],
            ),
        ] {
            assert_eq!(DiskSpec::parse(disk).unwrap().places(), expected, "{disk}");
        }
    }
}
