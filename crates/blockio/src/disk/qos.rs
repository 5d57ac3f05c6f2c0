//! Limits of speed, error policies, and requests that wait: the state that all IoThreads share.

pub(crate) mod bulk_turns;
pub(crate) mod copy_turns;
pub(crate) mod error_policy;
pub(crate) mod limits;
pub(crate) mod throttle;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::info::DiskInfo;
use crate::clock;
use crate::error::Error;
use crate::executor::notify::Notify;
use crate::executor::semaphore::FairSemaphore;
use crate::executor::sync::Lock;
use error_policy::{ErrorPolicy, RetryStats, WaitCount};
use limits::{Buckets, Limits};

/// The changing state of a disk, written by its controller and read by its IoThreads with each
/// request. Nothing else depends on a size, so no order is needed: a request is checked by the old
/// size or the new one.
#[derive(Debug)]
pub(crate) struct SharedState {
    size_bytes: AtomicU64,
    /// The size that users of the disk still believe in, if another process has changed it; 0 if
    /// they know the present one.
    believed_bytes: AtomicU64,
    /// The bytes that requests reach without further checks: all, or none if there are limits. So
    /// limits cost nothing on a disk that has none: each request is compared with this number only.
    direct_bytes: AtomicU64,
    /// The number of probes for the size that have begun, and the number of the probe that found
    /// it. The latter changes with the size, under the lock of the rules.
    probes: AtomicU64,
    found_by_probe: AtomicU64,
    /// The rules. Queues keep references to them.
    rules: Lock<Arc<Rules>>,
    /// The number of changes of the rules.
    generation: AtomicU64,
    /// The number of orders to retry waiting requests.
    resumed: AtomicU64,
    /// Wakes waiting requests to check again: after a change of these, or when queues stop.
    pub(crate) changed: Notify,
    /// Reads and writes that wait for the limits of a group, one of each on this disk at a time.
    pub(crate) turns: [FairSemaphore; 2],
    pub(crate) retry_stats: RetryStats,
    /// The requests that wait for limits.
    pub(crate) throttled: Lock<WaitCount>,
    /// The format of the image that a disk without a format seems to be.
    foreign_format: OnceLock<&'static str>,
    /// True if the disk is no longer needed.
    is_abandoned: AtomicBool,
}

/// The rules for the requests of a disk.
#[derive(Debug, Default, Clone)]
pub(crate) struct Rules {
    limits: Limits,
    pub(crate) own: Option<Arc<Buckets>>,
    group: Option<LimitGroup>,
    pub(crate) shared: Option<Arc<Buckets>>,
    pub(crate) errors: ErrorPolicy,
}

impl SharedState {
    /// The state of a disk of this size.
    pub(crate) fn new(size_bytes: u64) -> Self {
        Self {
            size_bytes: AtomicU64::new(size_bytes),
            believed_bytes: AtomicU64::new(0),
            direct_bytes: AtomicU64::new(size_bytes),
            probes: AtomicU64::new(0),
            found_by_probe: AtomicU64::new(0),
            rules: Lock::default(),
            generation: AtomicU64::new(0),
            resumed: AtomicU64::new(0),
            changed: Notify::default(),
            turns: [(); 2].map(|()| FairSemaphore::new(1)),
            retry_stats: RetryStats::default(),
            throttled: Lock::default(),
            foreign_format: OnceLock::new(),
            is_abandoned: AtomicBool::new(false),
        }
    }

    pub(crate) fn foreign_format(&self) -> Option<&'static str> {
        self.foreign_format.get().copied()
    }

    /// Keeps the first format that is found.
    pub(crate) fn set_foreign_format(&self, format: &'static str) {
        self.foreign_format.get_or_init(|| format);
    }

    #[inline]
    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// The size that users of the disk have been told.
    pub(crate) fn announced_bytes(&self) -> u64 {
        match self.believed_bytes.load(Ordering::Relaxed) {
            0 => self.size_bytes(),
            believed => believed,
        }
    }

    /// Notes that users know the present size: now, or until it changes.
    pub(crate) fn set_announced(&self, is_announced: bool) {
        let believed = if is_announced { 0 } else { self.announced_bytes() };
        self.believed_bytes.store(believed, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn direct_bytes(&self) -> u64 {
        self.direct_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn set_size_bytes(&self, size_bytes: u64) {
        self.finish_probe(self.begin_probe(), size_bytes);
    }

    /// Begins a probe for the present size, which may take long. Returns its number.
    pub(crate) fn begin_probe(&self) -> u64 {
        self.probes.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes over the size that a probe has found, unless a later probe has found one.
    pub(crate) fn finish_probe(&self, probe: u64, size_bytes: u64) {
        let rules = self.rules.lock();
        if probe >= self.found_by_probe.load(Ordering::Relaxed) {
            self.found_by_probe.store(probe, Ordering::Relaxed);
            self.size_bytes.store(size_bytes, Ordering::Relaxed);
            self.set_direct(&rules);
        }
    }

    /// The present properties of a disk that was `opened` with these.
    pub(crate) fn info(&self, opened: &DiskInfo) -> DiskInfo {
        DiskInfo { size_bytes: self.size_bytes(), ..*opened }
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The rules, and the generation that they have at least.
    pub(crate) fn rules(&self) -> (u64, Arc<Rules>) {
        let generation = self.generation();
        (generation, Arc::clone(&self.rules.lock()))
    }

    pub(crate) fn limits(&self) -> Limits {
        self.rules.lock().limits
    }

    pub(crate) fn group(&self) -> Option<LimitGroup> {
        self.rules.lock().group.clone()
    }

    pub(crate) fn set_limits(&self, limits: Limits) {
        self.change(|rules| {
            if rules.limits != limits {
                rules.limits = limits;
                rules.own = buckets(&limits);
            }
        });
    }

    /// Like [`LimitGroup::debts`], for the limits of the disk itself.
    pub(crate) fn debts(&self) -> Vec<u64> {
        debts(self.rules.lock().own.as_ref())
    }

    pub(crate) fn set_debts(&self, debts: &[u64]) {
        set_debts(self.rules.lock().own.as_ref(), debts);
    }

    pub(crate) fn set_errors(&self, errors: ErrorPolicy) {
        self.change(|rules| rules.errors = errors);
    }

    pub(crate) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Relaxed)
    }

    pub(crate) fn resumed(&self) -> u64 {
        self.resumed.load(Ordering::Acquire)
    }

    /// Retries at once all requests that wait because the disk failed them.
    pub(crate) fn resume(&self) {
        self.resumed.fetch_add(1, Ordering::Release);
        self.changed.notify_all();
    }

    fn change(&self, change: impl FnOnce(&mut Rules)) {
        let mut rules = self.rules.lock();
        change(Arc::make_mut(&mut rules));
        self.set_direct(&rules);
        self.generation.fetch_add(1, Ordering::Release);
        drop(rules);
        self.changed.notify_all();
    }

    fn set_direct(&self, rules: &Rules) {
        let is_direct = rules.own.is_none() && rules.shared.is_none();
        let direct_bytes = if is_direct { self.size_bytes() } else { 0 };
        self.direct_bytes.store(direct_bytes, Ordering::Relaxed);
    }
}

fn debts(buckets: Option<&Arc<Buckets>>) -> Vec<u64> {
    buckets.map_or(Vec::new(), |buckets| buckets.debts(clock::now()))
}

fn set_debts(buckets: Option<&Arc<Buckets>>, debts: &[u64]) {
    if let Some(buckets) = buckets {
        buckets.set_debts(debts, clock::now());
    }
}

fn buckets(limits: &Limits) -> Option<Arc<Buckets>> {
    (!limits.are_none()).then(|| Arc::new(Buckets::new(limits, clock::now())))
}

/// Limits that several disks share. Each waiting disk has its turn, regardless of the load on the
/// rest, and so has each queue of a disk. Clones are the same group.
#[derive(Debug, Clone, Default)]
pub struct LimitGroup(Arc<Lock<Group>>);

#[derive(Debug, Default)]
struct Group {
    limits: Limits,
    buckets: Option<Arc<Buckets>>,
    members: Vec<Weak<SharedState>>,
}

impl LimitGroup {
    /// The limits, for all disks of the group together.
    pub fn limits(&self) -> Limits {
        self.0.lock().limits
    }

    /// Changes the limits, also for requests that wait.
    ///
    /// # Errors
    ///
    /// If they are [invalid](Limits::check).
    pub fn set_limits(&self, limits: Limits) -> Result<(), Error> {
        limits.check()?;
        let mut group = self.0.lock();
        if group.limits != limits {
            group.limits = limits;
            group.buckets = buckets(&limits);
            let members: Vec<Arc<SharedState>> =
                group.members.iter().filter_map(Weak::upgrade).collect();
            for member in members {
                member.change(|rules| rules.shared.clone_from(&group.buckets));
            }
        }
        Ok(())
    }

    /// Nanoseconds until each bucket of the limits is full, for a process that takes over the
    /// group. Empty without limits.
    pub fn debts(&self) -> Vec<u64> {
        debts(self.0.lock().buckets.as_ref())
    }

    /// Makes requests wait as long as in a process that had these [debts](Self::debts) with the
    /// same limits.
    pub fn set_debts(&self, debts: &[u64]) {
        set_debts(self.0.lock().buckets.as_ref(), debts);
    }

    /// Returns true if a disk that is in use is in the group.
    pub fn has_members(&self) -> bool {
        self.0.lock().members.iter().any(|member| member.strong_count() > 0)
    }
}

/// Makes a disk a member of this group, and of no other.
pub(crate) fn join(shared: &Arc<SharedState>, group: Option<&LimitGroup>) {
    let before = shared.rules.lock().group.clone();
    if let Some(before) = before {
        let is_other =
            |member: &Weak<SharedState>| !std::ptr::eq(member.as_ptr(), Arc::as_ptr(shared));
        before.0.lock().members.retain(is_other);
    }
    // The group stays locked, so that its limits do not change in between.
    let mut locked = group.map(|group| group.0.lock());
    if let Some(group) = &mut locked {
        group.members.retain(|member| member.strong_count() > 0);
        group.members.push(Arc::downgrade(shared));
    }
    shared.change(|rules| {
        rules.group = group.cloned();
        rules.shared = locked.as_ref().and_then(|group| group.buckets.clone());
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1 << 20;

    fn limits(per_second: u64) -> Limits {
        let requests = limits::Rates {
            total: Some(limits::Rate { per_second, burst: None }),
            ..limits::Rates::default()
        };
        Limits { requests, ..Limits::default() }
    }

    /// The limits that requests pass: of the disk, and of its group.
    fn passes(disk: &SharedState) -> [bool; 2] {
        let (_, rules) = disk.rules();
        let passes = [rules.own.is_some(), rules.shared.is_some()];
        let is_direct = passes == [false; 2];
        assert_eq!(disk.direct_bytes(), if is_direct { BYTES } else { 0 }, "{passes:?}");
        passes
    }

    /// A disk that has left its group hears of no later change of its limits.
    #[test]
    fn a_group_limits_its_members_alone() {
        let [one, other] = [(); 2].map(|()| LimitGroup::default());
        let [disk, stays] = [(); 2].map(|()| Arc::new(SharedState::new(BYTES)));
        one.set_limits(limits(10)).unwrap();
        [&disk, &stays].iter().for_each(|disk| join(disk, Some(&one)));
        assert_eq!([passes(&disk), passes(&stays)], [[false, true]; 2]);
        for group in [None, Some(&other)] {
            join(&disk, group);
            assert_eq!(passes(&disk), [false; 2], "it has left");
            for per_second in [20, 30] {
                one.set_limits(limits(per_second)).unwrap();
                assert_eq!([passes(&disk), passes(&stays)], [[false; 2], [false, true]]);
            }
            join(&disk, Some(&one));
            assert_eq!(passes(&disk), [false, true], "it is back");
        }
        disk.set_limits(limits(5));
        join(&disk, Some(&other));
        assert_eq!(passes(&disk), [true, false]);
        other.set_limits(limits(7)).unwrap();
        one.set_limits(Limits::default()).unwrap();
        assert_eq!([passes(&disk), passes(&stays)], [[true, true], [false; 2]]);
        disk.set_limits(Limits::default());
        assert_eq!(passes(&disk), [false, true]);
        assert!(one.has_members() && other.has_members());
        drop((disk, stays));
        assert!(!one.has_members() && !other.has_members());
    }

    /// The next process begins with the debts of this one.
    #[test]
    fn debts_of_limits_are_passed_on() {
        let limits = limits(1);
        let [before, after] = [(); 2].map(|()| SharedState::new(BYTES));
        let groups = [(); 2].map(|()| LimitGroup::default());
        for disk in [&before, &after] {
            disk.set_limits(limits);
        }
        groups.iter().for_each(|group| group.set_limits(limits).unwrap());
        const DEBT_NS: u64 = 600_000_000_000;
        before.set_debts(&[DEBT_NS]);
        groups[0].set_debts(&[DEBT_NS]);
        after.set_debts(&before.debts());
        groups[1].set_debts(&groups[0].debts());
        for debts in [after.debts(), groups[1].debts()] {
            assert!(debts.len() == 1 && debts[0] > DEBT_NS / 2 && debts[0] <= DEBT_NS, "{debts:?}");
        }
        after.set_debts(&[1]);
        assert!(after.debts()[0] > DEBT_NS / 2, "a smaller debt takes none away");
        after.set_debts(&[2 * DEBT_NS, 0]);
        assert!(after.debts()[0] <= DEBT_NS, "the debts of other limits");
        assert_eq!(SharedState::new(BYTES).debts(), []);
    }
}
