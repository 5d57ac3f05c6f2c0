//! Task management (virtio 1.3, section 5.6.6.2; SAM-6, chapter 7).

use std::future::poll_fn;
use std::rc::Rc;

use iomem::Buffers;
use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_S_BAD_TARGET, VIRTIO_SCSI_S_FAILURE, VIRTIO_SCSI_S_FUNCTION_REJECTED,
    VIRTIO_SCSI_S_FUNCTION_SUCCEEDED, VIRTIO_SCSI_S_INCORRECT_LUN, VIRTIO_SCSI_S_OK,
    VIRTIO_SCSI_T_AN_QUERY, VIRTIO_SCSI_T_AN_SUBSCRIBE, VIRTIO_SCSI_T_TMF,
    VIRTIO_SCSI_T_TMF_ABORT_TASK, VIRTIO_SCSI_T_TMF_ABORT_TASK_SET,
    VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET, VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET,
    VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET, VIRTIO_SCSI_T_TMF_QUERY_TASK,
    VIRTIO_SCSI_T_TMF_QUERY_TASK_SET,
};
use virtqueue::{Chain, ChainFault};

use super::ScsiDevice;
use super::units::UnitNexus;
use crate::access::sense::Sense;
use crate::access::task_set::{Abort, TaskSelector, Treatment};
use crate::access::{self, EndedTasks};
use crate::device_core::byte;
use crate::queue::Queue;
use crate::queue::queue_task::Handler;
use crate::stats::{ErrorCause, RequestKind};
use crate::unit_address::{Address, UnitAddress};

/// Bytes of a task management request: type, function, LUN, tag.
const FUNCTION_BYTES: usize = 24;
/// Bytes of a request about asynchronous notification: type, LUN, events.
const NOTIFICATION_BYTES: usize = 16;

/// The handler of the control queue.
pub(crate) struct ControlHandler {
    device: ScsiDevice,
}

/// A request that is not carried out.
#[derive(Debug, thiserror::Error)]
enum ControlError {
    #[error("request type {0} of the control queue is not supported")]
    Type(u32),
    #[error("a request of the control queue is incomplete")]
    Incomplete,
    #[error("a request about asynchronous notification is incomplete")]
    IncompleteNotification,
    #[error("{0}")]
    Chain(#[from] ChainFault),
}

impl ControlError {
    /// The bytes of the response.
    fn answer(&self) -> Vec<u8> {
        match self {
            Self::IncompleteNotification => about_notification(VIRTIO_SCSI_S_FAILURE),
            Self::Type(_) | Self::Incomplete => vec![byte(VIRTIO_SCSI_S_FAILURE)],
            Self::Chain(_) => {
                // The kind of the request was not read, so both responses are failures.
                let failure = byte(VIRTIO_SCSI_S_FAILURE);
                vec![failure, 0, 0, 0, failure]
            }
        }
    }
}

/// The response to a request about asynchronous notification: no event, and a result.
fn about_notification(response: u32) -> Vec<u8> {
    vec![0, 0, 0, 0, byte(response)]
}

impl ControlHandler {
    pub(crate) fn new(device: &ScsiDevice) -> Self {
        device.queues().begin();
        Self { device: device.clone() }
    }

    /// Carries out a request. Returns the bytes of its response.
    async fn execute(&self, mut readable: Buffers) -> Result<Vec<u8>, ControlError> {
        let kind = readable.take_front().ok_or(ControlError::Incomplete)?;
        match u32::from_le_bytes(kind) {
            VIRTIO_SCSI_T_TMF => {
                let rest = readable.take_front().ok_or(ControlError::Incomplete)?;
                Ok(vec![self.manage(rest).await])
            }
            VIRTIO_SCSI_T_AN_QUERY | VIRTIO_SCSI_T_AN_SUBSCRIBE => {
                let rest: Option<[u8; NOTIFICATION_BYTES - 4]> = readable.take_front();
                rest.ok_or(ControlError::IncompleteNotification)?;
                // No such event is ever sent.
                Ok(about_notification(VIRTIO_SCSI_S_OK))
            }
            other => Err(ControlError::Type(other)),
        }
    }

    /// Carries out a task management function. Returns its response.
    async fn manage(&self, bytes: [u8; FUNCTION_BYTES - 4]) -> u8 {
        let [f0, f1, f2, f3, l0, l1, l2, l3, l4, l5, l6, l7, tag @ ..] = bytes;
        let function = u32::from_le_bytes([f0, f1, f2, f3]);
        let tag = u64::from_le_bytes(tag);
        let Address::Unit(address) = Address::parse([l0, l1, l2, l3, l4, l5, l6, l7]) else {
            return byte(VIRTIO_SCSI_S_BAD_TARGET);
        };
        let (units, held) = (self.device.units(), self.device.held());
        if !units.has_target(address.target) && !held.has_waiters_at_target(address.target) {
            return byte(VIRTIO_SCSI_S_BAD_TARGET);
        }
        if function == VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET {
            return byte(self.reset_nexus(address.target).await);
        }
        let Some(nexus) = units.nexus(address) else {
            return byte(match held.has_waiters(address) {
                true => self.manage_held(function, address, tag).await,
                false => VIRTIO_SCSI_S_INCORRECT_LUN,
            });
        };
        byte(match function {
            VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET => nexus.reset_unit().await,
            VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET => nexus.clear_task_set().await,
            _ => self.manage_tasks(function, address, tag).await,
        })
    }

    /// Carries out a function for a missing unit that commands wait for.
    async fn manage_held(&self, function: u32, address: UnitAddress, tag: u64) -> u32 {
        let abort = match function {
            VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET => Abort::Reset,
            VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET => Abort::Aborted,
            _ => return self.manage_tasks(function, address, tag).await,
        };
        let covered =
            self.device.queues().cover(TaskSelector::At(address), Treatment::Abort(abort));
        poll_fn(|cx| covered.poll(cx)).await;
        answer(covered.has_lost())
    }

    /// Carries out a function that concerns tasks of this initiator.
    async fn manage_tasks(&self, function: u32, address: UnitAddress, tag: u64) -> u32 {
        let aborted = Treatment::Abort(Abort::Aborted);
        let (selector, treatment) = match function {
            VIRTIO_SCSI_T_TMF_ABORT_TASK => (TaskSelector::Task(address, tag), aborted),
            VIRTIO_SCSI_T_TMF_ABORT_TASK_SET => (TaskSelector::At(address), aborted),
            VIRTIO_SCSI_T_TMF_QUERY_TASK => (TaskSelector::Task(address, tag), Treatment::Count),
            VIRTIO_SCSI_T_TMF_QUERY_TASK_SET => (TaskSelector::At(address), Treatment::Count),
            _ => return VIRTIO_SCSI_S_FUNCTION_REJECTED,
        };
        let covered = self.device.queues().cover(selector, treatment);
        let found = poll_fn(|cx| covered.poll(cx)).await;
        if treatment == Treatment::Count && found > 0 {
            return VIRTIO_SCSI_S_FUNCTION_SUCCEEDED;
        }
        answer(covered.has_lost())
    }

    /// Ends the tasks of this initiator at a target. The units keep their state.
    async fn reset_nexus(&self, target: u8) -> u32 {
        let selector = TaskSelector::Target(target);
        let covered = self.device.queues().cover(selector, Treatment::Abort(Abort::Reset));
        poll_fn(|cx| covered.poll(cx)).await;
        self.device.units().add_attention_at_target(target, Sense::NEXUS_LOST);
        answer(covered.has_lost())
    }
}

/// The response to a function that ended tasks. Lost tasks may be carried out later, when their
/// queue starts again.
fn answer(has_lost: bool) -> u32 {
    if has_lost { VIRTIO_SCSI_S_FAILURE } else { VIRTIO_SCSI_S_OK }
}

impl UnitNexus {
    /// Resets the logical unit for all initiators, and notifies them.
    async fn reset_unit(&self) -> u32 {
        let ended = self.access.end_all_tasks(self.nexus, Abort::Reset).await;
        self.access.reset();
        self.access.add_attention_for_all(Sense::UNIT_WAS_RESET);
        answer(self.has_lost(&ended))
    }

    /// Ends the tasks of all initiators: by the control mode page, they are in one task set.
    async fn clear_task_set(&self) -> u32 {
        let ended = self.access.end_all_tasks(self.nexus, Abort::Aborted).await;
        access::notify_cleared(&ended, self.nexus);
        answer(self.has_lost(&ended))
    }

    /// True if tasks of this initiator are left behind. Chains that other initiators have not yet
    /// given to the device are no tasks.
    fn has_lost(&self, ended: &[EndedTasks]) -> bool {
        ended.iter().any(|covered| covered.nexus == self.nexus && covered.has_lost)
    }
}

impl Handler for ControlHandler {
    async fn serve(self: Rc<Self>, queue: Rc<Queue>, chain: Chain) {
        let (head, writable, popped) = (chain.head, chain.writable, queue.pop_time(chain.head));
        if writable.is_empty() {
            queue.push_unanswered(head, chain.fault);
            return;
        }
        let answer = match chain.fault {
            None => self.execute(chain.readable).await,
            Some(fault) => Err(fault.into()),
        };
        let answer = match answer {
            Ok(answer) => {
                queue.count(RequestKind::Other, popped, 0);
                answer
            }
            Err(error) => {
                queue.fail(RequestKind::Other, popped, (ErrorCause::Invalid, &error));
                error.answer()
            }
        };
        let written = writable.copy_from(0, &answer);
        queue.push(head, iomem::fits(written, "bytes of a response"));
    }
}
