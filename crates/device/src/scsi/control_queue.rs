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
use virtqueue::Chain;

use super::address::{Address, UnitAddress};
use super::device::ScsiDevice;
use super::sense::Sense;
use super::task_set::{Abort, How, Which};
use crate::common::byte;
use crate::queue::Queue;
use crate::queue_task::Handler;
use crate::stats::RequestKind;

/// Of a request for task management: type, function, LUN, tag.
const FUNCTION_BYTES: usize = 24;
/// Of a request about asynchronous notification: type, LUN, events.
const NOTIFICATION_BYTES: usize = 16;

/// What serves the control queue.
pub(crate) struct Control {
    device: ScsiDevice,
}

/// Why a request is not carried out.
#[derive(Debug, thiserror::Error)]
enum ControlError {
    #[error("request type {0} of the control queue is not known")]
    Type(u32),
    #[error("a request of the control queue is incomplete")]
    Incomplete,
}

impl Control {
    pub(crate) fn new(device: &ScsiDevice) -> Self {
        Self { device: device.clone() }
    }

    /// Answers in bytes: those of the response.
    async fn execute(&self, mut readable: Buffers) -> Result<Vec<u8>, ControlError> {
        let kind = readable.take_front().ok_or(ControlError::Incomplete)?;
        match u32::from_le_bytes(kind) {
            VIRTIO_SCSI_T_TMF => {
                let rest = readable.take_front().ok_or(ControlError::Incomplete)?;
                Ok(vec![self.manage(rest).await])
            }
            VIRTIO_SCSI_T_AN_QUERY | VIRTIO_SCSI_T_AN_SUBSCRIBE => {
                let rest: Option<[u8; NOTIFICATION_BYTES - 4]> = readable.take_front();
                rest.ok_or(ControlError::Incomplete)?;
                // No event of that kind is ever sent.
                Ok(vec![0, 0, 0, 0, byte(VIRTIO_SCSI_S_OK)])
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
        let units = self.device.units().all();
        let has_target = units.keys().any(|unit| unit.target == address.target);
        let is_of_target = function == VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET;
        if !has_target {
            return byte(VIRTIO_SCSI_S_BAD_TARGET);
        }
        if !is_of_target && !units.contains_key(&address) {
            return byte(VIRTIO_SCSI_S_INCORRECT_LUN);
        }
        byte(self.carry_out(function, address, tag).await)
    }

    async fn carry_out(&self, function: u32, address: UnitAddress, tag: u64) -> u32 {
        let (aborted, reset) = (How::Abort(Abort::Aborted), How::Abort(Abort::Reset));
        let (which, how) = match function {
            VIRTIO_SCSI_T_TMF_ABORT_TASK => (Which::Task(address, tag), aborted),
            // One initiator is all there is.
            VIRTIO_SCSI_T_TMF_ABORT_TASK_SET | VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET => {
                (Which::Unit(address), aborted)
            }
            VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET => (Which::Unit(address), reset),
            VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET => (Which::Target(address.target), reset),
            VIRTIO_SCSI_T_TMF_QUERY_TASK => (Which::Task(address, tag), How::Look),
            VIRTIO_SCSI_T_TMF_QUERY_TASK_SET => (Which::Unit(address), How::Look),
            _ => return VIRTIO_SCSI_S_FUNCTION_REJECTED,
        };
        let covered = self.device.queues().cover(which, how);
        let found = poll_fn(|cx| covered.poll(cx)).await;
        if covered.has_lost() {
            // They may be carried out when their queue starts again.
            return VIRTIO_SCSI_S_FAILURE;
        }
        if how == How::Look && found > 0 {
            return VIRTIO_SCSI_S_FUNCTION_SUCCEEDED;
        }
        if how == reset {
            self.device.reset_units(which, function == VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET);
        }
        VIRTIO_SCSI_S_OK
    }
}

impl ScsiDevice {
    /// Units begin anew, and say so.
    fn reset_units(&self, which: Which, is_nexus: bool) {
        let sense = if is_nexus { Sense::NEXUS_LOST } else { Sense::UNIT_WAS_RESET };
        for unit in self.units().all().values().filter(|unit| which.covers_unit(unit.address)) {
            unit.reset(sense);
        }
    }
}

impl Handler for Control {
    async fn serve(self: Rc<Self>, queue: Rc<Queue>, chain: Chain) {
        let (head, writable) = (chain.head, chain.writable);
        if chain.fault.is_some() || writable.is_empty() {
            queue.push_unanswered(head);
            return;
        }
        let answer = match self.execute(chain.readable).await {
            Ok(answer) => {
                queue.count(RequestKind::Other, 0);
                answer
            }
            Err(error) => {
                queue.fail(RequestKind::Other, &error);
                vec![byte(VIRTIO_SCSI_S_FAILURE)]
            }
        };
        let written = writable.copy_from(0, &answer);
        queue.push(head, iomem::fits(written, "bytes of a response"));
    }
}
