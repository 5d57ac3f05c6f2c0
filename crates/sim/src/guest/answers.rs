//! Checks of the answers to a guest.

use iomem::fits;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK};
use virtqueue::driver::WRITE;

use super::{Guest, Outstanding, State};
use crate::chain_request::ChainRequest;
use crate::content::SECTOR;
use crate::disk::RequestOutcome;
use crate::layout::AREA_BYTES;
use crate::request::{Kind, Request, serial};

impl Guest {
    /// Checks an answer. Returns the area as it is after the answer.
    pub(super) fn check_answer(
        &self,
        state: &mut State,
        outstanding: &Outstanding,
        len: u32,
        end: u64,
    ) -> Result<Vec<u8>, String> {
        let Outstanding { request, begin, .. } = outstanding;
        let (found, answer) = self.collect(outstanding)?;
        let message = request.message();
        let len: usize = fits(len, "a used length");
        if let ChainRequest::Command(command) = request {
            self.check_command(state, command, (*begin, end), len, &answer)?;
            return Ok(found);
        }
        let expected = if message.flaw.is_some() { 0 } else { message.writable };
        if len != expected {
            return Err(format!("the used length is {len}, not {expected}"));
        }
        match request {
            ChainRequest::Blk(request) => self.check_blk(request, &answer, *begin, end)?,
            ChainRequest::Function(function) => {
                self.check_function(state, function, (*begin, end), &answer)?;
            }
            ChainRequest::Event(_) => self.check_event(state, (*begin, end), &answer)?,
            ChainRequest::Command(_) => unreachable!("it was checked"),
        }
        Ok(found)
    }

    /// Returns the area, and the content of the buffers that the device may write. All remaining
    /// bytes must be as the guest left them.
    pub(super) fn collect(&self, outstanding: &Outstanding) -> Result<(Vec<u8>, Vec<u8>), String> {
        let Outstanding { pieces, area, image, .. } = outstanding;
        let found = self.area(*area);
        let mut memory = found.clone();
        let mut answer = Vec::new();
        for piece in pieces.iter().filter(|piece| piece.flags & WRITE != 0) {
            let from = fits::<_, usize>(piece.addr.wrapping_sub(*area), "an offset in an area");
            let Some(bytes) = memory.get_mut(from..from.wrapping_add(piece.len as usize)) else {
                continue;
            };
            answer.extend_from_slice(bytes);
            bytes.copy_from_slice(&image[from..from + bytes.len()]);
        }
        if memory != *image {
            return Err("the device wrote where it may not".into());
        }
        Ok((found, answer))
    }

    /// Checks the answer of a virtio-blk device.
    fn check_blk(
        &self,
        request: &Request,
        answer: &[u8],
        begin: u64,
        end: u64,
    ) -> Result<(), String> {
        let (status, data) = match answer.split_last() {
            Some((status, data)) => (u32::from(*status), data),
            None => (u32::MAX, answer),
        };
        self.trace(|| format!("request {} is answered: status {status}", request.id));
        let ending = match (request.status(), status) {
            (VIRTIO_BLK_S_OK, VIRTIO_BLK_S_OK) => RequestOutcome::Done,
            (VIRTIO_BLK_S_OK, VIRTIO_BLK_S_IOERR) => RequestOutcome::Failed,
            (expected, _) if expected == status => RequestOutcome::Refused,
            _ => return Err(format!("the status is {status}")),
        };
        let disk = &self.disks[0];
        disk.end(begin, end, ending, false)?;
        match request.kind {
            Kind::Read if ending == RequestOutcome::Done => {
                let ranges = &request.ranges;
                let sectors = ranges.iter().flat_map(|&(first, count)| first..first + count);
                for (sector, bytes) in sectors.zip(data.chunks(SECTOR)) {
                    disk.read(sector, bytes, begin, end)?;
                }
            }
            Kind::GetId if data != request.id_answer(&serial(self.device)) => {
                return Err(format!("the id is {data:?}"));
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks that an area has not changed since the answer to its last request.
    pub(super) fn check_unchanged(
        &self,
        left: &mut Option<Vec<u8>>,
        area: u64,
    ) -> Result<(), String> {
        let Some(left) = left.take() else { return Ok(()) };
        let now = self.area(area);
        match now.iter().zip(&left).position(|(now, left)| now != left) {
            Some(at) => Err(format!(
                "device {}: byte {at} of the area at {area:#x} was written after its answer",
                self.device
            )),
            None => Ok(()),
        }
    }

    /// The present content of an area.
    fn area(&self, area: u64) -> Vec<u8> {
        let mut bytes = vec![0; fits(AREA_BYTES, "the size of an area")];
        self.ram.read(area, &mut bytes).expect("areas are mapped");
        bytes
    }
}
