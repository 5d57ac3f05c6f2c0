//! Files and memory that the kernel keeps at hand for an IoThread.

use std::io;
use std::rc::Rc;

use super::Io;
use crate::buf::Buffers;
use crate::op::FileRef;

impl Io {
    /// Has the kernel look `file` up once instead of for each op, where the engine can do that,
    /// until [`unregister_file`](Self::unregister_file).
    pub(crate) fn register_file(&self, file: &FileRef) {
        self.ops.borrow_mut().engine.register_file(file);
    }

    pub(crate) fn unregister_file(&self, file: &FileRef) {
        self.ops.borrow_mut().engine.unregister_file(file);
    }

    /// Has the kernel pin the pages of `memory` and keep them at hand, where the engine can do
    /// that, until the result is dropped. Pages that someone takes out of the mapping afterwards
    /// (a memory balloon, say) stay what the kernel reads and writes: only for memory to which
    /// nobody does that.
    ///
    /// # Errors
    ///
    /// What the kernel says: `ENOMEM` when the limit on locked memory (`RLIMIT_MEMLOCK`) forbids
    /// it, `ENOSPC` when too many pieces are registered. Ops work all the same.
    pub fn register_memory(self: &Rc<Self>, memory: Buffers) -> io::Result<RegisteredMemory> {
        let registered = self.ops.borrow_mut().engine.register_memory(memory.iovecs())?;
        Ok(RegisteredMemory { io: Rc::clone(self), memory, registered })
    }
}

/// Memory whose pages the kernel keeps at hand, see [`Io::register_memory`].
pub struct RegisteredMemory {
    io: Rc<Io>,
    /// Keeps the memory mapped.
    memory: Buffers,
    registered: bool,
}

impl RegisteredMemory {
    /// Whether the engine can do it at all.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.registered
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        if self.registered {
            self.io.ops.borrow_mut().engine.unregister_memory(self.memory.iovecs());
        }
    }
}
