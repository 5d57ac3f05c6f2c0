//! What all units on one disk share, in whichever devices they are. To initiators they are one
//! logical unit, which each reaches by a nexus of its own: it has one set of tasks, one set of mode
//! parameters and one set of persistent reservations, and one command may exclude all others.

use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::medium::Medium;
use super::persist::ReservationsState;
use super::persist::{Attached, CommandClass, FileError, Nexus, PortInUse, PortName, Reservations};
pub use super::persist::{Keeping, KeptIn};
use super::sense::Sense;
use super::task_set::{Abort, How, TaskId, Waiting};
use super::turns::Turns;

/// Functions about the tasks of all initiators that wait for those of others at a time. A disk may
/// be many units, and each may be asked for a thousand functions.
pub(super) const FUNCTIONS_MAX: usize = 8;

/// A unit on the disk, as those in other devices reach it.
pub(crate) trait Peer: Send + Sync {
    /// The unit has been removed.
    fn is_gone(&self) -> bool;

    /// Has its initiator learn of something with its next command.
    fn add_attention(&self, sense: Sense);

    /// Does what `how` says with its tasks, except this one.
    fn cover(&self, how: How, except: Option<TaskId>) -> Option<Waiting>;

    /// Uses no more than so many bytes of the disk from now on.
    fn cut_off(&self, size_bytes: u64);

    /// The file or device behind the disk may have another size: its driver is told.
    fn refresh(&self);
}

/// A device on the disk that is no initiator, as a virtio-blk device is not.
pub(crate) trait Stranger: Send + Sync {
    /// The device has been removed.
    fn is_gone(&self) -> bool;

    /// From now on its requests ask before they use the disk. The result is
    /// ready when that is so, and those that have begun are answered.
    fn fence(&self) -> Waiting;

    /// As for a [`Peer`].
    fn cut_off(&self, size_bytes: u64);

    /// The file or device behind the disk may have another size, of which nobody is told here.
    fn refresh(&self);
}

/// The tasks of a nexus that are looked for.
struct Looked {
    nexus: Nexus,
    peer: Arc<dyn Peer>,
    tasks: Waiting,
}

/// The tasks of a nexus that were looked for, when they have ended.
pub(crate) struct Covered {
    pub(crate) nexus: Nexus,
    pub(crate) peer: Arc<dyn Peer>,
    /// How many there were.
    pub(crate) found: usize,
    /// Some may be carried out later, as if nobody had asked.
    pub(crate) has_lost: bool,
}

/// What the units on one disk share. Whoever has several exports of a disk makes one for it.
pub struct DiskAccess {
    reservations: Arc<Reservations>,
    peers: Mutex<Vec<(Nexus, Arc<dyn Peer>)>>,
    strangers: Mutex<Vec<Arc<dyn Stranger>>>,
    /// Held while the disk gets another size, or another device.
    sizes: Mutex<()>,
    /// A PERSISTENT RESERVE OUT is in progress.
    is_changing: AtomicBool,
    medium: Medium,
    /// STOP UNIT was the last that was heard.
    is_stopped: AtomicBool,
    /// An initiator has cleared WCE of the caching mode page.
    cache_is_off: AtomicBool,
    /// D_SENSE of the control mode page.
    has_descriptor_sense: AtomicBool,
    /// Those of functions about the tasks of all initiators.
    turns: Turns,
}

impl Default for DiskAccess {
    fn default() -> Self {
        Self::with(Arc::default())
    }
}

/// What the units on a disk share, for another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct AccessState {
    reservations: ReservationsState,
    is_stopped: bool,
    cache_is_off: bool,
    has_descriptor_sense: bool,
}

/// The file with the persistent reservations of a disk cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ReservationsError(#[from] FileError);

impl DiskAccess {
    /// That of a disk that another process hands over: reservations are kept where it says.
    #[must_use]
    pub fn awaited() -> Self {
        Self::with(Arc::new(Reservations::awaited()))
    }

    fn with(reservations: Arc<Reservations>) -> Self {
        Self {
            reservations,
            peers: Mutex::default(),
            strangers: Mutex::default(),
            sizes: Mutex::default(),
            is_changing: AtomicBool::default(),
            medium: Medium::default(),
            is_stopped: AtomicBool::default(),
            cache_is_off: AtomicBool::default(),
            has_descriptor_sense: AtomicBool::default(),
            turns: Turns::new(FUNCTIONS_MAX),
        }
    }

    /// What another process needs, and the file of the reservations, while no command runs.
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

    /// Goes on with what another process had.
    pub(crate) fn take_over(&self, state: AccessState, file: Option<File>) -> io::Result<()> {
        self.reservations.take_over(state.reservations, file)?;
        self.set_stopped(state.is_stopped);
        self.set_cache_off(state.cache_is_off);
        self.set_descriptor_sense(state.has_descriptor_sense);
        Ok(())
    }

    /// Has persistent reservations kept, where initiators ask for that (APTPL), and loads those
    /// that were. Without this they are lost when the process ends. The file exists while there is
    /// something to keep, and is nobody else's then. They stay there while there are some, or a
    /// unit is on the disk: keep the result until the unit is added. This waits for its file
    /// system.
    ///
    /// # Errors
    ///
    /// When the file is there but cannot be read, is broken, or is somebody else's: to go on
    /// without it would let hosts write that were fenced off. When other exports of the disk have
    /// said that they are kept elsewhere.
    pub fn keep_reservations(&self, place: KeptIn) -> Result<Keeping, ReservationsError> {
        let keeping = self.reservations.keep_in(place)?;
        // A reservation that was loaded holds at once, and nobody waits for what has begun.
        drop(self.fence());
        Ok(keeping)
    }

    pub(crate) fn attach(&self, port: PortName) -> Result<Attached, PortInUse> {
        self.reservations.attach(port)
    }

    /// The unit of a nexus can be reached from now on.
    pub(crate) fn introduce(&self, nexus: Nexus, peer: Arc<dyn Peer>) {
        let mut peers = lock(&self.peers);
        peers.retain(|(_, peer)| !peer.is_gone());
        peers.push((nexus, peer));
    }

    /// A device that is no initiator can be reached from now on.
    pub(crate) fn introduce_stranger(&self, stranger: Arc<dyn Stranger>) {
        let mut strangers = lock(&self.strangers);
        strangers.retain(|stranger| !stranger.is_gone());
        strangers.push(stranger);
    }

    /// Whether requests of devices that are no initiators have to ask before they use the disk.
    pub(crate) fn is_fenced(&self) -> bool {
        // Whoever may not read may not write.
        self.is_exclusive() || !self.admits(CommandClass::Writes)
    }

    /// Whether the reservation lets a device use the disk that is no initiator.
    pub(crate) fn admits(&self, class: CommandClass) -> bool {
        !self.reservations.keeps_strangers_from(class)
    }

    /// Has all devices that are no initiators heed what there is now.
    fn fence(&self) -> Vec<Waiting> {
        lock(&self.strangers).iter().map(|stranger| stranger.fence()).collect()
    }

    /// There may be another reservation. Returns when no device that is no initiator uses the disk
    /// in spite of it.
    pub(crate) async fn reservation_changed(&self) {
        if !self.admits(CommandClass::Writes) {
            for fenced in self.fence() {
                poll_fn(|cx| fenced.poll(cx)).await;
            }
        }
    }

    /// Has the initiator of a nexus learn of something, unless its unit has gone.
    pub(crate) fn tell(&self, nexus: Nexus, sense: Sense) {
        self.tell_if(|other| other == nexus, sense);
    }

    /// Has all initiators learn of something.
    pub(crate) fn tell_all(&self, sense: Sense) {
        self.tell_if(|_| true, sense);
    }

    /// Has all initiators but that of `nexus` learn of something.
    pub(crate) fn tell_others(&self, nexus: Nexus, sense: Sense) {
        self.tell_if(|other| other != nexus, sense);
    }

    fn tell_if(&self, is_meant: impl Fn(Nexus) -> bool, sense: Sense) {
        let peers = lock(&self.peers);
        let meant = peers.iter().filter(|(nexus, _)| is_meant(*nexus));
        meant.for_each(|(_, peer)| peer.add_attention(sense));
    }

    /// Keeps the disk at its size. Whoever changes it holds this from before the first device hears
    /// of it until the last has; whoever makes another device on the disk, from a look at its size
    /// until the device is made.
    pub fn hold_size(&self) -> MutexGuard<'_, ()> {
        lock(&self.sizes)
    }

    /// The disk has another size: all devices on it take it over, and all initiators learn of it.
    /// Whoever calls this tells the drivers of virtio-blk. It asks the file system, so it is
    /// nothing for an IoThread.
    pub fn refresh(&self) {
        // Not under the locks, since this takes its time.
        let (peers, strangers) = (lock(&self.peers).clone(), lock(&self.strangers).clone());
        strangers.iter().for_each(|stranger| stranger.refresh());
        peers.iter().for_each(|(_, peer)| peer.refresh());
    }

    /// The disk is about to lose what is beyond this size: no request of any device on it begins
    /// there from now on, and those are answered that have begun when this returns, but for those
    /// that wait for limits or for another try, which look at the size again. IoThreads answer
    /// them, so it is nothing for one.
    pub fn cut_off(&self, size_bytes: u64) {
        let (peers, strangers) = (lock(&self.peers).clone(), lock(&self.strangers).clone());
        strangers.iter().for_each(|stranger| stranger.cut_off(size_bytes));
        peers.iter().for_each(|(_, peer)| peer.cut_off(size_bytes));
        let begun = strangers.iter().map(|stranger| stranger.fence());
        let tasks = peers.iter().filter_map(|(_, peer)| peer.cover(How::Settle, None));
        let begun: Vec<Waiting> = begun.chain(tasks).collect();
        begun.iter().for_each(Waiting::wait);
    }

    /// Whether no other unit is on the disk.
    pub(crate) fn is_alone(&self, nexus: Nexus) -> bool {
        lock(&self.peers).iter().all(|(other, peer)| *other == nexus || peer.is_gone())
    }

    #[inline]
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    pub(crate) fn set_stopped(&self, stopped: bool) {
        self.is_stopped.store(stopped, Ordering::Relaxed);
    }

    /// Whether initiators have switched the write cache off.
    #[inline]
    pub(crate) fn cache_is_off(&self) -> bool {
        self.cache_is_off.load(Ordering::Relaxed)
    }

    pub(crate) fn set_cache_off(&self, off: bool) {
        self.cache_is_off.store(off, Ordering::Relaxed);
    }

    /// Whether initiators want sense data in descriptor format.
    pub(crate) fn has_descriptor_sense(&self) -> bool {
        self.has_descriptor_sense.load(Ordering::Relaxed)
    }

    pub(crate) fn set_descriptor_sense(&self, on: bool) {
        self.has_descriptor_sense.store(on, Ordering::Relaxed);
    }

    /// Back to what it was when the first unit on the disk was made.
    pub(crate) fn reset(&self) {
        self.set_stopped(false);
        self.set_cache_off(false);
        self.set_descriptor_sense(false);
    }

    /// Looks for tasks of all nexuses and does with them what `how` says of each, if anything: with
    /// all but the one that is excepted.
    fn look(&self, except: Option<TaskId>, how: impl Fn(Nexus) -> Option<How>) -> Vec<Looked> {
        let look = |(nexus, peer): &(Nexus, Arc<dyn Peer>)| {
            let tasks = peer.cover(how(*nexus)?, except)?;
            Some(Looked { nexus: *nexus, peer: Arc::clone(peer), tasks })
        };
        lock(&self.peers).iter().filter_map(look).collect()
    }

    /// Has the tasks of all initiators end, as a function of the nexus `by` asks: its own as `own`
    /// says, with those that its driver has made available by now, and those of others as a reset
    /// ends them: their drivers then begin them again. What others have not yet given to the device
    /// is no task, and it is theirs to say when they do. Returns when those have ended that are
    /// meant.
    pub(crate) async fn end_all_tasks(&self, by: Nexus, own: Abort) -> Vec<Covered> {
        // Before it waits for anything.
        let mut looked = self.look(None, |nexus| (nexus == by).then_some(How::Abort(own)));
        // Tasks never wait for functions, so that nothing waits for itself.
        let _turn = self.turns.next().await;
        let theirs = How::AbortBegun(Abort::Reset);
        looked.extend(self.look(None, |nexus| (nexus != by).then_some(theirs)));
        end(looked).await
    }

    /// The same for a command of the nexus `by`, and of the initiators that are meant.
    pub(crate) async fn end_tasks(
        &self,
        (by, command): (Nexus, TaskId),
        is_meant: impl Fn(Nexus) -> bool,
    ) -> Vec<Covered> {
        let how = |nexus| {
            let abort = if nexus == by { Abort::Aborted } else { Abort::Reset };
            is_meant(nexus).then_some(How::AbortBegun(abort))
        };
        end(self.look(Some(command), how)).await
    }

    /// Admits one PERSISTENT RESERVE OUT at a time, until the result is dropped. Two that abort
    /// each other's tasks would wait for each other, and each takes a thread.
    pub(crate) fn begin_change(self: &Arc<Self>) -> Option<Change> {
        let is_first = !self.is_changing.swap(true, Ordering::Acquire);
        is_first.then(|| Change(Arc::clone(self)))
    }

    /// Whether commands on the medium wait.
    #[inline]
    pub(crate) fn is_exclusive(&self) -> bool {
        self.medium.is_taken()
    }

    /// Waits while a command has the medium to itself. Use it before anything else that waits.
    ///
    /// # Errors
    ///
    /// What `check` says. It is asked when the command that has the medium waits itself, and
    /// [again](Self::look_at_waiting) until that goes on.
    pub(crate) async fn pass<E>(&self, check: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        self.medium.pass(check).await
    }

    /// Has all those asked whether they are to go on who wait for the medium.
    pub(crate) fn look_at_waiting(&self) {
        self.medium.look();
    }

    /// Gives a command the medium to itself: commands that begin wait, and those that have begun
    /// have ended when this returns.
    ///
    /// A thread that does not see the flag yet has its commands found by the look at its queues: it
    /// sees the flag after that, as it does with all that was written before a call to it.
    ///
    /// # Errors
    ///
    /// As for [`pass`](Self::pass), before it has the medium.
    pub(crate) async fn exclude<E>(
        self: &Arc<Self>,
        own: TaskId,
        check: impl FnMut() -> Result<(), E>,
    ) -> Result<Exclusive, E> {
        self.medium.take(check).await?;
        let exclusive = Exclusive(Arc::clone(self));
        let fenced = self.fence();
        end(self.look(Some(own), |_| Some(How::Drain))).await;
        for fenced in fenced {
            poll_fn(|cx| fenced.poll(cx)).await;
        }
        Ok(exclusive)
    }
}

#[cfg(test)]
impl DiskAccess {
    /// As [`exclude`](Self::exclude), however long that takes.
    pub(crate) async fn exclude_anyway(self: &Arc<Self>, own: TaskId) -> Exclusive {
        let Ok(exclusive) = self.exclude(own, || Ok::<(), std::convert::Infallible>(())).await;
        exclusive
    }
}

/// Returns when the tasks have ended that are waited for.
async fn end(looked: Vec<Looked>) -> Vec<Covered> {
    let mut covered = Vec::new();
    for Looked { nexus, peer, tasks } in looked {
        let found = poll_fn(|cx| tasks.poll(cx)).await;
        covered.push(Covered { nexus, peer, found, has_lost: tasks.has_lost() });
    }
    covered
}

/// Initiators whose tasks were ended by the one of nexus `by` learn of that.
pub(crate) fn tell_cleared(ended: &[Covered], by: Nexus) {
    let others = ended.iter().filter(|covered| covered.nexus != by && covered.found > 0);
    others.for_each(|covered| covered.peer.add_attention(Sense::COMMANDS_CLEARED));
}

/// The one PERSISTENT RESERVE OUT in progress.
pub(crate) struct Change(Arc<DiskAccess>);

impl Drop for Change {
    fn drop(&mut self) {
        self.0.is_changing.store(false, Ordering::Release);
    }
}

/// The medium belongs to one command, until this is dropped.
pub(crate) struct Exclusive(Arc<DiskAccess>);

impl Exclusive {
    /// The command waits since its disk has failed it, or does so no more. Who waits for the medium
    /// may have no time for that.
    pub(crate) fn set_held(&self, is_held: bool) {
        self.0.medium.set_held(is_held);
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        self.0.medium.release();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
