//! The migration of a guest: the copy of its memory that the VMM makes by logs of written pages.
//!
//! The VMM takes marks and copies pages while the device writes. After the stop of all queues the
//! copy must be equal to the memory, byte by byte, and the guest continues on the copy.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use iomem::fits;

use super::Guest;
use crate::failure::Failure;
use crate::inflight;
use crate::log::Log;
use crate::ram::{PAGE_BYTES, pages};

/// The progress of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The device is about to take the log. Nothing is copied.
    Begins,
    Copies,
    /// The device is about to drop the log.
    Ends,
    /// The queues stop. The CPUs of the guest have stopped.
    Switches,
    /// The queues have stopped, and all marked pages are copied.
    Complete,
}

/// A copy of guest memory in the making.
pub(super) struct MemoryCopy {
    phase: Phase,
    file: File,
    /// The logs that the device may use: the last one, and earlier ones that it is about to drop.
    logs: Vec<Log>,
    /// Pages to be copied.
    dirty: BTreeSet<u64>,
}

impl Guest {
    /// The progress of the migration, if there is one.
    pub(crate) fn migration(&self) -> Option<Phase> {
        self.copy.borrow().as_ref().map(|copy| copy.phase)
    }

    fn set_phase(&self, phase: Phase) {
        if let Some(copy) = &mut *self.copy.borrow_mut() {
            self.trace(|| format!("the migration {phase:?}"));
            copy.phase = phase;
        }
    }

    /// Begins a migration, with a log.
    pub(crate) fn begin_migration(&self) {
        self.trace(|| "a migration begins".to_owned());
        *self.copy.borrow_mut() = Some(MemoryCopy {
            phase: Phase::Begins,
            file: self.layout.new_file(),
            logs: vec![Log::new(self.layout.end())],
            dirty: BTreeSet::new(),
        });
    }

    /// Adds another log, which replaces the present one.
    pub(crate) fn add_log(&self) {
        if let Some(copy) = &mut *self.copy.borrow_mut() {
            copy.logs.push(Log::new(self.layout.end()));
        }
    }

    /// Calls `of` with the present log, if there is one that the device shall use.
    pub(crate) fn with_log<R>(&self, of: impl FnOnce(&Log) -> R) -> Option<R> {
        let copy = self.copy.borrow();
        let copy = copy.as_ref().filter(|copy| copy.phase != Phase::Ends)?;
        copy.logs.last().map(of)
    }

    /// The device uses the last log alone from now on.
    pub(crate) fn has_taken_log(&self) {
        if let Some(copy) = &mut *self.copy.borrow_mut() {
            let last = copy.logs.pop();
            self.retire(copy.logs.drain(..), &mut copy.dirty);
            copy.logs.extend(last);
        }
    }

    /// Takes the last marks of logs that the device must not touch any more.
    fn retire(&self, logs: impl Iterator<Item = Log>, dirty: &mut BTreeSet<u64>) {
        for log in logs {
            dirty.extend(log.take());
            self.retired.borrow_mut().push(log);
        }
    }

    /// The device marks all writes from now on: copies the whole memory.
    pub(crate) fn begin_copy(&self) {
        if self.migration() != Some(Phase::Begins) {
            return;
        }
        self.ram.take_written();
        if let Some(copy) = &mut *self.copy.borrow_mut() {
            inflight::set_content(&copy.file, &self.layout.content());
        }
        self.set_phase(Phase::Copies);
    }

    /// Drops the log, because the migration has failed.
    pub(crate) fn cancel_migration(&self) {
        self.set_phase(Phase::Ends);
    }

    /// The device has dropped the log.
    pub(crate) fn end_migration(&self) {
        self.is_paused.set(false);
        if let Some(copy) = self.copy.take() {
            self.trace(|| "the migration has ended".to_owned());
            self.retire(copy.logs.into_iter(), &mut BTreeSet::new());
        }
    }

    /// Forgets a migration together with the machine.
    pub(super) fn forget_migration(&self) {
        self.is_paused.set(false);
        *self.copy.borrow_mut() = None;
        self.retired.borrow_mut().clear();
    }

    /// Stops the CPUs of the guest, before its queues stop.
    pub(crate) fn pause(&self) {
        self.is_paused.set(true);
        self.set_phase(Phase::Switches);
    }

    /// Continues on this side, because the queues have not stopped as they should.
    pub(crate) fn abandon_switch(&self) {
        if matches!(self.migration(), Some(Phase::Switches | Phase::Complete)) {
            self.is_paused.set(false);
            self.set_phase(Phase::Copies);
        }
    }

    /// Takes marks and copies some pages, at a moment between two actions of the device.
    pub(crate) fn may_copy(&self) {
        let Ok(mut copy) = self.copy.try_borrow_mut() else { return };
        let Some(copy) = &mut *copy else { return };
        let rng = &mut *self.copy_rng.borrow_mut();
        if copy.phase == Phase::Copies && rng.chance(self.plan.log_takes) {
            self.take_marks(copy);
            self.copy_pages(copy, |_| rng.chance(700));
        }
    }

    fn take_marks(&self, copy: &mut MemoryCopy) {
        copy.dirty.extend(self.ram.take_written());
        copy.logs.iter().for_each(|log| copy.dirty.extend(log.take()));
    }

    fn copy_pages(&self, copy: &mut MemoryCopy, mut chooses: impl FnMut(u64) -> bool) {
        let mut page_bytes = vec![0; fits(PAGE_BYTES, "the bytes of a page")];
        copy.dirty.retain(|page| {
            if !chooses(*page) {
                return true;
            }
            // A log also has marks for pages that no memory has: of used rings at log addresses.
            if let Some(at) = self.layout.file_offset(page * PAGE_BYTES) {
                self.layout.read_at(&mut page_bytes, at);
                copy.file.write_all_at(&page_bytes, at).expect("a memory file can be written");
            }
            false
        });
    }

    /// Copies all pages that are marked now, after all queues have stopped.
    pub(crate) fn complete_copy(&self) {
        if self.migration() != Some(Phase::Switches) {
            return;
        }
        if let Some(copy) = &mut *self.copy.borrow_mut() {
            self.take_marks(copy);
            self.copy_pages(copy, |_| true);
        }
        self.set_phase(Phase::Complete);
    }

    /// Compares the copy with the memory, and continues there. Or here, if the target fails.
    /// Returns true if the guest has moved.
    pub(crate) fn switch(&self) -> Result<bool, Failure> {
        if self.migration() != Some(Phase::Complete) {
            self.abandon_switch();
            return Ok(false);
        }
        self.check_copy()?;
        let fails = self.copy_rng.borrow_mut().chance(self.plan.cancels);
        if !fails && let Some(copy) = &*self.copy.borrow() {
            let file = copy.file.try_clone().expect("the simulation has too many files open");
            // Nothing may use the memory that is left.
            let size = fits(self.layout.bytes(), "the bytes of guest memory");
            inflight::set_content(&self.layout.replace_file(file), &vec![0xee; size]);
            self.ram.replace(self.layout.map());
        }
        self.trace(|| format!("the guest has moved: {}", !fails));
        self.end_migration();
        Ok(!fails)
    }

    fn check_copy(&self) -> Result<(), Failure> {
        let copy = self.copy.borrow();
        let Some(copy) = copy.as_ref() else { return Ok(()) };
        let (memory, copied) = (self.layout.content(), inflight::content(&copy.file));
        let Some(at) = memory.iter().zip(&copied).position(|(one, other)| one != other) else {
            return Ok(());
        };
        let addr = self.layout.guest_addr(at as u64);
        let text = format!(
            "device {}: guest address {addr:#x} has {:#x} and its copy {:#x}: it was written \
             without a mark",
            self.device, memory[at], copied[at]
        );
        Err(Failure::new("lost page", text))
    }

    /// Notes that a daemon has died. It may have written to buffers of requests without a mark.
    /// Another daemon carries out these requests once more.
    pub(crate) fn daemon_died(&self) {
        match self.migration() {
            None => return,
            // The next daemon gets no log.
            Some(Phase::Ends) => return self.end_migration(),
            Some(_) => self.abandon_switch(),
        }
        let state = self.state.borrow();
        let out = state.queues.iter().flat_map(|queue| queue.outstanding.iter().flatten());
        let pieces = out.flat_map(|outstanding| &outstanding.pieces);
        let pieces = pieces.filter(|piece| piece.len > 0);
        if let Some(copy) = &mut *self.copy.borrow_mut() {
            copy.dirty.extend(pieces.flat_map(|piece| pages(piece.addr, piece.len.into())));
        }
    }

    /// Checks that the device has touched no log after it has dropped it.
    pub(crate) fn check_logs(&self) -> Result<(), Failure> {
        let retired = self.retired.borrow();
        match retired.iter().find_map(|log| log.take().first().copied()) {
            None => Ok(()),
            Some(page) => {
                let text = format!(
                    "device {}: page {page:#x} was marked in a log that was dropped",
                    self.device
                );
                Err(Failure::new("late mark", text))
            }
        }
    }
}
