//! The completion ring of a Linux AIO context, read in userspace.
//!
//! The kernel maps the ring at the address that is the context's id. Its layout is kernel ABI
//! (`struct aio_ring` in fs/aio.c): eight 32-bit words, then `nr` events of 32 bytes. The kernel
//! writes an event, a write barrier, then the tail; it reads the head when it needs room.
//!
//! There is one consumer: this type is neither `Send` nor `Sync`, and its owner does not call
//! io_getevents while it reads the ring.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use super::kernel::abi::IoEvent;
use crate::clock::yield_to_simulation;

const MAGIC: u32 = 0xa10a_10a1;
const HEADER_BYTES: u32 = 32;
/// The most events in a ring that is accepted: 2^20 events fill 32 MiB.
const EVENTS_MAX: u32 = 1 << 20;

#[repr(C)]
struct Header {
    id: AtomicU32,
    nr: AtomicU32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: AtomicU32,
    compat_features: AtomicU32,
    incompat_features: AtomicU32,
    header_length: AtomicU32,
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES as usize);
const _: () = assert!(size_of::<IoEvent>() == 32);

/// The error of a ring that cannot be read in userspace.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadRing;

/// The consumer's side of a ring.
pub(super) struct AioRing {
    header: *const Header,
    /// The number of events, read once: all arithmetic uses this copy.
    nr: u32,
    head: u32,
    not_send: PhantomData<*const ()>,
}

impl AioRing {
    /// Checks the header of the ring at `address`.
    ///
    /// # Safety
    ///
    /// `address` must be that of a context which outlives the ring, or of readable and writable
    /// memory that starts with a header and has room for the header's number of events.
    pub(super) unsafe fn new(address: usize) -> Result<Self, BadRing> {
        let header = address as *const Header;
        if header.is_null() || !header.is_aligned() {
            return Err(BadRing);
        }
        // SAFETY: the caller promises that a header is mapped there; its fields are atomics.
        let fields = unsafe { &*header };
        let nr = fields.nr.load(Ordering::Relaxed);
        let head = fields.head.load(Ordering::Relaxed);
        let good = fields.magic.load(Ordering::Relaxed) == MAGIC
            && fields.incompat_features.load(Ordering::Relaxed) == 0
            && fields.header_length.load(Ordering::Relaxed) == HEADER_BYTES
            && nr > 0
            && nr <= EVENTS_MAX
            && head < nr;
        if good { Ok(Self { header, nr, head, not_send: PhantomData }) } else { Err(BadRing) }
    }

    /// Places for events, of which one stays empty.
    pub(super) fn capacity(&self) -> u32 {
        self.nr
    }

    /// Returns true if there is an event, at the cost of one load.
    pub(super) fn has_events(&self) -> bool {
        // SAFETY: as in `consume`.
        let header = unsafe { &*self.header };
        header.tail.load(Ordering::Relaxed) != self.head
    }

    /// Passes each visible event to `visit`, and frees their places. Returns their number.
    pub(super) fn consume(&mut self, mut visit: impl FnMut(IoEvent)) -> Result<u64, BadRing> {
        // SAFETY: `new` checked the header, and its caller keeps it mapped.
        let header = unsafe { &*self.header };
        // Acquire pairs with the kernel's write barrier: events before the tail are complete.
        let tail = header.tail.load(Ordering::Acquire);
        if tail >= self.nr {
            return Err(BadRing);
        }
        if tail == self.head {
            return Ok(0);
        }
        let head = header.head.load(Ordering::Relaxed);
        assert!(head == self.head, "invariant 7: a second consumer reads the completion ring");
        let events = self.header.wrapping_add(1).cast::<IoEvent>();
        let mut count = 0;
        while self.head != tail {
            yield_to_simulation();
            // SAFETY: head < nr, and nr events follow the header. Volatile: the kernel writes
            // there, though not to places between head and tail.
            visit(unsafe { events.add(self.head as usize).read_volatile() });
            self.head = if self.head + 1 == self.nr { 0 } else { self.head + 1 };
            count += 1;
        }
        // Release: the copies above are made before the kernel may use the places again.
        header.head.store(self.head, Ordering::Release);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring in ordinary memory, filled as the kernel would.
    struct FakeRing(Vec<[u64; 4]>);

    impl FakeRing {
        fn new(nr: u32) -> Self {
            let mut ring = Self(vec![[0; 4]; nr as usize + 1]);
            for (word, value) in [(1, nr), (4, MAGIC), (5, 1), (7, HEADER_BYTES)] {
                ring.set(word, value);
            }
            ring
        }

        fn header(&self) -> &Header {
            // SAFETY: 32 bytes of aligned memory that live as long as `self`.
            unsafe { &*self.0.as_ptr().cast::<Header>() }
        }

        fn set(&mut self, word: usize, value: u32) {
            // SAFETY: word is below 8.
            unsafe { self.0.as_mut_ptr().cast::<u32>().add(word).write(value) };
        }

        fn ring(&self) -> Result<AioRing, BadRing> {
            // SAFETY: the memory starts with a header and holds nr events.
            unsafe { AioRing::new(self.0.as_ptr() as usize) }
        }

        fn produce(&mut self, data: u64) {
            let nr = self.header().nr.load(Ordering::Relaxed);
            let tail = self.header().tail.load(Ordering::Relaxed);
            self.0[tail as usize + 1] = [data, 0, data * 2, 0];
            self.header().tail.store((tail + 1) % nr, Ordering::Release);
        }
    }

    #[test]
    fn events_are_delivered_once_and_in_order_across_the_wrap() {
        let mut fake = FakeRing::new(5);
        let mut ring = fake.ring().unwrap();
        let mut next = 0;
        for burst in [1, 4, 3, 0, 2, 4, 4] {
            let expected: Vec<u64> = (next..next + burst).collect();
            next += burst;
            for &data in &expected {
                fake.produce(data);
            }
            let mut seen = Vec::new();
            let count = ring.consume(|event| seen.push(event.data)).unwrap();
            assert_eq!(seen, expected);
            assert_eq!(count, burst);
            let (head, tail) = (&fake.header().head, &fake.header().tail);
            assert_eq!(head.load(Ordering::Relaxed), tail.load(Ordering::Relaxed));
        }
    }

    #[test]
    fn a_place_is_free_only_when_its_event_was_copied() {
        let mut fake = FakeRing::new(5);
        let mut ring = fake.ring().unwrap();
        for data in 0..4 {
            fake.produce(data);
        }
        let mut seen = Vec::new();
        let count = ring.consume(|event| {
            // The kernel uses every place that the head marks as free.
            let head = fake.header().head.load(Ordering::Relaxed);
            while (fake.header().tail.load(Ordering::Relaxed) + 1) % 5 != head {
                fake.produce(100);
            }
            seen.push(event.data);
        });
        assert_eq!((count, seen), (Ok(4), vec![0, 1, 2, 3]));
    }

    #[test]
    fn a_header_that_is_not_as_expected_is_refused() {
        assert!(FakeRing::new(4).ring().is_ok());
        for (word, value) in [(1, 0), (1, EVENTS_MAX + 1), (2, 4), (4, 7), (6, 1), (7, 64)] {
            let mut fake = FakeRing::new(4);
            fake.set(word, value);
            assert_eq!(fake.ring().err(), Some(BadRing), "word {word} = {value}");
        }
    }

    #[test]
    fn a_tail_beyond_the_ring_is_refused() {
        let mut fake = FakeRing::new(4);
        let mut ring = fake.ring().unwrap();
        fake.set(3, 4);
        assert_eq!(ring.consume(|_| panic!("there is no such event")), Err(BadRing));
    }
}
