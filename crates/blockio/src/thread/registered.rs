//! Registration of files and memory with the kernel.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use crate::config::EngineKind;
use crate::op::{FileRef, OpenFile};
use crate::thread::io_state::{Io, Ops};
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
    /// Returns a handle of `file` for ops by `engine`, which this IoThread must have. If the engine
    /// can, the file is registered while a handle exists, so that the kernel does not look it up
    /// for each op.
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

    /// Ends the registrations of files whose last handle was dropped.
    pub(crate) fn detach_files(&self) {
        // Within a harvest the last handle may be dropped; the end of the harvest detaches its
        // file.
        if let Ok(mut ops) = self.ops.try_borrow_mut() {
            ops.detach_files();
        }
    }

    /// Pins the pages of `memory` and registers them with the kernel, if there is an engine
    /// io_uring, until the result is dropped. The kernel goes on using these pages even if they are
    /// taken out of the mapping later (by a memory balloon, say). So register only memory that
    /// keeps its pages.
    ///
    /// # Errors
    ///
    /// The kernel's error: `ENOMEM` if the limit on locked memory (`RLIMIT_MEMLOCK`) forbids it,
    /// `ENOSPC` if too many pieces are registered. Ops work without it.
    #[doc(hidden)]
    pub fn register_memory(self: &Rc<Self>, memory: Buffers) -> io::Result<RegisteredMemory> {
        let registered = self.ops.borrow_mut().engine.register_memory(memory.iovecs())?;
        Ok(RegisteredMemory { io: Rc::clone(self), memory, registered })
    }
}

/// Memory that is registered with the kernel (see [`Io::register_memory`]).
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
