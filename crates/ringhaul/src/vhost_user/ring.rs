//! What a front-end has said about one ring, and the queue that serves it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Poll, Waker};

use blockio::Remote;
use device::{Device, Pending, QueueHandle, QueueSetup, Ring, StartError, StopKind};
use virtqueue::{GuestMemory, InflightRegion, MAX_QUEUE_SIZE, QueueError};

use super::call::Call;
use super::load::QueueLoad;
use super::message::RingAddresses;
use crate::status::QueueState;

/// A ring is *started* by its kick descriptor and *enabled* by a message of its own; it is served
/// while it is both. A kick that came before stays in the eventfd, and a queue is processed once
/// unasked when it starts, so none is lost.
#[derive(Default)]
pub(super) struct RingState {
    pub(super) settings: RingSettings,
    pub(super) next_avail: u16,
    pub(super) call: Option<Call>,
    pub(super) err: Option<OwnedFd>,
    service: Service,
    /// It was stopped only to be started again.
    is_paused: bool,
    /// When it was to start last, that failed.
    is_lost: bool,
}

/// What the front-end has set.
#[derive(Clone, Default)]
pub(super) struct RingSettings {
    pub(super) size: u16,
    pub(super) addresses: Option<RingAddresses>,
    pub(super) started: bool,
    pub(super) enabled: bool,
    pub(super) kick: Option<Arc<OwnedFd>>,
}

/// The queue behind the ring.
#[derive(Default)]
enum Service {
    #[default]
    Stopped,
    Starting(Pending<Result<QueueHandle, StartError>>),
    Running(QueueHandle),
    Stopping(Pending<u16>, QueueHandle, StopKind),
    /// It was told to stop, and is told to go on, unless it has stopped.
    GoingOn(Pending<()>, Pending<u16>, QueueHandle),
}

/// What became of a start or a stop.
pub(super) enum Progress {
    /// The queue runs or has stopped.
    Settled,
    /// Its IoThread has yet to answer.
    Busy,
    /// The queue has stopped, or was not started.
    Failed(io::Error),
}

impl RingState {
    /// Begins to stop the queue if it runs. All its requests are answered when it has stopped, or
    /// left in the inflight region.
    pub(super) fn begin_stop(&mut self, kind: StopKind, waker: &Waker) {
        match std::mem::take(&mut self.service) {
            Service::Running(handle) => {
                let next_avail = handle.begin_stop_as(kind);
                next_avail.wake(waker);
                self.service = Service::Stopping(next_avail, handle, kind);
            }
            other => self.service = other,
        }
    }

    /// As [`begin_stop`](Self::begin_stop), for good. A queue that stops in another way may wait
    /// longer for requests, and one that pauses for ever, so it goes on first.
    pub(super) fn begin_end(&mut self, waker: &Waker) {
        if matches!(self.service, Service::Stopping(_, _, StopKind::Pause | StopKind::Final)) {
            self.begin_go_on(waker);
        }
        self.begin_stop(StopKind::End, waker);
    }

    /// Has a queue go on that has not stopped yet.
    pub(super) fn begin_go_on(&mut self, waker: &Waker) {
        match std::mem::take(&mut self.service) {
            Service::Stopping(next_avail, handle, _) => {
                let goes_on = handle.begin_go_on();
                goes_on.wake(waker);
                self.service = Service::GoingOn(goes_on, next_avail, handle);
            }
            other => self.service = other,
        }
    }

    /// It stops, or has, only to be [started again](Self::take_due).
    pub(super) fn set_paused(&mut self) {
        self.is_paused = true;
    }

    /// True once, when it has paused.
    pub(super) fn take_due(&mut self) -> bool {
        self.is_stopped() && std::mem::take(&mut self.is_paused)
    }

    /// Begins to start the queue, number `index` of the device, if what was said so far asks for
    /// that.
    pub(super) fn begin_start(
        &mut self,
        index: u16,
        device: &Device,
        memory: &Arc<GuestMemory>,
        inflight: Option<&InflightRegion>,
        thread: &Remote,
        waker: &Waker,
    ) -> io::Result<()> {
        let setup = self.queue_setup(memory, inflight, index);
        self.is_lost = setup.is_err();
        let Some(setup) = setup? else { return Ok(()) };
        let handle = device.begin_start_queue(index, thread, setup);
        handle.wake(waker);
        self.service = Service::Starting(handle);
        Ok(())
    }

    /// What the queue starts with, if it should.
    fn queue_setup(
        &self,
        memory: &Arc<GuestMemory>,
        inflight: Option<&InflightRegion>,
        index: u16,
    ) -> io::Result<Option<QueueSetup>> {
        let RingSettings { size, addresses, started, enabled, kick } = &self.settings;
        if !(*started && *enabled && matches!(self.service, Service::Stopped)) {
            return Ok(None);
        }
        // Memory and addresses may still be on their way.
        let Some(addresses) = *addresses else { return Ok(None) };
        if *size == 0 || memory.num_regions() == 0 {
            return Ok(None);
        }
        Ok(Some(QueueSetup {
            memory: Arc::clone(memory),
            ring: self.ring(addresses, memory)?,
            inflight: inflight
                .map(|region| region.queue(index))
                .transpose()
                .map_err(io::Error::other)?,
            kick: clone(kick.as_deref())?,
            call: clone(self.call.as_ref().map(Call::eventfd))?,
            err: clone(self.err.as_ref())?,
        }))
    }

    /// Returns whether the ring could start if the front-end shared memory.
    pub(super) fn is_up(&self) -> bool {
        self.settings.started && self.settings.enabled && self.settings.size != 0
    }

    /// Takes the answer of the IoThread if it is there.
    pub(super) fn progress(&mut self) -> Progress {
        self.hear_whether_it_goes_on();
        let ended = || Progress::Failed(io::Error::other("the IoThread of the queue has ended"));
        match &self.service {
            Service::Stopped | Service::Running(_) => Progress::Settled,
            Service::GoingOn(..) => Progress::Busy,
            Service::Starting(handle) => match handle.check() {
                Poll::Pending => Progress::Busy,
                Poll::Ready(Some(Ok(handle))) => {
                    self.service = Service::Running(handle);
                    Progress::Settled
                }
                Poll::Ready(Some(Err(error))) => {
                    (self.service, self.is_lost) = (Service::Stopped, true);
                    Progress::Failed(match error {
                        // To go on without the queue would hang the guest, which has done nothing.
                        StartError::Ring(QueueError::Inflight(_)) => io::Error::other(error),
                        StartError::Ring(_) => invalid(error.to_string()),
                        StartError::NoSuchQueue { .. } | StartError::ThreadEnded => {
                            io::Error::other(error)
                        }
                    })
                }
                Poll::Ready(None) => {
                    self.service = Service::Stopped;
                    ended()
                }
            },
            Service::Stopping(next_avail, ..) => match next_avail.check() {
                Poll::Pending => Progress::Busy,
                Poll::Ready(Some(next_avail)) => {
                    self.next_avail = next_avail;
                    self.service = Service::Stopped;
                    Progress::Settled
                }
                Poll::Ready(None) => {
                    self.service = Service::Stopped;
                    ended()
                }
            },
        }
    }

    fn hear_whether_it_goes_on(&mut self) {
        self.service = match std::mem::take(&mut self.service) {
            Service::GoingOn(goes_on, next_avail, handle) => match goes_on.check() {
                Poll::Pending => Service::GoingOn(goes_on, next_avail, handle),
                Poll::Ready(Some(())) => Service::Running(handle),
                // It has stopped.
                Poll::Ready(None) => Service::Stopping(next_avail, handle, StopKind::End),
            },
            other => other,
        };
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.service, Service::Running(_))
    }

    /// Whether it should serve requests when those rings do again that were stopped for a while.
    pub(super) fn is_missing(&self) -> bool {
        self.settings.started && !self.is_lost && !self.is_running()
    }

    pub(super) fn is_stopped(&self) -> bool {
        matches!(self.service, Service::Stopped)
    }

    pub(super) fn state(&self) -> QueueState {
        match &self.service {
            Service::Stopped => QueueState::Stopped,
            Service::Starting(_) => QueueState::Starting,
            Service::Running(_) => QueueState::Running,
            Service::Stopping(..) | Service::GoingOn(..) => QueueState::Stopping,
        }
    }

    /// Requests that the queue has taken and not answered, and whether its IoThread has heard what
    /// it was told.
    pub(super) fn load(&self) -> (QueueLoad, bool) {
        match &self.service {
            Service::Stopped => (QueueLoad::default(), true),
            Service::Starting(_) => (QueueLoad::default(), false),
            Service::Running(handle) => (QueueLoad::of(&handle.watch()), true),
            Service::Stopping(_, handle, _) | Service::GoingOn(_, _, handle) => {
                let watch = handle.watch();
                (QueueLoad::of(&watch), watch.has_heard())
            }
        }
    }

    /// How many descriptors are open for it: its eventfds, and again in its queue.
    pub(super) fn descriptors(&self) -> usize {
        let of_queue = [self.settings.kick.is_some(), self.call.is_some(), self.err.is_some()];
        2 * of_queue.into_iter().filter(|is_there| *is_there).count()
    }

    pub(super) fn next_avail_now(&self) -> Option<u16> {
        match &self.service {
            Service::Stopped => Some(self.next_avail),
            Service::Running(handle) if !handle.is_full() => Some(handle.next_avail()),
            Service::Running(_)
            | Service::Starting(_)
            | Service::Stopping(..)
            | Service::GoingOn(..) => None,
        }
    }

    pub(super) fn set_call(&mut self, call: Option<Call>) -> io::Result<()> {
        if let Service::Running(running) = &self.service {
            running.set_call(clone(call.as_ref().map(Call::eventfd))?);
        }
        self.call = call;
        Ok(())
    }

    pub(super) fn set_err(&mut self, err: Option<OwnedFd>) -> io::Result<()> {
        if let Service::Running(running) = &self.service {
            running.set_err(clone(err.as_ref())?);
        }
        self.err = err;
        Ok(())
    }

    /// As after GET_VRING_BASE: a kick starts it again.
    pub(super) fn set_stopped(&mut self) {
        self.settings.started = false;
        self.settings.kick = None;
    }

    /// As before anything was said of it, but for the eventfds that tell the driver something.
    pub(super) fn reset(&mut self) {
        *self = Self { call: self.call.take(), err: self.err.take(), ..Self::default() };
    }

    fn ring(&self, addresses: RingAddresses, memory: &GuestMemory) -> io::Result<Ring> {
        let guest = |user_addr: u64| {
            memory.guest_addr_of_user(user_addr).ok_or_else(|| {
                invalid(format!("a ring at address {user_addr:#x}, which is not in its memory"))
            })
        };
        Ok(Ring {
            size: self.settings.size,
            desc_table: guest(addresses.desc_table)?,
            avail_ring: guest(addresses.avail_ring)?,
            used_ring: guest(addresses.used_ring)?,
            next_avail: self.next_avail,
        })
    }
}

/// The size of a ring, if a ring can have it.
pub(super) fn ring_size(size: u32) -> io::Result<u16> {
    let possible = |size: &u16| size.is_power_of_two() && *size <= MAX_QUEUE_SIZE;
    u16::try_from(size).ok().filter(possible).ok_or_else(|| {
        invalid(format!(
            "a ring of {size} entries; it must be a power of two up to {MAX_QUEUE_SIZE}"
        ))
    })
}

fn clone(fd: Option<&OwnedFd>) -> io::Result<Option<OwnedFd>> {
    fd.map(OwnedFd::try_clone).transpose()
}

/// What is wrong with what a front-end or its guest has said, and concerns nothing else.
pub(super) fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Keeps the first failure, or the first that is not the fault of a ring.
pub(super) fn note(failure: &mut Option<io::Error>, error: io::Error) {
    let is_graver = |before: &io::Error| is_of_ring(before) && !is_of_ring(&error);
    if failure.as_ref().is_none_or(is_graver) {
        *failure = Some(error);
    }
}

/// Whether this is about what the front-end has said of a ring, or what the guest has in it.
pub(super) fn is_of_ring(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput
}
