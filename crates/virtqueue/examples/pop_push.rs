//! The cost of a request in the rings alone: nanoseconds for one pop and push of a chain of three
//! descriptors (header, data, status), with the header copied out and the status byte written.
//! Prints the median of all batches and their first percentile.
//!
//! Both sides run on one thread, and only the device's side is measured. Run it in release mode:
//! `cargo run --release -p virtqueue --example pop_push [BATCH]`

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use virtqueue::driver::{Desc, Ring};
use virtqueue::{DeviceQueue, GuestMemory, LocalMemory, QueueConfig, SplitQueue};

const SIZE: u16 = 256;
const DESC_TABLE: u64 = 0x1000;
const AVAIL_RING: u64 = 0x3000;
const USED_RING: u64 = 0x5000;
const INDIRECT_TABLES: u64 = 0x10000;
const HEADERS: u64 = 0x20000;
const DATA: u64 = 0x100000;
const DATA_BYTES: u32 = 4096;
const HEADER_BYTES: u32 = 16;
const CHAIN_DESCRIPTORS: u16 = 3;

const BATCHES: usize = 500_000;

fn main() -> Result<(), Box<dyn Error>> {
    let batch = match std::env::args().nth(1) {
        Some(argument) => argument.parse()?,
        None => 32,
    };
    if batch == 0 || batch > SIZE / CHAIN_DESCRIPTORS {
        return Err(format!("a batch has 1 to {} chains", SIZE / CHAIN_DESCRIPTORS).into());
    }
    for indirect in [false, true] {
        for event_idx in [false, true] {
            let batches = measure(indirect, event_idx, batch)?;
            let each = |rank: usize| batches[rank].as_secs_f64() * 1e9 / f64::from(batch);
            println!(
                "{:8} {:9} batches of {batch}: {:5.1} ns for each request, {:5.1} at best",
                if indirect { "indirect" } else { "direct" },
                if event_idx { "event idx" } else { "flags" },
                each(batches.len() / 2),
                each(batches.len() / 100),
            );
        }
    }
    Ok(())
}

/// Returns the time that the device needs for each of `BATCHES` batches, sorted. On a machine that
/// does other work, too, the median and the low end are more telling than the sum.
fn measure(indirect: bool, event_idx: bool, batch: u16) -> Result<Vec<Duration>, Box<dyn Error>> {
    let memory = Arc::new(GuestMemory::anonymous(&[(0, 0x80_0000)])?);
    let config = QueueConfig {
        size: SIZE,
        desc_table: DESC_TABLE,
        avail_ring: AVAIL_RING,
        used_ring: USED_RING,
        event_idx,
        indirect,
        next_avail: 0,
    };
    let mut queue = SplitQueue::new(LocalMemory::new(Arc::clone(&memory)), config)?;
    let mut ring = Ring::new(memory, config);
    let chains = 0..SIZE / CHAIN_DESCRIPTORS;
    let heads: Vec<u16> = chains.map(|chain| write_chain(&ring, chain)).collect();
    let mut spent = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        for _ in 0..batch {
            ring.put_head(heads[usize::from(ring.next_avail) % heads.len()]);
        }
        ring.put_avail_idx(ring.next_avail);
        let start = Instant::now();
        let served = serve(&mut queue)?;
        spent.push(start.elapsed());
        assert_eq!(served, batch);
    }
    spent.sort_unstable();
    Ok(spent)
}

/// Writes descriptors that stay as they are. The avail ring names them again and again.
fn write_chain(ring: &Ring<Arc<GuestMemory>>, chain: u16) -> u16 {
    let own = u64::from(chain);
    let header = HEADERS + own * 64;
    let buffers = [
        Desc::readable(header, HEADER_BYTES),
        Desc::writable(DATA + own * u64::from(DATA_BYTES), DATA_BYTES),
        Desc::writable(header + u64::from(HEADER_BYTES), 1),
    ];
    if ring.config.indirect {
        let table = INDIRECT_TABLES + own * u64::from(CHAIN_DESCRIPTORS) * 16;
        ring.put_indirect(chain, table, &buffers);
        return chain;
    }
    let head = chain * CHAIN_DESCRIPTORS;
    ring.put_chain(head, &buffers);
    head
}

/// Serves a batch as a device does in one run of its loop, without the disk.
#[inline(never)]
fn serve(queue: &mut SplitQueue) -> Result<u16, Box<dyn Error>> {
    let mut served = 0;
    while let Some(mut chain) = queue.pop()? {
        let mut header = [0; HEADER_BYTES as usize];
        chain.readable.copy_to(0, &mut header);
        chain.readable.advance(header.len());
        black_box(&header);
        if let Some(status) = chain.writable.take_last_byte() {
            status.write(0);
        }
        let written = DATA_BYTES + 1;
        black_box(chain.writable.iovecs());
        queue.push(chain.head, written);
        served += 1;
    }
    black_box(queue.publish());
    Ok(served)
}
