//! One job: a virtqueue kept full from a source of I/O.

#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;

use crate::driver::{Completed, Queue};
use crate::pattern::{Io, Op, Source};
use crate::stats::{Counters, Live, Notices, describe_failure};
use crate::verify::{BlockMap, UNTOUCHED};

/// A job of the run. Made once; each phase gives it a new source.
pub(crate) struct Job {
    queue: Queue,
    source: Option<Source>,
    /// By slot.
    requests: Box<[Request]>,
    free: Vec<u32>,
    map: Option<Arc<BlockMap>>,
    /// One block of data on its way to or from the data memory, when blocks are verified.
    scratch: Box<[u8]>,
    flush_every: u64,
    writes_since_flush: u64,
    /// The blocks that could come next are taken; a completion may free them.
    blocked: bool,
    done: (u64, u64),
    live: Arc<Live>,
    pub(crate) counters: Counters,
}

/// A request in flight, or the last one of a free slot.
#[derive(Clone, Copy)]
struct Request {
    io: Io,
    queued_at_ns: u64,
}

/// What a job must know for one pass.
pub(crate) struct Pass<'a> {
    pub(crate) now_ns: u64,
    /// The measured window is open.
    pub(crate) recording: bool,
    /// No new requests are to be made.
    pub(crate) stopping: bool,
    pub(crate) notices: &'a Notices,
}

impl Job {
    /// Takes a queue with `depth` slots of `slot_bytes` bytes each and fills them with random
    /// bytes from `seed`, which is what writes write when blocks are not verified.
    pub(crate) fn new(
        mut queue: Queue,
        depth: u32,
        slot_bytes: usize,
        map: Option<Arc<BlockMap>>,
        seed: u64,
    ) -> io::Result<Self> {
        let mut scratch = vec![0; slot_bytes].into_boxed_slice();
        let mut rng = fastrand::Rng::with_seed(seed);
        for slot in 0..depth {
            rng.fill(&mut scratch);
            queue.store(slot, &scratch)?;
        }
        let idle = Request { io: Io { op: Op::Flush, offset: 0, len: 0 }, queued_at_ns: 0 };
        Ok(Self {
            queue,
            source: None,
            requests: (0..depth).map(|_| idle).collect(),
            free: (0..depth).rev().collect(),
            map,
            scratch,
            flush_every: 0,
            writes_since_flush: 0,
            blocked: false,
            done: (0, 0),
            live: Arc::new(Live::default()),
            counters: Counters::new(),
        })
    }

    /// Starts a phase. `flush_every` is in writes, 0 for never.
    pub(crate) fn begin(&mut self, source: Source, flush_every: u64) {
        self.source = Some(source);
        self.flush_every = flush_every;
        self.writes_since_flush = 0;
        self.blocked = false;
        self.done = (0, 0);
        self.live.publish(self.done);
    }

    pub(crate) fn live(&self) -> Arc<Live> {
        Arc::clone(&self.live)
    }

    pub(crate) fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// Returns whether the source has no more I/O.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.source.is_none()
    }

    /// Returns whether there is room for I/O and there may be some to make.
    pub(crate) fn can_refill(&self) -> bool {
        !self.free.is_empty() && !self.is_exhausted() && !self.blocked
    }

    /// Lets a job try again that found all blocks taken.
    pub(crate) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Takes what has completed, makes as many new requests as there is room for, and kicks if
    /// the server asks for it. Returns how many requests have completed.
    pub(crate) fn turn(&mut self, pass: &Pass<'_>) -> io::Result<u64> {
        let mut completed = 0;
        while let Some(done) = self.queue.next_completion()? {
            self.finish(&done, pass)?;
            completed += 1;
        }
        if completed > 0 {
            self.unblock();
            self.live.publish(self.done);
        }
        if !pass.stopping {
            self.refill(pass.now_ns)?;
        }
        if self.queue.kick_if_needed()? && pass.recording {
            self.counters.kicks += 1;
        }
        Ok(completed)
    }

    fn finish(&mut self, done: &Completed, pass: &Pass<'_>) -> io::Result<()> {
        let Completed { slot, result } = *done;
        let Request { io, queued_at_ns } = self.requests[index(slot)];
        self.free.push(slot);
        if self.map.is_some() {
            self.finish_verified(slot, &io, result == 0, pass.notices)?;
        }
        if result != 0 {
            self.counters.errors[io.op.index()] += 1;
            pass.notices.add(|| describe_failure(&io, result));
            return Ok(());
        }
        if io.op != Op::Flush {
            self.done.0 += 1;
            self.done.1 += u64::from(io.len);
        }
        if pass.recording {
            let latency_ns = pass.now_ns.saturating_sub(queued_at_ns);
            self.counters.ops[io.op.index()].record(io.len, latency_ns);
        }
        Ok(())
    }

    fn finish_verified(
        &mut self,
        slot: u32,
        io: &Io,
        ok: bool,
        notices: &Notices,
    ) -> io::Result<()> {
        let Some(map) = &self.map else { return Ok(()) };
        let len = index(io.len);
        match io.op {
            Op::Read => {
                if ok {
                    let data = &mut self.scratch[..len];
                    self.queue.load(slot, data)?;
                    match map.check(io.offset, data) {
                        Ok(blocks) => self.counters.verified += blocks,
                        Err(mismatch) => {
                            self.counters.mismatches += 1;
                            notices.add(|| mismatch.to_string());
                        }
                    }
                }
                map.release_read(io.offset, len);
            }
            Op::Write => map.release_write(io.offset, len, ok),
            Op::Flush => {}
        }
        Ok(())
    }

    fn refill(&mut self, now_ns: u64) -> io::Result<()> {
        while let Some(slot) = self.free.last().copied() {
            let flush_due = self.flush_every > 0 && self.writes_since_flush >= self.flush_every;
            let io = if flush_due {
                self.writes_since_flush = 0;
                Io { op: Op::Flush, offset: 0, len: 0 }
            } else if let Some(io) = self.next_io() {
                io
            } else {
                break;
            };
            self.free.pop();
            self.requests[index(slot)] = Request { io, queued_at_ns: now_ns };
            self.queue_request(slot, &io)?;
        }
        Ok(())
    }

    /// Takes the next I/O from the source, and its blocks when they are verified.
    fn next_io(&mut self) -> Option<Io> {
        let source = self.source.as_mut()?;
        let map = self.map.as_deref();
        for _ in 0..source.attempts() {
            let Some(io) = source.propose(map) else {
                self.source = None;
                return None;
            };
            if map.is_none_or(|map| map.claim(io.offset, index(io.len))) {
                source.accept(&io);
                return Some(io);
            }
        }
        self.blocked = true;
        None
    }

    fn queue_request(&mut self, slot: u32, io: &Io) -> io::Result<()> {
        let len = index(io.len);
        match io.op {
            Op::Read => {
                if self.map.is_some() {
                    let data = &mut self.scratch[..len];
                    data.fill(UNTOUCHED);
                    self.queue.store(slot, data)?;
                }
                self.queue.read(slot, io.offset, len)
            }
            Op::Write => {
                self.writes_since_flush += 1;
                if let Some(map) = &self.map {
                    let data = &mut self.scratch[..len];
                    map.stamp(io.offset, data);
                    self.queue.store(slot, data)?;
                }
                self.queue.write(slot, io.offset, len)
            }
            Op::Flush => self.queue.flush(slot),
        }
    }
}

/// Slots and lengths are made from memory that is in this process, so they fit.
fn index(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
