//! One virtqueue from the driver's side, with memory for each request in flight.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use iomem::fits;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use virtqueue::QueueConfig;
use virtqueue::driver::{Desc, PACKED_START};
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use crate::job::{Completed, Queue};
use crate::memory::{RequestLayout, SharedMemory};
use crate::pattern::{Io, Op};
use crate::plan::QueueShape;
use crate::requests::RequestKind;
use crate::ring::DriverRing;
use crate::vhost_user::Connection;

/// The layout of the shared region: rings, requests, indirect tables, data.
pub(crate) struct Layout {
    size: u16,
    ring_bytes: usize,
    requests_at: usize,
    tables_at: usize,
    data_at: usize,
    /// The size of the whole region.
    pub(crate) bytes: usize,
}

/// Alignment that keeps memory written by the driver and by the server in different cache lines.
const LINE_BYTES: usize = 64;

impl Layout {
    /// Lays out `rings` virtqueues, of which `shape.queues` have requests.
    pub(crate) fn new(
        rings: usize,
        shape: &QueueShape,
        request_layout: &RequestLayout,
    ) -> io::Result<Self> {
        let size = usize::from(shape.size);
        let ring_bytes = used_at(size) + (6 + 8 * size).next_multiple_of(LINE_BYTES);
        let requests_at = rings * ring_bytes;
        let slots = shape.slots * shape.queues;
        let page = rustix::param::page_size();
        let tables_at = (requests_at + slots * request_layout.stride).next_multiple_of(LINE_BYTES);
        let data_at = (tables_at + slots * table_bytes(shape)).next_multiple_of(page);
        let bytes =
            slots.checked_mul(shape.slot_bytes).and_then(|bytes| bytes.checked_add(data_at));
        let bytes = bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { size: shape.size, ring_bytes, requests_at, tables_at, data_at, bytes })
    }

    /// The place of ring `index`.
    pub(crate) fn ring(
        &self,
        index: usize,
        memory: &SharedMemory,
        is_packed: bool,
        (event_idx, indirect): (bool, bool),
    ) -> QueueConfig {
        let start = index * self.ring_bytes;
        let size = usize::from(self.size);
        QueueConfig {
            size: self.size,
            desc_table: memory.guest_addr(start),
            avail_ring: memory.guest_addr(start + avail_at(size)),
            used_ring: memory.guest_addr(start + used_at(size)),
            event_idx,
            indirect,
            next_avail: if is_packed { PACKED_START } else { 0 },
        }
    }
}

/// The distance of the indirect tables of adjacent slots.
fn table_bytes(shape: &QueueShape) -> usize {
    (16 * to_usize(shape.descriptors)).next_multiple_of(LINE_BYTES)
}

fn avail_at(size: usize) -> usize {
    (16 * size).next_multiple_of(LINE_BYTES)
}

fn used_at(size: usize) -> usize {
    avail_at(size) + (6 + 2 * size).next_multiple_of(LINE_BYTES)
}

/// The eventfds of a queue.
pub(crate) struct Eventfds {
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
}

impl Eventfds {
    pub(crate) fn new() -> io::Result<Self> {
        let make = || eventfd(0, EventfdFlags::CLOEXEC);
        Ok(Self { kick: make()?, call: make()? })
    }
}

/// A virtqueue. Each slot has descriptors, a request and data memory of its own.
pub(crate) struct Virtqueue {
    ring: DriverRing,
    /// The chain of the request that is described, kept for its memory.
    chain: Vec<Desc>,
    requests: RequestKind,
    request_layout: RequestLayout,
    /// Offsets of the first slot's request, indirect table and data.
    requests_at: usize,
    tables_at: usize,
    data_at: usize,
    table_bytes: usize,
    slot_bytes: usize,
    segment_bytes: usize,
    /// Indexed by slot.
    in_flight: Box<[bool]>,
    /// The avail idx at the last check for a kick.
    kick_checked_idx: u16,
    tag: u64,
    eventfds: Eventfds,
    /// Keeps the connection open: without it the server stops the queue.
    connection: Arc<Connection>,
}

impl Virtqueue {
    /// Makes request queue `index`.
    pub(crate) fn new(
        index: usize,
        ring: DriverRing,
        (layout, shape): (&Layout, &QueueShape),
        requests: RequestKind,
        eventfds: Eventfds,
        connection: Arc<Connection>,
    ) -> Self {
        let request_layout = requests.layout();
        let first = index * shape.slots;
        Self {
            chain: Vec::new(),
            requests,
            request_layout,
            requests_at: layout.requests_at + first * request_layout.stride,
            tables_at: layout.tables_at + first * table_bytes(shape),
            data_at: layout.data_at + first * shape.slot_bytes,
            table_bytes: table_bytes(shape),
            slot_bytes: shape.slot_bytes,
            segment_bytes: shape.segment_bytes,
            in_flight: vec![false; shape.slots].into(),
            kick_checked_idx: ring.next_avail(),
            tag: fits::<_, u64>(index, "the number of a queue") << 32,
            eventfds,
            connection,
            ring,
        }
    }

    #[inline]
    fn memory(&self) -> &SharedMemory {
        self.ring.memory()
    }

    #[inline]
    fn request_at(&self, slot: u32) -> usize {
        self.requests_at + to_usize(slot) * self.request_layout.stride
    }

    /// Describes the slot's request, which has `len` bytes of data, and makes it available.
    #[inline]
    fn offer(&mut self, slot: u32, op: Op, len: usize) {
        let request_at = self.request_at(slot);
        let data_in_last = op == Op::Read && self.request_layout.data_in_last && len > 0;
        let mut chain = std::mem::take(&mut self.chain);
        chain.clear();
        let memory = self.memory();
        let RequestLayout { header_bytes, response_at, response_bytes, .. } = self.request_layout;
        chain.push(Desc::readable(memory.guest_addr(request_at), header_bytes));
        let response = memory.guest_addr(request_at + response_at);
        let response = Desc::writable(response, response_bytes);
        if data_in_last {
            chain.push(response);
        }
        self.push_data(&mut chain, slot, op, len);
        if !data_in_last {
            chain.push(response);
        }
        self.in_flight[to_usize(slot)] = true;
        let table = self.tables_at + to_usize(slot) * self.table_bytes;
        self.ring.offer(slot, &chain, self.memory().guest_addr(table));
        self.chain = chain;
    }

    /// Describes data in segments.
    #[inline]
    fn push_data(&self, chain: &mut Vec<Desc>, slot: u32, op: Op, len: usize) {
        let start = self.data_at + to_usize(slot) * self.slot_bytes;
        let mut done = 0;
        while done < len {
            let part = (len - done).min(self.segment_bytes);
            let addr = self.memory().guest_addr(start + done);
            let bytes = fits(part, "the size of a segment");
            let make = if op == Op::Read { Desc::writable } else { Desc::readable };
            done += part;
            chain.push(make(addr, bytes));
        }
    }

    /// Returns the first `len` bytes of the slot's data memory.
    #[inline]
    fn data(&self, slot: u32, len: usize) -> io::Result<VolatileSlice<'_, impl BitmapSlice>> {
        let slot = to_usize(slot);
        if slot >= self.in_flight.len() || len > self.slot_bytes {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(self.memory().at(self.data_at + slot * self.slot_bytes, len))
    }

    /// Carries out one request outside of a run, in the first slot. `put` writes it to the given
    /// memory, at the slot's offset, with a tag. The device may write `room` bytes. Returns the
    /// memory and the offset, at which the response now is.
    pub(crate) fn execute(
        &mut self,
        put: impl FnOnce(&SharedMemory, usize, u64),
        room: usize,
    ) -> io::Result<(&SharedMemory, usize)> {
        self.data(FIRST_SLOT, room)?.copy_from(&vec![0_u8; room]);
        let at = self.request_at(FIRST_SLOT);
        put(self.memory(), at, self.tag);
        self.offer(FIRST_SLOT, Op::Read, room);
        self.kick_if_needed()?;
        while self.next_completion()?.is_none() {
            if !self.arm() {
                self.wait_for_call()?;
            }
        }
        self.disarm();
        Ok((self.memory(), at))
    }

    /// Returns the first `len` bytes that the device wrote in [`execute`](Self::execute).
    pub(crate) fn executed_data(&self, len: usize) -> io::Result<Vec<u8>> {
        let mut data = vec![0; len];
        self.load(FIRST_SLOT, &mut data)?;
        Ok(data)
    }

    /// Sleeps until the server calls.
    ///
    /// # Errors
    ///
    /// If the server has closed the connection.
    fn wait_for_call(&mut self) -> io::Result<()> {
        let mut fds = [
            PollFd::from_borrowed_fd(self.eventfds.call.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.connection.socket(), PollFlags::RDHUP),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !fds[1].revents().is_empty() {
            return Err(io::Error::other("it has closed the connection or died"));
        }
        self.take_calls().map(drop)
    }

    /// Returns true if the used ring has new elements.
    #[inline]
    pub(crate) fn has_completions(&self) -> bool {
        self.ring.has_used()
    }

    /// Asks for a call at the next completion. Returns true if there is a completion already: it
    /// may come without a call, so the caller must not sleep.
    pub(crate) fn arm(&mut self) -> bool {
        self.ring.enable_calls();
        self.has_completions()
    }

    /// Asks for no calls, before completions are taken.
    pub(crate) fn disarm(&mut self) {
        self.ring.disable_calls();
    }

    /// Returns the call eventfd, for polling.
    pub(crate) fn call_fd(&self) -> BorrowedFd<'_> {
        self.eventfds.call.as_fd()
    }

    /// Returns the number of calls since the last `take_calls`.
    pub(crate) fn take_calls(&mut self) -> io::Result<u64> {
        // The eventfd blocks, so it is read only when it is readable.
        let mut fds = [PollFd::new(&self.eventfds.call, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut fds, Some(&now))? == 0 {
            return Ok(0);
        }
        let mut calls = [0; 8];
        rustix::io::read(&self.eventfds.call, &mut calls)?;
        Ok(u64::from_ne_bytes(calls))
    }
}

impl Queue for Virtqueue {
    #[inline]
    fn queue(&mut self, slot: u32, io: &Io) -> io::Result<()> {
        let len = to_usize(io.len);
        if to_usize(slot) >= self.in_flight.len() || len > self.slot_bytes {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let tag = self.tag | u64::from(slot);
        self.requests.put(self.ring.memory(), self.request_at(slot), tag, io);
        self.offer(slot, io.op, len);
        Ok(())
    }

    fn store(&mut self, slot: u32, data: &[u8]) -> io::Result<()> {
        self.data(slot, data.len())?.copy_from(data);
        Ok(())
    }

    fn load(&self, slot: u32, data: &mut [u8]) -> io::Result<()> {
        self.data(slot, data.len())?.copy_to(data);
        Ok(())
    }

    #[inline]
    fn next_completion(&mut self) -> io::Result<Option<Completed>> {
        let Some(slot) = self.ring.take_used() else { return Ok(None) };
        let in_flight = slot.and_then(|slot| self.in_flight.get_mut(to_usize(slot)));
        let Some(slot) = slot.filter(|_| in_flight.is_some_and(std::mem::take)) else {
            return Err(io::Error::other("it completed a request that was not in flight"));
        };
        let result = self.requests.result(self.memory(), self.request_at(slot));
        Ok(Some(Completed { slot, result }))
    }

    #[inline]
    fn kick_if_needed(&mut self) -> io::Result<bool> {
        let next_avail = self.ring.next_avail();
        let kick_checked_idx = std::mem::replace(&mut self.kick_checked_idx, next_avail);
        let needed = kick_checked_idx != next_avail && self.ring.needs_kick(kick_checked_idx);
        if needed {
            rustix::io::retry_on_intr(|| rustix::io::write(&self.eventfds.kick, &ONE))?;
        }
        Ok(needed)
    }

    fn describe_error(&self, done: &Completed) -> String {
        self.requests.describe_error(self.memory(), self.request_at(done.slot), done.result)
    }

    fn unit_name(&self, unit: u16) -> Option<String> {
        self.requests.unit_name(unit)
    }
}

const FIRST_SLOT: u32 = 0;

/// The value that a kick adds to its eventfd.
const ONE: [u8; 8] = 1_u64.to_ne_bytes();

/// Converts a slot or a length, which fits because the memory for it is in this process.
#[inline]
fn to_usize(value: u32) -> usize {
    fits(value, "the number of a slot")
}
