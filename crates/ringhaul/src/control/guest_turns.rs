//! The turns of guests at an export whose guest may move to another host: the locks of its disks,
//! the files of their reservations, and the state of its logical units.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use blockio::executor::{Lock, Turns};
use device::access::DiskAccess;
use device::{Device, MovedState};
use serde::{Deserialize, Serialize};
use vhost_user::RunLock;

use super::disk_locks::DiskLocks;
use crate::spec::UnitPlace;

/// The wait for the end of a turn.
pub(super) const KEEPS_STATE: &str =
    "the state of the guest that has left is not kept yet, because a file system does not answer";

/// The turns of the guests of an export.
pub(crate) struct GuestTurns {
    device: Device,
    locks: Arc<DiskLocks>,
    /// Held while a turn begins or ends, which may wait for a file system. The size of a disk is
    /// held before it.
    turn: Lock<TurnRecord>,
    /// Changed only by a holder of the turn's lock, and never held while waiting.
    states: Lock<States>,
}

#[derive(Default)]
struct TurnRecord {
    users: Turns,
    /// The highest number of a user with a turn that has begun.
    begun: u64,
}

#[derive(Default)]
struct States {
    present: TurnStates,
    /// Users with a turn that has begun and a state that is not kept yet.
    users: BTreeSet<u64>,
    /// True while another process continues with the states.
    are_handed_over: bool,
}

/// The states between two turns.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct TurnStates {
    /// The state at the end of the last turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    left: Option<MovedState>,
    /// The state with which the next turn begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    next: Option<MovedState>,
}

/// A refusal to save or load the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TurnError {
    #[error("its guest runs here; move or pause the guest first")]
    Running,
    #[error(
        "there is no state: no guest has stopped here since the start of the daemon, or its last \
         data may be lost, and the log has the reason"
    )]
    NoGuest,
    #[error("another process takes over; try again")]
    HandingOver,
}

impl GuestTurns {
    pub(super) fn new(device: Device, locks: Arc<DiskLocks>) -> Self {
        Self { device, locks, turn: Lock::default(), states: Lock::default() }
    }

    /// The state with which the guest can continue on another host.
    ///
    /// # Errors
    ///
    /// If a guest has the turn, or none had it.
    pub(crate) fn save(&self) -> Result<MovedState, TurnError> {
        let turn = self.turn.lock();
        if turn.users.holder().is_some() {
            return Err(TurnError::Running);
        }
        let TurnStates { left, next } = self.states.lock().present.clone();
        if let Some(next) = next {
            return Ok(next);
        }
        // A front-end that is still there may have got news since. Afterwards the device is reset.
        let now = self.state_of_driver(self.device.moved_state().ok().flatten());
        now.or(left).ok_or(TurnError::NoGuest)
    }

    /// Returns a state that was read before, unless the device was reset: then it may be of no
    /// driver. A reset clears the features first.
    fn state_of_driver(&self, state: Option<MovedState>) -> Option<MovedState> {
        state.filter(|_| self.device.negotiated().features() != 0)
    }

    /// Drops a loaded state if its guest does not come.
    ///
    /// # Errors
    ///
    /// If another process takes over.
    pub(crate) fn forget(&self) -> Result<(), TurnError> {
        let _turn = self.turn.lock();
        self.set_next(None)
    }

    /// Sets the state of the next turn. The wait for the lock of the turn may be as long as a
    /// hand-over.
    fn set_next(&self, next: Option<MovedState>) -> Result<(), TurnError> {
        let mut states = self.states.lock();
        if states.are_handed_over {
            return Err(TurnError::HandingOver);
        }
        states.present.next = next;
        Ok(())
    }

    /// Has the next turn begin with a state.
    ///
    /// # Errors
    ///
    /// If a guest has the turn, the state is of another device, or another process takes over.
    pub(crate) fn load(&self, state: MovedState) -> anyhow::Result<()> {
        let turn = self.turn.lock();
        anyhow::ensure!(turn.users.holder().is_none(), TurnError::Running);
        self.device.check_moved(&state)?;
        Ok(self.set_next(Some(state))?)
    }

    /// Calls `change`, which changes a disk or adds one, while no turn begins or ends. Its
    /// parameter is the user that has the turn.
    pub(crate) fn with_turn<T>(&self, change: impl FnOnce(Option<u64>) -> T) -> T {
        let turn = self.turn.lock();
        change(turn.users.holder())
    }

    /// Ends the use of the disk of a unit that was removed, unless another unit has that disk.
    pub(crate) fn end_use(&self, access: &Arc<DiskAccess>) {
        let turn = self.turn.lock();
        let is_used = self.accesses().iter().any(|other| Arc::ptr_eq(other, access));
        if let Some(user) = turn.users.holder().filter(|_| !is_used) {
            access.end_use(user);
        }
    }

    /// The locks of the disks.
    pub(crate) fn locks(&self) -> &Arc<DiskLocks> {
        &self.locks
    }

    /// Returns true if the states of guests are kept, except for one whose turn continues if
    /// `has_turn`. Does not wait.
    pub(super) fn are_settled(&self, has_turn: bool) -> bool {
        self.states.lock().users.len() <= usize::from(has_turn)
    }

    /// The states for the next process, which do not change until [`resume`](Self::resume). Does
    /// not wait.
    pub(crate) fn hand_over(&self) -> TurnStates {
        let mut states = self.states.lock();
        states.are_handed_over = true;
        states.present.clone()
    }

    /// Continues with the states after a hand-over that failed.
    pub(crate) fn resume(&self) {
        self.states.lock().are_handed_over = false;
    }

    /// Continues with the states of an earlier process.
    pub(super) fn take_over(&self, states: TurnStates) {
        self.states.lock().present = states;
    }

    /// The device of the guests.
    #[cfg(test)]
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    fn begin(&self, user: u64) -> io::Result<()> {
        let mut turn = self.turn.lock();
        if turn.users.has_ended(user) {
            return Err(io::Error::other("the front-end left before its reservations were loaded"));
        }
        let accesses = self.accesses();
        let begun = accesses.iter().try_for_each(|access| access.begin_use(user));
        let next = self.states.lock().present.next.clone();
        let begun = begun.map_err(io::Error::other).and_then(|()| match &next {
            Some(state) => self.device.continue_moved(state).map_err(|error| {
                let text = format!("cannot continue with the loaded state: {error}");
                io::Error::other(text)
            }),
            None => Ok(()),
        });
        if begun.is_err() && turn.users.holder() != Some(user) {
            accesses.iter().for_each(|access| access.end_use(user));
        }
        begun?;
        if next.is_some() {
            tracing::info!("the guest continues with the loaded state");
        }
        // The end of an earlier turn may still wait for its disks.
        if let Some(holder) = turn.users.holder().filter(|holder| *holder != user) {
            accesses.iter().for_each(|access| access.end_use(holder.min(user)));
        }
        turn.users.begin(user, ());
        turn.begun = turn.begun.max(user);
        let mut states = self.states.lock();
        states.present = TurnStates::default();
        states.users.insert(user);
        Ok(())
    }

    /// Ends the turn of a user. Returns the state, if that user had the turn.
    fn end(&self, user: u64) -> Option<MovedState> {
        let mut turn = self.turn.lock();
        let (holder, ()) = turn.users.end(user)?;
        let state = self.device.moved_state();
        self.accesses().iter().for_each(|access| access.end_use(holder));
        let state = state.unwrap_or_else(|error| {
            tracing::error!("the state of logical units is lost for another host: {error}");
            None
        });
        self.state_of_driver(state)
    }

    /// Keeps the state at the end of a user's turn, unless a later turn has begun since.
    fn keep_left(&self, user: u64, left: Option<MovedState>) {
        let turn = self.turn.lock();
        if left.is_some() && turn.users.holder().is_none() && turn.begun <= user {
            self.states.lock().present.left = left;
        }
    }

    /// The accesses of the disks that several hosts use in turn.
    fn accesses(&self) -> Vec<Arc<DiskAccess>> {
        let places = self.locks.places();
        places.into_iter().filter_map(|place| access_of(&self.device, place)).collect()
    }
}

impl RunLock for GuestTurns {
    fn take(&self, user: u64) -> io::Result<()> {
        self.locks.take(user)?;
        self.begin(user).inspect_err(|_| {
            // The log has the reason if a lock stays.
            let _ = self.locks.release(user);
        })
    }

    fn release(&self, user: u64) -> io::Result<()> {
        let left = self.end(user);
        let released = self.locks.release(user);
        if released.is_ok() {
            self.keep_left(user, left);
        }
        self.states.lock().users.remove(&user);
        released
    }
}

/// Returns the state that a disk of a device shares with other exports. `None`: there is no unit at
/// this place, or no disk.
pub(crate) fn access_of(device: &Device, place: Option<UnitPlace>) -> Option<Arc<DiskAccess>> {
    match (device, place) {
        (Device::Blk(device), None) => Some(Arc::clone(device.access())),
        (Device::Scsi(device), Some(place)) => device.access(place.address()),
        (Device::Blk(_), Some(_)) | (Device::Scsi(_), None) => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use blockio::{DiskOptions, DiskSource};
    use device::access::ReservationStorage;
    use device::scsi::config::ScsiOptions;
    use device::scsi::unit::UnitOptions;

    use super::*;
    use crate::control::export_log::ExportLog;
    use crate::testing::wait_until;

    const PLACE: UnitPlace = UnitPlace { target: 0, lun: 0 };

    /// The turns of a host with a unit on this disk.
    pub(crate) fn host(disk: &Path, reservations: &Path, serial: &str) -> GuestTurns {
        let options = DiskOptions { no_lock: true, late_lock: true, ..DiskOptions::default() };
        let source = DiskSource::file(disk, &options).unwrap();
        let device = Device::scsi(ScsiOptions::default(), Arc::new(ExportLog::new("vm")));
        let access = Arc::<DiskAccess>::default();
        let place = ReservationStorage::File(reservations.to_owned());
        let _kept = access.store_reservations_later(place).unwrap();
        let locks = DiskLocks::default();
        locks.add(PLACE, &source).unwrap();
        let Device::Scsi(scsi) = &device else { unreachable!("it is one") };
        scsi.add_unit(PLACE.address(), source, unit(serial, access)).unwrap();
        GuestTurns::new(device, Arc::new(locks))
    }

    fn unit(serial: &str, access: Arc<DiskAccess>) -> UnitOptions {
        UnitOptions { serial: serial.to_owned(), access, ..UnitOptions::new([0x30; 8], [0x31; 8]) }
    }

    fn refusal<T>(result: Result<T, impl ToString>) -> String {
        result.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_state_goes_from_the_end_of_a_turn_to_the_begin_of_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let [disk, file] = ["disk", "file"].map(|name| folder.path().join(name));
        std::fs::write(&disk, [0; 4096]).unwrap();
        let hosts = ["a", "a", "b"].map(|serial| host(&disk, &file, serial));
        let [from, to, other] = &hosts;
        assert_eq!(from.save().err(), Some(TurnError::NoGuest));
        from.device.set_features(1 << 32).unwrap();
        from.take(1).unwrap();
        assert_eq!(from.save().err(), Some(TurnError::Running));
        assert_eq!(from.with_turn(|user| user).or(to.with_turn(|user| user)), Some(1));
        // A change that only the device knows.
        let Device::Scsi(scsi) = &from.device else { unreachable!("it is one") };
        scsi.access(PLACE.address()).unwrap().refresh();
        assert!(refusal(from.load(to.device.moved_state().unwrap().unwrap())).contains("runs"));
        from.release(1).unwrap();
        let state = from.save().unwrap();
        assert_ne!(Some(&state), to.device.moved_state().unwrap().as_ref());
        assert!(refusal(other.load(state.clone())).contains("serial=a"));
        assert_eq!(other.hand_over(), TurnStates::default());
        to.load(state.clone()).unwrap();
        assert_eq!(to.save().unwrap(), state, "it can be taken elsewhere");
        to.forget().unwrap();
        assert!(to.hand_over() == TurnStates::default() && to.save().is_err());
        to.resume();
        to.load(state.clone()).unwrap();
        assert_ne!(Some(&state), to.device.moved_state().unwrap().as_ref(), "it comes later");
        to.device.reset();
        to.take(2).unwrap();
        assert_eq!(Some(&state), to.device.moved_state().unwrap().as_ref());
        assert_eq!(to.hand_over(), TurnStates::default());
        to.release(2).unwrap();
        // The next turn begins with the state of the device.
        to.device.reset();
        to.take(3).unwrap();
        assert_ne!(Some(&state), to.device.moved_state().unwrap().as_ref());
    }

    /// The lock of a turn may be held for a file system that does not answer.
    #[test]
    fn a_state_that_waits_while_another_process_takes_over_is_not_lost() {
        let folder = tempfile::tempdir().unwrap();
        let [disk, file] = ["disk", "file"].map(|name| folder.path().join(name));
        std::fs::write(&disk, [0; 4096]).unwrap();
        let [from, to] = ["a", "a"].map(|serial| host(&disk, &file, serial));
        assert!(from.are_settled(false), "there was no guest");
        from.device.set_features(1 << 32).unwrap();
        from.take(1).unwrap();
        assert!(!from.are_settled(false) && from.are_settled(true), "its turn continues");
        std::thread::scope(|scope| {
            let released = from.with_turn(|_| {
                let released = scope.spawn(|| from.release(1));
                assert!(!from.are_settled(false), "its state is not kept yet");
                released
            });
            released.join().unwrap().unwrap();
        });
        assert!(from.are_settled(false));
        let state = from.save().unwrap();
        assert_eq!(from.hand_over().left.as_ref(), Some(&state));

        std::thread::scope(|scope| {
            let load = || scope.spawn(|| refusal(to.load(state.clone())));
            let waiting = to.with_turn(|_| {
                let waiting = load();
                assert_eq!(to.hand_over(), TurnStates::default());
                waiting
            });
            assert!(waiting.join().unwrap().contains("takes over"), "the next process lacks it");
        });
        assert_eq!(to.forget(), Err(TurnError::HandingOver));
        to.resume();
        to.load(state.clone()).unwrap();
        assert_eq!(to.hand_over().next, Some(state));
    }

    #[test]
    fn the_next_process_has_the_states_between_two_turns() {
        let folder = tempfile::tempdir().unwrap();
        let [disk, file] = ["disk", "file"].map(|name| folder.path().join(name));
        std::fs::write(&disk, [0; 4096]).unwrap();
        let [from, to] = ["a", "a"].map(|serial| host(&disk, &file, serial));
        let replaced = |turns: &GuestTurns| {
            let handed = serde_json::to_value(turns.hand_over()).unwrap();
            let next = host(&disk, &file, "a");
            next.take_over(serde_json::from_value(handed).unwrap());
            next
        };
        from.device.set_features(1 << 32).unwrap();
        from.take(1).unwrap();
        let Device::Scsi(scsi) = &from.device else { unreachable!("it is one") };
        scsi.access(PLACE.address()).unwrap().refresh();
        from.release(1).unwrap();
        let state = from.save().unwrap();
        assert_eq!(replaced(&from).save().unwrap(), state, "the guest can still move");
        to.load(state.clone()).unwrap();
        let to = replaced(&to);
        to.take(1).unwrap();
        assert_eq!(Some(state), to.device.moved_state().unwrap());
    }

    /// One unit is locked late, and a second one is not locked.
    #[test]
    fn reservations_are_left_with_the_last_unit_of_their_disk() {
        let folder = tempfile::tempdir().unwrap();
        let [disk, file] = ["disk", "file"].map(|name| folder.path().join(name));
        std::fs::write(&disk, [0; 4096]).unwrap();
        stored(&file);
        let [here, there] = ["a", "a"].map(|serial| host(&disk, &file, serial));
        let Device::Scsi(scsi) = &here.device else { unreachable!("it is one") };
        let access = scsi.access(PLACE.address()).unwrap();
        let second = UnitPlace { target: 0, lun: 1 };
        let options = DiskOptions { no_lock: true, ..DiskOptions::default() };
        let source = DiskSource::file(&disk, &options).unwrap();
        let other = UnitOptions { port: [0x32; 8], ..unit("a", Arc::clone(&access)) };
        scsi.add_unit(second.address(), source, other).unwrap();
        let remove = |place: UnitPlace| {
            scsi.remove_unit(place.address()).unwrap().close();
            here.end_use(&access);
        };
        here.take(1).unwrap();
        remove(second);
        let refused = refusal(there.begin(1));
        assert!(refused.contains("uses the file"), "a unit still has the disk: {refused}");
        remove(PLACE);
        wait_for_file(&there);
    }

    /// Waits for the file of reservations: a child of another test has it open until it executes
    /// its program.
    fn wait_for_file(there: &GuestTurns) {
        wait_until(|| there.begin(1).is_ok());
    }

    /// The guest that has stopped learns of it on the other host.
    #[test]
    fn a_state_has_the_news_since_the_end_of_its_turn() {
        let folder = tempfile::tempdir().unwrap();
        let [disk, file] = ["disk", "file"].map(|name| folder.path().join(name));
        std::fs::write(&disk, [0; 4096]).unwrap();
        let host = host(&disk, &file, "a");
        host.device.set_features(1 << 32).unwrap();
        host.take(1).unwrap();
        host.release(1).unwrap();
        let before = host.save().unwrap();
        let Device::Scsi(scsi) = &host.device else { unreachable!("it is one") };
        scsi.access(PLACE.address()).unwrap().refresh();
        assert_ne!(host.save().unwrap(), before);
    }

    /// The file of a disk that was used before.
    fn stored(file: &Path) {
        let text = r#"{"format": "ringhaul persistent reservations", "version": 1,
            "registrations": [], "reservation": null}"#;
        std::fs::write(file, text).unwrap();
    }

    /// A front-end may come before the end of the turn before it.
    #[test]
    fn a_turn_that_follows_another_at_once_takes_its_disks_over() {
        let folder = tempfile::tempdir().unwrap();
        let [disk, file] = ["disk", "file"].map(|name| folder.path().join(name));
        std::fs::write(&disk, [0; 4096]).unwrap();
        stored(&file);
        let [here, there] = ["a", "a"].map(|serial| host(&disk, &file, serial));
        here.device.set_features(1 << 32).unwrap();
        here.take(1).unwrap();
        here.take(2).unwrap();
        assert_eq!(here.end(1), None, "it is the next one's turn");
        let state = here.end(2);
        wait_for_file(&there);
        there.release(1).unwrap();
        // The end of the second turn is slow, and the third one is over.
        here.device.reset();
        here.begin(3).unwrap();
        assert_eq!(here.end(3), None);
        here.keep_left(2, state);
        assert_eq!(here.save(), Err(TurnError::NoGuest), "a later guest has changed the disk");
    }

    /// The file is of another program.
    #[test]
    fn a_turn_without_its_reservations_does_not_begin() {
        let folder = tempfile::tempdir().unwrap();
        let [disk, file] = ["disk", "file"].map(|name| folder.path().join(name));
        std::fs::write(&disk, [0; 4096]).unwrap();
        std::fs::write(&file, "text").unwrap();
        let host = host(&disk, &file, "a");
        assert!(refusal(host.take(1)).contains("persistent reservations"));
        assert!(!host.locks.are_held() && host.save().err() == Some(TurnError::NoGuest));
        std::fs::remove_file(&file).unwrap();
        assert!(host.release(1).is_ok() && refusal(host.begin(1)).contains("left before"));
        host.take(2).unwrap();
        host.release(1).unwrap();
        assert!(host.locks.are_held() && host.save().err() == Some(TurnError::Running));
    }
}
