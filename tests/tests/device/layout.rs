//! Requests with every layout in memory that the specification allows.

use anyhow::{Result, ensure};
use ringhaul_kit::daemon::{Daemon, DaemonOptions, SECTOR_BYTES, pattern, sector_content};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::ring::{Desc, WRITE};
use ringhaul_kit::frontend::{BORDER, DATA, Frontend, SCRATCH, Setup, blk, feature, header};
use ringhaul_kit::server::Engine;

use crate::start;

for_each_engine! {
    header_is_split_at_every_byte,
    header_and_data_share_a_descriptor,
    status_shares_a_descriptor_with_data,
    buffers_cross_regions,
    indirect_tables_cross_regions,
    queue_of_one_entry,
    queue_of_two_entries,
    queue_of_1024_entries,
    chain_of_1024_descriptors,
}

/// The addresses of headers and status bytes that the tests place themselves.
const HEADER: u64 = SCRATCH + 0x2_0000;
const STATUS: u64 = SCRATCH + 0x2_1000;

/// The guest addresses of the parts of a request.
struct Placed {
    header: u64,
    data: u64,
    status: u64,
}

impl Placed {
    const APART: Self = Self { header: HEADER, data: DATA, status: STATUS };
}

/// Descriptors for `len` bytes at `addr` in pieces of the given lengths; the last piece has the
/// remainder.
fn pieces(addr: u64, len: u32, lengths: &[u32], flags: u16) -> Vec<Desc> {
    let (mut at, mut left) = (addr, len);
    let mut all = Vec::new();
    for &len in lengths.iter().chain([&u32::MAX]) {
        let len = len.min(left);
        all.push(Desc { addr: at, len, flags, next: 0 });
        (at, left) = (at + u64::from(len), left - len);
    }
    all.pop_if(|desc| desc.len == 0);
    all
}

fn execute(frontend: &mut Frontend, indirect: bool, chain: &[Desc]) -> Result<u32> {
    if indirect { frontend.execute_indirect(0, SCRATCH, chain) } else { frontend.execute(0, chain) }
}

/// Runs a write and then a read of `sector`, with the descriptors that `chain` makes for the
/// direction.
fn write_then_read(
    daemon: &Daemon,
    frontend: &mut Frontend,
    at: &Placed,
    (sector, len): (u64, u32),
    chain: impl Fn(u16) -> Vec<Desc>,
    indirect: bool,
) -> Result<()> {
    let data = pattern(sector + 77 * u64::from(indirect), usize::try_from(len)?);
    for (kind, flags) in [(blk::OUT, 0), (blk::IN, WRITE)] {
        let before = if kind == blk::OUT { data.clone() } else { vec![0x33; data.len()] };
        frontend.memory.write(at.data, &before)?;
        frontend.memory.write(at.header, &header(kind, sector))?;
        frontend.memory.write(at.status, &[blk::PENDING])?;
        let chain = chain(flags);
        let used = execute(frontend, indirect, &chain)?;
        let status = frontend.memory.read(at.status, 1)?[0];
        ensure!(status == blk::OK, "type {kind}, status {status}: {chain:?}");
        let expected = if kind == blk::IN { len + 1 } else { 1 };
        ensure!(used == expected, "type {kind}, {used} bytes used: {chain:?}");
        ensure!(frontend.memory.read(at.data, data.len())? == data, "wrong data: {chain:?}");
        ensure!(daemon.read_disk(sector, data.len())? == data, "not on the disk: {chain:?}");
    }
    Ok(())
}

/// Descriptors of header, data and status, each in its own pieces.
fn in_pieces(at: &Placed, len: u32, header: &[u32], data: &[u32], flags: u16) -> Vec<Desc> {
    [
        pieces(at.header, 16, header, 0),
        pieces(at.data, len, data, flags),
        pieces(at.status, 1, &[], WRITE),
    ]
    .concat()
}

fn header_is_split_at_every_byte(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    let at = Placed::APART;
    for indirect in [false, true] {
        for cut in 1..16 {
            let chain = |flags| in_pieces(&at, 512, &[cut], &[], flags);
            write_then_read(&daemon, &mut frontend, &at, (16, 512), chain, indirect)?;
        }
        // Each byte of the header in its own buffer, with empty buffers in between, and data in odd
        // pieces.
        let chain = |flags| in_pieces(&at, 1024, &[1, 0].repeat(15), &[1, 510, 2, 0, 7], flags);
        write_then_read(&daemon, &mut frontend, &at, (17, 1024), chain, indirect)?;
    }
    Ok(())
}

fn header_and_data_share_a_descriptor(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    let at = Placed { data: HEADER + 16, ..Placed::APART };
    for indirect in [false, true] {
        for first in [16 + 1024, 16 + 1, 16 + 512, 15] {
            let chain = |flags| match flags {
                0 => {
                    let all = pieces(at.header, 16 + 1024, &[first], 0);
                    [all, pieces(at.status, 1, &[], WRITE)].concat()
                }
                _ => in_pieces(&at, 1024, &[], &[], flags),
            };
            write_then_read(&daemon, &mut frontend, &at, (33, 1024), chain, indirect)?;
        }
    }
    Ok(())
}

fn status_shares_a_descriptor_with_data(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    let at = Placed { status: DATA + 1024, ..Placed::APART };
    for indirect in [false, true] {
        for first in [1025, 1, 512, 1023] {
            let chain = |flags| match flags {
                WRITE => [pieces(at.header, 16, &[], 0), pieces(at.data, 1025, &[first], WRITE)],
                _ => [in_pieces(&at, 1024, &[], &[], flags), Vec::new()],
            };
            let chain = |flags| chain(flags).concat();
            write_then_read(&daemon, &mut frontend, &at, (40, 1024), chain, indirect)?;
        }
    }
    Ok(())
}

fn buffers_cross_regions(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    let len = 8192;
    for indirect in [false, true] {
        // Aligned for direct I/O, then unaligned, then off by one byte.
        for before in [512, 4096, 16, 8191, 1] {
            let at = Placed { data: BORDER - before, ..Placed::APART };
            let chain = |flags| in_pieces(&at, len, &[], &[], flags);
            write_then_read(&daemon, &mut frontend, &at, (64, len), chain, indirect)?;
        }
        for before in 1..16 {
            let at = Placed { header: BORDER - before, ..Placed::APART };
            let chain = |flags| in_pieces(&at, 512, &[], &[], flags);
            write_then_read(&daemon, &mut frontend, &at, (90, 512), chain, indirect)?;
        }
        // The status is the first byte of the second region.
        let at = Placed { data: BORDER - 512, status: BORDER, ..Placed::APART };
        let chain = |flags| match flags {
            WRITE => [pieces(at.header, 16, &[], 0), pieces(at.data, 513, &[], WRITE)].concat(),
            _ => in_pieces(&at, 512, &[], &[], flags),
        };
        write_then_read(&daemon, &mut frontend, &at, (91, 512), chain, indirect)?;
    }
    Ok(())
}

fn indirect_tables_cross_regions(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    for before in [16, 8, 24, 32, 1, 47] {
        let chain =
            [Desc::readable(HEADER, 16), Desc::writable(DATA, 512), Desc::writable(STATUS, 1)];
        frontend.memory.write(HEADER, &header(blk::IN, before))?;
        let used = frontend.execute_indirect(0, BORDER - before, &chain)?;
        assert_eq!(used, 513);
        assert_eq!(frontend.memory.read(DATA, SECTOR_BYTES)?, sector_content(before));
    }
    Ok(())
}

fn queue_of_one_entry(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    for without in [0, feature::EVENT_IDX] {
        let setup = Setup::default().queue_size(1).without(without);
        let mut frontend = Frontend::attach(daemon.socket(), &setup)?;
        let at = Placed::APART;
        for sector in 100..150 {
            let chain = |flags| in_pieces(&at, 512, &[], &[], flags);
            write_then_read(&daemon, &mut frontend, &at, (sector, 512), chain, true)?;
        }
    }
    Ok(())
}

fn queue_of_two_entries(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    for without in [0, feature::EVENT_IDX] {
        let setup = Setup::default().queue_size(2).without(without);
        let mut frontend = Frontend::attach(daemon.socket(), &setup)?;
        for sector in 200..250 {
            let at = Placed { header: DATA - 16, data: DATA, status: DATA + 512 };
            let chain = |flags| match flags {
                0 => vec![Desc::readable(at.header, 528), Desc::writable(at.status, 1)],
                _ => vec![Desc::readable(at.header, 16), Desc::writable(at.data, 513)],
            };
            write_then_read(&daemon, &mut frontend, &at, (sector, 512), chain, false)?;
        }
    }
    Ok(())
}

fn queue_of_1024_entries(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default().queue_size(1024))?;
    // A full ring, twice: with direct chains of three descriptors, and with one indirect chain for
    // each entry.
    for (chains, indirect) in [(341, false), (1024, true)] {
        for slot in 0..chains {
            let sector = u64::from(slot) * 3;
            let (header, status) = frontend.put_header(0, slot, blk::IN, sector)?;
            let chain = [
                Desc::readable(header, 16),
                Desc::writable(data_of(slot), 512),
                Desc::writable(status, 1),
            ];
            let ring = &mut frontend.rings[0];
            if indirect {
                ring.put_indirect(slot, SCRATCH + u64::from(slot) * 48, &chain);
                ring.offer(slot);
            } else {
                ring.put_chain(3 * slot, &chain);
                ring.offer(3 * slot);
            }
        }
        frontend.rings[0].kick()?;
        let mut heads = Vec::new();
        for _ in 0..chains {
            let used = frontend.rings[0].wait_used()?;
            assert_eq!(used.bytes, 513);
            heads.push(u16::try_from(used.head)?);
        }
        heads.sort_unstable();
        let step = if indirect { 1 } else { 3 };
        assert_eq!(heads, (0..chains).map(|slot| slot * step).collect::<Vec<_>>());
        for slot in 0..chains {
            let data = frontend.memory.read(data_of(slot), SECTOR_BYTES)?;
            assert!(data == sector_content(u64::from(slot) * 3), "slot {slot}");
        }
    }
    Ok(())
}

/// The data address of a slot in a full queue, not in the order of sectors.
fn data_of(slot: u16) -> u64 {
    DATA + u64::from(slot ^ 0x155) * 1024
}

fn chain_of_1024_descriptors(engine: Engine) -> Result<()> {
    let daemon = start(&DaemonOptions::new(engine))?;
    let mut frontend = Frontend::attach(daemon.socket(), &Setup::default().queue_size(1024))?;
    for indirect in [false, true] {
        let (header, status) = frontend.put_header(0, 0, blk::IN, 8)?;
        let mut chain = vec![Desc::readable(header, 16)];
        chain.extend((0..1022).map(|slot| Desc::writable(data_of(slot), 512)));
        chain.push(Desc::writable(status, 1));
        let used = execute(&mut frontend, indirect, &chain)?;
        assert_eq!(used, 1022 * 512 + 1);
        for slot in 0..1022 {
            let data = frontend.memory.read(data_of(slot), SECTOR_BYTES)?;
            assert!(data == sector_content(8 + u64::from(slot)), "slot {slot}");
        }
    }
    Ok(())
}
