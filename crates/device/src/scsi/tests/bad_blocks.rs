//! A disk with an unreadable block.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Instant;

use disks::nbd::{NbdAddress, NbdOptions};

use super::*;
use crate::testing::TIMEOUT;

/// Not in the first piece of a long VERIFY.
const BAD: u32 = 645;

/// An NBD server with a disk that has an unreadable block. `None` if the server, or its filter for
/// such blocks, is not installed.
struct Server(Child);

impl Server {
    fn start(folder: &Path) -> Option<Self> {
        let (map, socket) = (folder.join("map"), folder.join("socket"));
        let bad = u64::from(BAD) * 512;
        let rest = (BLOCKS - u64::from(BAD) - 1) * 512;
        let lines = format!("0 +\n0 {bad:#x} +\n{bad:#x} 0x200 -\n{:#x} {rest:#x} +\n", bad + 512);
        std::fs::write(&map, lines).unwrap();
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--filter=ddrescue", "--unix"]).arg(&socket);
        command.args(["pattern", &(BLOCKS * 512).to_string()]);
        command.arg(format!("ddrescue-mapfile={}", map.display()));
        let mut server = Self(command.spawn().ok()?);
        let start = Instant::now();
        // The socket has a name before the server listens on it.
        while UnixStream::connect(&socket).is_err() {
            if server.0.try_wait().unwrap().is_some() {
                return None;
            }
            assert!(start.elapsed() < TIMEOUT, "the server does not start");
            std::thread::yield_now();
        }
        Some(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An initiator of that disk.
fn initiator(folder: &Path) -> Option<(Initiator, Server)> {
    let server = Server::start(folder)?;
    let nbd = NbdOptions {
        address: NbdAddress::Unix(folder.join("socket")),
        export: String::new(),
        connections: 1,
        deadline: None,
        distrust: false,
        tls: None,
    };
    let options = DiskOptions { read_only: true, ..DiskOptions::default() };
    let source = disks::nbd::open(nbd, &options).unwrap();
    let scene = Scene::new();
    let device = Device::scsi(ScsiOptions::default(), scene.events.clone());
    Initiator::scsi(&device).add_unit(UNIT, source, self::options()).unwrap();
    device.set_features(split_features(&device)).unwrap();
    let queue = scene.start_queue_of(&device, 2);
    let disk = Arc::new(NamedTempFile::new_in(folder).unwrap());
    let mut initiator = Initiator { scene, device, disk, queue: Some(queue), used: None };
    initiator.run(&[0; 6], &[], 0);
    Some((initiator, server))
}

/// The content of a block on the server: its address in bytes, in each eight bytes.
fn content(block: u32) -> Vec<u8> {
    let bytes = (0..64).map(|at| u64::from(block) * 512 + at * 8);
    bytes.flat_map(u64::to_be_bytes).collect()
}

#[test]
fn the_block_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let Some((mut initiator, _server)) = initiator(folder.path()) else { return };
    let is_bad = |initiator: &Initiator| {
        let sense = initiator.raw_sense();
        assert_eq!((sense[0], sense[2], sense[12]), (0xf0, 3, 0x11));
        assert_eq!(sense[3..7], BAD.to_be_bytes());
    };
    for first in [BAD - 133, BAD - 33, BAD, BAD - 127] {
        initiator.run(&cdb10(0x2f, 0, first, 136), &[], 0);
        is_bad(&initiator);
        let room = 136 * 512;
        let answer = initiator.run(&cdb10(0x28, 0, first, 136), &[], room);
        is_bad(&initiator);
        let good = (BAD - first) * 512;
        assert_eq!(answer.residual, room - good);
        let expected: Vec<u8> = (first..BAD).flat_map(content).collect();
        assert!(answer.data == expected, "all blocks before are there");
    }
    initiator.run(&cdb16(0x8f, 0, 0, 2048), &[], 0);
    is_bad(&initiator);
    let out = content(BAD - 1);
    let answer = initiator.run(&cdb10(0x2f, 2, BAD - 1, 1), &out, 0);
    assert_eq!(answer.status, 0);
    initiator.good(&cdb10(0x28, 0, BAD + 1, 256), &[], 256 * 512);
}
