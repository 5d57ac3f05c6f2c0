//! Task management: the tasks that a function covers, and their responses.

use device::unit_address::UnitAddress;

use super::{ABORTED, COMMANDS_CLEARED, Code, NEXUS_LOST, RESET, UNIT_RESET, lun_bytes};
use crate::message::Message;
use crate::rng::Rng;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    AbortTask = 0,
    AbortTaskSet = 1,
    ClearTaskSet = 3,
    NexusReset = 4,
    UnitReset = 5,
    QueryTask = 6,
    QueryTaskSet = 7,
}

const KINDS: [Kind; 9] = [
    Kind::AbortTask,
    Kind::AbortTask,
    Kind::AbortTask,
    Kind::AbortTaskSet,
    Kind::ClearTaskSet,
    Kind::NexusReset,
    Kind::UnitReset,
    Kind::QueryTask,
    Kind::QueryTaskSet,
];

/// A function before it becomes a chain.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) kind: Kind,
    pub(crate) address: UnitAddress,
    pub(crate) tag: u64,
    pub(crate) message: Message,
}

impl Function {
    /// Draws a function; `tasks` are the tasks that are out.
    pub(crate) fn draw(rng: &mut Rng, units: &[UnitAddress], tasks: &[(UnitAddress, u64)]) -> Self {
        let kind = rng.pick(&KINDS);
        let mut address = rng.pick(units);
        let mut tag = rng.below(8);
        if !tasks.is_empty() && rng.chance(850) {
            (address, tag) = rng.pick(tasks);
        }
        let mut readable = vec![0; 4];
        readable.extend((kind as u32).to_le_bytes());
        readable.extend(lun_bytes(address));
        readable.extend(tag.to_le_bytes());
        let message =
            Message { header: readable.len(), readable, writable: 1, ..Message::default() };
        Self { kind, address, tag, message }
    }

    /// True if the function covers a task.
    pub(crate) fn covers(&self, unit: UnitAddress, tag: u64) -> bool {
        match self.kind {
            Kind::AbortTask | Kind::QueryTask => unit == self.address && tag == self.tag,
            Kind::NexusReset => unit.target == self.address.target,
            _ => unit == self.address,
        }
    }

    /// The response of tasks that the function ends; `None` if it ends none.
    pub(crate) fn response(&self) -> Option<u8> {
        match self.kind {
            Kind::AbortTask | Kind::AbortTaskSet | Kind::ClearTaskSet => Some(ABORTED),
            Kind::NexusReset | Kind::UnitReset => Some(RESET),
            Kind::QueryTask | Kind::QueryTaskSet => None,
        }
    }

    /// True if the function covers the tasks of all initiators. A reset ends these, too.
    pub(crate) fn is_of_all(&self) -> bool {
        matches!(self.kind, Kind::ClearTaskSet | Kind::UnitReset)
    }

    /// The unit attentions for the function's initiator, and for other initiators.
    pub(crate) fn attentions(&self) -> [Option<Code>; 2] {
        match self.kind {
            Kind::NexusReset => [Some(NEXUS_LOST), None],
            Kind::UnitReset => [Some(UNIT_RESET); 2],
            Kind::ClearTaskSet => [None, Some(COMMANDS_CLEARED)],
            _ => [None; 2],
        }
    }
}
