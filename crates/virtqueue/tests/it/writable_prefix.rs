//! Bad requests that are answered at the front of the device-writable bytes.

use std::sync::Arc;

use virtqueue::{AnswerPlace, ChainFault, LocalMemory, Virtqueue};

use crate::ring::{F_WRITE, HOLE, Hand, ISLAND, new_ring};

#[test]
fn a_bad_request_keeps_the_prefix_of_its_writable_buffers() {
    let read = (ISLAND, 16, 0);
    let (one, other) = ((ISLAND + 0x100, 0x10, F_WRITE), (ISLAND + 0x200, 0x20, F_WRITE));
    let (one_at, other_at) = ((ISLAND + 0x100, 0x10), (ISLAND + 0x200, 0x20));
    let unmapped = |addr, len| ChainFault::Unmapped { addr, len };
    let order = ChainFault::ReadableAfterWritable;
    type Case<'a> = (&'a [(u64, u32, u16)], ChainFault, &'a [(u64, usize)]);
    let cases: &[Case<'_>] = &[
        (&[(HOLE, 16, 0), one, other], unmapped(HOLE, 16), &[one_at, other_at]),
        (&[read, (HOLE - 8, 16, 0), one], unmapped(HOLE - 8, 16), &[one_at]),
        // Bytes after an unmapped one are no part of the front.
        (&[read, (HOLE, 8, F_WRITE), one], unmapped(HOLE, 8), &[]),
        (&[read, one, (HOLE, 8, F_WRITE), other], unmapped(HOLE, 8), &[one_at]),
        (&[read, one, (HOLE - 4, 8, F_WRITE)], unmapped(HOLE - 4, 8), &[one_at, (HOLE - 4, 4)]),
        (&[(HOLE, 1, 0), (HOLE + 1, 1, F_WRITE), one], unmapped(HOLE, 1), &[]),
        (&[(HOLE, 1, 0), one, (HOLE, 9, F_WRITE), other], unmapped(HOLE, 1), &[one_at]),
        (&[(HOLE, 1, 0), (HOLE, 0, F_WRITE), one], unmapped(HOLE, 1), &[one_at]),
        (&[read, (HOLE, 1, 0)], unmapped(HOLE, 1), &[]),
        (&[one, read], order, &[one_at]),
        (&[one, read, other, (HOLE, 1, 0)], order, &[one_at, other_at]),
    ];
    for (buffers, fault, expected) in cases {
        let mut ring = new_ring(16, false);
        ring.chain(3, buffers);
        let mut queue = Virtqueue::Split(ring.queue());
        queue.set_answer_place(AnswerPlace::Front);
        // The place of the answer stays when the map changes.
        queue.set_memory(LocalMemory::new(Arc::clone(&ring.memory))).expect("the same map");
        let chain = queue.pop().expect("the ring is good").expect("a chain is available");
        assert_eq!(chain.fault, Some(*fault), "{buffers:x?}");
        assert!(chain.readable.is_empty());
        let total: usize = expected.iter().map(|(_, bytes)| bytes).sum();
        let written: Vec<u8> = (1..).take(total).collect();
        assert_eq!(chain.writable.copy_from(0, &[&written[..], &[0xff]].concat()), total);
        let mut found = Vec::new();
        for &(addr, bytes) in *expected {
            let mut part = vec![0; bytes];
            ring.memory.read(addr, &mut part).expect("mapped");
            found.extend(part);
        }
        assert_eq!(found, written, "{buffers:x?}");
    }
}
