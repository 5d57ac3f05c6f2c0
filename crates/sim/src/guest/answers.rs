//! What comes back: whether each answer is right, and whether all of them together are.

use iomem::fits;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK};
use virtqueue::driver::WRITE;

use super::{Guest, State};
use crate::blame::{self, Failed};
use crate::content::{SECTOR, describe, value_of};
use crate::failure::Failure;
use crate::history::History;
use crate::request::{Kind, Outstanding, serial};

impl Guest {
    pub(super) fn check_answer(
        &self,
        state: &mut State,
        outstanding: &Outstanding,
        len: u32,
        end: u64,
    ) -> Result<(), String> {
        let Outstanding { request, pieces, area, image, begin, writes } = outstanding;
        let mut memory = vec![0; image.len()];
        self.memory.read(*area, &mut memory).map_err(|error| error.to_string())?;
        let mut answer = Vec::new();
        for piece in pieces.iter().filter(|piece| piece.flags & WRITE != 0) {
            let from = fits::<_, usize>(piece.addr.wrapping_sub(*area), "an offset in an area");
            let Some(bytes) = memory.get_mut(from..from.wrapping_add(piece.len as usize)) else {
                continue;
            };
            answer.extend_from_slice(bytes);
            bytes.copy_from_slice(&image[from..from + bytes.len()]);
        }
        let status = answer.pop().map_or(u32::MAX, u32::from);
        self.trace(|| format!("request {} is answered: status {status}, length {len}", request.id));
        if memory != *image {
            return Err("the device wrote where it may not".into());
        }
        let expected = if request.unmapped { 0 } else { request.writable };
        if usize::try_from(len) != Ok(expected) {
            return Err(format!("the used length is {len}, not {expected}"));
        }
        let done = status == VIRTIO_BLK_S_OK;
        self.check_promise(state, outstanding, done, end)?;
        let since = state.write_through_since;
        for write in writes {
            // What was discarded may be there or not.
            let certain = done && request.kind != Kind::Discard;
            state.history.end_write(*write, end, certain, done && since < *begin);
        }
        if status != request.status() {
            if request.status() != VIRTIO_BLK_S_OK || status != VIRTIO_BLK_S_IOERR {
                return Err(format!("the status is {status}"));
            }
            let (kind, ranges) = (request.kind, request.ranges.clone());
            state.failed.push(Failed { kind, begin: *begin, end, ranges, answered: true });
            return Ok(());
        }
        match request.kind {
            Kind::Read => self.check_data(state, outstanding, &answer, end)?,
            Kind::Flush => state.history.flushed(*begin),
            Kind::GetId if answer != request.id_answer(&serial(self.device)) => {
                return Err(format!("the id is {answer:?}"));
            }
            _ => {}
        }
        Ok(())
    }

    /// Once a request was told that data was lost, none that begins later may be told that data is
    /// on stable storage: whether it is so, nobody knows.
    fn check_promise(
        &self,
        state: &mut State,
        outstanding: &Outstanding,
        done: bool,
        end: u64,
    ) -> Result<(), String> {
        let Some(lost_at) = self.world.lost_at(self.device) else { return Ok(()) };
        let Outstanding { request, begin, .. } = outstanding;
        if *begin < lost_at {
            state.loss_told = end;
            return Ok(());
        }
        let is_stable = match request.kind {
            Kind::Flush => true,
            Kind::Write | Kind::WriteZeroes => state.write_through_since < *begin,
            _ => false,
        };
        let mut others = state.queues.iter().flat_map(|queue| queue.outstanding.iter().flatten());
        let is_told = state.loss_told < *begin && !others.any(|other| other.begin < lost_at);
        if done && is_stable && is_told {
            return Err(format!("data was lost at {lost_at}, and this is said to be stable"));
        }
        Ok(())
    }

    fn check_data(
        &self,
        state: &mut State,
        outstanding: &Outstanding,
        data: &[u8],
        end: u64,
    ) -> Result<(), String> {
        let ranges = &outstanding.request.ranges;
        let sectors = ranges.iter().flat_map(|&(first, count)| first..first + count);
        for (sector, bytes) in sectors.zip(data.chunks(SECTOR)) {
            let value = value_of(bytes, sector)
                .ok_or_else(|| format!("sector {sector} {}", describe(bytes)))?;
            state.history.read(sector, value, outstanding.begin, end);
        }
        Ok(())
    }

    /// Whether the answers so far can be explained, errors included.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let State { history, queues, failed, .. } = &mut *self.state.borrow_mut();
        history.check()?;
        let end = self.world.tick();
        let outstanding = queues.iter().flat_map(|queue| queue.outstanding.iter().flatten());
        failed.extend(outstanding.map(|Outstanding { request, begin, .. }| {
            let (kind, ranges) = (request.kind, request.ranges.clone());
            Failed { kind, begin: *begin, end, ranges, answered: false }
        }));
        blame::check(&self.world.injected(self.device), failed)
    }

    /// Checks what is on the disk after the IoThreads have gone, and goes on from there. With
    /// `power_lost`, only what was on stable storage must be there.
    pub(crate) fn check_left(&self, power_lost: bool) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let mut left = Vec::new();
        for sector in 0..self.plan.sectors() {
            let bytes = self.world.content(self.device, sector);
            let value = value_of(&bytes, sector).ok_or_else(|| {
                Failure::new("lost data", format!("sector {sector} {}", describe(&bytes)))
            })?;
            state.history.check_left(left.len(), value, power_lost)?;
            left.push(value);
        }
        state.history = History::new(left.into_iter());
        Ok(())
    }
}
