//! A thread's reference to guest memory.

use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use iomem::{Buffers, Memory, Ranges, WriteLog};
use libc::iovec;

use super::dirty_log::{DirtyLog, HostWrites};
use super::map::{GuestMemory, HostRegion, to_usize};
use super::shadows::Shadows;

/// A thread's own counted reference to a [`GuestMemory`], and the owner for lists of its ranges. A
/// clone costs no atomic operation.
#[derive(Debug, Clone)]
pub struct LocalMemory(Rc<Local>);

#[derive(Debug)]
struct Local {
    map: Arc<GuestMemory>,
    memory: Memory,
}

impl LocalMemory {
    /// Makes the first reference of a thread. Further ones are clones of it.
    pub fn new(map: Arc<GuestMemory>) -> Self {
        let memory = Memory::loggable(Arc::clone(&map));
        Self::from_parts(map, memory)
    }

    /// Makes a reference from a map, and the owner for lists of it.
    pub(crate) fn from_parts(map: Arc<GuestMemory>, memory: Memory) -> Self {
        Self(Rc::new(Local { map, memory }))
    }

    /// Sets, replaces or removes the log that marks writes through lists of this map, existing ones
    /// too. A debug build lets `shadows` follow the marks.
    pub(crate) fn set_log(&self, log: Option<&Arc<DirtyLog>>, shadows: &Shadows) {
        let writes = log.map(|log| {
            let (map, log, shadows) = (Arc::clone(&self.0.map), Arc::clone(log), shadows.clone());
            Rc::new(HostWrites { map, log, shadows }) as Rc<dyn WriteLog>
        });
        self.0.memory.set_log(writes);
    }

    /// The map, for sharing with other threads.
    pub fn shared(&self) -> &Arc<GuestMemory> {
        &self.0.map
    }

    /// The owner that lists of this map's ranges hold.
    #[inline]
    pub(crate) fn lists(&self) -> &Memory {
        &self.0.memory
    }

    /// Makes a list of ranges that were found in this map.
    #[inline]
    pub(super) fn buffers(&self, ranges: Ranges) -> Buffers {
        // SAFETY: only the translator of this map and `whole` call it, with ranges that the map has
        // mapped for reading and writing. They stay mapped while `memory` lives, and no Rust
        // reference is ever made to guest memory.
        unsafe { Buffers::from_raw_parts(ranges, self.lists().clone()) }
    }

    /// Returns a list of the whole map, for an engine that registers its pages.
    pub fn whole(&self) -> Buffers {
        let range = |region: &HostRegion| iovec {
            iov_base: region.host.cast(),
            iov_len: to_usize(region.size),
        };
        self.buffers(self.hosts.iter().map(range).collect::<Vec<_>>().into())
    }
}

impl Deref for LocalMemory {
    type Target = GuestMemory;

    #[inline]
    fn deref(&self) -> &GuestMemory {
        &self.0.map
    }
}
