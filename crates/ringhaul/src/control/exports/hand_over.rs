//! The hand-over of all exports between processes.

use std::time::Instant;

use blockio::DiskSource;
use device::oneshot;
use vhost_user::PassedFds;

use super::Exports;
use crate::control::export::Export;
use crate::control::guest_turns::KEEPS_STATE;
use crate::control::hand_over::HandOver;
use crate::control::hand_over_state::{Described, ExportProgress, Paused};
use crate::control::order::{Answered, ExportSetup};
use crate::spec::command::{CommandError, ExportState};

impl Exports {
    /// Begins to stop all queues, if the exports are the described ones.
    pub(in crate::control) fn pause(
        &mut self,
        generation: u64,
        answer: oneshot::Sender<Answered<Paused>>,
    ) {
        if self.hand_over.is_some() {
            return answer.send(Err(CommandError::HandingOver));
        }
        match self.begin_pause(generation) {
            Ok(()) => self.hand_over = Some(HandOver::Pausing { since: Instant::now(), answer }),
            Err(error) => answer.send(Err(error)),
        }
    }

    /// Begins to resume the exports. The answer comes when they have resumed.
    pub(in crate::control) fn resume(&mut self, answer: oneshot::Sender<()>) {
        match self.hand_over {
            Some(HandOver::Paused | HandOver::Committed) => self.begin_resume(answer),
            // The hand-over was cancelled.
            _ => answer.send(()),
        }
    }

    /// Ends the control thread without ending the exports, which `process` serves.
    pub(in crate::control) fn release(&mut self, process: u32) {
        // Dropping the exports would end the sessions of the new process. The end of this process
        // closes everything.
        std::mem::forget(std::mem::take(&mut self.list));
        self.stages.close(Some(process));
        self.is_left = true;
    }

    pub(in crate::control) fn describe(&self) -> Answered<Described> {
        let (opening, changes) = self.stages.describe()?;
        if let Some(closing) = self.closing.first() {
            return Err(CommandError::Busy(closing.name(), ExportState::Stopping));
        }
        let mut fds = PassedFds::default();
        let exports = self.list.iter().map(|export| export.describe(&mut fds));
        let exports = exports.collect::<Result<_, _>>()?;
        // Checked after the disks: one of them may be the reason that an earlier hand-over still
        // waits.
        match self.hand_over {
            Some(HandOver::Resuming(_)) => Err(self.unfinished_error(Export::has_resumed)),
            Some(_) => Err(CommandError::HandingOver),
            None => {
                let generation = self.generation + changes;
                Ok(Described { exports, opening, fds, generation })
            }
        }
    }

    /// Begins to stop all queues, unless the exports have changed since their description.
    fn begin_pause(&mut self, generation: u64) -> Result<(), CommandError> {
        let is_current = |changes| self.generation + changes == generation;
        if !self.stages.begin_hand_over(is_current) {
            return Err(CommandError::Changed);
        }
        if let Err(error) = self.list.iter().try_for_each(Export::check_disks) {
            self.stages.resume();
            return Err(error);
        }
        self.list.iter_mut().for_each(Export::begin_pause);
        Ok(())
    }

    /// Describes the unfinished work of the exports for which `is_done` is false.
    fn unfinished_error(&self, is_done: impl Fn(&Export) -> bool) -> CommandError {
        let others = self.list.iter().filter(|export| !is_done(export));
        let work = |export: &Export| match export.keeps_state() {
            true => KEEPS_STATE.to_owned(),
            false => export.unfinished_work(),
        };
        let left = others.map(|export| format!("{}: {}", export.name(), work(export)));
        CommandError::NotPaused(left.collect::<Vec<_>>().join(", "))
    }

    /// Continues with a hand-over until it has to wait.
    pub(super) fn continue_hand_over(&mut self, now: Instant) {
        let is_over = |hand_over: &HandOver| hand_over.deadline().is_some_and(|end| now >= end);
        let is_late = self.hand_over.as_ref().is_some_and(is_over);
        match self.hand_over.take() {
            Some(HandOver::Pausing { since, answer }) => {
                if self.list.iter().all(Export::has_paused) {
                    let paused = self.paused(since);
                    if paused.is_ok() {
                        self.hand_over = Some(HandOver::Paused);
                    } else {
                        self.begin_resume(oneshot::channel().0);
                    }
                    answer.send(paused);
                } else if is_late {
                    let why = self.list.iter().find_map(|export| export.check_disks().err());
                    answer.send(Err(
                        why.unwrap_or_else(|| self.unfinished_error(Export::has_paused))
                    ));
                    self.begin_resume(oneshot::channel().0);
                } else {
                    self.hand_over = Some(HandOver::Pausing { since, answer });
                }
            }
            Some(HandOver::Resuming(answer)) => {
                if self.list.iter().all(Export::has_resumed) {
                    answer.send(());
                } else {
                    self.hand_over = Some(HandOver::Resuming(answer));
                }
            }
            other => self.hand_over = other,
        }
    }

    fn paused(&self, since: Instant) -> Answered<Paused> {
        // A request to a server may have been abandoned while queues stopped.
        self.list.iter().try_for_each(Export::check_changes)?;
        let mut fds = PassedFds::default();
        let exports = self.list.iter().map(|export| export.progress_so_far(&mut fds));
        let exports = exports.collect::<std::io::Result<_>>().map_err(|error| {
            CommandError::Failed(anyhow::Error::new(error).context("cannot hand over sessions"))
        })?;
        let disks = self.list.iter().flat_map(|export| &export.disks);
        let disks = disks.filter(|disk| disk.hand_over().is_written_back()).cloned().collect();
        Ok(Paused { exports, fds, disks, since })
    }

    /// Leaves the exports to the new process, unless the hand-over was cancelled. The stored
    /// descriptors of front-ends stay stored if that process has their stashes. Returns the disks
    /// that this process has to release.
    pub(in crate::control) fn commit(&mut self, leaves_stashes: bool) -> Answered<Vec<DiskSource>> {
        if !matches!(self.hand_over, Some(HandOver::Paused)) {
            return Err(CommandError::Ending);
        }
        self.hand_over = Some(HandOver::Committed);
        if !leaves_stashes {
            // The manager would discard descriptors of the new process that it has already.
            self.list.iter_mut().for_each(Export::stop_keeping);
        }
        Ok(self.list.iter().flat_map(|export| export.disks_to_release()).collect())
    }

    /// Cancels a hand-over and resumes the exports, which are about to stop.
    pub(super) fn cancel_hand_over(&mut self) {
        match self.hand_over.take() {
            Some(HandOver::Pausing { answer, .. }) => answer.send(Err(CommandError::Ending)),
            Some(HandOver::Paused) => {}
            other => {
                self.hand_over = other;
                return;
            }
        }
        self.begin_resume(oneshot::channel().0);
    }

    fn begin_resume(&mut self, answer: oneshot::Sender<()>) {
        self.list.iter_mut().for_each(Export::begin_resume);
        self.stages.resume();
        self.hand_over = Some(HandOver::Resuming(answer));
    }

    pub(in crate::control) fn take_over(
        &mut self,
        taken: Vec<(ExportSetup, ExportProgress)>,
        mut fds: PassedFds,
    ) -> anyhow::Result<()> {
        assert!(self.list.is_empty(), "a process takes over before it has exports");
        let now = Instant::now();
        // All or none: exports that an error drops here are still lent, so that the old process
        // keeps them.
        let exports =
            taken.into_iter().map(|taken| Export::take_over(taken, &self.waker, &mut fds, now));
        self.list = exports.collect::<anyhow::Result<_>>()?;
        let begins = self.stages.begin_hand_over(|_| true);
        assert!(begins, "a process takes over before it is asked to end");
        self.hand_over = Some(HandOver::Committed);
        self.share_descriptors();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::{Arc, mpsc};
    use std::task::Waker;

    use super::*;
    use crate::control::disk_change::{DiskChange, DiskChangeKind};
    use crate::control::export::tests::Scene;
    use crate::control::exports::Order;
    use crate::control::order::{Alarm, OrderKind};
    use crate::control::stages::Stages;
    use crate::socket::Endpoint;

    /// A process that takes over would find the disk locked, or miss a change.
    #[test]
    fn exports_are_described_only_while_none_of_them_changes() {
        let alarm = Alarm::new().unwrap();
        let (_orders, received) = mpsc::channel();
        let stages = Arc::<Stages>::default();
        let mut all = Exports::new(stages, received, Arc::new(alarm), Waker::noop().clone());
        let describe = |all: &Exports| all.describe().map(|described| described.exports.len());
        let mut scenes = [(); 2].map(|()| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (Scene::new(Endpoint::Connection(ours)), theirs)
        });
        let [(stays, _), (ends, _)] = &mut scenes;
        all.list.push(stays.export());
        assert!(matches!(describe(&all), Ok(1)));

        let mut ending = ends.export();
        let (place, kind) = (None, DiskChangeKind::Removing);
        ending.changing.push(DiskChange { place, kind, blocks_hand_over: false });
        all.list.push(ending);
        assert!(matches!(describe(&all), Ok(2)), "a change that another process may repeat");
        let mut ending = all.list.remove(1);
        ending.begin_stop();
        all.list.push(ending);
        assert!(matches!(describe(&all), Err(CommandError::Busy(_, ExportState::Stopping))));
        let ending = all.list.remove(1);
        all.closing.push(ending.close(Waker::noop()));
        assert!(matches!(describe(&all), Err(CommandError::Busy(_, ExportState::Stopping))));
        all.closing.clear();
        assert!(matches!(describe(&all), Ok(1)));

        let answer = || oneshot::channel().0;
        for (phase, is_in_progress) in [
            (HandOver::Pausing { since: Instant::now(), answer: oneshot::channel().0 }, true),
            (HandOver::Paused, true),
            (HandOver::Committed, true),
            (HandOver::Resuming(answer()), false),
        ] {
            all.hand_over = Some(phase);
            match describe(&all) {
                Err(CommandError::HandingOver) => assert!(is_in_progress),
                Err(CommandError::NotPaused(_)) => assert!(!is_in_progress),
                other => panic!("{other:?}"),
            }
        }
        all.hand_over = None;
        assert!(matches!(describe(&all), Ok(1)));
    }

    /// A later order may undo an earlier one.
    #[test]
    fn orders_that_a_hand_over_holds_keep_their_order() {
        let alarm = Alarm::new().unwrap();
        let (orders, received) = mpsc::channel();
        let stages = Arc::<Stages>::default();
        let mut all = Exports::new(stages, received, Arc::new(alarm), Waker::noop().clone());
        let order = |kind, generation| {
            let carry_out = Box::new(move |all: &mut Exports| all.generation = generation);
            orders.send(Order { kind, carry_out }).unwrap();
        };
        let next = |all: &mut Exports| {
            let order = all.next_order()?;
            (order.carry_out)(all);
            Some(all.generation)
        };
        all.hand_over = Some(HandOver::Paused);
        (1..4).for_each(|number| order(OrderKind::Change, number));
        order(OrderKind::Query, 7);
        assert_eq!([next(&mut all), next(&mut all)], [Some(7), None]);
        all.hand_over = None;
        order(OrderKind::Change, 4);
        let carried_out: Vec<u64> = std::iter::from_fn(|| next(&mut all)).collect();
        assert_eq!(carried_out, [1, 2, 3, 4]);
    }

    /// The description may be out of date when the new process is ready.
    #[test]
    fn exports_pause_only_as_they_were_described() {
        let alarm = Alarm::new().unwrap();
        let (_orders, received) = mpsc::channel();
        let stages = Arc::<Stages>::default();
        let mut all = Exports::new(stages, received, Arc::new(alarm), Waker::noop().clone());
        let generation = all.describe().unwrap().generation;
        for late in 1..3 {
            all.generation += 1;
            let (answer, pending) = oneshot::channel();
            all.pause(generation, answer);
            let answer = pending.wait().unwrap().err();
            assert!(matches!(answer, Some(CommandError::Changed)), "{late} changes later");
            assert!(all.hand_over.is_none());
        }
        let (answer, _pending) = oneshot::channel();
        all.pause(all.generation, answer);
        assert!(matches!(all.hand_over, Some(HandOver::Pausing { .. })));
        let (answer, pending) = oneshot::channel();
        all.pause(all.generation, answer);
        assert!(matches!(pending.wait().unwrap().err(), Some(CommandError::HandingOver)));
    }
}
