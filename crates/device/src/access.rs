//! State that all units on one disk share, even in different devices. To initiators they are one
//! logical unit, which each initiator reaches by its own nexus. The unit has one set of tasks, one
//! set of mode parameters and one set of persistent reservations, and one command may exclude all
//! other commands.

pub(crate) mod medium;
pub(crate) mod persist;
pub(crate) mod sense;
pub(crate) mod task_set;
mod turns;
pub(crate) mod wait_group;

use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};

use blockio::executor::{FairSemaphore, Lock};
use serde::{Deserialize, Serialize};

use medium::Medium;
use persist::{
    Attached, CommandClass, FileError, Nexus, PortInUse, PortName, Reservations, ReservationsState,
};
pub use persist::{ReservationStorage, StorageGuard};
use sense::Sense;
use task_set::{Abort, TaskId, Treatment, WaitGroup};

/// The most functions about tasks of all initiators that wait for tasks of other initiators at a
/// time. A disk may be many units, and each may receive a thousand functions.
pub(crate) const FUNCTIONS_MAX: usize = 8;

/// A unit on the disk, as units of other devices reach it.
pub(crate) trait Peer: Send + Sync {
    /// Returns true if the unit has been removed.
    fn is_gone(&self) -> bool;

    /// Adds an attention that the initiator receives with its next command.
    fn add_attention(&self, sense: Sense);

    /// Treats the unit's tasks as `treatment` says, except this one. `None` if the device is gone.
    fn cover(&self, treatment: Treatment, except: Option<TaskId>) -> Option<WaitGroup>;

    /// Restricts the unit to the first `size_bytes` of the disk from now on.
    fn cut_off(&self, size_bytes: u64);

    /// Reads the size of the file or device behind the disk again, and notifies the driver.
    fn refresh(&self);
}

/// A device on the disk that is no initiator, such as a virtio-blk device.
pub(crate) trait DiskUser: Send + Sync {
    /// Returns true if the device has been removed.
    fn is_gone(&self) -> bool;

    /// Makes requests check the access from now on before they use the disk. The result is ready
    /// when this holds and earlier requests are answered.
    fn raise_barrier(&self) -> WaitGroup;

    /// Like [`Peer::cut_off`].
    fn cut_off(&self, size_bytes: u64);

    /// Reads the size of the file or device behind the disk again, without notifying the driver.
    fn refresh(&self);
}

/// The covered tasks of a nexus, which may not have ended.
struct FoundTasks {
    nexus: Nexus,
    peer: Arc<dyn Peer>,
    tasks: WaitGroup,
}

/// The covered tasks of a nexus, which have ended.
pub(crate) struct EndedTasks {
    pub(crate) nexus: Nexus,
    pub(crate) peer: Arc<dyn Peer>,
    /// The number of tasks found.
    pub(crate) found: usize,
    /// True if some tasks may be carried out later, as if they had not been covered.
    pub(crate) has_lost: bool,
}

/// State that the units on one disk share. A program with several exports of a disk makes one for
/// it.
pub struct DiskAccess {
    pub(crate) reservations: Arc<Reservations>,
    peers: Lock<Vec<(Nexus, Arc<dyn Peer>)>>,
    pub(crate) disk_users: Lock<Vec<Arc<dyn DiskUser>>>,
    /// The turns of guests during which this process has the file of the reservations.
    turns: Lock<Vec<u64>>,
    /// Held while the disk gets another size, or another device.
    sizes: Lock<()>,
    /// A PERSISTENT RESERVE OUT is in progress.
    has_reserve_out: AtomicBool,
    medium: Medium,
    /// True if the last START STOP UNIT stopped the unit.
    is_stopped: AtomicBool,
    /// An initiator has cleared WCE of the caching mode page.
    cache_is_off: AtomicBool,
    /// D_SENSE of the control mode page.
    has_descriptor_sense: AtomicBool,
    /// Limits functions about the tasks of all initiators.
    semaphore: FairSemaphore,
}

impl Default for DiskAccess {
    fn default() -> Self {
        Self::with_reservations(Arc::default())
    }
}

/// Shared state of a disk, for another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct AccessState {
    reservations: ReservationsState,
    is_stopped: bool,
    cache_is_off: bool,
    has_descriptor_sense: bool,
}

/// A file of persistent reservations that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ReservationsError(#[from] FileError);

impl DiskAccess {
    /// For a disk that another process hands over, which also determines the place of its
    /// reservations.
    pub fn for_hand_over() -> Self {
        Self::with_reservations(Arc::new(Reservations::for_hand_over()))
    }

    fn with_reservations(reservations: Arc<Reservations>) -> Self {
        Self {
            reservations,
            peers: Lock::default(),
            disk_users: Lock::default(),
            turns: Lock::default(),
            sizes: Lock::default(),
            has_reserve_out: AtomicBool::default(),
            medium: Medium::default(),
            is_stopped: AtomicBool::default(),
            cache_is_off: AtomicBool::default(),
            has_descriptor_sense: AtomicBool::default(),
            semaphore: FairSemaphore::new(FUNCTIONS_MAX),
        }
    }

    /// State for another process, and the file of the reservations. Call it while no command runs.
    pub(crate) fn hand_over(&self) -> io::Result<(AccessState, Option<File>)> {
        let (reservations, file) = self.reservations.hand_over()?;
        let state = AccessState {
            reservations,
            is_stopped: self.is_stopped(),
            cache_is_off: self.cache_is_off(),
            has_descriptor_sense: self.has_descriptor_sense(),
        };
        Ok((state, file))
    }

    /// Continues with the state of another process.
    pub(crate) fn take_over(&self, state: AccessState, file: Option<File>) -> io::Result<()> {
        self.reservations.take_over(state.reservations, file)?;
        self.set_stopped(state.is_stopped);
        self.set_cache_off(state.cache_is_off);
        self.set_descriptor_sense(state.has_descriptor_sense);
        Ok(())
    }

    /// Stores persistent reservations in `place`, if initiators ask for that (APTPL), and loads
    /// stored ones. Without this call they are lost when the process ends. The file exists while
    /// APTPL is set, and is locked then. The place is fixed while there are registrations or units
    /// on the disk: keep the result until the unit is added. Waits for the file system.
    ///
    /// # Errors
    ///
    /// If the file exists but cannot be read, is broken, or is in use: to continue without it would
    /// let fenced hosts write. If other exports of the disk have chosen another place, or none.
    pub fn store_reservations(
        &self,
        place: ReservationStorage,
    ) -> Result<StorageGuard, ReservationsError> {
        let guard = self.reservations.store_in(place)?;
        // A loaded reservation holds at once, and requests that have begun are not awaited.
        drop(self.raise_barriers());
        Ok(guard)
    }

    pub(crate) fn attach(&self, port: PortName) -> Result<Attached, PortInUse> {
        self.reservations.attach(port)
    }

    /// Makes the unit of a nexus reachable.
    pub(crate) fn add_peer(&self, nexus: Nexus, peer: Arc<dyn Peer>) {
        let mut peers = self.peers.lock();
        peers.retain(|(_, peer)| !peer.is_gone());
        peers.push((nexus, peer));
    }

    /// Makes a device reachable that is no initiator.
    pub(crate) fn add_disk_user(&self, disk_user: Arc<dyn DiskUser>) {
        let mut disk_users = self.disk_users.lock();
        disk_users.retain(|disk_user| !disk_user.is_gone());
        disk_users.push(disk_user);
    }

    /// True if requests of devices that are no initiators must ask before they use the disk.
    pub(crate) fn has_barrier(&self) -> bool {
        // Reads are never excluded without writes.
        self.is_exclusive() || !self.admits(CommandClass::Writes)
    }

    /// True if the reservation admits commands of this class from devices that are no initiators.
    pub(crate) fn admits(&self, class: CommandClass) -> bool {
        !self.reservations.excludes_unregistered(class)
    }

    /// Makes all devices that are no initiators respect the current state.
    fn raise_barriers(&self) -> Vec<WaitGroup> {
        self.disk_users.lock().iter().map(|disk_user| disk_user.raise_barrier()).collect()
    }

    /// Applies a reservation that may have changed. Returns when no device that is no initiator
    /// uses the disk against it.
    pub(crate) async fn reservation_changed(&self) {
        if !self.admits(CommandClass::Writes) {
            for barrier in self.raise_barriers() {
                poll_fn(|cx| barrier.poll(cx)).await;
            }
        }
    }

    /// Adds an attention for the initiator of a nexus, unless its unit is gone.
    pub(crate) fn add_attention(&self, nexus: Nexus, sense: Sense) {
        self.add_attention_if(|other| other == nexus, sense);
    }

    /// Adds an attention for all initiators.
    pub(crate) fn add_attention_for_all(&self, sense: Sense) {
        self.add_attention_if(|_| true, sense);
    }

    /// Adds an attention for all initiators except that of `nexus`.
    pub(crate) fn add_attention_for_others(&self, nexus: Nexus, sense: Sense) {
        self.add_attention_if(|other| other != nexus, sense);
    }

    fn add_attention_if(&self, is_meant: impl Fn(Nexus) -> bool, sense: Sense) {
        let peers = self.peers.lock();
        let meant = peers.iter().filter(|(nexus, _)| is_meant(*nexus));
        meant.for_each(|(_, peer)| peer.add_attention(sense));
    }

    /// Keeps the disk at its size. A caller that changes the size holds this from before the first
    /// device is notified until after the last. A caller that makes another device on the disk
    /// holds this from its read of the size until the device is made.
    pub fn hold_size(&self) -> MutexGuard<'_, ()> {
        self.sizes.lock()
    }

    /// Applies a new size of the disk to all devices on it, and notifies all initiators. The caller
    /// notifies the drivers of virtio-blk. Queries the file system, so not for IoThreads.
    pub fn refresh(&self) {
        // Outside the locks, since this takes time.
        let (peers, disk_users) = (self.peers.lock().clone(), self.disk_users.lock().clone());
        disk_users.iter().for_each(|disk_user| disk_user.refresh());
        peers.iter().for_each(|(_, peer)| peer.refresh());
    }

    /// Prepares for the loss of all data beyond `size_bytes`: no request of any device on the disk
    /// begins there from now on. Earlier requests are answered when this returns, except requests
    /// that wait for limits or for a retry and then check the size again. IoThreads answer them, so
    /// an IoThread must not call this.
    pub fn cut_off(&self, size_bytes: u64) {
        let (peers, disk_users) = (self.peers.lock().clone(), self.disk_users.lock().clone());
        disk_users.iter().for_each(|disk_user| disk_user.cut_off(size_bytes));
        peers.iter().for_each(|(_, peer)| peer.cut_off(size_bytes));
        let begun = disk_users.iter().map(|disk_user| disk_user.raise_barrier());
        let tasks = peers.iter().filter_map(|(_, peer)| peer.cover(Treatment::AwaitActive, None));
        let begun: Vec<WaitGroup> = begun.chain(tasks).collect();
        begun.iter().for_each(WaitGroup::wait);
    }

    /// True if no other unit is on the disk.
    pub(crate) fn is_alone(&self, nexus: Nexus) -> bool {
        self.peers.lock().iter().all(|(other, peer)| *other == nexus || peer.is_gone())
    }

    #[inline]
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    pub(crate) fn set_stopped(&self, stopped: bool) {
        self.is_stopped.store(stopped, Ordering::Relaxed);
    }

    /// True if initiators have switched the write cache off.
    #[inline]
    pub(crate) fn cache_is_off(&self) -> bool {
        self.cache_is_off.load(Ordering::Relaxed)
    }

    pub(crate) fn set_cache_off(&self, off: bool) {
        self.cache_is_off.store(off, Ordering::Relaxed);
    }

    /// True if initiators have chosen sense data in descriptor format.
    pub(crate) fn has_descriptor_sense(&self) -> bool {
        self.has_descriptor_sense.load(Ordering::Relaxed)
    }

    pub(crate) fn set_descriptor_sense(&self, on: bool) {
        self.has_descriptor_sense.store(on, Ordering::Relaxed);
    }

    /// Restores the initial state, as when the first unit on the disk was made.
    pub(crate) fn reset(&self) {
        self.set_stopped(false);
        self.set_cache_off(false);
        self.set_descriptor_sense(false);
    }

    /// Covers the tasks of each nexus as `treatment` says, with the exception of `except`. `None`
    /// leaves out a nexus.
    fn cover_tasks(
        &self,
        except: Option<TaskId>,
        treatment: impl Fn(Nexus) -> Option<Treatment>,
    ) -> Vec<FoundTasks> {
        let cover = |(nexus, peer): &(Nexus, Arc<dyn Peer>)| {
            let tasks = peer.cover(treatment(*nexus)?, except)?;
            Some(FoundTasks { nexus: *nexus, peer: Arc::clone(peer), tasks })
        };
        self.peers.lock().iter().filter_map(cover).collect()
    }

    /// Ends the tasks of all initiators, for a function of the nexus `by`. Its own tasks end as
    /// `own` says, with all chains that its driver has made available. Tasks of other initiators
    /// end as by a reset, and their drivers start them again. Chains of other initiators that are
    /// not popped are no tasks yet: no order is defined between initiators. Returns when the
    /// covered tasks have ended.
    pub(crate) async fn end_all_tasks(&self, by: Nexus, own: Abort) -> Vec<EndedTasks> {
        // Before any wait, so that later chains of the driver are not covered.
        let mut found =
            self.cover_tasks(None, |nexus| (nexus == by).then_some(Treatment::Abort(own)));
        // Tasks never wait for functions, so there is no deadlock.
        let _permit = self.semaphore.acquire().await;
        let theirs = Treatment::AbortBegun(Abort::Reset);
        found.extend(self.cover_tasks(None, |nexus| (nexus != by).then_some(theirs)));
        end(found).await
    }

    /// Ends the tasks that have begun of all initiators for which `is_meant` holds, for a command
    /// of the nexus `by`. Returns when they have ended.
    pub(crate) async fn end_tasks(
        &self,
        (by, command): (Nexus, TaskId),
        is_meant: impl Fn(Nexus) -> bool,
    ) -> Vec<EndedTasks> {
        let treatment = |nexus| {
            let abort = if nexus == by { Abort::Aborted } else { Abort::Reset };
            is_meant(nexus).then_some(Treatment::AbortBegun(abort))
        };
        end(self.cover_tasks(Some(command), treatment)).await
    }

    /// Admits one PERSISTENT RESERVE OUT at a time, until the result is dropped. Two that abort
    /// each other's tasks would deadlock, and each takes a thread.
    pub(crate) fn begin_reserve_out(self: &Arc<Self>) -> Option<ReserveOutGuard> {
        let is_first = !self.has_reserve_out.swap(true, Ordering::Acquire);
        is_first.then(|| ReserveOutGuard(Arc::clone(self)))
    }

    /// True if commands on the medium must wait.
    #[inline]
    pub(crate) fn is_exclusive(&self) -> bool {
        self.medium.is_taken()
    }

    /// Waits while a command has the medium to itself. Must precede any other wait.
    ///
    /// # Errors
    ///
    /// The error of `check`, which is called when the command with the medium waits itself, and
    /// [again](Self::recheck_waiting) until that command resumes.
    pub(crate) async fn pass<E>(&self, check: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        self.medium.pass(check).await
    }

    /// Makes all waiters for the medium repeat their checks.
    pub(crate) fn recheck_waiting(&self) {
        self.medium.recheck_waiting();
    }

    /// Gives a command the medium to itself. Commands that begin wait, and commands that have begun
    /// have ended when this returns.
    ///
    /// If a thread does not see the flag yet, the scan of its queues finds its commands. After the
    /// scan the thread sees the flag, like everything written before a call to it.
    ///
    /// # Errors
    ///
    /// As for [`pass`](Self::pass), before the command has the medium.
    pub(crate) async fn take_medium<E>(
        self: &Arc<Self>,
        own: TaskId,
        check: impl FnMut() -> Result<(), E>,
    ) -> Result<MediumGuard, E> {
        self.medium.take(check).await?;
        let exclusive = MediumGuard(Arc::clone(self));
        let barriers = self.raise_barriers();
        end(self.cover_tasks(Some(own), |_| Some(Treatment::AwaitMedium))).await;
        for barrier in barriers {
            poll_fn(|cx| barrier.poll(cx)).await;
        }
        Ok(exclusive)
    }
}

#[cfg(test)]
impl DiskAccess {
    /// Like [`take_medium`](Self::take_medium), without a limit on the wait.
    pub(crate) async fn take_medium_anyway(self: &Arc<Self>, own: TaskId) -> MediumGuard {
        let Ok(exclusive) = self.take_medium(own, || Ok::<(), std::convert::Infallible>(())).await;
        exclusive
    }
}

/// Returns when the awaited tasks have ended.
async fn end(found: Vec<FoundTasks>) -> Vec<EndedTasks> {
    let mut covered = Vec::new();
    for FoundTasks { nexus, peer, tasks } in found {
        let found = poll_fn(|cx| tasks.poll(cx)).await;
        covered.push(EndedTasks { nexus, peer, found, has_lost: tasks.has_lost() });
    }
    covered
}

/// Notifies initiators that lost tasks to the initiator of nexus `by`.
pub(crate) fn notify_cleared(ended: &[EndedTasks], by: Nexus) {
    let others = ended.iter().filter(|covered| covered.nexus != by && covered.found > 0);
    others.for_each(|covered| covered.peer.add_attention(Sense::COMMANDS_CLEARED));
}

/// The one PERSISTENT RESERVE OUT in progress.
pub(crate) struct ReserveOutGuard(Arc<DiskAccess>);

impl Drop for ReserveOutGuard {
    fn drop(&mut self) {
        self.0.has_reserve_out.store(false, Ordering::Release);
    }
}

/// Exclusive use of the medium by one command, until this is dropped.
pub(crate) struct MediumGuard(Arc<DiskAccess>);

impl MediumGuard {
    /// Marks that the command waits after a failure of its disk, or that this wait has ended.
    /// Waiters for the medium may be unable to wait that long.
    pub(crate) fn set_owner_waits(&self, owner_waits: bool) {
        self.0.medium.set_owner_waits(owner_waits);
    }
}

impl Drop for MediumGuard {
    fn drop(&mut self) {
        self.0.medium.release();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::pin::{Pin, pin};
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context, Poll, Waker};

    use super::persist::tests::when_free;
    use super::task_set::WaitToken;
    use super::*;

    /// A virtio-blk device with requests that use the disk.
    #[derive(Default)]
    struct Disk {
        begun: Lock<Vec<WaitToken>>,
        refreshed: AtomicUsize,
        is_gone: AtomicBool,
    }

    impl Disk {
        /// Returns the number of barriers since the last call, and ends the earlier requests.
        fn end_begun(&self) -> usize {
            self.begun.lock().drain(..).count()
        }
    }

    impl DiskUser for Disk {
        fn is_gone(&self) -> bool {
            self.is_gone.load(Ordering::Relaxed)
        }

        fn raise_barrier(&self) -> WaitGroup {
            let (wait, token) = WaitGroup::new();
            self.begun.lock().push(token);
            wait
        }

        fn cut_off(&self, _: u64) {}

        fn refresh(&self) {
            self.refreshed.fetch_add(1, Ordering::Relaxed);
        }
    }

    const PORT: PortName = PortName([0x31; 8]);

    fn on_disk(disk: &Arc<Disk>) -> Arc<DiskAccess> {
        let access = Arc::<DiskAccess>::default();
        access.add_disk_user(Arc::<Disk>::clone(disk));
        access
    }

    fn stored_in(access: &DiskAccess, path: &Path) -> StorageGuard {
        when_free(|| access.store_reservations(ReservationStorage::File(path.to_owned())))
    }

    fn reserve_out(nexus: &Attached, action: u8, scope_and_type: u8, keys: [u64; 2]) {
        let cdb = [0x5f, action, scope_and_type, 0, 0, 0, 0, 0, 24, 0];
        let list = [&keys.map(u64::to_be_bytes).concat()[..], &[0, 0, 0, 0, 1, 0, 0, 0]].concat();
        nexus.reserve_out(&cdb, &list).unwrap();
    }

    fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    /// A fenced host that is no initiator would still write.
    #[test]
    fn a_reservation_holds_for_devices_that_are_no_initiators() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reservations");
        let disk = Arc::<Disk>::default();
        let access = on_disk(&disk);
        drop(stored_in(&access, &path));
        assert!(!access.has_barrier());
        disk.end_begun();
        let nexus = access.attach(PORT).unwrap();
        reserve_out(&nexus, 0, 0, [0, 1]);
        assert!(poll(pin!(access.reservation_changed())).is_ready());
        assert_eq!(disk.end_begun(), 0, "nothing is excluded");
        // WRITE EXCLUSIVE.
        reserve_out(&nexus, 1, 1, [1, 0]);
        assert!(access.has_barrier());
        {
            let mut change = pin!(access.reservation_changed());
            assert!(poll(change.as_mut()).is_pending(), "a write has begun");
            assert_eq!(disk.end_begun(), 1);
            assert!(poll(change).is_ready());
        }
        drop((nexus, access));

        // The next process finds the reservation when its device is already there.
        let disk = Arc::<Disk>::default();
        let access = on_disk(&disk);
        assert!(!access.has_barrier());
        drop(stored_in(&access, &path));
        assert!(access.has_barrier());
        assert_eq!(disk.end_begun(), 1);
    }

    /// A write that has begun would change blocks that the command compares.
    #[test]
    fn a_command_has_the_medium_when_other_devices_do_not_use_it() {
        let disk = Arc::<Disk>::default();
        let access = on_disk(&disk);
        let mut take = pin!(access.take_medium_anyway(TaskId::NONE));
        assert!(poll(take.as_mut()).is_pending() && access.has_barrier());
        assert_eq!(disk.end_begun(), 1);
        let Poll::Ready(exclusive) = poll(take) else { panic!("it waits for nothing") };
        assert!(access.is_exclusive());
        drop(exclusive);
        assert!(!access.has_barrier());
    }

    #[test]
    fn devices_that_are_gone_are_forgotten() {
        let disk = Arc::<Disk>::default();
        let access = on_disk(&disk);
        access.refresh();
        assert_eq!(disk.refreshed.load(Ordering::Relaxed), 1);
        disk.is_gone.store(true, Ordering::Relaxed);
        access.add_disk_user(Arc::<Disk>::default());
        access.refresh();
        assert_eq!(disk.refreshed.load(Ordering::Relaxed), 1);
        assert_eq!(Arc::strong_count(&disk), 1);
    }

    /// The next command may come while the first one waits for tasks.
    #[test]
    fn one_persistent_reserve_out_is_carried_out_at_a_time() {
        let access = Arc::<DiskAccess>::default();
        let first = access.begin_reserve_out();
        assert!(first.is_some() && access.begin_reserve_out().is_none());
        drop(first);
        assert!(access.begin_reserve_out().is_some());
    }
}
