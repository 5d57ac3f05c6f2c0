//! Invalid chains for virtio-scsi, a device of logical units.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{Daemon, DaemonOptions, sector_content};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::ring::{Desc, Ring, WRITE};
use ringhaul_kit::frontend::{DATA, Frontend, MEMORY_END, MEMORY_START, SCRATCH, Setup};
use ringhaul_kit::server::Engine;

use crate::{run, start};

for_each_engine! {
    bad_buffers_are_answered,
    chains_without_room_for_a_response_stop_their_queue,
    bad_functions_are_answered,
}

/// The control queue and two request queues, one for valid chains and one for invalid chains.
const CONTROL: usize = 0;
const GOOD: usize = 2;
const BAD: usize = 3;

const HEADER: u64 = SCRATCH + 0x1000;
const HEADER_BYTES: u32 = 51;
const RESPONSE: u64 = SCRATCH + 0x2000;
const RESPONSE_BYTES: u32 = 108;
/// The bytes of a response before the device writes it.
const PENDING: u8 = 0xee;
const FAILURE: u8 = 9;

/// LUN 0 of target 0.
const UNIT: [u8; 8] = [1, 0, 0, 0, 0, 0, 0, 0];

fn setup() -> Setup {
    Setup { queues: 4, ..Setup::default() }
}

fn start_units(engine: Engine) -> Result<Daemon> {
    let mut options = DaemonOptions::new(engine);
    options.is_scsi = true;
    start(&options)
}

/// Writes the header and the response of a read of the first block.
fn put_read(frontend: &Frontend) -> Result<(Desc, Desc)> {
    let mut header = vec![0; HEADER_BYTES as usize];
    header[..8].copy_from_slice(&UNIT);
    header[19] = 0x28;
    header[27] = 1;
    frontend.memory.write(HEADER, &header)?;
    frontend.memory.write(RESPONSE, &[PENDING; RESPONSE_BYTES as usize])?;
    Ok((Desc::readable(HEADER, HEADER_BYTES), Desc::writable(RESPONSE, RESPONSE_BYTES)))
}

/// Reads the first block, and checks its data.
fn read(frontend: &mut Frontend, queue: usize) -> Result<()> {
    loop {
        let (header, response) = put_read(frontend)?;
        frontend.memory.write(DATA, &[0x77; 512])?;
        frontend.execute(queue, &[header, response, Desc::writable(DATA, 512)])?;
        let response = frontend.memory.read(RESPONSE, RESPONSE_BYTES as usize)?;
        match (response[11], response[10], response[14]) {
            (0, 0, _) => break,
            // A unit attention reports earlier events first.
            (0, 2, 6) => {}
            _ => anyhow::bail!("a read ended with {response:x?}"),
        }
    }
    ensure!(frontend.memory.read(DATA, 512)? == sector_content(0), "read what was not written");
    Ok(())
}

/// Runs one case with a new front-end, then checks that the daemon serves the next one.
fn with_attached(
    daemon: &mut Daemon,
    setup: &Setup,
    what: &str,
    case: impl FnOnce(&mut Frontend) -> Result<()>,
) -> Result<()> {
    let mut frontend = Frontend::attach(daemon.socket(), setup).context("before the case")?;
    run(daemon, &mut frontend, what, case)?;
    drop(frontend);
    let mut next = Frontend::attach(daemon.socket(), setup)?;
    [GOOD, BAD]
        .into_iter()
        .try_for_each(|queue| read(&mut next, queue))
        .with_context(|| format!("after: {what}"))
}

/// Runs a chain with a response on the bad queue, directly and through an indirect table. The chain
/// is answered with FAILURE, and all queues keep running.
fn expect_failure(frontend: &mut Frontend, chain: &[Desc]) -> Result<()> {
    for indirect in [false, true] {
        frontend.memory.write(RESPONSE, &[PENDING; RESPONSE_BYTES as usize])?;
        let used_bytes = match indirect {
            false => frontend.execute(BAD, chain)?,
            true => frontend.execute_indirect(BAD, SCRATCH, chain)?,
        };
        let seen = frontend.memory.read(RESPONSE, RESPONSE_BYTES as usize)?;
        let is_right = seen[..4] == [0; 4] && seen[8..12] == [0, 0, 0, FAILURE];
        ensure!(is_right && used_bytes == RESPONSE_BYTES, "{seen:x?}, indirect: {indirect}");
    }
    read(frontend, BAD).context("the queue does not go on")?;
    read(frontend, GOOD).context("the other queue does not go on")
}

fn bad_buffers_are_answered(engine: Engine) -> Result<()> {
    let mut daemon = start_units(engine)?;
    let bad_places = [
        ("at zero", 0, 512),
        ("from below memory into it", MEMORY_START - 256, 512),
        ("just beyond memory", MEMORY_END, 512),
        ("past the end of memory", MEMORY_END - 256, 512),
        ("past the end of all addresses", u64::MAX - 100, 512),
        ("from memory past the end of all addresses", DATA, u32::MAX),
    ];
    for (what, addr, len) in bad_places {
        for flags in [0, WRITE] {
            with_attached(&mut daemon, &setup(), what, |frontend| {
                let (header, response) = put_read(frontend)?;
                let bad = Desc { addr, len, flags, next: 0 };
                let fine = Desc { addr: DATA, len: 512, flags, next: 0 };
                if flags == WRITE {
                    expect_failure(frontend, &[header, response, bad])?;
                    return expect_failure(frontend, &[header, response, fine, bad, fine]);
                }
                expect_failure(frontend, &[bad, response])?;
                expect_failure(frontend, &[header, bad, response])?;
                expect_failure(frontend, &[header, fine, bad, fine, response])?;
                expect_failure(frontend, &[bad, bad, bad, response])
            })?;
        }
    }
    with_attached(&mut daemon, &setup(), "readable after writable", |frontend| {
        let (header, response) = put_read(frontend)?;
        let (input, output) = (Desc::writable(DATA, 512), Desc::readable(DATA, 512));
        expect_failure(frontend, &[header, response, input, output])?;
        expect_failure(frontend, &[response, header])?;
        expect_failure(frontend, &[header, response, output, input])
    })?;
    let large = setup().queue_size(1024);
    with_attached(&mut daemon, &large, "more than 4 GiB", |frontend| {
        let (header, response) = put_read(frontend)?;
        let piece = Desc::writable(DATA, u32::try_from(MEMORY_END - DATA)?);
        expect_failure(frontend, &[vec![header, response], vec![piece; 1000]].concat())
    })
}

fn chains_without_room_for_a_response_stop_their_queue(engine: Engine) -> Result<()> {
    let mut daemon = start_units(engine)?;
    let header = Desc::readable(HEADER, HEADER_BYTES);
    let cases: [(&str, &[Desc]); 5] = [
        ("only a header", &[header]),
        ("a byte too few", &[header, Desc::writable(RESPONSE, RESPONSE_BYTES - 1)]),
        ("a response below memory", &[header, Desc::writable(0, RESPONSE_BYTES)]),
        ("a response that passes the end", &[header, Desc::writable(MEMORY_END - 8, 108)]),
        (
            "data that is no memory before it",
            &[header, Desc::writable(0, 1), Desc::writable(RESPONSE, RESPONSE_BYTES)],
        ),
    ];
    for (what, chain) in cases {
        with_attached(&mut daemon, &setup(), what, |frontend| {
            put_read(frontend)?;
            frontend.rings[BAD].put_chain(0, chain);
            frontend.rings[BAD].submit(0)?;
            frontend.rings[BAD].wait_err()?;
            read(frontend, GOOD).context("the other queue does not go on")?;
            frontend.stop_queue(BAD)?;
            let config = frontend.rings[BAD].config;
            frontend.memory.write(config.desc_table, &vec![0; 0x8000])?;
            frontend.rings[BAD] = Ring::new(&frontend.memory, config)?;
            frontend.start_queue(BAD, 0)?;
            read(frontend, BAD).context("a fresh ring is not served")
        })?;
    }
    Ok(())
}

fn bad_functions_are_answered(engine: Engine) -> Result<()> {
    let mut daemon = start_units(engine)?;
    with_attached(&mut daemon, &setup(), "functions", |frontend| {
        // QUERY TASK SET.
        let function = [&[0, 0, 0, 0, 7, 0, 0, 0][..], &UNIT, &[0; 8]].concat();
        frontend.memory.write(HEADER, &function)?;
        let (request, response) = (Desc::readable(HEADER, 24), Desc::writable(RESPONSE, 1));
        let bad = Desc::readable(MEMORY_END - 1, 2);
        let cases: [(&[Desc], u8); 4] = [
            (&[bad, response], FAILURE),
            (&[response, request], FAILURE),
            (&[request, response, Desc::writable(0, 1)], FAILURE),
            (&[request, response], 0),
        ];
        for (chain, expected) in cases {
            frontend.memory.write(RESPONSE, &[PENDING; 2])?;
            let used_bytes = frontend.execute(CONTROL, chain)?;
            let seen = frontend.memory.read(RESPONSE, 2)?;
            ensure!((&seen[..], used_bytes) == (&[expected, PENDING], 1), "{chain:x?}: {seen:x?}");
        }
        read(frontend, BAD)
    })
}
