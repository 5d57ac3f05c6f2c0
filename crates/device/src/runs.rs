//! How many chains a run takes, and when the driver is called.
//!
//! A driver that sleeps needs a while from a call to its next request. If the call comes when all
//! is answered, the device has nothing to do for that time, and then the driver: they take turns.
//! If it comes for each answer, the device does little else than call. The right moment is when
//! what is left to answer takes as long as the driver: neither waits for the other, and all answers
//! of that time share the call. That number of requests is the *lead*. It is counted, not computed
//! from times: so many requests are answered between a call and the next request of the driver.
//!
//! Answers are published as they come, so that a driver that is awake goes on without a call. The
//! length of a run decides how many ops a submit carries and how long answers wait for it.
//!
//! docs/loop.md has the other mechanisms of a turn, and docs/performance.md what this one is worth.

use std::num::NonZeroU16;
use std::time::{Duration, Instant};

/// A part of the queue's requests is at least this. With fewer in a submit the system call is more
/// than a fifth of what the fastest disks need for their work.
const PART_MIN: u16 = 4;
/// The first run of a driver that has just begun takes one chain, and each after it this many times
/// as many: a driver that posts requests one by one finds an answer before it falls asleep.
const GROWTH: u16 = 4;
/// Chains of a run whose requests need no op. Other queues of the thread wait for it.
const CHAINS_MAX: u16 = 64;
/// A queue has no more entries.
const LEAD_MAX: u16 = 1024;
/// A driver that was not called for this many answers does not sleep, it polls. Each time that this
/// was wrong, the number doubles.
const PATIENCE_MIN: u32 = 256;
const PATIENCE_MAX: u32 = 1 << 16;
/// A sleep of this length is the end of a load. What comes then may be of another kind.
const PAUSE: Duration = Duration::from_millis(100);

/// What there is to do when a run begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    /// Chains that may be popped.
    pub(crate) available: u16,
    /// Chains that were popped and not answered.
    pub(crate) in_device: u16,
    /// The avail entry that is popped next.
    pub(crate) next_avail: u16,
}

impl View {
    fn unanswered(self) -> u16 {
        self.available + self.in_device
    }

    fn avail_idx(self) -> u16 {
        self.next_avail.wrapping_add(self.available)
    }
}

/// What a run may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Chains that it may pop.
    pub(crate) chains: u16,
    /// How many of them may stay unanswered, because they need ops.
    pub(crate) ops: u16,
    /// Whether each answer is published at once, or all at the end.
    pub(crate) publishes_each: bool,
}

/// Decides for one queue.
pub(crate) struct Runs {
    /// For measurement: chains of each run, with a look for the driver's wish after each.
    fixed: Option<NonZeroU16>,
    /// So many requests are answered from a call to the next request of the driver.
    lead: u16,
    /// The last call, until the driver has made another chain available.
    call: Option<Call>,
    /// Requests answered since the last call.
    answered: u32,
    /// So many answers without a call, and the driver is taken to poll.
    patience: u32,
    /// The most requests at once, in units of 1/64, forgotten over some hundred runs.
    depth_64: u32,
    /// Ops of the next run, where the driver is awake.
    growing: u16,
    /// In so many runs, up to two, nothing was left of the one before: the disk completes its ops
    /// within the submit.
    at_once: u8,
    asleep_since: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Call {
    avail_idx: u16,
}

impl Runs {
    pub(crate) fn new(fixed: Option<NonZeroU16>) -> Self {
        Self {
            fixed,
            // Until more is known, calls come early.
            lead: LEAD_MAX,
            call: None,
            answered: 0,
            patience: PATIENCE_MIN,
            depth_64: 0,
            growing: 1,
            at_once: 0,
            asleep_since: None,
        }
    }

    /// Whether runs adapt.
    #[inline]
    pub(crate) fn adapt(&self) -> bool {
        self.fixed.is_none()
    }

    /// Whether the driver was called, and has not made another chain available, as far as is known.
    #[inline]
    pub(crate) fn awaits_driver(&self) -> bool {
        self.call.is_some()
    }

    /// Whether the disk seems to complete ops within the submit. Then answers are published before
    /// the next submit, which would hold them back; else after it was made as large as it gets.
    #[inline]
    pub(crate) fn are_at_once(&self) -> bool {
        self.at_once == 2
    }

    /// Plans a run. `is_awaited`: the driver sleeps until it is called.
    #[inline]
    pub(crate) fn begin(&mut self, view: View, is_awaited: impl FnOnce() -> bool) -> Run {
        if let Some(fixed) = self.fixed {
            return Run { chains: fixed.get(), ops: u16::MAX, publishes_each: false };
        }
        self.at_once = if view.in_device > 0 { 0 } else { (self.at_once + 1).min(2) };
        let mut run = Run { chains: CHAINS_MAX, ops: 1, publishes_each: true };
        if view.available == 0 {
            self.growing = 1;
            return run;
        }
        self.see(view);
        let unanswered = view.unanswered();
        let depth = self.follow_depth(unanswered);
        if self.answered >= self.patience {
            // Whole cache lines of the ring: each of them changes hands once.
            let whole = 1 << (depth / 2).max(PART_MIN).ilog2();
            run.chains = whole - view.next_avail % whole;
            run.ops = run.chains;
            run.publishes_each = false;
        } else if !self.are_at_once() {
            // More than this at once keeps a disk from answering, fewer starve it.
            run.ops = (depth / 4).max(PART_MIN);
        } else if depth <= self.lead {
            // Whatever is done, the driver is back when all is answered.
            run.ops = 1;
        } else if is_awaited() {
            self.growing = 1;
            run.ops = unanswered.saturating_sub(self.lead).max(1);
        } else {
            run.ops = self.growing.min((unanswered / 2).max(PART_MIN));
            self.growing = run.ops * GROWTH;
        }
        run
    }

    /// The most requests at once, of late.
    #[inline]
    fn follow_depth(&mut self, unanswered: u16) -> u16 {
        let faded = self.depth_64 - self.depth_64 / 64;
        self.depth_64 = faded.max(u32::from(unanswered) * 64);
        iomem::fits(self.depth_64 / 64, "a number of requests")
    }

    /// Learns from the first chain after a call.
    #[inline]
    fn see(&mut self, view: View) {
        let new = match self.call {
            Some(call) => view.avail_idx().wrapping_sub(call.avail_idx),
            None => 0,
        };
        if new > 0 {
            self.call = None;
            self.learn(view.unanswered().saturating_sub(new));
        }
    }

    /// The driver is back, and `left` of the requests before are not answered.
    fn learn(&mut self, left: u16) {
        let lead = u32::from(self.lead);
        let next = if left == 0 {
            // It came too late, by an unknown time.
            lead + lead / 8 + 1
        } else {
            // With a little more, as too early costs less than too late.
            let wanted = (self.answered + self.answered / 8 + 1).min(LEAD_MAX.into());
            if wanted < lead {
                lead - (lead - wanted).div_ceil(8)
            } else {
                lead + (wanted - lead).div_ceil(8)
            }
        };
        self.lead = iomem::fits(next.min(LEAD_MAX.into()), "a number of requests");
    }

    /// Counts answers that were published.
    #[inline]
    pub(crate) fn answered(&mut self, count: u16) {
        self.answered = self.answered.saturating_add(count.into());
    }

    /// Whether a driver that sleeps is to be called when `unanswered` requests are left.
    #[inline]
    pub(crate) fn is_call_due(&self, unanswered: u16) -> bool {
        unanswered <= self.lead
    }

    /// The driver was called, when it had made chains available up to this index.
    #[inline]
    pub(crate) fn called(&mut self, avail_idx: u16) {
        if self.answered >= self.patience {
            let was_wrong = self.answered / 8 < self.patience;
            self.patience =
                if was_wrong { (2 * self.patience).min(PATIENCE_MAX) } else { PATIENCE_MIN };
        }
        // With one request at a time there is nothing to decide.
        self.call = (self.answered > 1 && self.adapt()).then_some(Call { avail_idx });
        self.answered = 0;
    }

    /// The thread may sleep until the driver kicks.
    pub(crate) fn sleeps(&mut self, now: Instant) {
        self.asleep_since = Some(now);
    }

    /// There is work after a sleep, or after none. What was learnt before a long one is forgotten.
    #[inline]
    pub(crate) fn wakes(&mut self, now: impl FnOnce() -> Instant) {
        if let Some(since) = self.asleep_since.take()
            && now().saturating_duration_since(since) >= PAUSE
        {
            *self = Self::new(self.fixed);
        }
    }
}
