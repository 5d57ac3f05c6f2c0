//! Waits of tasks for limits of their disk, for a retry after a failure, or for the medium. A
//! waiting task uses nothing, so other tasks do not wait for it. Before it resumes, it repeats the
//! checks of a task that begins.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::Pin;

use blockio::disk::{Direction, Requester};

use super::outcome::{Failure, TaskHandle};
use super::request_queue::LocalUnit;
use crate::access::MediumGuard;
use crate::access::persist::CommandClass;

/// A task, and the unit on which it works.
#[derive(Clone, Copy)]
pub(super) struct DiskTask<'a> {
    local: &'a LocalUnit,
    task: TaskHandle<'a>,
    /// Present if the task has the medium to itself.
    exclusive: Option<&'a MediumGuard>,
    /// If true, the task ends at its next piece when its queue stops.
    ends_at_stop: bool,
}

/// True if a long task has ended because its queue stops, and not by a disk error.
pub(super) fn is_queue_stop_error(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ResourceBusy && error.raw_os_error().is_none()
}

impl<'a> DiskTask<'a> {
    pub(super) fn new(local: &'a LocalUnit, task: TaskHandle<'a>) -> Self {
        Self { local, task, exclusive: None, ends_at_stop: false }
    }

    /// A task that may move much data, however short its request is. When its queue stops, it
    /// answers BUSY before the next piece, and drivers send it again.
    pub(super) fn new_long(local: &'a LocalUnit, task: TaskHandle<'a>) -> Self {
        Self { ends_at_stop: true, ..Self::new(local, task) }
    }

    /// Marks the task as the one with the medium to itself.
    pub(super) fn with_medium(self, exclusive: &'a MediumGuard) -> Self {
        Self { exclusive: Some(exclusive), ..self }
    }

    /// Waits while another task has the medium to itself.
    ///
    /// # Errors
    ///
    /// If the task was aborted during the wait, or cannot wait.
    pub(super) async fn pass_medium(self) -> Result<(), Failure> {
        let is_suspended = Cell::new(false);
        let passed = self.local.unit.access.pass(|| self.suspend_once(&is_suspended)).await;
        self.resume_after(&is_suspended, passed)
    }

    /// Waits until the task has the medium to itself.
    ///
    /// # Errors
    ///
    /// As for [`pass_medium`](Self::pass_medium).
    pub(super) async fn take_medium(self) -> Result<MediumGuard, Failure> {
        let is_suspended = Cell::new(false);
        let access = &self.local.unit.access;
        let taken = access.take_medium(self.task.id(), || self.suspend_once(&is_suspended)).await;
        self.resume_after(&is_suspended, taken)
    }

    /// Lets waiting tasks take the medium between two uses of it by a long task, so that they need
    /// not wait for the end of this task.
    ///
    /// # Errors
    ///
    /// If the task cannot continue: it was aborted, a reservation conflicts, or its queue stops.
    pub(super) async fn yield_medium(self) -> Result<(), Failure> {
        self.task.check()?;
        if self.is_to_end() {
            return Err(Failure::Busy);
        }
        let unit = &self.local.unit;
        if !unit.access.is_exclusive() {
            return Ok(());
        }
        self.task.tasks.suspend(self.task.number);
        let passed = unit.access.pass(|| self.check_waiting()).await;
        self.resume_after(&Cell::new(true), passed)?;
        if unit.attached.conflicts(CommandClass::Reads) {
            return Err(Failure::Conflict);
        }
        Ok(())
    }

    /// Suspends the task on the first call: the task with the medium waits too, so this one uses
    /// nothing.
    fn suspend_once(self, is_suspended: &Cell<bool>) -> Result<(), Failure> {
        if !is_suspended.replace(true) {
            self.task.tasks.suspend(self.task.number);
        }
        self.check_waiting()
    }

    fn resume_after<T>(
        self,
        is_suspended: &Cell<bool>,
        waited: Result<T, Failure>,
    ) -> Result<T, Failure> {
        let TaskHandle { tasks, number } = self.task;
        if is_suspended.get() {
            match &waited {
                Ok(_) => tasks.resume(number),
                Err(_) => tasks.end_suspended(),
            }
        }
        let has_it = waited?;
        self.task.check().map(|()| has_it)
    }

    /// Checks that the task may still wait for a task that waits itself. A stopping queue would
    /// wait with it, maybe forever.
    fn check_waiting(self) -> Result<(), Failure> {
        self.task.check()?;
        if self.local.disk.is_stopping_for_good() { Err(Failure::Busy) } else { Ok(()) }
    }

    fn is_to_end(&self) -> bool {
        self.ends_at_stop && self.local.disk.is_stopping()
    }

    /// Fails if the task was aborted. The abort then replaces any result of the disk.
    fn check_aborted(&self) -> io::Result<()> {
        self.task.check().map_err(|_| io::Error::from_raw_os_error(libc::ECANCELED))
    }
}

impl Requester for DiskTask<'_> {
    fn on_wait(&self) {
        self.task.tasks.suspend(self.task.number);
        if let Some(exclusive) = self.exclusive {
            exclusive.set_owner_waits(true);
        }
    }

    fn check(&self) -> io::Result<()> {
        self.check_aborted()
    }

    fn on_resume(
        &self,
        direction: Direction,
    ) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
        Box::pin(async move {
            let TaskHandle { tasks, number } = self.task;
            let unit = &self.local.unit;
            if let Some(exclusive) = self.exclusive {
                exclusive.set_owner_waits(false);
            } else if tasks.had_medium(number)
                && unit.access.is_exclusive()
                && let Err(_) = unit.access.pass(|| self.check_waiting()).await
            {
                tasks.end_suspended();
                self.check_aborted()?;
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            tasks.resume(number);
            self.check_aborted()?;
            let class = match direction {
                Direction::Read => CommandClass::Reads,
                Direction::Write => CommandClass::Writes,
            };
            if unit.attached.conflicts(class) {
                return Err(io::Error::from_raw_os_error(libc::EBADE));
            }
            Ok(())
        })
    }

    /// A task with the medium gives that up next, and with it the note that it waits.
    fn on_cancel(&self) {
        self.task.tasks.end_suspended();
    }

    fn check_piece(&self) -> io::Result<()> {
        self.check_aborted()?;
        if self.is_to_end() { Err(io::ErrorKind::ResourceBusy.into()) } else { Ok(()) }
    }

    /// Refuses the rest with BUSY: drivers send such a command again.
    fn check_rest(&self) -> io::Result<()> {
        self.check_aborted()?;
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// A task with the medium to itself has passed its limits before: otherwise all other tasks
    /// would wait for them.
    fn is_past_limits(&self) -> bool {
        self.exclusive.is_some()
    }
}
