//! One job: a queue kept full from a source of I/O.

#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;

use iomem::fits;

use crate::arrivals::Arrivals;
use crate::pattern::{Io, Op, Source};
use crate::stats::{Counters, JobProgress, Notices, describe_failure};
use crate::verify::{BlockMap, PREFILL};

/// The queue of a job's requests: a virtqueue or an engine. A slot identifies a request. The caller
/// puts at most one request at a time into a slot.
pub(crate) trait Queue {
    /// Queues a request, which reads into the slot's memory or writes from it.
    fn queue(&mut self, slot: u32, io: &Io) -> io::Result<()>;
    /// Copies `data` into the slot's memory.
    fn store(&mut self, slot: u32, data: &[u8]) -> io::Result<()>;
    /// Copies the slot's memory into `data`.
    fn load(&self, slot: u32, data: &mut [u8]) -> io::Result<()>;
    /// Takes the next completed request.
    fn next_completion(&mut self) -> io::Result<Option<Completed>>;
    /// Kicks if requests were queued and the device asks for it. Returns true after a kick.
    fn kick_if_needed(&mut self) -> io::Result<bool>;
    /// Describes the failure of a request, before its slot is used again.
    fn describe_error(&self, done: &Completed) -> String;
    /// The name of a unit, if there can be several.
    fn unit_name(&self, unit: u16) -> Option<String>;
}

/// A completed request. The result is 0, or an error in the queue's own terms.
pub(crate) struct Completed {
    pub(crate) slot: u32,
    pub(crate) result: i32,
}

/// The number of requests that a job makes in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch {
    /// The least number, unless none is in flight.
    pub(crate) min: usize,
    /// The most.
    pub(crate) max: usize,
}

impl Batch {
    /// No limits: as many requests as there is room for.
    pub(crate) const ALL: Self = Self { min: 1, max: usize::MAX };
}

/// A job of the run. Made once; each phase sets a new source.
pub(crate) struct Job {
    source: Option<Source>,
    /// Indexed by slot.
    requests: Box<[PendingRequest]>,
    free: Vec<u32>,
    /// Indexed by unit, if blocks are verified.
    maps: Option<Arc<[BlockMap]>>,
    /// A block of data on its way to or from the data memory, if blocks are verified.
    scratch: Box<[u8]>,
    batch: Batch,
    flush_every: u64,
    /// Indexed by unit.
    writes_since_flush: Box<[u64]>,
    /// The unit to flush next.
    flush_due: Option<u16>,
    /// The schedule of an open loop; `None` to make requests as soon as there is room.
    arrivals: Option<Arrivals>,
    /// All blocks that could come next are claimed; a completion may free them.
    blocked: bool,
    done: (u64, u64),
    job_progress: Arc<JobProgress>,
    pub(crate) counters: Counters,
}

/// A request in flight, or the last one of a free slot.
#[derive(Clone, Copy)]
struct PendingRequest {
    io: Io,
    /// The time at which it was queued or, in an open loop, due.
    start_ns: u64,
}

/// The input to one pass of a job.
pub(crate) struct Pass<'a> {
    pub(crate) now_ns: u64,
    /// The measured window is open.
    pub(crate) recording: bool,
    /// The job makes no new requests.
    pub(crate) stopping: bool,
    pub(crate) notices: &'a Notices,
}

impl Job {
    /// A job with `depth` slots for requests of up to `slot_bytes` bytes to `units` units.
    pub(crate) fn new(
        (depth, slot_bytes): (u32, usize),
        units: usize,
        batch: Batch,
        maps: Option<Arc<[BlockMap]>>,
    ) -> Self {
        let idle = PendingRequest { io: flush_io(0), start_ns: 0 };
        Self {
            source: None,
            requests: (0..depth).map(|_| idle).collect(),
            free: (0..depth).rev().collect(),
            maps,
            scratch: vec![0; slot_bytes].into_boxed_slice(),
            batch,
            flush_every: 0,
            writes_since_flush: vec![0; units].into(),
            flush_due: None,
            arrivals: None,
            blocked: false,
            done: (0, 0),
            job_progress: Arc::new(JobProgress::default()),
            counters: Counters::new(),
        }
    }

    /// Fills the memory of all slots with random bytes from `seed`. Without verification these are
    /// the data of writes.
    pub(crate) fn fill(&mut self, queue: &mut impl Queue, seed: u64) -> io::Result<()> {
        let mut rng = fastrand::Rng::with_seed(seed);
        for slot in (0..self.requests.len()).filter_map(|slot| u32::try_from(slot).ok()) {
            rng.fill(&mut self.scratch);
            queue.store(slot, &self.scratch)?;
        }
        Ok(())
    }

    /// Starts a phase. `flush_every` counts writes, 0 for never. `arrivals` is `None` unless the
    /// loop is open.
    pub(crate) fn begin(&mut self, source: Source, flush_every: u64, arrivals: Option<Arrivals>) {
        self.source = Some(source);
        self.flush_every = flush_every;
        self.arrivals = arrivals;
        self.writes_since_flush.fill(0);
        self.flush_due = None;
        self.blocked = false;
        self.done = (0, 0);
        self.job_progress.publish(self.done);
    }

    pub(crate) fn job_progress(&self) -> Arc<JobProgress> {
        Arc::clone(&self.job_progress)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// Returns true if the source has no further I/O.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.source.is_none()
    }

    /// Starts the schedule of an open loop.
    pub(crate) fn begin_arrivals(&mut self, now_ns: u64) {
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.begin(now_ns);
        }
    }

    /// Returns true if there is room for I/O, and I/O to make now or later.
    fn may_refill(&self) -> bool {
        self.has_room() && !self.is_exhausted() && !self.blocked
    }

    /// Returns the time at which the next I/O of an open loop is due, if there is room for it.
    pub(crate) fn refill_at_ns(&self) -> Option<u64> {
        self.arrivals.as_ref().filter(|_| self.may_refill()).map(Arrivals::next_ns)
    }

    /// Returns true if there is I/O to make. Calls `now_ns` only for an open loop.
    pub(crate) fn can_refill(&self, now_ns: impl Fn() -> u64) -> bool {
        let is_due = |arrivals: &Arrivals| arrivals.next_ns() <= now_ns();
        self.may_refill() && self.arrivals.as_ref().is_none_or(is_due)
    }

    fn has_room(&self) -> bool {
        let enough = self.free.len() >= self.batch.min || self.in_flight() == 0;
        enough && !self.free.is_empty()
    }

    /// Lets a job try again after it found all blocks claimed.
    pub(crate) fn unblock(&mut self) {
        self.blocked = false;
    }

    /// Takes completed requests, makes as many new requests as there is room for, and kicks if the
    /// server asks for it. Returns the number of completed requests.
    pub(crate) fn turn(&mut self, queue: &mut impl Queue, pass: &Pass<'_>) -> io::Result<u64> {
        let mut completed = 0;
        while let Some(done) = queue.next_completion()? {
            self.finish(queue, &done, pass)?;
            completed += 1;
        }
        if completed > 0 {
            self.unblock();
            self.job_progress.publish(self.done);
        }
        if pass.stopping {
            self.job_progress.publish_left(fits(self.in_flight(), "a number of requests"));
        } else if self.has_room() {
            self.refill(queue, pass.now_ns)?;
        }
        if queue.kick_if_needed()? && pass.recording {
            self.counters.kicks += 1;
        }
        Ok(completed)
    }

    fn finish(&mut self, queue: &impl Queue, done: &Completed, pass: &Pass<'_>) -> io::Result<()> {
        let Completed { slot, result } = *done;
        let PendingRequest { io, start_ns } = self.requests[index(slot)];
        self.free.push(slot);
        if self.maps.is_some() {
            self.finish_verified(queue, slot, &io, (result == 0, pass.notices))?;
        }
        if result != 0 {
            self.counters.errors[io.op.index()] += 1;
            let unit = || queue.unit_name(io.unit);
            pass.notices.add(|| describe_failure(&io, unit(), &queue.describe_error(done)));
            return Ok(());
        }
        if io.op != Op::Flush {
            self.done.0 += 1;
            self.done.1 += u64::from(io.len);
        }
        if pass.recording {
            let latency_ns = pass.now_ns.saturating_sub(start_ns);
            self.counters.ops[io.op.index()].record(io.len, latency_ns);
        }
        Ok(())
    }

    fn finish_verified(
        &mut self,
        queue: &impl Queue,
        slot: u32,
        io: &Io,
        (ok, notices): (bool, &Notices),
    ) -> io::Result<()> {
        let Some(map) = self.maps.as_ref().map(|maps| &maps[usize::from(io.unit)]) else {
            return Ok(());
        };
        let len = index(io.len);
        match io.op {
            Op::Read => {
                if ok {
                    let data = &mut self.scratch[..len];
                    queue.load(slot, data)?;
                    match map.check(io.offset, data) {
                        Ok(blocks) => self.counters.verified += blocks,
                        Err(mismatch) => {
                            self.counters.mismatches += 1;
                            notices.add(|| match queue.unit_name(io.unit) {
                                Some(unit) => format!("unit {unit}: {mismatch}"),
                                None => mismatch.to_string(),
                            });
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

    fn refill(&mut self, queue: &mut impl Queue, now_ns: u64) -> io::Result<()> {
        for _ in 0..self.batch.max {
            let Some(slot) = self.free.last().copied() else { break };
            let mut start_ns = now_ns;
            let io = if let Some(unit) = self.flush_due.take() {
                flush_io(unit)
            } else if let Some((io, was_due_ns)) = self.next_due(now_ns) {
                start_ns = was_due_ns;
                io
            } else {
                break;
            };
            self.free.pop();
            self.requests[index(slot)] = PendingRequest { io, start_ns };
            self.queue_request(queue, slot, &io)?;
        }
        Ok(())
    }

    /// Takes the next I/O that is due by now, and the time since which it is due.
    fn next_due(&mut self, now_ns: u64) -> Option<(Io, u64)> {
        let due_ns = self.arrivals.as_ref().map_or(now_ns, Arrivals::next_ns);
        if due_ns > now_ns {
            return None;
        }
        let io = self.next_io()?;
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.advance();
        }
        Some((io, due_ns))
    }

    /// Takes the next I/O from the source, and claims its blocks if they are verified.
    fn next_io(&mut self) -> Option<Io> {
        let source = self.source.as_mut()?;
        let maps = self.maps.as_deref();
        for _ in 0..source.attempts() {
            let Some(io) = source.propose(maps) else {
                self.source = None;
                return None;
            };
            let map = maps.map(|maps| &maps[usize::from(io.unit)]);
            if map.is_none_or(|map| map.claim(io.offset, index(io.len))) {
                source.accept(&io);
                if source.is_done() {
                    self.source = None;
                }
                return Some(io);
            }
        }
        self.blocked = true;
        None
    }

    fn queue_request(&mut self, queue: &mut impl Queue, slot: u32, io: &Io) -> io::Result<()> {
        if io.op == Op::Write {
            self.count_write(io.unit);
        }
        if let Some(maps) = &self.maps
            && io.op != Op::Flush
        {
            let data = &mut self.scratch[..index(io.len)];
            match io.op {
                Op::Write => maps[usize::from(io.unit)].stamp(io.offset, data),
                _ => data.fill(PREFILL),
            }
            queue.store(slot, data)?;
        }
        queue.queue(slot, io)
    }

    fn count_write(&mut self, unit: u16) {
        let writes = &mut self.writes_since_flush[usize::from(unit)];
        *writes += 1;
        if *writes == self.flush_every {
            *writes = 0;
            self.flush_due = Some(unit);
        }
    }
}

fn flush_io(unit: u16) -> Io {
    Io { op: Op::Flush, unit, offset: 0, len: 0 }
}

/// Converts a slot or a length, which fits because the memory for it is in this process.
fn index(value: u32) -> usize {
    fits(value, "the number of a slot")
}
