//! The handle of a file for the ops of one IoThread.

use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use crate::config::EngineKind;
use crate::file::open_file::OpenFile;

/// A handle of a file on one IoThread, which its ops share: a clone costs no atomic operation. The
/// file's registration with the kernel ends when the last handle is dropped, and with it the last
/// op that may name the file.
pub(crate) type FileRef = Rc<IoFile>;

/// See [`FileRef`].
#[derive(Debug)]
pub(crate) struct IoFile {
    file: Arc<OpenFile>,
    engine: EngineKind,
    lane: u32,
    /// The index under which the file is registered with the kernel, or [`NOT_REGISTERED`].
    registered: Cell<i32>,
    retired: Rc<Retired>,
}

pub(crate) const NOT_REGISTERED: i32 = -1;

impl IoFile {
    pub(crate) fn new(
        file: Arc<OpenFile>,
        engine: EngineKind,
        lane: u32,
        retired: Rc<Retired>,
    ) -> Rc<Self> {
        Rc::new(Self { file, engine, lane, registered: Cell::new(NOT_REGISTERED), retired })
    }

    /// Makes a handle that belongs to no IoThread.
    #[cfg(test)]
    pub(crate) fn detached(file: Arc<OpenFile>) -> Rc<Self> {
        Self::new(file, EngineKind::Threads, u32::MAX, Rc::default())
    }

    #[inline]
    pub(crate) fn file(&self) -> &OpenFile {
        &self.file
    }

    /// The file as all IoThreads share it.
    pub(crate) fn shared(&self) -> &Arc<OpenFile> {
        &self.file
    }

    /// The engine of its ops.
    #[inline]
    pub(crate) fn engine(&self) -> EngineKind {
        self.engine
    }

    #[inline]
    pub(crate) fn lane(&self) -> u32 {
        self.lane
    }

    #[inline]
    pub(crate) fn registered(&self) -> i32 {
        self.registered.get()
    }

    pub(crate) fn set_registered(&self, index: i32) {
        self.registered.set(index);
    }
}

impl Deref for IoFile {
    type Target = OpenFile;

    fn deref(&self) -> &OpenFile {
        &self.file
    }
}

impl AsRawFd for IoFile {
    #[inline]
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for IoFile {
    fn drop(&mut self) {
        // The last handle may be dropped anywhere, in the middle of a harvest for example.
        self.retired.0.borrow_mut().push((self.lane, self.registered.get()));
    }
}

/// Lanes whose handles were dropped, each with the index of its file.
#[derive(Debug, Default)]
pub(crate) struct Retired(RefCell<Vec<(u32, i32)>>);

impl Retired {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    pub(crate) fn take(&self) -> Option<(u32, i32)> {
        self.0.borrow_mut().pop()
    }
}
