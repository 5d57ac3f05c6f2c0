//! Commands, and their effects on the disk.

use super::Outcome;
use super::reservations::{Needs, Order};
use crate::content::Value;
use crate::faults::Class;
use crate::message::Message;
use crate::request::DiskEffect;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Synchronize,
    Unmap,
    WriteSame,
    CompareAndWrite,
    TestUnitReady,
    /// MODE SELECT that switches the write cache.
    Select(bool),
    Reserve(Order),
    /// A command with this outcome, if it is carried out at all.
    Bad(Outcome),
}

/// A command before it becomes a chain.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) kind: Kind,
    /// Number of the command: the value that a write leaves.
    pub(crate) id: u64,
    pub(crate) tag: u64,
    /// The number of the unit, which is the number of its disk.
    pub(crate) unit: usize,
    /// Sectors: the first, and how many.
    pub(crate) range: (u64, u64),
    /// The values that COMPARE AND WRITE expects.
    pub(crate) expects: Vec<Value>,
    /// The data is on stable storage at the answer.
    pub(crate) fua: bool,
    /// Bytes of data moved by a successful command.
    pub(crate) moved: usize,
    pub(crate) message: Message,
}

impl Command {
    /// The effect on the disk.
    pub(crate) fn disk_effect(&self) -> DiskEffect {
        let classes: &[Class] = match self.kind {
            Kind::Read => &[Class::Read],
            Kind::Write => &[Class::Write, Class::Flush],
            Kind::Synchronize | Kind::Select(_) => &[Class::Flush],
            Kind::Unmap => &[Class::Deallocate, Class::Flush],
            Kind::WriteSame => &[Class::Write, Class::Deallocate, Class::Flush],
            Kind::CompareAndWrite => &[Class::Read, Class::Write, Class::Flush],
            Kind::TestUnitReady | Kind::Reserve(_) | Kind::Bad(_) => &[],
        };
        let leaves = match self.kind {
            Kind::Write | Kind::CompareAndWrite => Some(Value::Id(self.id)),
            Kind::Unmap | Kind::WriteSame => Some(Value::Zero),
            _ => None,
        };
        DiskEffect {
            classes,
            ranges: vec![self.range].into_iter().filter(|(_, count)| *count > 0).collect(),
            leaves,
            is_optional: self.kind == Kind::Unmap,
            flushes: self.kind == Kind::Synchronize,
            fua: self.fua,
        }
    }

    /// The need for the medium, which decides about conflicts with reservations.
    pub(crate) fn needs(&self) -> Needs {
        match self.kind {
            Kind::Read => Needs::Reading,
            // The opcode is unknown; all other bad commands are reads.
            Kind::Bad(Outcome::Check(5, [0x20, 0])) => Needs::Nothing,
            Kind::Bad(_) => Needs::Reading,
            Kind::TestUnitReady | Kind::Reserve(_) => Needs::Nothing,
            _ => Needs::Writing,
        }
    }

    /// True if the command is refused on a read-only medium.
    pub(crate) fn writes(&self) -> bool {
        matches!(self.kind, Kind::Write | Kind::Unmap | Kind::WriteSame | Kind::CompareAndWrite)
    }

    pub(crate) fn sectors(&self) -> std::ops::Range<u64> {
        self.range.0..self.range.0 + self.range.1
    }
}
