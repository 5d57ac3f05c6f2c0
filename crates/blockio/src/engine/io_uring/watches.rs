//! Eventfds watched in the ring, by multishot polls. They are edge-triggered and never read.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use io_uring::{cqueue, opcode, types};
use iomem::fits;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use crate::engine::kernel::{Interest, Ring};
use crate::watchdog::RateLimit;

/// Marks user data that is not a slot number: a watch's index and serial number follow.
const WATCH: u64 = 1 << 63;
/// User data of entries whose completion is ignored.
const IGNORED: u64 = u64::MAX;
/// The mask of serial numbers: 30 bits, so that no watch is taken for `IGNORED`.
const SERIAL_MASK: u32 = (1 << 30) - 1;

/// The first wait before a watch that has ended is armed again; it doubles up to [`REARM_MAX`].
const REARM_MIN: Duration = Duration::from_millis(1);
const REARM_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Copy)]
struct Watch {
    fd: RawFd,
    token: u64,
    interest: Interest,
    serial: u32,
}

/// Watches without a poll in the ring: the kernel refused it, or there was no room.
struct Disarmed {
    indices: Vec<usize>,
    arm_at: Instant,
}

/// The meaning of a completion entry.
pub(super) enum EntryMeaning {
    /// The op in this slot has completed.
    Op(u32),
    /// The eventfd with this token was written.
    Event(u64),
    Nothing,
}

#[derive(Default)]
pub(super) struct Watches {
    watches: Vec<Option<Watch>>,
    /// The last serial number, which identifies completions of an earlier watch with the same
    /// index.
    serial: u32,
    disarmed: Option<Disarmed>,
    /// The delay before the next disarmed watches are armed again.
    wait: Duration,
    log: RateLimit,
    /// An epoll instance that watches nothing, but shows which descriptors can be polled. It is
    /// kept, so that a queue which starts again needs no new descriptor.
    probe: Option<OwnedFd>,
}

impl Watches {
    /// Watches `fd`, which must stay open until the watch is removed.
    pub(super) fn add(
        &mut self,
        ring: &mut Ring,
        fd: BorrowedFd<'_>,
        token: u64,
        interest: Interest,
    ) -> Result<(), Errno> {
        self.check_pollable(fd)?;
        if !ring.make_room(None) {
            return Err(Errno::AGAIN);
        }
        let index = self.watches.iter().position(Option::is_none).unwrap_or_else(|| {
            self.watches.push(None);
            self.watches.len() - 1
        });
        let watch = Watch { fd: fd.as_raw_fd(), token, interest, serial: 0 };
        self.arm(ring, index, watch);
        Ok(())
    }

    /// Refuses a descriptor that cannot be polled at once, and not only when the kernel takes the
    /// entry.
    fn check_pollable(&mut self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        let probe = match &self.probe {
            Some(probe) => probe,
            None => self.probe.insert(epoll::create(CreateFlags::CLOEXEC)?),
        };
        epoll::add(probe, fd, EventData::new_u64(0), EventFlags::IN)?;
        epoll::delete(probe, fd)
    }

    fn arm(&mut self, ring: &mut Ring, index: usize, watch: Watch) {
        self.serial = (self.serial + 1) & SERIAL_MASK;
        let serial = self.serial;
        let events = match watch.interest {
            Interest::Readable => libc::POLLIN,
            Interest::Writable => libc::POLLOUT,
        };
        let flags = u32::from(events.unsigned_abs());
        let entry = opcode::PollAdd::new(types::Fd(watch.fd), flags)
            .multi(true)
            .build()
            .user_data(user_data(index, serial));
        // SAFETY: a poll points to no memory.
        unsafe { ring.push(&entry) };
        self.watches[index] = Some(Watch { serial, ..watch });
    }

    /// Ends the watch with this token.
    pub(super) fn remove(&mut self, ring: &mut Ring, token: u64) {
        let has_token = |watch: &Option<Watch>| watch.as_ref().is_some_and(|w| w.token == token);
        let Some(index) = self.watches.iter().position(has_token) else { return };
        let Some(watch) = self.watches[index].take() else { return };
        self.disarmed
            .iter_mut()
            .for_each(|disarmed| disarmed.indices.retain(|&other| other != index));
        if !ring.make_room(None) {
            // The poll continues until the ring ends; its result is ignored.
            tracing::debug!("the submission ring of io_uring is full; an eventfd remains watched");
            return;
        }
        let entry =
            opcode::PollRemove::new(user_data(index, watch.serial)).build().user_data(IGNORED);
        // SAFETY: the entry points to no memory.
        unsafe { ring.push(&entry) };
    }

    pub(super) fn classify(
        &mut self,
        ring: &mut Ring,
        entry: &cqueue::Entry,
        now: Instant,
    ) -> EntryMeaning {
        let user_data = entry.user_data();
        if let Ok(slot) = u32::try_from(user_data) {
            return EntryMeaning::Op(slot);
        }
        if user_data == IGNORED {
            return EntryMeaning::Nothing;
        }
        let (index, serial) = index_and_serial(user_data);
        let Some(Some(watch)) = self.watches.get(index) else { return EntryMeaning::Nothing };
        if watch.serial != serial {
            return EntryMeaning::Nothing;
        }
        let watch = *watch;
        if entry.result() < 0 {
            self.schedule_rearm(index, &format!("it returned errno {}", -entry.result()), now);
            return EntryMeaning::Nothing;
        }
        self.wait = REARM_MIN;
        if !cqueue::more(entry.flags()) {
            // The kernel ends a multishot poll when the completion ring is full.
            if ring.make_room(None) {
                self.arm(ring, index, watch);
            } else {
                self.schedule_rearm(index, "its submission ring is full", now);
            }
        }
        EntryMeaning::Event(watch.token)
    }

    /// Schedules a watch to be armed again. Events in the meantime are seen then, because a poll
    /// begins with a check.
    fn schedule_rearm(&mut self, index: usize, why: &str, now: Instant) {
        if let Some(left_out) = self.log.permit(now) {
            let wait = self.wait;
            tracing::error!(
                left_out,
                "io_uring has stopped watching an eventfd: {why}; trying again in {wait:?}"
            );
        }
        let arm_at = now + self.wait;
        self.disarmed.get_or_insert(Disarmed { indices: Vec::new(), arm_at }).indices.push(index);
    }

    /// The time to arm disarmed watches again.
    #[inline]
    pub(super) fn arm_at(&self) -> Option<Instant> {
        self.disarmed.as_ref().map(|disarmed| disarmed.arm_at)
    }

    /// Arms disarmed watches again, once their time has come.
    pub(super) fn rearm_due(&mut self, ring: &mut Ring, now: Instant) {
        let Some(disarmed) = self.disarmed.take_if(|disarmed| disarmed.arm_at <= now) else {
            return;
        };
        self.wait = (self.wait * 2).clamp(REARM_MIN, REARM_MAX);
        for index in disarmed.indices {
            let Some(Some(watch)) = self.watches.get(index) else { continue };
            let watch = *watch;
            if ring.make_room(None) {
                self.arm(ring, index, watch);
            } else {
                self.schedule_rearm(index, "its submission ring is full", now);
            }
        }
    }
}

fn user_data(index: usize, serial: u32) -> u64 {
    WATCH | (u64::from(serial) << 32) | (index as u64 & u64::from(u32::MAX))
}

fn index_and_serial(user_data: u64) -> (usize, u32) {
    let low: u32 = fits(user_data & u64::from(u32::MAX), "a half of a word");
    let high: u32 = fits(user_data >> 32, "a half of a word");
    (low as usize, high & SERIAL_MASK)
}
