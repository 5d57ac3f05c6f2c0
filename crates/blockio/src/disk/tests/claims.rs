//! Changes of blocks of which other requests write a part.

use super::*;
use crate::disk::file::partial_blocks::Blocks;

/// A discard between the two halves of such a write would bring the discarded data back.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn discards_and_zeroes_wait_for_writes_of_parts_of_their_blocks() {
    let file = temp_file(MIB);
    let mut source = open_unknown(file.path(), true);
    let SourceKind::File(inner) = &mut source.kind else { panic!("not a file") };
    let blocks = Arc::new(Blocks::new(4096));
    (inner.align.request, inner.blocks) = (4096, Some(Arc::clone(&blocks)));
    let thread = thread(EngineKind::Threads);
    let disk = source.attach(thread.io());
    for is_discard in [true, false] {
        let stats = &thread.io().stats();
        let ops = || stats.deallocate.ops.get() + stats.write.ops.get();
        let both = async {
            let claimed = blocks.claim(512, 512).await;
            let before = ops();
            let mut change: std::pin::Pin<Box<dyn Future<Output = io::Result<()>>>> =
                match is_discard {
                    true => Box::pin(disk.discard(0, 8192)),
                    false => Box::pin(disk.write_zeroes(0, 8192, false)),
                };
            let begun = std::future::poll_fn(|cx| {
                std::task::Poll::Ready(change.as_mut().poll(cx).is_ready())
            });
            assert!(!begun.await && ops() == before, "discard: {is_discard}");
            assert_eq!(thread.io().ops(), 0, "it has an op: discard: {is_discard}");
            drop(claimed);
            change.await.unwrap();
        };
        thread.block_on(both).unwrap();
    }
}

/// Neighbours in a block that is only written as a whole, from two IoThreads at once.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn parts_of_blocks_are_written_and_nothing_beside_them_is_lost() {
    const SECTORS: usize = 64;
    for (engine, _) in SETUPS {
        let file = temp_file(MIB);
        let mut source = open_unknown(file.path(), true);
        let SourceKind::File(inner) = &mut source.kind else { panic!("not a file") };
        (inner.align.request, inner.blocks) = (4096, Some(Arc::new(Blocks::new(4096))));
        let writer = |parity: usize| {
            let source = source.clone();
            std::thread::spawn(move || {
                let thread = thread(engine);
                let disk = Rc::new(source.attach(thread.io()));
                let left = Rc::new(Cell::new(SECTORS / 2));
                for sector in (parity..SECTORS).step_by(2) {
                    let (disk, left) = (Rc::clone(&disk), Rc::clone(&left));
                    let io = Rc::clone(thread.io());
                    thread.io().spawn(async move {
                        for round in 0..8 {
                            let data = Buffers::from_vec(pattern(sector + round, 512));
                            let offset = sector as u64 * 512;
                            // Zeroes of one thread lie in the same blocks as data of the other.
                            let is_zeroed = parity == 1 && round % 2 == 0;
                            match is_zeroed {
                                true => disk.write_zeroes(offset, 512, false).await.unwrap(),
                                false => disk.write(offset, data, false).await.unwrap(),
                            }
                            let target = Buffers::aligned(512, 512);
                            let view = target.duplicate();
                            disk.read(offset, target).await.unwrap();
                            let written = pattern(sector + round, 512);
                            let expected = if is_zeroed { vec![0; 512] } else { written };
                            assert_eq!(view.to_vec(), expected);
                        }
                        left.set(left.get() - 1);
                        if left.get() == 0 {
                            io.stop();
                        }
                    });
                }
                thread.run().unwrap();
                assert_eq!(left.get(), 0);
            })
        };
        let writers = [writer(0), writer(1)];
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let data = std::fs::read(file.path()).unwrap();
        for sector in 0..SECTORS {
            assert_eq!(data[sector * 512..][..512], pattern(sector + 7, 512), "sector {sector}");
        }
        assert!(data[SECTORS * 512..].iter().all(|byte| *byte == 0) && data.len() == 1 << 20);
    }
}
