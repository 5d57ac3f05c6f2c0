//! Invalid chains and rings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{DaemonOptions, pattern};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::ring::{Desc, INDIRECT, NEXT, Ring, WRITE};
use ringhaul_kit::frontend::{
    BORDER, DATA, Frontend, MEMORY_END, MEMORY_START, SCRATCH, Setup, blk, check_service, feature,
};
use ringhaul_kit::server::Engine;

use crate::{start, with_attached};

for_each_engine! {
    chains_without_an_end_stop_their_queue,
    a_bad_avail_ring_stops_its_queue,
    chains_without_a_status_byte_stop_their_queue,
    bad_indirect_tables_stop_their_queue,
    bad_buffers_are_answered,
    lengths_that_overflow_are_answered,
    indirect_without_the_feature_stops_the_queue,
    a_driver_that_rewrites_descriptors,
}

const SIZE: u16 = 64;

/// A queue for invalid chains, beside one for valid chains.
const BAD: usize = 1;
const GOOD: usize = 0;

/// The header and the status byte of a read in slot 0 of the bad queue.
fn read_request(frontend: &Frontend) -> Result<(Desc, Desc)> {
    let (header, status) = frontend.put_header(BAD, 0, blk::IN, 0)?;
    Ok((Desc::readable(header, 16), Desc::writable(status, 1)))
}

/// Checks that only the bad queue has stopped, and that it can be started again.
fn expect_stopped(frontend: &mut Frontend) -> Result<()> {
    frontend.rings[BAD].wait_err()?;
    // Earlier used elements are published at the latest when the IoThread has done other work.
    frontend.read(GOOD, 0, 512).context("the other queue does not go on")?;
    let used = frontend.rings[BAD].used_idx();
    // A stopped queue is not served, even if its avail idx becomes valid.
    frontend.rings[BAD].put_avail_idx(1);
    frontend.rings[BAD].kick()?;
    frontend.write(GOOD, 5000, &pattern(1, 512))?;
    ensure!(frontend.rings[BAD].used_idx() == used, "a bad queue is still served");
    frontend.stop_queue(BAD)?;
    let config = frontend.rings[BAD].config;
    // The memory of a new driver is zeroed.
    frontend.memory.write(config.desc_table, &vec![0; 0x8000])?;
    frontend.rings[BAD] = Ring::new(&frontend.memory, config)?;
    frontend.start_queue(BAD, 0)?;
    frontend.read(BAD, 0, 512).context("a fresh ring is not served")?;
    Ok(())
}

/// The name of a case, and its descriptors, made from a valid header and a valid status.
type Case = (&'static str, fn(Desc, Desc) -> Vec<Desc>);

/// Runs cases that must stop the queue. The first descriptor is the head.
fn stopping(engine: Engine, cases: &[Case]) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    for (what, descriptors) in cases {
        for good_first in [false, true] {
            with_attached(&mut daemon, &Setup::default().queue_size(SIZE), what, |frontend| {
                if good_first {
                    frontend.read(BAD, 0, 512)?;
                }
                let (header, status) = read_request(frontend)?;
                for (index, desc) in (0..).zip(descriptors(header, status)) {
                    frontend.rings[BAD].put_desc(index, desc);
                }
                frontend.rings[BAD].submit(0)?;
                expect_stopped(frontend)
            })?;
        }
    }
    Ok(())
}

fn chains_without_an_end_stop_their_queue(engine: Engine) -> Result<()> {
    stopping(
        engine,
        &[
            ("a descriptor that is its own next", |header, _| vec![header.then(0)]),
            ("a loop of two", |header, status| vec![header.then(1), status.then(0)]),
            ("a loop of two that only read", |header, _| vec![header.then(1), header.then(0)]),
            ("a loop of empty buffers", |_, _| {
                vec![Desc::readable(0, 0).then(1), Desc::writable(0, 0).then(0)]
            }),
            ("a loop that does not go through the head", |header, status| {
                vec![header.then(1), Desc::writable(DATA, 512).then(2), status.then(1)]
            }),
            ("a loop after a fault", |header, status| {
                vec![header.then(1), Desc::writable(0, 512).then(2), status.then(1)]
            }),
            ("a next just out of range", |header, _| vec![header.then(SIZE)]),
            ("a next far out of range", |header, _| vec![header.then(u16::MAX)]),
            ("a next out of range after a fault", |header, status| {
                vec![header.then(1), Desc::writable(0, 512).then(2), status.then(0x8000)]
            }),
        ],
    )
}

fn a_bad_avail_ring_stops_its_queue(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let setup = Setup::default().queue_size(SIZE);
    for head in [SIZE, SIZE + 1, 0x8000, u16::MAX] {
        let what = format!("head {head}");
        with_attached(&mut daemon, &setup, &what, |frontend| {
            frontend.rings[BAD].submit(head)?;
            expect_stopped(frontend)
        })?;
    }
    for idx in [SIZE + 1, SIZE + 2, 0x7fff, 0x8000, u16::MAX] {
        let what = format!("avail idx {idx}");
        with_attached(&mut daemon, &setup, &what, |frontend| {
            frontend.rings[BAD].put_avail_idx(idx);
            frontend.rings[BAD].kick()?;
            expect_stopped(frontend)
        })?;
    }
    with_attached(&mut daemon, &setup, "avail idx going back", |frontend| {
        frontend.read(BAD, 0, 512)?;
        frontend.read(BAD, 0, 512)?;
        frontend.rings[BAD].put_avail_idx(1);
        frontend.rings[BAD].kick()?;
        expect_stopped(frontend)
    })
}

fn chains_without_a_status_byte_stop_their_queue(engine: Engine) -> Result<()> {
    stopping(
        engine,
        &[
            ("only a header", |header, _| vec![header]),
            ("only what is readable", |header, _| {
                vec![header.then(1), Desc::readable(DATA, 512).then(2), Desc::readable(DATA, 1)]
            }),
            ("a status of no bytes", |header, _| vec![header.then(1), Desc::writable(DATA, 0)]),
            ("nothing at all", |_, _| vec![Desc::readable(0, 0)]),
            ("a status below memory", |header, _| vec![header.then(1), Desc::writable(0, 1)]),
            ("a status beyond memory", |header, _| {
                vec![header.then(1), Desc::writable(MEMORY_END, 1)]
            }),
            ("a status at the end of all addresses", |header, _| {
                vec![header.then(1), Desc::writable(u64::MAX, 1)]
            }),
            ("a status that passes the end of memory", |header, _| {
                vec![header.then(1), Desc::writable(MEMORY_END - 4, 5)]
            }),
            ("a status that passes the end of all addresses", |header, _| {
                vec![header.then(1), Desc::writable(u64::MAX - 4, 100)]
            }),
        ],
    )
}

fn bad_indirect_tables_stop_their_queue(engine: Engine) -> Result<()> {
    fn table(addr: u64, len: u32) -> Vec<Desc> {
        vec![Desc { addr, len, flags: INDIRECT, next: 0 }]
    }
    stopping(
        engine,
        &[
            ("an empty table", |_, _| table(SCRATCH, 0)),
            ("half a descriptor", |_, _| table(SCRATCH, 8)),
            ("a descriptor and a bit", |_, _| table(SCRATCH, 17)),
            ("more than the largest table", |_, _| table(SCRATCH, 16 * 1025)),
            ("65536 descriptors", |_, _| table(SCRATCH, 16 << 16)),
            ("65537 descriptors", |_, _| table(SCRATCH, (16 << 16) + 16)),
            ("the longest length", |_, _| table(SCRATCH, u32::MAX)),
            ("the longest length of descriptors", |_, _| table(SCRATCH, u32::MAX - 15)),
            ("a table below memory", |_, _| table(0, 32)),
            ("a table that begins below memory", |_, _| table(MEMORY_START - 16, 32)),
            ("a table beyond memory", |_, _| table(MEMORY_END, 32)),
            ("a table that passes the end", |_, _| table(MEMORY_END - 16, 32)),
            ("a table at the end of all addresses", |_, _| table(u64::MAX - 15, 16)),
            ("a table that passes the end of all addresses", |_, _| table(u64::MAX - 15, 64)),
            // The descriptor of zeroes in it is not a status.
            ("a table of zeroes", |_, _| table(BORDER, 16)),
            ("a table with more after it", |_, _| {
                vec![Desc { addr: SCRATCH, len: 16, flags: INDIRECT | NEXT, next: 1 }]
            }),
            ("the queue's own table, so indirect in indirect", |_, _| {
                table(MEMORY_START + 0x8000, 16)
            }),
            ("the queue's own table from a later descriptor on", |header, _| {
                let table = Desc { addr: MEMORY_START + 0x8000, len: 48, flags: INDIRECT, next: 0 };
                vec![header.then(1), table]
            }),
        ],
    )?;
    // Faults inside a separate table.
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let nested = Desc { addr: SCRATCH + 512, len: 16, flags: INDIRECT, next: 0 };
    let cases: [(&str, &[Desc]); 5] = [
        ("an indirect descriptor first", &[nested]),
        ("an indirect descriptor later", &[Desc::readable(DATA, 16).then(1), nested]),
        ("a loop in a table", &[Desc::readable(DATA, 16).then(1), Desc::writable(DATA, 1).then(0)]),
        ("a next out of the table", &[Desc::readable(DATA, 16).then(2), Desc::writable(DATA, 1)]),
        ("a next in the queue's table", &[Desc::readable(DATA, 16).then(40)]),
    ];
    for (what, descriptors) in cases {
        with_attached(&mut daemon, &Setup::default().queue_size(SIZE), what, |frontend| {
            let bytes = descriptors.iter().copied().flat_map(Desc::bytes).collect::<Vec<_>>();
            frontend.memory.write(SCRATCH, &bytes)?;
            let len = u32::try_from(bytes.len())?;
            frontend.rings[BAD].put_desc(0, table(SCRATCH, len)[0]);
            frontend.rings[BAD].submit(0)?;
            expect_stopped(frontend)
        })?;
    }
    Ok(())
}

fn indirect_without_the_feature_stops_the_queue(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let setup = Setup::default().without(feature::INDIRECT_DESC);
    with_attached(&mut daemon, &setup, "indirect was not negotiated", |frontend| {
        let (header, status) = read_request(frontend)?;
        frontend.rings[BAD].put_indirect(0, SCRATCH, &[header, status]);
        frontend.rings[BAD].submit(0)?;
        expect_stopped(frontend)
    })
}

/// Runs a chain with a status byte on the bad queue, directly and through an indirect table. The
/// chain is answered with an error, and all queues keep running.
fn expect_error(frontend: &mut Frontend, status: Desc, chain: &[Desc]) -> Result<()> {
    for indirect in [false, true] {
        frontend.memory.write(status.addr, &[blk::PENDING])?;
        match indirect {
            false => frontend.rings[BAD].put_chain(0, chain),
            true => frontend.rings[BAD].put_indirect(0, SCRATCH, chain),
        }
        frontend.rings[BAD].submit(0)?;
        frontend.rings[BAD].wait_used()?;
        let seen = frontend.memory.read(status.addr, 1)?[0];
        ensure!(seen == blk::IOERR, "status {seen}, indirect: {indirect}");
    }
    frontend.read(BAD, 0, 512).context("the queue does not go on")?;
    frontend.read(GOOD, 0, 512).context("the other queue does not go on")?;
    Ok(())
}

fn bad_buffers_are_answered(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let bad_places = [
        ("at zero", 0, 512),
        ("just below memory", MEMORY_START - 1, 1),
        ("from below memory into it", MEMORY_START - 256, 512),
        ("just beyond memory", MEMORY_END, 512),
        ("past the end of memory", MEMORY_END - 256, 512),
        ("at the end of all addresses", u64::MAX, 1),
        ("past the end of all addresses", u64::MAX - 100, 512),
        ("from memory past the end of all addresses", DATA, u32::MAX),
        ("4 GiB from the end of all addresses", u64::MAX - u64::from(u32::MAX) + 1, u32::MAX),
        ("4 GiB at zero", 0, u32::MAX),
    ];
    for (what, addr, len) in bad_places {
        for flags in [0, WRITE] {
            with_attached(&mut daemon, &Setup::default(), what, |frontend| {
                let (header, status) = read_request(frontend)?;
                let bad = Desc { addr, len, flags, next: 0 };
                expect_error(frontend, status, &[header, bad, status])?;
                let fine = Desc { addr: DATA, len: 512, flags, next: 0 };
                expect_error(frontend, status, &[header, fine, bad, fine, status])?;
                if flags == 0 {
                    expect_error(frontend, status, &[bad, status])?;
                    expect_error(frontend, status, &[bad, bad, bad, status])?;
                }
                Ok(())
            })?;
        }
    }
    with_attached(&mut daemon, &Setup::default(), "readable after writable", |frontend| {
        let (header, status) = read_request(frontend)?;
        let (input, output) = (Desc::writable(DATA, 512), Desc::readable(DATA, 512));
        expect_error(frontend, status, &[header, input, output, status])?;
        expect_error(frontend, status, &[input, header, status])?;
        expect_error(frontend, status, &[status, header])?;
        expect_error(frontend, status, &[header, status, output])
    })
}

fn lengths_that_overflow_are_answered(engine: Engine) -> Result<()> {
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let piece = u32::try_from(MEMORY_END - DATA)?;
    let setup = Setup::default().queue_size(1024);
    // Sums that exceed 32 bits, and sums that just fit and exceed the disk.
    for (pieces, flags) in [(1000, 0), (1000, WRITE), (585, 0), (585, WRITE)] {
        let what = format!("{pieces} pieces of {piece} bytes, flags {flags}");
        with_attached(&mut daemon, &setup, &what, |frontend| {
            let kind = if flags == WRITE { blk::IN } else { blk::OUT };
            let (header, status) = frontend.put_header(BAD, 0, kind, 0)?;
            let (header, status) = (Desc::readable(header, 16), Desc::writable(status, 1));
            let piece = Desc { addr: DATA, len: piece, flags, next: 0 };
            let chain = [vec![header], vec![piece; pieces], vec![status]].concat();
            expect_error(frontend, status, &chain)
        })?;
    }
    Ok(())
}

/// A generator of pseudo-random numbers, the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(0x1405_7b7e_f767_814f);
        self.0 >> 33
    }

    fn pick<T: Copy>(&mut self, choice: &[T]) -> T {
        let count = choice.len() as u64;
        choice[usize::try_from(self.next() % count).expect("an index fits")]
    }

    fn descriptor(&mut self, places: &[u64]) -> Desc {
        Desc {
            addr: self.pick(places),
            len: self.pick(&[0, 1, 16, 512, 4096, 70_000, u32::MAX]),
            flags: self.pick(&[0, NEXT, WRITE, WRITE | NEXT, WRITE | NEXT, INDIRECT]),
            next: self.pick(&[0, 1, 2, 3, 40, SIZE - 1, SIZE, u16::MAX]),
        }
    }
}

/// The driver changes descriptors, tables, headers and rings while the device uses them. The ring
/// ends in any state. When a stop returns, the device no longer uses it.
fn a_driver_that_rewrites_descriptors(engine: Engine) -> Result<()> {
    const ROUNDS: u64 = 100;
    let mut daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default().queue_size(SIZE))?;
    let place = frontend.rings[BAD].config;
    let header = frontend.put_header(BAD, 0, blk::IN, 0)?.0;
    let places = [
        header,
        header + 8,
        header + 32,
        DATA,
        DATA + 1,
        BORDER - 100,
        SCRATCH,
        place.desc_table,
        place.avail_ring,
        place.used_ring,
        MEMORY_END - 8,
        0,
    ];
    let over = Arc::new(AtomicBool::new(false));
    let rewriter = std::thread::spawn({
        let (memory, over) = (Arc::clone(&frontend.memory), Arc::clone(&over));
        move || {
            let mut random = Random(1);
            while !over.load(Ordering::Relaxed) {
                let table = random.pick(&[place.desc_table, SCRATCH]);
                let at = table + 16 * (random.next() % 8);
                memory.write(at, &random.descriptor(&places).bytes())?;
                let kind = random.pick(&[blk::IN, blk::OUT, blk::GET_ID, blk::DISCARD, 99]);
                memory.write(header, &kind.to_le_bytes())?;
            }
            anyhow::Ok(())
        }
    });
    for round in 0..ROUNDS {
        frontend.stop_queue(BAD)?;
        frontend.memory.write(place.desc_table, &vec![0; 0x8000])?;
        frontend.rings[BAD] = Ring::new(&frontend.memory, place)?;
        frontend.start_queue(BAD, 0)?;
        for request in 0..u64::from(SIZE) {
            let head = u16::try_from((round + request) % 8)?;
            frontend.rings[BAD].submit(head)?;
        }
        frontend.read(GOOD, round, 512).context("the other queue does not go on")?;
    }
    over.store(true, Ordering::Relaxed);
    let rewritten = rewriter.join();
    ensure!(rewritten.is_ok_and(|result| result.is_ok()), "the rewriting thread failed");
    drop(frontend);
    check_service(&mut daemon)
}
