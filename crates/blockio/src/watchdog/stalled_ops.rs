//! Late operations: found once a second, reported for each disk, counted.
//!
//! The check costs an op nothing on its way: its slot has the time of submission anyway.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Line, StallLog};
use crate::op::{OpKind, OpenFile, Slots};
use crate::stats::Stats;

/// The least time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The disks of an IoThread that have late ops.
pub(crate) struct StalledOps {
    /// When the next check is due.
    due: Cell<Instant>,
    disks: RefCell<Vec<StalledDisk>>,
}

struct StalledDisk {
    file: Arc<OpenFile>,
    /// The oldest late op: its time of submission, and its kind.
    oldest: (Instant, OpKind),
    log: StallLog,
    is_found: bool,
}

/// A line for the log.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StallReport {
    /// The oldest late op has this kind and age; `waiting` ops of this IoThread wait for the disk.
    Late { path: PathBuf, kind: &'static str, age: Duration, waiting: usize },
    /// No late op is left. `after` counts from the submission of the oldest op in the first report.
    Answers { path: PathBuf, after: Duration },
}

impl StalledOps {
    pub(crate) fn new(now: Instant) -> Self {
        Self { due: Cell::new(now + CHECK_INTERVAL), disks: RefCell::default() }
    }

    /// The time of the next check.
    pub(crate) fn due(&self) -> Instant {
        self.due.get()
    }

    /// True if the next check is due.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now >= self.due.get()
    }

    /// True if no disk has late ops.
    pub(crate) fn is_empty(&self) -> bool {
        self.disks.borrow().is_empty()
    }

    /// Checks all ops, and logs the reports that are due. Call it after a harvest: ops that
    /// completed while this thread did not run are not late.
    #[cold]
    pub(crate) fn check_and_log(&self, now: Instant, slots: &Slots, stats: &Stats) {
        for (file, report) in self.check(now, slots, stats) {
            file.in_span(|| match report {
                StallReport::Late { .. } => tracing::warn!("{report}"),
                StallReport::Answers { .. } => tracing::info!("{report}"),
            });
        }
    }

    /// Checks all ops, and counts each that has become late since the last check.
    fn check(
        &self,
        now: Instant,
        slots: &Slots,
        stats: &Stats,
    ) -> Vec<(Arc<OpenFile>, StallReport)> {
        let before = self.due.replace(now + CHECK_INTERVAL) - CHECK_INTERVAL;
        let disks = &mut *self.disks.borrow_mut();
        disks.iter_mut().for_each(|disk| disk.is_found = false);
        for (file, kind, submitted) in slots.submitted() {
            if !StallLog::is_late(submitted, now) {
                continue;
            }
            if !StallLog::is_late(submitted, before) {
                stats.late.add(1);
            }
            note_late(disks, file, kind, submitted);
        }
        let mut reports = Vec::new();
        disks.retain_mut(|disk| {
            // Another IoThread may have a late op of this disk. It sets the time again at its next
            // check.
            disk.file.set_stalled_since(disk.is_found.then_some(disk.oldest.0));
            reports.extend(disk.report(now, slots).map(|report| (Arc::clone(&disk.file), report)));
            disk.is_found
        });
        reports
    }
}

fn note_late(disks: &mut Vec<StalledDisk>, file: &Arc<OpenFile>, kind: OpKind, submitted: Instant) {
    let oldest = (submitted, kind);
    match disks.iter_mut().find(|disk| Arc::ptr_eq(&disk.file, file)) {
        Some(disk) if !disk.is_found || submitted < disk.oldest.0 => {
            (disk.oldest, disk.is_found) = (oldest, true);
        }
        Some(_) => {}
        None => {
            let (file, log) = (Arc::clone(file), StallLog::default());
            disks.push(StalledDisk { file, oldest, log, is_found: true });
        }
    }
}

impl StalledDisk {
    fn report(&mut self, now: Instant, slots: &Slots) -> Option<StallReport> {
        let (submitted, kind) = self.oldest;
        let line = self.log.next_line(now, self.is_found.then_some(submitted))?;
        let path = self.file.path().to_owned();
        Some(match line {
            Line::Waits(age) => {
                let waiting = slots.pending_of(&self.file);
                StallReport::Late { path, kind: kind.noun(), age, waiting }
            }
            Line::Answers(after) => StallReport::Answers { path, after },
        })
    }
}

impl fmt::Display for StallReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Late { path, kind, age, waiting } => write!(
                f,
                "{}: a {kind} has not been answered for {} s; operations of this IoThread that \
                 wait for the disk: {waiting}",
                path.display(),
                age.as_secs(),
            ),
            Self::Answers { path, after } => {
                write!(f, "{}: answers again, after {} s", path.display(), after.as_secs())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::task::Owner;
    use crate::op::{FileRef, IoFile, Op};
    use iomem::Buffers;
    use std::fs::File;
    use std::os::fd::OwnedFd;

    const SECOND: Duration = Duration::from_secs(1);

    fn file() -> FileRef {
        let file = OwnedFd::from(File::open("/dev/null").unwrap());
        IoFile::detached(Arc::new(file.into()))
    }

    struct Bench {
        slots: Slots,
        stats: Stats,
        stalled: StalledOps,
        start: Instant,
    }

    impl Bench {
        fn new() -> Self {
            let start = Instant::now();
            let slots = Slots::new(64);
            Self { slots, stats: Stats::default(), stalled: StalledOps::new(start), start }
        }

        fn start(&mut self, file: &FileRef, kind: OpKind) -> u32 {
            let op = Op { kind, file: FileRef::clone(file), offset: 0, buffers: Buffers::empty() };
            self.slots.insert(op, Owner::default())
        }

        fn submit(&mut self, file: &FileRef, kind: OpKind, second: u32) -> u32 {
            let slot = self.start(file, kind);
            self.slots.submit(slot, self.start + second * SECOND);
            slot
        }

        fn complete(&mut self, slot: u32, second: u32) {
            self.slots.complete(slot, 0, self.start + second * SECOND, &self.stats);
        }

        fn check(&mut self, second: u32) -> Vec<String> {
            let now = self.start + second * SECOND;
            assert!(now >= self.stalled.due());
            let reports = self.stalled.check(now, &self.slots, &self.stats);
            reports.iter().map(|(_, report)| report.to_string()).collect()
        }
    }

    #[test]
    fn a_disk_that_does_not_answer_is_told_of_once_a_minute_and_when_it_answers() {
        let (mut bench, hung, well) = (Bench::new(), file(), file());
        let write = bench.submit(&hung, OpKind::Write { fua: false }, 1);
        let flush = bench.submit(&hung, OpKind::Flush, 2);
        bench.start(&hung, OpKind::Read);
        bench.submit(&well, OpKind::Read, 4);
        assert!(bench.check(5).is_empty() && bench.stalled.is_empty());
        let told = "a write has not been answered for 5 s; operations of this IoThread that wait \
                    for the disk: 3";
        assert_eq!(bench.check(6), [format!(": {told}")]);
        assert!(bench.check(7).is_empty(), "it was told a second ago");
        assert_eq!(hung.stalled_since(), Some(bench.start + SECOND));
        assert_eq!(well.stalled_since(), None);
        bench.complete(write, 8);
        assert!(bench.check(8).is_empty(), "the flush is late");
        assert_eq!(hung.stalled_since(), Some(bench.start + 2 * SECOND));
        assert_eq!(bench.stats.late.get(), 2, "each is counted once");
        let lines = bench.check(66).join("\n");
        assert!(lines.contains("a flush has not been answered for 64 s"), "{lines}");
        bench.complete(flush, 67);
        assert_eq!(bench.check(67), [": answers again, after 66 s"]);
        assert_eq!(hung.stalled_since(), None);
        // The late op of this disk has a report of its own.
        assert_eq!(bench.stats.late.get(), 3);
        assert!(!bench.stalled.is_empty());
    }

    #[test]
    fn a_disk_that_answers_slowly_is_not_one_that_does_not() {
        let (mut bench, slow) = (Bench::new(), file());
        for second in 1..100 {
            let slot = bench.submit(&slow, OpKind::Read, second);
            assert!(bench.check(second + 4).is_empty());
            bench.complete(slot, second + 4);
        }
        assert_eq!(bench.stats.late.get(), 0);
    }
}
