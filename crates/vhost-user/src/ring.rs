//! The front-end's settings of one ring, and the queue that serves it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Poll, Waker};

use blockio::Remote;
use device::{Device, QueueHandle, QueueSetup, Ring, StartError, StopKind, oneshot};
use virtqueue::{GuestMemory, InflightRegion, MAX_QUEUE_SIZE, QueueError, QueueLog, RingLayout};

use super::call::Call;
use super::details::QueueState;
use super::load::QueueLoad;
use super::message::RingAddresses;

/// A ring is *started* by its kick descriptor and *enabled* by a message of its own; it is served
/// while it is both. No kick is lost: an earlier one stays in the eventfd, and a queue is processed
/// once unasked when it starts.
#[derive(Default)]
pub(super) struct RingState {
    pub(super) settings: RingSettings,
    /// The place at which the queue starts, as the front-end keeps it.
    pub(super) base: u32,
    pub(super) call: Option<Call>,
    pub(super) err: Option<OwnedFd>,
    service: Service,
    /// True if the ring stops only to be started again.
    is_paused: bool,
    /// True if the last start failed.
    is_lost: bool,
    /// True if the last stop has left requests in the inflight region.
    pub(super) has_left: bool,
    /// True after a new base, until the account in the daemon's own region is forgotten.
    pub(super) has_stale_account: bool,
    /// True while a disabled ring runs to answer them.
    is_finishing: bool,
}

/// The settings that the front-end has made.
#[derive(Clone, Default)]
pub(super) struct RingSettings {
    pub(super) size: u16,
    pub(super) addresses: Option<RingAddresses>,
    /// The address under which the log has the used ring, if its writes are logged.
    pub(super) log: Option<u64>,
    pub(super) started: bool,
    pub(super) enabled: bool,
    pub(super) kick: Option<Arc<OwnedFd>>,
}

/// The queue behind the ring.
#[derive(Default)]
enum Service {
    #[default]
    Stopped,
    Starting(oneshot::Receiver<Result<QueueHandle, StartError>>),
    Running(QueueHandle),
    Stopping(oneshot::Receiver<u32>, QueueHandle, StopKind),
    /// A queue that was told to stop and then to resume. It resumes unless it has stopped already.
    Resuming(oneshot::Receiver<()>, oneshot::Receiver<u32>, QueueHandle),
}

/// The parts of a queue's set-up that do not come from its ring.
pub(super) struct Surroundings<'a> {
    pub(super) memory: &'a Arc<GuestMemory>,
    /// The inflight region, with true if it is the daemon's own.
    pub(super) inflight: Option<(&'a InflightRegion, bool)>,
    pub(super) log: Option<QueueLog>,
}

/// The progress of a start or a stop.
pub(super) enum RingProgress {
    /// The queue runs or has stopped.
    Settled,
    /// The IoThread of the queue has not answered yet.
    Busy,
    /// The queue has stopped, or was not started.
    Failed(io::Error),
}

impl RingState {
    /// Begins to stop the queue if it runs. When it has stopped, all its requests are answered or
    /// left in the inflight region.
    pub(super) fn begin_stop(&mut self, kind: StopKind, waker: &Waker) {
        match std::mem::take(&mut self.service) {
            Service::Running(handle) => {
                let base = handle.begin_stop(kind);
                base.wake(waker);
                self.service = Service::Stopping(base, handle, kind);
            }
            other => self.service = other,
        }
    }

    /// Like [`begin_stop`](Self::begin_stop), for good. A queue that already stops in a way that
    /// may wait longer, or for ever (a pause), resumes first.
    pub(super) fn begin_end(&mut self, waker: &Waker) {
        if matches!(self.service, Service::Stopping(_, _, StopKind::Pause | StopKind::Final)) {
            self.begin_resume(waker);
        }
        self.begin_stop(StopKind::DriverGone, waker);
    }

    /// Lets a queue resume that has not stopped yet.
    pub(super) fn begin_resume(&mut self, waker: &Waker) {
        match std::mem::take(&mut self.service) {
            Service::Stopping(base, handle, _) => {
                let resumed = handle.begin_resume();
                resumed.wake(waker);
                self.service = Service::Resuming(resumed, base, handle);
            }
            other => self.service = other,
        }
    }

    /// Marks the ring as stopping, or stopped, only to be [started again](Self::take_paused).
    pub(super) fn set_paused(&mut self) {
        self.is_paused = true;
    }

    /// Returns true once, when the ring has paused.
    pub(super) fn take_paused(&mut self) -> bool {
        self.is_stopped() && std::mem::take(&mut self.is_paused)
    }

    /// Begins to start queue `index` of the device, if the ring's settings demand and allow it.
    pub(super) fn begin_start(
        &mut self,
        index: u16,
        device: &Device,
        surroundings: Surroundings<'_>,
        thread: &Remote,
        waker: &Waker,
    ) -> io::Result<()> {
        let setup = self.queue_setup(surroundings, index, device.layout());
        self.is_lost = setup.is_err();
        self.has_left &= !matches!(setup, Ok(Some(_)));
        let Some(setup) = setup? else { return Ok(()) };
        let handle = device.begin_start_queue(index, thread, setup);
        handle.wake(waker);
        self.service = Service::Starting(handle);
        Ok(())
    }

    /// The set-up for a start of the queue. `None` if the queue should not or cannot start yet.
    fn queue_setup(
        &self,
        surroundings: Surroundings<'_>,
        index: u16,
        layout: RingLayout,
    ) -> io::Result<Option<QueueSetup>> {
        let Surroundings { memory, inflight, log } = surroundings;
        let RingSettings { size, addresses, log: _, started, enabled, kick } = &self.settings;
        if !(*started && *enabled && matches!(self.service, Service::Stopped)) {
            return Ok(None);
        }
        // The messages for memory and addresses may still follow.
        let Some(addresses) = *addresses else { return Ok(None) };
        if *size == 0 || memory.num_regions() == 0 {
            return Ok(None);
        }
        Ok(Some(QueueSetup {
            memory: Arc::clone(memory),
            ring: self.ring(addresses, memory)?,
            inflight: inflight
                .map(|(region, _)| region.queue(index, layout))
                .transpose()
                .map_err(io::Error::other)?,
            region_is_own: inflight.is_some_and(|(_, is_own)| is_own),
            kick: clone(kick.as_deref())?,
            call: clone(self.call.as_ref().map(Call::eventfd))?,
            err: clone(self.err.as_ref())?,
            log,
        }))
    }

    /// Returns true if the ring starts next, with memory.
    pub(super) fn is_due(&self) -> bool {
        self.is_up() && self.is_stopped() && self.settings.addresses.is_some()
    }

    /// Returns whether the ring could start if the front-end shared memory.
    pub(super) fn is_up(&self) -> bool {
        self.settings.started && self.settings.enabled && self.settings.size != 0
    }

    /// Takes the answer of the IoThread if it has come.
    pub(super) fn progress(&mut self) -> RingProgress {
        self.check_resumed();
        let ended =
            || RingProgress::Failed(io::Error::other("the IoThread of the queue has ended"));
        match &self.service {
            Service::Stopped | Service::Running(_) => RingProgress::Settled,
            Service::Resuming(..) => RingProgress::Busy,
            Service::Starting(handle) => match handle.check() {
                Poll::Pending => RingProgress::Busy,
                Poll::Ready(Some(Ok(handle))) => {
                    self.service = Service::Running(handle);
                    RingProgress::Settled
                }
                Poll::Ready(Some(Err(error))) => {
                    (self.service, self.is_lost) = (Service::Stopped, true);
                    RingProgress::Failed(match error {
                        // The inflight region makes the queue unusable. Continuing without it would
                        // hang the guest, which has done nothing wrong.
                        StartError::Ring(QueueError::Inflight(_)) => io::Error::other(error),
                        StartError::Ring(_) => invalid(error.to_string()),
                        StartError::NoSuchQueue { .. }
                        | StartError::PackedInOrder
                        | StartError::ThreadEnded => io::Error::other(error),
                    })
                }
                Poll::Ready(None) => {
                    self.service = Service::Stopped;
                    ended()
                }
            },
            Service::Stopping(base, handle, _) => match base.check() {
                Poll::Pending => RingProgress::Busy,
                Poll::Ready(Some(base)) => {
                    self.base = base;
                    self.has_left = handle.view().requests() > 0;
                    self.service = Service::Stopped;
                    RingProgress::Settled
                }
                Poll::Ready(None) => {
                    self.service = Service::Stopped;
                    ended()
                }
            },
        }
    }

    fn check_resumed(&mut self) {
        self.service = match std::mem::take(&mut self.service) {
            Service::Resuming(resumed, base, handle) => match resumed.check() {
                Poll::Pending => Service::Resuming(resumed, base, handle),
                Poll::Ready(Some(())) => Service::Running(handle),
                // The queue had already stopped.
                Poll::Ready(None) => Service::Stopping(base, handle, StopKind::DriverGone),
            },
            other => other,
        };
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.service, Service::Running(_))
    }

    /// Returns true if the ring should serve requests when paused rings have resumed, and does not.
    pub(super) fn should_resume(&self) -> bool {
        self.settings.started && !self.is_lost && !self.is_running()
    }

    pub(super) fn is_stopped(&self) -> bool {
        matches!(self.service, Service::Stopped)
    }

    /// The kind of the stop in progress.
    #[cfg(test)]
    pub(super) fn stop_kind(&self) -> Option<StopKind> {
        match self.service {
            Service::Stopping(_, _, kind) => Some(kind),
            _ => None,
        }
    }

    pub(super) fn state(&self) -> QueueState {
        match &self.service {
            Service::Stopped => QueueState::Stopped,
            Service::Starting(_) => QueueState::Starting,
            Service::Running(_) => QueueState::Running,
            Service::Stopping(..) | Service::Resuming(..) => QueueState::Stopping,
        }
    }

    /// Returns the requests that the queue has taken and not answered, and true if its IoThread has
    /// seen all its commands.
    pub(super) fn load(&self) -> (QueueLoad, bool) {
        match &self.service {
            Service::Stopped => (QueueLoad::default(), true),
            Service::Starting(_) => (QueueLoad::default(), false),
            Service::Running(handle) => (QueueLoad::from_view(&handle.view()), true),
            Service::Stopping(_, handle, _) | Service::Resuming(_, _, handle) => {
                let watch = handle.view();
                (QueueLoad::from_view(&watch), watch.has_taken_commands())
            }
        }
    }

    /// The number of descriptors that are open for the ring: each eventfd counts again in its
    /// queue.
    pub(super) fn descriptors(&self) -> usize {
        let of_queue = [self.settings.kick.is_some(), self.call.is_some(), self.err.is_some()];
        2 * of_queue.into_iter().filter(|is_there| *is_there).count()
    }

    pub(super) fn next_avail_now(&self) -> Option<u16> {
        match &self.service {
            Service::Stopped => Some(halves(self.base).0),
            Service::Running(handle) if !handle.is_full() => Some(handle.next_avail()),
            Service::Running(_)
            | Service::Starting(_)
            | Service::Stopping(..)
            | Service::Resuming(..) => None,
        }
    }

    pub(super) fn set_call(&mut self, call: Option<Call>) -> io::Result<()> {
        if let Service::Running(running) = &self.service {
            running.set_call(clone(call.as_ref().map(Call::eventfd))?);
        }
        self.call = call;
        Ok(())
    }

    /// Begins to set, replace or remove the log of the queue. `None` if it does not run.
    pub(super) fn begin_set_log(
        &self,
        log: Option<QueueLog>,
        waker: &Waker,
    ) -> Option<oneshot::Receiver<()>> {
        let Service::Running(running) = &self.service else { return None };
        let is_set = running.begin_set_log(log);
        is_set.wake(waker);
        Some(is_set)
    }

    /// The bytes of the used ring, its event included (virtio 1.3, section 2.7), or of the device's
    /// events of a packed ring (section 2.8.10).
    pub(super) fn used_ring_bytes(&self, layout: RingLayout) -> u64 {
        match layout {
            RingLayout::Split => 6 + 8 * u64::from(self.settings.size),
            RingLayout::Packed => 4,
        }
    }

    pub(super) fn set_err(&mut self, err: Option<OwnedFd>) -> io::Result<()> {
        if let Service::Running(running) = &self.service {
            running.set_err(clone(err.as_ref())?);
        }
        self.err = err;
        Ok(())
    }

    /// Enables a disabled ring that has left requests, until the next
    /// [`set_stopped`](Self::set_stopped). Returns false if it has left none.
    pub(super) fn begin_finish(&mut self) -> bool {
        let begins = self.has_left && self.settings.started && !self.settings.enabled;
        self.settings.enabled |= begins;
        self.is_finishing |= begins;
        begins
    }

    /// The state after GET_VRING_BASE: a kick starts the ring again.
    pub(super) fn set_stopped(&mut self) {
        self.end_finish();
        self.has_left = false;
        self.settings.started = false;
        self.settings.kick = None;
    }

    /// Disables a ring again that [`begin_finish`](Self::begin_finish) enabled. Returns true if it
    /// could not run, and its requests are still left.
    pub(super) fn end_finish(&mut self) -> bool {
        let was_finishing = std::mem::take(&mut self.is_finishing);
        self.settings.enabled &= !was_finishing;
        was_finishing && self.has_left
    }

    /// The initial state, except that the call and error eventfds stay.
    pub(super) fn reset(&mut self) {
        *self = Self { call: self.call.take(), err: self.err.take(), ..Self::default() };
    }

    fn ring(&self, addresses: RingAddresses, memory: &GuestMemory) -> io::Result<Ring> {
        let guest = |user_addr: u64| {
            memory.guest_addr_of_user(user_addr).ok_or_else(|| {
                invalid(format!("the ring at address {user_addr:#x} is not in its memory"))
            })
        };
        let (next_avail, next_used) = halves(self.base);
        Ok(Ring {
            size: self.settings.size,
            desc_table: guest(addresses.desc_table)?,
            avail_ring: guest(addresses.avail_ring)?,
            used_ring: guest(addresses.used_ring)?,
            next_avail,
            next_used,
        })
    }
}

/// The size of a ring of this layout, if it is valid.
pub(super) fn ring_size(size: u32, layout: RingLayout) -> io::Result<u16> {
    let (is_possible, kind): (fn(u16) -> bool, _) = match layout {
        RingLayout::Split => (u16::is_power_of_two, "a power of two"),
        RingLayout::Packed => (|size| size > 0, "a number"),
    };
    let possible = |size: &u16| is_possible(*size) && *size <= MAX_QUEUE_SIZE;
    u16::try_from(size).ok().filter(possible).ok_or_else(|| {
        invalid(format!(
            "a ring cannot have {size} entries: the size must be {kind} up to {MAX_QUEUE_SIZE}"
        ))
    })
}

/// The base of a ring of this layout: an avail entry, or the places of a packed ring.
pub(super) fn ring_base(base: u32, layout: RingLayout) -> io::Result<u32> {
    match layout {
        RingLayout::Split if base > u16::MAX.into() => Err(invalid(format!("ring base {base}"))),
        RingLayout::Split | RingLayout::Packed => Ok(base),
    }
}

/// The place of the next chain, and of the next used element in a packed ring.
pub(super) fn halves(base: u32) -> (u16, u16) {
    let [a0, a1, u0, u1] = base.to_le_bytes();
    (u16::from_le_bytes([a0, a1]), u16::from_le_bytes([u0, u1]))
}

fn clone(fd: Option<&OwnedFd>) -> io::Result<Option<OwnedFd>> {
    fd.map(OwnedFd::try_clone).transpose()
}

/// An error that is the fault of the front-end or its guest, and concerns nothing else.
pub(super) fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Keeps the first failure. A failure that is not the fault of a ring replaces one that is.
pub(super) fn keep_first(failure: &mut Option<io::Error>, error: io::Error) {
    let is_graver = |before: &io::Error| is_ring_fault(before) && !is_ring_fault(&error);
    if failure.as_ref().is_none_or(is_graver) {
        *failure = Some(error);
    }
}

/// Returns true if the error is about the front-end's settings of a ring, or the guest's data in
/// it.
pub(super) fn is_ring_fault(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fault of a ring stops that ring alone; any other error ends the connection.
    #[test]
    fn the_gravest_failure_is_kept_and_of_equal_ones_the_first() {
        let ring = |text: &str| invalid(text.to_owned());
        let other = |text: &str| io::Error::other(text.to_owned());
        for (errors, expected) in [
            ([ring("a"), ring("b")], "a"),
            ([ring("a"), other("b")], "b"),
            ([other("a"), ring("b")], "a"),
            ([other("a"), other("b")], "a"),
        ] {
            let mut failure = None;
            errors.into_iter().for_each(|error| keep_first(&mut failure, error));
            assert_eq!(failure.unwrap().to_string(), expected);
        }
    }
}
