//! The reservations of a disk that moves to another host with the guests that use it.

use std::io;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::registry::{PortName, Registry};
use super::{Reservations, State, StorageState, file};

/// The reservations of a disk, for another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MovedReservations {
    aptpl: bool,
    generation: u32,
    /// The registry, in the format of its file.
    registry: Value,
}

/// The reason to refuse the reservations of another host.
pub(crate) const SHARED_TEXT: &str = "another export here uses the same disk, and would lose its \
                                      reservations; remove that export";

impl Reservations {
    /// The reservations for another host. Call it while no command runs.
    pub(crate) fn moved_state(&self) -> io::Result<MovedReservations> {
        let state = self.state.lock();
        let registry = serde_json::from_str(&file::text_of(&state.registry)?)?;
        let State { generation, registry: Registry { aptpl, .. }, .. } = *state;
        Ok(MovedReservations { aptpl, generation, registry })
    }

    /// Checks the reservations of another host, and returns them under the names of ports here:
    /// the second name of each pair.
    pub(crate) fn check_moved(
        &self,
        moved: &MovedReservations,
        ports: &[(PortName, PortName)],
    ) -> Result<(), String> {
        self.registry_here(moved, ports).map(drop)
    }

    fn registry_here(
        &self,
        moved: &MovedReservations,
        ports: &[(PortName, PortName)],
    ) -> Result<Registry, String> {
        let mut registry = file::parse(&moved.registry.to_string()).map_err(|(why, _)| why)?;
        registry.aptpl = moved.aptpl;
        let state = self.state.lock();
        let is_here = |port: PortName| ports.iter().any(|(_, here)| *here == port);
        if state.attached.iter().any(|other| !is_here(other.port)) {
            return Err(SHARED_TEXT.to_owned());
        }
        if registry.aptpl && !state.persists {
            return Err(
                "the guest has reservations that outlive a loss of power (APTPL), and there \
                        is no file for them here; set reservations=PATH"
                    .to_owned(),
            );
        }
        let name = |port: PortName| {
            ports.iter().find(|(there, _)| *there == port).map_or(port, |(_, here)| *here)
        };
        registry.renamed(name).ok_or_else(|| {
            "two of its registrations would belong to one port here; use the same names of exports \
             on both hosts"
                .to_owned()
        })
    }

    /// Continues with the reservations of another host. Waits for the file.
    pub(crate) fn continue_moved(
        &self,
        moved: &MovedReservations,
        ports: &[(PortName, PortName)],
    ) -> Result<(), String> {
        let registry = self.registry_here(moved, ports)?;
        if let StorageState::In(file) = &mut *self.file.lock() {
            file.save(&registry).map_err(|error| error.to_string())?;
        }
        let mut state = self.state.lock();
        state.generation = moved.generation;
        state.set(registry, &self.unregistered);
        Ok(())
    }
}
