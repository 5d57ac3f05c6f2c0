//! The answer to each type of request: status, used length, data, and the resulting disk contents.

use anyhow::{Context, Result, ensure};
use ringhaul_kit::daemon::{Daemon, DaemonOptions, SECTOR_BYTES, pattern, sector_content};
use ringhaul_kit::for_each_engine;
use ringhaul_kit::frontend::ring::Desc;
use ringhaul_kit::frontend::{DATA, Frontend, RequestOutcome, Setup, blk, feature, segment};
use ringhaul_kit::server::Engine;

use crate::start;

for_each_engine! {
    requests_answer_with_status_and_length,
    an_id_is_padded_and_cut,
    a_serial_is_that_of_the_disk,
    segments_are_carried_out,
    bad_segments_are_refused_as_a_whole,
    flags_are_checked_first,
    segments_longer_than_announced_are_refused,
    requests_out_of_range_are_refused,
    short_headers_are_refused,
    unknown_types_are_refused,
    large_buffers_without_data_are_not_zeroed,
    blocks_of_4096_bytes,
    a_read_only_disk_does_not_change,
}

const DISK_BYTES: u64 = 16 << 20;
const DISK_SECTORS: u64 = DISK_BYTES / 512;
const UNMAP: u32 = 1;

fn attach(options: &DaemonOptions) -> Result<(Daemon, Frontend)> {
    let daemon = start(options)?;
    let frontend = Frontend::attach(daemon.socket(), &Setup::default())?;
    Ok((daemon, frontend))
}

/// Expects an answer without data.
#[track_caller]
fn expect(answer: &RequestOutcome, status: u8) {
    let RequestOutcome { status: seen, used_bytes, .. } = *answer;
    assert_eq!((seen, used_bytes), (status, 1));
}

fn requests_answer_with_status_and_length(engine: Engine) -> Result<()> {
    let (daemon, mut frontend) = attach(&DaemonOptions::new(engine).with("--serial", "rh-1"))?;
    for queue in [0, 1] {
        for (sector, bytes) in [(0, 512), (3, 1024), (5, 131_072)] {
            let answer = frontend.request(queue, blk::IN, sector, &[], bytes)?;
            assert_eq!((answer.status, answer.used_bytes as usize), (blk::OK, bytes + 1));
            let sectors = u64::try_from(bytes / SECTOR_BYTES)?;
            let content = (sector..sector + sectors).flat_map(sector_content).collect::<Vec<_>>();
            assert!(answer.data == content, "{bytes} bytes at sector {sector}");
            let data = pattern(sector + 9, bytes);
            expect(&frontend.request(queue, blk::OUT, sector + 6000, &data, 0)?, blk::OK);
            assert!(daemon.read_disk(sector + 6000, bytes)? == data);
        }
        // An empty request is not an error, as long as its sector is on the disk.
        expect(&frontend.request(queue, blk::IN, 7, &[], 0)?, blk::OK);
        expect(&frontend.request(queue, blk::OUT, 7, &[], 0)?, blk::OK);
        expect(&frontend.request(queue, blk::IN, DISK_SECTORS, &[], 0)?, blk::OK);
        expect(&frontend.request(queue, blk::FLUSH, 0, &[], 0)?, blk::OK);
        let discard = frontend.request(queue, blk::DISCARD, 0, &segment(6000, 8, 0), 0)?;
        expect(&discard, blk::OK);
        let zeroes = frontend.request(queue, blk::WRITE_ZEROES, 0, &segment(6000, 8, 0), 0)?;
        expect(&zeroes, blk::OK);
        let id = frontend.request(queue, blk::GET_ID, 0, &[], 20)?;
        assert_eq!((id.status, id.used_bytes), (blk::OK, 21));
    }
    Ok(())
}

/// Two files of one name have different serials, and each serial survives a restart.
fn a_serial_is_that_of_the_disk(engine: Engine) -> Result<()> {
    let folders = [(); 2].map(|()| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")));
    let mut serials = Vec::new();
    for folder in &folders {
        let folder = folder.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
        let file = folder.path().join("secret.img");
        std::fs::File::create(&file).and_then(|file| file.set_len(DISK_BYTES))?;
        let options =
            DaemonOptions::new(engine).with("--disk", &format!("file,path={}", file.display()));
        let mut seen = Vec::new();
        for _ in 0..2 {
            let (_daemon, mut frontend) = attach(&options)?;
            seen.push(frontend.request(0, blk::GET_ID, 0, &[], 20)?.data);
        }
        ensure!(seen[0] == seen[1], "another serial after a restart: {seen:?}");
        ensure!(seen[0].iter().all(u8::is_ascii_alphanumeric), "{seen:?}");
        serials.extend(seen.pop());
    }
    ensure!(serials[0] != serials[1], "two files of one name have one serial: {serials:?}");
    Ok(())
}

fn an_id_is_padded_and_cut(engine: Engine) -> Result<()> {
    let serial = "twenty-bytes-exactly";
    let (_daemon, mut frontend) = attach(&DaemonOptions::new(engine).with("--serial", serial))?;
    for room in [1, 5, 19, 20, 21, 40, 5000] {
        let id = frontend.request(0, blk::GET_ID, 0, &[], room)?;
        assert_eq!((id.status, id.used_bytes as usize), (blk::OK, room + 1));
        let mut expected = serial.as_bytes().to_vec();
        expected.resize(room, 0);
        assert_eq!(id.data, expected);
    }
    expect(&frontend.request(0, blk::GET_ID, 0, &[], 0)?, blk::IOERR);
    Ok(())
}

fn segments_are_carried_out(engine: Engine) -> Result<()> {
    let (daemon, mut frontend) = attach(&DaemonOptions::new(engine))?;
    let places = [(0_u64, 1_u32), (8, 8), (17, 3), (24, 0), (64, 100), (300, 16)];
    let base = |round: u64| 400 * round;
    for (round, (kind, flags)) in
        (0..).zip([(blk::DISCARD, 0), (blk::WRITE_ZEROES, 0), (blk::WRITE_ZEROES, UNMAP)])
    {
        let segments = places.iter().flat_map(|&(at, n)| segment(base(round) + at, n, flags));
        let segments: Vec<u8> = segments.collect();
        expect(&frontend.request(0, kind, 0, &segments, 0)?, blk::OK);
        for at in 0..400 {
            let sector = base(round) + at;
            let seen = frontend.read(1, sector, SECTOR_BYTES)?;
            let within =
                places.iter().any(|&(start, n)| (start..start + u64::from(n)).contains(&at));
            let expected = if within { vec![0; SECTOR_BYTES] } else { sector_content(sector) };
            // A discarded sector may read as anything, but here it is a hole in a file.
            ensure!(seen == expected, "type {kind}, flags {flags}: sector {sector}");
            ensure!(daemon.read_disk(sector, SECTOR_BYTES)? == expected);
        }
    }
    // The maximum number of segments.
    let most = (0..16).flat_map(|n| segment(2000 + 2 * n, 1, 0)).collect::<Vec<_>>();
    expect(&frontend.request(0, blk::WRITE_ZEROES, 0, &most, 0)?, blk::OK);
    for sector in 2000..2032 {
        let zero = frontend.read(0, sector, SECTOR_BYTES)? == vec![0; SECTOR_BYTES];
        assert_eq!(zero, sector % 2 == 0, "sector {sector}");
    }
    Ok(())
}

/// Virtio 1.3, section 5.2.6.2: an unknown flag, and unmap in a discard, must be answered with
/// UNSUPP, even if the request has further faults.
fn flags_are_checked_first(engine: Engine) -> Result<()> {
    let (daemon, mut frontend) = attach(&DaemonOptions::new(engine))?;
    let good = segment(10, 1, 0);
    let half = vec![0; 8];
    for (kind, flags) in
        [(blk::DISCARD, UNMAP), (blk::DISCARD, 2), (blk::WRITE_ZEROES, 2), (blk::WRITE_ZEROES, 3)]
    {
        let wrong = segment(12, 1, flags);
        let beyond = |flags| segment(DISK_SECTORS, 1, flags);
        for bad in [
            wrong.clone(),
            beyond(flags),
            segment(0, u32::MAX, flags),
            [good.clone(), wrong.clone()].concat(),
            [beyond(0), wrong.clone()].concat(),
            [wrong.clone(), beyond(0)].concat(),
            [good.clone(), beyond(flags)].concat(),
            [vec![good.clone(); 15].concat(), wrong.clone()].concat(),
            [wrong.clone(), vec![good.clone(); 16].concat()].concat(),
            [wrong.clone(), half.clone()].concat(),
        ] {
            let answer = frontend.request(0, kind, 0, &bad, 0)?;
            let seen = (answer.status, answer.used_bytes);
            ensure!(seen == (blk::UNSUPP, 1), "type {kind}, {bad:x?}: {answer:?}");
        }
    }
    for sector in [10, 12] {
        assert!(daemon.read_disk(sector, SECTOR_BYTES)? == sector_content(sector));
    }
    Ok(())
}

/// The disk is larger than the maximum of a segment.
fn segments_longer_than_announced_are_refused(engine: Engine) -> Result<()> {
    let options = DaemonOptions { disk_bytes: 8 << 30, ..DaemonOptions::new(engine) };
    let (daemon, mut frontend) = attach(&options)?;
    let config = frontend.config(0, 60)?;
    let field = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| config[at + byte]));
    for (kind, max_sectors) in [(blk::DISCARD, field(36)), (blk::WRITE_ZEROES, field(48))] {
        for more in [1, max_sectors] {
            let answer = frontend.request(0, kind, 0, &segment(0, max_sectors + more, 0), 0)?;
            expect(&answer, blk::IOERR);
        }
        assert!(daemon.read_disk(0, SECTOR_BYTES)? == sector_content(0));
        let sector = (6 << 30) / 512;
        expect(&frontend.request(0, kind, 0, &segment(sector, max_sectors, 0), 0)?, blk::OK);
    }
    Ok(())
}

fn bad_segments_are_refused_as_a_whole(engine: Engine) -> Result<()> {
    let (daemon, mut frontend) = attach(&DaemonOptions::new(engine))?;
    let config = frontend.config(0, 60)?;
    let field = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| config[at + byte]));
    for (kind, max_sectors, max_segments) in
        [(blk::DISCARD, field(36), field(40)), (blk::WRITE_ZEROES, field(48), field(52))]
    {
        assert!(max_sectors > 0 && max_segments > 0);
        let too_many = vec![segment(10, 1, 0); usize::try_from(max_segments)? + 1].concat();
        for (bad, status) in [
            (Vec::new(), blk::IOERR),
            (segment(10, 1, 0)[..15].to_vec(), blk::IOERR),
            ([segment(10, 1, 0), vec![0]].concat(), blk::IOERR),
            (too_many, blk::IOERR),
            (segment(DISK_SECTORS, 1, 0), blk::IOERR),
            (segment(DISK_SECTORS - 1, 2, 0), blk::IOERR),
            (segment(1 << 55, 1, 0), blk::IOERR),
            (segment(u64::MAX, 1, 0), blk::IOERR),
            (segment(u64::MAX >> 9, 1, 0), blk::IOERR),
            (segment(0, max_sectors + 1, 0), blk::IOERR),
            (segment(0, u32::MAX, 0), blk::IOERR),
            (segment(10, 1, 2), blk::UNSUPP),
            (segment(10, 1, 0x8000_0000), blk::UNSUPP),
            (segment(10, 1, 3), blk::UNSUPP),
        ] {
            let answer = frontend.request(0, kind, 0, &bad, 0)?;
            ensure!((answer.status, answer.used_bytes) == (status, 1), "{bad:x?}: {answer:?}");
            if bad.len() == 16 {
                // A valid segment before an invalid one is not carried out.
                let both = [segment(20, 4, 0), bad.clone()].concat();
                let answer = frontend.request(0, kind, 0, &both, 0)?;
                ensure!((answer.status, answer.used_bytes) == (status, 1), "{both:x?}: {answer:?}");
            }
        }
    }
    for sector in [10, 20, 23, 0] {
        assert!(daemon.read_disk(sector, SECTOR_BYTES)? == sector_content(sector));
    }
    Ok(())
}

fn requests_out_of_range_are_refused(engine: Engine) -> Result<()> {
    let (daemon, mut frontend) = attach(&DaemonOptions::new(engine))?;
    let last = frontend.read(0, DISK_SECTORS - 1, SECTOR_BYTES)?;
    for (sector, bytes) in [
        (DISK_SECTORS, 512),
        (DISK_SECTORS - 1, 1024),
        (DISK_SECTORS - 255, 131_072),
        (1 << 55, 512),
        ((1 << 55) - 1, 512),
        ((1 << 55) - 1, 1024),
        (u64::MAX >> 9, 512),
        (u64::MAX, 512),
        (i64::MAX.unsigned_abs() >> 9, 1024),
        // Lengths that are no multiple of a sector.
        (0, 1),
        (0, 511),
        (0, 513),
    ] {
        let answer = frontend.request(0, blk::IN, sector, &[], bytes)?;
        ensure!(answer.status == blk::IOERR, "reading {bytes} bytes at {sector}: {answer:?}");
        ensure!([1, bytes + 1].contains(&(answer.used_bytes as usize)), "{answer:?}");
        if answer.used_bytes > 1 {
            // Bytes that count as written are zeroed, so no old memory contents remain.
            ensure!(answer.data == vec![0; bytes], "reading {bytes} bytes at {sector}");
        }
        let data = pattern(1, bytes);
        let answer = frontend.request(0, blk::OUT, sector, &data, 0)?;
        ensure!(answer.status == blk::IOERR, "writing {bytes} bytes at {sector}: {answer:?}");
        ensure!(answer.used_bytes == 1, "{answer:?}");
    }
    assert!(daemon.read_disk(DISK_SECTORS - 1, SECTOR_BYTES)? == last);
    assert!(daemon.read_disk(0, SECTOR_BYTES)? == sector_content(0));
    Ok(())
}

fn short_headers_are_refused(engine: Engine) -> Result<()> {
    let (_daemon, mut frontend) = attach(&DaemonOptions::new(engine))?;
    for len in 0..16 {
        let (header, status) = frontend.put_header(0, 0, blk::IN, 0)?;
        let used = frontend.execute(
            0,
            &[Desc::readable(header, len), Desc::writable(DATA, 512), Desc::writable(status, 1)],
        )?;
        let status = frontend.memory.read(status, 1)?[0];
        ensure!(status == blk::IOERR, "a header of {len} bytes: status {status}");
        ensure!([1, 513].contains(&used), "a header of {len} bytes: {used} bytes used");
    }
    // A chain with a status byte only.
    let (_, status) = frontend.put_header(0, 0, blk::IN, 0)?;
    assert_eq!(frontend.execute(0, &[Desc::writable(status, 1)])?, 1);
    assert_eq!(frontend.memory.read(status, 1)?, [blk::IOERR]);
    Ok(())
}

fn unknown_types_are_refused(engine: Engine) -> Result<()> {
    let (_daemon, mut frontend) = attach(&DaemonOptions::new(engine))?;
    // SCSI commands, GET_LIFETIME, SECURE_ERASE, zones, and undefined types.
    for kind in [2, 3, 5, 7, 9, 10, 12, 14, 15, 18, 24, 26, 0x1_0000, u32::MAX] {
        for (out, room) in [(0, 0), (512, 0), (0, 512), (512, 512)] {
            let answer = frontend.request(0, kind, 0, &vec![1; out], room)?;
            ensure!(answer.status == blk::UNSUPP, "type {kind}: {answer:?}");
            ensure!([1, room + 1].contains(&(answer.used_bytes as usize)), "{kind}: {answer:?}");
            let clean = answer.used_bytes == 1 || answer.data == vec![0; room];
            ensure!(clean, "type {kind} counts bytes as written that were not");
        }
    }
    Ok(())
}

/// The buffers of a failed request are zeroed so that the used length is true. If they are too
/// large for that, the used length covers only the written bytes.
fn large_buffers_without_data_are_not_zeroed(engine: Engine) -> Result<()> {
    const ZEROED_MAX: usize = 1 << 20;
    let (_daemon, mut frontend) = attach(&DaemonOptions::new(engine).with("--serial", "rh"))?;
    let unknown = 0x7777;
    for (kind, sector, expected, id_bytes) in [
        (blk::IN, DISK_SECTORS, blk::IOERR, 0),
        (blk::IN, u64::MAX, blk::IOERR, 0),
        (blk::FLUSH, 0, blk::OK, 0),
        (blk::GET_ID, 0, blk::OK, 20),
        (unknown, 0, blk::UNSUPP, 0),
    ] {
        for (more, is_zeroed) in [(0, true), (512, false)] {
            // Many buffers, so that their sum counts.
            let room = id_bytes + ZEROED_MAX + more;
            let before = vec![0x77; room];
            frontend.memory.write(DATA, &before)?;
            let (header, status) = frontend.put_header(0, 0, kind, sector)?;
            let mut chain = vec![Desc::readable(header, 16)];
            let mut addr = DATA;
            for piece in before.chunks(ZEROED_MAX / 8) {
                chain.push(Desc::writable(addr, u32::try_from(piece.len())?));
                addr += piece.len() as u64;
            }
            chain.push(Desc::writable(status, 1));
            let used = frontend.execute(0, &chain)? as usize;
            let what = format!("type {kind}, sector {sector}, room for {room} bytes");
            ensure!(frontend.memory.read(status, 1)? == [expected], "{what}: the status");
            ensure!(used == if is_zeroed { room + 1 } else { id_bytes }, "{what}: used {used}");
            let after = frontend.memory.read(DATA, room)?;
            let mut wanted = b"rh".to_vec();
            wanted.truncate(id_bytes);
            wanted.resize(id_bytes, 0);
            wanted.resize(room, if is_zeroed { 0 } else { 0x77 });
            ensure!(after == wanted, "{what}: what was written");
        }
    }
    Ok(())
}

fn blocks_of_4096_bytes(engine: Engine) -> Result<()> {
    let options = DaemonOptions::new(engine).with("--logical-block-size", "4096");
    let (daemon, mut frontend) = attach(&options)?;
    let config = frontend.config(0, 60)?;
    assert_eq!(config[..8], DISK_SECTORS.to_le_bytes(), "capacity is in sectors of 512 bytes");
    assert_eq!(config[20..24], 4096_u32.to_le_bytes(), "blk_size");
    assert_eq!(config[44..48], 8_u32.to_le_bytes(), "discard_sector_alignment is in sectors");
    // Sectors still have 512 bytes.
    let content = (8..24).flat_map(sector_content).collect::<Vec<_>>();
    assert!(frontend.read(0, 8, 8192)? == content);
    let data = pattern(4, 8192);
    frontend.write(0, 6000, &data)?;
    assert!(daemon.read_disk(6000, 8192)? == data);
    for (sector, bytes) in [(1, 4096), (4, 4096), (0, 512), (8, 4608), (0, 2048)] {
        for (kind, out, room) in [(blk::IN, 0, bytes), (blk::OUT, bytes, 0)] {
            let answer = frontend.request(0, kind, sector, &vec![9; out], room)?;
            ensure!(answer.status == blk::IOERR, "{bytes} bytes at sector {sector}: {answer:?}");
        }
    }
    for kind in [blk::DISCARD, blk::WRITE_ZEROES] {
        for (sector, sectors) in [(1, 8), (8, 1), (8, 12)] {
            let answer = frontend.request(0, kind, 0, &segment(sector, sectors, 0), 0)?;
            ensure!(answer.status == blk::IOERR, "{sectors} sectors at {sector}: {answer:?}");
        }
        expect(&frontend.request(0, kind, 0, &segment(6000, 8, 0), 0)?, blk::OK);
    }
    assert!(daemon.read_disk(6000, 4096)? == vec![0; 4096]);
    assert!(daemon.read_disk(6008, 4096)? == data[4096..]);
    assert!(daemon.read_disk(0, 4096)? == (0..8).flat_map(sector_content).collect::<Vec<_>>());
    Ok(())
}

fn a_read_only_disk_does_not_change(engine: Engine) -> Result<()> {
    let (daemon, mut frontend) = attach(&DaemonOptions::new(engine).with("--read-only", ""))?;
    let writing = feature::DISCARD | feature::WRITE_ZEROES;
    assert_eq!(frontend.features & writing, 0, "a read-only disk offers what writes");
    let data = pattern(2, 512);
    expect(&frontend.request(0, blk::OUT, 0, &data, 0)?, blk::IOERR);
    for kind in [blk::DISCARD, blk::WRITE_ZEROES] {
        let answer = frontend.request(0, kind, 0, &segment(0, 8, 0), 0)?;
        ensure!(answer.status != blk::OK, "type {kind} was carried out");
    }
    expect(&frontend.request(0, blk::FLUSH, 0, &[], 0)?, blk::OK);
    for sector in 0..8 {
        let seen = frontend.read(1, sector, SECTOR_BYTES);
        assert!(seen.context("after refused writes")? == sector_content(sector));
    }
    assert!(daemon.read_disk(0, SECTOR_BYTES)? == sector_content(0));
    Ok(())
}
