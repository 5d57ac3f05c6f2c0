//! The world as the kernel of the IoThreads.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use blockio::engine::kernel::sim::{self, KernelOp, RingSetup, SqThread};
use iomem::fits;

use super::{Actor, Event, Running, World};
use crate::content::SECTOR;
use crate::faults::{Class, Injected, check_op, class_of, outcome, rejection};

impl sim::World for World {
    fn now(&self) -> Instant {
        self.start + Duration::from_nanos(self.now.get())
    }

    fn preempt(&self) {
        self.pass();
        self.rush();
        if self.plan.preempt == 0
            || self.is_dead()
            || !self.inner.borrow_mut().rng.chance(self.plan.preempt)
        {
            return;
        }
        if self.inner.borrow_mut().rng.chance(500) {
            self.run_event();
        }
        self.interleave(Actor::Any);
    }

    fn spin(&self) {
        self.turn.spins.set(self.turn.spins.get() + 1);
        let longest = self.plan.poll_us * 200;
        let (step, acts) = {
            let rng = &mut self.inner.borrow_mut().rng;
            (rng.between(100, 100 + longest), rng.chance(400))
        };
        let until = self.now.get() + step;
        if self.is_dead() {
            return self.advance_to(until);
        }
        while self.next_event().is_some_and(|time| time <= until) {
            self.run_event();
        }
        if acts {
            self.interleave(Actor::Any);
        }
        self.advance_to(until);
    }

    fn ring(&self, depth: u32) -> RingSetup {
        let slack = fits::<_, u32>(self.plan.ring_slack, "a slack of entries");
        RingSetup {
            events: depth + 1 + slack,
            is_known: self.plan.ring_unknown == 0,
            has_fdsync: self.plan.no_fdsync == 0,
            defers: self.plan.defers > 0,
            has_uring_cmd: self.plan.no_uring_cmd == 0,
            submits_all: self.plan.no_submit_all == 0,
            sq_entries: u32::try_from(self.plan.sq_entries).ok().filter(|entries| *entries > 0),
        }
    }

    fn admit(&self, first: RawFd, count: usize, room: usize) -> Result<usize, libc::c_int> {
        let inner = &mut *self.inner.borrow_mut();
        let plan = &self.plan;
        if inner.is_void {
            return Ok(count.min(room));
        }
        let refused = if inner.refusals_to_come > 0 {
            inner.refusals_to_come -= 1;
            Some(libc::EAGAIN)
        } else if inner.rng.chance(plan.submit_eagain_burst) {
            inner.refusals_to_come = inner.rng.between(1, 16);
            Some(libc::EAGAIN)
        } else if inner.rng.chance(plan.submit_eagain) {
            Some(libc::EAGAIN)
        } else if inner.rng.chance(plan.submit_eintr) {
            Some(libc::EINTR)
        } else if let Some(disk) = inner.disks.iter_mut().find(|disk| disk.fd == first)
            && inner.rng.chance(disk.plan.submit_reject)
        {
            inner.counts.rejected += 1;
            let when = self.tick();
            // Only the engine knows which op it is; it may belong to a bad request.
            let (must_fail, class) = (false, Class::Any);
            let (offset, len, loses, refuses) = (0, u64::MAX, false, true);
            disk.injected.push(Injected { must_fail, class, when, offset, len, refuses, loses });
            Some(libc::EINVAL)
        } else {
            None
        };
        if let Some(errno) = refused {
            self.trace(|| format!("kernel: a submit of {count} ops fails with errno {errno}"));
            return Err(errno);
        }
        let most = count.min(room);
        if inner.rng.chance(plan.submit_partial) {
            return Ok(1 + inner.rng.index(most));
        }
        Ok(most)
    }

    fn ends_poll(&self) -> bool {
        self.inner.borrow_mut().rng.chance(self.plan.poll_ends)
    }

    fn start(&self, op: KernelOp) -> bool {
        self.pass();
        self.rush();
        if op.holds_submitter() {
            self.hold(op.buffers().bytes() as u64 * self.plan.byte_ns);
        }
        let begin = self.tick();
        let mut guard = self.inner.borrow_mut();
        let inner = &mut *guard;
        let id = inner.next_id;
        inner.next_id += 1;
        inner.counts.started += 1;
        let found = inner.disks.iter().position(|disk| disk.fd == op.fd());
        let index = found.unwrap_or(0);
        self.trace(|| {
            let (kind, sector) = (op.kind(), op.offset() / SECTOR as u64);
            let bytes = op.buffers().bytes();
            format!("kernel: op {id}: {kind:?}, disk {index}, sector {sector}, {bytes} bytes")
        });
        let disk = &mut inner.disks[index];
        if let Err(failure) = check_op(&disk.plan, found.is_some(), &op) {
            inner.failure.get_or_insert(failure);
        }
        let end = disk.device.end_sector;
        let rejected = rejection(&disk.plan, &mut inner.rng, &op).filter(|_| !inner.is_void);
        disk.is_stuck |= inner.rng.chance(disk.plan.stuck);
        let (result, moved, error) = match rejected {
            Some((result, error)) => (result, 0, error),
            None if disk.is_stuck => (-i64::from(libc::EAGAIN), 0, Some(class_of(op.kind()))),
            None => outcome(&disk.plan, &mut inner.rng, end, &op),
        };
        inner.ops.insert(id, Running { op, disk: index, begin, moved, result, error });
        if let Some(held) = &mut disk.held
            && !inner.is_void
            && rejected.is_none()
        {
            held.push(id);
            return true;
        }
        let slow = disk.plan.slow.max(1);
        let (now, latency) = (self.now.get(), self.plan.latency_us * 1000 * slow);
        let hangs = disk.hangs_until > now;
        let is_sync = inner.rng.chance(self.plan.sync) && !hangs && slow == 1;
        if inner.is_void || rejected.is_some() || is_sync {
            let is_on = !inner.is_void;
            drop(guard);
            if is_on && moved > 0 {
                self.effect(id, 0, moved);
            }
            self.answer(id);
            return rejected.is_none();
        }
        if inner.rng.chance(disk.plan.hang) {
            disk.hangs_until = now + inner.rng.below(200 * latency);
        }
        let delay = disk.hangs_until.saturating_sub(now) + inner.rng.between(1, latency);
        self.schedule_effects(inner, id, moved, delay);
        self.schedule(inner, delay, Event::Answer(id));
        true
    }

    fn run_sq_thread(&self, thread: SqThread) {
        let inner = &mut *self.inner.borrow_mut();
        let id = inner.next_id;
        inner.next_id += 1;
        inner.sq_threads.insert(id, thread);
        let delay = inner.rng.below(self.plan.latency_us * 1000);
        self.schedule(inner, delay, Event::SqThread(id));
    }

    fn run_thread(&self, work: Box<dyn FnOnce()>) {
        let inner = &mut *self.inner.borrow_mut();
        let id = inner.next_id;
        inner.next_id += 1;
        inner.threads.insert(id, work);
        inner.counts.threads += 1;
        let delay = inner.rng.below(self.plan.latency_us * 2000);
        self.schedule(inner, delay, Event::Thread(id));
    }

    fn sleep(&self, deadline: Option<Instant>, is_over: &dyn Fn() -> bool) {
        if self.turn.runs.get() {
            return self.sleep_in_turn(deadline, is_over);
        }
        while !is_over() {
            let due = deadline.map(|when| self.nanoseconds(when));
            match self.next_event() {
                Some(time) if due.is_none_or(|due| time <= due) => {
                    self.run_event();
                }
                _ => match due {
                    Some(due) => return self.advance_to(due),
                    None => panic!("an IoThread sleeps for ever"),
                },
            }
        }
    }
}
