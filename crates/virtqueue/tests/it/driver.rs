//! The device's side against the driver's side of `virtio-driver`. They share nothing but memory.
//! Every request comes back once and with the right data, and neither side sleeps for good.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use virtio_driver::virtqueue::{Virtqueue, VirtqueueLayout};
use virtio_driver::{VirtioFeatureFlags, iovec};
use virtqueue::driver::PACKED_START;
use virtqueue::{
    Chain, DeviceQueue, GuestMemory, LocalMemory, QueueConfig, RingLayout, Virtqueue as Device,
};

use crate::front_end::{Connection, Shared};
use crate::ring::contents;

/// The part of a request in the queue's memory: read by the device, then written.
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    header: [u8; 16],
    status: u8,
}

const SEGMENTS: usize = 4;
const SEGMENT_BYTES: usize = 64;
/// Bytes of data of one request: segments to the device, and segments from it.
const SLOT_BYTES: usize = 2 * SEGMENTS * SEGMENT_BYTES;

/// The lengths of the segments of one request.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) to_device: Vec<usize>,
    pub(crate) from_device: Vec<usize>,
}

impl Shape {
    fn descriptors(&self) -> usize {
        2 + self.to_device.len() + self.from_device.len()
    }
}

/// Returns the data of request `id` in one direction.
fn pattern(id: u64, direction: u8, len: usize) -> Vec<u8> {
    let mut seed = id.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(direction);
    let next = move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        seed.to_be_bytes()[1]
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn status_of(id: u64) -> u8 {
    id.to_le_bytes()[0] ^ 0x5a
}

/// The driver, and its record of its requests.
pub(crate) struct Driver<'a> {
    queue: Virtqueue<'a, Request>,
    /// The device's mapping, through which data is written and read. The driver's is a Rust slice.
    pub(crate) memory: Arc<GuestMemory>,
    data: usize,
    free_slots: Vec<usize>,
    free_descriptors: usize,
    /// The id, slot and shape of each request in the device, by head.
    pub(crate) pending: HashMap<u16, (u64, usize, Shape)>,
    pub(crate) next_id: u64,
}

impl<'a> Driver<'a> {
    pub(crate) fn new(
        shared: Shared<'a>,
        layout: RingLayout,
        size: u16,
        event_idx: bool,
    ) -> (Self, QueueConfig) {
        let mut features = features_of(layout);
        features.set(VirtioFeatureFlags::RING_EVENT_IDX, event_idx);
        let ring_bytes = ring_bytes(layout, size);
        let (ring, data) = shared.driver.split_at_mut(ring_bytes);
        let queue = Virtqueue::new(shared.translator, ring, size, features).expect("a good size");
        let config = QueueConfig {
            size,
            desc_table: addr_of(queue.desc_table_ptr()),
            avail_ring: addr_of(queue.driver_area_ptr()),
            used_ring: addr_of(queue.device_area_ptr()),
            event_idx,
            indirect: false,
            next_avail: start_of(layout),
        };
        let driver = Self {
            queue,
            memory: Arc::new(shared.device),
            data: data.as_ptr().addr(),
            free_slots: (0..usize::from(size)).collect(),
            free_descriptors: usize::from(size),
            pending: HashMap::new(),
            next_id: 0,
        };
        (driver, config)
    }

    /// Makes a request available without a kick. Returns false if there are too few descriptors.
    pub(crate) fn submit(&mut self, shape: &Shape) -> bool {
        if shape.descriptors() > self.free_descriptors {
            return false;
        }
        let slot = self.free_slots.pop().expect("a slot for each descriptor");
        let id = self.next_id;
        let start = self.data + slot * SLOT_BYTES;
        let place = |index: usize, len: usize| iovec {
            iov_base: std::ptr::without_provenance_mut(start + index * SEGMENT_BYTES),
            iov_len: len,
        };
        let to_device: usize = shape.to_device.iter().sum();
        let mut data = &pattern(id, 0, to_device)[..];
        for (index, &len) in shape.to_device.iter().enumerate() {
            let (segment, rest) = data.split_at(len);
            let addr = u64::try_from(start + index * SEGMENT_BYTES).expect("64 bits");
            self.memory.write(addr, segment).expect("data is shared");
            data = rest;
        }
        let head = self.queue.add_request(|request, add| {
            request.header[..8].copy_from_slice(&id.to_le_bytes());
            request.header[8..].copy_from_slice(&u64::MAX.to_le_bytes());
            request.status = !status_of(id);
            let header = (&raw mut request.header).cast();
            let status = (&raw mut request.status).cast();
            add(iovec { iov_base: header, iov_len: 16 }, false)?;
            for (index, &len) in shape.to_device.iter().enumerate() {
                add(place(index, len), false)?;
            }
            for (index, &len) in shape.from_device.iter().enumerate() {
                add(place(SEGMENTS + index, len), true)?;
            }
            add(iovec { iov_base: status, iov_len: 1 }, true)
        });
        let head = head.expect("there are descriptors");
        assert!(self.pending.insert(head, (id, slot, shape.clone())).is_none());
        self.free_descriptors -= shape.descriptors();
        self.next_id += 1;
        true
    }

    /// Takes all completed requests and checks them. Returns their number.
    pub(crate) fn complete(&mut self) -> usize {
        let completions: Vec<_> = self.queue.completions().collect();
        for completion in &completions {
            let (id, slot, shape) =
                self.pending.remove(&completion.id).expect("a request comes back once");
            assert_eq!(completion.req.status, status_of(id));
            let start = self.data + slot * SLOT_BYTES;
            let mut answer = Vec::new();
            for (index, &len) in shape.from_device.iter().enumerate() {
                let mut segment = vec![0; len];
                let addr = start + (SEGMENTS + index) * SEGMENT_BYTES;
                let addr = u64::try_from(addr).expect("64 bits");
                self.memory.read(addr, &mut segment).expect("data is shared");
                answer.extend(segment);
            }
            assert_eq!(answer, pattern(id, 1, answer.len()));
            self.free_slots.push(slot);
            self.free_descriptors += shape.descriptors();
        }
        completions.len()
    }

    /// Asks for calls. Returns true if there is a completed request to take already.
    pub(crate) fn enable_calls(&mut self) -> bool {
        self.queue.set_used_notif_enabled(true);
        // Without event idx, `virtio-driver` omits the full fence that this needs.
        fence(Ordering::SeqCst);
        self.queue.completions().has_next()
    }

    pub(crate) fn needs_kick(&mut self) -> bool {
        // As above.
        fence(Ordering::SeqCst);
        self.queue.avail_notif_needed()
    }
}

fn features_of(layout: RingLayout) -> VirtioFeatureFlags {
    let mut features = VirtioFeatureFlags::VERSION_1;
    features.set(VirtioFeatureFlags::RING_PACKED, layout == RingLayout::Packed);
    features
}

/// The place of the first chain.
fn start_of(layout: RingLayout) -> u16 {
    if layout == RingLayout::Packed { PACKED_START } else { 0 }
}

pub(crate) fn open(memory: Arc<GuestMemory>, layout: RingLayout, config: QueueConfig) -> Device {
    Device::new(LocalMemory::new(memory), layout, config, start_of(layout))
        .expect("the driver's set-up is good")
}

fn ring_bytes(layout: RingLayout, size: u16) -> usize {
    let layout = VirtqueueLayout::new::<Request>(1, usize::from(size), features_of(layout));
    layout.expect("a good size").end_offset
}

pub(crate) fn shared_bytes(layout: RingLayout, size: u16) -> usize {
    ring_bytes(layout, size) + usize::from(size) * SLOT_BYTES
}

fn addr_of(pointer: *const u8) -> u64 {
    u64::try_from(pointer.addr()).expect("64 bits")
}

/// Serves a request as a device does: checks its data, and answers.
pub(crate) fn serve(chain: &mut Chain) -> u32 {
    assert_eq!(chain.fault, None);
    let written = u32::try_from(chain.writable.bytes()).expect("short segments");
    let mut header = [0; 16];
    assert_eq!(chain.readable.copy_to(0, &mut header), 16);
    chain.readable.advance(16);
    let (id, rest) = header.split_first_chunk::<8>().expect("sixteen bytes");
    assert_eq!(rest, u64::MAX.to_le_bytes());
    let id = u64::from_le_bytes(*id);
    let data = contents(&chain.readable);
    assert_eq!(data, pattern(id, 0, data.len()));
    chain.writable.take_last_byte().expect("a status byte").write(status_of(id));
    let answer = pattern(id, 1, chain.writable.bytes());
    assert_eq!(chain.writable.copy_from(0, &answer), answer.len());
    written
}

/// A driver and a device that run alternately. The steps are small, so that anything that can come
/// between two accesses to the ring does.
struct Model<'a> {
    driver: Driver<'a>,
    device: Device,
    in_device: Vec<Chain>,
    unpublished: bool,
    kick: bool,
    call: bool,
    driver_state: State,
    device_state: State,
    /// True if chains were made available and the driver has not yet checked for a kick.
    unkicked: bool,
    heads_in_device: HashSet<u16>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum State {
    Awake,
    Asleep,
}

impl Model<'_> {
    fn driver_step(&mut self, choice: u8, shape: &Shape) {
        if self.driver_state == State::Asleep {
            if self.call {
                self.call = false;
                self.driver_state = State::Awake;
            }
            return;
        }
        match choice % 6 {
            0 | 1 if self.driver.submit(shape) => self.unkicked = true,
            2 => {
                self.driver.complete();
            }
            3 => self.driver.queue.set_used_notif_enabled(false),
            _ if self.unkicked => {
                self.kick |= self.driver.needs_kick();
                self.unkicked = false;
            }
            _ => {
                if !self.driver.enable_calls() {
                    self.driver_state = State::Asleep;
                }
            }
        }
    }

    fn device_step(&mut self, choice: u8, pick: usize) -> TestCaseResult {
        if self.device_state == State::Asleep {
            // A kick wakes it, and so does a request that the disk has completed.
            if self.kick || !self.in_device.is_empty() {
                self.kick = false;
                self.device_state = State::Awake;
                self.device.disable_kicks();
            }
            return Ok(());
        }
        match choice % 4 {
            0 | 1 => {
                if let Some(chain) = self.device.pop().expect("the driver is good") {
                    prop_assert!(self.heads_in_device.insert(chain.head), "popped twice");
                    self.in_device.push(chain);
                    return Ok(());
                }
            }
            2 if !self.in_device.is_empty() => {
                let mut chain = self.in_device.swap_remove(pick % self.in_device.len());
                let written = serve(&mut chain);
                self.heads_in_device.remove(&chain.head);
                self.device.push(chain.head, written);
                self.unpublished = true;
                return Ok(());
            }
            _ => {}
        }
        prop_assert_eq!(usize::from(self.device.in_device()), self.in_device.len());
        if self.unpublished || choice % 4 == 3 {
            self.call |= self.device.publish();
            self.unpublished = false;
        } else if self.device.enable_kicks() {
            prop_assert!(self.device.has_available());
            self.device.disable_kicks();
        } else {
            self.device_state = State::Asleep;
        }
        Ok(())
    }

    fn check_not_stuck(&self) -> TestCaseResult {
        let asleep = self.driver_state == State::Asleep && self.device_state == State::Asleep;
        let nothing_comes = !self.kick && !self.call && self.in_device.is_empty();
        let idle = self.driver.pending.is_empty();
        prop_assert!(!asleep || !nothing_comes || idle, "both sleep and a request is lost");
        Ok(())
    }

    /// Runs both sides, without new requests, until all requests have come back.
    fn drain(&mut self) -> TestCaseResult {
        let shape = Shape { to_device: vec![], from_device: vec![] };
        for turn in 0_u8.. {
            if self.driver.pending.is_empty() {
                return Ok(());
            }
            self.driver_step(if turn.is_multiple_of(2) { 2 } else { 5 }, &shape);
            self.device_step(turn % 3, 0)?;
            self.check_not_stuck()?;
            if turn == u8::MAX {
                break;
            }
        }
        self.drain()
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let lens = || prop::collection::vec(1..=SEGMENT_BYTES, 0..=SEGMENTS);
    (lens(), lens()).prop_map(|(to_device, from_device)| Shape { to_device, from_device })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn requests_complete_in_any_order_and_no_wake_is_lost(
        packed_size in prop::option::of(2..40_u16),
        bits in 1..6_u32,
        event_idx in any::<bool>(),
        steps in prop::collection::vec(
            (any::<bool>(), any::<u8>(), any::<u16>(), shapes()),
            0..400,
        ),
    ) {
        let layout = packed_size.map_or(RingLayout::Split, |_| RingLayout::Packed);
        // A packed ring has any size.
        let size = packed_size.unwrap_or(1 << bits);
        let mut connection = Connection::new();
        let shared = connection.share(shared_bytes(layout, size));
        let (driver, config) = Driver::new(shared, layout, size, event_idx);
        let memory = Arc::clone(&driver.memory);
        let mut model = Model {
            driver,
            device: open(memory, layout, config),
            in_device: Vec::new(),
            unpublished: false,
            kick: false,
            call: false,
            driver_state: State::Awake,
            device_state: State::Awake,
            unkicked: false,
            heads_in_device: HashSet::new(),
        };
        for (turn, choice, pick, shape) in steps {
            if turn {
                model.driver_step(choice, &shape);
            } else {
                model.device_step(choice, usize::from(pick))?;
            }
            model.check_not_stuck()?;
        }
        model.drain()?;
    }
}
