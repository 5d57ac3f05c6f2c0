//! Reads into memory of the disk's own.

use super::*;

/// Whoever asks for parts gets them from the same budget, one after the other.
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
            if stats.bytes.get() == budget_bytes as u64 {
                let mut next = Box::pin(disk.read_part(0, 512));
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                assert!(next.as_mut().poll(&mut cx).is_pending());
                drop(part);
                assert_eq!(thread.block_on(next).unwrap().unwrap().bytes(), 512);
            }
        }
        assert_eq!(stats.waits.get() > 0, budget_bytes == 64 << 10);
        assert_eq!(stats.bytes.get(), 0);
        assert!(thread.block_on(disk.read_part(MIB, 512)).unwrap().is_err());
        assert!(thread.block_on(disk.read_part(MIB, 0)).unwrap().unwrap().is_empty());
    }
}
