//! Tasks that wait for the limits of their disk, or because it has failed them. They use nothing
//! meanwhile, so nobody waits for them; before they go on they do what a task does that begins.

use std::future::Future;
use std::io;
use std::pin::Pin;

use blockio::disk::{Direction, Requester};

use super::outcome::Task;
use super::persist::CommandClass;
use super::request_queue::LocalUnit;

/// A task, and the unit on whose disk it is.
pub(super) struct AtDisk<'a> {
    pub(super) local: &'a LocalUnit,
    pub(super) task: Task<'a>,
}

impl AtDisk<'_> {
    /// What the task ends with is how it was aborted, whatever its disk says.
    fn check_aborted(&self) -> io::Result<()> {
        self.task.check().map_err(|_| io::Error::from_raw_os_error(libc::ECANCELED))
    }
}

impl Requester for AtDisk<'_> {
    fn waits(&self) {
        self.task.tasks.steps_out(self.task.number);
    }

    fn check(&self) -> io::Result<()> {
        self.check_aborted()
    }

    fn goes_on(&self, direction: Direction) -> Pin<Box<dyn Future<Output = io::Result<()>> + '_>> {
        Box::pin(async move {
            let Task { tasks, number } = self.task;
            let unit = &self.local.unit;
            // Of all commands the one that has the medium to itself did not ask for it.
            if tasks.had_medium(number) && unit.access.is_exclusive() {
                unit.access.pass().await;
            }
            tasks.steps_in(number);
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

    fn ends(&self) {
        self.task.tasks.ends_outside();
    }
}
