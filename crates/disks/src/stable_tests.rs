//! Durable writes, which each layer passes on whole: all pieces of a large one are stable.

use blockio::testing::{Event, RemoteStub};
use blockio::{DiskSource, IoThread, IoThreadConfig};
use iomem::Buffers;

const MIB: usize = 1 << 20;

/// A layer of 4 MiB over a disk that keeps a journal.
fn layers() -> Vec<(&'static str, RemoteStub, DiskSource)> {
    let new = |start: Vec<u8>, opened: &dyn Fn(DiskSource) -> DiskSource, name| {
        let mut content = start;
        content.resize(content.len() + 4 * MIB, 0);
        let below = RemoteStub::new(&content);
        (name, below.clone(), opened(below.source()))
    };
    vec![
        new(Vec::new(), &|below| below, "alone"),
        new(vec![0; MIB], &|below| DiskSource::raw(below, MIB as u64, None).unwrap(), "raw"),
        new(
            crate::luks::tests::header(|_| ()),
            &|below| crate::luks::open(below, &crate::luks::tests::options(true)).unwrap(),
            "LUKS",
        ),
    ]
}

/// The writes of a journal and how many of them are stable by themselves.
fn writes(journal: &[Event]) -> (usize, usize) {
    let count = |is_meant: fn(&Event) -> bool| journal.iter().filter(|it| is_meant(it)).count();
    (count(|event| matches!(event, Event::Write(..))), count(|it| matches!(it, Event::Stable)))
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn each_piece_of_a_durable_write_is_stable_and_of_no_other() {
    for (name, below, source) in layers() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        let mut before = below.events();
        for (fua, bytes) in [(false, 4 * MIB), (true, 4 * MIB), (true, 4096)] {
            let memory = Buffers::from_vec(vec![7; bytes]);
            thread.block_on(disk.write(0, memory, fua)).unwrap().unwrap();
            let journal = below.journal();
            let (pieces, stable) = writes(&journal[before..]);
            assert!(pieces > 0, "{name}");
            assert!(name != "LUKS" || bytes < MIB || pieces > 1, "it was written in one piece");
            assert_eq!(stable, if fua { pieces } else { 0 }, "{name}: {fua} {bytes}");
            before = journal.len();
        }
        thread.block_on(disk.write_zeroes(0, 4096, false)).unwrap().unwrap();
        thread.block_on(disk.flush()).unwrap().unwrap();
        let last = below.journal().pop();
        assert!(matches!(last, Some(Event::Flush)), "{name}: {last:?}");
    }
}

/// Another process is about to go on with the disk.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_layer_says_that_the_disk_below_cannot_be_written_back() {
    for (name, below, source) in layers() {
        assert!(source.hand_over().is_written_back(), "{name}");
        source.hand_over().write_back().unwrap();
        below.fail_write_back();
        let error = source.hand_over().write_back().unwrap_err().to_string();
        assert!(error.contains("its cache cannot be written"), "{name}: {error}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn a_write_that_fails_has_all_pieces_left_that_were_not_written() {
    for (name, below, source) in layers() {
        let thread = IoThread::new(&IoThreadConfig::default()).unwrap();
        let disk = source.attach(thread.io());
        below.have_some_fail(1);
        for fua in [false, true] {
            let memory = Buffers::from_vec(vec![7; 4 * MIB]);
            let unfinished = thread.block_on(disk.write(0, memory, fua)).unwrap().unwrap_err();
            assert_eq!(unfinished.error().raw_os_error(), Some(libc::EIO), "{name}");
            assert_eq!(unfinished.rest().bytes(), 4 * MIB, "{name}");
        }
    }
}
