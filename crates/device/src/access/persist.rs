//! Persistent reservations, which decide on the use of a disk by the initiators that share it
//! (SPC-4, section 5.13).
//!
//! [`Reservations`] holds the state of one disk. Each export of the disk attaches to it, on any
//! thread, as an I_T nexus with the name of its initiator port. Registrations belong to names: they
//! stay when the nexus detaches, and a nexus that attaches later under that name gets them.
//! Registrations and the reservation outlive resets and lost connections, and the daemon too if
//! APTPL is set.
//!
//! All other commands check [`Attached::conflicts`], which reads one flag and takes no lock.

mod command;
mod file;
mod locked_file;
mod moved;
mod registry;
mod report;
mod rules;

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use blockio::executor::Lock;
use serde::{Deserialize, Serialize};

use self::command::Request;
use self::file::StateFile;
use self::rules::{Effects, Ports};
use super::sense::Sense;

pub(crate) use self::command::{CDB_BYTES, TARGET_PORT, list_bytes};
pub(crate) use self::file::FileError;
pub(crate) use self::moved::{MovedReservations, SHARED_TEXT};
pub(crate) use self::registry::{CommandClass, PortName, Registry};
pub(crate) use self::rules::Refusal;

/// An attached I_T nexus. Its number is never used again for the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Nexus(pub(crate) u64);

/// The port is attached already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("port {0} is attached to the persistent reservations of this disk by another export")]
pub(crate) struct PortInUse(pub(crate) PortName);

/// Further steps before a PERSISTENT RESERVE OUT is answered with GOOD.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ReserveEffects {
    /// Unit attentions for other nexuses.
    pub(crate) attentions: Vec<(Nexus, Sense)>,
    /// Nexuses with commands to abort, except this command itself, which may be among them. Medium
    /// removal that they prevented with PREVENT ALLOW MEDIUM REMOVAL is allowed again.
    pub(crate) aborted: Vec<Nexus>,
}

/// The place of persistent reservations, as one export of a disk chooses it.
#[derive(Debug, Clone)]
pub enum ReservationStorage {
    /// In this file. An error if other exports have chosen another place.
    File(PathBuf),
    /// In the place of other exports of the disk. Without them, in this file, or nowhere.
    Shared(Option<PathBuf>),
    /// Like `Shared`, for an export without reservations of its own: in this file if it exists, and
    /// otherwise in the place that a later export chooses.
    Existing(PathBuf),
}

/// The registrations and the reservation of a disk, shared by all its exports.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// Locked throughout a PERSISTENT RESERVE OUT, and before `state`.
    file: Lock<StorageState>,
    /// Never locked during a wait for a disk.
    state: Lock<State>,
    /// Classes of commands that conflict for users that cannot register.
    unregistered: AtomicU8,
}

/// The place of the reservations of a disk.
#[derive(Debug, Default)]
enum StorageState {
    /// Not chosen yet.
    #[default]
    Unsaid,
    Nowhere,
    In(StateFile),
    /// Chosen by the process that hands the disk over.
    HandedOver,
}

/// The reservations of a disk, for another process. Their file, if there is one, is passed along.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReservationsState {
    kept: KeptState,
    /// The registry, in the format of its file.
    registry: String,
    aptpl: bool,
    generation: u32,
}

/// The place of the reservations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum KeptState {
    Unsaid,
    Nowhere,
    In { path: PathBuf, is_unknown: bool },
}

#[derive(Debug, Default)]
struct State {
    /// True if reservations are kept in a file, so that APTPL is supported.
    persists: bool,
    registry: Registry,
    /// PRGENERATION, which starts at zero unless another process hands it over.
    generation: u32,
    last_nexus: u64,
    attached: Vec<AttachedPort>,
    /// The number of [`StorageGuard`]s.
    guard_count: usize,
}

#[derive(Debug)]
struct AttachedPort {
    nexus: Nexus,
    port: PortName,
    /// Classes of commands that conflict.
    conflicts: Arc<AtomicU8>,
}

/// An attached nexus. Dropping it detaches it.
#[derive(Debug)]
pub(crate) struct Attached {
    reservations: Arc<Reservations>,
    nexus: Nexus,
    port: PortName,
    conflicts: Arc<AtomicU8>,
}

impl Reservations {
    /// For a disk that another process hands over.
    pub(crate) fn for_hand_over() -> Self {
        Self { file: Lock::new(StorageState::HandedOver), ..Self::default() }
    }

    /// State with which another process can continue, and the file. Call it while no command runs.
    ///
    /// # Errors
    ///
    /// If no descriptor is left.
    pub(crate) fn hand_over(&self) -> io::Result<(ReservationsState, Option<File>)> {
        let (kept, state) = (self.file.lock(), self.state.lock());
        let (kept, file) = match &*kept {
            StorageState::Unsaid | StorageState::HandedOver => (KeptState::Unsaid, None),
            StorageState::Nowhere => (KeptState::Nowhere, None),
            StorageState::In(file) => {
                let path = file.path().to_owned();
                let (file, is_unknown) = file.hand_over();
                (KeptState::In { path, is_unknown }, file.map(File::try_clone).transpose()?)
            }
        };
        let registry = file::text_of(&state.registry)?;
        let State { generation, registry: Registry { aptpl, .. }, .. } = *state;
        Ok((ReservationsState { kept, registry, aptpl, generation }, file))
    }

    /// Continues with the reservations of another process.
    ///
    /// # Errors
    ///
    /// If they are invalid.
    pub(crate) fn take_over(&self, from: ReservationsState, file: Option<File>) -> io::Result<()> {
        let registry = file::parse(&from.registry).map_err(|(why, _)| io::Error::other(why));
        let mut registry = registry?;
        registry.aptpl = from.aptpl;
        let (mut kept, mut state) = (self.file.lock(), self.state.lock());
        *kept = match from.kept {
            KeptState::Unsaid => StorageState::Unsaid,
            KeptState::Nowhere => StorageState::Nowhere,
            KeptState::In { path, is_unknown } => {
                StorageState::In(StateFile::handed_over(path, file, &registry, is_unknown))
            }
        };
        state.persists = matches!(*kept, StorageState::In(_));
        state.generation = from.generation;
        state.set(registry, &self.unregistered);
        Ok(())
    }

    /// The reservations for another host. Call it while no command runs.
    pub(crate) fn moved_state(&self) -> io::Result<MovedReservations> {
        let state = self.state.lock();
        MovedReservations::new(&state.registry, state.generation)
    }

    /// Checks the reservations of another host, where ports have the first of each two names.
    pub(crate) fn check_moved(
        &self,
        moved: &MovedReservations,
        ports: &[(PortName, PortName)],
    ) -> Result<Registry, String> {
        let state = self.state.lock();
        let is_here = |port: PortName| ports.iter().any(|(_, here)| *here == port);
        if state.attached.iter().any(|other| !is_here(other.port)) {
            return Err(SHARED_TEXT.to_owned());
        }
        moved.registry_here(ports, state.persists)
    }

    /// Continues with the reservations of another host. Waits for the file.
    pub(crate) fn continue_moved(
        &self,
        moved: &MovedReservations,
        ports: &[(PortName, PortName)],
    ) -> Result<(), String> {
        let registry = self.check_moved(moved, ports)?;
        if let StorageState::In(file) = &mut *self.file.lock() {
            file.save(&registry).map_err(|error| error.to_string())?;
        }
        let mut state = self.state.lock();
        state.generation = moved.generation;
        state.set(registry, &self.unregistered);
        Ok(())
    }

    /// Takes the file of the reservations, which another host may have changed. Without a file,
    /// registrations stay as they are.
    pub(crate) fn take_file(&self) -> Result<(), FileError> {
        if let StorageState::In(file) = &mut *self.file.lock()
            && let Some(registry) = file.take()?
        {
            self.state.lock().set(registry, &self.unregistered);
        }
        Ok(())
    }

    /// Leaves the file of the reservations to another host.
    pub(crate) fn release_file(&self) {
        if let StorageState::In(file) = &mut *self.file.lock() {
            file.release();
        }
    }

    /// Stores reservations in `place`, if initiators ask for that (APTPL), and loads stored ones.
    /// The place is fixed while there are registrations, attached ports, or results of this. Waits
    /// for the disk with the file, and for other callers that do.
    ///
    /// # Errors
    ///
    /// If the file exists but cannot be read, is broken, or is in use: to continue without it would
    /// let fenced hosts write. If the reservations have another place already.
    pub(crate) fn store_in(
        self: &Arc<Self>,
        place: ReservationStorage,
    ) -> Result<StorageGuard, FileError> {
        self.choose(place, false)
    }

    /// Like [`store_in`](Self::store_in), with a file that belongs to another host until it is
    /// [taken](Self::take_file), and is not loaded before.
    pub(crate) fn store_later_in(
        self: &Arc<Self>,
        place: ReservationStorage,
    ) -> Result<StorageGuard, FileError> {
        self.choose(place, true)
    }

    fn choose(
        self: &Arc<Self>,
        place: ReservationStorage,
        is_later: bool,
    ) -> Result<StorageGuard, FileError> {
        let mut kept = self.file.lock();
        if matches!(*kept, StorageState::HandedOver) {
            return Ok(self.guard());
        }
        if self.state.lock().forget_unused() {
            *kept = StorageState::Unsaid;
        }
        let has_to_exist = matches!(place, ReservationStorage::Existing(_));
        let path = match (&*kept, place) {
            (StorageState::HandedOver, _) => unreachable!("it says where they are kept"),
            (StorageState::Unsaid, ReservationStorage::Shared(None)) => {
                *kept = StorageState::Nowhere;
                return Ok(self.guard());
            }
            (
                StorageState::Unsaid,
                ReservationStorage::File(path)
                | ReservationStorage::Shared(Some(path))
                | ReservationStorage::Existing(path),
            ) => path,
            (_, ReservationStorage::Shared(_) | ReservationStorage::Existing(_)) => {
                return Ok(self.guard());
            }
            (StorageState::Nowhere, ReservationStorage::File(path)) => {
                return Err(FileError::elsewhere(&path, None));
            }
            (StorageState::In(file), ReservationStorage::File(path)) if file.path() == path => {
                return Ok(self.guard());
            }
            (StorageState::In(file), ReservationStorage::File(path)) => {
                return Err(FileError::elsewhere(&path, Some(file.path())));
            }
        };
        let (file, is_absent, registry) = if is_later {
            let is_absent = !path.exists();
            (StateFile::later(path), is_absent, Registry::default())
        } else {
            let (file, registry) = StateFile::load(path)?;
            let is_absent = file.is_absent();
            (file, is_absent, registry)
        };
        if !(has_to_exist && is_absent) {
            *kept = StorageState::In(file);
            let mut state = self.state.lock();
            state.persists = true;
            state.set(registry, &self.unregistered);
        }
        Ok(self.guard())
    }

    fn guard(self: &Arc<Self>) -> StorageGuard {
        self.state.lock().guard_count += 1;
        StorageGuard(Arc::clone(self))
    }

    /// Attaches an initiator port, which gets the registration under its name, if there is one.
    ///
    /// # Errors
    ///
    /// If the port is attached already.
    pub(crate) fn attach(self: &Arc<Self>, port: PortName) -> Result<Attached, PortInUse> {
        let mut state = self.state.lock();
        if state.attached.iter().any(|other| other.port == port) {
            return Err(PortInUse(port));
        }
        state.last_nexus += 1;
        let nexus = Nexus(state.last_nexus);
        let conflicts = Arc::new(AtomicU8::new(state.registry.conflicts(port)));
        state.attached.push(AttachedPort { nexus, port, conflicts: Arc::clone(&conflicts) });
        Ok(Attached { reservations: Arc::clone(self), nexus, port, conflicts })
    }

    /// True if the reservation excludes users that cannot register from commands of this class.
    pub(crate) fn excludes_unregistered(&self, class: CommandClass) -> bool {
        self.unregistered.load(Ordering::Relaxed) & class as u8 != 0
    }

    /// Carries out PERSISTENT RESERVE IN. Returns all data, of which the initiator gets as much as
    /// its allocation length allows. Does not wait for a disk.
    ///
    /// # Errors
    ///
    /// If there is no such service action.
    pub(crate) fn reserve_in(&self, cdb: &[u8; CDB_BYTES]) -> Result<Vec<u8>, Sense> {
        let state = self.state.lock();
        report::data(cdb, &state.registry, state.generation, state.persists)
    }
}

impl Attached {
    /// The number of this nexus in [`ReserveEffects`].
    pub(crate) fn nexus(&self) -> Nexus {
        self.nexus
    }

    /// The reservations to which the nexus is attached.
    pub(crate) fn reservations(&self) -> &Arc<Reservations> {
        &self.reservations
    }

    /// True if some commands conflict with the reservation. The load is relaxed for the same reason
    /// as in [`conflicts`](Self::conflicts).
    #[inline]
    pub(crate) fn is_restricted(&self) -> bool {
        self.conflicts.load(Ordering::Relaxed) != 0
    }

    /// True if a command of this class conflicts with the reservation when its processing begins.
    /// Its status is then RESERVATION CONFLICT, regardless of any other error.
    #[inline]
    pub(crate) fn conflicts(&self, class: CommandClass) -> bool {
        // An initiator that relies on a new reservation knows it from an answer of this process.
        // That path orders more than this load could.
        self.conflicts.load(Ordering::Relaxed) & class as u8 != 0
    }

    /// Carries out PERSISTENT RESERVE OUT. The parameter list has [`list_bytes`] bytes. When this
    /// returns, new commands of all nexuses meet the new state; commands that have begun continue.
    ///
    /// Waits for a disk if APTPL is set, and for other callers that do, so it is not for IoThreads.
    ///
    /// # Errors
    ///
    /// If the command is not carried out. Then nothing has changed.
    pub(crate) fn reserve_out(
        &self,
        cdb: &[u8; CDB_BYTES],
        list: &[u8],
    ) -> Result<ReserveEffects, Refusal> {
        let Reservations { file, state, unregistered } = &*self.reservations;
        let mut file = file.lock();
        let persists = matches!(*file, StorageState::In(_));
        let request = Request::parse(cdb, list, persists)?;
        let (mut registry, attached) = {
            let state = state.lock();
            let ports: Vec<_> = state.attached.iter().map(|other| other.port).collect();
            (state.registry.clone(), ports)
        };
        let ports = Ports { own: self.port, attached: &attached };
        let effects = registry.perform(ports, &request)?;
        if let StorageState::In(file) = &mut *file {
            file.save(&registry)?;
        }
        Ok(state.lock().replace(registry, effects, unregistered))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.reservations.state.lock().attached.retain(|other| other.nexus != self.nexus);
    }
}

/// Fixes the place of the reservations until it is dropped.
#[derive(Debug)]
pub struct StorageGuard(Arc<Reservations>);

impl Drop for StorageGuard {
    fn drop(&mut self) {
        self.0.state.lock().guard_count -= 1;
    }
}

impl State {
    /// Forgets the place of the reservations if it is unused. Returns true if so.
    fn forget_unused(&mut self) -> bool {
        let is_empty = self.registry.registrations().is_empty();
        let is_unused = is_empty && self.attached.is_empty() && self.guard_count == 0;
        self.persists &= !is_unused;
        is_unused
    }

    /// Sets the registry, and the conflicts of all attached ports.
    fn set(&mut self, registry: Registry, unregistered: &AtomicU8) {
        self.registry = registry;
        unregistered.store(self.registry.conflicts_of_unregistered(), Ordering::Relaxed);
        for AttachedPort { port, conflicts, .. } in &self.attached {
            conflicts.store(self.registry.conflicts(*port), Ordering::Relaxed);
        }
    }

    /// Replaces the registry. Returns the effects on attached nexuses.
    fn replace(
        &mut self,
        registry: Registry,
        effects: Effects,
        unregistered: &AtomicU8,
    ) -> ReserveEffects {
        self.generation = self.generation.wrapping_add(u32::from(effects.is_counted));
        self.set(registry, unregistered);
        let nexus_of = |port| {
            let found = self.attached.iter().find(|other| other.port == port);
            found.map(|other| other.nexus)
        };
        let attentions = effects.attentions.into_iter();
        ReserveEffects {
            attentions: attentions
                .filter_map(|(port, sense)| Some((nexus_of(port)?, sense)))
                .collect(),
            aborted: effects.aborted.into_iter().filter_map(nexus_of).collect(),
        }
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
pub(super) mod tests;
