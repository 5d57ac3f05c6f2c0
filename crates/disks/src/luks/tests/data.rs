//! The handling of data and requests.

use std::fs::File;
use std::os::fd::AsRawFd;

use blockio::config::BounceConfig;
use blockio::disk::ExtentKind;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::*;

fn filled(bytes: usize) -> Buffers {
    let buffers = Buffers::aligned(bytes, 4096);
    let data: Vec<u8> = (0..=250).cycle().take(bytes).collect();
    buffers.copy_from(0, &data);
    buffers
}

/// Requests go piece by piece. The size of pieces does not change the content of the disk.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn pieces_and_whole_requests_are_the_same_on_the_disk() {
    let bytes = 200 << 10;
    let written = [4096, 12_288, 256 << 10].map(|piece_bytes_max| {
        let file = image(&header(|_| ()), MIB);
        let source = crate::luks::open(below(&file), &options(false)).unwrap();
        let bounce = BounceConfig { piece_bytes_max, ..BounceConfig::default() };
        let config = IoThreadConfig { bounce, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        let disk = source.attach(thread.io());
        thread.block_on(disk.write(1536, filled(bytes), true)).unwrap().unwrap();
        let read = Buffers::aligned(bytes, 512);
        let view = read.duplicate();
        thread.block_on(disk.read(1536, read)).unwrap().unwrap();
        assert_eq!(view.to_vec(), filled(bytes).to_vec());
        thread.block_on(disk.write_zeroes(256 << 10, bytes as u64, false)).unwrap().unwrap();
        let read = Buffers::aligned(bytes, 512);
        let view = read.duplicate();
        read.copy_from(0, &vec![1; bytes]);
        thread.block_on(disk.read(256 << 10, read)).unwrap().unwrap();
        assert_eq!(view.to_vec(), vec![0; bytes]);
        assert_eq!(thread.io().stats().bounce.bytes.get(), 0, "memory is left over");
        std::fs::read(file.path()).unwrap()
    });
    assert!(written[0] == written[1] && written[0] == written[2]);
    // The fourth sector of the data, encrypted on its own.
    let mut sector = filled(512).to_vec();
    Cipher::new(&volume_key()).unwrap().run(Direction::Encrypt, &mut sector, 512, 3);
    let at = usize::try_from(DATA_OFFSET).unwrap() + 1536;
    assert_eq!(written[0][at..at + 512], sector);
}

/// The header determines the position of the first sector and the end of the data.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn positions_and_the_end_of_data_follow_the_header() {
    let start = header(|metadata| {
        metadata["segments"]["0"]["iv_tweak"] = json!("8");
        metadata["segments"]["0"]["size"] = json!("8192");
    });
    let file = image(&start, MIB);
    let source = crate::luks::open(below(&file), &options(false)).unwrap();
    assert_eq!(source.info().size_bytes, 8192);
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = source.attach(thread.io());
    thread.block_on(disk.write(4096, filled(4096), true)).unwrap().unwrap();
    let read = Buffers::aligned(4096, 512);
    let view = read.duplicate();
    thread.block_on(disk.read(4096, read)).unwrap().unwrap();
    assert_eq!(view.to_vec(), filled(4096).to_vec());
    let mut expected = filled(4096).to_vec();
    let cipher = Cipher::new(&volume_key()).unwrap();
    for (chunk, position) in expected.chunks_mut(CHUNK_BYTES).zip((16..).step_by(CHUNK_BYTES / 512))
    {
        cipher.run(Direction::Encrypt, chunk, 512, position);
    }
    let written = std::fs::read(file.path()).unwrap();
    let at = usize::try_from(DATA_OFFSET).unwrap() + 4096;
    assert_eq!(written[at..at + 4096], expected);
    for offset in [8192, 4608] {
        let beyond = thread.block_on(disk.write(offset, filled(4096), false)).unwrap();
        assert_eq!(beyond.unwrap_err().error().raw_os_error(), Some(libc::EINVAL));
    }
    assert!(std::fs::read(file.path()).unwrap() == written, "nothing was written beyond the end");
}

/// Other programs read the same data: each sector is encrypted on its own, at a position in units
/// of 512 bytes.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn each_sector_of_a_long_request_has_its_own_position() {
    let (bytes, offset) = (8 * CHUNK_BYTES, 8192);
    for sector in [512, 1024, 4096] {
        let start = header(|metadata| metadata["segments"]["0"]["sector_size"] = json!(sector));
        let file = image(&start, MIB);
        let source = crate::luks::open(below(&file), &options(false)).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        thread.block_on(disk.write(offset, filled(bytes), true)).unwrap().unwrap();
        let mut expected = filled(bytes).to_vec();
        let cipher = Cipher::new(&volume_key()).unwrap();
        let positions = (offset / 512..).step_by(sector / 512);
        for (sector_data, position) in expected.chunks_mut(sector).zip(positions) {
            cipher.run(Direction::Encrypt, sector_data, sector, position);
        }
        let at = usize::try_from(DATA_OFFSET + offset).unwrap();
        let written = std::fs::read(file.path()).unwrap();
        assert!(written[at..at + bytes] == expected, "sectors of {sector} bytes");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn discards_are_passed_on_only_if_allowed() {
    for allowed in [false, true] {
        let file = image(&header(|_| ()), MIB);
        let source = crate::luks::open(below(&file), &options(allowed)).unwrap();
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        thread.block_on(disk.write(0, filled(65_536), false)).unwrap().unwrap();
        thread.block_on(disk.discard(0, 65_536)).unwrap().unwrap();
        let at = usize::try_from(DATA_OFFSET).unwrap();
        let is_gone = std::fs::read(file.path()).unwrap()[at..at + 65_536] == [0; 65_536];
        assert!(allowed || !is_gone, "a discard was passed on");
        assert_eq!(source.abilities().discard, allowed && below(&file).abilities().discard);
        assert_eq!(is_gone, source.abilities().discard);
        // Zeroes are data, and no hole, even if discards are allowed.
        assert!(below(&file).abilities().zeroes && !source.abilities().zeroes);
        thread.block_on(disk.write_zeroes(0, 4096, true)).unwrap().unwrap();
        assert_ne!(std::fs::read(file.path()).unwrap()[at..at + 4096], [0; 4096]);
        let extent = thread.block_on(disk.block_status(0, 4096)).unwrap().unwrap();
        assert_eq!(extent.kind, ExtentKind::Data);
    }
}

/// A part of a sector must not be discarded.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn the_unit_of_discards_is_a_sector_or_that_of_the_disk_below() {
    for (sector, unit_below) in [(512, 512), (4096, 512), (512, 4096), (4096, 4096)] {
        let start = header(|metadata| metadata["segments"]["0"]["sector_size"] = json!(sector));
        let file = image(&start, MIB);
        let logical = Some(unit_below);
        let options_below = DiskOptions { logical_block_bytes: logical, ..DiskOptions::default() };
        for allowed in [true, false] {
            let null = DiskSource::null(MIB, &options_below).unwrap();
            let options = LuksOptions { header: Some(below(&file)), ..options(allowed) };
            let unit = crate::luks::open(null, &options).unwrap().discard_bytes();
            let expected = sector.max(unit_below);
            assert_eq!(unit, allowed.then_some(expected), "{sector} {unit_below}");
        }
    }
}

#[test]
fn data_may_end_where_its_disk_ends() {
    let payload = |offset_bytes, size_bytes| Payload {
        offset_bytes,
        size_bytes,
        sector_bytes: 512,
        first_position: 0,
    };
    for (offset, size, is_there) in [
        (4096, Some(4096), true),
        (4096, Some(4608), false),
        (8192 - 512, None, true),
        (8191, None, true),
        (8192, None, false),
        (4096, Some(u64::MAX), false),
    ] {
        let checked = crate::luks::check_data_fits(payload(offset, size), 8192);
        assert_eq!(checked.is_ok(), is_there, "{offset} {size:?}: {checked:?}");
    }
}

/// No op is made below: a null disk answers at once. The loop checks its sources all the same.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_turn_of_the_loop_encrypts_and_decrypts_a_bounded_number_of_bytes() {
    const BYTES: u64 = 1 << 20;
    let file = image(&header(|_| ()), MIB);
    let null = DiskSource::null(4 * BYTES, &DiskOptions::default()).unwrap();
    let options = LuksOptions { header: Some(below(&file)), ..options(false) };
    let source = crate::luks::open(null, &options).unwrap();
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let io = std::rc::Rc::clone(thread.io());
    let (disk, memory) = (std::rc::Rc::new(source.attach(&io)), filled(1 << 20));
    for request in 0..12 {
        let (disk, memory) = (std::rc::Rc::clone(&disk), memory.duplicate());
        io.spawn(async move {
            match request % 3 {
                0 => disk.read(0, memory).await.unwrap(),
                1 => disk.write(0, memory, false).await.unwrap(),
                _ => disk.write_zeroes(0, BYTES, false).await.unwrap(),
            }
        });
    }
    let begun = io.stats().turns.get();
    while io.tasks() > 0 {
        thread.turn(blockio::Wait::Never).unwrap();
    }
    let turns = io.stats().turns.get() - begun;
    assert!(turns >= 12 / 2, "{turns} turns for 12 MiB");
}

/// The sector is the logical block. A size with a part of a sector is refused.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn sizes_are_whole_sectors() {
    let start = header(|metadata| metadata["segments"]["0"]["sector_size"] = json!(4096));
    let file = image(&start, MIB);
    let source = crate::luks::open(below(&file), &options(false)).unwrap();
    let info = source.info();
    assert_eq!((info.size_bytes, info.logical_block_bytes), (MIB - DATA_OFFSET, 4096));
    file.as_file().set_len(MIB + 512).unwrap();
    let refused = crate::luks::open(below(&file), &options(false)).unwrap_err().to_string();
    assert!(refused.contains("extend the underlying disk by 3584 bytes"), "{refused}");
    assert_eq!(source.covered_bytes().unwrap(), MIB - DATA_OFFSET);
    assert!(source.refresh().is_err() && source.info().size_bytes == MIB - DATA_OFFSET);
    assert_eq!(source.size_probe().unwrap().size_bytes().unwrap(), None);
    file.as_file().set_len(2 * MIB).unwrap();
    assert_eq!(source.size_probe().unwrap().size_bytes().unwrap(), Some(2 * MIB - DATA_OFFSET));
    assert_eq!(source.refresh().unwrap(), 2 * MIB - DATA_OFFSET);
    assert!(source.set_size(512, || ()).is_err());
    source.set_size(MIB, || ()).unwrap();
    assert_eq!(file.as_file().metadata().unwrap().len(), MIB + DATA_OFFSET);
    // A size that the header fixes cannot be changed.
    let start = header(|metadata| metadata["segments"]["0"]["size"] = json!("4096"));
    let fixed = crate::luks::open(below(&image(&start, MIB)), &options(false)).unwrap();
    assert!(fixed.info().size_bytes == 4096 && !fixed.abilities().resize);
    assert!(fixed.set_size(8192, || ()).is_err() && fixed.size_probe().is_none());
}

/// A file that ends before its data, and that must not grow: the part before its end is written.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_failed_write_reports_its_unwritten_part() {
    const THERE: u64 = 4096;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("disk", flags).unwrap());
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::write(&path, header(|_| ())).unwrap();
    file.set_len(MIB).unwrap();
    let below = DiskSource::file(path.as_ref(), &DiskOptions::default()).unwrap();
    let source = crate::luks::open(below, &options(false)).unwrap();
    file.set_len(DATA_OFFSET + THERE).unwrap();
    fcntl_add_seals(&file, SealFlags::GROW).unwrap();
    let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
    let disk = source.attach(thread.io());
    for lead in [0, 512] {
        let unfinished = thread.block_on(disk.write(lead, filled(8192), false)).unwrap();
        let unfinished = unfinished.unwrap_err();
        assert_eq!(unfinished.error().raw_os_error(), Some(libc::EPERM));
        assert_eq!(unfinished.rest().bytes() as u64, 8192 - (THERE - lead));
    }
}
