//! Images of a hostile user. For any content of a qcow2 file, opening it ends, and so does each
//! request to its disk.
//!
//! The input is a list of requests and the file. Files for the layers below come before the file:
//! images or arbitrary bytes.

#![no_main]

use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;

use blockio::disk::Disk;
use blockio::{Buffers, DiskOptions, DiskSource, EngineConfig, IoThread, IoThreadConfig};
use disks::qcow2::Layer;
use libfuzzer_sys::fuzz_target;
use ringhaul_fuzz::{Input, memfd};

const SECTOR_BYTES: u64 = 512;
/// The most sectors of one request.
const SECTORS_MAX: u64 = 64;
/// The most sectors that the disk grows by.
const GROWTH_SECTORS_MAX: u64 = 1 << 16;
const REQUESTS_MAX: u8 = 24;

struct Request {
    kind: u8,
    place: u16,
    sectors: u8,
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let flags = input.u8();
    let read_only = flags & 1 != 0;
    // A locked image is marked when it is written to, and checked if it was not closed.
    let is_locked = flags & 16 != 0;
    let count = input.u8() % REQUESTS_MAX;
    let requests: Vec<_> = (0..count)
        .map(|_| Request { kind: input.u8(), place: input.u16(), sectors: input.u8() })
        .collect();
    let below: Vec<_> = (0..flags >> 1 & 3).map(|_| sized(&mut input)).collect();
    let Some(top) = open(input.rest(), read_only, is_locked).and_then(image) else { return };
    let mut layers = vec![top];
    for (number, bytes) in below.iter().enumerate() {
        let Some(file) = open(bytes, true, false) else { return };
        // Only the lowest layer can be raw.
        let is_raw = flags & 8 != 0 && number + 1 == below.len();
        let layer = if is_raw { Some(Layer::raw(file)) } else { image(file) };
        let Some(layer) = layer else { return };
        layers.push(layer);
    }
    let Ok(source) = disks::qcow2::open(layers, false) else { return };
    let config = IoThreadConfig { engine: EngineConfig::Threads, ..IoThreadConfig::default() };
    let thread = IoThread::new(&config).expect("an IoThread");
    let disk = source.attach(thread.io());
    for request in requests {
        let size = source.info().size_bytes;
        if request.kind % 8 == 7 {
            let more = u64::from(request.place) % GROWTH_SECTORS_MAX * SECTOR_BYTES;
            // The new size may be too large, or the disk read-only.
            let _ = source.set_size(size.saturating_add(more), || ());
            continue;
        }
        thread.block_on(ask(&disk, &request, size)).expect("it ends");
    }
});

/// The bytes of a file, preceded by their number.
fn sized<'a>(input: &mut Input<'a>) -> &'a [u8] {
    let bytes = input.u16();
    input.bytes(bytes.into())
}

/// A file with these bytes.
fn open(bytes: &[u8], read_only: bool, is_locked: bool) -> Option<DiskSource> {
    let mut file = memfd((bytes.len() as u64).next_multiple_of(SECTOR_BYTES));
    file.write_all(bytes).expect("a memfd has room");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let options =
        DiskOptions { no_lock: !is_locked, holds_image: true, read_only, ..DiskOptions::default() };
    DiskSource::file(Path::new(&path), &options).ok()
}

fn image(file: DiskSource) -> Option<Layer> {
    Layer::qcow2(file).ok()
}

/// Carries out a request. It may fail: the image may place data where no file can have it.
async fn ask(disk: &Disk, request: &Request, size: u64) {
    let last = size / SECTOR_BYTES - 1;
    let place = u64::from(request.place);
    // Every second place counts from the end.
    let first = if place & 1 == 0 { (place / 2).min(last) } else { last.saturating_sub(place / 2) };
    let sectors = (u64::from(request.sectors) % SECTORS_MAX + 1).min(last - first + 1);
    let (offset, len) = (first * SECTOR_BYTES, sectors * SECTOR_BYTES);
    // Requests that move no data may be long.
    let long = len.saturating_mul(1 << (request.kind >> 3)).min(size - offset);
    let long = long - long % SECTOR_BYTES;
    let memory = || {
        let bytes = usize::try_from(len).expect("a short request");
        Buffers::aligned(bytes, 512)
    };
    let _ = match request.kind % 8 {
        0 => disk.read(offset, memory()).await.is_ok(),
        1 | 2 => {
            let memory = memory();
            memory.copy_from(0, &[request.sectors; 512]);
            disk.write(offset, memory, request.kind & 8 != 0).await.is_ok()
        }
        3 => disk.discard(offset, long).await.is_ok(),
        4 => disk.write_zeroes(offset, len, request.kind & 8 != 0).await.is_ok(),
        5 => disk.flush().await.is_ok(),
        _ => disk.block_status(offset, long).await.is_ok(),
    };
}
