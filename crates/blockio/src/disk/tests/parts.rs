//! Reads into memory that the disk provides.

use std::fs::File;
use std::os::fd::AsRawFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::*;

/// All requests for parts get them from the same budget, one after another.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn parts_are_read_into_memory_of_the_budget() {
    for (direct, budget_bytes) in [(false, 1 << 20), (true, 1 << 20), (true, 64 << 10)] {
        let file = temp_file(MIB);
        let expected = pattern(3, 1 << 20);
        std::fs::write(file.path(), &expected).unwrap();
        let bounce = BounceConfig { budget_bytes, ..BounceConfig::default() };
        let config = IoThreadConfig { bounce, ..IoThreadConfig::default() };
        let thread = IoThread::new(&config).unwrap();
        let disk = open_unknown(file.path(), direct).attach(thread.io());
        let stats = &thread.io().stats().bounce;
        let mut offset = 512;
        while offset < MIB {
            let part = thread.block_on(disk.read_part(offset, MIB - offset)).unwrap().unwrap();
            let at = usize::try_from(offset).unwrap();
            assert!(part.bytes() > 0 && part.bytes().is_multiple_of(512));
            assert!(part.to_vec() == expected[at..at + part.bytes()], "data differ at {at}");
            offset += part.bytes() as u64;
            assert!((part.bytes() as u64..=budget_bytes as u64).contains(&stats.bytes.get()));
            if offset == MIB || stats.bytes.get() == budget_bytes as u64 {
                // The next request waits, even if the budget has room.
                let mut next = Box::pin(disk.read_part(0, 512));
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                assert!(next.as_mut().poll(&mut cx).is_pending());
                drop(part);
                assert_eq!(thread.block_on(next).unwrap().unwrap().bytes(), 512);
            }
        }
        assert_eq!(stats.bytes.get(), 0);
        assert!(thread.block_on(disk.read_part(MIB, 512)).unwrap().is_err());
        assert!(thread.block_on(disk.read_part(MIB, 0)).unwrap().unwrap().is_empty());
    }
}

/// A file that another program has shortened, and that must not grow: the bytes before its end are
/// written.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_failed_write_reports_its_unwritten_part() {
    const END: u64 = 4096;
    for setup in SETUPS {
        for lead in [0, 512] {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = File::from(memfd_create("disk", flags).unwrap());
            file.set_len(3 * END).unwrap();
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let source = open_unknown(Path::new(&path), false);
            file.set_len(END).unwrap();
            fcntl_add_seals(&file, SealFlags::GROW).unwrap();
            let thread = thread_with(setup);
            let disk = source.attach(thread.io());
            let data = Buffers::aligned(8192, 512);
            let unfinished = thread.block_on(disk.write(lead, data, false)).unwrap().unwrap_err();
            assert_eq!(unfinished.error().raw_os_error(), Some(libc::EPERM), "{setup:?}");
            assert_eq!(unfinished.rest().bytes() as u64, 8192 - (END - lead), "{setup:?}");
        }
    }
}
