//! Persistent reservations: which of the initiators that share a disk may use it (SPC-4, section
//! 5.13).
//!
//! [`Reservations`] has the state of one disk. Each export of the disk attaches to it, on whatever
//! thread, as an I_T nexus with the name of its initiator port. Registrations belong to names: they
//! stay when the nexus detaches, and a nexus that attaches later under that name has them. They,
//! and the reservation, outlive resets and lost connections, and the daemon too if APTPL is set.
//!
//! Commands other than these ask [`Attached::conflicts`], which reads one flag and takes no lock.

mod command;
mod file;
mod own_file;
mod registry;
mod report;
mod rules;

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use self::command::Request;
use self::file::StateFile;
use self::registry::Registry;
use self::rules::{Effects, Ports};
use super::sense::Sense;

pub(crate) use self::command::{CDB_BYTES, TARGET_PORT, list_bytes};
pub(crate) use self::file::FileError;
pub(crate) use self::registry::{CommandClass, PortName};
pub(crate) use self::rules::Refusal;

/// An I_T nexus that is attached. Of one disk's, no two ever have the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Nexus(pub(crate) u64);

/// A port attaches that is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("port {0} is attached to the persistent reservations of this disk by another export")]
pub(crate) struct PortInUse(pub(crate) PortName);

/// What else has to happen before a PERSISTENT RESERVE OUT is answered with GOOD.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    /// Unit attentions for other nexuses.
    pub(crate) attentions: Vec<(Nexus, Sense)>,
    /// Nexuses whose commands are aborted, except this one itself, which may be among theirs. What
    /// they prevent with PREVENT ALLOW MEDIUM REMOVAL is allowed again.
    pub(crate) aborted: Vec<Nexus>,
}

/// Where reservations that persist are kept, as one export of a disk has it.
#[derive(Debug, Clone)]
pub enum KeptIn {
    /// In this file, whatever other exports say.
    File(PathBuf),
    /// Where other exports of the disk keep them. If there are none, in this file, or nowhere.
    Usual(Option<PathBuf>),
    /// The same for an export that has none of its own to keep: in this file if it is there, and
    /// else wherever a later one says.
    Found(PathBuf),
}

/// The registrations and the reservation of a disk, shared by all its exports.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// Locked from the start of a PERSISTENT RESERVE OUT to its end, and before `state`.
    file: Mutex<Kept>,
    /// Never locked while somebody waits for a disk.
    state: Mutex<State>,
    /// Classes of commands that conflict for those who cannot register.
    strangers: AtomicU8,
}

/// Where the reservations of a disk are kept.
#[derive(Debug, Default)]
enum Kept {
    /// Nobody has said.
    #[default]
    Unsaid,
    Nowhere,
    In(StateFile),
    /// Another process knows, which hands the disk over.
    Awaited,
}

/// The reservations of a disk, for another process. A file comes with them where there is one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReservationsState {
    kept: KeptState,
    /// The registry as its file would have it.
    registry: String,
    aptpl: bool,
    generation: u32,
}

/// Where they are kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum KeptState {
    Unsaid,
    Nowhere,
    In { path: PathBuf, is_unknown: bool },
}

#[derive(Debug, Default)]
struct State {
    /// Whether there is a file, so that APTPL is supported.
    persists: bool,
    registry: Registry,
    /// PRGENERATION, which begins at zero whenever the daemon starts.
    generation: u32,
    last_nexus: u64,
    attached: Vec<AttachedPort>,
    /// Those who have a [`Keeping`].
    keeping: usize,
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
    /// Those of a disk that another process hands over.
    pub(crate) fn awaited() -> Self {
        Self { file: Mutex::new(Kept::Awaited), ..Self::default() }
    }

    /// What another process needs to go on with them, and the file, while no command runs.
    ///
    /// # Errors
    ///
    /// When no descriptor is left.
    pub(crate) fn hand_over(&self) -> io::Result<(ReservationsState, Option<File>)> {
        let (kept, state) = (lock(&self.file), lock(&self.state));
        let (kept, file) = match &*kept {
            Kept::Unsaid | Kept::Awaited => (KeptState::Unsaid, None),
            Kept::Nowhere => (KeptState::Nowhere, None),
            Kept::In(file) => {
                let path = file.path().to_owned();
                let (file, is_unknown) = file.hand_over();
                (KeptState::In { path, is_unknown }, file.map(File::try_clone).transpose()?)
            }
        };
        let registry = file::text_of(&state.registry)?;
        let State { generation, registry: Registry { aptpl, .. }, .. } = *state;
        Ok((ReservationsState { kept, registry, aptpl, generation }, file))
    }

    /// Goes on with those of another process.
    ///
    /// # Errors
    ///
    /// When they make no sense.
    pub(crate) fn take_over(&self, from: ReservationsState, file: Option<File>) -> io::Result<()> {
        let registry = file::parse(&from.registry).map_err(|(why, _)| io::Error::other(why));
        let mut registry = registry?;
        registry.aptpl = from.aptpl;
        let (mut kept, mut state) = (lock(&self.file), lock(&self.state));
        *kept = match from.kept {
            KeptState::Unsaid => Kept::Unsaid,
            KeptState::Nowhere => Kept::Nowhere,
            KeptState::In { path, is_unknown } => {
                Kept::In(StateFile::handed_over(path, file, &registry, is_unknown))
            }
        };
        state.persists = matches!(*kept, Kept::In(_));
        state.generation = from.generation;
        state.set(registry, &self.strangers);
        Ok(())
    }

    /// Has them kept, where initiators ask for that (APTPL), and loads those that were. They stay
    /// there while there are some, a port is attached, or somebody has a result of this. This waits
    /// for the disk with that file, and for others that do.
    ///
    /// # Errors
    ///
    /// When the file is there but cannot be read, is broken, or is somebody else's: to go on
    /// without it would let hosts write that were fenced off. When they are kept elsewhere already.
    pub(crate) fn keep_in(self: &Arc<Self>, place: KeptIn) -> Result<Keeping, FileError> {
        let mut kept = lock(&self.file);
        if matches!(*kept, Kept::Awaited) {
            return Ok(self.keeping());
        }
        if lock(&self.state).forget_unused() {
            *kept = Kept::Unsaid;
        }
        let has_to_exist = matches!(place, KeptIn::Found(_));
        let path = match (&*kept, place) {
            (Kept::Awaited, _) => unreachable!("it says where they are kept"),
            (Kept::Unsaid, KeptIn::Usual(None)) => {
                *kept = Kept::Nowhere;
                return Ok(self.keeping());
            }
            (
                Kept::Unsaid,
                KeptIn::File(path) | KeptIn::Usual(Some(path)) | KeptIn::Found(path),
            ) => path,
            (_, KeptIn::Usual(_) | KeptIn::Found(_)) => return Ok(self.keeping()),
            (Kept::Nowhere, KeptIn::File(path)) => return Err(FileError::elsewhere(&path, None)),
            (Kept::In(file), KeptIn::File(path)) if file.path() == path => {
                return Ok(self.keeping());
            }
            (Kept::In(file), KeptIn::File(path)) => {
                return Err(FileError::elsewhere(&path, Some(file.path())));
            }
        };
        let (file, registry) = StateFile::load(path)?;
        if !(has_to_exist && file.is_absent()) {
            *kept = Kept::In(file);
            let mut state = lock(&self.state);
            state.persists = true;
            state.set(registry, &self.strangers);
        }
        Ok(self.keeping())
    }

    fn keeping(self: &Arc<Self>) -> Keeping {
        lock(&self.state).keeping += 1;
        Keeping(Arc::clone(self))
    }

    /// Attaches an initiator port. It has the registration under its name, if there is one.
    ///
    /// # Errors
    ///
    /// When it is attached already.
    pub(crate) fn attach(self: &Arc<Self>, port: PortName) -> Result<Attached, PortInUse> {
        let mut state = lock(&self.state);
        if state.attached.iter().any(|other| other.port == port) {
            return Err(PortInUse(port));
        }
        state.last_nexus += 1;
        let nexus = Nexus(state.last_nexus);
        let conflicts = Arc::new(AtomicU8::new(state.registry.conflicts(port)));
        state.attached.push(AttachedPort { nexus, port, conflicts: Arc::clone(&conflicts) });
        Ok(Attached { reservations: Arc::clone(self), nexus, port, conflicts })
    }

    /// Whether the reservation keeps those who cannot register from commands of this class.
    pub(crate) fn keeps_strangers_from(&self, class: CommandClass) -> bool {
        self.strangers.load(Ordering::Relaxed) & class as u8 != 0
    }

    /// PERSISTENT RESERVE IN: its whole data, of which the initiator gets as much as its allocation
    /// length allows. This does not wait for a disk.
    ///
    /// # Errors
    ///
    /// When there is no such service action.
    pub(crate) fn reserve_in(&self, cdb: &[u8; CDB_BYTES]) -> Result<Vec<u8>, Sense> {
        let state = lock(&self.state);
        report::data(cdb, &state.registry, state.generation, state.persists)
    }
}

impl Attached {
    /// The number by which [`Done`] names this nexus.
    pub(crate) fn nexus(&self) -> Nexus {
        self.nexus
    }

    /// What it is attached to.
    pub(crate) fn reservations(&self) -> &Arc<Reservations> {
        &self.reservations
    }

    /// Whether some commands conflict with the reservation. As for `conflicts`, whoever relies on a
    /// new one has learnt of it by what orders more than this load could.
    #[inline]
    pub(crate) fn is_restricted(&self) -> bool {
        self.conflicts.load(Ordering::Relaxed) != 0
    }

    /// Whether a command of this class conflicts with the reservation, now that its processing
    /// begins. If so, its status is RESERVATION CONFLICT, whatever else is wrong with it.
    #[inline]
    pub(crate) fn conflicts(&self, class: CommandClass) -> bool {
        // Whoever relies on a new reservation has learnt of it from an answer of this process, and
        // what happens on that way orders more than this load could.
        self.conflicts.load(Ordering::Relaxed) & class as u8 != 0
    }

    /// PERSISTENT RESERVE OUT. The parameter list has [`list_bytes`] bytes. When this returns, new
    /// commands of all nexuses meet the new state; those that have begun go on.
    ///
    /// This waits for a disk where APTPL is set, and for others that do, so an IoThread leaves it
    /// to another thread.
    ///
    /// # Errors
    ///
    /// When the command is not carried out. Then nothing has changed.
    pub(crate) fn reserve_out(&self, cdb: &[u8; CDB_BYTES], list: &[u8]) -> Result<Done, Refusal> {
        let Reservations { file, state, strangers } = &*self.reservations;
        let mut file = lock(file);
        let persists = matches!(*file, Kept::In(_));
        let request = Request::parse(cdb, list, persists)?;
        let (mut registry, attached) = {
            let state = lock(state);
            let ports: Vec<_> = state.attached.iter().map(|other| other.port).collect();
            (state.registry.clone(), ports)
        };
        let ports = Ports { own: self.port, attached: &attached };
        let effects = registry.perform(ports, &request)?;
        if let Kept::In(file) = &mut *file {
            file.keep(&registry)?;
        }
        Ok(lock(state).replace(registry, effects, strangers))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        lock(&self.reservations.state).attached.retain(|other| other.nexus != self.nexus);
    }
}

/// Where reservations are kept stays the same while somebody has this.
#[derive(Debug)]
pub struct Keeping(Arc<Reservations>);

impl Drop for Keeping {
    fn drop(&mut self) {
        lock(&self.0.state).keeping -= 1;
    }
}

impl State {
    /// Forgets where reservations are kept, if nobody would miss it. Returns whether that is so.
    fn forget_unused(&mut self) -> bool {
        let is_empty = self.registry.registrations().is_empty();
        let is_unused = is_empty && self.attached.is_empty() && self.keeping == 0;
        self.persists &= !is_unused;
        is_unused
    }

    /// What there is from now on, for all who are attached.
    fn set(&mut self, registry: Registry, strangers: &AtomicU8) {
        self.registry = registry;
        strangers.store(self.registry.conflicts_of_strangers(), Ordering::Relaxed);
        for AttachedPort { port, conflicts, .. } in &self.attached {
            conflicts.store(self.registry.conflicts(*port), Ordering::Relaxed);
        }
    }

    /// What is there from now on. Returns the effects for the nexuses that are attached.
    fn replace(&mut self, registry: Registry, effects: Effects, strangers: &AtomicU8) -> Done {
        self.generation = self.generation.wrapping_add(u32::from(effects.is_counted));
        self.set(registry, strangers);
        let nexus_of = |port| {
            let found = self.attached.iter().find(|other| other.port == port);
            found.map(|other| other.nexus)
        };
        let attentions = effects.attentions.into_iter();
        Done {
            attentions: attentions
                .filter_map(|(port, sense)| Some((nexus_of(port)?, sense)))
                .collect(),
            aborted: effects.aborted.into_iter().filter_map(nexus_of).collect(),
        }
    }
}

/// Locks, even if somebody has panicked in here: nothing is left half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
