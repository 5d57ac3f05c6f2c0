//! How much memory front-ends may have this process map.

use std::io;

use virtqueue::{MappingBudget, MappingRules, MemoryError, MemoryFiles};

/// The most that one front-end, and all of them together, may have mapped; clones share the count.
#[derive(Clone)]
pub struct MemoryLimits {
    all: MappingBudget,
    of_each_bytes: u64,
    files: MemoryFiles,
}

impl MemoryLimits {
    /// Limits in bytes: for each front-end, and for the process. Which files may be memory.
    #[must_use]
    pub fn new(of_each_bytes: u64, of_all_bytes: u64, files: MemoryFiles) -> Self {
        let all = "the memory of all front-ends (--max-mapped-memory)";
        Self { all: MappingBudget::new(all, of_all_bytes), of_each_bytes, files }
    }

    /// What a front-end that connects now may map.
    pub(crate) fn of_front_end(&self) -> MappingRules {
        let each = "the memory of a front-end (--max-guest-memory)";
        let budget = self.all.child(each, self.of_each_bytes);
        MappingRules { files: self.files, budget }
    }
}

/// What is wrong with memory that a front-end shares, and how the operator could allow it.
pub(crate) fn refusal(error: MemoryError) -> io::Error {
    match error {
        MemoryError::NotMemory { .. } => {
            io::Error::other(format!("{error}; other file systems take --memory-files any"))
        }
        error => io::Error::other(error),
    }
}
