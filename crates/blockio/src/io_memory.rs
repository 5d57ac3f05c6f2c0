//! Files and memory that the kernel keeps at hand for an IoThread.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use crate::config::EngineKind;
use crate::io_state::{Io, Ops};
use crate::op::{FileRef, OpenFile};
use iomem::Buffers;

impl Ops {
    #[inline]
    pub(crate) fn detach_files(&mut self) {
        if self.slots.lanes.has_retired() {
            self.detach_retired();
        }
    }

    #[cold]
    fn detach_retired(&mut self) {
        while let Some((registered, file)) = self.slots.lanes.take_retired() {
            self.engine.unregister_file(registered);
            // Only now may it be closed.
            drop(file);
        }
        self.engine.set_disks(self.slots.lanes.len());
    }
}

impl Io {
    /// A handle of `file` for ops by `engine`, which this IoThread has. While one is there, the
    /// kernel has the file at hand, where the engine can do that, and does not look it up for each
    /// op.
    pub(crate) fn attach_file(&self, file: &Arc<OpenFile>, engine: EngineKind) -> FileRef {
        let ops = &mut *self.ops.borrow_mut();
        assert!(ops.engine.has(engine), "a file for engine {engine}, which is not there");
        ops.detach_files();
        let (handle, is_new) = ops.slots.lanes.attach(file, engine);
        if is_new {
            ops.engine.set_disks(ops.slots.lanes.len());
            ops.engine.register_file(&handle);
        }
        handle
    }

    /// Gives back what was kept for files whose last handle has gone.
    pub(crate) fn detach_files(&self) {
        // Within a harvest the last handle may go; the harvest looks for such itself.
        if let Ok(mut ops) = self.ops.try_borrow_mut() {
            ops.detach_files();
        }
    }

    /// Has the kernel pin the pages of `memory` and keep them at hand, where engine io_uring is
    /// there, until the result is dropped. Pages that someone takes out of the mapping afterwards
    /// (a memory balloon, say) stay what the kernel reads and writes: only for memory to which
    /// nobody does that.
    ///
    /// # Errors
    ///
    /// What the kernel says: `ENOMEM` when the limit on locked memory (`RLIMIT_MEMLOCK`) forbids
    /// it, `ENOSPC` when too many pieces are registered. Ops work without it.
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

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        if self.registered {
            self.io.ops.borrow_mut().engine.unregister_memory(self.memory.iovecs());
        }
    }
}
