//! The requests of an IoThread with their states, and its connections as requests see them.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use blockio::Io;
use blockio::disk::Extent;
use blockio::driver::{Owner, RemoteOp, TaskRef};
use iomem::{Buffers, fits};

use super::answer::{Failure, Progress};
use super::borrower::Borrower;
use super::shared::SharedExport;
use super::wire::{Command, FLAG_FUA, Request};

/// A request as it was made.
#[derive(Debug, Clone, Copy)]
pub(super) struct IssuedRequest {
    pub(super) request: Request,
    pub(super) since: Instant,
    /// True for a write that has ended only when a flush has, too.
    pub(super) is_flushed: bool,
}

impl IssuedRequest {
    pub(super) fn new(io: &Io, request: Request) -> Self {
        Self { request, since: io.recently(), is_flushed: false }
    }

    /// Returns true if the request promises that data is on stable storage.
    pub(super) fn is_durable(&self) -> bool {
        let Request { command, flags, .. } = self.request;
        self.is_flushed || command == Command::Flush || flags & FLAG_FUA != 0
    }
}

#[derive(Default)]
pub(super) struct Requests {
    pub(super) slots: Vec<Slot>,
    pub(super) free: Vec<u32>,
    /// Requests without a connection.
    pub(super) waiting: VecDeque<u32>,
    pub(super) links: Vec<Link>,
    pub(super) deferred: Vec<Deferred>,
    serial: u32,
}

/// A connection as requests see it.
#[derive(Default)]
pub(super) struct Link {
    pub(super) task: Option<TaskRef>,
    pub(super) is_up: bool,
    /// The time since which the server is late with its oldest request, at the last check.
    pub(super) stalled_since: Option<Instant>,
    /// True if the link takes no further requests: its connection ends when no answer is due.
    pub(super) is_retiring: bool,
    /// The size of the export, as the connection knows it.
    pub(super) size_bytes: u64,
    /// True if the connection reports holes.
    pub(super) knows_holes: bool,
    /// Requests that were not sent, or not completely.
    pub(super) sending: VecDeque<u32>,
    /// Requests that were sent, and not answered.
    pub(super) sent: usize,
    /// The number of sent requests that wait for much data.
    pub(super) large_reads: usize,
}

/// A request, and its state.
pub(super) struct Slot {
    /// Distinguishes answers to it from answers to earlier requests.
    pub(super) serial: u32,
    pub(super) state: State,
    pub(super) made: IssuedRequest,
    /// `None` once the request has ended.
    pub(super) remote_op: Option<RemoteOp>,
    /// True if the write was answered, and its flush is on the way. The flush goes by the
    /// connection of the write, for another may lead to a server that has come back without the
    /// write. If the connection breaks before the answer, both are made again. Until then the write
    /// counts as not answered.
    pub(super) is_flushing: bool,
    pub(super) buffers: Buffers,
    pub(super) progress: Progress,
    /// The number of changes that a flush covers.
    pub(super) covers: u64,
    pub(super) waiter: Waiter,
}

impl Slot {
    /// Returns the request to the server: as it was made, or the flush after it.
    pub(super) fn request(&self) -> Request {
        if self.is_flushing { Request::FLUSH } else { self.made.request }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Waiting,
    /// To be sent by this link.
    Queued(usize),
    /// Sent by this link.
    Sent(usize),
    Done(Result<Extent, Failure>),
    /// The waiter is to make it elsewhere.
    TurnedAway,
}

/// The waiter for a request.
pub(super) enum Waiter {
    None,
    Local(Owner),
    /// A request of another IoThread.
    Borrower(Borrower),
}

/// A step that is due when nothing is borrowed.
pub(super) enum Deferred {
    Wake(Owner),
    Complete(Borrower, Result<Extent, Failure>),
    TurnAway(Borrower),
    Drop(Buffers),
}

/// A read of at least this size is received directly into its memory.
pub(super) const LARGE_BYTES: u64 = 16 << 10;

impl Requests {
    /// Returns the requests that a link has sent, without their memory: data for them goes nowhere.
    pub(super) fn sent_by(&mut self, index: usize) -> Self {
        let mut left = Self::default();
        left.links.resize_with(self.links.len(), Link::default);
        for slot in &mut self.slots {
            let is_sent = slot.state == State::Sent(index);
            left.slots.push(Slot {
                serial: slot.serial,
                state: if is_sent { slot.state } else { State::Free },
                made: slot.made,
                remote_op: None,
                is_flushing: slot.is_flushing,
                buffers: Buffers::empty(),
                progress: if is_sent {
                    std::mem::take(&mut slot.progress)
                } else {
                    Progress::default()
                },
                covers: 0,
                waiter: Waiter::None,
            });
        }
        let link = &self.links[index];
        (left.links[index].sent, left.links[index].large_reads) = (link.sent, link.large_reads);
        left
    }

    /// Returns the ranges that sent requests change.
    pub(super) fn changed_ranges(&self) -> Vec<Range<u64>> {
        let sent = self.slots.iter().filter(|slot| matches!(slot.state, State::Sent(_)));
        sent.filter_map(|slot| slot.request().changed_range()).collect()
    }

    /// Discards the wakes and drops that are due.
    pub(super) fn forget_done(&mut self) {
        self.deferred.clear();
    }

    /// Returns true if all requests have ended.
    pub(super) fn are_idle(&self) -> bool {
        let has_ended = |state| matches!(state, State::Free | State::Done(_) | State::TurnedAway);
        self.slots.iter().all(|slot| has_ended(slot.state))
    }

    /// Asserts that no slot is left for a ticket that has gone.
    pub(super) fn assert_released(&self) {
        let free = self.slots.iter().filter(|slot| slot.state == State::Free);
        debug_assert_eq!(free.clone().count(), self.free.len(), "each free slot is in the list");
        debug_assert!(free.clone().all(|slot| slot.remote_op.is_none()), "a free slot counts");
        let is_ended = |slot: &Slot| matches!(slot.state, State::Done(_) | State::TurnedAway);
        debug_assert!(!self.slots.iter().any(is_ended), "a request that has ended has a slot");
    }

    pub(super) fn oldest(&self, which: impl Fn(State) -> bool) -> Option<Instant> {
        let slots = self.slots.iter().filter(|slot| which(slot.state));
        slots.map(|slot| slot.made.since).min()
    }

    pub(super) fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.serial
    }

    /// Handles the answer to a request. The request ends, unless a task waits for a flush after it.
    pub(super) fn handle_answer(
        &mut self,
        number: u32,
        result: Result<Extent, i32>,
        shared: &SharedExport,
    ) {
        let slot = &self.slots[number as usize];
        if let (Command::Flush, Err(errno)) = (slot.request().command, result) {
            shared.record_failed_flush(errno);
        }
        let is_written = slot.made.is_flushed && !slot.is_flushing && result.is_ok();
        match slot.state {
            State::Sent(index) if is_written && !matches!(slot.waiter, Waiter::None) => {
                self.flush_by(index, number, shared);
            }
            _ => self.finish(number, result, shared),
        }
    }

    /// Makes a link flush its write for a request.
    fn flush_by(&mut self, index: usize, number: u32, shared: &SharedExport) {
        let serial = self.next_serial();
        let (slot, link) = (&mut self.slots[number as usize], &mut self.links[index]);
        slot.serial = serial;
        slot.progress = Progress::default();
        slot.covers = shared.changes();
        (slot.is_flushing, slot.state) = (true, State::Queued(index));
        link.sent -= 1;
        link.sending.push_back(number);
    }

    /// Ends a request.
    pub(super) fn finish(
        &mut self,
        number: u32,
        result: Result<Extent, i32>,
        shared: &SharedExport,
    ) {
        let slot = &mut self.slots[number as usize];
        let request = slot.request();
        if let State::Sent(index) = slot.state {
            let link = &mut self.links[index];
            link.sent -= 1;
            link.large_reads -= usize::from(is_large_read(&request));
        }
        // Another connection has broken in the meantime, and data that this request promises may be
        // lost.
        let is_broken = slot.made.is_durable() && shared.is_lost();
        let result = if is_broken { result.and(Err(libc::EIO)) } else { result };
        if result.is_ok() {
            match request.command {
                Command::Flush => shared.record_flush(slot.covers),
                command if command.changes() && !slot.made.is_durable() => shared.count_change(),
                _ => {}
            }
        }
        let is_of_flush = slot.is_flushing;
        let result = result.map_err(|errno| Failure { errno, is_of_flush });
        match std::mem::replace(&mut slot.waiter, Waiter::None) {
            Waiter::Local(owner) => {
                slot.state = State::Done(result);
                slot.remote_op = None;
                self.deferred.push(Deferred::Wake(owner));
            }
            waiter => {
                // The list is dropped before the owner of its memory is notified.
                let buffers = self.release(number);
                self.deferred.push(Deferred::Drop(buffers));
                if let Waiter::Borrower(borrower) = waiter {
                    self.deferred.push(Deferred::Complete(borrower, result));
                }
            }
        }
    }

    /// Turns waiting requests away: they are to be made elsewhere.
    pub(super) fn turn_away(&mut self) {
        for number in std::mem::take(&mut self.waiting) {
            let slot = &mut self.slots[number as usize];
            match std::mem::replace(&mut slot.waiter, Waiter::None) {
                Waiter::None => self.waiting.push_back(number),
                Waiter::Local(owner) => {
                    slot.state = State::TurnedAway;
                    slot.remote_op = None;
                    self.deferred.push(Deferred::Wake(owner));
                }
                Waiter::Borrower(borrower) => {
                    let buffers = self.release(number);
                    self.deferred.extend([Deferred::Drop(buffers), Deferred::TurnAway(borrower)]);
                }
            }
        }
    }

    /// Takes the requests of other IoThreads, with their memory, which must be dropped first.
    pub(super) fn take_borrowed(&mut self) -> Vec<(Buffers, Waiter)> {
        let mut taken = Vec::new();
        for number in 0..self.slots.len() {
            let slot = &mut self.slots[number];
            if matches!(slot.waiter, Waiter::Borrower(_)) {
                let waiter = std::mem::replace(&mut slot.waiter, Waiter::None);
                let number = fits(number, "the requests of a disk");
                self.waiting.retain(|other| *other != number);
                taken.push((self.release(number), waiter));
            }
        }
        taken
    }

    pub(super) fn release(&mut self, number: u32) -> Buffers {
        let slot = &mut self.slots[number as usize];
        debug_assert_ne!(slot.state, State::Free, "a slot is freed once");
        slot.state = State::Free;
        slot.remote_op = None;
        slot.progress = Progress::default();
        self.free.push(number);
        debug_assert!(!self.waiting.contains(&number), "a free slot waits for nothing");
        std::mem::replace(&mut slot.buffers, Buffers::empty())
    }
}

impl Link {
    /// Returns true if the link can take a request up to `end`, if the export has this size.
    pub(super) fn takes(&self, end: u64, size_bytes: u64) -> bool {
        // The server decides about requests beyond the end.
        self.is_up && !self.is_retiring && (self.size_bytes >= end || end > size_bytes)
    }
}

pub(super) fn is_large_read(request: &Request) -> bool {
    request.command == Command::Read && request.len >= LARGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_takes_ranges_that_it_knows_and_ranges_beyond_the_export() {
        let link =
            |is_up, is_retiring| Link { is_up, is_retiring, size_bytes: 4096, ..Link::default() };
        for (end, size_bytes, expected) in [
            (0, 8192, true),
            (4096, 8192, true),
            (4097, 8192, false),
            (8192, 8192, false),
            (8193, 8192, true),
            (4096, 4096, true),
            (4097, 4096, true),
        ] {
            assert_eq!(link(true, false).takes(end, size_bytes), expected, "{end} {size_bytes}");
            assert!(!link(false, false).takes(end, size_bytes), "it is down");
            assert!(!link(true, true).takes(end, size_bytes), "it takes no more");
        }
    }

    #[test]
    fn reads_of_many_bytes_are_large() {
        let request = |command, len| Request { command, len, ..Request::FLUSH };
        for (command, len, expected) in [
            (Command::Read, LARGE_BYTES - 1, false),
            (Command::Read, LARGE_BYTES, true),
            (Command::Flush, LARGE_BYTES, false),
        ] {
            assert_eq!(is_large_read(&request(command, len)), expected, "{command:?} {len}");
        }
    }
}
