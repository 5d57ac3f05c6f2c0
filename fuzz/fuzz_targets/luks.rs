//! Headers of encrypted disks with correct checksums.
//!
//! The input is a header of version 1, or the JSON of a header of version 2. For any input, opening
//! the disk ends soon, and a disk that was opened answers requests.

#![no_main]

use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;

use blockio::{Buffers, DiskOptions, DiskSource, EngineConfig, IoThread, IoThreadConfig};
use disks::luks::{KdfLimits, LuksOptions, Passphrase};
use libfuzzer_sys::fuzz_target;
use ringhaul_fuzz::{Input, memfd};
use sha2::{Digest, Sha256};

const DISK_BYTES: u64 = 1 << 20;
const HEADER_BYTES: usize = 16_384;
const JSON_AT: usize = 4096;
/// A bound on key derivation that keeps runs short.
const MOST_WORK: KdfLimits =
    KdfLimits { pbkdf2_rounds: 64, argon2_kib: 64, argon2_passes_kib: 256 };

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let is_second = input.u8() & 1 != 0;
    let rest = input.rest();
    let start = if is_second { second(rest) } else { first(rest) };
    let mut file = memfd(DISK_BYTES);
    file.write_all(&start).expect("a memfd has room");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
    let below = DiskSource::file(Path::new(&path), &options).expect("a disk");
    let passphrase = Passphrase::read(&b"passphrase"[..]).expect("a key");
    let options = LuksOptions { passphrase, discard: true, header: None, most_work: MOST_WORK };
    let Ok(source) = disks::luks::open(below, &options) else { return };
    let info = source.info();
    assert!(info.size_bytes <= DISK_BYTES && info.size_bytes > 0);
    let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
    let thread = IoThread::new(&config).expect("an IoThread");
    let disk = source.attach(thread.io());
    let block = info.logical_block_bytes as usize;
    let memory = Buffers::aligned(block, block);
    let view = memory.duplicate();
    memory.copy_from(0, &vec![7; block]);
    let last = info.size_bytes - block as u64;
    thread.block_on(disk.write(last, memory, true)).expect("it ends").expect("it has room");
    view.zero_from(0);
    let again = view.duplicate();
    thread.block_on(disk.read(last, again)).expect("it ends").expect("it is there");
    assert!(view.to_vec() == vec![7; block], "it is not what was written");
});

fn first(rest: &[u8]) -> Vec<u8> {
    let mut header = b"LUKS\xba\xbe\0\x01".to_vec();
    header.extend(rest);
    header
}

/// A header of version 2 and its copy, with this JSON. The key areas are zeroes.
fn second(json: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    for (place, magic) in [(0, b"LUKS\xba\xbe\0\x02"), (HEADER_BYTES as u64, b"SKUL\xba\xbe\0\x02")]
    {
        let mut header = vec![0; HEADER_BYTES];
        header[..8].copy_from_slice(magic);
        header[8..16].copy_from_slice(&(HEADER_BYTES as u64).to_be_bytes());
        header[72..78].copy_from_slice(b"sha256");
        header[256..264].copy_from_slice(&place.to_be_bytes());
        let len = json.len().min(HEADER_BYTES - JSON_AT);
        header[JSON_AT..JSON_AT + len].copy_from_slice(&json[..len]);
        let checksum = Sha256::digest(&header);
        header[448..480].copy_from_slice(&checksum);
        all.extend(header);
    }
    all
}
