//! The control thread: one for all exports. It accepts front-ends and drives their sessions.
//!
//! The thread sleeps in `poll` and blocks nowhere else, so that a slow disk behind one export
//! delays no other export's front-ends. Exports are served and removed by orders, and the thread
//! answers each.

mod closing;
mod disk_change;
mod disk_locks;
mod export;
pub(crate) mod export_log;
mod exports;
pub(crate) mod guest_turns;
mod hand_over;
pub(crate) mod hand_over_state;
mod order;
mod stages;
pub(crate) mod subscribers;

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::DiskSource;
use blockio::executor::{Lock, start_thread};
use device::oneshot;
use vhost_user::PassedFds;

use crate::process::wake_fd::WakeFd;
use crate::spec::command::StatsReader;
use crate::spec::command::{CommandError, ExportStatus, Removal};
use crate::spec::qos::{FullQosSpec, QosChange};
use crate::spec::stats::ExportStats;
use crate::spec::status::ExportDetails;
use crate::spec::{ExportSpec, UnitPlace, UnitSpec};
#[cfg(test)]
pub(crate) use export::tests::Scene;
use exports::{Exports, Order};
use guest_turns::GuestTurns;
use hand_over_state::{Described, ExportProgress, Paused};
pub use order::ExportSetup;
use order::{Alarm, Answered, OrderKind};
pub(crate) use order::{ChangingUnit, ResizingDisk, UnitChange, WatchedDisk, WatchedDisks};
use stages::Stages;
pub use stages::{FailedExport, OpeningExport, ReadyExport};

/// The wait of an export that has not yet received its order to end.
const NOT_BEGUN: &str = "another process may be taking over";

/// The time that closing a unit may block takeovers.
const UNIT_CLOSE_MAX: Duration = Duration::from_secs(1);

/// The thread that controls all exports. They stop when this value is dropped.
pub struct Control {
    stages: Arc<Stages>,
    orders: mpsc::Sender<Order>,
    alarm: Arc<Alarm>,
    thread: Lock<Option<JoinHandle<()>>>,
}

impl Control {
    /// Starts the thread. It ends, and `ended` is called, when all exports have been stopped or the
    /// last one has ended by any means except [`remove`](Self::remove).
    ///
    /// # Errors
    ///
    /// When the kernel has no thread or descriptor left.
    pub fn start(ended: impl FnOnce() + Send + 'static) -> Result<Self> {
        let alarm = Arc::new(Alarm::new().context("cannot create an eventfd")?);
        let (orders, received) = mpsc::channel();
        let waker = Waker::from(Arc::clone(&alarm));
        let stages = Arc::<Stages>::default();
        let mut exports = Exports::new(Arc::clone(&stages), received, Arc::clone(&alarm), waker);
        let closed = Arc::clone(&stages);
        let ended = OnDrop(Some(move || {
            closed.close(None);
            ended();
        }));
        let thread = start_thread("ringhaul-control", move || {
            // Runs at every end of the thread, a panic included.
            let _ended = ended;
            exports.run();
            drop(exports);
        })
        .context("cannot start the control thread")?;
        Ok(Self { stages, orders, alarm, thread: Lock::new(Some(thread)) })
    }

    /// Takes the names and the sockets of exports that the caller is about to open, all or none. A
    /// process that takes over in the meantime opens these exports too if `follows_hand_over`;
    /// otherwise they are not served.
    ///
    /// # Errors
    ///
    /// When a name or a socket is taken, or the daemon ends.
    pub fn begin(
        &self,
        specs: Vec<ExportSpec>,
        follows_hand_over: bool,
    ) -> Answered<Vec<OpeningExport>> {
        self.stages.begin(specs, follows_hand_over)
    }

    /// Returns true if no export was ever served, and none is being opened except the `own` ones.
    /// New exports are refused in that case, because the daemon is to end.
    pub(crate) fn cancel_start(&self, own: &[u64]) -> bool {
        self.stages.cancel_start(own)
    }

    /// Begins to serve exports that are ready.
    ///
    /// # Errors
    ///
    /// When the exports were told to stop.
    pub fn serve(&self, exports: Vec<ExportSetup>) -> Answered<()> {
        self.ask(OrderKind::Change, |all| all.serve(exports))?
    }

    /// Ends an export like [`begin_stop`](Self::begin_stop) does, and waits for its end. If the
    /// export is stopping already, only waits.
    ///
    /// # Errors
    ///
    /// When no export has this name, or it has not ended by the deadline.
    pub(crate) fn remove(&self, removal: Removal) -> Answered<ExportStatus> {
        let Removal { export, force, deadline_ms } = removal;
        let (answer, pending) = oneshot::channel();
        let name = export.clone();
        self.order(OrderKind::Change, move |all| all.remove(&name, force, answer));
        let Some(time) = deadline_ms else {
            return self.wait(pending)?;
        };
        if let Poll::Ready(ended) = pending.wait_for(Duration::from_millis(time)) {
            return ended.ok_or_else(|| self.stages.end_reason())?;
        }
        let shown = self.show()?.into_iter().find(|status| status.spec.is_called(&export));
        if let Some(status) = shown {
            // A takeover in progress prevents the export from beginning to end.
            let name = status.name();
            let waits_for = status.waits_for.unwrap_or_else(|| NOT_BEGUN.to_owned());
            return Err(CommandError::NotEnded(name, waits_for));
        }
        match pending.check() {
            // The export ended between the deadline and the status query.
            Poll::Ready(ended) => ended.ok_or_else(|| self.stages.end_reason())?,
            Poll::Pending => Err(CommandError::Unknown(export)),
        }
    }

    /// Describes the exports.
    ///
    /// # Errors
    ///
    /// When all have ended.
    pub(crate) fn show(&self) -> Answered<Vec<ExportStatus>> {
        self.ask(OrderKind::Query, |all| all.show())
    }

    /// Describes one export in detail.
    ///
    /// # Errors
    ///
    /// When no export has this name, or it is not served.
    pub(crate) fn details(&self, name: String) -> Answered<ExportDetails> {
        self.ask(OrderKind::Query, move |all| all.details(&name))?
    }

    /// Returns the counters of all exports.
    ///
    /// # Errors
    ///
    /// When all have ended.
    pub(crate) fn stats(&self, reader: StatsReader) -> Answered<Vec<ExportStats>> {
        self.ask(OrderKind::Query, move |all| all.stats(reader))
    }

    /// Begins to change a logical unit of an export. The caller has exclusive use of the unit's
    /// place until the returned [`DiskLock`] is dropped.
    ///
    /// # Errors
    ///
    /// When no export has this name, it is stopping, the unit to remove does not exist, or the unit
    /// to add exists already.
    pub(crate) fn begin_unit(
        &self,
        name: String,
        place: UnitPlace,
        change: UnitChange,
    ) -> Answered<(ChangingUnit, DiskLock<'_>)> {
        let begin = move |all: &mut Exports| all.find(&name)?.begin_unit(place, change);
        let unit = self.ask(OrderKind::Change, begin)??;
        let lock = DiskLock { control: self, id: unit.id, place: Some(place) };
        Ok((unit, lock))
    }

    /// Begins to resize a disk of an export. The caller alone may change the disk until the
    /// returned [`DiskLock`] is dropped.
    ///
    /// # Errors
    ///
    /// When no export has this name, it is stopping, or it has no such disk.
    pub(crate) fn begin_resize(
        &self,
        name: String,
        place: Option<UnitPlace>,
    ) -> Answered<(ResizingDisk, DiskLock<'_>)> {
        let disk = self.ask(OrderKind::Change, move |all| all.begin_resize(&name, place))??;
        let lock = DiskLock { control: self, id: disk.id, place };
        Ok((disk, lock))
    }

    /// Returns the turns of the guests of an export.
    ///
    /// # Errors
    ///
    /// When no export has this name, it is stopping, or its disks are not locked late.
    pub(crate) fn guest_turns(&self, name: String, is_change: bool) -> Answered<Arc<GuestTurns>> {
        let kind = if is_change { OrderKind::Change } else { OrderKind::Query };
        self.ask(kind, move |all| all.find(&name)?.guest_turns())?
    }

    /// Changes the limits and the error policy of a disk. Returns the rules that apply now, and the
    /// name of the export in the log.
    ///
    /// # Errors
    ///
    /// When there is no such disk, or the change is invalid.
    pub(crate) fn set_disk(
        &self,
        name: String,
        place: Option<UnitPlace>,
        change: Box<QosChange>,
    ) -> Answered<(FullQosSpec, String)> {
        let kind = if change.is_empty() { OrderKind::Query } else { OrderKind::Change };
        self.ask(kind, move |all| all.find(&name)?.set_rules(place, &change))?
    }

    /// Retries at once the failed requests that wait for one disk or for all disks of an export.
    ///
    /// # Errors
    ///
    /// When there is no such disk.
    pub(crate) fn resume_disks(&self, name: String, place: Option<UnitPlace>) -> Answered<()> {
        self.ask(OrderKind::Query, move |all| {
            let disks = all.find(&name)?.disks_at(place)?;
            disks.iter().for_each(DiskSource::resume);
            Ok(())
        })?
    }

    /// Returns the disks of all exports, for the watch of their sizes.
    ///
    /// # Errors
    ///
    /// When all exports have ended.
    pub(crate) fn watched_disks(&self) -> Answered<WatchedDisks> {
        self.ask(OrderKind::Query, |all| all.watched_disks())
    }

    /// Wakes the watch of disks.
    pub(crate) fn monitor(&self) -> &Arc<WakeFd> {
        &self.alarm.monitor
    }

    /// The number of times that the thread has woken. Exports do not change in between.
    pub(crate) fn wakes(&self) -> u64 {
        self.alarm.wakes.get()
    }

    /// Describes the exports for another process.
    ///
    /// # Errors
    ///
    /// When an export cannot be handed over at the moment.
    pub(crate) fn describe(&self) -> Answered<Described> {
        self.ask(OrderKind::HandOver, |all| all.describe())?
    }

    /// Stops all queues so that another process can resume them. If it does not,
    /// [`resume`](Self::resume) restarts them here.
    ///
    /// # Errors
    ///
    /// When the exports differ from the description, or do not stop. Their queues continue in that
    /// case.
    pub(crate) fn pause(&self, generation: u64) -> Answered<Paused> {
        let (answer, pending) = oneshot::channel();
        self.order(OrderKind::HandOver, move |all| all.pause(generation, answer));
        self.wait(pending)?
    }

    /// Commits the paused exports to the process that takes over, before it is notified. If the
    /// notification fails, [`resume`](Self::resume) takes them back. Returns their disks, to be
    /// released after the hand-over.
    ///
    /// # Errors
    ///
    /// When the exports are to end instead.
    pub(crate) fn commit(&self, leaves_stashes: bool) -> Answered<Vec<DiskSource>> {
        self.ask(OrderKind::HandOver, move |all| all.commit(leaves_stashes))?
    }

    /// Restarts the queues and waits until that is done.
    pub(crate) fn resume(&self) {
        let (answer, pending) = oneshot::channel();
        self.order(OrderKind::HandOver, move |all| all.resume(answer));
        // A thread that has ended has no queues.
        let _ = pending.wait();
    }

    /// Takes over the exports of another process. They stay paused until [resumed](Self::resume).
    ///
    /// # Errors
    ///
    /// When an export cannot be taken over. The old process has lost nothing.
    pub(crate) fn take_over(
        &self,
        taken: Vec<(ExportSetup, ExportProgress)>,
        fds: PassedFds,
    ) -> Result<()> {
        self.ask(OrderKind::HandOver, |all| all.take_over(taken, fds))?
    }

    /// Leaves the paused exports to the process with this id. The calling process must end.
    pub(crate) fn release(&self, process: u32) {
        self.order(OrderKind::HandOver, move |all| all.release(process));
    }

    /// Begins to disconnect all front-ends and accepts no new ones. Each front-end sees the end
    /// when its requests are answered.
    pub fn begin_stop(&self) {
        self.order(OrderKind::End, Exports::begin_stop);
    }

    /// Abandons exports that have not ended: logs them, removes their sockets and lets the thread
    /// end while queues run. The process must end afterwards. The answer is true if any export was
    /// abandoned.
    pub(crate) fn abandon(&self) -> oneshot::Receiver<bool> {
        let (answer, pending) = oneshot::channel();
        self.order(OrderKind::End, |all| answer.send(all.abandon()));
        pending
    }

    /// Waits until the last export has ended.
    pub fn join(&self) {
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn order(&self, kind: OrderKind, carry_out: impl FnOnce(&mut Exports) + Send + 'static) {
        // A send to an ended thread fails, and that thread has nothing left to do.
        let _ = self.orders.send(Order { kind, carry_out: Box::new(carry_out) });
        self.alarm.wake.wake();
    }

    /// Gives an order, and waits for its result.
    fn ask<T: Send + 'static>(
        &self,
        kind: OrderKind,
        carry_out: impl FnOnce(&mut Exports) -> T + Send + 'static,
    ) -> Answered<T> {
        let (answer, pending) = oneshot::channel();
        self.order(kind, move |all| answer.send(carry_out(all)));
        self.wait(pending)
    }

    fn wait<T>(&self, pending: oneshot::Receiver<T>) -> Answered<T> {
        pending.wait().ok_or_else(|| self.stages.end_reason())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.begin_stop();
    }
}

/// The right to change a disk of an export, or an empty place for a disk. Dropping it ends the
/// change: the changed disk must be closed or belong to the export before.
pub(crate) struct DiskLock<'a> {
    control: &'a Control,
    id: u64,
    place: Option<UnitPlace>,
}

impl DiskLock<'_> {
    /// Blocks takeovers until the change ends, which must happen soon. (Opening the disk of a new
    /// unit does not block them.) Returns false if the export has ended or the unit was cancelled.
    ///
    /// # Errors
    ///
    /// When another process has taken over.
    pub(crate) fn claim(&self) -> Answered<bool> {
        self.ask(|all, id, place| all.block_hand_over(id, place, true))
    }

    /// Calls `close` to close a removed unit. If its requests or its file system take longer than
    /// [`UNIT_CLOSE_MAX`], another process may take over in the meantime, without the unit.
    pub(crate) fn close_unit(&self, close: impl FnOnce()) {
        let (closing, closes) = mpsc::channel::<()>();
        let watch = move || {
            if closes.recv_timeout(UNIT_CLOSE_MAX) == Err(RecvTimeoutError::Timeout) {
                // Fails only after a takeover or the end of the export, when nothing is blocked.
                let _ = self.ask(|all, id, place| all.block_hand_over(id, place, false));
            }
        };
        std::thread::scope(|scope| {
            // Without the thread, takeovers stay blocked until the unit is closed.
            let watch_close = std::thread::Builder::new().name("ringhaul-unit".into());
            let _ = watch_close.spawn_scoped(scope, watch);
            close();
            drop(closing);
        });
    }

    /// Adds a unit on this disk, as requested at `asked`. Returns false if the export has ended.
    pub(crate) fn add_unit(&self, unit: UnitSpec, disk: DiskSource, asked: Instant) -> bool {
        matches!(self.ask(move |all, id, _| all.add_unit(id, unit, disk, asked)), Ok(None))
    }

    /// Reports that the disk has a new size, so that a virtio-blk driver is notified.
    pub(crate) fn report_resized(&self) {
        // Without the export there is no driver to notify.
        let _ = self.ask(Exports::report_resized);
    }

    /// Reports that the unit is removed.
    pub(crate) fn report_removed(&self) {
        // Without the export there is no driver to notify.
        let _ = self.ask(Exports::report_removed);
    }

    fn ask<T: Send + 'static>(
        &self,
        carry_out: impl FnOnce(&mut Exports, u64, Option<UnitPlace>) -> T + Send + 'static,
    ) -> Answered<T> {
        let Self { control, id, place } = *self;
        control.ask(OrderKind::Change, move |all| carry_out(all, id, place))
    }
}

impl Drop for DiskLock<'_> {
    fn drop(&mut self) {
        let (id, place) = (self.id, self.place);
        // The place is free for the next command, and orders of that command follow this one.
        self.control.order(OrderKind::Change, move |all| all.end_change(id, place));
    }
}

/// Calls its closure when dropped.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::testing::spawn_asleep;

    /// A command that comes too late names the process to ask.
    #[test]
    fn a_released_control_names_the_new_process() {
        let control = Control::start(|| ()).unwrap();
        control.release(4242);
        control.join();
        let refused = control.show().unwrap_err();
        assert!(matches!(refused, CommandError::HandedOver(4242)), "{refused:?}");
    }

    /// The process could otherwise end while exports do.
    #[test]
    fn the_end_of_the_last_export_is_awaited() {
        let (may_end, ends) = mpsc::channel::<()>();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        let control = Control::start(move || {
            ends.recv().unwrap();
            ended.store(true, Ordering::Relaxed);
        });
        let control = control.unwrap();
        control.begin_stop();
        std::thread::scope(|scope| {
            let joins = spawn_asleep(scope, || {
                control.join();
                has_ended.load(Ordering::Relaxed)
            });
            may_end.send(()).unwrap();
            assert!(joins.join().unwrap(), "it has not waited");
        });
    }
}
