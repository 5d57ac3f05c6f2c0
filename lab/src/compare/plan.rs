//! The workloads of each disk.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::rig::load::Load;
use crate::rig::targets::Target;

/// A pattern, a block size, a depth, and the driver's way to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workload {
    /// The load generator's `--rw`.
    pub(super) rw: &'static str,
    /// The load generator's `--bs`.
    pub(super) bs: &'static str,
    /// The load generator's `--iodepth`.
    pub(super) depth: u32,
    /// True if the driver busy-polls instead of sleeping until a call. At depth 1 this shows the
    /// server's own share, which the wake-up of a sleeping driver hides.
    pub(super) driver_polls: bool,
    /// The background load of the machine.
    pub(super) beside: Load,
}

const fn workload(rw: &'static str, bs: &'static str, depth: u32) -> Workload {
    Workload { rw, bs, depth, driver_polls: false, beside: Load::Nothing }
}

/// Reads come first: writes change the cost of reads on a compressing disk.
const WORKLOADS: &[Workload] = &[
    workload("randread", "4k", 1),
    Workload { driver_polls: true, ..workload("randread", "4k", 1) },
    workload("randread", "4k", 8),
    workload("randread", "4k", 64),
    workload("read", "128k", 8),
    workload("randwrite", "4k", 64),
];

impl fmt::Display for Workload {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}-{}-depth-{}", self.rw, self.bs, self.depth)?;
        out.write_str(if self.driver_polls { "-polled" } else { "" })?;
        match self.beside {
            Load::Nothing => Ok(()),
            load => write!(out, "-beside-{load}"),
        }
    }
}

impl Serialize for Workload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// First writes to a new image.
const FIRST_WRITES: &[Workload] = &[
    workload("randwrite", "4k", 16),
    workload("randwrite", "64k", 16),
    workload("write", "4k", 16),
    workload("write", "64k", 16),
];

/// The workloads whose name on `target` contains each word of `pattern`, and none of the words
/// that follow a `!`.
pub(super) fn wanted(target: Target, pattern: &str) -> Vec<Workload> {
    // Disks beyond the plain local ones are driven only at the depths: each needs servers of its
    // own.
    let is_local = Target::ALL.contains(&target);
    let mut all = if is_local { WORKLOADS.to_vec() } else { depths() };
    if target.is_thin() {
        all = FIRST_WRITES.to_vec();
    }
    if target == Target::Rbd {
        all.push(workload("randwrite", "4k", 64));
    }
    // The load of this machine alone does not slow a server beyond it.
    if is_local {
        all.extend(Load::BUSY.into_iter().flat_map(beside));
    }
    let matches = |workload: &Workload| {
        let name = format!("{target}/{workload}");
        pattern.split_whitespace().all(|word| match word.strip_prefix('!') {
            Some(unwanted) => !name.contains(unwanted),
            None => name.contains(word),
        })
    };
    all.into_iter().filter(matches).collect()
}

/// The workloads that are repeated beside `load`.
fn beside(load: Load) -> impl Iterator<Item = Workload> {
    let are_repeated = |workload: &&Workload| !workload.driver_polls;
    let add = move |workload: &Workload| Workload { beside: load, ..*workload };
    WORKLOADS.iter().filter(are_repeated).map(add)
}

/// Random reads at each depth, by a sleeping driver.
pub(super) fn depths() -> Vec<Workload> {
    let are_wanted = |workload: &&Workload| workload.rw == "randread" && !workload.driver_polls;
    WORKLOADS.iter().filter(are_wanted).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_chooses_targets_and_workloads() {
        let busy: usize = Load::BUSY.into_iter().map(|load| beside(load).count()).sum();
        assert_eq!(wanted(Target::Zram, "").len(), WORKLOADS.len() + busy);
        assert_eq!(wanted(Target::Zram, "zram").len(), WORKLOADS.len() + busy);
        assert!(wanted(Target::File, "zram").is_empty());
        let one = wanted(Target::File, "file/randread-4k-depth-64-beside-8");
        assert_eq!(one, [Workload { beside: Load::Loops(8), ..workload("randread", "4k", 64) }]);
        assert_eq!(wanted(Target::Zram, "zram !beside"), WORKLOADS);
        assert!(wanted(Target::File, "file !beside zram").is_empty());
        assert!(wanted(Target::Rbd, "beside").is_empty());
        assert_eq!(wanted(Target::ThinZram, "thin"), FIRST_WRITES);
        let depths: Vec<_> = wanted(Target::Rbd, "rbd").iter().map(|one| one.depth).collect();
        assert_eq!(depths, [1, 8, 64, 64]);
    }
}
