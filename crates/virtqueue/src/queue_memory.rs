//! The memory of a queue: the present map, the maps of chains that were popped earlier, and the log
//! of writes to all of them.

use std::sync::{Arc, Weak};

use iomem::WeakMemory;

use crate::chain::Chain;
use crate::error::QueueError;
use crate::memory::{DirtyLog, GuestMemory, LocalMemory, QueueLog, Shadows, Translator};

/// The memory of a queue, and its log.
#[derive(Debug)]
pub(crate) struct QueueMemory {
    /// The translator of the present map.
    pub(crate) translator: Translator,
    /// True if a pop prefetches for the next chains. The driver has just written their data on
    /// another processor, so fetching it takes its time.
    pub(crate) prefetch: bool,
    /// The log of writes, if there is one.
    log: Option<QueueLog>,
    /// Maps that were replaced, which chains may still have.
    earlier: Vec<EarlierMap>,
    /// Copies of requests with logged writes, in a debug build.
    shadows: Shadows,
}

/// A map that goes away with its last chain.
#[derive(Debug)]
struct EarlierMap {
    map: Weak<GuestMemory>,
    lists: WeakMemory,
}

impl QueueMemory {
    pub(crate) fn new(translator: Translator) -> Self {
        Self {
            translator,
            prefetch: true,
            log: None,
            earlier: Vec::new(),
            shadows: Shadows::default(),
        }
    }

    /// The present map.
    #[inline]
    pub(crate) fn map(&self) -> &LocalMemory {
        self.translator.memory()
    }

    #[inline]
    pub(crate) fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    /// Continues with another translator. The log receives writes to either map.
    pub(crate) fn replace(&mut self, translator: Translator) {
        let answer_place = self.translator.answer_place();
        let before = std::mem::replace(&mut self.translator, translator);
        self.translator.set_answer_place(answer_place);
        self.map().set_log(self.log_of_data(), &self.shadows);
        let before = before.memory();
        let (map, lists) = (Arc::downgrade(before.shared()), before.lists().downgrade());
        self.earlier.retain(|earlier| earlier.map.strong_count() > 0);
        self.earlier.push(EarlierMap { map, lists });
    }

    /// Returns the present map without the regions that are lost.
    pub(crate) fn without_lost(&self) -> LocalMemory {
        // Any part of a valid map is a valid map.
        let rest = self.map().without_lost().unwrap_or_else(|_| GuestMemory::empty());
        LocalMemory::new(Arc::new(rest))
    }

    /// Sets, replaces or removes the log of writes, through the buffers of all chains too. The
    /// previous log is not touched afterwards.
    pub(crate) fn set_log(&mut self, log: Option<QueueLog>) {
        self.log = log;
        if self.log_of_data().is_none() {
            self.shadows.clear();
        }
        self.map().set_log(self.log_of_data(), &self.shadows);
        for EarlierMap { map, lists } in &self.earlier {
            if let (Some(map), Some(lists)) = (map.upgrade(), lists.upgrade()) {
                let earlier = LocalMemory::from_parts(map, lists);
                earlier.set_log(self.log_of_data(), &self.shadows);
            }
        }
    }

    /// The log of writes through the buffers of chains.
    fn log_of_data(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref().filter(|log| log.marks_data).map(|log| &log.log)
    }

    /// Begins to check that all writes of a chain, which was popped, are marked. Debug builds alone
    /// do.
    pub(crate) fn begin_check(&self, chain: &Chain) {
        if self.log_of_data().is_some() {
            self.shadows.begin(chain.head, &chain.writable, chain.memory.shared());
        }
    }

    /// Ends the check of a chain: each of its writes has a mark.
    pub(crate) fn check_marks(&self, head: u16) {
        self.shadows.check(head);
    }

    /// Ends the check of a chain that is given back to the ring.
    pub(crate) fn end_check(&self, head: u16) {
        self.shadows.end(head);
    }

    /// Marks `bytes` bytes from `offset` on of the used ring, or of a packed ring's device events,
    /// if writes to the ring are logged.
    pub(crate) fn mark_used_ring(&self, offset: usize, bytes: usize) {
        if let Some(QueueLog { log, used_ring: Some(start), .. }) = &self.log {
            log.mark(start + offset as u64, bytes);
        }
    }

    /// Marks `bytes` bytes from guest address `addr` on, which are a part of a packed ring, if
    /// writes to the ring are logged.
    pub(crate) fn mark_ring(&self, addr: u64, bytes: usize) {
        if let Some(QueueLog { log, used_ring: Some(_), .. }) = &self.log {
            log.mark(addr, bytes);
        }
    }
}

/// The fault of a ring that is not in a map without the regions that are lost.
#[cold]
pub(crate) fn lost_with_memory(error: QueueError) -> QueueError {
    match error {
        QueueError::Unmapped { part, addr, len } => QueueError::MemoryGone { part, addr, len },
        other => other,
    }
}
