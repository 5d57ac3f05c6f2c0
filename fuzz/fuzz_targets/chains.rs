//! Descriptor chains over arbitrary guest memory, through a `Virtqueue` of either layout.
//!
//! The input is a set-up, actions, and behind these an image of guest memory. For any input, a
//! chain names mapped memory of the guest only, and the queue's counts add up.

#![no_main]

use std::collections::VecDeque;
use std::sync::Arc;

use iomem::Buffers;
use libfuzzer_sys::fuzz_target;
use ringhaul_fuzz::Input;
use virtqueue::{
    AnswerPlace, Chain, DeviceQueue, GuestMemory, LocalMemory, QueueConfig, QueueError, RingLayout,
    Virtqueue,
};

/// Two regions that touch, and a separate one with an unaligned end.
const RANGES: [(u64, u64); 3] = [(0, 0x2000), (0x2000, 0x1000), (0x8000, 0x1001)];
/// The bit of a split ring in the size of a queue, which is below.
const SPLIT: u16 = 1 << 15;
const SIZE_MASK: u16 = 0x7ff;
/// The place of the first descriptor in a new packed ring.
const PACKED_START: u16 = 1 << 15;
/// A map without the second region.
const FEWER_RANGES: [(u64, u64); 2] = [(0, 0x2000), (0x8000, 0x1001)];

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let memory = Arc::new(GuestMemory::anonymous(&RANGES).expect("memory"));
    let switches = input.u8();
    // The last bit of `switches` is for packed rings, and for sizes that are no power of two.
    let size = if switches & 0x80 == 0 { 1 << (switches & 7) | SPLIT } else { input.u16() };
    let layout = if size & SPLIT != 0 { RingLayout::Split } else { RingLayout::Packed };
    let first = if layout == RingLayout::Packed { PACKED_START } else { 0 };
    let config = QueueConfig {
        size: size & SIZE_MASK,
        event_idx: switches & 8 != 0,
        indirect: switches & 16 != 0,
        desc_table: if switches & 32 == 0 { 0 } else { input.u64() },
        avail_ring: if switches & 32 == 0 { 0x800 } else { input.u64() },
        used_ring: if switches & 32 == 0 { 0x1000 } else { input.u64() },
        next_avail: if switches & 64 == 0 { first } else { input.u16() },
    };
    let count = usize::from(input.u8());
    let actions = input.bytes(count);
    fill(&memory, input.rest());
    let local = LocalMemory::new(Arc::clone(&memory));
    let Ok(queue) = Virtqueue::new(local, layout, config, config.next_avail) else { return };
    let place = AnswerPlace::LastByte;
    let mut run = Run { queue, memory, config, layout, place, popped: VecDeque::new() };
    let mut actions = Input::new(actions);
    while !actions.is_empty() {
        run.step(&mut actions);
        assert!(run.queue.in_device() <= config.size);
        assert_eq!(usize::from(run.queue.in_device()), run.popped.len());
    }
});

/// Writes the image to all regions in turn.
fn fill(memory: &GuestMemory, mut image: &[u8]) {
    for (addr, size) in RANGES {
        let len = image.len().min(usize::try_from(size).expect("64 bits"));
        memory.write(addr, &image[..len]).expect("a region is mapped");
        image = &image[len..];
    }
}

struct Run {
    queue: Virtqueue,
    memory: Arc<GuestMemory>,
    config: QueueConfig,
    layout: RingLayout,
    place: AnswerPlace,
    popped: VecDeque<Chain>,
}

impl Run {
    fn step(&mut self, actions: &mut Input) {
        match actions.u8() % 12 {
            0..=2 => self.pop(),
            3 => self.push(actions.u8()),
            4 => {
                let _ = self.queue.publish();
            }
            5 => {
                let _ = self.queue.enable_kicks();
                let _ = self.queue.has_available();
            }
            6 => self.queue.disable_kicks(),
            7 => {
                // A write of the driver, mostly to the avail idx, or to the flags of a descriptor.
                let value = actions.u16();
                let addr = match actions.u8() {
                    slot @ 0..=127 if self.layout == RingLayout::Packed => {
                        let slot = u16::from(slot) % self.config.size;
                        self.config.desc_table.wrapping_add(16 * u64::from(slot) + 14)
                    }
                    0..=127 => self.config.avail_ring.wrapping_add(2),
                    other => u64::from(other) * 64,
                };
                let _ = self.memory.write(addr, &value.to_le_bytes());
            }
            8 => {
                let ranges = if actions.u8() & 1 == 0 { &FEWER_RANGES[..] } else { &RANGES[..] };
                self.memory = Arc::new(GuestMemory::anonymous(ranges).expect("memory"));
                let _ = self.queue.set_memory(LocalMemory::new(Arc::clone(&self.memory)));
            }
            9 => self.queue.force_call(),
            10 => {
                let is_front = actions.u8() & 1 == 0;
                self.place = if is_front { AnswerPlace::Front } else { AnswerPlace::LastByte };
                self.queue.set_answer_place(self.place);
            }
            _ => self.use_chain(actions),
        }
    }

    fn pop(&mut self) {
        let before = self.queue.next_chain();
        match self.queue.pop() {
            Ok(Some(chain)) => {
                assert_eq!(self.queue.next_chain(), before.wrapping_add(1));
                assert!(chain.head < self.config.size);
                check(&chain);
                if chain.fault.is_some() {
                    assert!(chain.readable.is_empty());
                    let most = if self.place == AnswerPlace::Front { usize::MAX } else { 1 };
                    assert!(chain.writable.bytes() <= most);
                }
                self.popped.push_back(chain);
            }
            Ok(None) => assert_eq!(self.queue.next_chain(), before),
            Err(QueueError::MemoryGone { .. }) => panic!("nobody takes this memory away"),
            // The device would stop here; another pop must still do no harm.
            Err(_) => assert_eq!(self.queue.next_chain(), before),
        }
    }

    fn push(&mut self, choice: u8) {
        let chain = if choice & 1 == 0 { self.popped.pop_front() } else { self.popped.pop_back() };
        if let Some(Chain { head, writable, .. }) = chain {
            let written = u32::try_from(writable.bytes()).expect("chains are below 4 GiB");
            if choice & 2 == 0 {
                drop(writable);
            }
            self.queue.push(head, written);
        }
    }

    fn use_chain(&mut self, actions: &mut Input) {
        let Some(chain) = self.popped.back_mut() else { return };
        let (offset, len) = (usize::from(actions.u16()), usize::from(actions.u8()));
        let rest = |list: &Buffers| list.bytes().saturating_sub(offset).min(len);
        let mut data = vec![0x5a; len];
        assert_eq!(chain.readable.copy_to(offset, &mut data), rest(&chain.readable));
        assert_eq!(chain.writable.copy_from(offset, &data), rest(&chain.writable));
        if actions.u8() & 1 == 0 {
            let before = chain.writable.bytes();
            let status = chain.writable.take_last_byte();
            assert_eq!(chain.writable.bytes(), before.saturating_sub(1));
            assert_eq!(status.is_some(), before > 0);
            if let Some(status) = status {
                status.write(0);
            }
        }
        let before = chain.readable.bytes();
        chain.readable.advance(offset);
        assert_eq!(chain.readable.bytes(), before.saturating_sub(offset));
        check(chain);
    }
}

fn check(chain: &Chain) {
    let whole = chain.memory.whole();
    check_list(&chain.readable, whole.iovecs());
    check_list(&chain.writable, whole.iovecs());
}

/// Checks that each range is in one region, and that the totals of the list are right.
fn check_list(list: &Buffers, regions: &[libc::iovec]) {
    let mut sum = 0;
    for range in list.iovecs() {
        let start = range.iov_base.addr();
        assert!(range.iov_len > 0, "an empty range");
        let inside = regions.iter().any(|region| {
            let offset = start.wrapping_sub(region.iov_base.addr());
            offset < region.iov_len && range.iov_len <= region.iov_len - offset
        });
        assert!(inside, "a range outside of guest memory");
        sum += range.iov_len;
    }
    assert_eq!(list.bytes(), sum);
    assert_eq!(list.is_empty(), sum == 0);
}
