//! A hostile NBD server. For any bytes from it, requests end or wait, memory beside their buffers
//! stays as it is, and nothing is left when the disk has gone.
//!
//! The input holds all bytes of the server. The cookies of requests are predictable: they count up.

#![no_main]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::OnceLock;
use std::thread::JoinHandle;

use blockio::disk::{Disk, DiskState};
use blockio::{
    Activity, BufferMemory, DiskOptions, DiskSource, EngineConfig, IoThread, IoThreadConfig, Wait,
};
use disks::nbd::{NbdAddress, NbdOptions};
use libfuzzer_sys::fuzz_target;
use ringhaul_fuzz::Input;

/// Reads of this size are received straight into their buffers; smaller ones are copied.
const PART_BYTES: usize = 32 << 10;
const SMALL_BYTES: usize = 4096;
const GUARD: u8 = 0xa5;

/// The socket of the server.
fn listener() -> &'static (tempfile::TempDir, UnixListener, PathBuf) {
    static LISTENER: OnceLock<(tempfile::TempDir, UnixListener, PathBuf)> = OnceLock::new();
    LISTENER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("nbd");
        let listener = UnixListener::bind(&path).expect("a socket");
        (folder, listener, path)
    })
}

/// Sends all of this to the next client, and nothing else.
fn serve(sent: Vec<u8>) -> JoinHandle<()> {
    let listener = &listener().1;
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().expect("a client");
        // The client may not read the rest, or may close the connection.
        let _ = client.write_all(&sent);
        let _ = client.shutdown(Shutdown::Write);
        let _ = client.read_to_end(&mut Vec::new());
    })
}

/// The server's bytes before its first reply to a request.
fn handshake(kind: u8) -> Vec<u8> {
    let reply = |option: u32, kind: u32, data: &[u8]| {
        let len = u32::try_from(data.len()).expect("a short reply");
        let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
        let numbers = [option, kind, len].map(u32::to_be_bytes).concat();
        [&magic[..], &numbers, data].concat()
    };
    let unsupported = 1 << 31 | 1;
    let mut sent = b"NBDMAGICIHAVEOPT\0\x03".to_vec();
    let framing = kind % 3;
    sent.extend(reply(11, if framing == 2 { 1 } else { unsupported }, &[]));
    if framing < 2 {
        sent.extend(reply(8, if framing == 1 { 1 } else { unsupported }, &[]));
    }
    if framing > 0 {
        sent.extend(reply(10, 4, b"\0\0\0\x01base:allocation"));
        sent.extend(reply(10, 1, &[]));
    }
    let flags = 0b1001_0110_1101u16.to_be_bytes();
    sent.extend(reply(7, 3, &[&[0, 0][..], &(1u64 << 20).to_be_bytes(), &flags].concat()));
    sent.extend(reply(7, 1, &[]));
    sent
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let kind = input.u8();
    let mut sent = if kind & 1 == 1 { handshake(kind >> 1) } else { Vec::new() };
    sent.extend(input.bytes(usize::MAX));
    let server = serve(sent);
    let nbd = NbdOptions {
        address: NbdAddress::Unix(listener().2.clone()),
        export: "disk".to_owned(),
        connections: 1,
        deadline: None,
        distrust: kind & 0x80 != 0,
        tls: None,
    };
    if let Ok(source) = disks::nbd::open(nbd, &DiskOptions::default()) {
        drive(source);
    }
    server.join().expect("the server does not panic");
});

fn drive(source: DiskSource) {
    let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
    let thread = IoThread::new(&config).expect("an IoThread");
    let disk = Rc::new(source.attach(thread.io()));
    let memory = Rc::new(BufferMemory::new(3 * PART_BYTES, PART_BYTES));
    memory.buffers(3 * PART_BYTES).copy_from(0, &[GUARD; 3 * PART_BYTES]);
    for number in 0..5 {
        let (disk, memory) = (Rc::clone(&disk), Rc::clone(&memory));
        thread.io().spawn(async move { request(&disk, &memory, number).await });
    }
    let mut given_up = false;
    // The connection is one more task while the disk is open.
    while thread.io().tasks() > 1 && !given_up {
        let activity = thread.turn(Wait::Never).expect("a turn");
        given_up = matches!(source.state(), DiskState::Away(_));
        if activity == Activity::Idle {
            std::thread::yield_now();
        }
    }
    source.abandon();
    drop((disk, source));
    while thread.io().tasks() > 0 {
        thread.turn(Wait::Never).expect("a turn");
    }
    assert_eq!(thread.io().ops(), 0, "an op is left");
    let all = memory.buffers(3 * PART_BYTES).to_vec();
    assert!(all[PART_BYTES..2 * PART_BYTES].iter().all(|byte| *byte == GUARD), "it overran");
}

async fn request(disk: &Disk, memory: &BufferMemory, number: u32) {
    let mut part = memory.buffers(3 * PART_BYTES);
    // The part between the first and the last is never read or written.
    let _ = match number {
        0 => {
            part.truncate(PART_BYTES);
            disk.read(0, part).await.is_ok()
        }
        1 => {
            part.advance(2 * PART_BYTES);
            part.truncate(SMALL_BYTES);
            disk.read(8192, part).await.is_ok()
        }
        2 => {
            part.advance(2 * PART_BYTES);
            disk.write(65_536, part, true).await.is_ok()
        }
        3 => disk.flush().await.is_ok(),
        _ => disk.block_status(0, 1 << 20).await.is_ok(),
    };
}
