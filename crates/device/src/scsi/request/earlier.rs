//! Commands that an earlier process took for a unit that is not there yet.

use super::{Header, RequestHandler, Route, judge_recovered};
use crate::access::task_set::Ended;
use crate::queue::Queue;
use crate::scsi::answer::Outcome;
use crate::scsi::cdb::{Cdb, Op};
use crate::scsi::held;
use crate::scsi::outcome::{Data, Effect, TaskHandle, refused};
use crate::stats::RequestKind;
use crate::unit_address::Address;

impl RequestHandler {
    /// True if an earlier process took the command and may have had its unit.
    #[cold]
    pub(super) fn is_held(&self, head: u16, cdb: &Cdb) -> bool {
        let may_wait = self.device.holds_commands();
        may_wait && held::needs_unit(cdb) && self.queue.is_recovered(head)
    }

    /// Serves a command that an earlier process took, once its unit is there.
    pub(super) async fn serve_held(
        &self,
        queue: &Queue,
        head: u16,
        header: &Header,
        number: u16,
        data: Data,
    ) -> (Ended, Outcome) {
        let Header { address: Address::Unit(address), tag, cdb } = header else {
            unreachable!("it is for a unit")
        };
        let tasks = &self.queue.tasks;
        if self.queue.held.first_report(*address) {
            self.device.core().events.requests_held(*address);
        }
        let task = TaskHandle { tasks, number };
        let found = self.queue.wait_for_unit(self.device.held(), *address, task).await;
        let ended = tasks.end(number);
        let other = |refused| (RequestKind::Other, Err(refused));
        let local = match found {
            Ok(local) if ended.abort.is_none() => local,
            Ok(_) => return (ended, (RequestKind::Other, Ok(Effect::from(0)))),
            Err(failure) => return (ended, other(refused(failure))),
        };
        // From now on the task belongs to the unit.
        let unit = (*address, Some(local.unit.number));
        let begun = tasks.begin(head, unit, *tag, queue.next_chain(), || queue.publish_early());
        ended.end_waits_after(|| queue.publish_early());
        let number = match begun {
            Ok(number) => number,
            Err((number, _)) => {
                return (tasks.end(number), (RequestKind::Other, Ok(Effect::from(0))));
            }
        };
        let how = match self.admit(&local, cdb, (number, head)) {
            Ok(Route::Read) => (Op::Read, false),
            Ok(Route::Write) => (Op::Write, false),
            Ok(Route::Other(op)) => (op, false),
            Ok(Route::Waits(op)) => (op, true),
            Err(refused) => return (tasks.end(number), other(refused)),
        };
        let served = self.execute(&local, how, cdb, number, data).await;
        drop(local);
        (tasks.end(number), judge_recovered(how.0, served))
    }
}
