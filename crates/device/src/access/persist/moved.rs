//! The reservations of a disk, as they move to another host.

use std::io;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::file;
use super::registry::{PortName, Registry};

/// The reservations of a disk, for another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MovedReservations {
    aptpl: bool,
    pub(super) generation: u32,
    /// The registry, in the format of its file.
    registry: Value,
}

/// The reason to refuse the reservations of another host.
pub(crate) const SHARED_TEXT: &str = "another export here uses the same disk, and would lose its \
                                      reservations; remove that export";

impl MovedReservations {
    pub(super) fn new(registry: &Registry, generation: u32) -> io::Result<Self> {
        let text = file::text_of(registry)?;
        Ok(Self { aptpl: registry.aptpl, generation, registry: serde_json::from_str(&text)? })
    }

    /// The registry with the second name of each pair of `ports` in place of the first. `persists`
    /// is true if the disk here has a file for it.
    pub(super) fn registry_here(
        &self,
        ports: &[(PortName, PortName)],
        persists: bool,
    ) -> Result<Registry, String> {
        let mut registry = file::parse(&self.registry.to_string()).map_err(|(why, _)| why)?;
        registry.aptpl = self.aptpl;
        if registry.aptpl && !persists {
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
}
