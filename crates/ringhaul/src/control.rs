//! The control thread: one for all exports. It takes front-ends in and drives their sessions.
//!
//! It sleeps in `poll` and never waits for anything else, so that a slow disk behind one export
//! delays the front-ends of no other. Exports come and go by orders, each of which it answers.

mod changing;
mod closing;
mod export;
mod exports;
mod hand_over;
pub(crate) mod handed;
mod opening;
mod order;

use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockio::DiskSource;
use device::{Answer, Pending};
use rustix::event::{EventfdFlags, eventfd};

use crate::command::{CommandError, ExportStatus, Removal};
use crate::disk_rules::{RulesChange, ShownRules};
use crate::handed_fds::HandedFds;
use crate::spec::{ExportSpec, UnitPlace, UnitSpec};
use crate::stats::ExportStats;
use crate::status::ExportDetails;
use crate::wanted::Wanted;
use exports::Exports;
use handed::{Described, ExportProgress, Paused};
pub use order::ExportSetup;
use order::{Alarm, Answered, Changed, HandOverOrder, Order};
pub(crate) use order::{ChangingUnit, ResizingDisk, UnitChange, WatchedDisk};

/// What an export waits for that is yet to hear that it is to end.
const NOT_BEGUN: &str = "another process may be taking over";

/// The thread that controls all exports. When this is dropped, they stop.
pub struct Control {
    orders: mpsc::Sender<Order>,
    alarm: Arc<Alarm>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The process that has the exports.
    left: OnceLock<u32>,
}

impl Control {
    /// Starts the thread. It ends, and `ended` is called, when the last export has ended otherwise
    /// than by [`remove`](Self::remove), or all have been stopped.
    ///
    /// # Errors
    ///
    /// When the kernel has no thread or descriptor left.
    pub fn start(ended: impl FnOnce() + Send + 'static) -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .context("cannot create an eventfd")?;
        let alarm = Arc::new(Alarm(wake));
        let (orders, received) = mpsc::channel();
        let waker = Waker::from(Arc::clone(&alarm));
        let mut exports = Exports::new(received, Arc::clone(&alarm), waker);
        let ended = OnDrop(Some(ended));
        let thread = std::thread::Builder::new()
            .name("ringhaul-control".into())
            .spawn(move || {
                // However the thread ends.
                let _ended = ended;
                exports.run();
                drop(exports);
            })
            .context("cannot start the control thread")?;
        Ok(Self { orders, alarm, thread: Mutex::new(Some(thread)), left: OnceLock::new() })
    }

    /// Keeps the names of exports for whoever opens them now. They are free again when what this
    /// returns is dropped. A process that takes over meanwhile opens them too if they go along;
    /// otherwise they are not served.
    ///
    /// # Errors
    ///
    /// When a name is taken.
    pub(crate) fn reserve(
        &self,
        specs: &[ExportSpec],
        goes_along: bool,
    ) -> Answered<Reservation<'_>> {
        let wanted = self.ask(|answer| Order::Reserve(specs.to_vec(), goes_along, answer))??;
        let names = specs.iter().map(ExportSpec::name).zip(wanted).collect();
        Ok(Reservation { control: self, names })
    }

    /// Whether there are no exports but these, and others can be added no more: what the daemon was
    /// started for cannot be served, and it is to end.
    pub(crate) fn give_up_start(&self, names: &[String]) -> bool {
        self.ask(|answer| Order::GiveUpStart(names.to_vec(), answer)).unwrap_or(false)
    }

    /// Begins to serve exports.
    ///
    /// # Errors
    ///
    /// When they are to stop already.
    pub fn serve(&self, exports: Vec<ExportSetup>) -> Answered<()> {
        self.ask(|answer| Order::Serve(exports, answer))?
    }

    /// Ends an export, as [`begin_stop`](Self::begin_stop) does with all, and waits for that. One
    /// that is stopping already is waited for.
    ///
    /// # Errors
    ///
    /// When there is none of this name, or it has not ended by the deadline.
    pub(crate) fn remove(&self, removal: Removal) -> Answered<ExportStatus> {
        let Removal { export, force, deadline_ms } = removal;
        let (answer, pending) = Pending::new();
        self.order(Order::Remove(export.clone(), force, answer));
        let Some(time) = deadline_ms else {
            return pending.wait().ok_or_else(|| self.why_ended())?;
        };
        if let Poll::Ready(ended) = pending.wait_for(Duration::from_millis(time)) {
            return ended.ok_or_else(|| self.why_ended())?;
        }
        let shown = self.show()?.into_iter().find(|status| status.spec.is_called(&export));
        if let Some(status) = shown {
            // Another process that is taking over keeps it from beginning to end.
            let name = status.name();
            let waits_for = status.waits_for.unwrap_or_else(|| NOT_BEGUN.to_owned());
            return Err(CommandError::NotEnded(name, waits_for));
        }
        match pending.check() {
            // It has ended meanwhile.
            Poll::Ready(ended) => ended.ok_or_else(|| self.why_ended())?,
            Poll::Pending => Err(CommandError::Unknown(export)),
        }
    }

    /// Describes the exports.
    ///
    /// # Errors
    ///
    /// When all have ended.
    pub(crate) fn show(&self) -> Answered<Vec<ExportStatus>> {
        self.ask(Order::Show)
    }

    /// Describes one export in detail.
    ///
    /// # Errors
    ///
    /// When there is none of this name, or it is not served.
    pub(crate) fn details(&self, name: String) -> Answered<ExportDetails> {
        self.ask(|answer| Order::Details(name, answer))?
    }

    /// What the exports have served.
    ///
    /// # Errors
    ///
    /// When all have ended.
    pub(crate) fn stats(&self) -> Answered<Vec<ExportStats>> {
        self.ask(Order::Stats)
    }

    /// Begins to change a logical unit of an export. Its place is nobody else's until what this
    /// returns is dropped.
    ///
    /// # Errors
    ///
    /// When there is no export of this name, it is stopping, or it has no such unit, or has one
    /// already.
    pub(crate) fn begin_unit(
        &self,
        name: String,
        place: UnitPlace,
        change: UnitChange,
    ) -> Answered<(ChangingUnit, Turn<'_>)> {
        let unit = self.ask(|answer| Order::BeginUnit(name, place, change, answer))??;
        let turn = Turn { control: self, id: unit.id, place: Some(place) };
        Ok((unit, turn))
    }

    /// Begins to give a disk of an export another size. It is nobody else's to change until what
    /// this returns is dropped.
    ///
    /// # Errors
    ///
    /// When there is no export of this name, it is stopping, or it has no such disk.
    pub(crate) fn begin_resize(
        &self,
        name: String,
        place: Option<UnitPlace>,
    ) -> Answered<(ResizingDisk, Turn<'_>)> {
        let disk = self.ask(|answer| Order::BeginResize(name, place, answer))??;
        let turn = Turn { control: self, id: disk.id, place };
        Ok((disk, turn))
    }

    /// Changes what a disk of an export may do, and what becomes of requests that it fails. Returns
    /// what holds now, and what the log calls the export.
    ///
    /// # Errors
    ///
    /// When there is no such disk, or the change makes no sense.
    pub(crate) fn set_disk(
        &self,
        name: String,
        place: Option<UnitPlace>,
        change: Box<RulesChange>,
    ) -> Answered<(ShownRules, String)> {
        self.ask(|answer| Order::SetDisk(name, place, change, answer))?
    }

    /// Has requests of a disk, or of all disks of an export, tried again that it has failed.
    ///
    /// # Errors
    ///
    /// When there is no such disk.
    pub(crate) fn resume_disks(&self, name: String, place: Option<UnitPlace>) -> Answered<()> {
        self.ask(|answer| Order::ResumeDisks(name, place, answer))?
    }

    /// The disks of all exports, to be watched.
    ///
    /// # Errors
    ///
    /// When all exports have ended.
    pub(crate) fn watched_disks(&self) -> Answered<Vec<WatchedDisk>> {
        self.ask(Order::Watch)
    }

    /// Describes the exports for another process.
    ///
    /// # Errors
    ///
    /// When one of them cannot be handed over now.
    pub(crate) fn describe(&self) -> Answered<Described> {
        self.ask(|answer| Order::HandOver(HandOverOrder::Describe(answer)))?
    }

    /// Has all queues stop for another process, which goes on with them; if not,
    /// [`resume`](Self::resume) them.
    ///
    /// # Errors
    ///
    /// When the exports are not those that were described, or do not stop. They go on then.
    pub(crate) fn pause(&self, generation: u64) -> Answered<Paused> {
        self.ask(|answer| Order::HandOver(HandOverOrder::Pause(generation, answer)))?
    }

    /// Leaves the exports, which are paused, to the other process when it hears that; if it does
    /// not, [`resume`](Self::resume) them. Returns their disks, which are to be left then.
    ///
    /// # Errors
    ///
    /// When they are to end instead.
    pub(crate) fn commit(&self) -> Answered<Vec<DiskSource>> {
        self.ask(|answer| Order::HandOver(HandOverOrder::Commit(answer)))?
    }

    /// Has the queues start again, and waits for that.
    pub(crate) fn resume(&self) {
        // A thread that has ended has no queues.
        let _ = self.ask(|answer| Order::HandOver(HandOverOrder::Resume(answer)));
    }

    /// Goes on with the exports of another process. They are paused until they are
    /// [resumed](Self::resume).
    ///
    /// # Errors
    ///
    /// When that is not possible. The other process has lost nothing.
    pub(crate) fn take_over(
        &self,
        taken: Vec<(ExportSetup, ExportProgress)>,
        fds: HandedFds,
    ) -> Result<()> {
        self.ask(|answer| Order::HandOver(HandOverOrder::TakeOver(taken, fds, answer)))?
    }

    /// Leaves the exports, which are paused, to this process. This one must end.
    pub(crate) fn leave(&self, process: u32) {
        self.left.get_or_init(|| process);
        self.order(Order::HandOver(HandOverOrder::Leave));
    }

    /// Begins to disconnect all front-ends, each of which sees the end when its requests are
    /// answered, and accepts no more.
    pub fn begin_stop(&self) {
        self.order(Order::Stop);
    }

    /// Gives up what has not ended: logs what that is, removes the sockets and lets the thread end
    /// while queues run. The process must end then. The answer is whether there was anything.
    pub(crate) fn abandon(&self) -> Pending<bool> {
        let (answer, pending) = Pending::new();
        self.order(Order::Abandon(answer));
        pending
    }

    /// Waits until the last export has ended.
    pub fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn order(&self, order: Order) {
        // A thread that has ended has nothing left to do.
        let _ = self.orders.send(order);
        self.alarm.ring();
    }

    fn ask<T>(&self, order: impl FnOnce(Answer<T>) -> Order) -> Answered<T> {
        let (answer, pending) = Pending::new();
        self.order(order(answer));
        pending.wait().ok_or_else(|| self.why_ended())
    }

    /// Why nobody answers any more.
    fn why_ended(&self) -> CommandError {
        self.left.get().map_or(CommandError::Ending, |process| CommandError::HandedOver(*process))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.begin_stop();
    }
}

/// Names that are kept for exports which are being opened.
pub(crate) struct Reservation<'a> {
    control: &'a Control,
    names: Vec<(String, Wanted)>,
}

impl<'a> Reservation<'a> {
    /// Keeps the names of these exports apart from the others.
    pub(crate) fn split<'s>(
        &mut self,
        specs: impl IntoIterator<Item = &'s ExportSpec>,
    ) -> Reservation<'a> {
        let specs: Vec<String> = specs.into_iter().map(ExportSpec::name).collect();
        let is_of = |(name, _): &mut (String, Wanted)| specs.contains(name);
        Reservation { control: self.control, names: self.names.extract_if(.., is_of).collect() }
    }

    /// As [`Control::give_up_start`] with these.
    pub(crate) fn give_up_start(&self) -> bool {
        let names: Vec<String> = self.names.iter().map(|(name, _)| name.clone()).collect();
        self.control.give_up_start(&names)
    }

    /// Whether the export is wanted any more, which is one of these.
    pub(crate) fn wanted(&self, spec: &ExportSpec) -> Wanted {
        let name = spec.name();
        let of_name = self.names.iter().find(|(other, _)| *other == name);
        of_name.expect("its name is kept").1.clone()
    }

    /// Keeps every other process from taking over until the export is served, which is one of
    /// these, or its name is free. That must not take long.
    ///
    /// # Errors
    ///
    /// When the export is not wanted any more, or another process has taken over.
    pub(crate) fn claim(&self, spec: &ExportSpec) -> Answered<()> {
        self.control.ask(|answer| Order::Claim(spec.name(), answer))?
    }

    /// Begins to serve the exports.
    ///
    /// # Errors
    ///
    /// When they are to stop already.
    pub(crate) fn serve(mut self, exports: Vec<ExportSetup>) -> Answered<()> {
        // The names go over to the exports.
        self.names.clear();
        self.control.serve(exports)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.names.is_empty() {
            let names = std::mem::take(&mut self.names);
            self.control.order(Order::Release(names.into_iter().map(|(name, _)| name).collect()));
        }
    }
}

/// A disk of an export, or the place for one, that somebody is changing. When this is dropped, the
/// change has ended: its disk must be closed by then, unless the export has it.
pub(crate) struct Turn<'a> {
    control: &'a Control,
    id: u64,
    place: Option<UnitPlace>,
}

impl Turn<'_> {
    /// Keeps every other process from taking over until this ends, which must not take long. To
    /// open a disk for a new unit kept none from that. False: the export has ended, or nobody
    /// wants the unit any more.
    ///
    /// # Errors
    ///
    /// When another process has taken over.
    pub(crate) fn claim(&self) -> Answered<bool> {
        self.control.ask(|answer| Order::KeepHere(self.id, self.place, true, answer))
    }

    /// Lets another process take over: what is left to do is none of its business.
    pub(crate) fn let_go(&self) {
        // When one has, or the export has ended, there is nothing to let go.
        let _ = self.control.ask(|answer| Order::KeepHere(self.id, self.place, false, answer));
    }

    /// Puts in a unit on this disk, which was asked for at `asked`. Returns false when its export
    /// has ended meanwhile.
    pub(crate) fn put_in(&self, unit: UnitSpec, disk: DiskSource, asked: Instant) -> bool {
        matches!(self.tell(Changed::Unit(Box::new(unit), disk, asked)), Ok(None))
    }

    /// Tells that the disk has another size, which a driver of virtio-blk hears.
    pub(crate) fn tell_resized(&self) {
        // Without the export there is nobody to tell.
        let _ = self.tell(Changed::Size);
    }

    /// Tells that there is one unit less.
    pub(crate) fn tell_removed(&self) {
        // Without the export there is nobody to tell.
        let _ = self.tell(Changed::Removed);
    }

    fn tell(&self, changed: Changed) -> Answered<Option<DiskSource>> {
        self.control.ask(|answer| Order::Changed(self.id, self.place, changed, answer))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Whoever asks next finds the place free.
        let _ = self.control.ask(|answer| Order::EndChange(self.id, self.place, answer));
    }
}

/// Calls what it holds when it is dropped.
struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}
