//! The kill of the daemon. Its effects up to that moment stay, and so does the page cache. Each of
//! its ops in the kernel may still be carried out, in whole or in part, before another daemon can
//! lock the disk.
//!
//! Its actions after that moment, to the end of the turn and while it is dropped, are void: its ops
//! have no effect, and guests undo its writes to their memory.

use blockio::op::OpKind;

use super::{Actor, Disk, Inner, Running, World};
use crate::device::{Answer, Device};
use crate::faults::op_len;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Death {
    #[default]
    Alive,
    /// The daemon dies after this many further moments.
    After(u64),
    Dead,
}

/// An op of a dead daemon.
pub(super) struct Orphan {
    pub(super) disk: usize,
    kind: OpKind,
    offset: u64,
    bytes: Vec<u8>,
    begin: u64,
}

impl Orphan {
    /// The op, if it can have an effect on the disk.
    fn from_running(running: &Running) -> Option<Self> {
        let Running { op, disk, begin, result, .. } = running;
        let (kind, offset) = (op.kind(), op.offset());
        let mut bytes = vec![0; op_len(op)];
        match kind {
            _ if *result < 0 => return None,
            OpKind::Read => return None,
            OpKind::Write { .. } => drop(op.buffers().copy_to(0, &mut bytes)),
            _ => {}
        }
        Some(Self { disk: *disk, kind, offset, bytes, begin: *begin })
    }

    pub(super) fn take_effect(&self, device: &mut Device, id: u64, from: usize, to: usize) {
        device.write(self.offset + from as u64, &self.bytes[from..to], id);
    }
}

impl World {
    /// Kills the daemon after this many moments within turns; at once if there are none.
    pub(crate) fn begin_death(&self, moments: u64) {
        self.death.set(Death::After(moments));
        if moments == 0 {
            self.die();
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.death.get() == Death::Dead
    }

    /// Passes a moment at which the daemon may die.
    pub(crate) fn pass(&self) {
        match self.death.get() {
            Death::After(left) if self.turn.runs.get() => match left {
                0 => self.die(),
                _ => self.death.set(Death::After(left - 1)),
            },
            _ => {}
        }
    }

    fn die(&self) {
        self.trace(|| "control: the daemon is dead".to_owned());
        self.death.set(Death::Dead);
        self.interleave(Actor::Death);
        self.release();
        let ids: Vec<u64> = {
            let Inner { rng, ops, orphans, is_void, .. } = &mut *self.inner.borrow_mut();
            *is_void = true;
            let ends = ops.iter().filter(|_| rng.chance(500));
            orphans.extend(
                ends.filter_map(|(id, running)| Some((*id, Orphan::from_running(running)?))),
            );
            ops.keys().copied().collect()
        };
        ids.into_iter().for_each(|id| self.answer(id));
    }

    /// Removes the daemon, except for its ops in the kernel.
    pub(crate) fn bury(&self) {
        let inner = &mut *self.inner.borrow_mut();
        inner.is_void = false;
        let left = (std::mem::take(&mut inner.threads), std::mem::take(&mut inner.signals));
        inner.sq_threads.clear();
        drop(left);
    }

    /// True if ops of a dead daemon may still take effect.
    pub(crate) fn has_orphans(&self) -> bool {
        !self.inner.borrow().orphans.is_empty()
    }

    /// Starts another daemon.
    pub(crate) fn revive(&self) {
        self.death.set(Death::Alive);
    }

    pub(super) fn end_orphan(&self, id: u64, now: u64) {
        let Inner { orphans, disks, rng, .. } = &mut *self.inner.borrow_mut();
        let Some(Orphan { disk, kind, offset, bytes, begin }) = orphans.remove(&id) else { return };
        self.trace(|| format!("kernel: op {id} of the dead daemon has ended"));
        let Disk { device, .. } = &mut disks[disk];
        match kind {
            OpKind::Flush => device.flush(begin, rng),
            OpKind::Write { fua: true } => {
                device.answered(offset, bytes.len(), id, now, Answer::Durable);
            }
            _ => device.answered(offset, bytes.len(), id, now, Answer::Done),
        }
    }

    /// Opens a disk again, for another daemon. Earlier losses no longer count: the content is
    /// final. The new daemon does not know of earlier writes that are not on stable storage, so a
    /// failed FUA write must not affect them.
    pub(crate) fn reopen(&self, disk: usize) {
        let Disk { plan, device, lost_at, .. } = &mut self.inner.borrow_mut().disks[disk];
        if lost_at.take().is_some() || plan.eio > 0 {
            device.settle();
        }
    }
}
