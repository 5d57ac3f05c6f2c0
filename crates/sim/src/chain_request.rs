//! The request in a chain of a guest, by the kind of its device and queue.

use std::fmt;

use crate::message::Message;
use crate::request::Request;
use crate::scsi::command::Command;
use crate::scsi::events::EVENT_BYTES;
use crate::scsi::function::Function;

pub(crate) enum ChainRequest {
    /// A request of virtio-blk.
    Blk(Request),
    /// A command of virtio-scsi.
    Command(Command),
    /// A task management function of virtio-scsi.
    Function(Function),
    /// A buffer for an event of virtio-scsi.
    Event(Message),
}

impl ChainRequest {
    /// A buffer for an event.
    pub(crate) fn event() -> Self {
        let data_in = (0, EVENT_BYTES);
        Self::Event(Message { writable: EVENT_BYTES, data_in, ..Message::default() })
    }

    pub(crate) fn message(&self) -> &Message {
        match self {
            Self::Blk(request) => &request.message,
            Self::Command(command) => &command.message,
            Self::Function(function) => &function.message,
            Self::Event(message) => message,
        }
    }
}

impl fmt::Display for ChainRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blk(Request { id, kind, ranges, .. }) => {
                write!(f, "request {id}: {kind:?} {ranges:?}")
            }
            Self::Command(Command { id, tag, kind, unit, range, .. }) => {
                write!(f, "command {id} (tag {tag}, unit {unit}): {kind:?} {range:?}")
            }
            Self::Function(Function { kind, address, tag, .. }) => {
                write!(f, "{kind:?} (unit {address}, tag {tag})")
            }
            Self::Event(_) => write!(f, "a buffer for an event"),
        }
    }
}
